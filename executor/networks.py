"""The networks of the examples, as a user would write them; each function gives the module and the shapes of a batch.

They are what `--model executor.networks:multiple_mix` names.
"""

from __future__ import annotations

import torch
from torch import nn

from executor.initial import no_init_parameters
from executor.losscell import MAELoss, WithLossCell
from executor.recompute import recompute

__all__ = ["DenseNetwork", "Example", "multiple_mix"]

Example = tuple[tuple[int, ...], str]
"""Shape and dtype of one input."""


class DenseNetwork(nn.Module):
    """Flatten, then three dense layers with relus between: 784-512-512-`num_outputs`."""

    def __init__(self, num_outputs: int = 1) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(512, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of a batch of images [N, 1, 28, 28]."""
        x = self.relu1(self.layer1(self.flatten(x)))
        x = self.relu2(self.layer2(x))
        return self.layer3(x)


def multiple_mix(batch_size: int = 32) -> tuple[nn.Module, tuple[Example, ...]]:
    """The hybrid-parallel case: mean absolute error on the digit itself, relus recomputed, nothing initialised yet."""
    with no_init_parameters():
        net = DenseNetwork()
    recompute(net.relu1)
    recompute(net.relu2)
    return WithLossCell(net, MAELoss()), (((batch_size, 1, 28, 28), "float32"), ((batch_size,), "int64"))
