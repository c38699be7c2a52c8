"""A network with its loss as one module, with MindSpore's names and semantics."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from plans.errors import TwofoldError

__all__ = ["MAELoss", "WithLossCell"]


class WithLossCell(nn.Module):
    """A network and its loss: takes a batch (data, label) and returns the scalar loss.

    The submodules of the network are named "_backbone.layer1" and so on, as in a `stage_config`.

    Args:
        backbone: data -> prediction.
        loss_fn: (prediction, label) -> scalar; a module such as `MAELoss()` or `nn.CrossEntropyLoss()`.

    >>> cell = WithLossCell(nn.Linear(4, 1), MAELoss())
    >>> cell(torch.zeros(2, 4), torch.ones(2)).shape
    torch.Size([])
    """

    def __init__(self, backbone: nn.Module, loss_fn: nn.Module) -> None:
        """Refuse arguments that are not modules: torch.export finds only the names of modules."""
        super().__init__()
        for what, given in (("backbone", backbone), ("loss_fn", loss_fn)):
            if not isinstance(given, nn.Module):
                raise TwofoldError(f"WithLossCell needs a torch.nn.Module as {what}, not {given!r}")
        self._backbone = backbone
        self._loss_fn = loss_fn

    def forward(self, data: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        """Compute the scalar loss of a batch."""
        return self._loss_fn(self._backbone(data), label)


class MAELoss(nn.Module):
    """The mean absolute error |logits - labels|, over all elements.

    Labels are cast to the dtype of the logits and reshaped to their shape, which needs the same batch and number of
    elements. Plain broadcasting would compare (B,) with (B, 1) as (B, B).

    Raises:
        TwofoldError: the shapes do not match.

    >>> MAELoss()(torch.tensor([[1.0], [4.0]]), torch.tensor([0, 1])).item()
    2.0
    """

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the scalar loss."""
        if logits.shape != labels.shape:
            if logits.shape[:1] != labels.shape[:1] or logits.numel() != labels.numel():
                raise TwofoldError(
                    f"MAELoss compares logits {tuple(logits.shape)} with labels {tuple(labels.shape)}; they need "
                    f"the same batch and the same number of elements"
                )
            labels = labels.reshape(logits.shape)
        return functional.l1_loss(logits, labels.to(logits.dtype))
