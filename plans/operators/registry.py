"""The table of kinds, and common parts of the declarations of all families.

A declaration is a function (kind, input shapes, output shapes, attrs) -> OperatorSpec for full shapes. FLOPs count a
multiply-add as two. Dims named `_...` are never split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from plans.errors import TwofoldError
from plans.extensions import load_extensions
from plans.operators.spec import Gradient, OperatorSpec

__all__ = ["Attrs", "Shape", "Shapes", "aligned", "declare", "declares", "kinds", "named", "unary"]

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Attrs = Mapping[str, Any]
Declaration = Callable[[str, Shapes, Shapes, Attrs], OperatorSpec]

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


def declare(kind: str, inputs: Shapes, outputs: Shapes, attrs: Attrs, name: str) -> OperatorSpec:
    """The spec of an operator of `kind` for full shapes.

    Raises:
        TwofoldError: an unknown kind, or shapes that the kind does not take.

    >>> spec = declare("linear", ((8, 4), (6, 4)), ((8, 6),), {}, "fc")
    >>> spec.inputs, spec.outputs, spec.contracted, spec.flops
    ((('b0', 'k'), ('n', 'k')), (('b0', 'n'),), ('k',), 384)
    """
    if kind not in _DECLARATIONS:
        load_extensions()
    if kind not in _DECLARATIONS:
        raise TwofoldError(f"operator {name!r} has the unknown kind {kind!r}; known: {', '.join(kinds())}")
    try:
        return _declared(kind, tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), _frozen(attrs))
    except TwofoldError as error:
        raise TwofoldError(f"operator {name!r}: {error}") from None


def _frozen(attrs: Attrs) -> tuple[tuple[str, type, Any], ...]:
    """Attrs as a key: with types, as True, 1 and 1.0 are equal."""
    return tuple((name, type(value), tuple(value) if type(value) is list else value) for name, value in attrs.items())


@lru_cache(maxsize=16_384)
def _declared(
    kind: str, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...], attrs: tuple[tuple[str, type, Any], ...]
) -> OperatorSpec:
    """The cached declaration: operators of equal blocks share one spec."""
    return _DECLARATIONS[kind](kind, inputs, outputs, {name: value for name, _, value in attrs})


def named(prefix: str, shape: Shape) -> tuple[str, ...]:
    """One name per dim, made of a prefix and its position: "d0", "d1", ..."""
    return tuple(f"{prefix}{position}" for position in range(len(shape)))


def aligned(
    shape: Shape, against: Sequence[str], sizes: dict[str, int], which: int, what: str = "operands"
) -> tuple[str, ...]:
    """The dims of an operand that is broadcast against the dims `against`, last to last.

    A dim of size 1 that is repeated gets a separate name, which is entered into `sizes`.
    """
    names = []
    for dim, size in zip(against[len(against) - len(shape) :], shape, strict=True):
        if size == sizes[dim]:
            names.append(dim)
        elif size == 1:
            names.append(f"_{which}{dim}")
            sizes[names[-1]] = 1
        else:
            raise TwofoldError(f"{what} of the shape {shape} cannot be broadcast: {size} against {sizes[dim]}")
    return tuple(names)


def unary(
    kind: str,
    shape: Shape,
    gradient: Gradient | None,
    *,
    whole: Sequence[int] = (),
    flops_per_element: int = 1,
    located: bool = False,
) -> OperatorSpec:
    """A spec whose output has the shape and the dims of its one input; the dims at the positions `whole` stay whole."""
    dims = tuple(f"_d{position}" if position in whole else f"d{position}" for position in range(len(shape)))
    size = 1
    for each in shape:
        size *= each
    return OperatorSpec(
        kind=kind, sizes=dict(zip(dims, shape, strict=True)), inputs=(dims,), outputs=(dims,),
        splittable=frozenset(dim for dim in dims if not dim.startswith("_")), flops=flops_per_element * size,
        gradients={} if gradient is None else {0: gradient}, located=dims if located else (),
    )  # fmt: skip
