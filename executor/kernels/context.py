"""The context of a kernel besides its inputs: the rank, its mesh, the output's shape and dtype, the step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from plans.layout import Layout

__all__ = ["OpContext", "Rule", "StepCounter", "torch_dtype"]

Rule = Callable[..., Any]
"""(context, attrs, *inputs) -> one tensor, or a tuple of them."""


@dataclass(slots=True, eq=False)
class _Table:
    """Numbers of one dtype in one tensor; `views` are its elements, which stay where they are once a step is over."""

    tensor: torch.Tensor
    of: list[tuple[Callable[..., float], tuple[Hashable, ...]]] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class StepCounter:
    """The number of the training step, from 1, and what follows from it; one object per rank, shared by its contexts.

    A step that was recorded is replayed with other numbers than those it was recorded with. So a rule that depends on
    the step or on the learning rate reads tensors of the device (`number`), which `begin` fills before every step. Only
    the first step, which is never recorded, may be told apart by `step`.

    Args:
        step: 0 before the first.
        learning_rate: of this step; None leaves that of the instruction.
        is_recording: a step is being recorded, which must not request a number that no earlier step requested.
    """

    step: int = 0
    learning_rate: float | None = None
    is_recording: bool = False
    _tables: dict[tuple[torch.dtype, torch.device], _Table] = field(default_factory=dict)
    _index: dict[Hashable, tuple[_Table, int]] = field(default_factory=dict)

    def begin(self, learning_rate: float | None = None) -> None:
        """Count one step, and copy its numbers to the device, with one copy per dtype."""
        self.step += 1
        self.learning_rate = learning_rate
        for (dtype, _), table in self._tables.items():
            values = [of(self, *arguments) for of, arguments in table.of]
            table.tensor[: len(values)].copy_(torch.tensor(values, dtype=dtype), non_blocking=True)

    def number(
        self, of: Callable[..., float], arguments: tuple[Hashable, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A scalar of this step on a device; its address is the same in every step after the one that asked first.

        Args:
            of: a function of a module, called with this counter and `arguments`.
            arguments: what else it depends on, the same in every step.
            dtype: dtype of the scalar.
            device: where it is read.

        >>> counter = StepCounter()
        >>> counter.begin()
        >>> times = lambda now, factor: factor * now.step
        >>> twice = counter.number(times, (2,), torch.float32, torch.device("cpu"))
        >>> counter.begin()
        >>> float(twice)
        4.0
        """
        key = (of, arguments, dtype, device)
        found = self._index.get(key)
        if found is None:
            found = self._index[key] = self._added(of, arguments, dtype, device)
        table, at = found
        return table.views[at]

    def _added(
        self, of: Callable[..., float], arguments: tuple[Hashable, ...], dtype: torch.dtype, device: torch.device
    ) -> tuple[_Table, int]:
        if self.is_recording:
            raise RuntimeError(
                "a step draws a random number that no earlier step drew; in a recording it would never change"
            )
        table = self._tables.get((dtype, device))
        if table is None:
            table = self._tables[dtype, device] = _Table(torch.zeros(_ROOM, dtype=dtype, device=device))
        at = len(table.of)
        if at == len(table.tensor):  # views that were handed out keep the numbers of the step that asked for them
            table.tensor = torch.cat([table.tensor, torch.zeros_like(table.tensor)])
            table.views = [table.tensor[place] for place in range(at)]
        table.of.append((of, arguments))
        table.views.append(table.tensor[at])
        table.views[at].fill_(of(self, *arguments))
        return table, at


_ROOM = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """The place of an instruction and its output.

    Args:
        rank: rank of the process.
        mesh: the mesh that axes in the instruction's attrs belong to.
        shape: local shape of the first output.
        dtype: dtype of the first output, such as "float32".
        shares: whether the first output lives in an input's memory.
        counter: the rank's step count.
        micro_batch: the number of the micro-batch.
        device: where tensors live, for rules that read none.
        can_assert: whether the device itself ends the run where a condition does not hold, without the host waiting.
    """

    rank: int
    mesh: Layout
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    shares: bool = False
    counter: StepCounter = field(default_factory=StepCounter)
    micro_batch: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    can_assert: bool = True

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch.dtype."""
        return torch_dtype(self.dtype)


@cache
def torch_dtype(name: str) -> torch.dtype:
    """The torch form of a dtype's name.

    >>> torch_dtype("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found
