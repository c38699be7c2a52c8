"""The order of plans whose steps are equal within the accuracy of measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search.candidate import Candidate
from search.result import SearchResult

__all__ = ["EQUAL", "preferred"]

EQUAL = 0.01
"""Share of a step below which plans count as equally fast.

Of 127 replayed steps that were measured five times or more, three quarters ranged over more than 1.2 %; 75 plans that
were measured again took 2.7 % more or less in the median (benchmarks/data). A forecast is no better than that.
"""


def preferred(found: SearchResult[Candidate], count: int) -> SearchResult[Candidate]:
    """The result with those of its first `count` plans in front that are as fast as the fastest of them.

    They are ordered by simplicity (how many degrees are not as usual, then how many chunks the model has), then by
    memory that is left, then by time. `SearchResult.num_equal` says how many they are. Steps are those of the event
    engine where all have been simulated.
    """
    first = found.plans[:count]
    in_engine = all(candidate.simulated_s is not None for candidate in first)

    def step_s(each: Candidate) -> float:
        return each.simulated_s if in_engine and each.simulated_s is not None else each.forecast.step_s

    def simplicity(each: Candidate) -> tuple[Any, ...]:
        unusual = sum(is_unusual for is_unusual, _ in each.degrees.rank)
        return unusual, each.degrees.num_chunks, each.forecast.peak_bytes, step_s(each)

    enough_s = min(map(step_s, first)) * (1.0 + EQUAL)
    equal = sorted((candidate for candidate in first if step_s(candidate) <= enough_s), key=simplicity)
    others = [plan for plan in found.plans if not any(plan is own for own in equal)]
    return replace(found.reordered((*equal, *others)), num_equal=len(equal))
