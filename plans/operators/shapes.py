"""Rules that rearrange elements: reshape, permute, narrow, concat."""

from __future__ import annotations

import math

from plans.errors import TwofoldError
from plans.operators.registry import Attrs, Shape, Shapes, declares, named
from plans.operators.spec import Dim, Gradient, OperatorSpec

__all__ = ["MAX_CONCAT"]

MAX_CONCAT = 64
"""Largest number of tensors of a concat."""


@declares("reshape")
def _reshape(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The same elements in another shape, as a view.

    Old and new dims are products of common dims d0, d1, ..., from the left: (B, S, H) to (B * S, H) is (d0, d1, d2) to
    ((d0, d1), d2). Where sizes have no common divisor left the rest is whole, except for equal dims at the right.
    """
    sizes: dict[str, int] = {}
    old, new = _common_dims(inputs[0], outputs[0], sizes)
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(old,), outputs=(new,), gradients={0: Gradient()}, aliases=True,
        splittable=frozenset(dim for dim in sizes if not dim.startswith("_")),
    )  # fmt: skip


def _common_dims(old: Shape, new: Shape, sizes: dict[str, int]) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """Old and new dims as products of common dims; row-major order makes the leading digits of both the same."""
    if math.prod(old) != math.prod(new):
        raise TwofoldError(f"a tensor of the shape {old} cannot be reshaped to {new}")
    mine: list[list[str]] = [[] for _ in old]
    theirs: list[list[str]] = [[] for _ in new]
    left, right = list(old), list(new)
    at = to = 0
    while at < len(old) and to < len(new):
        common = math.gcd(left[at], right[to])
        if common == 1 and left[at] > 1 and right[to] > 1:
            break
        name = f"d{len(sizes)}"
        sizes[name] = common
        mine[at].append(name)
        theirs[to].append(name)
        left[at] //= common
        right[to] //= common
        done = left[at] == 1, right[to] == 1
        at, to = at + done[0], to + done[1]
    own, other = len(old) - 1, len(new) - 1
    while own > at and other > to and (left[own] == right[other] or 1 in (left[own], right[other])):
        if left[own] == right[other]:
            name = f"d{len(sizes)}"
            sizes[name] = left[own]
            mine[own].append(name)
            theirs[other].append(name)
            left[own] = right[other] = 1
            own, other = own - 1, other - 1
        else:
            own, other = own - (left[own] == 1), other - (right[other] == 1)
    for prefix, names, rest, start in (("_x", mine, left, at), ("_y", theirs, right, to)):
        for position in range(start, len(rest)):
            if rest[position] > 1 or not names[position]:
                names[position].append(f"{prefix}{position}")
                sizes[f"{prefix}{position}"] = rest[position]
    return _dims(mine), _dims(theirs)


def _dims(names: list[list[str]]) -> tuple[Dim, ...]:
    return tuple(name[0] if len(name) == 1 else tuple(name) for name in names)


@declares("permute")
def _permute(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Dim i of the output is dim attrs "dims"[i] of the input; a copy, so that every value is in one piece."""
    dims = named("d", inputs[0])
    order = attrs["dims"]
    if sorted(order) != list(range(len(dims))):
        raise TwofoldError(f"{tuple(order)} is not a permutation of the {len(dims)} dims of {inputs[0]}")
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, inputs[0], strict=True)), inputs=(dims,),
        outputs=(tuple(dims[dim] for dim in order),), splittable=frozenset(dims), gradients={0: Gradient()},
    )  # fmt: skip


@declares("narrow")
def _narrow(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """Elements attrs "start", start + "step", ... of dim attrs "dim", as many as the output has; that dim is whole."""
    dim = attrs["dim"]
    dims = tuple("_from" if at == dim else f"d{at}" for at in range(len(inputs[0])))
    out = tuple("_to" if at == dim else f"d{at}" for at in range(len(inputs[0])))
    sizes = dict(zip(dims, inputs[0], strict=True)) | {"_to": outputs[0][dim]}
    last = attrs["start"] + (outputs[0][dim] - 1) * attrs.get("step", 1)
    if attrs["start"] < 0 or last >= inputs[0][dim]:
        raise TwofoldError(f"elements {attrs['start']} to {last} of dim {dim} are outside of {inputs[0]}")
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=(dims,), outputs=(out,), gradients={0: Gradient()},
        splittable=frozenset(dim for dim in dims if dim != "_from"),
    )  # fmt: skip


@declares("concat")
def _concat(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs) -> OperatorSpec:
    """The inputs joined along the dim attrs "dim", which stays whole; attrs "sizes" has their sizes there."""
    dim, joined = attrs["dim"], tuple(attrs["sizes"])
    if len(inputs) > MAX_CONCAT:
        raise TwofoldError(f"a concat takes at most {MAX_CONCAT} tensors, not {len(inputs)}; concatenate in two steps")
    if joined != tuple(shape[dim] for shape in inputs) or sum(joined) != outputs[0][dim]:
        raise TwofoldError(f"a concat of {list(inputs)} along dim {dim} does not make {outputs[0]}")
    rest = named("d", outputs[0])
    sizes = {each: size for at, (each, size) in enumerate(zip(rest, outputs[0], strict=True)) if at != dim}
    sizes |= {f"_c{index}": size for index, size in enumerate(joined)} | {"_c": outputs[0][dim]}
    operands = tuple((*rest[:dim], f"_c{index}", *rest[dim + 1 :]) for index in range(len(inputs)))
    return OperatorSpec(
        kind=kind, sizes=sizes, inputs=operands, outputs=((*rest[:dim], "_c", *rest[dim + 1 :]),),
        splittable=frozenset(size for size in sizes if not size.startswith("_")),
        gradients={index: Gradient() for index in range(len(inputs))},
    )  # fmt: skip
