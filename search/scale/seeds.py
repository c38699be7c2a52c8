"""A few usual configurations to begin with, so that there is something to beat from the start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from plans.scale import Degrees
from search.scale.costs import Inner
from search.scale.footing import Footing
from search.scale.frames import Frames
from search.scale.problem import Problem
from search.scale.space import Mesh, levels, recomputes, sequence_parallels, shapes, values_of

__all__ = ["seeds"]

_SEEDS = 12

_USUAL = ("interleaved_1f1b", "1f1b")


def seeds(
    problem: Problem, frames: Frames, footing: Footing, roots: Iterable[tuple[float, int, Mesh, int]]
) -> Iterator[Degrees]:
    """Of the meshes that look best, what fits with the least recomputing and sharding.

    Args:
        problem, frames, footing: what is asked, and of it.
        roots: bounds in seconds, numbers, meshes and samples of a micro-batch.
    """
    ranked = sorted(
        (bound * (1 + (mesh.pp - 1) / (2 * problem.global_batch / mesh.dp / size)), number, mesh, size)
        for bound, number, mesh, size in roots
    )
    tried = 0
    for _, _, mesh, size in ranked:
        if tried == _SEEDS:
            return
        found = _first_fitting(problem, frames, footing, mesh, size)
        if found is not None:
            tried += 1
            yield found


def _first_fitting(problem: Problem, frames: Frames, footing: Footing, mesh: Mesh, size: int) -> Degrees | None:
    sp = sequence_parallels(problem, mesh)[0]
    usual = [shape for shape in shapes(problem, mesh.pp) if shape.schedule in _USUAL]
    for shape in usual or shapes(problem, mesh.pp)[:1]:
        frame = frames.of(shape, mesh.pp, problem.global_batch // (mesh.dp * size))
        if frame is None:
            continue
        for recompute in recomputes(problem):
            rows = frames.rows(frame, recompute)
            inner = Inner(mesh.tp, mesh.cp, sp, size, recompute, frame.split, mesh.ep)
            for level in levels(problem, mesh):
                peaks = footing.peaks_bytes(inner, frame, dp=mesh.dp, level=level, rows=rows)
                fit = np.flatnonzero(peaks <= problem.limit_bytes)
                if len(fit):
                    layers, some = frame.choice(rows, int(fit[0]))
                    return problem.degrees(values_of(mesh, size, sp, recompute, shape, level, layers, problem, some))
    return None
