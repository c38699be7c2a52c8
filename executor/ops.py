"""Operators as modules, so that a network can name them and `shard` can set the strategy of each.

self.matmul1 = ops.MatMul()
...
net.matmul1.shard((layout("mp", ("sp", "dp")), layout(("sp", "dp"), "None")))
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from executor.fitting import Form
from executor.sharding import shard

__all__ = ["Add", "Flatten", "GeLU", "MatMul", "Mul", "Operator", "ReLU", "SiLU"]

OperatorT = TypeVar("OperatorT", bound="Operator")


class Operator(nn.Module):
    """A module that is one operator, without parameters."""

    def shard(self: OperatorT, in_strategy: object, out_strategy: object = None) -> OperatorT:
        """Set the strategy of the operator, like `executor.sharding.shard`; returns itself."""
        return shard(self, in_strategy, out_strategy)


class MatMul(Operator):
    """x @ w; operands x [.., k] and w [k, n].

    >>> MatMul()(torch.ones(2, 3), torch.ones(3, 4)).shape
    torch.Size([2, 4])
    """

    form = Form.PRODUCT

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Multiply: x [.., k], w [k, n] -> [.., n]."""
        return torch.matmul(x, w)


class ReLU(Operator):
    """Rectifier: max(x, 0)."""

    form = Form.ELEMENTWISE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to every element."""
        return functional.relu(x)


class GeLU(Operator):
    """Gaussian error linear unit: x Phi(x), Phi the normal distribution function."""

    form = Form.ELEMENTWISE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to every element."""
        return functional.gelu(x)


class SiLU(Operator):
    """Sigmoid linear unit: x sigmoid(x)."""

    form = Form.ELEMENTWISE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply it to every element."""
        return functional.silu(x)


class Add(Operator):
    """Sum x + y with broadcasting."""

    form = Form.BROADCAST

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Apply it to every element."""
        return torch.add(x, y)


class Mul(Operator):
    """Elementwise product x y with broadcasting."""

    form = Form.BROADCAST

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Apply it to every element."""
        return torch.mul(x, y)


class Flatten(Operator):
    """Flatten all dims but the first: [n, ..] -> [n, product of the others]."""

    form = Form.FLATTEN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, ..] as [N, product of the others]."""
        return torch.flatten(x, 1)
