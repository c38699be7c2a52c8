"""What a rule knows beside its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from plans.layout import Layout

__all__ = ["Progress", "Rule", "Site", "torch_dtype"]

Rule = Callable[..., Any]
"""(site, attrs, *inputs) -> one tensor, or a tuple of them."""


@dataclass(slots=True)
class Progress:
    """How far training is; one object per rank, shared by all its sites. `step` counts from 1."""

    step: int = 0
    _told: tuple[int, torch.Tensor] | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """The step as a float32 scalar on a device, made once a step."""
        if self._told is None or self._told[0] != self.step or self._told[1].device != device:
            self._told = self.step, torch.full((), float(self.step), dtype=torch.float32, device=device)
        return self._told[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an instruction runs and what it makes.

    Args:
        rank: of the process.
        mesh: the mesh that axes in the instruction's attrs belong to.
        shape: local shape of the first output.
        dtype: of the first output, such as "float32".
        shares: whether the first output lives in an input's memory.
        progress: the rank's step count.
        micro_batch: the number of the micro-batch.
        device: where tensors live, for rules that read none.
    """

    rank: int
    mesh: Layout
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    shares: bool = False
    progress: Progress = field(default_factory=Progress)
    micro_batch: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch form of `dtype`."""
        return torch_dtype(self.dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The torch form of a dtype's name.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found
