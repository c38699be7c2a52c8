"""A few usual configurations, from which the search starts.

They follow Megatron-LM's rule of thumb (Narayanan et al. 2021, arXiv 2104.04473, section 3): tp within a node, as few
stages as needed for the model to fit, data parallelism for the rest, and recomputation where needed.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator

import numpy as np

from plans.degrees import Degrees
from search.devices.costs import Costs
from search.devices.peak_memory import PeakMemory
from search.devices.problem import Problem
from search.devices.schedule_space import ScheduleSpaces
from search.devices.space import (
    Mesh,
    ScheduleChoice,
    levels,
    meshes,
    micro_batches,
    recomputes,
    sequence_parallels,
    shapes,
    values_of,
)
from search.devices.stage_config import StageConfig

__all__ = ["seeds"]

_SEEDS = 12
"""Number of meshes that the rule of thumb tries for each way to fit."""


def seeds(
    problem: Problem, costs: Costs, spaces: ScheduleSpaces, peak_memory: PeakMemory
) -> Iterator[tuple[float, Degrees]]:
    """Configurations of a rule of thumb, with and without recomputation, sharded weights and gradients.

    Each with a rough estimate of its seconds, which is low as it leaves out most communication; the lowest first.
    """
    rough, modes = _Rough(problem, costs, peak_memory), recomputes(problem)
    tried: dict[tuple[Mesh, int], float] = {}
    for most, mode in itertools.product((1, 3), dict.fromkeys((modes[0], modes[-1]))):
        ranked = sorted(rough.meshes(mode, most), key=operator.itemgetter(0))
        for step_s, mesh in ranked[:_SEEDS]:
            tried.setdefault((mesh, most), step_s)
    for (mesh, most), step_s in sorted(tried.items(), key=operator.itemgetter(1)):
        for shape in _usual(problem, mesh):
            found = _first_fitting(problem, spaces, peak_memory, mesh, shape, most)
            if found is not None:
                yield step_s, found


class _Rough:
    """Meshes with a rough estimate of their time."""

    def __init__(self, problem: Problem, costs: Costs, peak_memory: PeakMemory) -> None:
        self._problem, self._costs, self._peak_memory = problem, costs, peak_memory

    def meshes(self, mode: str, most: int) -> Iterator[tuple[float, Mesh]]:
        """Estimate in seconds and mesh: per split of a block the fewest stages that may fit."""
        problem = self._problem
        node = problem.machine.links[0].ranks if problem.machine.links else 1
        groups: dict[tuple[int, int, int], list[Mesh]] = {}
        for mesh in meshes(problem)[0]:
            groups.setdefault((mesh.tp, mesh.cp, mesh.ep), []).append(mesh)
        inside = {key: every for key, every in groups.items() if key[0] <= node}
        for every in (inside or groups).values():
            every.sort(key=lambda mesh: mesh.pp)
            estimates = (self._estimate_s(mesh, mode, most) for mesh in every)
            found = next((estimate for estimate in estimates if estimate is not None), None)
            if found is not None:
                yield found

    def _estimate_s(self, mesh: Mesh, mode: str, most: int) -> tuple[float, Mesh] | None:
        """The estimated step time; None if the configuration hardly fits."""
        problem = self._problem
        sizes, sps = micro_batches(problem, mesh), sequence_parallels(problem, mesh)
        if not sizes or not sps:
            return None
        stage = StageConfig(mesh.tp, mesh.cp, sps[0], sizes[0], mode, False, mesh.ep)
        count = problem.global_batch // (mesh.dp * sizes[0])
        # the first rank keeps a micro-batch for every stage
        more = self._peak_memory.kept_of_model(stage) * (min(mesh.pp, count) - 1) / mesh.pp
        for level in levels(problem, mesh):
            if level > most:
                return None
            least = self._peak_memory.least_bytes(stage, pp=mesh.pp, dp=mesh.dp, level=level)
            if least + more <= problem.limit_bytes:
                whole = sum(self._costs.model_seconds(stage)) * count / mesh.pp
                return whole * (1 + (mesh.pp - 1) / (2 * count)), mesh
        return None


def _usual(problem: Problem, mesh: Mesh) -> tuple[ScheduleChoice, ...]:
    """1F1B, and its interleaved form with as many chunks as there may be."""
    every = shapes(problem, mesh.pp)
    plain = [shape for shape in every if shape.schedule == "1f1b"]
    chunked = [shape for shape in every if shape.schedule == "interleaved_1f1b"]
    return (*plain, *chunked[-1:]) or every[:1]


def _first_fitting(
    problem: Problem, spaces: ScheduleSpaces, peak_memory: PeakMemory, mesh: Mesh, shape: ScheduleChoice, most: int
) -> Degrees | None:
    """With the least recomputing, and among that the least sharding, up to a level of the optimizer."""
    sp, size = sequence_parallels(problem, mesh)[0], micro_batches(problem, mesh)[0]
    space = spaces.of(shape, mesh.pp, problem.global_batch // (mesh.dp * size))
    if space is None:
        return None
    for recompute in recomputes(problem):
        rows = spaces.rows(space, recompute)
        stage = StageConfig(mesh.tp, mesh.cp, sp, size, recompute, space.split, mesh.ep)
        for level in levels(problem, mesh):
            if level > most:
                break
            peaks = peak_memory.peaks_bytes(stage, space, dp=mesh.dp, level=level, rows=rows)
            if peaks.min(initial=np.iinfo(np.int64).max) <= problem.limit_bytes:
                layers, some = space.choice(rows, int(np.argmax(peaks <= problem.limit_bytes)))
                return problem.degrees(values_of(mesh, size, sp, recompute, shape, level, layers, some))
    return None
