"""Capture of elementwise operators, reductions and constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from executor.capture.calls.decompose import BY_SAMPLES
from executor.capture.rules.means import count_of_samples, mean_over, reshaped_mean
from executor.capture.rules.opaque import opaque
from executor.capture.rules.table import Number, rule
from executor.capture.translation import Translation
from executor.capture.values import Transposed, Value
from plans.operators.elementwise import UNARY

__all__: list[str] = []


@rule(*(f"{kind}.default" for kind in UNARY if kind != "gelu"))
def _unary(build: Translation, node: fx.Node, x: Value, *settings: Any, **named: Any) -> Value:
    """A function of one number, with the settings that the call gives."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments[1:]]
    given = dict(zip(names, settings, strict=False)) | named
    attrs: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    x = build.cast(node, build.plain(node, x), build.shape_dtype(node)[1])
    return build.make(node, str(node.target).split(".")[1], (x,), **attrs)


@rule("gelu.default")
def _gelu(build: Translation, node: fx.Node, x: Value, *, approximate: str = "none") -> Value:
    return build.make(node, "gelu", (x,), approximate=approximate)


@rule("pow.Tensor_Scalar", "square.default")
def _pow(build: Translation, node: fx.Node, x: Value, exponent: Number = 2) -> Value:
    x = build.cast(node, build.plain(node, x), build.shape_dtype(node)[1])
    return build.make(node, "pow", (x,), exponent=exponent)


@rule("pow.Scalar")
def _power_of_a_number(build: Translation, node: fx.Node, base: Number, x: Value) -> Value:
    if base <= 0:
        return opaque(build, node)
    x = build.cast(node, build.plain(node, x), build.shape_dtype(node)[1])
    return build.make(node, "exp", (build.make(node, "mul", (x,), number=math.log(base)),))


@rule("reciprocal.default")
def _reciprocal(build: Translation, node: fx.Node, x: Value) -> Value:
    x = build.cast(node, build.plain(node, x), build.shape_dtype(node)[1])
    return build.make(node, "div", (x,), number=1, reverse=True)


