"""Attaches the simulator's prediction to a plan, and stores the redistribution steps that are faster on its machine."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from costmodels import Machine
from plans.lower import lower, lower_by
from plans.plan import Plan, Prediction
from plans.program import Kind, Program
from search.operators.pricing import redistribution_choice
from simulator import simulate

__all__ = ["predicted"]


_PAIR_S = {True: 1e-6, False: 1.5e-4}
"""Whether ranks fold -> about how long it takes to simulate the transfer between two ranks, twice: at one clock and at
the plan's own."""


def predicted(
    plan: Plan, machine: Machine, limit_bytes: int | None = None, time_left_s: Callable[[], float] = lambda: math.inf
) -> Plan:
    """The same plan with its simulated step time, interval and peak memory on `machine`.

    Where the machine's prices speak for other steps of redistributions than those of least bytes, and the plan stores
    none, both are simulated; the steps are stored if the step is faster with them (or, with `limit_bytes`, if only so
    it fits). If `time_left_s` is short, only those of least bytes are: the others may be transfers between many ranks.
    """
    if plan.redistributions or time_left_s() <= 0:
        return _with_prediction(plan, lower(plan), machine)
    choice = redistribution_choice(machine, plan.num_ranks)
    program = lower_by(plan, choice)
    chosen = msgspec.structs.replace(plan, redistributions=choice.redistributions)
    if not choice.redistributions:
        return _with_prediction(chosen, program, machine)
    plain = _with_prediction(plan, lower(plan), machine)
    if _num_pairs(program) * _PAIR_S[machine.host_async] > time_left_s():
        return plain
    found = _with_prediction(chosen, program, machine)
    return min(plain, found, key=lambda each: _rank(each, limit_bytes))


def _num_pairs(program: Program) -> int:
    """Pairs of ranks between which the program has transfers, counted for each of them."""
    bodies = {id(block.body): block.body for group in program.groups for block in group.blocks}
    return sum(len(line.pieces.by_pair[0]) for body in bodies.values() for line in body.instructions
               if line.kind is Kind.SEND)  # fmt: skip


def _rank(plan: Plan, limit_bytes: int | None) -> tuple[bool, float]:
    assert plan.prediction is not None
    return limit_bytes is not None and plan.prediction.peak_bytes > limit_bytes, plan.prediction.step_s


def _with_prediction(plan: Plan, program: Program, machine: Machine) -> Plan:
    timeline = simulate(program, machine, fold_ranks=True)
    prediction = Prediction(
        machine=machine.name, step_s=timeline.step_interval_s, peak_bytes=timeline.peak_bytes,
        exposed_comm_s=timeline.exposed_comm_s, bubble_fraction=timeline.bubble_fraction, low_s=timeline.low_s,
        high_s=timeline.high_s,
    )  # fmt: skip
    return msgspec.structs.replace(plan, prediction=prediction)
