"""The final few: forecast as the programs that they lower to, and simulated in the event engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from plans.degrees.plan import plan_of as plan_of_degrees
from plans.errors import TwofoldError
from plans.model.transformer import transformer
from plans.plan import Plan
from search.candidate import Candidate, describe
from search.devices.problem import Problem
from search.result import NothingFits, Rejected, SearchResult
from simulator import simulate
from simulator.forecast import forecast

__all__ = ["Confirmed", "confirmed", "plan_of", "predicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmed:
    """A configuration and one step of it in the event engine.

    Args:
        candidate: the configuration and its forecast.
        simulated_s: seconds of the step, the first of a run; None where no plan can be made of it.
        reason: why there is none.
    """

    candidate: Candidate
    simulated_s: float | None
    reason: str = ""


def plan_of(problem: Problem, found: Candidate) -> Plan:
    """The plan that can be simulated and run: the configuration that was forecast, layer by layer.

    Raises:
        TwofoldError: a tied head on another pipeline rank than its table, which is forecast but has no plan.
    """
    degrees = found.degrees
    return plan_of_degrees(degrees, transformer(problem.config, batch_size=degrees.global_batch))


def predicted(result: SearchResult[Candidate], count: int) -> SearchResult[Candidate]:
    """The result with the forecasts of the programs that its first plans lower to, in place of their estimates.

    Plans whose programs need more memory than the limit are taken out; the next ones are forecast in their place. The
    plans are ordered by forecast. What was proven of the estimates stands for plans that keep their place.

    Args:
        result: of a search over degrees.
        count: of plans.

    Raises:
        NothingFits: none of the plans that the search found does.
    """
    problem = result.problem
    if not problem.stack.runs_programs:
        return result
    plans, rejected = list[Candidate](), list(result.rejected)
    for each in result.plans:
        if len(plans) == count:
            break
        own = forecast(problem.config, each.degrees, problem.machine)
        if (excess := own.peak_bytes - problem.limit_bytes) > 0:
            reason = "memory of the lowered program"
            rejected.append(Rejected(what=describe(each.degrees), reason=reason, count=1, excess_bytes=excess))
            continue
        plans.append(replace(each, forecast=own, estimate_s=each.forecast.step_s))
    if not plans:
        least = min(each.excess_bytes or 0 for each in rejected[len(result.rejected) :])
        raise NothingFits(
            f"{problem.config.name}: the programs of the {len(rejected) - len(result.rejected)} plans that the search "
            f"found need at least {least / 1e9:.2f} GB more than the limit of {problem.limit_bytes / 1e9:.2f} GB; the "
            f"search estimates memory, so raise --top-k to try more plans"
        )
    plans.sort(key=lambda each: each.forecast.step_s)
    proven = zip(plans, result.plans[: result.num_proven], strict=False)
    num_proven = len(list(itertools.takewhile(lambda pair: pair[0].degrees == pair[1].degrees, proven)))
    return replace(result, plans=tuple(plans), rejected=tuple(rejected), num_proven=num_proven)


def confirmed(
    problem: Problem, found: Sequence[Candidate], count: int, *, deadline_s: float | None = None
) -> list[Confirmed]:
    """The first `count` of `found`, simulated and ordered by that; equal ranks are simulated once.

    None is begun after `deadline_s` (of `time.monotonic()`), but the first.
    """
    results: list[Confirmed] = []
    for each in found[:count]:
        if results and deadline_s is not None and time.monotonic() > deadline_s:
            results.append(Confirmed(candidate=each, simulated_s=None, reason="no time was left"))
            continue
        try:
            timeline = simulate(
                plan_of(problem, each), problem.machine, num_steps=1, with_memory=False, fold_ranks=True
            )  # fmt: skip
        except TwofoldError as error:
            results.append(Confirmed(candidate=each, simulated_s=None, reason=str(error)))
        else:
            results.append(Confirmed(candidate=each, simulated_s=timeline.step_s))
    return sorted(results, key=lambda each: (each.simulated_s is None, each.simulated_s or 0.0, each.candidate.key))