@rule("to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default")
def _to(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    dtype = build.shape_dtype(node)[1]
    if isinstance(x, Transposed):
        return Transposed(tensor=build.cast(node, x.tensor, dtype))
    return build.cast(node, str(x), dtype)


@rule(
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar",
    "rsub.Scalar", "rsub.Tensor",
)  # fmt: skip
def binary(build: Translation, node: fx.Node, x: Value, y: Value | Number, alpha: Number = 1) -> Value:
    """Two tensors, or a tensor and a number."""
    called = str(node.target).split(".")[1].rstrip("_")
    if alpha != 1:
        y = y * alpha if isinstance(y, bool | int | float) else _times(build, node, y, alpha)
    if BY_SAMPLES in node.meta and x in build.batched:
        build.warn_of_micro_batches(node)
        y = count_of_samples(build, node)
    kind, left, right = ("sub", y, x) if called == "rsub" else (called, x, y)
    return combine(build, node, kind, left, right)


def _times(build: Translation, node: fx.Node, y: Value, alpha: Number) -> str:
    name = build.cast(node, build.plain(node, y), build.shape_dtype(node)[1])
    return build.make_as(node, "mul", name, number=alpha)


def combine(build: Translation, node: fx.Node, kind: str, x: Value | Number, y: Value | Number) -> Value:
    """x kind y; at most one of the two is a number."""
    dtype = build.shape_dtype(node)[1]
    numbers = [isinstance(each, bool | int | float) for each in (x, y)]
    operands = tuple(
        build.cast(node, build.plain(node, each), dtype)  # type: ignore[arg-type]
        for each, is_number in zip((x, y), numbers, strict=True)
        if not is_number
    )
    if not any(numbers):
        return build.make(node, kind, operands)
    attrs: dict[str, Any] = {"number": x if numbers[0] else y}
    return build.make(node, kind, operands, **(attrs | {"reverse": True} if numbers[0] else attrs))


@rule(
    *(f"{kind}.{form}" for kind in ("eq", "ne", "lt", "le", "gt", "ge") for form in ("Tensor", "Scalar")),
    "logical_and.default", "logical_or.default", "bitwise_and.Tensor", "bitwise_or.Tensor", "__and__.Tensor",
    "__or__.Tensor",
)  # fmt: skip
def _truth(build: Translation, node: fx.Node, x: Value, y: Value | Number) -> Value:
    called = str(node.target).split(".")[1].strip("_").removeprefix("bitwise_").removeprefix("logical_")
    x = build.plain(node, x)
    if called in ("and", "or"):
        named = [x, y] if isinstance(y, str) else [x]
        if len(named) < 2 or {build.tensors[each].dtype for each in named} != {"bool"}:
            return opaque(build, node)
        called = f"logical_{called}"
    if isinstance(y, bool | int | float):
        return build.make(node, called, (x,), number=y)
    return build.make(node, called, (x, build.plain(node, y)))


@rule("logical_not.default", "bitwise_not.default")
def _not(build: Translation, node: fx.Node, x: Value) -> Value:
    x = build.plain(node, x)
    return build.make(node, "logical_not", (x,)) if build.tensors[x].dtype == "bool" else opaque(build, node)


@rule("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(build: Translation, node: fx.Node, condition: Value, x: Value | Number, y: Value | Number) -> Value:
    dtype = build.shape_dtype(node)[1]
    operands = [
        build.make(node, "fill", (), shape=(), dtype=dtype, value=each)
        if isinstance(each, bool | int | float)
        else build.cast(node, build.plain(node, each), dtype)
        for each in (x, y)
    ]
    return build.make(node, "where", (condition, *operands))


@rule("masked_fill.Scalar")
def _masked_fill(build: Translation, node: fx.Node, x: Value, mask: Value, value: Number) -> Value:
    return build.make(node, "masked_fill", (x, mask), value=value)


@rule("mean.dim", "sum.dim_IntList", "mean.default", "sum.default")
def _reduce(
    build: Translation, node: fx.Node, x: Value, dims: Sequence[int] | int | None = None, keepdim: bool = False,
    *, dtype: Any = None,
) -> Value:  # fmt: skip
    x = build.cast(node, build.plain(node, x), build.shape_dtype(node)[1])
    rank = len(build.tensors[x].shape)
    given = range(rank) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
    over = tuple(sorted(dim % max(1, rank) for dim in given))
    if build.batched.get(x) in over:
        mean, shape = mean_over(build, node, x, over, is_sum=".sum" in str(node.target)), build.shape_dtype(node)[0]
        return reshaped_mean(build, node, mean, shape)
    return build.make(node, f"reduce_{str(node.target).split('.')[1]}", (x,), dims=over, keepdim=keepdim)


# -- constants ---------------------------------------------------------------------------------------------------------


@rule("arange.default", "arange.start", "arange.start_step")
def _arange(build: Translation, node: fx.Node, *ends: Number, **_: Any) -> Value:
    start, step = (ends[0] if len(ends) > 1 else 0), (ends[2] if len(ends) > 2 else 1)
    return build.make(node, "arange", (), start=start, step=step)


@rule("full.default", "zeros.default", "ones.default", "scalar_tensor.default", "empty.memory_format")
def _fill(build: Translation, node: fx.Node, first: Any, value: Number = 0, **_: Any) -> Value:
    called = str(node.target).split(".")[1]
    value = {"zeros": 0, "empty": 0, "ones": 1, "scalar_tensor": first}.get(called, value)
    if not math.isfinite(value) and not build.shape_dtype(node)[1].startswith(("float", "bfloat")):
        raise build.refused(node, f"{value} is not a whole number")
    return filled(build, node, value)


def filled(build: Translation, node: fx.Node, value: Number) -> str:
    """A tensor filled with one value; one of its dims is the batch if the call depends on the batch size."""
    if node.name in build.grown:
        return build.like_batch(node, *build.shape_dtype(node), value, build.grown[node.name])
    return build.make(node, "fill", (), value=value)


@rule("full_like.default", "zeros_like.default", "ones_like.default", "empty_like.default", "fill.Scalar")
def _fill_like(build: Translation, node: fx.Node, x: Value, value: Number = 0, **_: Any) -> Value:
    value = {"zeros_like": 0, "ones_like": 1}.get(str(node.target).split(".")[1], value)
    x = build.plain(node, x)
    return build.make(node, "fill", (x,) if x in build.batched else (), value=value)


@rule("new_zeros.default", "new_ones.default", "new_full.default", "new_empty.default")
def _fill_new(build: Translation, node: fx.Node, x: Value, size: Any, value: Number = 0, **_: Any) -> Value:
    value = {"new_zeros": 0, "new_ones": 1}.get(str(node.target).split(".")[1], value)
    return filled(build, node, value)
