"""Counts the collectives and messages that a rank executes, and compares them with the program.

The counter sits below everything of this package: a dispatch mode sees each operation of torch's c10d library with its
tensors and its process group. It does not know instructions. It slows every torch call down, so use it for a separate
step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from executor.dispatch import EagerMode
from plans.model.graph import itemsize
from plans.program import Instruction, Kind, Program

__all__ = ["Communication", "compare", "counted", "planned_collectives"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Communication:
    """One collective, or one message to or from a peer, as one rank sees it.

    Args:
        kind: all_reduce, all_gather, reduce_scatter, all_to_all, send or recv; for others the name that c10d has.
        num_bytes: number of bytes of the larger of what goes in and what comes out on this rank.
        ranks: the members, ascending; for a message the sender and the receiver.
    """

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} of {self.num_bytes} bytes on ranks {list(self.ranks)}"


_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
}


class _Counter(EagerMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[Communication] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen[_communication(func._schema.name.split("::")[1], args)] += 1
        return func(*args, **(kwargs or {}))


def _communication(name: str, args: tuple[Any, ...]) -> Communication:
    tensors: list[torch.Tensor] = []
    group: Any = None
    for argument in args:
        if isinstance(argument, torch.Tensor):
            tensors.append(argument)
        elif isinstance(argument, list | tuple):
            tensors.extend(tensor for tensor in argument if isinstance(tensor, torch.Tensor))
        elif group is None and isinstance(argument, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(argument)
    ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    kind = _KINDS.get(name, name)
    if kind in ("send", "recv"):
        me, peer = dist.get_rank(), dist.get_global_rank(group, args[2])
        ranks = (me, peer) if kind == "send" else (peer, me)
    return Communication(kind=kind, num_bytes=max((tensor.nbytes for tensor in tensors), default=0), ranks=ranks)


@contextmanager
def counted() -> Iterator[Counter[Communication]]:
    """Count everything that this thread issues inside the `with`.

    >>> with counted() as executed:  # doctest: +SKIP
    ...     interpreter.step(batch)
    """
    mode = _Counter()
    with mode:
        yield mode.seen


def planned_collectives(program: Program, rank: int) -> Counter[Communication]:
    """The communication of a rank in one step of the program.

    Collectives of one member and transfers of a rank to itself do not count as communication. The pieces for one peer
    travel as one message. Flattened tensors travel padded to equal shards.
    """
    group = program.group_of(rank)
    planned: Counter[Communication] = Counter()
    for instruction in (instruction for _, instruction in program.walk(rank)):
        if instruction.kind is Kind.COLLECTIVE:
            members = group.members(instruction, rank)
            if len(members) > 1:
                values = [group.values[name].span_bytes for name in (*instruction.inputs, *instruction.outputs)]
                num_bytes = instruction.message_bytes
                if instruction.call.endswith("_flat"):
                    num_bytes = len(members) * min(values)
                kind = instruction.call.removesuffix("_flat")
                planned[Communication(kind=kind, num_bytes=num_bytes, ranks=tuple(sorted(members)))] += 1
        elif instruction.kind in (Kind.SEND, Kind.RECV):
            planned.update(_messages(instruction, rank))
    return planned


def _messages(instruction: Instruction, rank: int) -> Iterable[Communication]:
    sends, item_bytes = instruction.kind is Kind.SEND, itemsize(instruction.dtype)
    return [
        Communication(kind="send" if sends else "recv", num_bytes=elements * item_bytes, ranks=pair)
        for pair, elements in instruction.pieces.pairs.items()
        if pair[0 if sends else 1] == rank
    ]


def compare(planned: Mapping[Communication, int], executed: Mapping[Communication, int], rank: int) -> list[str]:
    """The differences as text, one line each; empty if exactly the planned communication was executed.

    >>> one = Communication(kind="all_reduce", num_bytes=4, ranks=(0, 1))
    >>> compare({one: 2}, {one: 1}, rank=0)
    ['rank 0: all_reduce of 4 bytes on ranks [0, 1] planned 2 times, executed 1 times']
    """
    return [
        f"rank {rank}: {call} planned {planned.get(call, 0)} times, executed {executed.get(call, 0)} times"
        for call in sorted(set(planned) | set(executed))
        if planned.get(call, 0) != executed.get(call, 0)
    ]
