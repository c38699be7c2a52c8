"""The search as one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from costmodels.price.clock import at_usual_clock
from plans.degrees import Degrees
from plans.errors import TwofoldError
from search.candidate import Candidate
from search.devices.baselines import data_parallel, physical_bound_s, usual_candidates
from search.devices.branch import Branching
from search.devices.descent import descended
from search.devices.explain import at_own_clock, neighbours, relaxations
from search.devices.problem import Problem
from search.devices.turns import Tried, turns
from search.own_clock import with_own_clocks
from search.result import AlternativesTo, NothingFits, SearchResult
from simulator.engine.garbage import without_collection

__all__ = ["solve"]

_CLOCKS = 0.04
"""By how much the steps of good configurations are assumed to differ in what they gain from their own clocks."""


@without_collection()
def solve(
    problem: Problem,
    *,
    time_limit_s: float | None = None,
    keep: int = 1,
    explain: bool = False,
    on_better: Callable[[Candidate], None] | None = None,
) -> SearchResult[Candidate]:
    """Search the space of a problem, and try slices and pairs on the fastest (`search.devices.turns`).

    Args:
        problem: what is asked.
        time_limit_s: after which the best so far is returned, with its gap. At half of it the baselines are forecast as
            well, and what a coordinate descent finds (`search.devices.descent`).
        keep: how many of the fastest are proven; more take longer.
        explain: forecast the neighbours of the best plan when they are first read.
        on_better: called with every new best, its forecast at its own clock.

    Raises:
        NothingFits: nothing in the space fits the memory.
        TwofoldError: nothing in the space can be made of these sizes at all.

    >>> from costmodels import Machine
    >>> from plans.model.transformer import transformer_config
    >>> from search.devices import Pins
    >>> problem = Problem(config=transformer_config("llama-3-8b", num_layers=4), machine=Machine.load("h100-sxm-x8"),
    ...                   num_devices=8, global_batch=32, pins=Pins(tp=2, recompute="none", micro_batch=1))
    >>> solve(problem).gap
    0.0
    """
    began, asked = time.monotonic(), problem
    if problem.stack.runs_programs:  # other software is predicted at the clock of the machine file
        problem = problem.changed(machine=at_usual_clock(problem.machine))
    deadline_s = None if time_limit_s is None else began + time_limit_s

    def better(found: Candidate) -> None:
        if on_better is not None:
            on_better(found if problem.machine is asked.machine else at_own_clock(asked, found.degrees))

    branching = Branching(problem=problem, keep=keep, on_better=better, deadline_s=deadline_s)
    if not problem.pins.given:  # a search that ends early is no worse than what one would do without it

        def usual(branching: Branching) -> None:
            assert deadline_s is not None
            now_s = time.monotonic()
            quarter_s = (deadline_s - now_s) / 4  # half of what is left is for the bound
            for degrees in descended(problem, branching.estimated, now_s + quarter_s):
                branching.consider(degrees)
            for degrees in usual_candidates(problem, now_s + 2 * quarter_s):
                branching.consider(degrees)

        branching.midway = usual
    branching.run()
    if branching.interrupted and time_limit_s is not None and not problem.pins.given:
        for candidate in data_parallel(problem, branching):  # also where the time limit is over
            branching.consider(candidate.degrees)
    if not branching.candidates:
        raise _nothing(branching)
    tried = turns(problem, branching.candidates, deadline_s=deadline_s)
    plans, num_proven = _ranked(problem, branching, tried)
    physics = physical_bound_s(problem)
    bound_s = min(max(branching.bound_s, physics), plans[0].forecast.step_s)
    found = SearchResult(
        problem=problem, plans=plans, lower_bound_s=bound_s,
        relaxed_bound_s=min(branching.relaxed_s, bound_s), physics_bound_s=physics, complete=branching.complete,
        num_proven=num_proven, margin=branching.margin, contention_margin=branching.contention_margin,
        search_s=time.monotonic() - began,
        num_evaluated=branching.num_forecasts + len(tried.candidates),
        num_nodes=branching.num_opened, rejected=(*branching.rejected, *tried.rejected),
        alternatives_to=AlternativesTo(partial(neighbours, branching, asked)) if explain else None,
    )  # fmt: skip
    if problem.machine is asked.machine:
        return found
    return _at_own_clocks(found, asked, [] if problem.pins.takes_turns else branching.near(_CLOCKS))


def _at_own_clocks(
    found: SearchResult[Candidate], asked: Problem, near: Sequence[tuple[Degrees, float]]
) -> SearchResult[Candidate]:
    """The result at the clock of all plans, with every plan at its own clock.

    Args:
        found: at one clock.
        asked: the problem, whose machine has no clock.
        near: further configurations that may be the fastest at their own clocks, with their seconds at the one clock.
    """
    listed = {plan.degrees: plan.forecast.step_s for plan in found.plans}
    before = listed | {degrees: step_s for degrees, step_s in near if degrees not in listed}
    own = [
        plan for plan in (at_own_clock(asked, degrees) for degrees in before)
        if plan.degrees in listed or plan.forecast.peak_bytes <= asked.limit_bytes
    ]  # fmt: skip
    shares = [plan.forecast.step_s / before[plan.degrees] for plan in own]
    own.sort(key=lambda each: each.key)
    return with_own_clocks(replace(found, problem=asked), tuple(own), shares)


def _ranked(problem: Problem, branching: Branching, tried: Tried) -> tuple[tuple[Candidate, ...], int]:
    """All that fits, and how many of the first are proven; slices and pairs are not covered by the proof.

    Raises:
        TwofoldError: slices or pairs are pinned, and none can be.
    """
    if problem.pins.takes_turns:
        if not tried.candidates:
            reasons = "; ".join(dict.fromkeys(each.reason for each in tried.rejected))
            raise TwofoldError(f"{problem.config.name}: no configuration supports the given slices or pairs: {reasons}")
        return tuple(sorted(tried.candidates, key=lambda each: each.key)), 0
    plans = tuple(sorted((*branching.candidates, *tried.candidates), key=lambda each: each.key))
    before = [number for number, plan in enumerate(plans) if plan.degrees.takes_turns]
    return plans, min([branching.num_proven, *before])


def _nothing(branching: Branching) -> TwofoldError:
    problem = branching.problem
    asked = f"{problem.config.name} on {problem.num_devices} devices of {problem.machine.name}"
    if branching.interrupted:
        return NothingFits(f"{asked}: the search stopped before it found a configuration that fits; let it run longer")
    if any(each.reason == "memory" for each in branching.rejected):
        ways = (
            "; ".join(relaxation.text for relaxation in relaxations(problem))
            or "no larger machine of this kind is known"
        )
        return NothingFits(f"{asked}: nothing fits {problem.limit_bytes / 1e9:.2f} GB per device. {ways}")
    reasons = (
        "; ".join(dict.fromkeys(each.reason for each in branching.rejected))
        or "the pinned degrees exclude all configurations"
    )
    return TwofoldError(f"{asked}, global batch {problem.global_batch}: no configuration is valid: {reasons}")
