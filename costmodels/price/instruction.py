"""The price of every instruction of a program on a machine, in integer picoseconds.

Prices are pure functions of the machine and of what an instruction does (call, local shapes, bytes, group), and are
kept by that signature, so that a program of millions of instructions needs few of them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from costmodels.machine.machine import Machine
from costmodels.price.composite import composite
from costmodels.price.compute import (
    SUMS_ROWS,
    attention_s,
    fused_rule,
    matrix_rate,
    matrix_s,
    memory_s,
    num_inputs,
    rate,
    rule_name,
    rule_s,
)
from costmodels.price.embedding_gradient import EMBEDDING_GRADIENTS
from costmodels.price.free_calls import MAYBE_VIEWS, VIEWS
from costmodels.price.group import Group, mesh_group, pair_group
from costmodels.price.links import (
    Links,
    collective_links,
    is_forwarded,
    pieces_links,
    transfer_group,
    transfer_links,
    transfer_on_graph,
)
from costmodels.price.power import slower
from costmodels.price.products import keeps_sums, matrix_shape, product, summed_product
from costmodels.price.recurrent import recurrent_s
from costmodels.price.torch_kernels import table_grad_s, update_s
from plans.errors import TwofoldError
from plans.model.graph import itemsize
from plans.operators.attention import heads_first
from plans.program import GroupProgram, Instruction, Kind, moved_values
from plans.redistribution import TransferPieces
from plans.redistribution.rows import num_copies
from plans.redistribution.step import Step, StepKind

__all__ = [
    "Cost",
    "FusedStep",
    "Shapes",
    "compute_class",
    "matrix_shape",
    "overlap_class",
    "price",
    "price_collective",
    "price_compute",
    "price_exchange",
    "price_fused",
    "price_launch",
    "price_pieces",
    "price_step",
    "price_transfer",
    "price_wait",
]

Shapes = tuple[tuple[int, ...], ...]

PS_PER_S = 10**12

_OF_TWO = ("forward", "grad0", "grad1")
_PRODUCTS = {
    "linear": _OF_TWO, "matmul": _OF_TWO, "conv2d": _OF_TWO, "grouped_linear": ("forward", "grad0", "grad2"),
}  # fmt: skip
"""Operators that multiply matrices, and which of their parts do; the rest are gradients of biases."""

_UPDATES = {
    "sgd": (1, 3, 3), "momentum": (3, 8, 5), "adamw": (8, 20, 7), "adamw.foreach": (8, 7, 7), "adamw.fused": (1, 7, 7),
}  # fmt: skip
"""Optimizer -> (kernels, tensors read or written by them one by one, tensors in and out).

