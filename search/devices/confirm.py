"""The fastest plans of a search, simulated in the event engine and ordered by it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plans.degrees.plan import plan_of as plan_of_degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import transformer
from plans.plan import Plan
from plans.program import Program
from search.candidate import Candidate
from search.devices.problem import Problem
from search.devices.turns import least_instructions
from search.result import SearchResult
from simulator import simulate

__all__ = ["MOST_INSTRUCTIONS", "Confirmed", "confirmed", "plan_of"]

MOST_INSTRUCTIONS = 200_000
"""Instructions of all plans that are simulated unasked; the engine takes about 25 us for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """A search's result after the event engine has run its first plans.

    Args:
        result: those that were simulated come first, in the order of the engine; `Candidate.simulated_s` is their step.
        left_out: the others that were to be simulated, and why they were not.
    """

    result: SearchResult[Candidate]
    left_out: Sequence[tuple[Candidate, str]]


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
    found: SearchResult[Candidate], count: int, *, most_instructions: int | None = None, deadline_s: float | None = None
) -> Confirmed:
    """Simulate the first `count` plans of a search; equal ranks are simulated once.

    Args:
        found: by a search over degrees.
        count: how many.
        most_instructions: of all that are simulated, those of equal ranks counted once; any number by default.
        deadline_s: `time.monotonic()` after which no other than the first is begun.
    """
    problem, left = found.problem, float("inf") if most_instructions is None else most_instructions
    too_many = f"too many instructions to simulate them unasked (more than {most_instructions or 0:,} together)"
    checked, left_out = list[Candidate](), list[tuple[Candidate, str]]()
    for each in found.plans[:count]:
        if checked and deadline_s is not None and time.monotonic() > deadline_s:
            left_out.append((each, "no time was left"))
            continue
        try:
            if least_instructions(problem, each.degrees) > left:
                left_out.append((each, too_many))
                continue
            program = lower(plan_of(problem, each))
            if (size := _num_instructions(program)) > left:
                left_out.append((each, too_many))
                continue
            left -= size
            timeline = simulate(program, problem.machine, with_memory=False, fold_ranks=True)
        except TwofoldError as error:
            left_out.append((each, str(error)))
        else:
            checked.append(replace(each, simulated_s=timeline.step_interval_s))
    checked.sort(key=lambda each: (each.simulated_s, each.key))
    plans = (*checked, *(candidate for candidate, _ in left_out), *found.plans[count:])
    return Confirmed(result=found.reordered(plans), left_out=left_out)


def _num_instructions(program: Program) -> int:
    return sum(len(block.body.instructions) for group in program.groups for block in group.blocks)
