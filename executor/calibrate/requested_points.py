"""Points requested by the user: products and attention of a file of points whose times are still to be taken."""

from __future__ import annotations

import os

from costmodels.fit.points import Point, load_points
from executor.calibrate.attention import attention_job
from executor.calibrate.matrix import matrix_job
from executor.calibrate.operands import Job
from plans.errors import TwofoldError

__all__ = ["job_of", "requested_points"]


def requested_points(path: str | os.PathLike[str] | None) -> list[Job]:
    """The jobs of a file of points, in its order; none where there is no file.

    Args:
        path: JSON lines, as points are written; their figures are not read.

    Raises:
        TwofoldError: a file that cannot be read, a kind of point that cannot be requested.
    """
    if path is None:
        return []
    return [job_of(point, number, path) for number, point in enumerate(load_points(path, measured=False)[0])]


def job_of(point: Point, tier: int, path: str | os.PathLike[str] = "the file") -> Job:
    """The job that takes a point.

    Raises:
        TwofoldError: another kind of point than a product, or attention of equally many queries and keys.
    """
    if point.kind == "matrix":
        return matrix_job(
            point.form, point.shape, batch=point.batch, dtype=point.dtype, tier=tier, held_out=point.held_out
        )
    if point.kind == "attention" and len(point.shape) == 6 and point.shape[3] == point.shape[4]:
        batch, heads, kv_heads, queries, _, dim = point.shape
        shape, causal = (batch, heads, kv_heads, queries, dim), bool(point.options.get("causal"))
        return attention_job(point.call.removeprefix("sdpa_"), shape, causal, tier=tier, held_out=point.held_out)
    raise TwofoldError(
        f"{os.fspath(path)!r} requests {point.kind} {point.call} {point.shape}; only matrix products and "
        "attention with as many queries as keys can be requested"
    )