Counted from the single-tensor forms of torch.optim: SGD add; momentum mul, add, add; AdamW mul, lerp, mul, addcmul,
sqrt, div, add, addcdiv. Its foreach form runs the same over many tensors at once (what it moves beyond its operands is
measured: `Compute.kernel_cost`), its fused form is one kernel.
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of an instruction on one rank.

    Args:
        dispatch_ps: host time to issue it.
        work_ps: time on the compute stream; for communication on the links, alone, from its last member's arrival.
        cpu_ps: processor time that every member of a communication spends on its node's shared cores.
        waiting_ps: extra time while the sibling groups of a communication share links with it.
        energy_pJ: extra energy of compute at the highest clock, if known (`Compute.power`).
    """

    dispatch_ps: int
    work_ps: int
    cpu_ps: int = 0
    waiting_ps: int = 0
    energy_pJ: int = 0

    @property
    def together_ps(self) -> int:
        """Work while all sibling groups communicate too."""
        return self.work_ps + self.waiting_ps

    @property
    def alone_s(self) -> float:
        """Seconds it takes when nothing else runs and every member has a core."""
        return (self.dispatch_ps + self.work_ps + self.cpu_ps) / PS_PER_S


def price(instruction: Instruction, group: GroupProgram, machine: Machine, num_ranks: int) -> Cost:
    """The price of `instruction` of `group` on a machine that runs `num_ranks` ranks.

    A SEND and its RECV have the same work and processor time: those of the rank with most pieces or bytes. Simulators
    that treat every pair of ranks on its own take `price_transfer`.

    Raises:
        TwofoldError: more ranks than devices, a dtype or call that the machine has no rate for.
    """
    if num_ranks > machine.num_devices:
        raise TwofoldError(
            f"the program runs on {num_ranks} ranks, but machine {machine.name!r} has {machine.num_devices} devices; "
            "plan for fewer devices or load a larger machine"
        )
    if instruction.kind is Kind.COMPUTE:
        touched, shapes = _touched(instruction, group), instruction.shapes
        if instruction.call == "fused":
            return price_fused(machine, instruction.dtype, touched, _steps(instruction, group))
        if instruction.call.startswith("attention.") and "layout" in instruction.attrs:
            shapes = tuple(heads_first(shapes, instruction.attrs))
        if _is_view(instruction, group):
            return Cost(price_compute(machine, instruction.call, shapes, instruction.dtype, 0, 0, True).dispatch_ps, 0)
        return price_compute(machine, instruction.call, shapes, instruction.dtype, touched, instruction.flops, True)
    if instruction.kind is Kind.COLLECTIVE:
        own = mesh_group(machine, instruction.mesh or group.mesh, instruction.axes)
        size, copies = itemsize(instruction.dtype), copies_of(instruction)
        return price_collective(machine, instruction.call, own, instruction.message_bytes, size, copies)
    if instruction.kind is Kind.WAIT:
        return price_wait(machine)
    return _pieces_cost(machine, instruction)


def price_step(step: Step, shape: tuple[int, ...], dtype: str, machine: Machine) -> Cost:
    """The price of one step of a redistribution of a tensor with the full `shape`; the search chooses by it."""
    size = itemsize(dtype)
    before, after = (math.prod(layout.local_shape(shape)) * size for layout in (step.before, step.after))
    if step.kind is StepKind.SLICE:
        return price_compute(machine, "slice", (), dtype, 2 * after)
    if step.kind is StepKind.TRANSFER:
        ranks = tuple(sorted({*step.before.mesh.rank_list, *step.after.mesh.rank_list}))
        return price_exchange(machine, 1, after, machine.tier(ranks))
    group = mesh_group(machine, step.before.mesh, step.axes)
    leading = step.leading(*(layout.local_shape(shape) for layout in (step.before, step.after)))
    copies = num_copies(str(step.kind), leading, max(before, after))
    return price_collective(machine, str(step.kind), group, max(before, after), size, copies)


def copies_of(instruction: Instruction) -> int:
    """How often a COLLECTIVE copies all of its tensor, to cut or to join it along inner dims."""
    step = instruction.attrs.get("step")
    leading = () if step is None else step.leading(*instruction.shapes)
    return num_copies(instruction.call, leading, instruction.message_bytes)


def price_transfer(machine: Machine, src_rank: int, dst_rank: int, size_bytes: int, pairs: int = 1) -> Cost:
    """The price of one piece of `size_bytes` from one rank to another; nothing but its issue if they are the same.

    With `pairs` above 1, as many neighbours of the first rank send to those of the other at once, as the ranks of a
    pipeline stage do: what their shared ways out cost is in `Cost.together_ps`.
    """
    if src_rank == dst_rank:
        return _transfer(machine, 0, 0, pair_group(0))
    if machine.graph is not None:
        return _communication(machine, "transfer", transfer_on_graph(machine, (src_rank, dst_rank), size_bytes))
    group = transfer_group(machine, src_rank, dst_rank, pairs)
    return _transfer(machine, 1, size_bytes, group, is_forwarded(machine, src_rank, dst_rank))


def price_pieces(machine: Machine, pieces: TransferPieces, item_bytes: int) -> Cost:
    """The price of a transfer of several pairs at once; nothing but its issue where no rank sends to another."""
    return _communication(machine, "transfer", pieces_links(machine, pieces, item_bytes))


def price_exchange(machine: Machine, num_peers: int, size_bytes: int, tier: int) -> Cost:
    """The price of a SEND or a RECV, from the peers and the bytes of its busiest rank and the slowest tier it uses."""
    return _transfer(machine, num_peers, size_bytes, pair_group(tier))


def price_wait(machine: Machine) -> Cost:
    """The price of a WAIT: host time only."""
    return Cost(_ps(machine, machine.dispatch_s["wait"]), 0)


def price_launch(machine: Machine) -> int:
    """Picoseconds that a step takes the host next to its instructions (`Machine.launch_s`)."""
    return _ps(machine, machine.launch_s)


def compute_class(call: str) -> str:
    """The class by which a COMPUTE call is priced and dispatched: matrix, attention, memory, view or update.

    >>> [compute_class(call) for call in ("linear.grad1", "linear.grad2", "reshape.forward", "sgd.update", "sum")]
    ['matrix', 'memory', 'view', 'update', 'memory']
    """
    kind, _, part = call.partition(".")
    if part == "update" or call in _UPDATES:
        return "update"
    if kind in VIEWS:
        return "view"
    return "matrix" if part in _PRODUCTS.get(kind, ()) else "attention" if kind == "attention" else "memory"


def overlap_class(call: str) -> str:
    """matrix, attention or memory: class of a COMPUTE call during a collective (`Machine.overlap`)."""
    kind = compute_class(call)
    return kind if kind in ("matrix", "attention") else "memory"


# -- compute -----------------------------------------------------------------------------------------------------------


class FusedStep(NamedTuple):
    """One step of a run of fused instructions, as `price_compute` takes it."""

    call: str
    shapes: Shapes
    dtype: str
    touched_bytes: int


def price_fused(machine: Machine, dtype: str, touched_bytes: int, steps: tuple[FusedStep, ...]) -> Cost:
    """The price of a run of fused instructions.

    On a GPU it moves its inputs and outputs, by its rule or as one kernel; elsewhere its steps run one by one.

    Args:
        machine: it runs on.
        dtype: dtype of its operands.
        touched_bytes: that enter and leave.
        steps: in order.
    """
    if not machine.fuses:
        costs = [price_compute(machine, *step, own=True) for step in steps]
        return Cost(sum(cost.dispatch_ps for cost in costs), sum(cost.work_ps for cost in costs))
    return price_compute(machine, fused_rule(steps), (), dtype, touched_bytes, own=True)


def _steps(instruction: Instruction, group: GroupProgram) -> tuple[FusedStep, ...]:
    inner = instruction.attrs["inner"]

    def moved(step: Instruction) -> int:
        return sum((inner.get(name) or group.values[name]).span_bytes for name in moved_values(step))

    return tuple(FusedStep(step.call, step.shapes, step.dtype, moved(step)) for step in instruction.attrs["steps"])


def _touched(instruction: Instruction, group: GroupProgram) -> int:
    """Bytes read and written."""
    names = moved_values(instruction)
    if names and all(name in group.values for name in names):
        return sum(group.values[name].span_bytes for name in names)
    return sum(math.prod(shape) for shape in instruction.shapes) * itemsize(instruction.dtype)


def _is_view(instruction: Instruction, group: GroupProgram) -> bool:
    """Whether all its outputs share the memory of its inputs, so that no kernel runs."""
    outputs = [group.values[name] for name in instruction.outputs if name in group.values]
    return instruction.call in MAYBE_VIEWS and bool(outputs) and all(value.shares is not None for value in outputs)


@lru_cache(maxsize=8192)  # forecasts and searches keep their prices themselves
def price_compute(
    machine: Machine, call: str, shapes: Shapes, dtype: str, touched_bytes: int, flops: int = 0, own: bool = False
) -> Cost:
    """The price of a COMPUTE call by its local shapes, kept by its arguments.

    Args:
        machine: it runs on.
        call: as of an instruction; besides "attention.backward" (the backward kernel of an attention whose statistics
            were kept) and "adamw.fused", "adamw.foreach".
        shapes: of inputs, then outputs.
        dtype: dtype of the operands.
        touched_bytes: read and written; a tensor that is written in place counts twice.
        flops: of the call; 0: not known.
        own: whether twofold's executor makes the call, so that its rules hold (`Compute.rules`), and its kernels take
            longer in a step than alone (`Compute.longer_in_steps`).
    """
    cost = _alone(machine, call, shapes, dtype, touched_bytes, flops, own)
    if not own or not machine.compute.longer_in_steps:
        return cost
    times = 1 + machine.compute.longer_in_steps  # at the same power (assumed)
    return dataclasses.replace(cost, work_ps=round(cost.work_ps * times), energy_pJ=round(cost.energy_pJ * times))


def _alone(
    machine: Machine, call: str, shapes: Shapes, dtype: str, touched_bytes: int, flops: int, own: bool
) -> Cost:  # fmt: skip
    """The price of a call whose kernels run alone, with the arguments of `price_compute`."""
    kind, rates = compute_class(call), machine.compute
    rule = rates.rules.get(rule_name(call, num_inputs(call, shapes))) if own else None
    if rule is not None:
        plain = _alone(machine, call, shapes, dtype, touched_bytes, flops, False)
        times = 1 if machine.host_async else _num_updated(call, shapes)  # by one kernel, or one after the other
        slow = _slower(machine, kind)
        rows = math.prod(shapes[0][:-1]) if call in SUMS_ROWS else 0
        made_s = None if rule.passes is None else slow * rule_s(rates, rule, touched_bytes, times, rows)
        work_ps = plain.work_ps if made_s is None else _ps(machine, made_s)
        dispatch_ps = plain.dispatch_ps if rule.dispatch_s is None else _ps(machine, rule.dispatch_s * times)
        energy_pJ = plain.energy_pJ
        if kind not in ("matrix", "attention"):
            energy_pJ = _slow_energy_pJ(machine, kind, work_ps, rule.kernels * times)
        return Cost(dispatch_ps, work_ps, energy_pJ=energy_pJ)
    if kind == "view":
        return Cost(_ps(machine, machine.dispatch_s[kind]), 0)
    if kind == "update":
        kernels, passes, operands = _update(call)
        kernels *= _num_updated(call, shapes)
        work_s = update_s(rates, call, touched_bytes, math.prod(shapes[0])) if shapes else None
        if work_s is None:
            moved = touched_bytes * passes // operands
            work_s = memory_s(rates, moved, _vector_s(machine, moved, 0, dtype), call, kernels, dtype)
        work_ps = _ps(machine, _slower(machine, kind) * work_s)
        energy_pJ = _slow_energy_pJ(machine, kind, work_ps, kernels)
        return Cost(_ps(machine, kernels * machine.dispatch_s[kind]), work_ps, energy_pJ=energy_pJ)
    if kind == "matrix":
        made = product(call, shapes)
        work_s = matrix_s(rates, (made.m, made.n, made.k), _matrix_rate(machine, dtype), touched_bytes, made.batch,
                          made.form, itemsize(dtype))  # fmt: skip
        energy_pJ = _energy_pJ(machine, kind, dtype, 2 * made.batch * made.m * made.n * made.k)
    elif kind == "attention":
        work_s = _attention_s(machine, call, shapes, dtype, touched_bytes, flops)
        energy_pJ = _energy_pJ(machine, kind, dtype, flops)
    else:
        parts, is_opaque = composite(call), call.startswith("opaque.")
        operations_s = _vector_s(machine, touched_bytes, 0 if is_opaque else flops, dtype)
        work_s = memory_s(rates, touched_bytes * parts.moved, operations_s, call, parts.kernels, dtype)
        if call in EMBEDDING_GRADIENTS and shapes:
            rows, features = shapes[-1]
            made_s = table_grad_s(rates, math.prod(shapes[0]) // features, (rows, features), itemsize(dtype), dtype)
            work_s = work_s if made_s is None else made_s
        elif call.startswith("recurrent."):
            work_s = recurrent_s(rates, call, shapes, _matrix_rate(machine, dtype), itemsize(dtype))
        elif is_opaque and flops * itemsize(dtype) > touched_bytes:
            sizes = summed_product(shapes[-1] if call.endswith(".forward") else shapes[0], flops)
            rate_per_s = _matrix_rate(machine, dtype)
            work_s = max(work_s, matrix_s(rates, sizes, rate_per_s, touched_bytes, item_bytes=itemsize(dtype)))
        work_s *= _slower(machine, kind)
        energy_pJ = _slow_energy_pJ(machine, kind, _ps(machine, work_s), parts.kernels)
        return Cost(_ps(machine, parts.host * machine.dispatch_s[kind]), _ps(machine, work_s), energy_pJ=energy_pJ)
    return Cost(_ps(machine, machine.dispatch_s[kind]), _ps(machine, work_s), energy_pJ=energy_pJ)


def _energy_pJ(machine: Machine, kind: str, dtype: str, flops: int) -> int:
    """Energy of arithmetic on matrix units: proportional to the operations."""
    power = machine.compute.power
    if power is None:
        return 0
    drawn_W = power.matrix_W if kind == "matrix" else power.attention_W
    return round(drawn_W * flops / _matrix_rate(machine, dtype) * PS_PER_S)


def _slow_energy_pJ(machine: Machine, kind: str, work_ps: int, kernels: float) -> int:
    """Energy of memory-bound kernels: proportional to the time without their start-up."""
    power = machine.compute.power
    if power is None:
        return 0
    drawn_W = power.update_W if kind == "update" else power.memory_W
    return round(drawn_W * max(0, work_ps - _ps(machine, kernels * machine.compute.kernel_s)))


def _slower(machine: Machine, kind: str) -> float:
    """The factor on the time of memory-bound kernels at the clock of the prices."""
    power, clock_MHz = machine.compute.power, machine.compute.at_MHz
    if power is None or clock_MHz is None:
        return 1.0
    return slower(power, clock_MHz, is_update=kind == "update")


def _attention_s(machine: Machine, call: str, shapes: Shapes, dtype: str, touched: int, flops: int) -> float:
    part = call.partition(".")[2]
    queries, keys, values = shapes[:3] if part == "forward" else shapes[1:4]
    heads, kept = math.prod(queries[:-2]), part != "forward" and keeps_sums(shapes)
    sizes = queries[-1] + values[-1]
    # a gradient from kept sums makes the scores again, one without makes the full forward again
    depth = sizes if part == "forward" else 2 * sizes + queries[-1] if kept else 3 * sizes
    causal = bool(flops) and flops < 0.75 * 2 * heads * queries[-2] * keys[-2] * depth
    peak = _matrix_rate(machine, dtype)
    if machine.compute.attention is None:
        share = 1.0 if part == "forward" else 2.5 if part == "backward" or kept else 3.5
        depth = max(1, int((queries[-1] + values[-1]) * share * (0.5 if causal else 1.0)))
        return matrix_s(machine.compute, (heads * queries[-2], keys[-2], depth), peak, touched)
    parts = (False,) if part == "forward" else (True,) if part == "backward" or kept else (False, True)
    return sum(
        attention_s(
            machine.compute,
            (heads, queries[-2], queries[-1]),
            keys[-2],
            values[-1],
            peak,
            touched / len(parts),
            causal=causal,
            backward=backward,
        )
        for backward in parts
    )


def _vector_s(machine: Machine, touched: int, flops: int, dtype: str) -> float:
    """The arithmetic of a kernel that is mostly bound by memory: at least one operation an element."""
    return max(flops, touched / itemsize(dtype)) / rate(machine.compute, "vector_flops_per_s", dtype, machine.name)


def _matrix_rate(machine: Machine, dtype: str) -> float:
    return matrix_rate(machine.compute, dtype, machine.name)


def _num_updated(call: str, shapes: Shapes) -> int:
    """Number of parameters that an instruction of this executor updates: AdamW has 4 operands and 3 results of each."""
    return max(1, len(shapes) // 7) if call == "adamw.update" else 1


def _update(call: str) -> tuple[int, int, int]:
    try:
        return _UPDATES[call.removesuffix(".update")]
    except KeyError:
        raise TwofoldError(f"the optimizer update {call!r} has no price; priced are {', '.join(_UPDATES)}") from None


# -- communication -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16_384)
def price_collective(
    machine: Machine, call: str, group: Group, size_bytes: int, item_bytes: int, copies: int = 0
) -> Cost:
    """The price of a collective of a group and, as `Cost.together_ps`, next to its siblings; kept by its arguments.

    Args:
        machine: it runs on.
        call: such as "all_reduce" or "all_gather_flat".
        group: how its members are on the links (`costmodels.price.group`).
        size_bytes: of the larger of a member's input and output.
        item_bytes: of an element.
        copies: of all of it that every member makes before or behind (`plans.redistribution.rows`).

    Raises:
        TwofoldError: a call that has no price.

    >>> from costmodels.price.group import axes_group
    >>> machine = Machine.load("h100-sxm-x16")
    >>> price_collective(machine, "all_reduce", axes_group(machine, [(16, 1)], 16), 2**30, 2).work_ps > 4 * 10**9
    True
    """
    cost = _communication(machine, "collective", collective_links(machine, call, group, size_bytes, item_bytes))
    if not copies or group.members == 1:
        return cost
    copied_ps = copies * price_compute(machine, "slice", (), "uint8", 2 * size_bytes).work_ps
    return replace(cost, work_ps=cost.work_ps + copied_ps)


def _pieces_cost(machine: Machine, instruction: Instruction) -> Cost:
    if not instruction.pieces:
        return price_exchange(machine, 1, instruction.message_bytes, len(machine.links) - 1)
    return price_pieces(machine, instruction.pieces, itemsize(instruction.dtype))


@lru_cache(maxsize=65_536)
def _transfer(machine: Machine, num_peers: int, size_bytes: int, group: Group, is_forwarded: bool = False) -> Cost:
    links = transfer_links(machine, num_peers, size_bytes, group, is_forwarded=is_forwarded)
    return _communication(machine, "transfer", links)


def _communication(machine: Machine, dispatched_as: str, links: Links) -> Cost:
    dispatch_ps = _ps(machine, machine.dispatch_s[dispatched_as])
    return Cost(dispatch_ps, links.alone_ps, links.cpu_ps, links.together_ps - links.alone_ps)


def _ps(machine: Machine, seconds: float) -> int:
    return round(seconds * machine.host_scale * PS_PER_S)
