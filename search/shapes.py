"""What stands around the strategies: stages, their boundaries and widths, micro-batches; checked, or searched.

A shape is estimated by its additive cost before anything is simulated: m - 1 micro-batches of the slowest stage and one
of all stages, as a pipeline takes them. Every stage's cost starts as the least that its operators may take one by one,
and becomes exact for the shapes that are in front until those in front hold no bound any more. The most promising are
simulated, and what the estimates were off by is fed back (`Ranking`).

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
from search.pricing import redistribution_choice
from search.stage import Floor, StageSearch
from search.stages import balanced_cuts

__all__ = ["NUM_NEAR", "Option", "Ranking", "Shape", "ShapeSearch", "check_question", "ranks_of"]

NUM_SHAPES = 12
"""How many shapes are simulated, beside one for every promising number of stages and micro-batches."""

NUM_NEAR = 24
"""How many shapes are simulated that differ little from the fastest one."""

_AGAIN = 0.05
"""By how much an estimate counts as longer for every shape simulated that differs in its widths alone."""

_MAX_CUTS, _MAX_WIDTHS, _MAX_STAGES, _MAX_MICRO_BATCHES = 12, 12, 4, 32
_MAX_COMBINATIONS = 200_000


Option = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Micro-batches, where the second and later stages begin (none where stages are given), and widths."""


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
    if stages is not None and (empty_ := [number for number, stage in enumerate(stages) if not len(stage)]):
        raise TwofoldError(f"stage {empty_[0]} has no operators: give it some, or take fewer stages")
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
    _keys: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    _own: list[float] = field(default_factory=list)
    _cost: list[float] = field(default_factory=list)
    _floor: list[tuple[float, float]] = field(default_factory=list)
    _exact: set[int] = field(default_factory=set)
    _floors: dict[tuple[int, int, int], dict[str, Floor]] = field(default_factory=dict)
    _crossing: list[int] = field(init=False)
    reason: str = field(init=False, default="")

    def __post_init__(self) -> None:
        self._crossing = _crossing_bytes(self.graph)

    def options(
        self, num_stages: int | None, widths: str | Sequence[int] | None, num_micro_batches: int | None, interleave: int
    ) -> list[Option]:
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

    def ranking(self, options: Sequence[Option]) -> Ranking:
        """The shapes in the order in which they are worth a simulation."""
        return Ranking(self, options)

    def relaxed_s(self, options: Sequence[Option]) -> float:
        """No plan of these shapes is faster: the compute of its slowest stage, split as far as each operator can be.

        Where ranks share cores, all that the ranks of a single stage compute must also pass through them.
        """
        least, machine = math.inf, self.machine
        for option in options:
            floors = [self._floor[entry] for entry in self.entries(option)]
            total = max(max(host, device) for host, device in floors)
            if machine.cores_per_node is not None and len(floors) == 1:  # all ranks at the same time
                sharing = min(option[2][0], machine.devices_per_node) / machine.cores_per_node
                total *= max(1.0, sharing)
            least = min(least, total)
        return least

    def shape(self, option: Option) -> Shape:
        """Of one of the options."""
        count, inside, widths = option
        return Shape(names=self._names(inside), widths=widths, num_micro_batches=count)

    # ------------------------------------------------------------------ entries

    @property
    def costs(self) -> Sequence[float]:
        """Of every entry what it takes, or less."""
        return self._cost

    def entries(self, option: Option) -> list[int]:
        """The numbers of the stages' costs."""
        return [self._entry(option, stage) for stage in range(len(option[2]))]

    def _entry(self, option: Option, stage: int) -> int:
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
            self._keys.append(key)
            self._own.append(sum(each.own_s for each in mine))
            self._cost.append(self._own[-1] + self._borders_s(count, start, end, widths[stage], ranks))
            self._floor.append((sum(each.host_s for each in mine), sum(each.device_s for each in mine)))
        return self._entries[key]

    def _floors_of(self, count: int, ranks: int, width: int) -> dict[str, Floor]:
        key = (count, ranks, width)
        if key not in self._floors:
            self._floors[key] = self.stage_search(count, ranks).floors(range(width))
        return self._floors[key]

    def price(self, option: Option) -> bool:
        """Make the costs of an option's stages exact; whether one of them was not."""
        open_ = [entry for entry in self.entries(option) if entry not in self._exact]
        for entry in open_:
            count, ranks, start, end, width = self._keys[entry]
            try:
                cost_s = self.stage_search(count, ranks).least_s(self._segment(start, end), range(width))
            except TwofoldError as error:  # pins that do not fit so many devices
                cost_s, self.reason = math.inf, self.reason or str(error)
            self._cost[entry] += max(0.0, cost_s - self._own[entry])
            self._exact.add(entry)
        return bool(open_)

    def _borders_s(self, count: int, start: int, end: int, width: int, ranks: int) -> float:
        """About what a stage takes for what crosses its borders, there and back: it goes from rank to rank."""
        crossing = sum(self._crossing[at] for at in (start, end) if 0 < at < len(self.graph.operators))
        if self.stages is not None or not crossing:
            return 0.0
        price = redistribution_choice(self.machine, ranks).price_of("float32")
        borders = sum(0 < at < len(self.graph.operators) for at in (start, end))
        size = crossing // (borders * count * width)
        return borders * count * price.transfer_s(1, size, frozenset(), range(ranks))  # type: ignore[attr-defined]

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
        crossing = self._crossing
        parts = balanced_cuts(self._weights(), _MAX_CUTS + 1)
        return [min(range(start, end), key=lambda at: (crossing[at], at)) for start, end in parts[1:]]


