"""Shapes: stages with boundaries and widths, and micro-batches, and which of them are searched.

Beams: boundaries are at no more than 12 places, those with few bytes across among even parts of the work; up to 4
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
_FEW_MICRO_BATCHES = 4

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
        graph: graph of the full batch.
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
    _shared: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.crossing_bytes = _crossing_bytes(self.graph)
        self._shared = _between_readers(self.graph)

    def options(
        self,
        num_stages: int | None,
        widths: str | Sequence[int] | None,
        num_micro_batches: int | None,
        *,
        interleave: int,
        weights: Callable[[], Sequence[float]],
    ) -> list[Option]:
        """Every (micro-batches, boundaries, widths) of the space; `weights`: the work of every operator, if
        requested."""
        counts = [num_micro_batches] if num_micro_batches is not None else [
            count for count in range(1, _MAX_MICRO_BATCHES + 1) if self.graph.batch_size % (count * interleave) == 0
        ]  # fmt: skip
        if self.stages is not None:
            num_stages = len(self.stages)
        most = min(_MAX_STAGES, self.num_devices, len(self.graph.operators))
        found = []
        cuts = self._cuts(weights) if self.stages is None and num_stages != 1 else []
        for number in [num_stages] if num_stages is not None else range(1, most + 1):
            offered = self._widths(number, widths)
            inner = [()] if self.stages is not None else list(itertools.combinations(cuts, number - 1))
            if len(inner) * len(offered) * len(counts) > _MAX_COMBINATIONS:  # as even as may be, and their neighbours
                even = [start for start, _ in balanced_cuts(weights(), number)[1:]]
                inner = [] if self._shared & {*even} else [tuple(even)]
            found += [(count, inside, each) for count in counts for inside in inner for each in offered]
        return found

    def usual(self, options: Sequence[Option], weights: Callable[[], Sequence[float]]) -> list[list[Option]]:
        """Options without much thought, in rows: one stage on all devices and on fewer; even pipelines, as balanced as
        `weights` of the operators allow, in few micro-batches and in more."""
        single = sorted((option for option in options if len(option[2]) == 1), key=lambda each: (each[0], -each[2][0]))
        whole = [each for each in single if each[0] == single[0][0] and self.num_devices % each[2][0] == 0]
        rows = [whole] if whole else []
        sums = [0.0, *itertools.accumulate(weights())]

        def slowest(option: Option) -> float:
            ends = (0, *option[1], len(self.graph.operators))
            return max(sums[end] - sums[start] for start, end in itertools.pairwise(ends))

        even: dict[int, dict[int, list[Option]]] = {}
        for each in options:
            if len(each[2]) > 1 and each[2] == (self.num_devices // len(each[2]),) * len(each[2]):
                even.setdefault(len(each[2]), {}).setdefault(each[0], []).append(each)
        for by_count in even.values():
            counts = [count for count in sorted(by_count) if count >= _FEW_MICRO_BATCHES] or sorted(by_count)[-1:]
            rows.append([min(by_count[count], key=slowest) for count in counts])
        return rows or [list(options[:1])]

    def moved(self, option: Option) -> list[Option]:
        """Options that differ in one boundary of stages, which is at one of the two next possible places on both sides.

        >>> from plans.model.mlp import mlp_graph
        >>> ShapeSpace(mlp_graph([8, 8, 8, 8], 4), 2, None).moved((1, (2,), (1, 1)))
        [(1, (1,), (1, 1)), (1, (3,), (1, 1)), (1, (4,), (1, 1))]
        """
        count, inside, widths = option
        found = []
        for number, at in enumerate(inside):
            ends = (0, *inside, len(self.graph.operators))
            before = [place for place in range(ends[number] + 1, at) if place not in self._shared]
            behind = [place for place in range(at + 1, ends[number + 2]) if place not in self._shared]
            found += [
                (count, (*inside[:number], place, *inside[number + 1 :]), widths) for place in before[-2:] + behind[:2]
            ]
        return found

    def shape(self, option: Option) -> PipelineShape:
        """The shapes of one option."""
        count, _, widths = option
        names = tuple(self.segment(*self.ends(option, stage)) for stage in range(len(widths)))
        return PipelineShape(names=names, widths=widths, num_micro_batches=count)

    def ends(self, option: Option, stage: int) -> tuple[int, int]:
        """The first operator of a stage and the one after its last; the stage's number twice if stages are given."""
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
        """Possible boundaries of stages: in each even part of the work the place with the fewest crossing bytes, and of
        those with equally few the one nearest to the part's inner end.
        """
        count = len(self.graph.operators)
        possible = [at for at in range(1, count) if at not in self._shared]
        if len(possible) <= _MAX_CUTS:
            return possible
        found = []
        for start, end in balanced_cuts(weights(), _MAX_CUTS):
            inner = start or end
            places = [at for at in possible if start <= at < end]
            found += sorted(places, key=lambda at: (self.crossing_bytes[at], abs(at - inner)))[:1]
        return found


def _between_readers(graph: Graph) -> frozenset[int]:
    """The places between readers of one parameter, or of one constant that changes: they stay in one stage."""
    position = {operator.name: at for at, operator in enumerate(graph.operators)}
    found: set[int] = set()
    consumers = graph.consumers()
    for name in (*(parameter.name for parameter in graph.parameters), *graph.updated):
        readers = [position[reader.name] for reader in consumers[name]]
        found.update(range(min(readers) + 1, max(readers) + 1) if readers else ())
    return frozenset(found)


def _crossing_bytes(graph: Graph) -> list[int]:
    """The bytes that cross each operator's position, from earlier to later operators."""
    position = {operator.name: at for at, operator in enumerate(graph.operators)}
    producers, consumers = graph.producers(), graph.consumers()
    crossing = [0] * (len(graph.operators) + 1)
    for name, maker in producers.items():
        last = max((position[reader.name] for reader in consumers[name]), default=position[maker.name])
        for at in range(position[maker.name] + 1, last + 1):
            crossing[at] += graph.tensors[name].size_bytes
    return crossing
