"""Constants, and operators that twofold has no declaration for."""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shapes, declares, named
from plans.operators.spec import Gradient, OperatorSpec

__all__ = ["MAX_OPAQUE_INPUTS"]

MAX_OPAQUE_INPUTS = 16
"""How many tensors an opaque operator reads at most."""


@declares("arange")
def _arange(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """attrs "start", start + "step", ...; reads nothing and has no gradient."""
    size = outputs[0][0]
    return OperatorSpec(
        kind=kind, sizes={"d0": size}, inputs=(), outputs=(("d0",),), splittable=frozenset({"d0"}), flops=size,
        located=("d0",),
    )  # fmt: skip


@declares("fill")
def _fill(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Every element is attrs "value"; reads nothing, or an input for its shape alone, and has no gradient.

    An input of another shape gives the size of dim 0, the batch.
    """
    dims = named("d", outputs[0])
    sizes, like = dict(zip(dims, outputs[0], strict=True)), dims
    if inputs and tuple(inputs[0]) != tuple(outputs[0]):
        if tuple(inputs[0][:1]) != tuple(outputs[0][:1]):
            raise TwofoldError(f"a fill of the shape {outputs[0]} cannot be like {inputs[0]}")
        like = (*dims[:1], *(f"_x{at}" for at in range(1, len(inputs[0]))))
        sizes |= dict(zip(like[1:], inputs[0][1:], strict=True))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(like,) * len(inputs), outputs=(dims,), splittable=frozenset(dims),
        flops=math.prod(outputs[0]), blind=True,
    )  # fmt: skip


@declares("opaque")
def _opaque(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Any other operator: every rank runs all of it, and its gradient by autograd of it alone.

    attrs "target" is its aten name, "arguments" its arguments as JSON, "result" which of its results this is (-1: it
    has one), "batched" whether dim 0 of the result is the batch, "batched_inputs" the inputs whose dim 0 is the batch.
    """
    sizes: dict[str, int] = {}
    operands = []
    for index, shape in enumerate(inputs):
        dims = tuple(
            "_b" if at == 0 and index in attrs.get("batched_inputs", ()) else f"_i{index}_{at}"
            for at in range(len(shape))
        )
        sizes.update(zip(dims, shape, strict=True))
        operands.append(dims)
    out = tuple("_b" if at == 0 and attrs.get("batched") else f"_o{at}" for at in range(len(outputs[0])))
    sizes.update(zip(out, outputs[0], strict=True))
    flops = sum(math.prod(shape) for shape in (*inputs, *outputs))
    needs = tuple(f"x{index}" for index in range(len(inputs)))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=tuple(operands), outputs=(out,), splittable=frozenset(), flops=flops,
        gradients={index: Gradient(needs=needs, flops=2 * flops) for index in range(len(inputs))},
    )  # fmt: skip
