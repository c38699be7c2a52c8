"""Capture of operators that rearrange elements: views, transposes, slices, concatenations.

Splits and chunks become one narrow per part; a write into a part joins the unchanged and the written parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from torch import fx

from executor.capture.rules.opaque import opaque
from executor.capture.rules.table import rule
from executor.capture.translation import Translation
from executor.capture.values import Transposed, Unreadable, Value

__all__: list[str] = []


@rule("t.default", "numpy_T.default", "transpose.int", "permute.default", "mT.default")
def _transpose(build: Translation, node: fx.Node, x: Value, *dims: Any) -> Value:
    """Transpose lazily: a 2-D parameter is only transposed if something other than a matrix product reads it."""
    inner = x.tensor if isinstance(x, Transposed) else str(x)
    count = len(build.tensors[inner].shape)
    order = _order(str(node.target), count, dims)
    if order == list(range(count)):
        return x
    if count == 2 and inner not in build.batched and build.is_trained(inner):
        return inner if isinstance(x, Transposed) else Transposed(tensor=inner)
    return build.make(node, "permute", (x,), dims=tuple(order))


def _order(target: str, count: int, dims: tuple[Any, ...]) -> list[int]:
    order = list(range(count))
    if ".permute" in target:
        return [dim % count for dim in dims[0]]
    if ".numpy_T" in target:
        return order[::-1]
    first, second = dims if dims else (-2, -1)
    if count > 1:
        order[first], order[second] = order[second], order[first]
    return order


@rule(
    "flatten.using_ints", "view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default",
    "squeeze.default", "squeeze.dim", "squeeze.dims", "unflatten.int", "view_as.default", "reshape_as.default",
)  # fmt: skip
def _reshape(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    return build.reshaped(node, x, build.shape_dtype(node)[0])


@rule("expand.default", "expand_as.default", "broadcast_to.default")
def _expand(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    return _expanded(build, node, build.plain(node, x), build.shape_dtype(node)[0], build.grown.get(node.name))


def _expanded(build: Translation, node: fx.Node, x: str, new: tuple[int, ...], place: int | None) -> str:
    """x expanded to the shape `new`, whose dim `place` is the batch (None: no dim is)."""
    tensor = build.tensors[x]
    if tensor.shape == new:
        return x
    if place is not None and x not in build.batched:
        return _over_batch(build, node, x, new, place)
    return build.make(node, "expand", (x,), shape=new, dtype=tensor.dtype)


def _over_batch(build: Translation, node: fx.Node, x: str, new: tuple[int, ...], place: int) -> str:
    """Expand a value shared by all samples (a class token, positions) over the batch: add it to zeros of that size."""
    old, dtype = build.tensors[x].shape, build.tensors[x].dtype
    padded = (*(1,) * (len(new) - len(old)), *old)
    repeated = tuple(size if before == 1 else 1 for before, size in zip(padded, new, strict=True))
    if dtype == "bool":
        return build.make(
            node, "logical_or", (build.like_batch(node, repeated, dtype, False, place), x), shape=new, dtype=dtype
        )
    return build.make(node, "add", (build.like_batch(node, repeated, dtype, 0, place), x), shape=new, dtype=dtype)


@rule("broadcast_tensors.default")
def _broadcast(build: Translation, node: fx.Node, values: Sequence[Value]) -> Value:
    shapes = [build.tensors[str(value)].shape for value in values]
    if len({len(shape) for shape, value in zip(shapes, values, strict=True) if value in build.batched}) > 1:
        raise build.refused(
            node,
            f"it repeats tensors of the shapes {', '.join(map(str, shapes))} to one shape. A loss that compares "
            f"{shapes[0]} with {shapes[-1]} would be another function for every micro-batch size: reshape the labels "
            f"to {shapes[0]} first (as executor.train.losscell.MAELoss does)",
        )
    place = next((build.batched[value] for value in values if value in build.batched), None)
    return tuple(
        _expanded(build, node, build.plain(node, value), tuple(made.shape), place)
        for value, made in zip(values, node.meta["val"], strict=True)
    )


@rule("repeat.default", "tile.default")
def _repeat(build: Translation, node: fx.Node, x: Value, *_: Any) -> Value:
    """Expand a new dim before each dim that is repeated, and merge the two."""
    x = build.plain(node, x)
    old, new = build.tensors[x].shape, build.shape_dtype(node)[0]
    grown, place = build.grown.get(node.name), None
    before: list[int] = []
    after: list[int] = []
    for dim, (size, wanted) in enumerate(zip((*(1,) * (len(new) - len(old)), *old), new, strict=True)):
        if dim == grown:
            place = len(after)
        is_apart = size > 1 and wanted > size
        before += [1, size] if is_apart else [size]
        after += [wanted // size, size] if is_apart else [wanted]
    wide = _expanded(build, node, build.reshaped(node, x, tuple(before)), tuple(after), place)
    return build.reshaped(node, wide, new)


@rule("repeat_interleave.self_int")
def _repeat_interleave(build: Translation, node: fx.Node, x: Value, repeats: int, dim: int | None = None, **_: Any
) -> Value:  # fmt: skip
    x = build.plain(node, x)
    x = build.reshaped(node, x, (math.prod(build.tensors[x].shape),)) if dim is None else x
    shape = build.tensors[x].shape
    at = (dim or 0) % len(shape) + 1
    apart = build.reshaped(node, x, (*shape[:at], 1, *shape[at:]))
    wide = build.make(node, "expand", (apart,), shape=(*shape[:at], repeats, *shape[at:]))
    return build.reshaped(node, wide, build.shape_dtype(node)[0])


# -- parts -------------------------------------------------------------------------------------------------------------


def _narrowed(build: Translation, node: fx.Node, x: str, dim: int, start: int, size: int, step: int = 1) -> str:
    shape = build.tensors[x].shape
    if (start, size) == (0, shape[dim]):
        return x
    new = (*shape[:dim], size, *shape[dim + 1 :])
    attrs: dict[str, Any] = {"dim": dim, "start": start} | ({"step": step} if step != 1 else {})
    return build.make(node, "narrow", (x,), shape=new, dtype=build.tensors[x].dtype, **attrs)


@rule("slice.Tensor")
def _slice(
    build: Translation, node: fx.Node, x: Value, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Value:  # fmt: skip
    x = build.plain(node, x)
    shape = build.tensors[x].shape
    dim %= len(shape)
    chosen = range(shape[dim])[start:end:step]
    return _narrowed(build, node, x, dim, chosen.start, len(chosen), step)


@rule("narrow.default")
def _narrow(build: Translation, node: fx.Node, x: Value, dim: int, start: int, length: int) -> Value:
    x = build.plain(node, x)
    shape = build.tensors[x].shape
    return _narrowed(build, node, x, dim % len(shape), start % shape[dim], length)


@rule("select.int")
def _select(build: Translation, node: fx.Node, x: Value, dim: int, index: int) -> Value:
    x = build.plain(node, x)
    shape = build.tensors[x].shape
    dim %= len(shape)
    return build.reshaped(node, _narrowed(build, node, x, dim, index % shape[dim], 1), build.shape_dtype(node)[0])


@rule("split.Tensor", "split_with_sizes.default", "split.sizes", "chunk.default", "unbind.int", "unsafe_chunk.default")
def _split(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    """One narrow per part that is read; the sizes are those that torch worked out."""
    x = build.plain(node, x)
    called, shape = str(node.target), build.tensors[x].shape
    place = 1 if ".unbind" in called else 2
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    dim = cast(int, dim) % len(shape)
    read = {user.args[1] for user in node.users}
    parts: list[Value] = []
    start = 0
    for index, made in enumerate(node.meta["val"]):
        size = 1 if ".unbind" in called else made.shape[dim]
        if index not in read:
            parts.append(Unreadable(reason=f"part {index} of {called}"))
        else:
            part = _narrowed(build, node, x, dim, start, size)
            parts.append(build.reshaped(node, part, tuple(made.shape)))
        start += size
    return tuple(parts)


# -- joins -------------------------------------------------------------------------------------------------------------


@rule("cat.default", "concat.default")
def _concat(build: Translation, node: fx.Node, parts: Sequence[Value], dim: int = 0) -> Value:
    dtype = build.shape_dtype(node)[1]
    names = [build.cast(node, build.plain(node, part), dtype) for part in parts]
    dim %= len(build.tensors[names[0]].shape)
    return build.make(node, "concat", names, dim=dim, sizes=tuple(build.tensors[name].shape[dim] for name in names))


@rule("stack.default")
def _stack(build: Translation, node: fx.Node, parts: Sequence[Value], dim: int = 0) -> Value:
    shape, dtype = build.shape_dtype(node)
    dim %= len(shape)
    thin = (*shape[:dim], 1, *shape[dim + 1 :])
    names = [build.reshaped(node, build.cast(node, build.plain(node, part), dtype), thin) for part in parts]
    return build.make(node, "concat", names, dim=dim, sizes=(1,) * len(names))


@rule("slice_scatter.default")
def _slice_scatter(
    build: Translation, node: fx.Node, x: Value, part: Value, dim: int = 0, start: int | None = None,
    end: int | None = None, step: int = 1,
) -> Value:  # fmt: skip
    x, part = build.plain(node, x), build.plain(node, part)
    shape, dtype = build.tensors[x].shape, build.tensors[x].dtype
    dim %= len(shape)
    chosen = range(shape[dim])[start:end:step]
    if step != 1:
        return opaque(build, node)
    before = _narrowed(build, node, x, dim, 0, chosen.start) if chosen.start else None
    rest = shape[dim] - chosen.stop
    after = _narrowed(build, node, x, dim, chosen.stop, rest) if rest else None
    names = [each for each in (before, build.cast(node, part, dtype), after) if each is not None]
    if len(names) == 1:
        return names[0]
    return build.make(node, "concat", names, dim=dim, sizes=tuple(build.tensors[name].shape[dim] for name in names))


@rule("select_scatter.default")
def _select_scatter(build: Translation, node: fx.Node, x: Value, part: Value, dim: int, index: int) -> Value:
    x, part = build.plain(node, x), build.plain(node, part)
    shape = build.tensors[x].shape
    dim, index = dim % len(shape), index % shape[dim % len(shape)]
    thin = build.reshaped(node, part, (*shape[:dim], 1, *shape[dim + 1 :]))
    return _slice_scatter(build, node, x, thin, dim, index, index + 1)
