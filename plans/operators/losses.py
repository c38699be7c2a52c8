"""Losses: means over the full micro-batch, as sums of parts (the rules divide by attrs "count")."""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, declares, named
from plans.operators.spec import Dim, Gradient, Kept, OperatorSpec, Statistic

__all__: list[str] = []


@declares("l1_loss", "mse_loss")
def _elementwise_loss(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The mean over all elements of |x - t| or (x - t)^2, for x and t of equal shape; every dim is summed over."""
    if tuple(inputs[0]) != tuple(inputs[1]):
        raise TwofoldError(
            f"{kind} compares {tuple(inputs[0])} with {tuple(inputs[1])}; broadcasting would change the function when "
            f"the batch is cut into micro-batches: reshape the labels to {tuple(inputs[0])}"
        )
    dims = named("d", inputs[0])
    flops = 3 * math.prod(inputs[0])
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)), inputs=(dims, dims), outputs=((),),
        splittable=frozenset(dims), flops=flops, gradients={0: Gradient(needs=("x0", "x1"), flops=flops)},
    )  # fmt: skip


@declares("mean_loss")
def _mean_loss(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The mean of x, whose elements are the contributions of samples (or their parts) to the loss; every dim is summed
    over."""
    dims, flops = named("d", inputs[0]), math.prod(inputs[0])
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)), inputs=(dims,), outputs=((),),
        splittable=frozenset(dims), flops=flops, gradients={0: Gradient(flops=flops)},
    )  # fmt: skip


@declares("pick")
def _pick(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """x[b.., t[b..]] of x[b.., classes] and class numbers t[b..].

    Where the classes c are split, the shard with the label gives the value and the others 0, which are summed.
    """
    batch = named("b", inputs[0][:-1])
    sizes = dict(zip(batch, inputs[0][:-1], strict=True)) | {"c": inputs[0][-1]}
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=((*batch, "c"), batch), outputs=(batch,), splittable=frozenset(sizes),
        flops=math.prod(inputs[1]), gradients={0: Gradient(needs=("x1",), flops=math.prod(inputs[0]))}, located=("c",),
    )  # fmt: skip


@declares("cross_entropy")
def _cross_entropy(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The mean over the batch of -log softmax(x)[label]; x is [b.., classes].

    Where the classes c are split, each shard makes the logarithm of its sum of exponentials and its share of the
    label's logit; gathered over the shards (one small all-gather instead of a maximum and a sum), they give the loss
    on every rank, so that c leaves no partial sums. Where c is whole the forward keeps that logarithm for the gradient.

    With attrs "ignore_index" labels of that number count for nothing, and the mean is over the others: how many there
    are is a third input, the sum that `count_labels` makes.
    """
    batch = named("b", inputs[0][:-1])
    sizes = dict(zip(batch, inputs[0][:-1], strict=True)) | {"c": inputs[0][-1]}
    if (len(inputs) == 3) != ("ignore_index" in attrs):
        raise TwofoldError("a cross_entropy reads the number of labels that count if and only if it has ignore_index")
    counted: tuple[tuple[Dim, ...], ...] = ((),) * (len(inputs) - 2)
    flops, needs = 5 * math.prod(inputs[0]), ("x0", "x1", "x2")[: len(inputs)]
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=((*batch, "c"), batch, *counted), outputs=((),), splittable=frozenset(sizes),
        flops=flops, gradients={0: Gradient(needs=(*needs, "s0", "k0"), flops=flops)}, located=("c",),
        statistic=Statistic(over="c", width=2, dims=batch), kept=(Kept(dims=batch, whole="c"),),
    )  # fmt: skip


@declares("count_labels")
def _count_labels(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The number of labels that are not attrs "ignore_index": each rank counts its own, and the counts are summed."""
    dims = named("b", inputs[0])
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)), inputs=(dims,), outputs=((),),
        splittable=frozenset(dims), flops=math.prod(inputs[0]), of_the_batch=True,
    )  # fmt: skip


@declares("batch_mean", "batch_sum")
def _batch_mean(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The mean or sum of data over the leading dims of a micro-batch, the output's being the last; it has no gradient.

    Examples are the weights of labels, [batch] -> [], and the share of tokens of every expert, [batch, e] -> [e].
    """
    dims = named("d", inputs[0])
    over = len(dims) - len(outputs[0])
    if tuple(inputs[0][over:]) != tuple(outputs[0]):
        raise TwofoldError(f"a {kind} of {inputs[0]} over its leading dims is not {outputs[0]}")
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)), inputs=(dims,), outputs=(dims[over:],),
        splittable=frozenset(dims), flops=math.prod(inputs[0]), located=dims[:over], of_the_batch=True,
    )  # fmt: skip
