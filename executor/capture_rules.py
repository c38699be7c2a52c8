"""From aten calls to operators: one short rule per call.

Calls that change nothing (identity, a cast to the same dtype, dropout that drops nothing) leave no operator. A
transposed parameter exists only as the weight of a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from executor.capture_translation import Rule, Translation, Transposed, Value

__all__ = ["RULES"]

RULES: dict[str, Rule] = {}
"""aten call (as torch prints it) -> its rule."""


def rule(*targets: str) -> Callable[[Rule], Rule]:
    """Enter a rule under the names of aten calls."""

    def enter(function: Rule) -> Rule:
        for target in targets:
            RULES[target if target == "getitem" else f"aten.{target}"] = function
        return function

    return enter


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


@rule("dropout.default", "feature_dropout.default", "alpha_dropout.default")
def _dropout(build: Translation, node: fx.Node, x: Value, p: float, train: bool) -> Value:
    if train and p > 0:
        raise build.refused(
            node, f"dropout with p={p} while training is not carried out; set p=0 or call .eval() on it"
        )
    return x


@rule("linear.default")
def _linear(build: Translation, node: fx.Node, x: Value, weight: Value, bias: Value = None) -> Value:
    if isinstance(weight, Transposed):
        product = _matmul(build, node, x, weight.tensor)
        return product if bias is None else _binary(build, node, product, bias)
    if isinstance(weight, str) and (weight in build.batched or len(build.tensors[weight].shape) != 2):
        raise build.refused(node, "the weight of a linear must be a parameter with two dims")
    return build.make(node, "linear", (x, weight) if bias is None else (x, weight, bias))


@rule("matmul.default", "mm.default")
def _matmul(build: Translation, node: fx.Node, x: Value, weight: Value) -> Value:
    if isinstance(weight, Transposed) and isinstance(x, str) and len(build.tensors[x].shape) >= 2:
        return build.make(node, "linear", (x, weight.tensor))
    return build.make(node, "matmul", (x, weight))


@rule("addmm.default")
def _addmm(
    build: Translation, node: fx.Node, bias: Value, x: Value, weight: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    if beta != 1 or alpha != 1:
        raise build.refused(node, f"beta={beta} and alpha={alpha} are not carried out; both must be 1")
    is_bias = isinstance(bias, str) and len(build.tensors[bias].shape) == 1 and bias not in build.batched
    if isinstance(weight, Transposed) and is_bias and build.tensors[str(bias)].shape == build.shape_dtype(node)[0][-1:]:
        return build.make(node, "linear", (x, weight.tensor, bias))
    return _binary(build, node, _matmul(build, node, x, weight), bias)


@rule("t.default", "numpy_T.default", "transpose.int", "permute.default", "mT.default")
def _transpose(build: Translation, node: fx.Node, x: Value, *dims: Any) -> Value:
    if isinstance(x, Transposed):
        number_of_dims, inner = 2, x.tensor
    else:
        number_of_dims, inner = len(build.tensors[str(x)].shape), str(x)
    order = [dim % number_of_dims for dim in (dims[0] if len(dims) == 1 else dims)]
    if number_of_dims != 2 or inner in build.batched:
        raise build.unknown(node, "transpose")
    if order in ([0, 0], [1, 1]) or (len(dims) == 1 and order == [0, 1]):
        return x
    return inner if isinstance(x, Transposed) else Transposed(tensor=inner)


@rule("relu.default")
def _relu(build: Translation, node: fx.Node, x: Value) -> Value:
    return build.make(node, "relu", (x,))


@rule("silu.default")
def _silu(build: Translation, node: fx.Node, x: Value) -> Value:
    return build.make(node, "silu", (x,))


@rule("abs.default")
def _abs(build: Translation, node: fx.Node, x: Value) -> Value:
    return build.make(node, "abs", (x,))


@rule("gelu.default")
def _gelu(build: Translation, node: fx.Node, x: Value, *, approximate: str = "none") -> Value:
    return build.make(node, "gelu", (x,), approximate=approximate)


@rule("to.dtype", "to.dtype_layout", "to.device", "to.other", "_to_copy.default", "type_as.default")
def _to(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    dtype = build.shape_dtype(node)[1]
    if isinstance(x, Transposed):
        return Transposed(tensor=build.cast(node, x.tensor, dtype))
    if not dtype.startswith(("float", "bfloat")) and build.is_trained(x):
        raise build.refused(node, f"a cast to {dtype} cuts the gradient of what depends on parameters")
    return build.cast(node, str(x), dtype)


@rule(
    "flatten.using_ints", "view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default",
    "squeeze.default", "squeeze.dim", "squeeze.dims", "unflatten.int", "view_as.default", "reshape_as.default",
    "expand.default", "expand_as.default",
)  # fmt: skip
def _reshape(build: Translation, node: fx.Node, x: Value, *_: Any, **__: Any) -> Value:
    shape, _dtype = build.shape_dtype(node)
    if isinstance(x, str) and build.tensors[x].shape == shape:
        return x
    if "expand" in str(node.target):
        raise build.unknown(node, "expand")
    return build.make(node, "reshape", (x,), shares=x if isinstance(x, str) else None)


@rule("add.Tensor", "sub.Tensor", "mul.Tensor")
def _binary(build: Translation, node: fx.Node, x: Value, y: Value | float, *, alpha: float = 1) -> Value:
    target = str(node.target)
    kind = next((kind for kind in ("sub", "mul") if f"aten.{kind}" in target), "add")
    if alpha != 1:
        raise build.refused(node, f"alpha={alpha} is not carried out; it must be 1")
    if not isinstance(x, str) or not isinstance(y, str):
        raise build.refused(
            node, f"{kind} combines two tensors; the other operand here is {y if isinstance(x, str) else x!r}"
        )
    dtype = build.shape_dtype(node)[1]
    return build.make(node, kind, (build.cast(node, x, dtype), build.cast(node, y, dtype)))


@rule("broadcast_tensors.default")
def _broadcast(build: Translation, node: fx.Node, values: Sequence[Value]) -> Value:
    shapes = [build.tensors[str(value)].shape for value in values]
    if len(set(shapes)) != 1:
        raise build.refused(
            node,
            f"it repeats tensors of the shapes {', '.join(map(str, shapes))} to one shape. A loss that compares "
            f"{shapes[0]} with {shapes[-1]} would be another function for every micro-batch size: reshape the labels "
            f"to {shapes[0]} first (as executor.losscell.MAELoss does)",
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
    if weight is not None or ignore_index != -100 or label_smoothing:
        raise build.refused(node, "class weights, ignore_index and label_smoothing are not carried out; leave them out")
    logits, labels = build.tensors[str(x)], build.tensors[str(target)]
    if len(logits.shape) != 2 or labels.shape != logits.shape[:1] or labels.differentiable:
        raise build.refused(
            node,
            f"it compares {logits.shape} with {labels.dtype} {labels.shape}; logits must be [batch, classes] and "
            f"labels class numbers [batch]",
        )
    return build.make(node, "cross_entropy", (x, target))


def _check_mean(build: Translation, node: fx.Node, reduction: int) -> None:
    if reduction != 1:
        raise build.refused(node, "the loss must be a mean (reduction='mean'), so that micro-batches average to it")


def _check_target(build: Translation, node: fx.Node, target: Value) -> None:
    if build.is_trained(target):
        raise build.refused(node, "its target depends on parameters; the gradient goes to the prediction only")
