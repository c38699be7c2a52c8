"""The work of a pipeline rank in a forecast, computed once for all configurations that share it.

Chunks that are lowered apart are lowered and priced once for all ranks that have them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from plans.schedules import Schedule
from simulator.channels import pair_rates
from simulator.estimate.chunk import Chunk
from simulator.estimate.pieces import PricedPieces
from simulator.forecast.body import opened
from simulator.forecast.held import ChunksMemory
from simulator.forecast.parts import RankWalk
from simulator.forecast.rank import RankBodies
from simulator.forecast.rank_memory import RankMemory
from simulator.forecast.symbolic import (
    LoweredChunks,
    PricedChunks,
    Wanted,
    bodies_of_rank,
    chunks_together,
    lowered_chunks,
    priced_chunks,
)
from simulator.result import Forecast

__all__ = ["PipelineRank", "RankKey", "pipeline_rank"]


@dataclass(frozen=True, slots=True)
class RankKey:
    """A key of the facts that the bodies of a rank, or of some of its chunks, depend on; equal for configurations that
    differ only in other facts."""

    costs: PricedPieces
    chunks: tuple[Chunk, ...]
    wanted: tuple[Wanted, ...]

    @property
    def lowered(self) -> tuple[object, ...]:
        """Facts that the lowered bodies depend on."""
        degrees = self.costs.degrees
        return (
            self.costs.config, degrees.dp, degrees.tp, degrees.cp, degrees.ep, degrees.strides, degrees.num_ranks,
            degrees.sequence_parallel, degrees.recompute, degrees.optimizer, degrees.fused,
            self.chunks, self.wanted, degrees.num_micro_batches == 1,
        )  # fmt: skip

    @property
    def priced(self) -> tuple[object, ...]:
        """Facts that their prices depend on."""
        return (*self.lowered, self.costs.degrees.micro_batch, self.costs.machine)


class RankChunks:
    """The bodies of chunks that are lowered together, wherever ranks have them."""

    def __init__(self, key: RankKey, lowered: LoweredChunks) -> None:
        self._key = key
        self._lowered = lowered
        self.memory = ChunksMemory(lowered, key.costs.pieces, key.costs.sizes.arrival_bytes)

    @cached_property
    def priced(self) -> PricedChunks:
        """The operations with their work alone."""
        return priced_chunks(self._key.costs, self._key.chunks, self._lowered)


class PipelineRank:
    """The bodies of one pipeline rank, and what follows from them.

    Attributes:
        number: identifies the rank; no other rank of this process has it.
        forecasts: of pipelines that begin with this rank.
    """

    _numbers = itertools.count()

    def __init__(self, key: RankKey, parts: Sequence[tuple[RankChunks, int]]) -> None:
        self.number = next(self._numbers)
        self._machine = key.costs.machine
        self._parts = parts
        self.walk = RankWalk()
        self.forecasts: dict[tuple[object, ...], Forecast] = {}
        self._bodies: dict[int, RankBodies] = {}
        self._peaks: dict[tuple[Schedule, tuple[int, ...], bool], tuple[int, dict[str, int]]] = {}
        self._memory = RankMemory([(part.memory, count) for part, count in parts], key.costs.sizes.arrival_bytes)

    @cached_property
    def undisturbed(self) -> RankBodies:
        """The bodies with the work of each operation alone."""
        return bodies_of_rank([part.priced for part, _ in self._parts])

    @cached_property
    def _opened_ps(self) -> int:
        """The end of the last gather that opens a step, from its start."""
        return max(opened(self.undisturbed.begin).ends_ps.values(), default=0)

    def bodies(self, arrival_ps: int) -> RankBodies:
        """The bodies with compute and communication slowed by each other.

        Args:
            arrival_ps: of its first tensor, from the start of a step.
        """
        key = min(arrival_ps, self._opened_ps)  # later arrivals make no difference
        if key not in self._bodies:
            self._bodies[key] = self.undisturbed.slowed(pair_rates(self._machine), key)
        return self._bodies[key]

    def peak(self, schedule: Schedule, stages: tuple[int, ...], posts_ahead: bool) -> tuple[int, dict[str, int]]:
        """The peak of its memory in bytes, and the bytes of each role then."""
        key = schedule, stages, posts_ahead
        if key not in self._peaks:
            self._peaks[key] = self._memory.peak(schedule, stages, posts_ahead=posts_ahead)
        return self._peaks[key]

    @property
    def kept_bytes(self) -> int:
        """Weights and optimizer states from step to step."""
        return sum(size for role, size in self._memory.kept.items() if role in ("weight", "optimizer"))

    def num_operations(self, counts: Mapping[tuple[int, str], int]) -> int:
        """Kernels, collectives, sends and waits of a step; `counts` as of `counts_of_variants`."""
        own = self.undisturbed
        return len(own.begin) + len(own.end) + sum(count * len(own.action(*key)) for key, count in counts.items())


_MOST = 256
"""Entries of each kind that are kept, of at most about 0.5 MB; searches on up to 128 GPUs make fewer than a hundred."""

_RANKS: dict[tuple[object, ...], PipelineRank] = {}
_CHUNKS: dict[tuple[object, ...], RankChunks] = {}
_LOWERED: dict[tuple[object, ...], LoweredChunks] = {}

Made = TypeVar("Made")


def _once(known: dict[tuple[object, ...], Made], key: tuple[object, ...], make: Callable[[], Made]) -> Made:
    """What was made for a key; of too many, the first that was made is forgotten."""
    found = known.get(key)
    if found is None:
        found = make()
        if len(known) >= _MOST:
            del known[next(iter(known))]
        known[key] = found
    return found


def pipeline_rank(key: RankKey) -> PipelineRank:
    """The same object for configurations in which the rank does the same."""
    return _once(_RANKS, key.priced, lambda: _rank(key))


def _rank(key: RankKey) -> PipelineRank:
    parts = [
        replace(key, chunks=key.chunks[own], wanted=key.wanted[own]) for own in chunks_together(key.costs, key.chunks)
    ]
    return PipelineRank(key, [(_chunks(part), len(part.chunks)) for part in parts])


def _chunks(key: RankKey) -> RankChunks:
    def lowered() -> LoweredChunks:
        return lowered_chunks(key.costs, key.chunks, key.wanted)

    return _once(_CHUNKS, key.priced, lambda: RankChunks(key, _once(_LOWERED, key.lowered, lowered)))
