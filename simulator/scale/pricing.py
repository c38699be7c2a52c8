"""Cells of a template, for given sizes, as priced lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from costmodels import Machine
from costmodels.price import overlap_class, price_collective, price_compute, price_wait
from costmodels.traffic import plain_call
from plans.graph import itemsize
from plans.program import Kind
from plans.scale import Cell, PartTemplate
from simulator.scale.action import COLLECTIVE, COMPUTE, WAIT, Line
from simulator.scale.stacks import Stack

__all__ = ["Groups", "priced_lines"]

Groups = Mapping[str, tuple[int, tuple[int, int]]]
"""axis -> members of its groups and their tiers, as `price_collective` takes them."""

Shape = tuple[int, ...]


def priced_lines(
    part: PartTemplate, numbers: Sequence[int], groups: Groups, machine: Machine, stack: Stack
) -> list[Line]:
    """The lines of a body; `numbers` are the values of its template's monomials.

    Raises:
        TwofoldError: what the machine has no price for.
    """
    lines: list[Line] = []
    for cell in part.cells:
        lines += _lines(cell, numbers, groups, machine, stack)
    return lines


def _lines(cell: Cell, numbers: Sequence[int], groups: Groups, machine: Machine, stack: Stack) -> list[Line]:
    if cell.kind is Kind.WAIT:
        return [Line(WAIT, stack.dispatch_ps(price_wait(machine).dispatch_ps, "wait", cell.part), 0, token=cell.token)]
    if cell.kind is Kind.COLLECTIVE:
        members, tiers = _members(cell, groups)
        size = itemsize(cell.dtype)
        cost = price_collective(machine, cell.call, members, numbers[cell.message], size, tiers)
        dispatch = stack.dispatch_ps(cost.dispatch_ps, "collective", cell.part)
        return [Line(COLLECTIVE, dispatch, cost.work_ps, plain_call(cell.call), ".".join(cell.axes), cell.token)]
    shapes = tuple(tuple(numbers[size] for size in shape) for shape in cell.shapes)
    touched = sum(numbers[size] for size in cell.touched)
    result: list[Line] = []
    for kernel in stack.kernels(cell.call, shapes, cell.dtype, touched, cell.part):
        flops = attention_flops(kernel.call, kernel.shapes, causal=cell.causal)
        cost = price_compute(machine, kernel.call, kernel.shapes, kernel.dtype, kernel.touched_bytes, flops)
        dispatch = stack.dispatch_ps(cost.dispatch_ps, kernel.call, cell.part)
        result.append(Line(COMPUTE, dispatch, cost.work_ps, overlap_class(kernel.call)))
    return result


def _members(cell: Cell, groups: Groups) -> tuple[int, tuple[int, int]]:
    if len(cell.axes) == 1:
        return groups[cell.axes[0]]
    return groups["+".join(cell.axes)]


def attention_flops(call: str, shapes: Sequence[Shape], *, causal: bool) -> int:
    """Floating-point operations of an attention call on local shapes; 0 for other calls.

    As `plans.operators` declares them: two products forward, each over half of the scores where the mask is causal
    (the mean over parts of a split sequence); the backward makes the forward again and five gradients' products.
    """
    kind, _, which = call.partition(".")
    if kind != "attention":
        return 0
    q, k, v = shapes[:3] if which == "forward" else shapes[1:4]
    share = 0.5 * (1 + 1 / k[-2]) if causal else 1.0
    forward = int(2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1]) * share)
    return forward if which == "forward" else 3 * forward
