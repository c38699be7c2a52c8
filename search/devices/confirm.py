"""The final few as plans, simulated in the event engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from plans.degrees.plan import plan_of as plan_of_degrees
from plans.errors import TwofoldError
from plans.model.transformer import transformer
from plans.plan import Plan
from search.candidate import Candidate
from search.devices.problem import Problem
from simulator import simulate

__all__ = ["Confirmed", "confirmed", "plan_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """A configuration and its pace in the event engine.

    Args:
        candidate: the configuration and its forecast.
        simulated_s: seconds from step to step; None where no plan can be made of it.
        reason: why there is none.
    """

    candidate: Candidate
    simulated_s: float | None
    reason: str = ""


def plan_of(problem: Problem, found: Candidate) -> Plan:
    """The plan that can be simulated and run: the configuration that was forecast, layer by layer.

    It has the names of the module that the model was recognised in, where there is one.

    Raises:
        TwofoldError: a tied head on another pipeline rank than its table, which is forecast but has no plan.
    """
    degrees = found.degrees
    plan = plan_of_degrees(degrees, transformer(problem.config, batch_size=degrees.global_batch))
    return plan if problem.recognised is None else problem.recognised.plan(plan)


def confirmed(
    problem: Problem, found: Sequence[Candidate], count: int, *, deadline_s: float | None = None
) -> list[Confirmed]:
    """The first `count` of `found`, simulated and ordered by that; equal ranks are simulated once.

    Only the first may begin after `deadline_s` (of `time.monotonic()`).
    """
    results: list[Confirmed] = []
    for each in found[:count]:
        if results and deadline_s is not None and time.monotonic() > deadline_s:
            results.append(Confirmed(candidate=each, simulated_s=None, reason="no time was left"))
            continue
        try:
            timeline = simulate(plan_of(problem, each), problem.machine, with_memory=False, fold_ranks=True)
        except TwofoldError as error:
            results.append(Confirmed(candidate=each, simulated_s=None, reason=str(error)))
        else:
            results.append(Confirmed(candidate=each, simulated_s=timeline.step_interval_s))
    return sorted(results, key=lambda each: (each.simulated_s is None, each.simulated_s or 0.0, each.candidate.key))
