"""Element by element: activations, arithmetic (broadcasting, or with a number), comparisons, casts, masks, dropout."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, aligned, declares, named, unary
from plans.operators.spec import Gradient, OperatorSpec

__all__ = ["UNARY"]

_BY_OUTPUT = ("relu", "tanh", "sigmoid", "exp", "expm1", "sqrt", "rsqrt")
_BY_INPUT = (
    "gelu", "silu", "abs", "log", "log1p", "log2", "log10", "log_sigmoid", "sin", "cos", "atan", "erf", "leaky_relu",
    "elu", "softplus", "mish", "hardswish", "hardsigmoid", "hardtanh", "relu6", "clamp",
)  # fmt: skip

_BY_NOTHING = ("neg", "floor", "ceil", "trunc", "round", "sign")

UNARY = (*_BY_OUTPUT, *_BY_INPUT, *_BY_NOTHING)
"""Functions of one number, called as in aten. Capture takes their settings from aten's signature, fusion joins them."""


@declares(*_BY_OUTPUT)
def _unary_by_output(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The gradient reads the output (of a relu: positive where the input was)."""
    return unary(kind, inputs[0], Gradient(needs=("y0",), flops=math.prod(inputs[0])))


@declares(*_BY_INPUT, "pow")
def _unary_by_input(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The gradient reads the input. Settings have aten's names; a pow takes attrs "exponent"."""
    return unary(kind, inputs[0], Gradient(needs=("x0",), flops=4 * math.prod(inputs[0])))


@declares("cast", *_BY_NOTHING)
def _unary_by_nothing(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The gradient reads nothing but the output's gradient: changes of dtype or sign; step functions, where it is 0."""
    return unary(kind, inputs[0], Gradient())


@declares("detach")
def _detach(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The unchanged input without a gradient."""
    return dataclasses.replace(unary(kind, inputs[0], None, flops_per_element=0), blind=True, aliases=True)


@declares("dropout")
def _dropout(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Zero with probability attrs "p", else x / (1 - p).

    Whether an element is dropped is a function of its position in the full batch, of the step and of attrs "seed", so
    that every layout, every number of micro-batches and every recomputation drops the same ones; nothing is saved.
    """
    flops = 8 * math.prod(inputs[0])
    return unary(kind, inputs[0], Gradient(flops=flops), flops_per_element=8, located=True)


def _broadcast(
    kind: str, inputs: Shapes, outputs: Shapes, needs: Mapping[int, tuple[str, ...]], *, passes: bool = False
) -> OperatorSpec:
    """An operator whose operands are broadcast to its output.

    Args:
        kind, inputs, outputs: as of a declaration.
        needs: for each operand with a gradient, the operands of the forward that the gradient needs.
        passes: whether the gradients of operands that are not broadcast are that of the output.
    """
    out, flops = named("d", outputs[0]), math.prod(outputs[0])
    sizes = dict(zip(out, outputs[0], strict=True))
    operands = tuple(aligned(shape, out, sizes, which) for which, shape in enumerate(inputs))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=operands, outputs=(out,), splittable=frozenset(out), flops=flops,
        gradients={index: Gradient(needs=names, flops=flops) for index, names in needs.items()},
        passed=frozenset(index for index in needs if passes and operands[index] == out),
    )  # fmt: skip


@declares("add", "sub", "mul", "div")
def _binary(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Two operands with broadcasting: a dim of size 1 or a missing leading dim is repeated.

    With one operand the other is the number attrs "number"; attrs "reverse" puts the number first.
    """
    if len(inputs) == 1:
        needs = ("x0",) if kind == "div" and attrs.get("reverse") else ()
        return unary(kind, inputs[0], Gradient(needs=needs, flops=math.prod(outputs[0])))
    by_kind: dict[str, dict[int, tuple[str, ...]]] = {
        "mul": {0: ("x1",), 1: ("x0",)},
        "div": {0: ("x1",), 1: ("x0", "x1")},
    }
    return _broadcast(kind, inputs, outputs, by_kind.get(kind, {0: (), 1: ()}), passes=kind == "add")


@declares("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not")
def _truth(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """True or false: two operands with broadcasting, or one compared with the number attrs "number"; no gradient."""
    if len(inputs) == 1:
        return unary(kind, inputs[0], None)
    return _broadcast(kind, inputs, outputs, {})


@declares("where")
def _where(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """x1 where the condition x0 is true, else x2; all three are broadcast."""
    return _broadcast(kind, inputs, outputs, {1: ("x0",), 2: ("x0",)})


@declares("masked_fill")
def _masked_fill(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """attrs "value" where the mask (x1, broadcast) is true, else x0."""
    return _broadcast(kind, inputs, outputs, {0: ("x1",)})


@declares("expand")
def _expand(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The input repeated along dims of size 1 and along new leading dims; the gradient sums over them."""
    out = named("d", outputs[0])
    sizes = dict(zip(out, outputs[0], strict=True))
    if len(inputs[0]) > len(out):
        raise TwofoldError(f"an expand from {inputs[0]} to {outputs[0]} loses dims")
    operand = aligned(inputs[0], out, sizes, 0)
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(operand,), outputs=(out,), splittable=frozenset(out),
        gradients={0: Gradient(flops=math.prod(outputs[0]))},
    )  # fmt: skip
