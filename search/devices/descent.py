"""Good configurations by coordinate descent on quick estimates, for searches whose time is short.

From a plain configuration of every mesh, one choice after the other takes its fastest value: micro-batch, schedule,
recomputation, optimizer level and sequence parallelism. A configuration that does not fit counts as slower than all
that fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from plans.degrees import Degrees
from plans.errors import TwofoldError
from search.devices.problem import Problem
from search.devices.space import (
    Mesh,
    ScheduleChoice,
    levels,
    meshes,
    micro_batches,
    recomputes,
    sequence_parallels,
    shapes,
    spreads,
)
from simulator.forecast import Forecast

__all__ = ["descended"]

_PASSES = 2
"""How often every choice is made."""

_KEPT = 16
"""Configurations that are returned."""

Score = tuple[int, float]
"""Bytes over the limit, and seconds."""


def descended(problem: Problem, estimated: Callable[[Degrees], Forecast | None], until_s: float) -> list[Degrees]:
    """The fastest configurations by their estimates, the fastest first: at most one of every mesh and schedule.

    Args:
        problem: what is asked.
        estimated: the estimate of a configuration, None where there is none.
        until_s: `time.monotonic()` after which nothing more is tried.
    """
    found: list[tuple[float, int, Degrees]] = []
    for mesh in sorted(meshes(problem)[0], key=lambda mesh: (mesh.cp * mesh.ep, mesh.tp, mesh.pp)):
        if time.monotonic() > until_s:
            break
        descent = _Descent(problem, mesh, estimated, until_s)
        descent.run()
        for (over, step_s), degrees in descent.best.values():
            if not over:
                found.append((step_s, len(found), degrees))
    return [degrees for _, _, degrees in sorted(found, key=lambda each: each[:2])[:_KEPT]]


class _Descent:
    """The descent on one mesh."""

    def __init__(
        self, problem: Problem, mesh: Mesh, estimated: Callable[[Degrees], Forecast | None], until_s: float
    ) -> None:
        self._problem, self._mesh, self._estimated, self._until_s = problem, mesh, estimated, until_s
        self.best: dict[str, tuple[Score, Degrees]] = {}
        self._score: Score = (1 << 62, float("inf"))

    def run(self) -> None:
        """Fill `best` with the best configuration of every schedule."""
        choices = list(self._choices())
        if not all(choices):
            return
        values: dict[str, Any] = {}
        for options in choices:
            values |= options[0]
        self._try(values)
        for _ in range(_PASSES):
            before = self._score
            for options in choices:
                for option in options:
                    if any(values[key] != value for key, value in option.items()) and self._try(values | option):
                        values |= option
            if self._score == before:
                break
        for _, degrees in list(self.best.values()):
            for layers in spreads(self._problem, degrees.pp * degrees.virtual):
                self._try(dict(degrees.values) | {"layers": layers})

    def _choices(self) -> Iterator[list[dict[str, Any]]]:
        """The values of one choice after the other, the plainest first."""
        problem, mesh = self._problem, self._mesh
        plain = [shape for shape in shapes(problem, mesh.pp) if shape.schedule == "1f1b"]
        others = [shape for shape in _spread(shapes(problem, mesh.pp)) if shape not in plain]
        every = levels(problem, mesh)
        yield [{"micro_batch": size} for size in micro_batches(problem, mesh)]
        yield [{"schedule": shape.schedule, "virtual": shape.virtual, "layers": None} for shape in (*plain, *others)]
        yield [{"recompute": mode} for mode in recomputes(problem)]
        yield [{"zero": level} for level in sorted(every, key=lambda level: (level != 1, level))]
        yield [{"sequence_parallel": sp} for sp in sequence_parallels(problem, mesh)]

    def _try(self, values: dict[str, Any]) -> bool:
        """Estimate a configuration, if there is time; whether it is the best so far."""
        problem = self._problem
        if time.monotonic() > self._until_s:
            return False
        try:
            degrees = problem.degrees(self._mesh.values | values)
        except TwofoldError:
            return False
        seen = self._estimated(degrees)
        if seen is None:
            return False
        score = max(0, seen.peak_bytes - problem.limit_bytes), seen.step_s
        known = self.best.get(degrees.schedule)
        if known is None or score < known[0]:
            self.best[degrees.schedule] = score, degrees
        if score >= self._score:
            return False
        self._score = score
        return True


def _spread(every: tuple[ScheduleChoice, ...]) -> list[ScheduleChoice]:
    """Of schedules with any number of chunks the fewest and the most."""
    found: dict[str, list[ScheduleChoice]] = {}
    for shape in every:
        found.setdefault(shape.schedule, []).append(shape)
    return [shape for own in found.values() for shape in dict.fromkeys((own[0], own[-1]))]
