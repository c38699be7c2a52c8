"""Cells of a template as priced lines, for given sizes.

A cell is priced once for each set of its own sizes. Layouts share most of them, because recompute modes, split
backwards and data parallelism do not change sizes, so most cells of a body are looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from costmodels import Group, Machine
from costmodels.price.instruction import (
    FusedStep,
    compute_class,
    overlap_class,
    price_collective,
    price_compute,
    price_fused,
    price_wait,
)
from costmodels.price.products import keeps_sums, product
from costmodels.price.traffic import plain_call
from plans.lower.symbolic import Cell, PartTemplate
from plans.model.graph import itemsize
from plans.program import Kind
from plans.redistribution.rows import num_copies
from simulator.estimate.exchanges import beside_exchanges, is_exchange, outlasting, sent_in_part, share_of_pair
from simulator.lines import COLLECTIVE, COMPUTE, WAIT, Line, Payload
from simulator.stacks import Stack
from simulator.stacks.ring import ring_attention
from simulator.stacks.steps import Kernel, Message, Step

__all__ = ["Groups", "busy_ps", "cell_work", "hosted", "priced_cells", "priced_lines"]

Groups = Mapping[str, Group]
"""the groups of each axis on the links."""

Shape = tuple[int, ...]

_MOST_BODIES, _MOST_KNOWN = 2**14, 2**15
"""Entries of each dictionary of a machine and stack. A search on thousands of devices needs up to 13,000 bodies and
20,000 lines."""


def priced_lines(
    part: PartTemplate, numbers: Sequence[int], groups: Groups, machine: Machine, stack: Stack
) -> list[Line]:
    """The lines of a body; `numbers` are the values of its template's monomials.

    Raises:
        TwofoldError: a call without a price on the machine.
    """
    return _prices(machine, stack).body(part, numbers, groups)


def priced_cells(
    part: PartTemplate, numbers: Sequence[int], groups: Groups, machine: Machine, stack: Stack
) -> list[tuple[Cell, Sequence[Line]]]:
    """Every cell of a body with its own lines, before the stack arranges them.

    Raises:
        TwofoldError: a call without a price on the machine.
    """
    prices = _prices(machine, stack)
    return [(cell.cell, prices.lines(cell, numbers, groups)) for cell in _looked_up(part).cells]


def hosted(lines: list[Line], given_s: float | None) -> list[Line]:
    """The lines with the known host time of the stack for a full block, distributed in equal proportion."""
    summed = sum(line.dispatch_ps for line in lines)
    if given_s is None or not summed:
        return lines
    factor = given_s * 1e12 / summed
    return [line._replace(dispatch_ps=round(line.dispatch_ps * factor)) for line in lines]


def busy_ps(lines: Sequence[Line]) -> float:
    """The time for which the busiest channel of some collectives is busy."""
    channels: dict[str, float] = {}
    for line in lines:
        if line.kind == COLLECTIVE:
            channels[line.channel] = channels.get(line.channel, 0.0) + line.work_ps
    return max(channels.values(), default=0.0)


class _LookUp(NamedTuple):
    """A cell, the number of its form (the cell without its sizes), and the function that extracts its sizes."""

    cell: Cell
    form: int
    sizes: Callable[[Sequence[int]], Any]


_FORMS: dict[tuple[object, ...], int] = {}


class _Template(NamedTuple):
    """A part's cells, what takes all their sizes out of all numbers, and the axes of its collectives."""

    cells: tuple[_LookUp, ...]
    sizes: Callable[[Sequence[int]], Any]
    axes: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=8192)
def _looked_up(part: PartTemplate) -> _Template:
    found, used = [], dict[int, None]()
    for cell in part.cells:
        ranks = tuple(len(shape) for shape in cell.shapes)
        form = (
            cell.kind, cell.call, cell.part, cell.dtype, cell.axes, cell.token, cell.causal, ranks, len(cell.touched),
            cell.operator if cell.kind is Kind.COLLECTIVE else "", tuple(map(len, cell.leading)), cell.is_view,
            tuple((step.call, step.dtype, tuple(map(len, step.shapes)), len(step.touched)) for step in cell.steps),
        )  # fmt: skip
        places = [place for each in (cell, *cell.steps) for shape in (*each.shapes, each.touched) for place in shape]
        if cell.kind is Kind.COLLECTIVE:
            places = [cell.message, *(place for sizes in cell.leading for place in sizes)]
        used.update(dict.fromkeys(places))
        found.append(_LookUp(cell, _FORMS.setdefault(form, len(_FORMS)), itemgetter(*places) if places else _none))
    axes = tuple(dict.fromkeys(cell.axes for cell in part.cells if cell.axes))
    return _Template(tuple(found), itemgetter(*used) if used else _none, axes)


