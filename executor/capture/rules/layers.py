"""Capture of layers: matrix products, convolution and pooling, norms, attention, embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from executor.capture.places import NotAsTorchError
from executor.capture.rules.elementwise import combine
from executor.capture.rules.opaque import opaque
from executor.capture.rules.table import rule
from executor.capture.translation import Translation
from executor.capture.values import Chosen, Transposed, Value
from plans.model.graph import itemsize

__all__ = ["pair"]


@rule("linear.default")
def _linear(build: Translation, node: fx.Node, x: Value, weight: Value, bias: Value = None) -> Value:
    if isinstance(weight, Transposed):
        product = _matmul(build, node, x, weight.tensor)
        return product if bias is None else combine(build, node, "add", product, bias)
    if isinstance(weight, str) and (weight in build.batched or len(build.tensors[weight].shape) != 2):
        raise build.refused(node, "the weight of a linear must have two dims and not depend on the batch")
    return build.make(node, "linear", (x, weight) if bias is None else (x, weight, bias))


@rule("matmul.default", "mm.default", "bmm.default", "mv.default", "dot.default")
def _matmul(build: Translation, node: fx.Node, x: Value, weight: Value) -> Value:
    if isinstance(x, Chosen) or isinstance(weight, Chosen):
        return _grouped(build, node, x, weight)
    if isinstance(weight, Transposed) and isinstance(x, str) and len(build.tensors[x].shape) >= 2:
        return build.make(node, "linear", (x, weight.tensor))
    if _sums_over_batch(build, x, weight):
        made = build.make(node, "matmul", (x, weight), of_the_batch=True)
        return build.share(made)
    return build.make(node, "matmul", (x, weight))


def _sums_over_batch(build: Translation, x: Value, y: Value) -> bool:
    """Whether a product of data sums over the samples, as that of the rows which chose each code of a codebook."""
    if not isinstance(x, str) or not isinstance(y, str) or build.is_trained(x) or build.is_trained(y):
        return False
    ranks = [len(build.tensors[each].shape) for each in (x, y)]
    return build.batched.get(x) == ranks[0] - 1 and build.batched.get(y) == max(0, ranks[1] - 2)


def _grouped(build: Translation, node: fx.Node, x: Value, y: Value) -> Value:
    """rows [s, 1, k] by chosen weights [s, k, n], or chosen weights [s, n, k] by columns [s, k, 1]."""
    chosen, other = (y, x) if isinstance(y, Chosen) else (x, y)
    assert isinstance(chosen, Chosen)
    rows, ids = build.plain(node, other), build.tensors[chosen.ids].shape
    shape, made = build.tensors[rows].shape, build.shape_dtype(node)[0]
    row = -2 if chosen is y else -1
    if isinstance(other, Chosen) or len(shape) != len(ids) + 2 or shape[:-2] != ids or shape[row] != 1:
        return build.make(node, "matmul", (build.plain(node, x), build.plain(node, y)))
    attrs: dict[str, Any] = {} if chosen is y else {"transposed": True}
    width = made[-1] if chosen is y else made[-2]
    flat = build.reshaped(node, rows, (*ids, shape[-1] if chosen is y else shape[-2]))
    product = build.make(
        node, "grouped_linear", (flat, chosen.ids, chosen.weights), shape=(*ids, width),
        dtype=build.tensors[rows].dtype, **attrs,
    )  # fmt: skip
    return build.reshaped(node, product, made)


@rule("index.Tensor")
def _index(build: Translation, node: fx.Node, x: Value, indices: Sequence[Value]) -> Value:
    """Rows of what all samples share, chosen by ids; indices of other kinds have no operator of their own."""
    table = build.plain(node, x)
    first = indices[0]
    is_table = table not in build.batched and len(indices) == 1 and build.tensors[table].shape
    if not is_table or not isinstance(first, str) or build.tensors[first].dtype not in ("int64", "int32"):
        return opaque(build, node)
    if len(build.tensors[table].shape) == 3 and build.is_trained(table):
        return Chosen(weights=table, ids=first)
    return build.rows_of(node, table, first)


@rule("addmm.default")
def _addmm(
    build: Translation, node: fx.Node, bias: Value, x: Value, weight: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    if beta != 1 or alpha != 1:
        raise build.refused(node, f"beta={beta} and alpha={alpha} are not supported; both must be 1")
    is_bias = isinstance(bias, str) and len(build.tensors[bias].shape) == 1 and bias not in build.batched
    if isinstance(weight, Transposed) and is_bias and build.tensors[str(bias)].shape == build.shape_dtype(node)[0][-1:]:
        return build.make(node, "linear", (x, weight.tensor, bias))
    return combine(build, node, "add", _matmul(build, node, x, weight), bias)


# -- images ------------------------------------------------------------------------------------------------------------


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """A setting of both dims of an image, given as one number or as one for each."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


