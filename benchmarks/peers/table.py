"""What was found, in rows: times, ratios, spread, memory, model TFLOP/s, differences of losses and of predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.peers.cases import Case, model_flops
from benchmarks.peers.own import EXECUTIONS

__all__ = ["LOSS_TOLERANCE", "SIDES", "row_of", "table"]

LOSS_TOLERANCE = {"bfloat16": 2.0**-8, "float32": 1e-6}
"""Relative difference of first losses that counts as rounding: one step of bfloat16; ten of single precision."""

_PEERS = ("torch", "compiled", "megatron")
SIDES = (*EXECUTIONS, *_PEERS)
"""What is measured of a case: this executor's executions, then its peers."""


def row_of(case: Case, sides: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, Any]:
    """One row: what was measured of every side, and what follows from it.

    `ratios` are own times and peaks over the peer's: of this executor all steps count, of the peer not the first ones,
    in which a compiler tries kernels. `losses` compares the peer's with this executor's: the relative difference of the
    first, and the largest of the steps behind it, which is one of gradients and updates too.
    """
    row: dict[str, Any] = {
        "case": case.name, "ranks": case.ranks, "model": case.model, "batch": case.batch, "dtype": case.config.dtype,
        "degrees": dict(case.degrees), "reduce_every": case.reduce_every, "predicted": dict(predicted),
        "measured": dict(sides), "ratios": {}, "losses": {}, "model_TFLOPps_per_device": {}, "prediction_errors": {},
    }  # fmt: skip
    good = {side: figures for side, figures in sides.items() if "error" not in figures}
    flops = model_flops(case.config, case.batch)
    for side, figures in good.items():
        row["model_TFLOPps_per_device"][side] = flops / case.ranks / figures["step_s"] / 1e12
        if "step_s" in predicted.get(side, {}):
            row["prediction_errors"][side] = predicted[side]["step_s"] / figures["step_s"] - 1
    for own in (side for side in EXECUTIONS if side in good):
        for peer in (side for side in _PEERS if side in good):
            ratio = {"step": good[own]["step_s"] / good[peer]["step_s"]}
            if good[peer]["steady_peak_bytes"]:
                # without what the sides before had left on the device
                peaks = (good[own]["peak_bytes"] - good[own]["left_bytes"],
                         good[peer]["steady_peak_bytes"] - good[peer]["left_bytes"])  # fmt: skip
                ratio["peak"] = peaks[0] / peaks[1]
            row["ratios"][f"{own}/{peer}"] = ratio
    if own := next((side for side in EXECUTIONS if side in good), None):
        for side in good.keys() - {own}:
            gaps = [abs(a / b - 1) for a, b in zip(good[own]["losses"], good[side]["losses"], strict=True)]
            agree = gaps[0] <= LOSS_TOLERANCE[case.config.dtype]
            row["losses"][side] = {"first": gaps[0], "later": max(gaps[1:]), "agree": agree}
    row["losses_agree"] = all(each["agree"] for each in row["losses"].values())
    return row


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows as text; ms, GiB, and TFLOP/s of this executor's fastest execution. Columns without a value are left
    out."""
    pairs = [f"{own}/{peer}" for peer in _PEERS for own in EXECUTIONS]
    titles = ["case", *SIDES, *pairs, "spread", "GiB", "of peer", "TFLOP/s", "loss diff", "later"]
    lines = [titles]
    for row in rows:
        measured = row["measured"]
        good = {side: figures for side, figures in measured.items() if "error" not in figures}
        own = next((side for side in EXECUTIONS if side in good), "")
        times = [
            f"{good[side]['step_s'] * 1e3:.2f}" if side in good else "failed" if side in measured else "-"
            for side in SIDES
        ]
        peak = next((row["ratios"][pair].get("peak") for pair in pairs if pair in row["ratios"]), None)
        lines.append([
            row["case"], *times, *(_said(row["ratios"].get(pair, {}).get("step"), ".3f") for pair in pairs),
            _said(good[own]["spread"] if own else None, ".1%"),
            _said((good[own]["peak_bytes"] - good[own]["left_bytes"]) / 2**30 if own else None, ".2f"),
            _said(peak, ".3f"),
            _said(row["model_TFLOPps_per_device"].get(own), ".1f"),
            _said(max((each["first"] for each in row["losses"].values()), default=None), ".1e")
            + ("" if row["losses_agree"] else " !"),
            _said(max((each["later"] for each in row["losses"].values()), default=None), ".1e"),
        ])  # fmt: skip
    shown = [at for at in range(len(titles)) if at == 0 or any(line[at] != "-" for line in lines[1:])]
    lines = [[line[at] for at in shown] for line in lines]
    widths = [max(len(line[at]) for line in lines) for at in range(len(shown))]
    text = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    failed = [
        f"{row['case']} {side}: {figures['error'][:300]}"
        for row in rows for side, figures in row["measured"].items() if "error" in figures
    ]  # fmt: skip
    return "\n".join([*text, *failed])


def _said(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
