"""Checks whether plans fit into memory, from the program order alone. Thousands of plans are checked without
simulation.

The peak of a rank follows from the strategies of its stage and, to a small part, of its neighbours (tensors that cross
the boundary), so single stages are checked first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from plans.errors import TwofoldError
from plans.lower import lower
from plans.plan import Plan, Strategy
from simulator import peak_of_order

__all__ = ["leaner_plan", "peaks", "picks_that_may_fit"]

DESCENT_S = 30.0
"""Time limit of the search for a plan with less memory, if nothing else fits."""


def peaks(plan: Plan) -> tuple[int, ...]:
    """Peak bytes of a rank of every group, in pipeline order; messages in flight are not counted."""
    return tuple(peak_of_order(group).peak_bytes for group in lower.__wrapped__(plan).groups)


def picks_that_may_fit(
    plan_of: Callable[[Sequence[int]], Plan],
    counts: Sequence[int],
    limit_bytes: int,
    is_over: Callable[[], bool],
    most: int = 32,
) -> list[tuple[int, ...]]:
    """Combinations of the stages' answers (best first in each stage) whose every stage fits on its own.

    Args:
        plan_of: the plan of one answer per stage.
        counts: answers per stage.
        limit_bytes: per rank.
        is_over: whether time is up: answers that have not been looked at are left out.
        most: combinations to return; the sums of the answers' ranks grow.
    """
    fitting: list[list[int]] = []
    for stage, count in enumerate(counts):
        own: list[int] = []
        for at in range(count):
            if is_over() and at:
                break
            pick = [at if number == stage else 0 for number in range(len(counts))]
            if peaks(plan_of(pick))[stage] <= limit_bytes:
                own.append(at)
        fitting.append(own)
    if not all(fitting):
        return []
    found = []
    for total in range(sum(len(answers) for answers in fitting)):
        found += _with_sum(total, [len(answers) for answers in fitting])
        if len(found) >= most:
            break
    return [tuple(answers[at] for answers, at in zip(fitting, pick, strict=True)) for pick in found[:most]]


def _with_sum(total: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    if not sizes:
        return [()] if total == 0 else []
    return [(at, *rest) for at in range(min(total + 1, sizes[0])) for rest in _with_sum(total - at, sizes[1:])]


def leaner_plan(plan: Plan, choices: Mapping[str, Sequence[Strategy]], seconds: float = DESCENT_S) -> Plan:
    """Reduce the memory of `plan` by changing one operator's strategy at a time, until no change helps.

    The largest peak decides, then the sum of all peaks. It is a descent: its result is the smallest found, which may
        not be the smallest possible.
    """
    best, least = plan, _key(plan)
    deadline, improved = time.perf_counter() + seconds, True
    while improved:
        improved = False
        for name, offered in choices.items():
            for strategy in offered:
                if time.perf_counter() > deadline:
                    return best
                changed = msgspec.structs.replace(best, strategies={**best.strategies, name: strategy})
                try:
                    key = _key(changed)
                except TwofoldError:
                    continue
                if key < least:
                    best, least, improved = changed, key, True
    return best


def _key(plan: Plan) -> tuple[int, int]:
    found = peaks(plan)
    return max(found), sum(found)
