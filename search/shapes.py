"""What stands around the strategies: stages, their boundaries and widths, micro-batches; checked, or searched.

A shape is searched by its additive cost before anything is simulated: (m - 1) times the slowest stage of m
micro-batches and once all stages, as a pipeline takes them. Every stage's cost starts as the least that its operators
may take one by one, and becomes exact for the shapes that are in front until those in front hold no bound any more.

Beams: boundaries lie at no more than 12 places, those with few bytes across among even parts of the work; up to 4
stages where their number is searched; no more than 12 different widths; micro-batches up to 32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from costmodels import Machine
from plans.errors import TwofoldError
from plans.graph import Graph
from plans.plan import Strategy
from search.stage import Floor, StageSearch
from search.stages import balanced_cuts

__all__ = ["NUM_SHAPES", "Shape", "ShapeSearch", "check_question", "ranks_of"]

NUM_SHAPES = 6
"""How many of the cheapest shapes are simulated."""

_MAX_CUTS, _MAX_WIDTHS, _MAX_STAGES, _MAX_MICRO_BATCHES = 12, 12, 4, 32
_MAX_COMBINATIONS = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Stages with their operators and numbers of devices, and the number of micro-batches."""

    names: tuple[tuple[str, ...], ...]
    widths: tuple[int, ...]
    num_micro_batches: int

    def __str__(self) -> str:
        stages = " + ".join(map(str, self.widths))
        return f"{stages} devices, {self.num_micro_batches} micro-batches"


def ranks_of(widths: Sequence[int]) -> list[range]:
    """The ranks of every stage, one stage after the other."""
    ends = list(itertools.accumulate(widths))
    return [range(end - width, end) for end, width in zip(ends, widths, strict=True)]


def check_question(
    graph: Graph,
    machine: Machine,
    *,
    num_devices: int,
    num_stages: int | None,
    stages: Sequence[Sequence[str]] | None,
    widths: str | Sequence[int] | None,
    num_micro_batches: int | None,
    interleave: int,
    pinned: Mapping[str, Strategy],
) -> None:
    """Refuse what no plan can answer; see `search` for the arguments and messages."""
    if empty := [tensor for tensor in graph.tensors.values() if 0 in tensor.shape]:
        raise TwofoldError(f"tensor {empty[0].name!r} has the shape {empty[0].shape}: nothing of size 0 is searched")
    if num_devices < 1:
        raise TwofoldError(f"{num_devices} devices asked for; at least 1 is needed")
    if num_devices > machine.num_devices:
        raise TwofoldError(f"{num_devices} devices asked for, machine {machine.name!r} has {machine.num_devices}")
    if num_devices > 1 and not machine.links:
        raise TwofoldError(f"machine {machine.name!r} has no links: {num_devices} devices cannot work together")
    if num_stages is not None and not 1 <= num_stages <= num_devices:
        raise TwofoldError(f"{num_stages} pipeline stages on {num_devices} devices: each stage needs one at least")
    if stages is not None and num_stages is not None and len(stages) != num_stages:
        raise TwofoldError(f"operators are given for {len(stages)} stages, but there are {num_stages}")
    _check_widths(widths, num_stages if stages is None else len(stages), num_devices)
    if num_stages is not None and num_stages > len(graph.operators):
        count = len(graph.operators)
        raise TwofoldError(f"{num_stages} stages need {num_stages} operators, there are {count}; take fewer stages")
    if num_micro_batches is not None:
        _check_batch(graph, num_micro_batches, interleave)
    elif isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise TwofoldError(f"interleave is {interleave!r}; it is a number of slices, an int of at least 1")
    if unknown := set(pinned) - {operator.name for operator in graph.operators}:
        raise TwofoldError(f"strategies are pinned for {sorted(unknown)}, which the graph does not have")


def _check_widths(widths: str | Sequence[int] | None, num_stages: int | None, num_devices: int) -> None:
    if widths is None or widths == "any":
        return
    if isinstance(widths, str):
        if widths != "even":
            raise TwofoldError(f"widths={widths!r}: give numbers of devices per stage, 'even' or 'any'")
        if num_stages is not None and num_devices % num_stages:
            raise TwofoldError(
                f"{num_stages} pipeline stages do not divide {num_devices} devices evenly: "
                f"{num_devices} % {num_stages} != 0; take widths='any'"
            )
        return
    if num_stages is not None and len(widths) != num_stages:
        raise TwofoldError(f"widths {list(widths)} are of {len(widths)} stages, but there are {num_stages}")
    if min(widths, default=0) < 1 or sum(widths) > num_devices:
        raise TwofoldError(
            f"widths {list(widths)}: every stage needs a device at least, and all of them have {num_devices}"
        )


