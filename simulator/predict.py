"""A plan or a program on a machine: prices, sharing and the interval of the prediction, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from costmodels.machine import Machine
from costmodels.price import Cost, compute_class, price
from costmodels.traffic import plain_call
from plans.errors import TwofoldError
from plans.plan import Plan
from plans.program import GroupProgram, Instruction, Program
from plans.timeline import Timeline
from simulator.engine import Overlap, run_program

__all__ = ["simulate"]


def simulate(
    plan: Plan | Program,
    machine: Machine,
    *,
    num_steps: int = 3,
    seed: int | None = None,
    jitter: float = 0.0,
    slowdown: Mapping[int, float] | None = None,
) -> Timeline:
    """Predict a few training steps of a plan on a machine.

    Args:
        plan: a plan, which is lowered, or a program.
        machine: `costmodels.Machine`.
        num_steps: steps, back to back; step time, bubble and memory are those of the last.
        seed: of the jitter.
        jitter: standard deviation of the logarithm of a factor (median 1) on what a rank itself does for an instruction
            (dispatch, compute, processor time of communication), drawn anew for every rank and step; 0 is none.
        slowdown: rank -> factor on all that it does itself, of stragglers.

    Returns:
        the timeline with memory; `low_s` and `high_s` from the machine's interval.

    Raises:
        TwofoldError: more ranks than the machine has, a plan that cannot be lowered, a bad jitter or slowdown, and what
            `run_program` refuses.

    >>> from plans.layout import Layout
    >>> from plans.program import GroupProgram
    >>> idle = GroupProgram(mesh=Layout((4,), ("dp",)), values={}, blocks=())
    >>> simulate(Program(groups=(idle,), num_micro_batches=1), Machine.load("h200-x4")).step_s
    0.0
    """
    program = _lowered(plan) if isinstance(plan, Plan) else plan
    num_ranks = program.num_ranks
    if num_ranks > machine.num_devices:
        raise TwofoldError(
            f"the program runs on {num_ranks} ranks, but machine {machine.name!r} has {machine.num_devices} devices"
        )
    if not 0 <= jitter < 2:
        raise TwofoldError(f"jitter is {jitter}; it is at least 0 and below 2 (0.05 is about 5 %)")
    if jitter and seed is None:
        raise TwofoldError(f"jitter = {jitter} needs a seed, so that the prediction can be repeated")
    slowdown = slowdown or {}
    for rank, factor in slowdown.items():
        if not 0 <= rank < num_ranks or not 0 < factor < float("inf"):
            raise TwofoldError(f"slowdown of rank {rank} is {factor}; ranks are 0 to {num_ranks - 1}, factors above 0")

    def cost_of(instruction: Instruction, group: GroupProgram) -> Cost:
        return price(instruction, group, machine, num_ranks)

    def stretch(rank: int, step: int, size: int) -> npt.NDArray[np.float64] | float | None:
        factor = slowdown.get(rank, 1.0)
        if jitter and seed is not None:
            return factor * np.exp(jitter * np.random.default_rng((seed, rank, step)).standard_normal(size))
        return None if factor == 1.0 else factor

    timeline = run_program(
        program,
        cost_of,
        num_steps=num_steps,
        node_of=lambda rank: rank // machine.devices_per_node,
        cores_per_node=None if machine.host_async else machine.cores_per_node,
        host_async=machine.host_async,
        overlap=_overlap(machine) if machine.host_async else None,
        share_links=machine.host_async,
        stretch=stretch if jitter or slowdown else None,
    )
    step_s = timeline.step_s
    return replace(
        timeline,
        low_s=step_s * machine.interval.low,
        high_s=step_s * machine.interval.high,
        meta={**timeline.meta, "machine": machine.name, "program": program.name},
    )


def _lowered(plan: Plan) -> Program:
    from plans.lower import lower

    return lower(plan)


def _overlap(machine: Machine) -> Overlap | None:
    """The machine's pairs; what is not among them goes on undisturbed. Updates count as bound by memory."""
    if not machine.overlap:
        return None
    pairs = {(entry.compute, entry.collective): (entry.compute_rate, entry.comm_rate) for entry in machine.overlap}

    def rates(compute: Instruction, comm: Instruction) -> tuple[float, float]:
        kind = compute_class(compute.call)
        return pairs.get(("memory" if kind == "update" else kind, plain_call(comm.call)), (1.0, 1.0))  # type: ignore[arg-type]

    return rates
