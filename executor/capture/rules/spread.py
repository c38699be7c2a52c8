"""Variances and standard deviations over the samples of a batch of data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx

from executor.capture.rules.means import mean_over
from executor.capture.rules.opaque import opaque
from executor.capture.rules.table import Number, rule
from executor.capture.translation import Translation
from executor.capture.values import Value

__all__: list[str] = []


@rule("var.default", "std.default")
def _of_everything(build: Translation, node: fx.Node, x: Value, unbiased: bool = True) -> Value:
    return _spread(build, node, x, None, float(unbiased), keepdim=False)


@rule("var.dim", "std.dim")
def _over_dims(
    build: Translation, node: fx.Node, x: Value, dims: Any = None, unbiased: bool = True, keepdim: bool = False
) -> Value:
    return _spread(build, node, x, dims, float(unbiased), keepdim=keepdim)


@rule("var.correction", "std.correction")
def _corrected(
    build: Translation, node: fx.Node, x: Value, dims: Any = None, *, correction: Number = 1, keepdim: bool = False
) -> Value:
    return _spread(build, node, x, dims, correction, keepdim=keepdim)


def _spread(
    build: Translation, node: fx.Node, x: Value, dims: Sequence[int] | None, correction: Number, *, keepdim: bool
) -> Value:
    """sum (x - mean)^2 / (n - correction), or its root, if the samples are among the reduced dims."""
    data = build.plain(node, x)
    shape, dtype = build.tensors[data].shape, build.tensors[data].dtype
    over = tuple(sorted(dim % len(shape) for dim in dims or range(len(shape))))
    if build.batched.get(data) not in over or build.is_trained(data):
        return opaque(build, node)
    whole = tuple(1 if dim in over else size for dim, size in enumerate(shape))
    middle = build.reshaped(node, build.of_batch(node, mean_over(build, node, data, over)), whole)
    apart = build.make(node, "sub", (data, middle), shape=shape, dtype=dtype)
    squares = build.make(node, "mul", (apart, apart), shape=shape, dtype=dtype)
    total = build.of_batch(node, mean_over(build, node, squares, over, is_sum=True))
    each = math.prod(shape[dim] for dim in over) // build.batch_size
    ones = build.like_batch(node, (build.batch_size,), dtype, each)
    count = build.of_batch(node, mean_over(build, node, ones, is_sum=True))
    made = build.make_as(node, "div", total, build.make_as(node, "sub", count, number=correction))
    if str(node.target).startswith("aten.std"):
        made = build.make_as(node, "sqrt", made)
    return build.reshaped(node, made, build.shape_dtype(node)[0])
