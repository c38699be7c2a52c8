"""Predict plans at their own clocks after they were compared at one clock.

Where a machine's power is known, every step has a separate clock (`costmodels.price.power`). A search compares all
plans, and bounds them, at one clock; the plans that it returns are predicted at theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from search.result import PlanT, SearchResult

__all__ = ["with_own_clocks"]


def with_own_clocks(
    found: SearchResult[PlanT], plans: Sequence[PlanT], before_s: float, after_s: float
) -> SearchResult[PlanT]:
    """The result with `plans` instead of its plans.

    Args:
        found: at one clock.
        plans: the same at their own clocks, the fastest first.
        before_s: the best of `found` as it was predicted there.
        after_s: the same plan at its own clock: bounds are scaled in the same way.
    """
    share = after_s / before_s if before_s else 1.0
    lower_s, relaxed_s = found.lower_bound_s * share, found.relaxed_bound_s * share
    return replace(found, plans=plans, lower_bound_s=lower_s, relaxed_bound_s=min(relaxed_s, lower_s))
