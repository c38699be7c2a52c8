"""What-if results compared with the base, and the effect of every quantity as a table and a chart."""

from __future__ import annotations

from collections.abc import Sequence

from plans.units import Change, Seconds, Share
from reports.charts import Chart, bars
from reports.tables import Table
from reports.time_tables import changed_records
from simulator import Outcome
from simulator.study.sensitivity import Effect

__all__ = ["sensitivity_table", "tornado_picture", "what_if_table"]


def what_if_table(base: Outcome, changed: Sequence[tuple[str, Outcome]], note: str = "") -> Table:
    """The base in the first row, every change below it; goodput only where checkpoints or failures are among them."""
    rows = [("unchanged", base), *changed]
    records = changed_records(rows, "what if")
    if any(row.goodput.fraction != 1.0 for _, row in rows):
        for record, (_, row) in zip(records, rows, strict=True):
            record["goodput"] = Share(row.goodput.fraction)
            record["effective step"] = Seconds(row.goodput.effective_step_s)
    best = {row.goodput.best_every_steps for _, row in rows} - {None}
    notes = [note] if note else []
    if len(best) == 1:
        notes.append(f"A checkpoint every {best.pop()} steps wastes least (Daly 2006).")
    return Table.of("Predictions with one change at a time", records, notes=notes)


def sensitivity_table(effects: Sequence[Effect]) -> Table:
    """The effect of lowering and raising every quantity, the largest effect first."""
    return Table.of("Sensitivity: change of the step time with each quantity decreased and increased", (
        {"knob": effect.knob, f"{-100 * effect.by:+.0f} %": Change(effect.change(effect.low_s)),
         f"{100 * effect.by:+.0f} %": Change(effect.change(effect.high_s)), "swing": Seconds(effect.swing_s)}
        for effect in effects
    ))  # fmt: skip


def tornado_picture(effects: Sequence[Effect], *, title: str = "What the step time depends on") -> Chart:
    """One bar per quantity: how the step time changes with it lowered and raised, around the base."""
    by = f"{100 * effects[0].by:.0f} %" if effects else ""
    base = f" of {Seconds(effects[0].base_s)}" if effects else ""
    parts = [
        (f"{by} down", "orange", [100 * effect.change(effect.low_s) for effect in effects]),
        (f"{by} up", "sky", [100 * effect.change(effect.high_s) for effect in effects]),
    ]
    return bars(
        [effect.knob for effect in effects], parts, title=title, x=f"change of the predicted step time{base} (%)",
        caption="Each bar changes one quantity. The number at its end is the swing.", said="{:+.2f} %".format,
        ends=[str(Seconds(effect.swing_s)) for effect in effects],
    )  # fmt: skip
