"""Slices and pairs, tried on the forecasts of a search whose space has neither.

Both hide communication behind compute. They are tried only where a configuration would be the fastest if it hid all of
its exposed communication: first on a step with few blocks and micro-batches, then, where that one gains, as a forecast
(`simulator.forecast.turns`), which takes seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from costmodels import Machine
from plans.degrees import Degrees, describe
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig
from plans.program import Program
from plans.schedules.pairs import overlapped_pairs
from search.candidate import Candidate
from search.devices.problem import Pins, Problem
from search.result import Rejected
from simulator.forecast import forecast
from simulator.forecast.predict import step_forecast
from simulator.forecast.turns import program_of, simulated

__all__ = ["Tried", "least_instructions", "turns"]

_NUM_TRIED = 6
"""Configurations on which slices and pairs are tried."""

_NUM_FORECAST = 2
"""Number of configurations that are forecast: those expected to be the fastest."""

_LEAST_GAIN = 0.002
"""Share of a step that must be exposed beyond what the best takes."""

_SHORT_BLOCKS = 2
"""Blocks of a chunk in a short step."""

_MOST_INSTRUCTIONS = 100_000
"""Largest number of instructions of a step that is forecast without request; a forecast takes about 80 us for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """The outcome of trying slices and pairs.

    Args:
        candidates: configurations with slices or pairs that fit, with their forecasts.
        rejected: what was not forecast, and why.
    """

    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[Rejected, ...] = ()


def turns(problem: Problem, found: Sequence[Candidate], *, deadline_s: float | None = None) -> Tried:
    """Try slices and pairs, those that are pinned or else two slices and pairs, each by itself.

    Args:
        problem: what is asked.
        found: forecasts of the search, the fastest first.
        deadline_s: `time.monotonic()` after which nothing more is tried.
    """
    if not problem.stack.runs_programs or not found:
        return Tried()
    candidates, rejected = list[Candidate](), list[Rejected]()
    trials = _trials(problem, found, rejected, deadline_s)
    for _, _, degrees in sorted(trials)[: _NUM_TRIED if problem.pins.takes_turns else _NUM_FORECAST]:
        if candidates and deadline_s is not None and time.monotonic() > deadline_s:
            break
        try:
            seen = forecast(problem.config, degrees, problem.machine)
        except TwofoldError as error:
            rejected.append(Rejected(what=describe(degrees), reason=str(error), count=1))
            continue
        if (excess := seen.peak_bytes - problem.limit_bytes) > 0:
            rejected.append(Rejected(what=describe(degrees), reason="memory", count=1, excess_bytes=excess))
        else:
            candidates.append(Candidate(degrees=degrees, forecast=seen))
    return Tried(candidates=tuple(candidates), rejected=tuple(rejected))


def _trials(
    problem: Problem, found: Sequence[Candidate], rejected: list[Rejected], deadline_s: float | None
) -> list[tuple[float, int, Degrees]]:
    """Configurations with slices or pairs to try: expected seconds, a number that breaks ties, and degrees."""
    trials: list[tuple[float, int, Degrees]] = []
    tried = lru_cache(_tried)  # configurations whose layers differ have equal short steps
    for own in _promising(problem, found):
        for change in _changes(problem.pins, own.degrees):
            if deadline_s is not None and time.monotonic() > deadline_s:
                return trials
            degrees, expected_s, reason = replace(own.degrees, **change), own.forecast.step_s, ""
            if not problem.pins.takes_turns and least_instructions(problem, own.degrees) > _MOST_INSTRUCTIONS:
                reason = _too_long(f"more than {_MOST_INSTRUCTIONS:,}")
            elif not problem.pins.takes_turns:
                try:
                    share, reason = tried(*_short(problem.config, degrees), problem.machine)
                except TwofoldError as error:
                    share, reason = 1.0, str(error)
                expected_s *= share
                if not reason and expected_s >= found[0].forecast.step_s:
                    reason = "too little gain in a step with few blocks and micro-batches"
            if reason:
                rejected.append(Rejected(what=describe(degrees), reason=reason, count=1))
            else:
                trials.append((expected_s, len(trials), degrees))
    return trials


def _promising(problem: Problem, found: Sequence[Candidate]) -> list[Candidate]:
    """The configurations to try it on, the most promising first."""
    enough_s = found[0].forecast.step_s * (1 - _LEAST_GAIN)
    some = [
        candidate
        for candidate in found
        if problem.pins.takes_turns
        or (_hidden_s(candidate) < enough_s and any(_changes(problem.pins, candidate.degrees)))
    ]
    return sorted(some, key=_hidden_s)[:_NUM_TRIED]


def _changes(pins: Pins, degrees: Degrees) -> Iterator[dict[str, Any]]:
    """Slices and pairs that a configuration may have."""
    if pins.takes_turns:
        yield {name: pins.given[name] for name in ("interleave", "overlap_pairs") if name in pins.given}
        return
    if "interleave" not in pins.given and degrees.micro_batch % 2 == 0:
        yield {"interleave": 2}
    if "overlap_pairs" not in pins.given and _has_pairs(degrees):
        yield {"overlap_pairs": True}


def _has_pairs(degrees: Degrees) -> bool:
    try:
        return any(overlapped_pairs(degrees.pipeline))
    except TwofoldError:  # with them its ranks would wait for each other
        return False


def _hidden_s(own: Candidate) -> float:
    """Seconds of a step that hides all its communication."""
    return own.forecast.step_s - own.forecast.exposed_comm_s


def _tried(config: TransformerConfig, short: Degrees, longer: float, machine: Machine) -> tuple[float, str]:
    """The share of its time that a short step takes with slices or pairs; or why the whole one is not forecast.

    Args:
        config, short: as `_short` makes them.
        longer: how many times as many instructions the complete step has.
        machine: that both run on.

    Raises:
        TwofoldError: degrees that cannot be.
    """
    program = program_of(config, short)
    count = round(_num_instructions(program) * longer)
    if count > _MOST_INSTRUCTIONS:
        return 1.0, _too_long(f"about {count:,}")
    plain = replace(short, interleave=1, overlap_pairs=False)
    return simulated(program, machine).step_interval_s / forecast(config, plain, machine).step_s, ""


def _short(config: TransformerConfig, degrees: Degrees) -> tuple[TransformerConfig, Degrees, float]:
    """A model of few blocks, the degrees of a step with few micro-batches, and how many times as long the whole is."""
    blocks, some = min(_SHORT_BLOCKS, config.num_layers // degrees.num_chunks or 1), degrees.recompute_layers
    count = min(degrees.num_micro_batches, 4 * degrees.pp if degrees.overlap_pairs else 2 * degrees.pp)
    short = replace(
        degrees, layers=(blocks,) * degrees.num_chunks, recompute_layers=None if some is None else min(some, blocks),
        global_batch=degrees.dp * degrees.micro_batch * count,
    )  # fmt: skip
    num_layers = blocks * degrees.num_chunks
    longer = config.num_layers * degrees.num_micro_batches / (num_layers * count)
    return replace(config, num_layers=num_layers), short, longer


def least_instructions(problem: Problem, degrees: Degrees) -> int:
    """A lower bound on the number of instructions of a step, counted without lowering it: those of the same step
    without slices and pairs."""
    plain = replace(degrees, interleave=1, overlap_pairs=False)
    return step_forecast(problem.config, plain, problem.machine).num_operations


def _too_long(count: str) -> str:
    return f"its step of {count} instructions is forecast only where slices or pairs are pinned"


def _num_instructions(program: Program) -> int:
    return sum(len(block.body.instructions) for group in program.groups for block in group.blocks)
