"""A plan or a program on a machine: prices, sharing, changes and the interval of the prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from costmodels.interval import class_seconds, dispatch_seconds, program_load, step_interval
from costmodels.machine.machine import Machine
from costmodels.price.chip_share import chip_share
from costmodels.price.clock import at_usual_clock, settled
from costmodels.price.instruction import Cost, overlap_class, price_launch
from costmodels.price.overlap import overlap_law
from costmodels.price.program import ProgramPrices
from costmodels.price.replay import executing
from plans.errors import TwofoldError
from plans.plan import Plan
from plans.program import GroupProgram, Instruction, Kind, Program, Scope
from plans.timeline import Timeline
from simulator.engine.check import check_program
from simulator.engine.network import Network
from simulator.engine.prices import CostOf
from simulator.engine.run import Overlap, Slowdown, run_program
from simulator.study.goodput import Goodput, goodput
from simulator.study.whatif import WhatIf
from simulator.timeline.memory import with_buffers

__all__ = ["Outcome", "finished", "outcome", "outcome_of", "simulate"]

_NOTHING = WhatIf()
_MOST_SPANS = 1_000_000
"""About as many spans are kept for all ranks; of more one of each kind of rank."""


def simulate(
    plan: Plan | Program,
    machine: Machine,
    *,
    num_steps: int = 3,
    what_if: WhatIf = _NOTHING,
    with_memory: bool = True,
    fold_ranks: bool | None = None,
) -> Timeline:
    """Predict a few training steps of a plan on a machine.

    Args:
        plan: a plan, which is lowered, or a program.
        machine: the machine. A plan takes the host times of its `execution` (`costmodels.executing`), a program those
            that the machine has: of eager steps, as in machine files.
        num_steps: number of consecutive steps; step time, bubble and memory are those of the last.
        what_if: changes to the machine; the cost of checkpoints and failures is computed by `outcome`.
        with_memory: whether to simulate the memory too.
        fold_ranks: whether equal ranks are simulated once (`run_program`), with the same result. None: yes, with the
            spans of every rank in the timeline if there are not too many; True: yes, with the spans of one rank of each
            kind (`Timeline.representatives`); False: no.

    Returns:
        The timeline with memory; `low_s` and `high_s` are the machine's interval around `step_interval_s`. Peaks
        include the buffers of communication (`memory.with_buffers`).

    Raises:
        TwofoldError: more ranks than devices, a plan that cannot be lowered, invalid changes, or an error of
            `check_program` or `run_program`.

    >>> from plans.layout import Layout
    >>> from plans.program import GroupProgram
    >>> idle = GroupProgram(mesh=Layout((4,), ("dp",)), values={}, blocks=())
    >>> simulate(Program(groups=(idle,), num_micro_batches=1), Machine.load("h200-x4")).step_s
    0.0
    """
    program, machine = _lowered(plan, machine)
    num_ranks = program.num_ranks
    if num_ranks > machine.num_devices:
        raise TwofoldError(
            f"the program runs on {num_ranks} ranks, but machine {machine.name!r} has {machine.num_devices} devices; "
            "plan for fewer devices or use a larger machine"
        )
    for what, ranks in (("slowdown", what_if.slowdown), ("another device", what_if.devices)):
        if absent := [rank for rank in ranks if not 0 <= rank < num_ranks]:
            raise TwofoldError(f"{what} of rank {absent[0]}: the program's ranks are 0 to {num_ranks - 1}")
    machine = what_if.machine(machine)
    check_program(program, between_ranks=False)  # `run_program` finds out the rest
    usual = at_usual_clock(machine)
    if usual is not machine:
        even = replace(what_if, slowdown={}, jitter=0.0)  # their factors are on the clock of a rank that is as usual
        usual_prices = ProgramPrices(program, usual)
        first = _timeline(usual_prices, even, num_steps=2, with_memory=False, fold_ranks=True)
        machine = settled(machine, program_load(usual_prices, first.step_interval_s), num_ranks)
    prices = ProgramPrices(program, machine)
    timeline = _timeline(
        prices, what_if, num_steps=num_steps, with_memory=with_memory, fold_ranks=fold_ranks is not False
    )
    if fold_ranks is None and len(timeline.rank) * num_ranks <= _MOST_SPANS * len(timeline.represents):
        timeline = timeline.spelled_out()
    return finished(timeline, prices, what_if)


def _timeline(
    prices: ProgramPrices, what_if: WhatIf, *, num_steps: int, with_memory: bool, fold_ranks: bool
) -> Timeline:
    """The timeline of consecutive steps at one clock."""
    program, machine = prices.program, prices.machine
    network = Network(machine, program, what_if.links)
    return run_program(
        program,
        prices,
        num_steps=num_steps,
        node_of=lambda rank: rank // machine.devices_per_node,
        cores_per_node=None if machine.host_async else machine.cores_per_node,
        host_async=machine.host_async,
        launch_ps=price_launch(machine),
        overlap=_overlap(machine) if machine.host_async else None,
        chip_share=partial(chip_share, machine),
        wires=network if network.is_needed else None,
        cost_of_rank=_costs_of_ranks(what_if, prices),
        slowdown=_slowdown(what_if),
        with_memory=with_memory,
        fold_ranks=fold_ranks,
    )


def finished(timeline: Timeline, prices: ProgramPrices, what_if: WhatIf) -> Timeline:
    """A timeline of the priced program with its interval, allowances of memory, and metadata."""
    program, machine = prices.program, prices.machine
    timeline = with_buffers(timeline, program)
    meta: dict[str, Any] = {"machine": machine.name, "program": program.name}
    if machine.compute.at_MHz is not None:
        meta["clock_MHz"] = machine.compute.at_MHz
    by_class = class_seconds(prices) if machine.spreads else {}
    if by_class:
        by_class["dispatch"] = dispatch_seconds(prices, timeline.step_interval_s)
    low_s, high_s = step_interval(machine, timeline.step_interval_s, by_class)
    return replace(
        timeline,
        low_s=low_s,
        high_s=high_s,
        meta={**timeline.meta, **meta, **({} if what_if.is_none else {"what_if": str(what_if)})},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a what-if question.

    Args:
        step_s: from step to step.
        low_s, high_s: its 90 % interval.
        bubble_fraction, exposed_comm_s, host_wait_s, peak_bytes: as of the timeline.
        goodput: with checkpoints and failures.
    """

    step_s: float
    low_s: float | None
    high_s: float | None
    bubble_fraction: float
    exposed_comm_s: float
    host_wait_s: float
    peak_bytes: int
    goodput: Goodput


