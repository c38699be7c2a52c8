"""The WAITs of tensors that are sent to other stages.

A WAIT for a send is placed where the arrival of the tensor is proven (`plans.schedules.arrivals`), in a separate block
after an action, and releases the tensor. A tensor that its own stage reads again is released after the last action that
reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from plans.lower.chunk_plan import StageBoundary
from plans.program import Block, Body, Instruction, Kind, Value
from plans.schedules import Schedule
from plans.schedules.arrivals import release_rows

__all__ = ["ReleasePlaces", "SentBody", "sent_bodies"]

_Ints = npt.NDArray[np.int64]


class SentBody(NamedTuple):
    """The WAITs for what an action sends on one channel.

    Args:
        body: the WAITs.
        read_by: the kinds of later actions of the stage that use the memory of the tensor.
    """

    body: Body
    read_by: frozenset[str]


def sent_bodies(
    bodies: Sequence[tuple[str, Sequence[Instruction]]], values: Mapping[str, Value]
) -> dict[str, tuple[list[Instruction], frozenset[str]]]:
    """Channel to another stage -> the WAITs for its sends, and the kinds of later bodies that read the sent tensors.

    Args:
        bodies: (kind of action, instructions) of the bodies that follow each other for one micro-batch.
        values: of the group.
    """
    found: dict[str, tuple[list[Instruction], frozenset[str]]] = {}
    for number, (_, body) in enumerate(bodies):
        for line in body:
            if not is_sent_away(line):
                continue
            memory = {_memory(name, values) for name in line.inputs}
            read_by = {
                kind for kind, other in bodies[number + 1 :]
                if any(_memory(name, values) in memory for own in other for name in (*own.inputs, *own.outputs))
            }  # fmt: skip
            waits, before = found.get(line.channel, ([], frozenset()))
            wait = Instruction(name=f"{line.token}.wait", kind=Kind.WAIT, call="wait", part="C", waits=line.token)
            found[line.channel] = [*waits, wait], before | read_by
    return found


def is_sent_away(line: Instruction) -> bool:
    """Whether an instruction sends a tensor to another stage."""
    return line.kind is Kind.SEND and ":within" not in line.channel


def _memory(name: str, values: Mapping[str, Value]) -> str:
    """The value that owns the memory of a value."""
    while (shared := values[name].shares) is not None:
        name = shared
    return name


class ReleasePlaces:
    """Where in the order of its rank each sent tensor is released.

    Args:
        schedule: of the plan.
        borders: the tensors that cross between stages.
        pairs: per rank the places of the first actions of pairs that run at once.
    """

    def __init__(self, schedule: Schedule, borders: Sequence[StageBoundary], pairs: Sequence[Collection[int]]) -> None:
        table = schedule.table
        self._schedule = schedule
        self._first_row = table.rank_start
        self._row_of = np.full((4, schedule.num_stages, schedule.num_micro_batches), -1, dtype=np.int64)
        self._row_of[table.kind, table.stage, table.micro_batch] = np.arange(len(table.stage))
        backward = np.maximum(self._row_of[1], self._row_of[2])  # whole, or of the input
        ways = {border.channel(): (self._row_of[0], border.from_stage, border.to_stage) for border in borders}
        ways |= {
            border.channel(gradient=True): (backward, border.to_stage, border.from_stage)
            for border in borders if border.trained
        }  # fmt: skip
        self._stage = {channel: here for channel, (_, here, _) in ways.items()}
        self._senders = {channel: rows[here] for channel, (rows, here, _) in ways.items()}
        receivers = [rows[there] for rows, _, there in ways.values()]
        begins = [self._first_row[rank] + place for rank, places in enumerate(pairs) for place in places]
        self._released: dict[str, _Ints] = {}
        if ways:
            released = release_rows(
                schedule, np.concatenate(list(self._senders.values())), np.concatenate(receivers), begins
            )
            self._released = dict(zip(ways, np.split(released, len(ways)), strict=True))

    def blocks(self, rank: int, sent: Mapping[str, SentBody]) -> dict[int, list[Block]]:
        """Position in the order of a rank -> the blocks after its action; position -1: after the end of the step.

        Args:
            rank: a pipeline rank.
            sent: by channel, of all its chunks.
        """
        order, first = self._schedule.order[rank], int(self._first_row[rank])
        every = [
            (sender, micro_batch, released, own.body)
            for channel, own in sent.items()
            for micro_batch, (sender, released) in enumerate(
                zip(self._senders[channel].tolist(), self._rows(channel, own.read_by).tolist(), strict=True)
            )
        ]
        found: dict[int, list[Block]] = {}
        for sender, micro_batch, released, body in sorted(every, key=lambda each: each[:2]):
            block = Block(label=f"{order[sender - first]}.sent", micro_batch=micro_batch, body=body)
            found.setdefault(released - first if released >= 0 else -1, []).append(block)
        return found

    def _rows(self, channel: str, read_by: frozenset[str]) -> _Ints:
        """Per micro-batch the row after which a tensor is released, -1 for the end of the step."""
        rows = self._released[channel]
        for kind in read_by:
            again = self._row_of["FBIW".index(kind), self._stage[channel]]
            rows = np.where(rows >= 0, np.maximum(rows, again), rows)
        return rows
