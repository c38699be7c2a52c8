"""Baselines without a search, with the same forecast."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator

from plans.degrees import Degrees, check
from plans.degrees.rules import unpredicted
from plans.errors import TwofoldError
from plans.model.transformer import sizes_of, transformer
from search.candidate import Candidate, identity
from search.devices.branch import ESTIMATE_MARGIN, Branching
from search.devices.problem import Pins, Problem
from search.physics import physics_s
from search.result import NothingFits, SearchResult
from simulator.estimate import estimate_grid
from simulator.forecast import Forecast, forecast

__all__ = ["BASELINES", "baseline", "data_parallel", "physical_bound_s", "usual_candidates"]


def baseline(problem: Problem, name: str) -> SearchResult[Candidate]:
    """Run a baseline and return its best configuration.

    Args:
        problem: whose pins must be empty: baselines have their own.
        name: "data-parallel": every device has the complete model, micro-batch, recomputing and optimizer level as fast
            as possible; "grid": powers of two of tp (up to a node) and micro-batch (up to 4), every pp that divides
            layers and devices, 1F1B or its interleaved form, none or full recomputing, sharded optimizer states, even
            layers, as people try by hand with Megatron-LM; "greedy": devices are halved again and again (by their prime
            factors), each time by the degree that is fastest at that moment.

    Raises:
        NothingFits: nothing that the baseline tries fits.
        TwofoldError: an unknown name, or pins.
    """
    if name not in BASELINES:
        raise TwofoldError(f"baseline {name!r} is not known; known are {', '.join(BASELINES)}")
    if problem.pins.given:
        raise TwofoldError(f"{name} chooses all degrees itself; omit {', '.join(problem.pins.given)}")
    began = time.monotonic()
    tried = BASELINES[name](problem)
    fitting = sorted(
        (candidate for candidate in tried if candidate.forecast.peak_bytes <= problem.limit_bytes),
        key=lambda each: each.key,
    )
    if not fitting:
        what = "none of its configurations is valid" if not tried else (
            f"it needs at least {min(candidate.forecast.peak_bytes for candidate in tried) / 1e9:.2f} GB"
        )  # fmt: skip
        raise NothingFits(
            f"{name}: {problem.config.name} does not fit {problem.limit_bytes / 1e9:.2f} GB on "
            f"{problem.num_devices} devices of {problem.machine.name}: {what}"
        )
    physics = physical_bound_s(problem)
    return SearchResult(
        problem=problem, plans=tuple(fitting), lower_bound_s=physics, relaxed_bound_s=physics, physics_bound_s=physics,
        search_s=time.monotonic() - began, num_evaluated=len(tried), method=name,
    )  # fmt: skip


def physical_bound_s(problem: Problem) -> float:
    """`search.physics.physics_s` of the problem's model, batch and devices."""
    graph = transformer(problem.config, batch_size=problem.global_batch)
    return physics_s(graph, problem.machine, problem.num_devices, problem.at_level(0))


def usual_candidates(problem: Problem, deadline_s: float | None = None) -> list[Degrees]:
    """The results of the grid and the greedy halving up to `deadline_s` (of `time.monotonic()`)."""
    until = float("inf") if deadline_s is None else deadline_s
    found = [sorted(tried(problem, until), key=lambda each: each.key) for tried in (_greedy, _grid)]
    fitting = [
        [candidate for candidate in tried if candidate.forecast.peak_bytes <= problem.limit_bytes] for tried in found
    ]
    return [tried[0].degrees for tried in fitting if tried]


_AT_ONCE = 50
"""Configurations that are forecast between two looks at the clock."""


def _forecasts(problem: Problem, candidates: Iterable[Degrees], until_s: float = float("inf")) -> list[Candidate]:
    chosen = list({identity(candidate): candidate for candidate in candidates}.values())
    at_once = len(chosen) if until_s == float("inf") else _AT_ONCE
    found: list[Candidate] = []
    for first in range(0, len(chosen), max(1, at_once)):
        if time.monotonic() > until_s:
            break
        part = chosen[first : first + at_once]
        seen = estimate_grid(problem.config, part, problem.machine, stack=problem.stack)
        found += _promising(problem, list(zip(part, seen, strict=True)), until_s)
    return found


