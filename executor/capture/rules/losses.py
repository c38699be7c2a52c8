"""Capture of losses: the mean of a loss over the samples of a batch (`executor.capture.rules.means`).

If the loss is a single mean, it becomes one operator (cross entropy, L1, squared error). Any other loss becomes
ordinary operators that compute the terms of every sample, and their mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from executor.capture.rules.means import per_sample
from executor.capture.rules.opaque import aten_operators
from executor.capture.rules.table import rule
from executor.capture.translation import Translation
from executor.capture.values import Mean, Value

__all__: list[str] = []


# -- losses of elements ------------------------------------------------------------------------------------------------

_REDUCTIONS = ("none", "mean", "sum")


@rule("l1_loss.default", "mse_loss.default")
def _elementwise_loss(build: Translation, node: fx.Node, x: Value, target: Value, reduction: int = 1) -> Value:
    kind = str(node.target).split(".")[1]
    dtype = build.shape_dtype(node)[1]
    if not isinstance(x, str) or not isinstance(target, str):
        raise build.refused(node, f"{kind} takes tensors, not {x!r} and {target!r}")
    x, target = build.cast(node, x, dtype), build.cast(node, target, dtype)
    if not build.is_trained(x):
        x, target = target, x  # both losses are symmetric; the gradient is that of the first operand
    read = (x, target)

    def elements() -> str:
        apart = build.make_as(node, "sub", *read)
        return build.make_as(node, "abs", apart) if kind == "l1_loss" else build.make_as(node, "pow", apart, exponent=2)

    own = None if build.is_trained(target) else lambda: build.make(node, kind, read, shape=(), dtype=dtype)
    return _reduced(build, node, elements, reduction, own)


def _reduced(
    build: Translation, node: fx.Node, elements: Callable[[], str], reduction: int, own: Callable[[], str] | None = None
) -> Value:
    """Elements whose dim 0 is the batch as they are (0), their mean (1) or their sum (2)."""
    if _REDUCTIONS[reduction] == "none":
        return elements()
    is_sum = _REDUCTIONS[reduction] == "sum"
    return Mean(
        node=node, terms=lambda: per_sample(build, node, elements(), is_sum=is_sum), own=None if is_sum else own,
        is_sum=is_sum,
    )  # fmt: skip


@rule(
    "binary_cross_entropy.default", "binary_cross_entropy_with_logits.default", "smooth_l1_loss.default",
    "huber_loss.default", "kl_div.default", "soft_margin_loss.default", "poisson_nll_loss.default",
)  # fmt: skip
def _loss_of_aten(build: Translation, node: fx.Node, *_: Any, **__: Any) -> Value:
    """torch's own call for the elements; their mean is the loss."""
    shapes = [argument.meta["val"].shape for argument in node.args[:2] if isinstance(argument, fx.Node)]
    if len(set(shapes)) != 1:
        raise build.refused(node, f"it compares {shapes[0]} with {shapes[-1]}; reshape the labels to {shapes[0]}")
    return _loss_of_samples(build, node)


@rule(
    "triplet_margin_loss.default", "cosine_embedding_loss.default", "margin_ranking_loss.default",
    "hinge_embedding_loss.default", "multi_margin_loss.default", "multilabel_margin_loss.default",
)  # fmt: skip
def _loss_of_samples(build: Translation, node: fx.Node, *_: Any, **__: Any) -> Value:
    """torch's call without its mean or sum, for elements or for complete samples."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index("reduction")
    reduction: Any = node.args[place] if len(node.args) > place else node.kwargs.get("reduction", 1)
    args = tuple(0 if at == place else argument for at, argument in enumerate(node.args))
    kwargs = dict(node.kwargs) | ({"reduction": 0} if len(args) <= place else {})
    read = fx.map_arg((args, kwargs), lambda each: torch.empty_like(each.meta["val"], device="meta"))
    result = node.target(*read[0], **read[1])
    return _reduced(build, node, lambda: str(aten_operators(build, node, args, kwargs, result)), reduction)


@rule("twofold.ctc_loss.default")
def _ctc_loss(build: Translation, node: fx.Node, *given: Any) -> Value:
    """torch's own call for each sample; the mean is over the samples, each by its number of labels."""
    shape, dtype = build.shape_dtype_of(node, node.args[0].meta["val"][0, :, 0])  # type: ignore[union-attr]
    _, _, _, lengths, _, reduction, infinite = given
    args = (*node.args[:5], _REDUCTIONS.index("none"), infinite)

    def terms() -> str:
        result = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        made = str(aten_operators(build, node, args, {}, result, "aten.ctc_loss.Tensor", 0))
        if _REDUCTIONS[reduction] != "mean":
            return made
        counts = build.make(
            node, "clamp", (build.cast(node, build.plain(node, lengths), dtype),), shape=shape, dtype=dtype, min=1
        )
        return build.make(node, "div", (made, counts), shape=shape, dtype=dtype)

    return _reduced(build, node, terms, reduction)


