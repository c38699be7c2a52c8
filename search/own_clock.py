"""Predict plans at their own clocks after they were compared at one clock.

Where a machine's power is known, every step has a separate clock (`costmodels.price.power`). A search compares all
plans, and bounds them, at one clock. The plans near the best are then predicted at their own clocks, where another one
may be the fastest: a step that waits more draws less power, and its clock is higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from search.result import PlanT, SearchResult

__all__ = ["with_own_clocks"]

_ROUNDING = 1e-9
"""Share of a step by which equal times differ that were scaled."""


def with_own_clocks(found: SearchResult[PlanT], plans: Sequence[PlanT], shares: Sequence[float]) -> SearchResult[PlanT]:
    """The result with `plans` instead of its plans.

    Its bounds hold if no other plan speeds up more at its own clock than the one of `plans` that speeds up most
    (`SearchResult.clock_share`). If that is the fastest one at either clock, it is proven under this assumption.

    Args:
        found: at one clock.
        plans: predicted at their own clocks, the fastest first.
        shares: the step of each of these, in any order, over its step at the one clock.
    """
    share = min(shares)
    lower_s, relaxed_s = (
        max(bound_s * share, found.physics_bound_s) for bound_s in (found.lower_bound_s, found.relaxed_bound_s)
    )
    own = replace(found, plans=plans, lower_bound_s=lower_s, relaxed_bound_s=min(relaxed_s, lower_s), clock_share=share)
    return replace(own, num_proven=min(found.num_proven, int(own.gap < _ROUNDING)))
