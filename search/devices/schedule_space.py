"""Schedules with all layer splits, each made once."""

from __future__ import annotations

from dataclasses import dataclass, field

from plans.degrees import Degrees
from search.devices.bounds import LayerSplits, ScheduleSpace
from search.devices.costs import num_dense
from search.devices.least_memory import LeastMemory
from search.devices.linear import Linear, Terms
from search.devices.problem import Problem
from search.devices.space import ScheduleChoice, recompute_counts, recomputes_some, scheduled, shapes

__all__ = ["ScheduleSpaces"]


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleGroup:
    """Schedules that differ in nothing that is decided before them, with a common bound for all their layer splits."""

    shapes: tuple[ScheduleChoice, ...]
    linear: Linear
    memory: LeastMemory


@dataclass(kw_only=True)
class ScheduleSpaces:
    """The spaces of a problem, and what may be chosen in them."""

    problem: Problem
    _spaces: dict[tuple[ScheduleChoice, int, int], ScheduleSpace | None] = field(default_factory=dict)
    _groups: dict[tuple[int, int, bool], ScheduleGroup | None] = field(default_factory=dict)
    _together: dict[ScheduleChoice, bool] = field(default_factory=dict)

    def of(self, shape: ScheduleChoice, pp: int, count: int) -> ScheduleSpace | None:
        """A schedule for these ranks and micro-batches; None where there is none, or no layers for its chunks."""
        key = (shape, pp, count)
        if key not in self._spaces:
            schedule, choices = scheduled(self.problem, shape, pp, count)
            dense = num_dense(self.problem.config)
            self._spaces[key] = (
                ScheduleSpace(schedule=schedule, layers=choices, num_dense=dense)
                if schedule is not None and choices
                else None
            )
        return self._spaces[key]

    def group(self, pp: int, count: int, *, split: bool) -> ScheduleGroup | None:
        """All schedules for these ranks and micro-batches, with a backward in two parts or one; None: no such."""
        key = (pp, count, split)
        if key not in self._groups:
            found = [(shape, self.of(shape, pp, count)) for shape in shapes(self.problem, pp)]
            own = {shape: space for shape, space in found if space is not None and space.split is split}
            self._groups[key] = None
            if own:
                terms = [Terms(space, together=self.together(shape)) for shape, space in own.items()]
                self._groups[key] = ScheduleGroup(tuple(own), Linear(terms), LeastMemory(list(own.values())))
        return self._groups[key]

    def is_partial(self, mode: str) -> bool:
        """Whether some blocks may recompute in a mode while the others keep everything."""
        return recomputes_some(self.problem, mode) or self.problem.pins.recompute_layers is not None

    def rows(self, space: ScheduleSpace, mode: str) -> LayerSplits:
        """The spreads of layers in a space for a recompute mode."""
        if not self.is_partial(mode):
            return space.all
        name = "some blocks" if recomputes_some(self.problem, mode) else "all blocks"
        return space.some(name, lambda most: recompute_counts(self.problem, mode, most))

    def together(self, shape: ScheduleChoice) -> bool:
        """Whether the stack begins every step on all ranks together."""
        if shape not in self._together:
            degrees = Degrees(schedule=shape.schedule, virtual=shape.virtual)
            self._together[shape] = self.problem.stack.steps_together(degrees)
        return self._together[shape]

    def narrowed(self, problem: Problem) -> ScheduleSpaces:
        """The choices in a part of the space, reusing known results."""
        own, its = self.problem.pins, problem.pins
        if own.layers is None and its.layers is None and its.recompute_layers == own.recompute_layers:
            return ScheduleSpaces(problem=problem, _spaces=self._spaces)
        return ScheduleSpaces(problem=problem)
