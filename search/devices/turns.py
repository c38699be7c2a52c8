"""Slices and pairs, tried on what the search has forecast: the space that is searched has neither.

Both hide communication behind compute. So they are tried only where a configuration would be the fastest if it hid all
that it exposes, first on a step with few blocks and micro-batches, and forecast (`simulator.forecast.turns`, which
takes seconds) where that short step gains.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plans.degrees import Degrees, describe
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig
from plans.program import Program
from plans.schedules.pairs import overlapped_pairs
from search.candidate import Candidate
from search.devices.problem import Pins, Problem
from search.result import Rejected
from simulator.forecast import forecast
from simulator.forecast.turns import simulated

__all__ = ["Tried", "turns"]

_NUM_TRIED = 3
"""Configurations on which slices and pairs are tried, until some gain."""

_LEAST_GAIN = 0.002
"""Share of a step that must be exposed beyond what the best takes."""

_SHORT_BLOCKS = 2
"""Blocks of a chunk in a short step."""

_MOST_INSTRUCTIONS = 100_000
"""Of a step that is forecast unasked; a forecast takes about 80 us for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What came of it.

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
    candidates, rejected, best_s = list[Candidate](), list[Rejected](), found[0].forecast.step_s
    for own in _promising(problem, found):
        if deadline_s is not None and time.monotonic() > deadline_s:
            break
        for change in _changes(problem.pins, own.degrees):
            degrees = replace(own.degrees, **change)
            try:
                reason = "" if problem.pins.takes_turns else _why_not(problem, degrees)
                seen = None if reason else forecast(problem.config, degrees, problem.machine)
            except TwofoldError as error:
                reason, seen = str(error), None
            if seen is None:
                rejected.append(Rejected(what=describe(degrees), reason=reason, count=1))
            elif (excess := seen.peak_bytes - problem.limit_bytes) > 0:
                rejected.append(Rejected(what=describe(degrees), reason="memory", count=1, excess_bytes=excess))
            else:
                candidates.append(Candidate(degrees=degrees, forecast=seen))
        if any(each.forecast.step_s < best_s for each in candidates):
            break
    return Tried(candidates=tuple(candidates), rejected=tuple(rejected))


def _promising(problem: Problem, found: Sequence[Candidate]) -> list[Candidate]:
    """The configurations to try it on, the most promising first."""
    enough_s = found[0].forecast.step_s * (1 - _LEAST_GAIN)
    some = [
        each for each in found
        if problem.pins.takes_turns or (_hidden_s(each) < enough_s and any(_changes(problem.pins, each.degrees)))
    ]  # fmt: skip
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


def _why_not(problem: Problem, degrees: Degrees) -> str:
    """Why a configuration need not be forecast, "" where it may gain.

    Raises:
        TwofoldError: degrees that cannot be.
    """
    config, short = _short(problem.config, degrees)
    plain = replace(short, interleave=1, overlap_pairs=False)
    program, timeline = simulated(config, short, problem.machine)
    if timeline.step_interval_s >= forecast(config, plain, problem.machine).step_s:
        return "a step with few blocks and micro-batches gains nothing"
    longer = problem.config.num_layers * degrees.num_micro_batches / (config.num_layers * short.num_micro_batches)
    count = round(_num_instructions(program) * longer)
    if count > _MOST_INSTRUCTIONS:
        return f"may gain, but its step of about {count:,} instructions is forecast only where it is pinned"
    return ""


def _short(config: TransformerConfig, degrees: Degrees) -> tuple[TransformerConfig, Degrees]:
    """A model of few blocks, and the degrees of a step with few micro-batches that is like the whole one."""
    blocks, some = min(_SHORT_BLOCKS, config.num_layers // degrees.num_chunks or 1), degrees.recompute_layers
    count = min(degrees.num_micro_batches, 4 * degrees.pp if degrees.overlap_pairs else 2 * degrees.pp)
    return replace(config, num_layers=blocks * degrees.num_chunks), replace(
        degrees, layers=(blocks,) * degrees.num_chunks, recompute_layers=None if some is None else min(some, blocks),
        global_batch=degrees.dp * degrees.micro_batch * count,
    )  # fmt: skip


def _num_instructions(program: Program) -> int:
    return sum(len(block.body.instructions) for group in program.groups for block in group.blocks)
