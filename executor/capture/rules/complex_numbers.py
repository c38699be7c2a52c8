"""Complex tensors as real and imaginary parts, for example for rotary positions as in Meta's Llama.

The tensors of a graph are real. During translation, a complex value is a pair of real tensors. Calls that rearrange
elements apply to both; products and sums are written out. A complex buffer becomes a constant [.., 2], as with
`view_as_real`. Any other call, such as an FFT, becomes one opaque operator on tensors [.., 2].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from executor.capture.rules.table import RULES, rule
from executor.capture.translation import Translation
from executor.capture.values import Complex, Value

__all__ = ["complex_rule"]

_EACH = (
    "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "slice", "narrow", "select", "expand", "permute",
    "transpose", "unflatten", "flatten", "alias", "clone", "contiguous", "neg", "to", "_to_copy", "split", "unbind",
    "chunk", "repeat", "detach", "cat", "concat", "stack", "slice_scatter", "select_scatter", "zeros_like",
)  # fmt: skip
"""Calls of aten that do the same to both parts."""


def complex_rule(target: str) -> Callable[..., Value] | None:
    """The rule of a call that reads a complex value; None if the call has no such rule."""
    name = target.removeprefix("aten.").partition(".")[0]
    if name in _EACH:
        return _each
    return _OWN.get(name)


def _each(build: Translation, node: fx.Node, *args: Any, **kwargs: Any) -> Value:
    """The rule for real tensors, applied to both parts."""
    tensors = [each for argument in args for each in (argument if isinstance(argument, tuple) else (argument,))]
    if any(isinstance(each, str) for each in tensors):
        raise build.refused(node, "it combines real and complex tensors; make both complex")
    made = [RULES[str(node.target)](build, node, *_part(args, part), **kwargs) for part in ("real", "imaginary")]
    if isinstance(made[0], tuple):
        return tuple(Complex(real=one, imaginary=other) for one, other in zip(*made, strict=True))
    if not isinstance(made[0], str):
        raise build.refused(
            node, "it writes every second complex number, or in larger steps; join the parts with torch.cat"
        )
    return Complex(real=str(made[0]), imaginary=str(made[1]))


def _part(argument: Any, part: str) -> Any:
    """An argument with the real or imaginary parts of its tensors."""
    if isinstance(argument, tuple):
        return tuple(_part(each, part) for each in argument)
    return getattr(argument, part) if isinstance(argument, Complex) else argument


def _parts(build: Translation, node: fx.Node, x: Any) -> tuple[str, str | None]:
    return (x.real, x.imaginary) if isinstance(x, Complex) else (build.plain(node, x), None)


def _product(build: Translation, node: fx.Node, x: Any, y: Any) -> Value:
    """(a + bi)(c + di) = (ac - bd) + (ad + bc)i."""

    def times(one: str, other: str) -> str:
        return build.make(node, "mul", (one, other))

    if isinstance(x, int | float) or isinstance(y, int | float):
        held, number = (y, x) if isinstance(x, int | float) else (x, y)
        real, imaginary = (build.make(node, "mul", (part,), number=number) for part in (held.real, held.imaginary))
        return Complex(real=real, imaginary=imaginary)
    (a, b), (c, d) = _parts(build, node, x), _parts(build, node, y)
    if b is None or d is None:
        real, first, second = (a, c, d) if b is None else (c, a, b)
        return Complex(real=times(first, real), imaginary=times(str(second), real))
    return Complex(
        real=build.make(node, "sub", (times(a, c), times(b, d))),
        imaginary=build.make(node, "add", (times(a, d), times(b, c))),
    )


def _sum(build: Translation, node: fx.Node, x: Any, y: Any) -> Value:
    if not isinstance(x, Complex) or not isinstance(y, Complex):
        raise build.refused(node, "it adds a real to a complex tensor; make both complex")
    kind = str(node.target).split(".")[1]
    pairs = ((x.real, y.real), (x.imaginary, y.imaginary))
    real, imaginary = (build.make(node, kind, pair) for pair in pairs)
    return Complex(real=real, imaginary=imaginary)


def _conjugate(build: Translation, node: fx.Node, x: Complex) -> Value:
    return Complex(real=x.real, imaginary=build.make(node, "neg", (x.imaginary,)))


_OWN: dict[str, Callable[..., Value]] = {
    "mul": _product, "add": _sum, "sub": _sum, "conj": _conjugate, "_conj": _conjugate,
    "view_as_real": lambda build, node, x: build.as_real(node, x),

    "real": lambda build, node, x: x.real, "imag": lambda build, node, x: x.imaginary,
    "resolve_conj": lambda build, node, x: x, "_assert_tensor_metadata": lambda build, node, *_, **__: None,
}  # fmt: skip


@rule("view_as_complex.default")
def _as_complex(build: Translation, node: fx.Node, x: Value) -> Value:
    return build.as_complex(node, build.plain(node, x))


@rule("complex.default")
def _complex(build: Translation, node: fx.Node, real: Value, imaginary: Value) -> Value:
    return Complex(real=build.plain(node, real), imaginary=build.plain(node, imaginary))


@rule("polar.default")
def _polar(build: Translation, node: fx.Node, size: Value, angle: Value) -> Value:
    """size (cos angle + i sin angle)."""
    size, angle = build.plain(node, size), build.plain(node, angle)
    real, imaginary = (
        build.make(node, "mul", (size, build.make(node, kind, (angle,)))) for kind in ("cos", "sin")
    )  # fmt: skip
    return Complex(real=real, imaginary=imaginary)
