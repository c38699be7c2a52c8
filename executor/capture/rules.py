"""From aten calls to operators: one short rule per call.

Here stand the calls that change nothing and the losses; the rest stands in `capture_elementwise`, `capture_shapes` and
`capture_layers`, and a call without a rule goes to `capture_opaque`. Calls that change nothing (identity, a cast to the
same dtype, dropout that drops nothing) leave no operator. A transposed parameter exists only as the weight of a matrix
product, until something else reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

import executor.capture.elementwise
import executor.capture.layers
import executor.capture.shapes  # noqa: F401  (each enters its rules)
from executor.capture.table import RULES, rule
from executor.capture.translation import Translation, Value

__all__ = ["RULES"]


@rule("alias.default", "clone.default", "contiguous.default", "lift_fresh_copy.default", "positive.default")
def _same(build: Translation, node: fx.Node, x: Value, **_: Any) -> Value:
    return x


@rule("_assert_tensor_metadata.default")
def _nothing(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    return None


@rule("getitem")
def _getitem(build: Translation, node: fx.Node, values: tuple[Value, ...], index: int) -> Value:
    return values[index]


@rule("detach.default")
def _detach(build: Translation, node: fx.Node, x: Value) -> Value:
    if build.is_trained(x):
        raise build.refused(node, "it cuts the gradient of what depends on parameters; only data may be detached")
    return x


@rule("broadcast_tensors.default")
def _broadcast(build: Translation, node: fx.Node, values: Sequence[Value]) -> Value:
    shapes = [build.tensors[str(value)].shape for value in values]
    if len(set(shapes)) != 1:
        raise build.refused(
            node,
            f"it repeats tensors of the shapes {', '.join(map(str, shapes))} to one shape. A loss that compares "
            f"{shapes[0]} with {shapes[-1]} would be another function for every micro-batch size: reshape the labels "
            f"to {shapes[0]} first (as executor.train.losscell.MAELoss does)",
        )
    return tuple(values)


@rule("l1_loss.default", "mse_loss.default")
def _elementwise_loss(build: Translation, node: fx.Node, x: Value, target: Value, reduction: int = 1) -> Value:
    kind = str(node.target).split(".")[1]
    _check_mean(build, node, reduction)
    if not isinstance(x, str) or not isinstance(target, str):
        raise build.refused(node, f"{kind} takes tensors, not {x!r} and {target!r}")
    if not build.is_trained(x):
        x, target = target, x  # both losses are symmetric; the gradient is that of the first operand
    _check_target(build, node, target)
    dtype = build.shape_dtype(node)[1]
    return build.make(node, kind, (build.cast(node, x, dtype), build.cast(node, target, dtype)))


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
    _check_mean(build, node, reduction)
    _check_target(build, node, target)
    if weight is not None or label_smoothing:
        raise build.refused(node, "class weights and label_smoothing are not supported; leave them out")
    return _mean_over_labels(build, node, x, target, ignore_index)


@rule("nll_loss_nd.default", "nll_loss.default", "nll_loss2d.default")
def _nll(
    build: Translation, node: fx.Node, x: Value, target: Value, weight: Value = None, reduction: int = 1,
    ignore_index: int = -100,
) -> Value:  # fmt: skip
    """nll_loss of a log_softmax x over the classes: captured as the cross entropy of x, since log_softmax(x) = x."""
    _check_mean(build, node, reduction)
    _check_target(build, node, target)
    if weight is not None:
        raise build.refused(node, "class weights are not supported; leave them out")
    made = {output: operator for operator in build.operators for output in operator.outputs}
    name, dim = str(x), min(1, len(build.tensors[str(x)].shape) - 1)
    while name in made and made[name].kind in ("reshape", "permute"):
        operator = made[name]
        (before,) = (build.tensors[each].shape for each in operator.inputs)
        after = build.tensors[name].shape
        if operator.kind == "permute":
            dim = int(tuple(operator.attrs["dims"])[dim])  # type: ignore
        elif dim == len(after) - 1 and before[-1] == after[-1]:
            dim = len(before) - 1
        else:
            break
        (name,) = operator.inputs
    maker = made.get(name)
    if (
        maker is None
        or maker.kind != "log_softmax"
        or int(str(maker.attrs["dim"])) % len(build.tensors[name].shape) != dim
    ):
        raise build.refused(
            node, "it takes what log_softmax over the classes has made, directly; or use cross_entropy of the logits"
        )
    return _mean_over_labels(build, node, x, target, ignore_index)


def _mean_over_labels(build: Translation, node: fx.Node, x: Value, target: Value, ignore_index: int) -> Value:
    x = build.plain(node, x)
    logits, labels = build.tensors[x], build.tensors[str(target)]
    rank = len(logits.shape)
    if rank < 2 or labels.shape != (logits.shape[0], *logits.shape[2:]) or labels.differentiable:
        raise build.refused(
            node,
            f"it compares {logits.shape} with {labels.dtype} {labels.shape}; logits must be [batch, classes, ...] and "
            f"labels class numbers [batch, ...]",
        )
    if rank > 2:
        order = (0, *range(2, rank), 1)
        shape = tuple(logits.shape[dim] for dim in order)
        x = build.make(node, "permute", (x,), shape=shape, dtype=logits.dtype, dims=order)
    if ignore_index == -100 and _is_fed(build, str(target)):
        # torch's default: as good as never meant, and a label of -100 in the data ends the run
        return build.make(node, "cross_entropy", (x, target))
    wide = "float64" if logits.dtype == "float64" else "float32"
    count = build.make(node, "count_labels", (target,), shape=(), dtype=wide, ignore_index=ignore_index)
    return build.make(node, "cross_entropy", (x, target, count), ignore_index=ignore_index)


def _is_fed(build: Translation, name: str) -> bool:
    """Whether a tensor holds only values of an input of the graph."""
    made = {output: operator for operator in build.operators for output in operator.outputs}
    while name in made and made[name].kind in ("reshape", "permute", "narrow", "cast"):
        (name,) = made[name].inputs
    return build.tensors[name].kind == "input"


def _check_mean(build: Translation, node: fx.Node, reduction: int) -> None:
    if reduction != 1:
        raise build.refused(node, "the loss must be a mean (reduction='mean'), so that micro-batches average to it")


def _check_target(build: Translation, node: fx.Node, target: Value) -> None:
    if build.is_trained(target):
        raise build.refused(node, "its target depends on parameters; the gradient goes to the prediction only")