def outcome(plan: Plan | Program, machine: Machine, what_if: WhatIf = _NOTHING, *, num_steps: int = 3) -> Outcome:
    """Simulate a plan, and compute the goodput with checkpoints and failures.

    The size of a checkpoint is the largest amount of weights and optimizer states of a rank, unless `what_if` gives it.

    Raises:
        TwofoldError: as `simulate` and `goodput`.

    >>> from plans.layout import Layout
    >>> from plans.model.mlp import mlp_graph
    >>> from plans.plan import Stage
    >>> from simulator.study.goodput import Checkpoints, Failures
    >>> graph = mlp_graph([64, 32, 8], batch_size=16)
    >>> names = tuple(operator.name for operator in graph.operators)
    >>> plan = Plan(graph=graph, stages=(Stage(mesh=Layout((2,), ("dp",)), operators=names),))
    >>> what_if = WhatIf(checkpoints=Checkpoints(every_steps=100, write_Bps=1e9), failures=Failures(device_mtbf_s=1e7))
    >>> 0.9 < outcome(plan, Machine.load("h200-x8"), what_if=what_if).goodput.fraction < 1
    True
    """
    program, machine = _lowered(plan, machine)
    return outcome_of(simulate(program, machine, num_steps=num_steps, what_if=what_if), program, what_if)


def outcome_of(timeline: Timeline, program: Program, what_if: WhatIf) -> Outcome:
    """The remaining pace of a timeline of `program` after the checkpoints and failures of `what_if`.

    Raises:
        TwofoldError: as `goodput`.
    """
    held = max((_checkpoint_bytes(group) for group in program.groups), default=0)
    left = goodput(
        timeline.step_interval_s, program.num_ranks, checkpoints=what_if.checkpoints, failures=what_if.failures,
        checkpoint_bytes=held,
    )  # fmt: skip
    return Outcome(
        step_s=timeline.step_interval_s,
        low_s=timeline.low_s,
        high_s=timeline.high_s,
        bubble_fraction=timeline.bubble_fraction,
        exposed_comm_s=timeline.exposed_comm_s,
        host_wait_s=timeline.host_wait_s,
        peak_bytes=timeline.peak_bytes,
        goodput=left,
    )


def _checkpoint_bytes(group: GroupProgram) -> int:
    kept = (value for value in group.values.values() if value.scope is Scope.KEPT)
    return sum(value.size_bytes for value in kept if value.role in ("weight", "optimizer"))


def _cost_on(device: Machine, prices: ProgramPrices) -> CostOf:
    """The prices for a rank whose device and host are those of `device`."""
    own = ProgramPrices(prices.program, device)

    def cost_of(instruction: Instruction, group: GroupProgram) -> Cost:
        if instruction.kind is Kind.COMPUTE:
            return own(instruction, group)
        return replace(prices(instruction, group), dispatch_ps=own(instruction, group).dispatch_ps)

    return cost_of


def _costs_of_ranks(what_if: WhatIf, prices: ProgramPrices) -> dict[int, CostOf]:
    of_device: dict[int, CostOf] = {}  # by identity: two changed copies of a machine may bear one name
    machine, result = prices.machine, {}
    for rank, given in what_if.devices.items():
        device = what_if.device(rank, machine)
        assert device is not None
        if machine.launch_s:
            device = executing(device, "graph")
        # how many devices of it there are and how they are linked is a matter of the machine
        device = msgspec.structs.replace(
            device, num_devices=machine.num_devices, links=machine.links, devices_per_node=machine.devices_per_node
        )
        result[rank] = of_device.setdefault(id(given), _cost_on(device, prices))
    return result


def _slowdown(what_if: WhatIf) -> Slowdown | None:
    if not what_if.jitter:
        return what_if.slowdown or None

    def slowdown(rank: int, step: int, size: int) -> npt.NDArray[np.float64] | float | None:
        factor = what_if.slowdown.get(rank, 1.0)
        assert what_if.seed is not None
        draw = np.random.default_rng((what_if.seed, rank, step))
        return factor * np.exp(what_if.jitter * draw.standard_normal(size))

    return slowdown


def _lowered(plan: Plan | Program, machine: Machine) -> tuple[Program, Machine]:
    """The program of a plan, and the machine with the host times of its execution."""
    if isinstance(plan, Program):
        return plan, machine
    from plans.lower import lower

    return lower(plan), executing(machine, plan.execution)


def _overlap(machine: Machine) -> Overlap | None:
    law = overlap_law(machine)
    if law is None:
        return None

    def rates(compute: Instruction, comm: Instruction, compute_s: float, comm_s: float) -> tuple[float, float]:
        return law(overlap_class(compute.call), compute_s, comm.call, comm_s)

    return rates
