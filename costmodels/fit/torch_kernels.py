"""Figures of torch's kernels whose time is not that of their bytes: updates of lists of tensors, gradients of tables.

They are fitted to their own points, beside the bandwidth that kernels which only stream have told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np

from costmodels.fit.forms import Floats, log_ratio, solve
from costmodels.fit.points import Point
from costmodels.price.compute import Compute
from costmodels.price.embedding_gradient import EmbeddingGradient
from costmodels.price.tensor_lists import TENSOR_LISTS, TensorList
from costmodels.price.torch_kernels import table_grad_s, update_s
from plans.model.graph import itemsize

__all__ = ["TORCH_KERNELS", "fit_torch_kernels", "is_torch_kernel", "torch_kernel_s"]

TORCH_KERNELS: Mapping[str, str] = {
    "adamw_fused": "adamw.fused", "adamw_foreach": "adamw.foreach", "embedding_backward": "embedding.grad0",
}  # fmt: skip
"""Call of a point -> of an instruction."""

LEAST_POINTS = 3
"""Different ones that a form needs."""

RESIDENT = (1, 2, 3, 4)
"""Blocks of 512 threads that a core may run at a time: 2,048 threads."""

_LIST: Mapping[str, tuple[float, float, float]] = {
    "start_s": (3e-6, 1e-7, 1e-4), "chunk_s": (2e-5, 1e-7, 1e-3), "sharpness": (1.5, 1.0, 8.0),
}  # fmt: skip
_TABLE: Mapping[str, tuple[float, float, float]] = {
    "token_s": (5e-8, 1e-10, 1e-5), "sort_s": (1e-4, 1e-6, 1e-2), "item_s": (1e-11, 1e-14, 1e-8),
}  # fmt: skip
"""Figure -> typical value, least, most."""

TYPICAL_WEIGHT = 0.02
"""Figures that the points do not determine stay near typical values."""


def is_torch_kernel(point: Point) -> bool:
    """Whether a point is of one of these kernels and says of what sizes."""
    return point.call in TORCH_KERNELS and bool(point.shape)


def torch_kernel_s(point: Point, compute: Compute) -> float | None:
    """Seconds of a point by the form of its kernel; None: it is another kernel, or `compute` has no form."""
    if not is_torch_kernel(point):
        return None
    if point.call == "embedding_backward":
        tokens, rows, features = point.shape
        return table_grad_s(compute, tokens, (rows, features), itemsize(point.dtype), point.dtype)
    tensors = int(point.options.get("tensors", 1))
    return update_s(compute, TORCH_KERNELS[point.call], point.size_bytes, point.shape[0], tensors)


def fit_torch_kernels(points: Sequence[Point], compute: Compute) -> Compute:
    """`compute` with the figures of these kernels; those with too few points stay.

    Args:
        points: kind "memory", whichever kernels; others are left out.
        compute: rates, with the memory's efficiency and the cost of zeros.
    """
    for name, call in TORCH_KERNELS.items():
        own = [point for point in points if point.call == name and is_torch_kernel(point)]
        if len({point.key for point in own}) >= LEAST_POINTS:
            fit = _fit_list if call in TENSOR_LISTS else _fit_table
            compute = fit(own, call, compute)
    return compute


def _fit_list(points: Sequence[Point], call: str, compute: Compute) -> Compute:
    def made(figures: Mapping[str, float], resident: int) -> Compute:
        lists = {**compute.tensor_lists, call: TensorList(resident=resident, **figures)}
        return msgspec.structs.replace(compute, tensor_lists=lists)

    tried = [_fitted(points, _LIST, partial(made, resident=resident)) for resident in RESIDENT]
    return min(tried, key=lambda each: each[1])[0]


def _fit_table(points: Sequence[Point], call: str, compute: Compute) -> Compute:
    def made(figures: Mapping[str, float]) -> Compute:
        return msgspec.structs.replace(compute, embedding_gradient=EmbeddingGradient(**figures))

    return _fitted(points, _TABLE, made)[0]


def _fitted(
    points: Sequence[Point], typical: Mapping[str, tuple[float, float, float]],
    made: Callable[[Mapping[str, float]], Compute],
) -> tuple[Compute, float]:  # fmt: skip
    """The rates with the figures that fit the points best, and the mean size of their errors."""
    start, lower, upper = np.log(np.array(list(typical.values()))).T
    seconds = np.array([point.seconds for point in points])

    def of(q: Floats) -> Compute:
        return made({name: float(value) for name, value in zip(typical, np.exp(q), strict=True)})

    def errors(q: Floats) -> Floats:
        rates = of(q)
        return log_ratio(np.array([torch_kernel_s(point, rates) for point in points], dtype=float), seconds)

    solved = solve(lambda q: np.concatenate([errors(q), TYPICAL_WEIGHT * (q - start)]), start, lower, upper)
    return of(solved), float(np.mean(np.abs(errors(solved))))