# -- losses of classes -------------------------------------------------------------------------------------------------


@rule("cross_entropy_loss.default")
def _cross_entropy(
    build: Translation,
    node: fx.Node,
    x: Value,
    target: Value,
    weight: Value = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Value:
    logits = _classes_last(build, node, build.plain(node, x))
    target = build.plain(node, target)
    if build.tensors[target].differentiable:
        return _of_probabilities(build, node, logits, _classes_last(build, node, target), weight, reduction,
                                 label_smoothing)  # fmt: skip
    _check_labels(build, node, logits, target)
    counted = _is_counted(build, target, ignore_index)
    own = None
    if weight is None and not label_smoothing:
        own = lambda: _own_cross_entropy(build, node, logits, target, ignore_index if counted else None)  # noqa: E731

    def elements() -> str:
        chances = build.make_as(node, "log_softmax", logits, dim=len(build.tensors[logits].shape) - 1)
        ignored = ignore_index if counted else None
        return _label_terms(build, node, chances, target, weight, ignored, reduction, label_smoothing)

    return _reduced(build, node, elements, reduction, own)


@rule("nll_loss_nd.default", "nll_loss.default", "nll_loss2d.default")
def _nll(
    build: Translation, node: fx.Node, x: Value, target: Value, weight: Value = None, reduction: int = 1,
    ignore_index: int = -100,
) -> Value:  # fmt: skip
    """The cross entropy of a log_softmax over the classes, since log_softmax(log_softmax(x)) = log_softmax(x)."""
    x = build.plain(node, x)
    is_softmax = _is_log_softmax(build, x)
    chances, labels = _classes_last(build, node, x), build.plain(node, target)
    _check_labels(build, node, chances, labels)
    ignored = ignore_index if _is_counted(build, labels, ignore_index) else None
    own = None
    if weight is None and is_softmax:
        own = lambda: _own_cross_entropy(build, node, chances, labels, ignored)  # noqa: E731
    return _reduced(
        build, node, lambda: _label_terms(build, node, chances, labels, weight, ignored, reduction), reduction, own
    )


def _own_cross_entropy(build: Translation, node: fx.Node, x: str, labels: str, ignore_index: int | None) -> str:
    dtype = build.tensors[x].dtype
    if ignore_index is None:
        return build.make(node, "cross_entropy", (x, labels), shape=(), dtype=dtype)
    wide = "float64" if dtype == "float64" else "float32"
    count = build.make(node, "count_labels", (labels,), shape=(), dtype=wide, ignore_index=ignore_index)
    return build.make(node, "cross_entropy", (x, labels, count), shape=(), dtype=dtype, ignore_index=ignore_index)


def _label_terms(
    build: Translation, node: fx.Node, chances: str, labels: str, weight: Value, ignore_index: int | None,
    reduction: int, smoothing: float = 0.0,
) -> str:  # fmt: skip
    """The term of every label: -w[label] log p[label], smoothed over all classes, over the mean weight of the labels.

    `torch.nn.CrossEntropyLoss` has the formulas; labels that are ignored have the weight 0.
    """
    tensor, shape = build.tensors[chances], build.tensors[labels].shape

    def made(kind: str, *operands: Value, dtype: str = tensor.dtype, **attrs: Any) -> str:
        return build.make(node, kind, operands, shape=shape, dtype=dtype, **attrs)

    counts = None
    if ignore_index is not None:
        counts = made("ne", labels, dtype="bool", number=ignore_index)
        labels = made("masked_fill", labels, made("logical_not", counts, dtype="bool"),
                      dtype=build.tensors[labels].dtype, value=0)  # fmt: skip
    terms = made("neg", made("pick", chances, labels))
    weights: str | None = None
    if weight is not None:
        table = build.reshaped(node, weight, (tensor.shape[-1], 1))
        chosen = build.make(node, "embedding", (labels, table), shape=(*shape, 1), dtype=tensor.dtype)
        weights = build.reshaped(node, chosen, shape)
        terms = made("mul", terms, weights)
    if smoothing:
        spread = build.make_as(node, "mul", chances, weight) if weight is not None else chances
        over: dict[str, Any] = {"dims": (len(tensor.shape) - 1,), "keepdim": False}
        rest = made("mul", made("reduce_mean", spread, **over), number=-smoothing)
        terms = made("add", made("mul", terms, number=1 - smoothing), rest)
    if counts is not None:
        kept = build.cast(node, counts, tensor.dtype)
        weights = kept if weights is None else made("mul", weights, kept)
        terms = made("mul", terms, kept)
    if weights is None or _REDUCTIONS[reduction] != "mean":
        return terms
    mean = build.make(node, "batch_mean", (weights,), shape=(), dtype=tensor.dtype)
    return made("div", terms, mean)


def _of_probabilities(
    build: Translation, node: fx.Node, logits: str, wanted: str, weight: Value, reduction: int, smoothing: float
) -> Value:
    """The mean over all labels but the classes of -sum_c w[c] p[c] log softmax(x)[c]."""
    rank = len(build.tensors[logits].shape)
    dtype = build.tensors[logits].dtype

    def elements() -> str:
        chances = build.make_as(node, "log_softmax", logits, dim=rank - 1)
        aim = build.cast(node, wanted, dtype)
        if smoothing:
            aim = build.make_as(node, "mul", aim, number=1 - smoothing)
            aim = build.make_as(node, "add", aim, number=smoothing / build.tensors[logits].shape[-1])
        terms = build.make_as(node, "mul", chances, aim)
        if weight is not None:
            terms = build.make_as(node, "mul", terms, weight)
        shape = build.tensors[logits].shape[:-1]
        total = build.make(node, "reduce_sum", (terms,), shape=shape, dtype=dtype, dims=(rank - 1,), keepdim=False)
        return build.make_as(node, "neg", total)

    return _reduced(build, node, elements, reduction)


def _classes_last(build: Translation, node: fx.Node, x: str) -> str:
    """[batch, classes, ...] -> [batch, ..., classes]."""
    tensor = build.tensors[x]
    rank = len(tensor.shape)
    if rank < 3:
        return x
    order = (0, *range(2, rank), 1)
    shape = tuple(tensor.shape[dim] for dim in order)
    return build.make(node, "permute", (x,), shape=shape, dtype=tensor.dtype, dims=order)


def _check_labels(build: Translation, node: fx.Node, logits: str, labels: str) -> None:
    shape, label = build.tensors[logits].shape, build.tensors[labels]
    if len(shape) < 2 or label.shape != shape[:-1] or label.differentiable:
        given = (shape[0], shape[-1], *shape[1:-1]) if len(shape) > 1 else shape
        raise build.refused(
            node, f"it compares {given} with {label.dtype} {label.shape}; logits must be [batch, classes, ...] and "
            f"labels class numbers [batch, ...]"
        )  # fmt: skip


def _is_counted(build: Translation, labels: str, ignore_index: int) -> bool:
    """Whether ignored labels are left out of the mean; torch's default of -100 is rarely intended for fed labels."""
    return ignore_index != -100 or not _is_fed(build, labels)


def _is_fed(build: Translation, name: str) -> bool:
    """Whether a tensor holds only values from an input of the graph."""
    made = {output: operator for operator in build.operators for output in operator.outputs}
    while name in made and made[name].kind in ("reshape", "permute", "narrow", "cast"):
        (name,) = made[name].inputs
    return build.tensors[name].kind == "input"


def _is_log_softmax(build: Translation, x: str) -> bool:
    """Whether x [batch, classes, ...] is a log_softmax over the classes, seen through changes of shape."""
    made = {output: operator for operator in build.operators for output in operator.outputs}
    name, dim = x, min(1, len(build.tensors[x].shape) - 1)
    while name in made and made[name].kind in ("reshape", "permute"):
        operator = made[name]
        (before,) = (build.tensors[each].shape for each in operator.inputs)
        after = build.tensors[name].shape
        if operator.kind == "permute":
            dim = int(tuple(operator.attrs["dims"])[dim])  # type: ignore
        elif dim == len(after) - 1 and before[-1] == after[-1]:
            dim = len(before) - 1
        else:
            return False
        (name,) = operator.inputs
    maker = made.get(name)
    rank = len(build.tensors[name].shape)
    return maker is not None and maker.kind == "log_softmax" and int(str(maker.attrs["dim"])) % rank == dim
