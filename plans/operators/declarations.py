"""The declarations: kind -> dims, gradients and FLOPs for given shapes.

FLOPs count a multiply-add as two. Dims named `_0`, `_1`, ... are never split.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plans.errors import TwofoldError
from plans.operators.spec import Gradient, OperatorSpec

__all__ = ["declare", "kinds"]

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Declaration = Callable[[str, Shapes, Shapes, Mapping[str, Any]], OperatorSpec]

_DECLARATIONS: dict[str, Declaration] = {}


def declares(*names: str) -> Callable[[Declaration], Declaration]:
    """Enter a declaration under the given kinds."""

    def enter(declaration: Declaration) -> Declaration:
        for name in names:
            _DECLARATIONS[name] = declaration
        return declaration

    return enter


def kinds() -> tuple[str, ...]:
    """All known kinds of operator, sorted."""
    return tuple(sorted(_DECLARATIONS))


def declare(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any], name: str) -> OperatorSpec:
    """The spec of an operator of `kind` for whole shapes.

    Raises:
        TwofoldError: an unknown kind.

    >>> spec = declare("linear", ((8, 4), (6, 4)), ((8, 6),), {}, "fc")
    >>> spec.inputs, spec.outputs, spec.contracted, spec.flops
    ((('b0', 'k'), ('n', 'k')), (('b0', 'n'),), ('k',), 384)
    """
    if kind not in _DECLARATIONS:
        raise TwofoldError(
            f"operator {name!r} is of the kind {kind!r}, which is not known; known: {', '.join(kinds())}"
        )
    return _DECLARATIONS[kind](kind, inputs, outputs, attrs)


def _dims(prefix: str, shape: Shape) -> tuple[str, ...]:
    return tuple(f"{prefix}{position}" for position in range(len(shape)))


@declares("linear")
def _linear(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """y[b.., n] = sum_k x[b.., k] w[n, k] + bias[n]."""
    batch = _dims("b", inputs[0][:-1])
    features, contracted = inputs[1]
    sizes = dict(zip(batch, inputs[0][:-1], strict=True)) | {"n": features, "k": contracted}
    flops = 2 * math.prod(sizes.values())
    gradients = {0: Gradient(needs=("x1",), flops=flops), 1: Gradient(needs=("x0",), flops=flops)}
    operands: tuple[tuple[str, ...], ...] = ((*batch, "k"), ("n", "k"))
    if len(inputs) == 3:
        operands += (("n",),)
        gradients[2] = Gradient(flops=math.prod(outputs[0]))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=operands, outputs=((*batch, "n"),), splittable=frozenset(sizes),
        flops=flops, gradients=gradients, additive=frozenset({2}) if len(inputs) == 3 else frozenset(),
    )  # fmt: skip


@declares("relu")
def _relu(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """Element by element; the gradient reads the output (positive where the input was)."""
    return _unary(kind, inputs[0], Gradient(needs=("y0",), flops=math.prod(inputs[0])))


@declares("gelu", "silu", "abs")
def _unary_by_input(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """Element by element; the gradient reads the input."""
    return _unary(kind, inputs[0], Gradient(needs=("x0",), flops=4 * math.prod(inputs[0])))


@declares("cast")
def _cast(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """A change of dtype, element by element."""
    return _unary(kind, inputs[0], Gradient())


def _unary(kind: str, shape: Shape, gradient: Gradient) -> OperatorSpec:
    dims = _dims("d", shape)
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, shape, strict=True)), inputs=(dims,), outputs=(dims,),
        splittable=frozenset(dims), flops=math.prod(shape), gradients={0: gradient},
    )  # fmt: skip


@declares("add", "sub", "mul")
def _binary(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """Element by element with broadcasting: an operand's dim of size 1 or a missing leading dim is repeated."""
    out = _dims("d", outputs[0])
    sizes = dict(zip(out, outputs[0], strict=True))
    operands = []
    for which, shape in enumerate(inputs):
        aligned = out[len(out) - len(shape) :]
        names = []
        for dim, size in zip(aligned, shape, strict=True):
            if size == sizes[dim]:
                names.append(dim)
            else:  # broadcast: a dim of its own, of size 1
                names.append(f"_{which}{dim}")
                sizes[names[-1]] = 1
        operands.append(tuple(names))
    needs = {"mul": (("x1",), ("x0",))}.get(kind, ((), ()))
    flops = math.prod(outputs[0])
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=tuple(operands), outputs=(out,), splittable=frozenset(out), flops=flops,
        gradients={index: Gradient(needs=needs[index], flops=flops) for index in (0, 1)},
    )  # fmt: skip


@declares("reshape")
def _reshape(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """The same elements in another shape: leading and trailing dims that stay keep their names, the rest is whole."""
    old, new = inputs[0], outputs[0]
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    kept_head, kept_tail = _dims("d", old[:head]), tuple(f"e{position}" for position in range(tail))
    before = tuple(f"_x{position}" for position in range(len(old) - head - tail))
    after = tuple(f"_y{position}" for position in range(len(new) - head - tail))
    ins, outs = (*kept_head, *before, *kept_tail), (*kept_head, *after, *kept_tail)
    sizes = dict(zip(ins, old, strict=True)) | dict(zip(outs, new, strict=True))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(ins,), outputs=(outs,), splittable=frozenset(kept_head + kept_tail),
        gradients={0: Gradient()}, aliases=True,
    )  # fmt: skip


@declares("l1_loss", "mse_loss")
def _elementwise_loss(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """The mean over all elements of |x - t| or (x - t)^2, for x and t of equal shape; every dim is summed over."""
    if tuple(inputs[0]) != tuple(inputs[1]):
        raise TwofoldError(
            f"{kind} compares {tuple(inputs[0])} with {tuple(inputs[1])}; broadcasting would change the function when "
            f"the batch is cut into micro-batches: reshape the labels to {tuple(inputs[0])}"
        )
    dims = _dims("d", inputs[0])
    flops = 3 * math.prod(inputs[0])
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)), inputs=(dims, dims), outputs=((),),
        splittable=frozenset(dims), flops=flops, gradients={0: Gradient(needs=("x0", "x1"), flops=flops)},
    )  # fmt: skip


@declares("cross_entropy")
def _cross_entropy(kind: str, inputs: Shapes, outputs: Shapes, attrs: Mapping[str, Any]) -> OperatorSpec:
    """The mean over the batch of -log softmax(x)[label]; x is [b.., classes], the class dim stays whole."""
    batch = _dims("b", inputs[0][:-1])
    sizes = dict(zip(batch, inputs[0][:-1], strict=True)) | {"_c": inputs[0][-1]}
    flops = 5 * math.prod(inputs[0])
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=((*batch, "_c"), batch), outputs=((),), splittable=frozenset(batch),
        flops=flops, gradients={0: Gradient(needs=("x0", "x1"), flops=flops)},
    )  # fmt: skip
