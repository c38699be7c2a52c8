"""GELU in parts: x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as the models of transformers write it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from plans.model.graph import Operator
from plans.model.whole.rewrite import New, Rule, View

__all__ = ["ACTIVATION_RULES"]


def _gelu(view: View, operator: Operator) -> Sequence[New] | None:
    """The product of x / 2 and what `_one_and_tanh` finds, or half of the product of both."""
    outer, halved = operator, False
    if operator.kind == "mul" and operator.attrs.get("number") == 0.5:
        inner = view.made(operator.inputs[0], "mul")
        if inner is None:
            return None
        outer, halved = inner, True
    if outer.kind != "mul" or len(outer.inputs) != 2:
        return None
    for factor, other in (outer.inputs, outer.inputs[::-1]):
        x = factor if halved else _times(view, factor, 0.5)
        if x is not None and _one_and_tanh(view, other) == x:
            made = view.tensors[operator.outputs[0]]
            return [New(kind="gelu", inputs=(x,), shape=made.shape, dtype=made.dtype, attrs={"approximate": "tanh"})]
    return None


def _one_and_tanh(view: View, name: str) -> str | None:
    """x, where a tensor is 1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))."""
    added = view.made(name, "add")
    tanh = added and added.attrs.get("number") == 1 and view.made(added.inputs[0], "tanh")
    total = _times(view, tanh.inputs[0], math.sqrt(2 / math.pi)) if tanh else None
    summed = view.made(total, "add") if total is not None else None
    if summed is None or len(summed.inputs) != 2:
        return None
    for x, other in (summed.inputs, summed.inputs[::-1]):
        cube = _times(view, other, 0.044715)
        if cube is not None and _is_cube(view, cube, x):
            return x
    return None


def _is_cube(view: View, name: str, x: str) -> bool:
    maker = view.makers.get(name)
    if maker is not None and maker.kind == "pow":
        return maker.inputs == (x,) and maker.attrs.get("exponent") == 3
    if maker is None or maker.kind != "mul" or len(maker.inputs) != 2 or x not in maker.inputs:
        return False
    square = view.makers.get(next((each for each in maker.inputs if each != x), x))
    if square is None:
        return False
    is_power = square.kind == "pow" and square.attrs.get("exponent") == 2
    return set(square.inputs) == {x} and (is_power or (square.kind == "mul" and len(square.inputs) == 2))


def _times(view: View, name: str, number: float) -> str | None:
    """The tensor of which another is `number` times the value."""
    maker = view.made(name, "mul")
    if maker is None or len(maker.inputs) != 1:
        return None
    stated = maker.attrs.get("number")
    is_number = isinstance(stated, int | float) and math.isclose(stated, number, rel_tol=1e-9)
    return maker.inputs[0] if is_number else None


ACTIVATION_RULES: tuple[Rule, ...] = (_gelu,)