class Ranking:
    """Shapes by what they are estimated to take, corrected by what simulations of their like took.

    Like are those of as many stages and micro-batches. What of a group was simulated says how far its estimates are
    off; groups of which nothing was count as the most favourable known one, so that promising ones get their turn.
    """

    def __init__(self, search: ShapeSearch, options: Sequence[Option]) -> None:
        self.search, self.options = search, options
        groups: dict[tuple[int, int], list[int]] = {}
        for at, (count, _, widths) in enumerate(options):
            groups.setdefault((len(widths), count), []).append(at)
        self.place = {group: np.array(members) for group, members in groups.items()}
        self.entries = {
            group: np.array([search.entries(options[at]) for at in members]) for group, members in groups.items()
        }
        self.done, self.again = np.zeros(len(options), dtype=bool), np.zeros(len(options))
        self.factor: dict[tuple[int, int], float] = {}
        self.best_s = math.inf
        self.left = NUM_SHAPES

    def next(self) -> tuple[Option, float] | None:
        """The most promising option left, priced, and its estimate; None where there is none.

        Every group that may hold something faster than what was found gets its turn first.
        """
        while True:
            least = self._estimates()
            usual, fresh = min(self.factor.values(), default=1.0), np.zeros(len(self.options), dtype=bool)
            weighed = least * (1.0 + _AGAIN * self.again)
            for group, members in self.place.items():
                weighed[members] *= self.factor.get(group, usual)
                fresh[members] = group not in self.factor
            weighed[self.done] = np.inf
            is_fresh = bool((fresh := fresh & (weighed < self.best_s)).any())
            if is_fresh:
                weighed[~fresh] = np.inf
            at = int(weighed.argmin())
            if not np.isfinite(weighed[at]) or not (is_fresh or self.left):
                return None
            if not self.search.price(self.options[at]):
                self.done[at] = True
                self.left -= not is_fresh
                return self.options[at], float(least[at])

    def take(self, option: Option) -> float:
        """An option that is to be simulated in any case, priced; its estimate."""
        at = self.options.index(option)
        self.search.price(option)
        self.done[at] = True
        return float(self._estimates()[at])

    def near(self, option: Option) -> list[Option]:
        """Options not simulated yet that differ in one boundary, or in one stage's devices, or have one stage more or
        less; the most promising first."""
        estimates = self._estimates()
        found = [at for at in np.flatnonzero(~self.done).tolist() if _is_near(self.options[at], option)]
        return [self.options[at] for at in sorted(found, key=lambda at: (estimates[at], at))]

    def learn(self, option: Option, estimate_s: float, simulated_s: float) -> None:
        """What an option took."""
        group, factor = (len(option[2]), option[0]), simulated_s / estimate_s
        self.factor[group] = min(factor, self.factor.get(group, factor))
        self.best_s = min(self.best_s, simulated_s)
        self.again += np.array([each[:2] == option[:2] for each in self.options], dtype=np.float64)

    def _estimates(self) -> np.ndarray:
        cost, found = np.array(self.search.costs), np.full(len(self.options), np.inf)
        for group, entries in self.entries.items():
            each = cost[entries]
            slowest = each.max(axis=1)
            rest = np.where(np.isfinite(slowest), each.sum(axis=1), 0.0) - np.where(np.isfinite(slowest), slowest, 0.0)
            found[self.place[group]] = slowest + rest / group[1]
        return found


def _is_near(one: Option, two: Option) -> bool:
    if one[0] != two[0]:
        return False
    short, long = sorted((one, two), key=lambda each: len(each[2]))
    if len(short[2]) == len(long[2]):
        cuts = sum(a != b for a, b in zip(one[1], two[1], strict=True))
        moved = sum(a != b for a, b in zip(one[2], two[2], strict=True))
        return cuts + moved == 1
    if len(short[2]) + 1 != len(long[2]) or not set(short[1]) <= set(long[1]):
        return False
    return any(short[2][:at] == long[2][:at] and short[2][at + 1 :] == long[2][at + 2 :] for at in range(len(short[2])))


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
