"""Costs of the stages of shapes: lower bounds by operator, and exact costs on request.

Shapes have stages in common, so every stage on a number of devices is kept once, under a number.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from costmodels import Machine
from plans.errors import TwofoldError
from search.operators.pricing import redistribution_choice
from search.operators.shapes import Option, ShapeSpace
from search.operators.stage import Floor, StageSearch

__all__ = ["ShapeCosts"]

_Stage = tuple[int, int, int, int, int]
"""Micro-batches, ranks of the complete plan, the ends of the stage (`ShapeSpace.ends`), and its devices."""


@dataclass(slots=True)
class ShapeCosts:
    """Costs of the stages of shapes, by number.

    Args:
        space: of the shapes.
        machine: that prices.
        stage_search: (micro-batches, ranks of the complete plan) -> the search of its stages.
        is_late: whether stages that are not priced yet may only be looked at.

    `seconds` has for every number what the stage takes, or less; `reason` why a stage has no answer, once one had none.
    """

    space: ShapeSpace
    machine: Machine
    stage_search: Callable[[int, int], StageSearch]
    is_late: Callable[[], bool]
    seconds: list[float] = field(init=False, default_factory=list)
    reason: str = field(init=False, default="")
    _numbers: dict[_Stage, int] = field(init=False, default_factory=dict)
    _stages: list[_Stage] = field(init=False, default_factory=list)
    _own: list[float] = field(init=False, default_factory=list)
    _exact: set[int] = field(init=False, default_factory=set)
    _floors: dict[tuple[int, int, int], dict[str, Floor]] = field(init=False, default_factory=dict)
    _kernels: dict[_Stage, Floor] = field(init=False, default_factory=dict)

    def entries(self, option: Option) -> list[int]:
        """The numbers of the stages of a shape."""
        return [self._entry(option, stage) for stage in range(len(option[2]))]

    def affordable(self, options: Sequence[Option], is_over: Callable[[], bool]) -> list[Option]:
        """The options whose lower bounds can be computed in time, one stage first; at least those of the first."""
        keys = {self._floors_key(option[0], option[2], width): None for option in options for width in option[2]}
        for count, ranks, width in sorted(keys, key=lambda key: (key[0], -key[2])):
            if self._floors and is_over():
                break
            self._floors[count, ranks, width] = self.stage_search(count, ranks).floors(range(width), is_over)
        return [
            option for option in options
            if all(self._floors_key(option[0], option[2], width) in self._floors for width in option[2])
        ]  # fmt: skip

    def price(self, option: Option) -> bool:
        """Make the costs of a shape's stages exact; returns whether one of them was not."""
        open_ = [entry for entry in self.entries(option) if entry not in self._exact]
        for entry in open_:
            count, ranks, start, end, width = self._stages[entry]
            try:
                cost_s = self.stage_search(count, ranks).least_s(
                    self.space.segment(start, end), range(width), self.is_late
                )
            except TwofoldError as error:  # pins that do not fit the number of devices
                cost_s, self.reason = math.inf, self.reason or str(error)
            self.seconds[entry] += max(0.0, cost_s - self._own[entry])
            self._exact.add(entry)
        return bool(open_)

    def relaxed_s(self, options: Sequence[Option], is_over: Callable[[], bool]) -> float:
        """No plan of these shapes is faster: the compute of its slowest stage, split as far as each operator can be.

        The redistributions that no kernel can overlap are added until time is up (`StageCosts.stream_s`). Where ranks
        share cores, all that the ranks of a single stage compute must also pass through them.
        """
        bounds = [(self._floor_s(option), number, False) for number, option in enumerate(options)]
        heapq.heapify(bounds)
        while bounds:
            least_s, number, is_final = bounds[0]
            if is_final:
                return least_s
            heapq.heapreplace(bounds, (max(least_s, self._stream_s(options[number], is_over)), number, True))
        return math.inf

    def _floor_s(self, option: Option) -> float:
        floors, machine = [self._floor(option, stage) for stage in range(len(option[2]))], self.machine
        total = max(map(max, floors))
        if machine.cores_per_node is not None and len(floors) == 1:  # all ranks at the same time
            sharing = min(option[2][0], machine.devices_per_node) / machine.cores_per_node
            total *= max(1.0, sharing)
        return total

    def _floor(self, option: Option, stage: int) -> Floor:
        """The kernels of a stage; `affordable` has those of its operators."""
        key = self._stage(option, stage)
        if key not in self._kernels:
            count, ranks, start, end, width = key
            floors = self._floors[count, ranks, width]
            mine = [floors[name] for name in self.space.segment(start, end)]
            self._kernels[key] = Floor(sum(floor.host_s for floor in mine), sum(floor.device_s for floor in mine))
        return self._kernels[key]

    def _stream_s(self, option: Option, is_over: Callable[[], bool]) -> float:
        """The compute stream of the slowest stage of a shape."""
        found = [0.0]
        for stage in range(len(option[2])) if self.machine.host_async else ():
            count, ranks, start, end, width = self._stage(option, stage)
            names = self.space.segment(start, end)
            found.append(self.stage_search(count, ranks).stream_s(names, range(width), is_over))
        return max(found)

    def weights(self) -> list[float]:
        """About the work of every operator: the least that it takes on one device."""
        least_s = self.stage_search(1, self.space.num_devices).least_own_s(range(1))
        return [max(least_s[operator.name], 1e-12) for operator in self.space.graph.operators]

    def _entry(self, option: Option, stage: int) -> int:
        key = self._stage(option, stage)
        if key not in self._numbers:
            self._numbers[key] = len(self._numbers)
            count, ranks, start, end, width = key
            least_s = self.stage_search(count, ranks).least_own_s(range(width))
            self._stages.append(key)
            self._own.append(sum(least_s[name] for name in self.space.segment(start, end)))
            self.seconds.append(self._own[-1] + self._borders_s(*key))
        return self._numbers[key]

    def _stage(self, option: Option, stage: int) -> _Stage:
        count, _, widths = option
        ranks = self._floors_key(count, widths, widths[stage])[1]
        return (count, ranks, *self.space.ends(option, stage), widths[stage])

    def _floors_key(self, count: int, widths: Sequence[int], width: int) -> tuple[int, int, int]:
        """Micro-batches, ranks of the complete plan, and devices of a stage."""
        return count, self.space.num_devices if self.machine.host_async else sum(widths), width

    def _borders_s(self, count: int, ranks: int, start: int, end: int, width: int) -> float:
        """Estimated time of a stage for the tensors that cross its borders, sent from rank to rank."""
        borders = [at for at in (start, end) if 0 < at < len(self.space.graph.operators)]
        crossing = sum(self.space.crossing_bytes[at] for at in borders)
        if self.space.stages is not None or not crossing:
            return 0.0
        price = redistribution_choice(self.machine, ranks).price_of("float32")
        size = crossing // (len(borders) * count * width)
        return len(borders) * count * price.transfer_s(1, size, frozenset(), range(ranks))  # type: ignore[attr-defined]