class _ConvolutionSettings(NamedTuple):
    """The settings of a convolution, in the order of aten's arguments."""

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: int = 1


@rule("conv2d.default", "conv2d.padding")
def _conv2d(
    build: Translation, node: fx.Node, x: Value, weight: Value, bias: Value = None, *given: Any, **named: Any
) -> Value:
    settings = build.settings(node, _ConvolutionSettings, given, named)
    if len(_shape(build, x)) != 4:
        raise build.refused(node, "its images must have a batch: [batch, channels, height, width]")
    return _convolved(build, node, (x, weight, bias), settings, build.shape_dtype(node)[0])


@rule("conv1d.default", "conv1d.padding")
def _conv1d(
    build: Translation, node: fx.Node, x: Value, weight: Value, bias: Value = None, *given: Any, **named: Any
) -> Value:
    """A convolution of images that have one row."""
    settings = build.settings(node, _ConvolutionSettings, given, named)
    if len(_shape(build, x)) != 3:
        raise build.refused(node, "its sequences must have a batch: [batch, channels, length]")
    padding = settings.padding if isinstance(settings.padding, str) else (0, _only(settings.padding))
    in_rows = settings._replace(
        stride=(1, _only(settings.stride)), padding=padding, dilation=(1, _only(settings.dilation))
    )
    x, weight = (_in_one_row(build, node, each) for each in (x, weight))
    shape = build.shape_dtype(node)[0]
    made = _convolved(build, node, (x, weight, bias), in_rows, (*shape[:2], 1, shape[2]))
    return build.reshaped(node, made, shape)


def _only(setting: Any) -> int:
    return int(setting if isinstance(setting, int) else setting[0])


def _in_one_row(build: Translation, node: fx.Node, x: Value) -> str:
    """[a, b, c] as [a, b, 1, c]."""
    shape = _shape(build, x)
    return build.reshaped(node, x, (*shape[:2], 1, shape[2]))


