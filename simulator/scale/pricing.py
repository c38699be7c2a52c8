"""Cells of a template, for given sizes, as priced lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from costmodels import Machine
from costmodels.price import overlap_class, price_collective, price_compute, price_wait
from costmodels.traffic import plain_call
from plans.graph import itemsize
from plans.program import Kind
from plans.scale import Cell, PartTemplate
from simulator.scale.action import COLLECTIVE, COMPUTE, WAIT, Line
from simulator.scale.stacks import Stack
from simulator.scale.stacks.base import Message, Step

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
    steps: list[Step] = []
    for cell in part.cells:
        steps += _steps(cell, numbers, stack)
    ways = groups["tp"][0] if "tp" in groups else 1
    return [_line(step, groups, machine, stack) for step in stack.arranged(steps, ways)]


def _steps(cell: Cell, numbers: Sequence[int], stack: Stack) -> list[Step]:
    if cell.kind is Kind.WAIT:
        return [Message(call="wait", token=cell.token, part=cell.part)]
    if cell.kind is Kind.COLLECTIVE:
        return [
            Message(
                call=cell.call, axes=cell.axes, size_bytes=numbers[cell.message], item_bytes=itemsize(cell.dtype),
                token=cell.token, operator=cell.operator, part=cell.part,
            )
        ]  # fmt: skip
    shapes = tuple(tuple(numbers[size] for size in shape) for shape in cell.shapes)
    touched = sum(numbers[size] for size in cell.touched)
    kernels = stack.kernels(cell.call, shapes, cell.dtype, touched, cell.part)
    return [replace(kernel, causal=cell.causal, part=cell.part) for kernel in kernels]


def _line(step: Step, groups: Groups, machine: Machine, stack: Stack) -> Line:
    if isinstance(step, Message):
        if step.call == "wait":
            dispatch = stack.dispatch_ps(price_wait(machine).dispatch_ps, "wait", step.part)
            return Line(WAIT, dispatch, 0, token=step.token)
        members, tiers = _members(step.axes, groups)
        cost = price_collective(machine, step.call, members, step.size_bytes, step.item_bytes, tiers)
        dispatch = stack.dispatch_ps(cost.dispatch_ps, "collective", step.part)
        return Line(COLLECTIVE, dispatch, cost.work_ps, plain_call(step.call), ".".join(step.axes), step.token)
    flops = attention_flops(step.call, step.shapes, causal=step.causal)
    own = stack.name == "twofold"
    cost = price_compute(machine, step.call, step.shapes, step.dtype, step.touched_bytes, flops, own)
    dispatch = stack.dispatch_ps(cost.dispatch_ps, step.call, step.part)
    return Line(COMPUTE, dispatch, round(cost.work_ps * step.times), overlap_class(step.call))


def _members(axes: tuple[str, ...], groups: Groups) -> tuple[int, tuple[int, int]]:
    if len(axes) == 1:
        return groups[axes[0]]
    return groups["+".join(axes)]


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
