"""Constants, and operators that twofold has no declaration for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shape, Shapes, declares, named
from plans.operators.spec import Gradient, OperatorSpec
from plans.reading import json_of

__all__ = ["MAX_OPAQUE_INPUTS"]

MAX_OPAQUE_INPUTS = 16
"""Largest number of tensors that an opaque operator reads."""


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

    An input of another shape gives the size of dim attrs "batch" (0 unless set), the batch.
    """
    dims, place = named("d", outputs[0]), attrs.get("batch", 0)
    sizes, like = dict(zip(dims, outputs[0], strict=True)), dims
    if inputs and (tuple(inputs[0]) != tuple(outputs[0]) or place):
        if tuple(inputs[0][:1]) != tuple(outputs[0][place : place + 1]):
            raise TwofoldError(f"a {kind} of the shape {outputs[0]} cannot be like {inputs[0]}")
        like = (dims[place], *(f"_x{at}" for at in range(1, len(inputs[0]))))
        sizes |= dict(zip(like[1:], inputs[0][1:], strict=True))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(like,) * len(inputs), outputs=(dims,), splittable=frozenset(dims),
        flops=math.prod(outputs[0]), blind=True,
    )  # fmt: skip


@declares("uniform", "normal")
def _random(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Random numbers, uniform from 0 to 1 or of the standard normal distribution; inputs as those of a fill.

    Each is a function of its position in the full batch, of the step and of attrs "seed", as in a dropout.
    """
    spec = _fill(kind, inputs, outputs, attrs)
    flops = (20 if kind == "normal" else 8) * math.prod(outputs[0])
    return dataclasses.replace(spec, located=named("d", outputs[0]), flops=flops)


@declares("buffer", "assign")
def _buffer(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """A buffer that the forward changes: `buffer` copies x0 as it was before, `assign` lets x0 become x1, which it
    returns; with attrs "frozen" nothing changes and it returns x0.

    Every rank holds the whole buffer and computes the same value for it. No gradient passes.
    """
    dims = tuple(f"_{name}" for name in named("d", outputs[0]))
    is_changed = kind == "assign" and not attrs.get("frozen")
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, outputs[0], strict=True)), inputs=(dims,) * len(inputs), outputs=(dims,),
        splittable=frozenset(), flops=math.prod(outputs[0]), blind=True, updated=(0,) if is_changed else (),
    )  # fmt: skip


@declares("computed")
def _computed(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """A value that follows from shapes alone, such as a mask of positions; every rank makes all of it.

    attrs "calls" holds the calls of aten that make it, as JSON; none of them reads anything but the others.
    """
    dims = tuple(f"_{name}" for name in named("d", outputs[0]))
    flops = math.prod(outputs[0]) * attrs["calls"].count("aten.")
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, outputs[0], strict=True)), inputs=(), outputs=(dims,), splittable=frozenset(),
        flops=flops,
    )  # fmt: skip


@declares("opaque")
def _opaque(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Any other operator, whose gradient autograd finds of it alone.

    attrs "target" is its aten name, "arguments" its arguments as JSON, "result" which of its results this is (-1: it
    has one). "dims" names the dims as "ab,b->ab": small letters can be split, the others stay whole; a dot is a dim
    that no other tensor has. "depth", where it multiplies matrices (conv1d, einsum), is the number of products that are
    summed for an element of the result. A gradient computes the forward again, and one product if it is not a bias's.
    """
    made = 2 * attrs.get("depth", 0) * math.prod(outputs[0])
    flops = made or sum(math.prod(shape) for shape in (*inputs, *outputs))
    return _in_letters(kind, inputs, outputs, attrs, flops, range(len(inputs)), remade_flops=flops)


@declares("function")
def _function(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """A function with a backward of its own, as programs of aten calls in JSON (`executor.kernels.programs`).

    attrs "name" is the user's name, "forward" computes the results from the inputs, and "result" is the number of this
    result. "backward", absent where nothing is trained, makes the gradients of the inputs from that of the result and
    the inputs; null stands for inputs without a gradient. "dims" is as that of an opaque operator.
    """
    calls = json_of(attrs["forward"].encode(), "forward")["calls"]
    gradients = json_of(attrs["backward"].encode(), "backward")["results"] if "backward" in attrs else []
    flops = len(calls) * sum(math.prod(shape) for shape in (*inputs, *outputs))
    return _in_letters(
        kind, inputs, outputs, attrs, flops, [at for at, made in enumerate(gradients) if made is not None]
    )


def _in_letters(
    kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs, flops: int, trained: Sequence[int], *,
    remade_flops: int = 0,
) -> OperatorSpec:  # fmt: skip
    """An operator whose dims attrs "dims" names; the inputs `trained` have gradients, which read all inputs."""
    before, _, after = attrs["dims"].partition("->")
    sizes: dict[str, int] = {}
    operands = tuple(_lettered(*each, sizes) for each in zip(before.split(","), inputs, "x" * len(inputs), strict=True))
    out = _lettered(after, outputs[0], "y", sizes)
    needs = tuple(f"x{index}" for index in range(len(inputs)))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=operands, outputs=(out,),
        splittable=frozenset(dim for dim in sizes if not dim.startswith("_")), flops=flops,
        gradients={
            index: Gradient(
                needs=needs, flops=flops * (2 if len(inputs[index]) > 1 else 1), remade_flops=remade_flops
            )
            for index in trained
        },
        discrete=frozenset(range(len(inputs))) - frozenset(trained),
    )  # fmt: skip


def _lettered(letters: str, shape: Shape, what: str, sizes: dict[str, int]) -> tuple[str, ...]:
    """The dims of one tensor by their letters; their sizes are entered into `sizes`."""
    names = []
    for letter, size in zip(letters, shape, strict=True):
        name = letter if letter.islower() else f"_{letter.lower()}" if letter != "." else f"_{what}{len(sizes)}"
        if sizes.setdefault(name, size) != size:
            raise TwofoldError(f"dims {letters!r} of {shape}: {letter!r} is {sizes[name]} elsewhere")
        names.append(name)
    return tuple(names)