def _promising(problem: Problem, estimated: list[tuple[Degrees, Forecast]], until_s: float) -> list[Candidate]:
    """The forecasts of those that may be the fastest by their estimates; what does not fit keeps its estimate."""
    if not problem.stack.runs_programs:
        return [Candidate(degrees=degrees, forecast=seen) for degrees, seen in estimated]
    found, best_s = list[Candidate](), float("inf")
    for degrees, seen in sorted(estimated, key=lambda each: each[1].step_s):
        if seen.peak_bytes <= problem.limit_bytes:
            if seen.step_s * (1.0 - ESTIMATE_MARGIN) >= best_s or (found and time.monotonic() > until_s):
                break
            seen = forecast(problem.config, degrees, problem.machine)
            if seen.peak_bytes <= problem.limit_bytes:
                best_s = min(best_s, seen.step_s)
        found.append(Candidate(degrees=degrees, forecast=seen))
    return found


def data_parallel(problem: Problem, within: Branching | None = None) -> list[Candidate]:
    """What data parallelism does: every device has the complete model.

    Args:
        problem: what is asked.
        within: a search of this problem, whose results are reused.
    """
    count = problem.num_devices
    pins = Pins(dp=count, tp=1, pp=1, cp=1, ep=1)
    try:
        if within is None:
            part = Branching(problem=problem.changed(pins=pins))
        else:
            part = within.narrowed(pins, proves=False)
            part.deadline_s = None
    except TwofoldError:
        return []
    part.run()
    if part.candidates:
        return part.candidates
    values = {"dp": count, "micro_batch": 1, "recompute": "full", "zero": 3 if count > 1 else 0}
    return _forecasts(problem, _possible(problem, [values]))


def _grid(problem: Problem, until_s: float = float("inf")) -> list[Candidate]:
    return _forecasts(problem, _possible(problem, _grid_values(problem)), until_s)


def _grid_values(problem: Problem) -> Iterator[dict[str, object]]:
    count, config = problem.num_devices, problem.config
    experts = 1 if config.experts is None else config.experts.num_experts
    node = problem.machine.links[0].ranks if problem.machine.links else 1
    for tp in _powers(min(count, node)):
        for pp in range(1, count // tp + 1):
            dp = count // tp // pp
            if dp * tp * pp != count or config.num_layers % pp:
                continue
            eps = [ep for ep in _powers(dp) if dp % ep == 0 and experts % ep == 0]
            for size in (1, 2, 4):
                chunked = [v for v in (2, 4) if pp > 1 and config.num_layers % (pp * v) == 0]
                for schedule, virtual in (("1f1b", 1), *(("interleaved_1f1b", v) for v in chunked)):
                    for recompute, ep in itertools.product(("none", "selective", "full"), eps):
                        yield {
                            "dp": dp, "tp": tp, "pp": pp, "micro_batch": size, "schedule": schedule,
                            "virtual": virtual, "recompute": recompute, "zero": 1, "sequence_parallel": tp > 1,
                            "ep": ep,
                        }  # fmt: skip


def _powers(most: int) -> list[int]:
    found = [1]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _greedy(problem: Problem, until_s: float = float("inf")) -> list[Candidate]:
    now = {"dp": 1, "cp": 1, "tp": 1, "pp": 1}
    for factor in _prime_factors(problem.num_devices):
        ahead = [now | {name: now[name] * factor} for name in now]
        found = _forecasts(problem, _possible(problem, [_usual(values) for values in ahead]), until_s)
        if not found:
            return []
        best = min(found, key=lambda each: each.key).degrees
        now = {name: getattr(best, name) for name in now}
    choices = [
        _usual(now) | {"recompute": recompute, "zero": level, "micro_batch": size}
        for recompute in problem.stack.recompute_modes
        for level in (0, 1, 2, 3)
        for size in (1, 2, 4)
    ]
    return _forecasts(problem, _possible(problem, choices), until_s)


def _usual(values: dict[str, int]) -> dict[str, object]:
    return {**values, "micro_batch": 1, "sequence_parallel": values["tp"] > 1, "zero": 0}


def _prime_factors(number: int) -> list[int]:
    """The prime factors of a number, the largest first.

    >>> _prime_factors(12)
    [3, 2, 2]
    """
    found, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found[::-1]


def _possible(problem: Problem, candidates: Iterable[dict[str, object]]) -> Iterator[Degrees]:
    sizes = sizes_of(problem.config)
    for values in candidates:
        try:
            made = problem.degrees(values)
            check(made, sizes)
        except TwofoldError:
            continue
        if unpredicted(sizes, made.tp, made.sequence_parallel) is None:
            yield made


BASELINES: dict[str, Callable[[Problem], list[Candidate]]] = {
    "data-parallel": data_parallel,
    "grid": _grid,
    "greedy": _greedy,
}
"""Name -> its description."""
