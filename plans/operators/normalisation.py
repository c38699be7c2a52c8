"""Softmax, layer norm and RMS norm: the normalised dims are not split, all others can be.

A batch norm is two operators, so that the batch can be split too: the statistics of every channel, which its shards put
together, and the normalisation, which reads them like any other tensor.
"""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, declares, unary
from plans.operators.spec import Gradient, Kept, OperatorSpec, Statistic

__all__: list[str] = []


@declares("softmax", "log_softmax")
def _softmax(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Over the dim attrs "dim" (counted from the end where negative), which stays whole; the gradient reads y."""
    whole = attrs["dim"] % max(1, len(inputs[0]))
    return unary(
        kind, inputs[0], Gradient(needs=("y0",), flops=4 * math.prod(inputs[0])), whole=(whole,), flops_per_element=5
    )


@declares("layer_norm", "rms_norm")
def _norm(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """x normalised over its last attrs "num_dims" dims (1 by default), times a weight, plus a bias (layer norm only).

    attrs "eps" is added to the variance (the mean square), attrs "offset" to the weight (Gemma: 1). The forward keeps
    the mean (layer norm only) and the scale 1 / sqrt(variance + eps) of every row for the gradients.
    """
    count = attrs.get("num_dims", 1)
    shape = inputs[0]
    if any(each != shape[len(shape) - count :] for each in inputs[1:]) or len(inputs) > (3 if kind[0] == "l" else 2):
        raise TwofoldError(f"{kind} over the last {count} dims of {shape} cannot take weights {list(inputs[1:])}")
    dims = tuple(f"b{at}" if at < len(shape) - count else f"_n{at}" for at in range(len(shape)))
    size = math.prod(shape)
    kept = tuple(Kept(dims=dims[: len(shape) - count]) for _ in range(2 if kind == "layer_norm" else 1))
    known = tuple(f"k{at}" for at in range(len(kept)))
    gradients = {0: Gradient(needs=("x0", "x1", *known) if len(inputs) > 1 else ("x0", *known), flops=8 * size)}
    if len(inputs) > 1:
        gradients[1] = Gradient(needs=("x0", *known), flops=3 * size)
    if len(inputs) > 2:
        gradients[2] = Gradient(flops=size)
    weight = dims[len(shape) - count :]
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, shape, strict=True)), inputs=(dims, *(weight for _ in inputs[1:])),
        outputs=(dims,), splittable=frozenset(dim for dim in dims if dim.startswith("b")), flops=8 * size,
        gradients=gradients, kept=kept,
    )  # fmt: skip


@declares("batch_statistics")
def _batch_statistics(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """y[0, c] the mean of x[b, c, ..] over a micro-batch and all places of an image, y[1, c] its variance.

    Every shard of the batch makes both of its own part, and all put them together (Chan, Golub, LeVeque 1983). Further
    inputs are running statistics: mean and variance [c], which move by attrs "momentum" towards y (the variance with
    n - 1 as its divisor), and the number of micro-batches (); their values make no difference to y, but with attrs
    "frozen" they are y, and nothing moves. With attrs "whole" the channels stay whole.
    """
    if len(inputs) not in (1, 4) or outputs[0] != (2, inputs[0][1]):
        raise TwofoldError(f"statistics {outputs[0]} cannot be made of {inputs[0]} and {len(inputs) - 1} running ones")
    dims = ("b", "c", *(f"_d{at}" for at in range(2, len(inputs[0]))))
    size, frozen = math.prod(inputs[0]), bool(attrs.get("frozen"))
    running = (("c",), ("c",), ())[: len(inputs) - 1]
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)) | {"_2": 2}, inputs=(dims, *running),
        outputs=(("_2", "c"),), splittable=frozenset("b" if attrs.get("whole") else "bc"), flops=4 * size,
        gradients={0: Gradient(needs=("x0", "y0"), flops=4 * size)}, located=("b",), of_the_batch=True,
        statistic=Statistic(over="b", width=2, dims=("c",)), updated=() if frozen else (1, 2, 3)[: len(running)],
    )  # fmt: skip


@declares("batch_norm")
def _batch_norm(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """(x[b, c, ..] - mean[c]) / sqrt(variance[c] + attrs "eps") times a weight [c], plus a bias [c].

    x1 holds mean and variance as `batch_statistics` makes them.
    """
    channels = inputs[0][1]
    if inputs[1:] != ((2, channels), (channels,), (channels,)):
        raise TwofoldError(f"a batch_norm of {inputs[0]} cannot take statistics, weight and bias {list(inputs[1:])}")
    dims = ("b", "c", *(f"_d{at}" for at in range(2, len(inputs[0]))))
    size = math.prod(inputs[0])
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)) | {"_2": 2},
        inputs=(dims, ("_2", "c"), ("c",), ("c",)), outputs=(dims,), splittable=frozenset({"b", "c"}), flops=4 * size,
        gradients={
            0: Gradient(needs=("x1", "x2"), flops=size), 1: Gradient(needs=("x0", "x1", "x2"), flops=4 * size),
            2: Gradient(needs=("x0", "x1"), flops=3 * size), 3: Gradient(flops=size),
        },
    )  # fmt: skip
