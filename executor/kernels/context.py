"""What a kernel rule gets beside its inputs: the rank, its mesh, the shape and dtype to make, the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from plans.layout import Layout

__all__ = ["OpContext", "Rule", "StepCounter", "torch_dtype"]

Rule = Callable[..., Any]
"""(context, attrs, *inputs) -> one tensor, or a tuple of them."""


@dataclass(slots=True)
class StepCounter:
    """The number of the training step, from 1; one object per rank, shared by all its contexts."""

    step: int = 0
    _on_device: tuple[int, torch.Tensor] | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """The step as a float32 scalar on a device, made once a step."""
        if self._on_device is None or self._on_device[0] != self.step or self._on_device[1].device != device:
            self._on_device = self.step, torch.full((), float(self.step), dtype=torch.float32, device=device)
        return self._on_device[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """Where an instruction runs and what it makes.

    Args:
        rank: of the process.
        mesh: the mesh that axes in the instruction's attrs belong to.
        shape: local shape of the first output.
        dtype: of the first output, such as "float32".
        shares: whether the first output lives in an input's memory.
        counter: the rank's step count.
        micro_batch: the number of the micro-batch.
        device: where tensors live, for rules that read none.
    """

    rank: int
    mesh: Layout
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    shares: bool = False
    counter: StepCounter = field(default_factory=StepCounter)
    micro_batch: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch.dtype."""
        return torch_dtype(self.dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The torch form of a dtype's name.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found