def _check_batch(graph: Graph, num_micro_batches: int, interleave: int) -> None:
    if num_micro_batches < 1 or graph.batch_size % num_micro_batches:
        raise TwofoldError(
            f"{num_micro_batches} micro-batches do not divide the batch of {graph.batch_size}: "
            f"{graph.batch_size} % {num_micro_batches} != 0"
        )
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise TwofoldError(f"interleave is {interleave!r}; it is a number of slices, an int of at least 1")
    if graph.batch_size % (num_micro_batches * interleave):
        micro_batch = graph.batch_size // num_micro_batches
        raise TwofoldError(
            f"interleave {interleave} does not divide the micro-batch of {micro_batch}: "
            f"{micro_batch} % {interleave} != 0"
        )


@dataclass(slots=True)
class ShapeSearch:
    """The shapes of a question, and what is known of their costs.

    Args:
        graph: of the whole batch.
        machine: that prices.
        num_devices: at most.
        stage_search: (micro-batches, ranks of the whole plan) -> the search of its stages.
        stages: the operators of every stage, where they are given.
        is_over: whether time is up.
    """

    graph: Graph
    machine: Machine
    num_devices: int
    stage_search: Callable[[int, int], StageSearch]
    stages: tuple[tuple[str, ...], ...] | None
    is_over: Callable[[], bool]
    _entries: dict[tuple[int, int, int, int, int], int] = field(default_factory=dict)
    _cost: list[float] = field(default_factory=list)
    _floor: list[tuple[float, float]] = field(default_factory=list)
    _exact: set[int] = field(default_factory=set)
    _floors: dict[tuple[int, int, int], dict[str, Floor]] = field(default_factory=dict)

    def options(
        self, num_stages: int | None, widths: str | Sequence[int] | None, num_micro_batches: int | None, interleave: int
    ) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
        """Every (micro-batches, boundaries, widths) of the space."""
        names = [operator.name for operator in self.graph.operators]
        counts = [num_micro_batches] if num_micro_batches is not None else [
            count for count in range(1, _MAX_MICRO_BATCHES + 1) if self.graph.batch_size % (count * interleave) == 0
        ]  # fmt: skip
        if self.stages is not None:
            num_stages = len(self.stages)
        most = min(_MAX_STAGES, self.num_devices, len(names))
        found = []
        cuts = self._cuts() if self.stages is None else []
        for number in [num_stages] if num_stages is not None else range(1, most + 1):
            offered = self._widths(number, widths)
            inner = [()] if self.stages is not None else list(itertools.combinations(cuts, number - 1))
            if len(inner) * len(offered) * len(counts) > _MAX_COMBINATIONS:  # as even as may be, and their neighbours
                weights = self._weights()
                even = balanced_cuts(weights, number)
                inner = [tuple(start for start, _ in even[1:])]
            found += [(count, inside, each) for count in counts for inside in inner for each in offered]
        return found

    def cheapest(self, options: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]], count: int) -> list[Shape]:
        """The shapes of least additive cost, the cheapest first."""
        if len(options) == 1:
            return [self.shape(options[0])]
        groups: dict[int, list[int]] = {}
        for at, (_, _, widths) in enumerate(options):
            groups.setdefault(len(widths), []).append(at)
        rows = {
            width: np.array(
                [[self._entry(option, stage) for stage in range(width)] for option in (options[at] for at in members)]
            )
            for width, members in groups.items()
        }
        micro = {width: np.array([options[at][0] for at in members]) for width, members in groups.items()}
        place = {width: np.array(members) for width, members in groups.items()}
        done = np.zeros(len(options), dtype=bool)
        found: list[Shape] = []
        while len(found) < min(count, len(options)):
            cost = np.array(self._cost)
            least = np.full(len(options), np.inf)
            for width, entries in rows.items():
                each = cost[entries]
                slowest = each.max(axis=1)
                least[place[width]] = slowest + (each.sum(axis=1) - slowest) / micro[width]
            least[done] = np.inf
            at = int(least.argmin())
            if not np.isfinite(least[at]):
                break
            open_ = [entry for entry in self._of(options[at]) if entry not in self._exact]
            if open_ and not (found and self.is_over()):
                for entry in open_:
                    self._price(entry)
                continue
            done[at] = True
            found.append(self.shape(options[at]))
        return found

    def relaxed_s(self, options: Sequence[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> float:
        """No plan of these shapes is faster: the compute of its slowest stage, split as far as each operator can be.

        Where ranks share cores, all that a node's ranks compute must also pass through its cores.
        """
        least, machine = math.inf, self.machine
        for option in options:
            floors = [self._floor[entry] for entry in self._of(option)]
            total = max(max(host, device) for host, device in floors)
            if machine.cores_per_node is not None:
                nodes = -(-sum(option[2]) // machine.devices_per_node)
                work = sum(width * host for width, (host, _) in zip(option[2], floors, strict=True))
                total = max(total, work / (machine.cores_per_node * nodes))
            least = min(least, total)
        return least

    def shape(self, option: tuple[int, tuple[int, ...], tuple[int, ...]]) -> Shape:
        """Of one of the options."""
        count, inside, widths = option
        return Shape(names=self._names(inside), widths=widths, num_micro_batches=count)

    # ------------------------------------------------------------------ entries

    def _of(self, option: tuple[int, tuple[int, ...], tuple[int, ...]]) -> list[int]:
        return [self._entry(option, stage) for stage in range(len(option[2]))]

    def _entry(self, option: tuple[int, tuple[int, ...], tuple[int, ...]], stage: int) -> int:
        """The number of a stage's cost: (micro-batches, ranks in all, first and last operator, devices)."""
        count, inside, widths = option
        if self.stages is None:
            ends = (0, *inside, len(self.graph.operators))
            start, end = ends[stage], ends[stage + 1]
        else:
            start, end = stage, stage
        ranks = self.num_devices if self.machine.host_async else sum(widths)
        key = (count, ranks, start, end, widths[stage])
        if key not in self._entries:
            self._entries[key] = len(self._entries)
            floors = self._floors_of(count, ranks, widths[stage])
            mine = [floors[name] for name in self._segment(start, end)]
            self._cost.append(sum(each.own_s for each in mine))
            self._floor.append((sum(each.host_s for each in mine), sum(each.device_s for each in mine)))
        return self._entries[key]

    def _floors_of(self, count: int, ranks: int, width: int) -> dict[str, Floor]:
        key = (count, ranks, width)
        if key not in self._floors:
            self._floors[key] = self.stage_search(count, ranks).floors(range(width))
        return self._floors[key]

    def _price(self, entry: int) -> None:
        count, ranks, start, end, width = list(self._entries)[entry]
        cost_s = self.stage_search(count, ranks).least_s(self._segment(start, end), range(width))
        self._cost[entry] = max(cost_s, self._cost[entry])
        self._exact.add(entry)

    def _segment(self, start: int, end: int) -> tuple[str, ...]:
        if self.stages is not None:
            return self.stages[start]
        return tuple(operator.name for operator in self.graph.operators[start:end])

    def _names(self, inside: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        if self.stages is not None:
            return self.stages
        ends = (0, *inside, len(self.graph.operators))
        return tuple(self._segment(start, end) for start, end in itertools.pairwise(ends))

    # -------------------------------------------------------------------- beams

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

    def _weights(self) -> list[float]:
        floors = self._floors_of(1, self.num_devices, 1)
        return [max(floors[operator.name].own_s, 1e-12) for operator in self.graph.operators]

    def _cuts(self) -> list[int]:
        """Where stages may begin: in each even part of the work the place that the fewest bytes cross."""
        count = len(self.graph.operators)
        if count - 1 <= _MAX_CUTS:
            return list(range(1, count))
        crossing = _crossing_bytes(self.graph)
        parts = balanced_cuts(self._weights(), _MAX_CUTS + 1)
        return [min(range(start, end), key=lambda at: (crossing[at], at)) for start, end in parts[1:]]


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