def _none(numbers: Sequence[int]) -> None:
    return None


@lru_cache(maxsize=8)
def _prices(machine: Machine, stack: Stack) -> _Prices:
    return _Prices(machine, stack)


class _Prices:
    """The instructions that a stack runs for cells on a machine, and their costs."""

    def __init__(self, machine: Machine, stack: Stack) -> None:
        self._machine = machine
        self._stack = stack
        self._bodies: dict[tuple[object, ...], list[Line]] = {}
        self._lines: dict[tuple[object, ...], Sequence[Line]] = {}
        self._steps: dict[tuple[object, ...], Sequence[Step]] = {}
        self._line_of: dict[object, Line] = {}

    def body(self, part: PartTemplate, numbers: Sequence[int], groups: Groups) -> list[Line]:
        """The lines of a part; not to be written to."""
        template, ways = _looked_up(part), groups["tp"].members if "tp" in groups else 1
        key = (part, template.sizes(numbers), ways, *[_members(axes, groups) for axes in template.axes])
        lines = self._bodies.get(key)
        if lines is None:
            if len(self._bodies) > _MOST_BODIES:
                self._bodies.clear()
            lines = self._bodies[key] = self._body(template, numbers, groups, ways)
        return lines

    def _body(self, template: _Template, numbers: Sequence[int], groups: Groups, ways: int) -> list[Line]:
        stack = self._stack
        is_ring = stack.splits_evenly and ("cp",) in template.axes
        if not (stack.rearranges or stack.recipe or stack.hides_experts or stack.exchanged < 1 or is_ring):
            return [line for cell in template.cells for line in self.lines(cell, numbers, groups)]
        plain = [step for cell in template.cells for step in self.steps(cell, numbers)]
        steps = stack.arranged(ring_attention(plain) if is_ring else plain, ways)
        if stack.recipe is not None:
            steps = stack.recipe.steps(steps)
        if stack.exchanged < 1:
            steps = [sent_in_part(step, stack.exchanged) for step in steps]
        if not stack.hides_experts or not any(map(is_exchange, steps)):
            return [self.line(step, groups) for step in steps]
        lines = [self.line(step, groups) for step in beside_exchanges(steps, self._machine.compute.num_cores)]
        sent = [self.line(step, groups) for step in steps if is_exchange(step)]
        return [*lines, *outlasting(sent, lines, share_of_pair(steps))]

    def lines(self, found: _LookUp, numbers: Sequence[int], groups: Groups) -> Sequence[Line]:
        """The lines of a cell, where the stack arranges nothing."""
        cell = found.cell
        key = (found.form, found.sizes(numbers), _members(cell.axes, groups) if cell.axes else None)
        lines = self._lines.get(key)
        if lines is None:
            if len(self._lines) > _MOST_KNOWN:
                self._lines.clear()
            steps = _steps(cell, numbers, self._stack)  # used once: only arranged steps are looked up again
            lines = self._lines[key] = [_line(step, groups, self._machine, self._stack) for step in steps]
        return lines

    def steps(self, found: _LookUp, numbers: Sequence[int]) -> Sequence[Step]:
        """The instructions that the stack runs for a cell, before it arranges them."""
        key = (found.form, found.sizes(numbers))
        steps = self._steps.get(key)
        if steps is None:
            if len(self._steps) > _MOST_KNOWN:
                self._steps.clear()
            steps = self._steps[key] = _steps(found.cell, numbers, self._stack)
        return steps

    def line(self, step: Step, groups: Groups) -> Line:
        """An arranged step, priced."""
        key = (step, _members(step.axes, groups)) if isinstance(step, Message) and step.axes else step
        line = self._line_of.get(key)
        if line is None:
            if len(self._line_of) > _MOST_KNOWN:
                self._line_of.clear()
            line = self._line_of[key] = _line(step, groups, self._machine, self._stack)
        return line


