"""Scores of predicted rows: errors, pair order and regret.

Pair order: of all pairs of rows in a group (same source, model, sequence, precision, switches, devices and global
batch) whose measured values differ by more than 2 %, the share that the predictions order alike, ties as half. Regret:
how much worse the row that the predictions choose measured than the best of its group.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

__all__ = ["LESS_IS_BETTER", "ranking", "score"]

LESS_IS_BETTER = ("iteration_time_s", "peak_memory_GiB", "peak_memory_GB")
"""Metrics of which the smaller value is the better one."""

_DIFFERENT = 0.02


def ranking(groups: Iterable[Sequence[tuple[float, float]]]) -> tuple[float | None, list[float]]:
    """How well predictions rank alternatives.

    Args:
        groups: of alternatives, each its predicted and its measured cost; the less the better.

    Returns:
        Share of the pairs of a group that are in the right order, those aside whose measured costs differ by less than
        2 % (None without any), and for each group of several the regret: by what share the alternative predicted the
        cheapest costs more than the cheapest.

    >>> ranking([[(1.0, 3.0), (2.0, 2.0), (4.0, 4.0)]])
    (0.6666666666666666, [0.5])
    """
    agreed = pairs = 0.0
    regrets: list[float] = []
    for rows in groups:
        for (said, cost), (other_said, other_cost) in combinations(rows, 2):
            if abs(cost - other_cost) <= _DIFFERENT * min(cost, other_cost):
                continue
            pairs += 1
            agreed += 0.5 if said == other_said else float((cost > other_cost) == (said > other_said))
        if len(rows) > 1:
            regrets.append(min(rows)[1] / min(cost for _, cost in rows) - 1)
    return agreed / pairs if pairs else None, regrets


def score(source: str, metric: str, found: Sequence[tuple[tuple[str, ...], dict[str, Any]]]) -> dict[str, Any]:
    """The errors of the predictions of one metric, and how well they rank the rows of each group.

    Args:
        source: of the rows.
        metric: what they state.
        found: group and predicted row of each, with "value", "predicted", "low" and "high" in one unit.
    """
    errors = [result["predicted"] / result["value"] - 1 for _, result in found]
    inside = [result["low"] <= result["value"] <= result["high"] for _, result in found]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for group, result in found:
        groups.setdefault(group, []).append(result)
    sign = 1 if metric in LESS_IS_BETTER else -1
    order, regrets = ranking(
        [[(row["predicted"] ** sign, row["value"] ** sign) for row in rows] for rows in groups.values()]
    )
    absolute = [abs(error) for error in errors]
    return {
        "source": source, "metric": metric, "rows": len(errors), "mape": statistics.fmean(absolute),
        "median_ape": statistics.median(absolute), "bias": statistics.fmean(errors),
        "within_interval": sum(inside) / len(inside), "pair_order": order,
        "regret_mean": statistics.fmean(regrets) if regrets else None, "regret_max": max(regrets, default=None),
    }  # fmt: skip
