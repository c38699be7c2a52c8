"""What stands around the strategies: stages with boundaries and widths, and micro-batches; and what of it is searched.

Beams: boundaries lie at no more than 12 places, those with few bytes across among even parts of the work; up to 4
stages where their number is searched; no more than 12 different widths; micro-batches up to 32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plans.model.graph import Graph
from search.operators.stages import balanced_cuts

__all__ = ["Option", "PipelineShape", "ShapeSpace", "ranks_of"]

_MAX_CUTS, _MAX_WIDTHS, _MAX_STAGES, _MAX_MICRO_BATCHES = 12, 12, 4, 32
_MAX_COMBINATIONS = 200_000

Option = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Micro-batches, where the second and later stages begin (none where stages are given), and widths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """Stages with their operators and numbers of devices, and the number of micro-batches."""

    names: tuple[tuple[str, ...], ...]
    widths: tuple[int, ...]
    num_micro_batches: int

    def __str__(self) -> str:
        stages = " + ".join(map(str, self.widths))
        return f"{stages} devices, {self.num_micro_batches} micro-batches"


def ranks_of(widths: Sequence[int]) -> list[range]:
    """The ranks of every stage, one stage after the other.

    >>> ranks_of((2, 1))
    [range(0, 2), range(2, 3)]
    """
    ends = list(itertools.accumulate(widths))
    return [range(end - width, end) for end, width in zip(ends, widths, strict=True)]


@dataclass(slots=True)
class ShapeSpace:
    """The shapes of a question.

    Args:
        graph: of the whole batch.
        num_devices: at most.
        stages: the operators of every stage, where they are given.

    `crossing_bytes` has for every operator what goes from before it to it or behind it.

    >>> from plans.model.mlp import mlp_graph
    >>> space = ShapeSpace(mlp_graph([8, 8, 8], 4), 2, None)
    >>> found = space.options(2, "even", 1, interleave=1, weights=lambda: [1.0] * len(space.graph.operators))
    >>> len(found) == len(space.graph.operators) - 1, str(space.shape(found[0]))
    (True, '1 + 1 devices, 1 micro-batches')
    """

    graph: Graph
    num_devices: int
    stages: tuple[tuple[str, ...], ...] | None
    crossing_bytes: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.crossing_bytes = _crossing_bytes(self.graph)

    def options(
        self,
        num_stages: int | None,
        widths: str | Sequence[int] | None,
        num_micro_batches: int | None,
        *,
        interleave: int,
        weights: Callable[[], Sequence[float]],
    ) -> list[Option]:
        """Every (micro-batches, boundaries, widths) of the space; `weights`: the work of every operator, if asked."""
        counts = [num_micro_batches] if num_micro_batches is not None else [
            count for count in range(1, _MAX_MICRO_BATCHES + 1) if self.graph.batch_size % (count * interleave) == 0
        ]  # fmt: skip
        if self.stages is not None:
            num_stages = len(self.stages)
        most = min(_MAX_STAGES, self.num_devices, len(self.graph.operators))
        found = []
        cuts = self._cuts(weights) if self.stages is None else []
        for number in [num_stages] if num_stages is not None else range(1, most + 1):
            offered = self._widths(number, widths)
            inner = [()] if self.stages is not None else list(itertools.combinations(cuts, number - 1))
            if len(inner) * len(offered) * len(counts) > _MAX_COMBINATIONS:  # as even as may be, and their neighbours
                even = balanced_cuts(weights(), number)
                inner = [tuple(start for start, _ in even[1:])]
            found += [(count, inside, each) for count in counts for inside in inner for each in offered]
        return found

    def shape(self, option: Option) -> PipelineShape:
        """Of one of the options."""
        count, _, widths = option
        names = tuple(self.segment(*self.ends(option, stage)) for stage in range(len(widths)))
        return PipelineShape(names=names, widths=widths, num_micro_batches=count)

    def ends(self, option: Option, stage: int) -> tuple[int, int]:
        """The first operator of a stage and the one behind its last; twice its number where stages are given."""
        if self.stages is not None:
            return stage, stage
        ends = (0, *option[1], len(self.graph.operators))
        return ends[stage], ends[stage + 1]

    def segment(self, start: int, end: int) -> tuple[str, ...]:
        """The operators of a stage with these `ends`."""
        if self.stages is not None:
            return self.stages[start]
        return tuple(operator.name for operator in self.graph.operators[start:end])

    def _widths(self, number: int, widths: str | Sequence[int] | None) -> list[tuple[int, ...]]:
        if widths is not None and not isinstance(widths, str):
            return [tuple(widths)]
        if widths == "even":
            return [(self.num_devices // number,) * number] if self.num_devices % number == 0 else []
        every = list(range(1, self.num_devices + 1))
        if len(every) > _MAX_WIDTHS:
            divisors = [width for width in every if self.num_devices % width == 0]
            eighths = [max(1, self.num_devices * part // 8) for part in range(1, 9)]
            every = sorted({*divisors[-_MAX_WIDTHS // 2 :], *eighths, 1, 2})[-_MAX_WIDTHS:]
        return [each for each in itertools.product(every, repeat=number) if sum(each) <= self.num_devices]

    def _cuts(self, weights: Callable[[], Sequence[float]]) -> list[int]:
        """Where stages may begin: in each even part of the work the place that the fewest bytes cross."""
        count = len(self.graph.operators)
        if count - 1 <= _MAX_CUTS:
            return list(range(1, count))
        parts = balanced_cuts(weights(), _MAX_CUTS + 1)
        return [min(range(start, end), key=lambda at: (self.crossing_bytes[at], at)) for start, end in parts[1:]]


def _crossing_bytes(graph: Graph) -> list[int]:
    """For every operator the bytes that go from before it to it or behind it."""
    position = {operator.name: at for at, operator in enumerate(graph.operators)}
    producers, consumers = graph.producers(), graph.consumers()
    crossing = [0] * (len(graph.operators) + 1)
    for name, maker in producers.items():
        last = max((position[reader.name] for reader in consumers[name]), default=position[maker.name])
        for at in range(position[maker.name] + 1, last + 1):
            crossing[at] += graph.tensors[name].size_bytes
    return crossing
