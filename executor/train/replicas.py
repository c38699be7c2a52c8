"""Compares values that must be equal on several ranks: losses, input rows, and parts of weights and optimizer states.

A collective returns the same bits to all of its members, so copies of a weight are equal bit for bit as long as every
rank follows the program. The comparison finds ranks that received other data, whose memory changed, or whose kernels
are not deterministic. A part that only one rank keeps cannot be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.step.interpreter import Batch, Interpreter
from executor.train.settings import Replicas
from executor.weights.parts import STEP_CHECK, holders, kept
from plans.errors import TrainingStopped
from plans.plan import Plan
from plans.program import Program

__all__ = ["ReplicaCheck", "checksum"]

_CHUNK = 1 << 18
_EVEN = 0x1E3779B97F4A7C16  # from the digits of the golden ratio
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaCheck:
    """Compares copies between the ranks of a program; all of them have one and call it after the same steps.

    Args:
        program: program of all ranks.
        plan: the plan, which determines whether every rank reads full batches; None is yes.
        interpreter: of this rank.
        asked: how often, and what follows.
        steps: steps of the run in all; the last one is always looked at.
    """

    def __init__(
        self, program: Program, plan: Plan | None, interpreter: Interpreter, asked: Replicas, steps: int
    ) -> None:
        self._interpreter, self._asked, self._steps = interpreter, asked, steps
        copies = holders(program)
        self._parts = [
            (part.key, f"{_role(part.role)} of {part.name!r}", value)
            for placement, part, value in kept(interpreter)
            if len(copies[part.place]) > 1
        ]
        self._rows = "" if plan is None or plan.full_batch else _rows_of(plan, interpreter.rank)

    def after(self, done: int, batch: Batch, loss: Tensor | None) -> None:
        """Compare, if a comparison is due after `done` steps.

        Args:
            done: steps in all.
            batch: the one that this rank was fed last.
            loss: of the last step, where this rank knows it.

        Raises:
            TrainingStopped: copies differ, raised on every rank.
        """
        if done % self._asked.every and done != self._steps:
            return
        mine = {key: (what, checksum(tensor)) for key, what, tensor in self._held(batch, loss)}
        found: list[dict[Hashable, tuple[str, int]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
        if (message := difference(found)) is None:
            return
        text = f"the ranks have diverged: after step {done} {message}"
        if self._asked.then == "stop":
            raise TrainingStopped(
                f"{text}; resume from a checkpoint before this step, and check this rank's data and device"
            )
        if self._interpreter.rank == 0:
            print(f"warning: {text}", flush=True)

    def _held(self, batch: Batch, loss: Tensor | None) -> Iterator[tuple[str, str, Tensor]]:
        for name, array in batch.items():
            yield f"input|{name}|{self._rows}", f"input {name!r}", torch.as_tensor(array)
        if loss is not None:
            yield "loss", "the loss", loss
        for key, what, value in self._parts:
            yield key, what, self._interpreter.value(value)
        for placement in self._interpreter.group.changed:
            if placement.shard is None and placement.master is not None:
                key = f"{placement.name}|{placement.layout.region(self._interpreter.rank, placement.shape)}"
                yield key, f"weight of {placement.name!r}", self._interpreter.value(placement.weight)


def difference(found: list[dict[Any, tuple[str, int]]]) -> str | None:
    """The first difference between ranks, in words; None if there is none.

    Args:
        found: of every rank: key -> what it is, and its checksum. Ranks that share a key hold copies.

    >>> difference([{"w": ("w", 1)}, {"w": ("w", 2)}, {"w": ("w", 1), "v": ("v", 5)}])
    'w is another on rank 1 than on 2 other ranks'
    """
    for key in dict.fromkeys(key for each in found for key in each):
        holding = {rank: each[key] for rank, each in enumerate(found) if key in each}
        counts = Counter(number for _, number in holding.values())
        if len(counts) == 1:
            continue
        most = max(counts.values())
        usual = next(number for _, number in holding.values() if counts[number] == most)
        odd = [rank for rank, (_, number) in holding.items() if number != usual]
        alike = [rank for rank, (_, number) in holding.items() if number == usual]
        names = ("rank " if len(odd) == 1 else "ranks ") + ", ".join(map(str, odd[:16]))
        others = f"rank {alike[0]}" if len(alike) == 1 else f"{len(alike)} other ranks"
        return f"{holding[odd[0]][0]} is another on {names} than on {others}"
    return None


def checksum(tensor: Tensor) -> int:
    """64 bits that follow from the bits of all elements and their places, computed where the tensor is.

    The elements' bits are summed modulo 2^64, each times an odd number of its place. An odd number has an inverse, so
    a change of one element always changes the sum.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([2.0, 1.0]))
    False
    """
    with torch.inference_mode():
        flat = tensor.detach().contiguous().reshape(-1)
        bits = flat.view(_INTEGERS[flat.element_size()]) if flat.numel() else flat.to(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for first in range(0, bits.numel(), _CHUNK):
            some = bits[first : first + _CHUNK].to(torch.int64)
            places = torch.arange(first, first + some.numel(), dtype=torch.int64, device=bits.device)
            total += places.mul_(_EVEN).add_(1).mul_(some).sum()
        return int(total.item())


def _role(role: str) -> str:
    return {"weight": "weight", STEP_CHECK: "step check"}.get(role, "optimizer state")


def _rows_of(plan: Plan, rank: int) -> str:
    mesh = next(stage.mesh for stage in plan.stages if rank in stage.mesh.rank_list)
    return f"{mesh.rank_list.index(rank)}/{mesh.num_ranks}"