def _steps(cell: Cell, numbers: Sequence[int], stack: Stack) -> list[Step]:
    if cell.kind is Kind.WAIT:
        return [Message(call="wait", token=cell.token, part=cell.part)]
    if cell.kind is Kind.COLLECTIVE:
        leading = [[numbers[size] for size in sizes] for sizes in cell.leading]
        return [
            Message(
                call=cell.call, axes=cell.axes, size_bytes=numbers[cell.message], item_bytes=itemsize(cell.dtype),
                token=cell.token, operator=cell.operator, part=cell.part,
                copies=num_copies(cell.call, leading, numbers[cell.message]),
            )
        ]  # fmt: skip
    (call, shapes, dtype, touched), *steps = [
        FusedStep(
            each.call, tuple(tuple(numbers[size] for size in shape) for shape in each.shapes), each.dtype,
            sum(numbers[size] for size in each.touched),
        )
        for each in (cell, *cell.steps)
    ]  # fmt: skip
    if steps:
        return [Kernel(call=call, shapes=shapes, dtype=dtype, touched_bytes=touched, part=cell.part, steps=(*steps,))]
    kernels = stack.kernels(call, shapes, dtype, touched, cell.part)
    times = 0.0 if cell.is_view else 1.0
    return [replace(kernel, causal=cell.causal, part=cell.part, times=kernel.times * times) for kernel in kernels]


def _line(step: Step, groups: Groups, machine: Machine, stack: Stack) -> Line:
    if isinstance(step, Message):
        if step.call == "wait":
            dispatch = stack.dispatch_ps(price_wait(machine).dispatch_ps, "wait", step.part)
            return Line(WAIT, dispatch, 0, token=step.token)
        copies = step.copies if stack.runs_programs else 0
        group = _members(step.axes, groups)
        cost = price_collective(machine, step.call, group, step.size_bytes, step.item_bytes, copies)
        dispatch = stack.dispatch_ps(cost.dispatch_ps, "collective", step.part)
        payload = Payload(step.call, step.size_bytes, step.item_bytes, copies)
        call, channel = plain_call(step.call), ".".join(step.axes)
        return Line(
            COLLECTIVE, dispatch, cost.together_ps, call, channel, step.token, payload, alone_ps=cost.work_ps
        )  # fmt: skip
    flops = attention_flops(step.call, step.shapes, causal=step.causal)
    if step.steps:
        cost = price_fused(machine, step.dtype, step.touched_bytes, step.steps)
    else:
        own = stack.runs_programs
        cost = price_compute(machine, step.call, step.shapes, step.dtype, step.touched_bytes, flops, own)
    dispatch = stack.dispatch_ps(cost.dispatch_ps, step.call, step.part)
    name = overlap_class(step.call)
    energy_pJ = round(cost.energy_pJ * step.times)
    return Line(COMPUTE, dispatch, round(cost.work_ps * step.times), name, energy_pJ=energy_pJ)


def _members(axes: tuple[str, ...], groups: Groups) -> Group:
    if axes == ("dp",):  # "dp" stands for all ranks with the same weights
        return groups["replicas"]
    if len(axes) == 1:
        return groups[axes[0]]
    return groups["+".join(axes)]


def attention_flops(call: str, shapes: Sequence[Shape], *, causal: bool) -> int:
    """Floating-point operations of an attention call on local shapes; 0 for other calls.

    As `plans.operators` declares them: two products forward, each over half of the scores where the mask is causal
    (the mean over parts of a split sequence); the backward makes the scores again, or all of the forward, and the
    products of four gradients.
    """
    kind, _, which = call.partition(".")
    if kind != "attention":
        return 0
    q, k, v = shapes[:3] if which == "forward" else shapes[1:4]
    share = 0.5 * (1 + 1 / k[-2]) if causal else 1.0
    depth = q[-1] + v[-1]
    if which != "forward":
        depth = 2 * depth + (q[-1] if keeps_sums(shapes) else depth)
    return int(2 * math.prod(q[:-1]) * k[-2] * depth * share)


def cell_work(cell: Cell, numbers: Sequence[int]) -> tuple[int, int]:
    """FLOPs of a cell's matrix products and scores, and bytes that it reads and writes; none of what only moves."""
    if cell.kind is not Kind.COMPUTE or cell.is_view:
        return 0, 0
    shapes = tuple(tuple(numbers[size] for size in shape) for shape in cell.shapes)
    flops, moved = attention_flops(cell.call, shapes, causal=cell.causal), sum(numbers[size] for size in cell.touched)
    if compute_class(cell.call) == "matrix":
        made = product(cell.call, shapes)
        flops = 2 * made.batch * made.m * made.n * made.k
    return flops, moved