def _convolved(
    build: Translation, node: fx.Node, operands: tuple[Value, ...], settings: _ConvolutionSettings,
    shape: tuple[int, ...],
) -> str:  # fmt: skip
    """The convolution of (images, weight, bias or None)."""
    padding = settings.padding
    if padding == "valid":
        padding = 0
    elif padding == "same":
        kernel = _shape(build, operands[1])[2:]
        reach = [step * (size - 1) for step, size in zip(pair(settings.dilation), kernel, strict=True)]
        if any(each % 2 for each in reach):
            raise build.refused(node, "padding='same' of an even kernel pads one side only; pad before the convolution")
        padding = tuple(each // 2 for each in reach)
    attrs: dict[str, Any] = {
        "stride": pair(settings.stride), "padding": pair(padding), "dilation": pair(settings.dilation)
    }  # fmt: skip
    if settings.groups > 1:
        attrs["groups"] = settings.groups
    read = [operand for operand in operands if operand is not None]
    return build.make(node, "conv2d", read, shape=shape, **attrs)


@rule("max_pool2d.default")
def _max_pool2d(
    build: Translation, node: fx.Node, x: Value, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> Value:  # fmt: skip
    return build.make(
        node, "max_pool2d", (x,), kernel=pair(kernel), stride=pair(stride or kernel), padding=pair(padding),
        dilation=pair(dilation), ceil=ceil_mode,
    )  # fmt: skip


class _AveragePoolSettings(NamedTuple):
    """The settings of an average pooling, in the order of aten's arguments."""

    stride: Any = ()
    padding: Any = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None


@rule("avg_pool2d.default")
def _avg_pool2d(build: Translation, node: fx.Node, x: Value, kernel: Any, *given: Any, **named: Any) -> Value:
    settings = build.settings(node, _AveragePoolSettings, given, named)
    if settings.divisor_override is not None:
        raise build.refused(node, "divisor_override is not supported; scale the result instead")
    return build.make(
        node, "avg_pool2d", (x,), kernel=pair(kernel), stride=pair(settings.stride or kernel),
        padding=pair(settings.padding), ceil=settings.ceil_mode, count_padding=settings.count_include_pad,
    )  # fmt: skip


@rule("adaptive_avg_pool2d.default")
def _adaptive_avg_pool2d(build: Translation, node: fx.Node, x: Value, output_size: Any) -> Value:
    old, new = _shape(build, x)[-2:], build.shape_dtype(node)[0][-2:]
    if any(before % after for before, after in zip(old, new, strict=True)):
        raise build.refused(node, f"images of {old} do not divide into {new} equal windows")
    window = (old[0] // new[0], old[1] // new[1])
    return build.make(node, "avg_pool2d", (x,), kernel=window, stride=window, padding=(0, 0))


def _shape(build: Translation, value: Value) -> tuple[int, ...]:
    return build.tensors[str(value)].shape


# -- norms -------------------------------------------------------------------------------------------------------------


@rule("softmax.int", "log_softmax.int", "_softmax.default", "_log_softmax.default")
def _softmax(build: Translation, node: fx.Node, x: Value, dim: int, *_: Any, **__: Any) -> Value:
    kind = str(node.target).split(".")[1].lstrip("_")
    return build.make(node, kind, (build.cast(node, build.plain(node, x), build.shape_dtype(node)[1]),), dim=dim)


@rule("layer_norm.default")
def _layer_norm(
    build: Translation, node: fx.Node, x: Value, shape: Sequence[int], weight: Value = None, bias: Value = None,
    eps: float = 1e-5, cudnn_enable: bool = True,
) -> Value:  # fmt: skip
    if weight is None and bias is not None:
        raise build.refused(node, "a bias without a weight is not supported; give it a weight of ones")
    operands = [each for each in (x, weight, bias) if each is not None]
    return build.make(node, "layer_norm", operands, eps=eps, num_dims=len(shape))


@rule("rms_norm.default")
def _rms_norm(
    build: Translation, node: fx.Node, x: Value, shape: Sequence[int], weight: Value = None, eps: float | None = None
) -> Value:
    if eps is None:
        eps = torch.finfo(getattr(torch, build.shape_dtype(node)[1])).eps
    operands = [each for each in (x, weight) if each is not None]
    return build.make(node, "rms_norm", operands, eps=eps, num_dims=len(shape))


class _BatchNormSettings(NamedTuple):
    """The running statistics and settings of a batch norm, in the order of aten's arguments."""

    mean: Value
    variance: Value
    training: bool
    momentum: float
    eps: float
    cudnn_enabled: bool = True


@rule("batch_norm.default")
def _batch_norm(
    build: Translation, node: fx.Node, x: Value, weight: Value, bias: Value, *given: Any, **named: Any
) -> Value:
    """Statistics of the micro-batch, which change the running ones, and the normalisation by them."""
    settings = build.settings(node, _BatchNormSettings, given, named)
    mean = settings.mean
    x = build.plain(node, x)
    if not settings.training or x not in build.batched:  # NFNet standardises its weights by a batch norm
        return opaque(build, node)
    channels, dtype = _shape(build, x)[1], build.tensors[x].dtype
    wide = "float32" if itemsize(dtype) < 4 else dtype
    running: tuple[Value, ...] = ()
    attrs: dict[str, Any] = {}
    if mean is not None:
        counter = f"{str(mean).rpartition('.')[0]}.num_batches_tracked"
        if counter not in build.tensors:
            raise build.refused(node, "running statistics belong to an nn.BatchNorm; use the module, not the function")
        running, attrs = (mean, settings.variance, counter), {"momentum": settings.momentum}
        if len(cast(fx.Node, node.args[3]).users) > 1:
            attrs["whole"] = True  # several uses change one value: all in one layout
    made = build.make(node, "batch_statistics", (x, *running), shape=(2, channels), dtype=wide, **attrs)
    del build.batched[made]
    affine = [
        build.make(node, "fill", (), shape=(channels,), dtype=dtype, value=value) if given is None else given
        for given, value in ((weight, 1.0), (bias, 0.0))
    ]
    return build.make(node, "batch_norm", (x, made, *affine), eps=settings.eps)


# -- attention and embedding -------------------------------------------------------------------------------------------


class _AttentionSettings(NamedTuple):
    """The settings of scaled dot-product attention, in the order of aten's arguments."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


@rule("scaled_dot_product_attention.default")
def _attention(
    build: Translation, node: fx.Node, q: Value, k: Value, v: Value, attn_mask: Value = None, *given: Any, **named: Any
) -> Value:
    settings = build.settings(node, _AttentionSettings, given, named)
    if attn_mask is not None and build.is_trained(attn_mask):
        return _by_formula(build, node, (q, k, v), attn_mask, settings)
    attrs: dict[str, Any] = {"causal": settings.is_causal}
    if settings.scale is not None:
        attrs["scale"] = settings.scale
    if settings.dropout_p:
        attrs |= {"p": settings.dropout_p, "seed": build.next_seed()}
    operands = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    return build.make(node, "attention", operands, **attrs)


def _by_formula(
    build: Translation, node: fx.Node, heads: Sequence[Value], mask: Value, settings: _AttentionSettings
) -> Value:
    """softmax(q k^T scale + mask) v in separate operators, for a mask that is trained, such as a relative bias."""
    q, k, v = (build.plain(node, head) for head in heads)
    shapes = [build.tensors[each].shape for each in (q, k, v)]
    if settings.is_causal or shapes[0][:-2] != shapes[1][:-2]:
        raise build.refused(
            node, "its mask depends on parameters; such an attention has no is_causal and no heads that are shared"
        )
    dtype, rank = build.tensors[q].dtype, len(shapes[1])
    order = (*range(rank - 2), rank - 1, rank - 2)
    turned = tuple(shapes[1][dim] for dim in order)
    keys = build.make(node, "permute", (k,), shape=turned, dtype=dtype, dims=order)
    scores = (*shapes[0][:-1], shapes[1][-2])
    made = build.make(node, "matmul", (q, keys), shape=scores, dtype=dtype)
    scale = shapes[0][-1] ** -0.5 if settings.scale is None else settings.scale
    if scale != 1:
        made = build.make(node, "mul", (made,), shape=scores, dtype=dtype, number=scale)
    made = build.make(node, "add", (made, mask), shape=scores, dtype=dtype)
    made = build.make(node, "softmax", (made,), shape=scores, dtype=dtype, dim=rank - 1)
    if settings.dropout_p:
        p, seed = settings.dropout_p, build.next_seed()
        made = build.make(node, "dropout", (made,), shape=scores, dtype=dtype, p=p, seed=seed)
    return build.make(node, "matmul", (made, v))


@rule("embedding.default")
def _embedding(
    build: Translation, node: fx.Node, table: Value, ids: Value, padding_idx: int = -1, scale_grad: bool = False,
    sparse: bool = False,
) -> Value:  # fmt: skip
    if scale_grad:
        reason = "with scale_grad_by_freq a gradient depends on how often the whole batch has an id; omit it"
        raise NotAsTorchError(str(build.refused(node, reason)))
    attrs: dict[str, Any] = {} if padding_idx < 0 else {"padding_id": padding_idx}
    return build.make(node, "embedding", (ids, table), **attrs)


@rule("instance_norm.default")
def _instance_norm(build: Translation, node: fx.Node, *given: Any) -> Value:
    """torch's own call, which computes every sample separately where it keeps no running statistics."""
    if given[3] is not None and given[5]:
        reason = "it changes running statistics, which a plan would not return; use track_running_stats=False"
        raise NotAsTorchError(str(build.refused(node, reason)))
    return opaque(build, node)
