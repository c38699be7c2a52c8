"""The loss among the results of a forward, in the forms that people return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from plans.errors import TwofoldError

__all__ = ["loss_of"]


def loss_of(results: Any, model: str) -> torch.Tensor:
    """The scalar loss of a forward.

    Args:
        results: what the forward returned: the loss, a tuple or list with one scalar (logits, loss), or a mapping or
            dataclass with an entry "loss".
        model: name of the module, for errors.

    Raises:
        TwofoldError: none of these.

    >>> loss_of((torch.zeros(4, 3), torch.tensor(0.5)), "Net")
    tensor(0.5000)
    """
    found = results
    if dataclasses.is_dataclass(results):
        found = getattr(results, "loss", None)
    elif isinstance(results, Mapping):
        found = results.get("loss")
    elif isinstance(results, tuple | list):
        scalars = [each for each in results if isinstance(each, torch.Tensor) and each.shape == ()]
        found = scalars[0] if len(scalars) == 1 else None
    if isinstance(found, torch.Tensor):
        return found
    raise TwofoldError(
        f"{model}.forward returns {_described(results)}; it must return the scalar loss: alone, as the only scalar of "
        f"a tuple, or as 'loss' of a dict. For a network without a loss: WithLossCell(net, loss_fn)"
    )


def _described(results: Any) -> str:
    if isinstance(results, Mapping):
        return f"a dict of {', '.join(map(repr, results))}"
    if isinstance(results, tuple | list):
        return f"{len(results)} values"
    return f"{type(results).__name__}"
