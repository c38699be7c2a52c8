"""How good the predictions of a set of cases were, for each side: time, order, intervals, memory."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from interop.measurements.scores import ranking

__all__ = ["scores", "scores_text"]


def scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | int | None]]:
    """Side -> scores over the rows that have both a prediction and a measurement of it.

    Errors are predicted over measured, less 1. `order` is the share of pairs of the same model and batch whose order
    is right, where they differ by 2 % or more; `held` the share of measured times inside the interval; `memory` the
    mean absolute error of the peak that torch's allocator reports. None where no row says it.

    >>> told = {"step_s": 1.02, "low_s": 0.9, "high_s": 1.1, "peak_bytes": 103}
    >>> done = {"step_s": 1.0, "peak_bytes": 100, "left_bytes": 0}
    >>> row = {"model": "m", "batch": 8, "predicted": {"torch": told}, "measured": {"torch": done}}
    >>> round(scores([row])["torch"]["mean"], 6), scores([row])["torch"]["held"]
    (0.02, 1.0)
    """
    found: dict[str, dict[str, float | int | None]] = {}
    for side in dict.fromkeys(side for row in rows for side in row["measured"]):
        pairs = [
            (row, row["predicted"][side], row["measured"][side])
            for row in rows
            if "step_s" in row["measured"].get(side, {}) and "step_s" in row["predicted"].get(side, {})
        ]
        if not pairs:
            continue
        errors = [told["step_s"] / done["step_s"] - 1 for _, told, done in pairs]
        groups = defaultdict(list)
        for row, told, done in pairs:
            groups[row["model"], row["batch"]].append((told["step_s"], done["step_s"]))
        memory = [
            abs(told["peak_bytes"] / (done["peak_bytes"] - done.get("left_bytes", 0)) - 1)
            for _, told, done in pairs
            if done["peak_bytes"]
        ]
        found[side] = {
            "rows": len(pairs), "mean": statistics.fmean(map(abs, errors)), "bias": statistics.fmean(errors),
            "worst": max(map(abs, errors)), "order": ranking(groups.values())[0],
            "held": statistics.fmean(told["low_s"] <= done["step_s"] <= told["high_s"] for _, told, done in pairs),
            "memory": statistics.fmean(memory) if memory else None,
        }  # fmt: skip
    return found


def scores_text(found: Mapping[str, Mapping[str, float | int | None]]) -> str:
    """One line per side."""
    lines = [f"{'side':9}{'rows':>6}{'mean':>9}{'bias':>9}{'worst':>9}{'order':>9}{'held':>9}{'memory':>9}"]
    for side, of in found.items():
        shares = ("-" if of[name] is None else f"{of[name]:.1%}" for name in
                  ("mean", "bias", "worst", "order", "held", "memory"))  # fmt: skip
        lines.append(f"{side:9}{of['rows']:6d}" + "".join(f"{share:>9}" for share in shares))
    return "\n".join(lines)
