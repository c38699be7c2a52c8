"""Capture of means over the samples of a batch, and of weighted sums and vectors of such means.

A mean is kept as the terms of every sample until the loss is complete, because micro-batches and ranks average terms:
0.5 mean(a) + 2 mean(b) = mean(0.5 a + 2 b).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from executor.capture.rules.table import Number, mean_rule
from executor.capture.translation import Translation
from executor.capture.values import Mean, Transposed, Value

__all__ = ["combined", "combined_means", "count_of_samples", "mean_over", "per_sample", "reshaped_mean"]


def mean_over(
    build: Translation, node: fx.Node, x: str, over: Sequence[int] | None = None, *, is_sum: bool = False
) -> Mean:
    """The mean (the sum) of a tensor over dims that include the batch; over all of them unless they are given."""
    dims = range(len(build.tensors[x].shape)) if over is None else over
    return Mean(
        node=node, terms=lambda: per_sample(build, node, x, dims, is_sum=is_sum), is_sum=is_sum,
        shape=tuple(size for dim, size in enumerate(build.tensors[x].shape) if dim not in dims),
    )  # fmt: skip


def per_sample(
    build: Translation, node: fx.Node, x: str, over: Sequence[int] | None = None, *, is_sum: bool = False
) -> str:
    """Each sample's mean (sum) over dims, [batch, *rest]; over all but the batch unless they are given.

    Where the samples are flattened, [batch x n, *rest], a mean stays one of all rows.
    """
    tensor = build.tensors[x]
    place, rank = build.batched.get(x, 0), len(tensor.shape)
    dims = [dim for dim in (range(rank) if over is None else over) if dim != place]
    kept = [dim for dim in range(rank) if dim not in dims]
    made = x
    if dims:
        kind, shape = "reduce_sum" if is_sum else "reduce_mean", tuple(tensor.shape[dim] for dim in kept)
        attrs: dict[str, Any] = {"dims": tuple(dims), "keepdim": False}
        made = build.make(node, kind, (x,), shape=shape, dtype=tensor.dtype, **attrs)
    first = kept.index(place)
    if first:
        order = (first, *(at for at in range(len(kept)) if at != first))
        shape = tuple(build.tensors[made].shape[at] for at in order)
        made = build.make(node, "permute", (made,), shape=shape, dtype=tensor.dtype, dims=order)
    return _per_batch(build, node, made, is_sum=True) if is_sum else made


# -- what is made of means ---------------------------------------------------------------------------------------------


@mean_rule("alias.default", "clone.default", "contiguous.default", "lift_fresh_copy.default")
def _same(build: Translation, node: fx.Node, x: Mean, *_: Any, **__: Any) -> Value:
    return x


@mean_rule("_assert_tensor_metadata.default")
def _nothing(build: Translation, node: fx.Node, x: Mean, *_: Any, **__: Any) -> Value:
    return None


@mean_rule(
    "view.default", "reshape.default", "squeeze.default", "squeeze.dim", "unsqueeze.default", "flatten.using_ints"
)
def _reshaped(build: Translation, node: fx.Node, x: Mean, *_: Any, **__: Any) -> Value:
    return reshaped_mean(build, node, x, build.shape_dtype(node)[0])


def reshaped_mean(build: Translation, node: fx.Node, x: Mean, shape: tuple[int, ...]) -> Mean:
    """A mean in another shape; the mean itself if it already has that shape."""
    if shape == x.shape:
        return x

    def terms() -> str:
        return _in_shape(build, node, _per_batch(build, node, x.terms()), shape)

    return Mean(node=node, terms=terms, shape=shape, is_sum=x.is_sum)


def count_of_samples(build: Translation, node: fx.Node) -> str:
    """The number of samples of a micro-batch, a value shared by all of them."""
    dtype = build.shape_dtype(node)[1]
    ones = Mean(node=node, terms=lambda: build.like_batch(node, (build.batch_size,), dtype, 1), is_sum=True)
    return build.of_batch(node, ones)


def _share(build: Translation, node: fx.Node, whole: Value | Number) -> str:
    """A number divided by the number of samples."""
    shape = build.tensors[whole].shape if isinstance(whole, str) else ()
    return combined(build, node, "div", whole, count_of_samples(build, node), shape)


def _in_shape(build: Translation, node: fx.Node, terms: str, shape: tuple[int, ...]) -> str:
    return build.reshaped(node, terms, (build.batch_size, *shape))


@mean_rule("mean.default", "sum.default", "mean.dim", "sum.dim_IntList")
def _reduced_further(
    build: Translation, node: fx.Node, x: Mean, dims: Sequence[int] | int | None = None, keepdim: bool = False,
    **_: Any,
) -> Value:  # fmt: skip
    """The mean or sum over dims of a mean of several numbers."""
    if x.shape == ():
        return x
    rank, shape = len(x.shape), build.shape_dtype(node)[0]
    given = range(rank) if dims is None or dims == () else (dims,) if isinstance(dims, int) else dims
    over = tuple(sorted(dim % rank + 1 for dim in given))
    kind = f"reduce_{str(node.target).split('.')[1]}"

    def terms() -> str:
        made, dtype = _per_batch(build, node, x.terms()), build.shape_dtype(node)[1]
        return build.make(
            node, kind, (made,), shape=(build.batch_size, *shape), dtype=dtype, dims=over, keepdim=keepdim
        )

    return Mean(node=node, terms=terms, shape=shape, is_sum=x.is_sum)


@mean_rule("select.int")
def _selected(build: Translation, node: fx.Node, x: Mean, dim: int, index: int) -> Value:
    at = dim % len(x.shape)

    def terms() -> str:
        made, dtype = _per_batch(build, node, x.terms()), build.shape_dtype(node)[1]
        shape = (build.batch_size, *x.shape[:at], 1, *x.shape[at + 1 :])
        one = build.make(node, "narrow", (made,), shape=shape, dtype=dtype, dim=at + 1, start=index % x.shape[at])
        return build.reshaped(node, one, (build.batch_size, *x.shape[:at], *x.shape[at + 1 :]))

    return Mean(node=node, terms=terms, shape=build.shape_dtype(node)[0], is_sum=x.is_sum)


@mean_rule("stack.default", "cat.default")
def _joined(build: Translation, node: fx.Node, parts: Sequence[Value], dim: int = 0) -> Value:
    """Several means concatenated, such as the losses of several tasks."""
    means = [part for part in parts if isinstance(part, Mean)]
    if len(means) < len(parts) or len({mean.is_sum for mean in means}) > 1:
        raise build.refused(node, "it joins means over the samples of a batch with what is no such mean")
    shape, is_stack = build.shape_dtype(node)[0], "stack" in str(node.target)
    at = dim % len(shape)

    def terms() -> str:
        made, dtype = [_per_batch(build, node, mean.terms()) for mean in means], build.shape_dtype(node)[1]
        if is_stack:
            made = [_in_shape(build, node, each, (*shape[:at], 1, *shape[at + 1 :])) for each in made]
        made = [build.cast(node, each, dtype) for each in made]
        sizes = tuple(build.tensors[each].shape[at + 1] for each in made)
        return build.make(node, "concat", made, shape=(build.batch_size, *shape), dtype=dtype, dim=at + 1, sizes=sizes)

    return Mean(node=node, terms=terms, shape=shape, is_sum=means[0].is_sum)


@mean_rule("to.dtype", "to.dtype_layout", "to.device", "_to_copy.default")
def _to(build: Translation, node: fx.Node, x: Mean, *_: Any, **__: Any) -> Value:
    dtype = build.shape_dtype(node)[1]
    return replace(x, node=node, terms=lambda: build.cast(node, x.terms(), dtype), own=None)


@mean_rule("detach.default")
def _detached(build: Translation, node: fx.Node, x: Mean) -> Value:
    return replace(x, node=node, terms=lambda: str(build.detached(node, x.terms())), own=None)


@mean_rule("neg.default")
def _negative(build: Translation, node: fx.Node, x: Mean) -> Value:
    return combined_means(build, node, "mul", x, -1)


@mean_rule("add.Tensor", "sub.Tensor", "rsub.Scalar", "rsub.Tensor", "add.Scalar", "sub.Scalar")
def _sum(build: Translation, node: fx.Node, x: Value | Number, y: Value | Number, alpha: Number = 1) -> Value:
    called = str(node.target).split(".")[1].rstrip("_")
    kind = "add" if called == "add" else "sub"
    if alpha != 1:
        y = combined_means(build, node, "mul", y, alpha) if isinstance(y, Mean) else _times(build, node, y, alpha)
    return combined_means(build, node, kind, *((y, x) if called == "rsub" else (x, y)))


def _times(build: Translation, node: fx.Node, y: Value | Number, by: Number) -> Value | Number:
    if isinstance(y, bool | int | float):
        return y * by
    return build.make_as(node, "mul", build.plain(node, y), number=by)


def _per_batch(build: Translation, node: fx.Node, terms: str, *, is_sum: bool = False) -> str:
    """Terms of a mean (a sum), one for each sample; where samples were flattened, each one's mean (sum)."""
    size, *rest = build.tensors[terms].shape
    if size == build.batch_size:
        return terms
    apart = build.reshaped(node, terms, (build.batch_size, size // build.batch_size, *rest))
    return per_sample(build, node, apart, (1,), is_sum=is_sum)


def combined(
    build: Translation, node: fx.Node, kind: str, x: Value | Number, y: Value | Number, shape: tuple[int, ...]
) -> str:
    """x kind y of tensors, or of a tensor and a number."""
    dtype = build.shape_dtype(node)[1]
    numbers = [isinstance(each, bool | int | float) for each in (x, y)]
    attrs: dict[str, Any] = {}
    if any(numbers):
        attrs = {"number": x if numbers[0] else y} | ({"reverse": True} if numbers[0] else {})
    operands = [each for each, is_number in zip((x, y), numbers, strict=True) if not is_number]
    read = [build.cast(node, build.plain(node, operand), dtype) for operand in operands]  # type: ignore[arg-type]
    return build.make(node, kind, read, shape=shape, dtype=dtype, **attrs)


def combined_means(build: Translation, node: fx.Node, kind: str, x: Value | Number, y: Value | Number) -> Value:
    """x kind y of the terms; the other one is a mean, a number, or a scalar that is the same for all samples."""
    means = [mean for mean in (x, y) if isinstance(mean, Mean)]
    others = [each for each in (x, y) if isinstance(each, str | Transposed)]
    shifts = kind in ("add", "sub") and len(means) == 1
    if shifts and means[0].is_sum and not build.is_trained(means[0].terms()):
        return combined(build, node, kind, x, y, build.shape_dtype(node)[0])
    if len({mean.is_sum for mean in means}) > 1:
        raise build.refused(node, "it adds a sum over the samples of a batch to a mean over them")
    if shifts and means[0].is_sum:  # every sample adds its share of the other one
        x, y = (each if isinstance(each, Mean) else _share(build, node, each) for each in (x, y))
        others = [each for each in (x, y) if isinstance(each, str)]
    if any(other in build.batched for other in others):
        raise build.samples_meet(node)
    shape = build.shape_dtype(node)[0]

    def ranked(mean: Mean) -> str:
        """The terms with a dim for each of the result's."""
        missing = (1,) * (len(shape) - len(mean.shape))
        return _in_shape(build, node, _per_batch(build, node, mean.terms()), (*missing, *mean.shape))

    def terms() -> str:
        left, right = (ranked(mean) if isinstance(mean, Mean) else mean for mean in (x, y))
        return combined(build, node, kind, left, right, (build.batch_size, *shape))

    return Mean(node=node, terms=terms, shape=shape, is_sum=means[0].is_sum)
