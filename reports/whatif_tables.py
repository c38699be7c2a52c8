"""Tables of what-if results beside the base, and the effect of every quantity as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence

from reports.figures import FIGURES, figures_of
from reports.svg import Picture, text_width
from reports.tables import Table
from reports.units import format_seconds, nice_ticks
from simulator import Outcome
from simulator.study.sensitivity import Effect

__all__ = ["sensitivity_table", "tornado_picture", "what_if_table"]


def what_if_table(base: Outcome, changed: Sequence[tuple[str, Outcome]], note: str = "") -> Table:
    """The base in the first row, every change below it; goodput only where checkpoints or failures are among them."""
    rows = [("unchanged", base), *changed]
    with_goodput = any(each.goodput.fraction != 1.0 for _, each in rows)
    columns = ["what if", *(figure.title for figure in FIGURES.values())]
    columns.insert(2, "change")
    columns += ["goodput", "effective step"] if with_goodput else []
    body = []
    for name, each in rows:
        change = "" if each is base or not base.step_s else f"{100 * (each.step_s / base.step_s - 1):+.1f} %"
        cells = [name, *(FIGURES[key].text(value) for key, value in figures_of(each).items())]
        cells.insert(2, change)
        if with_goodput:
            cells += [f"{100 * each.goodput.fraction:.1f} %", format_seconds(each.goodput.effective_step_s)]
        body.append(tuple(cells))
    best = {each.goodput.best_every_steps for _, each in rows} - {None}
    notes = [note] if note else []
    if len(best) == 1:
        notes.append(f"Least is wasted with a checkpoint every {best.pop()} steps (Daly 2006).")
    return Table(
        title="What if", columns=tuple(columns), rows=tuple(body), right=frozenset(columns[1:]),
        notes=tuple(notes),
    )  # fmt: skip


def sensitivity_table(effects: Sequence[Effect]) -> Table:
    """The effect of lowering and raising every quantity, the largest effect first."""
    by = effects[0].by if effects else 0.0
    rows = tuple(
        (
            each.knob,
            *(f"{100 * each.change(value):+.2f} %" for value in (each.low_s, each.high_s)),
            format_seconds(each.swing_s),
        )
        for each in effects
    )
    columns = ("knob", f"{-100 * by:+.0f} %", f"{100 * by:+.0f} %", "swing")
    title = "What a step depends on: its change with each knob turned down and up"
    return Table(title=title, columns=columns, rows=rows, right=frozenset(columns[1:]))


def tornado_picture(effects: Sequence[Effect], *, title: str = "What a step depends on") -> Picture:
    """One bar per quantity: the step times with it lowered and raised, around the base."""
    left = 20 + max([60.0, *(text_width(each.knob, 10.5) for each in effects)])
    right, top, line, bottom = 90.0, 44.0, 26.0, 40.0
    width, height = 900.0, top + line * max(1, len(effects)) + bottom
    picture = Picture(title=title, width=width, height=height)
    picture.text(8, 18, title, "title")
    by = f"{100 * effects[0].by:.0f} %" if effects else ""
    picture.legend(24 + text_width(title, 14.5), 18, [("orange", f"{by} down"), ("sky", f"{by} up")])
    changes = [100 * each.change(value) for each in effects for value in (each.low_s, each.high_s)]
    reach = max([1e-9, *(abs(change) for change in changes)])
    middle, scale = (left + width - right) / 2, (width - left - right) / 2 / reach
    for tick in nice_ticks(reach, 3):
        for sign in (-1, 1) if tick else (1,):
            x = middle + sign * tick * scale
            picture.line(x, top - 8, x, height - bottom, "grid" if tick else "axis")
            picture.text(x, height - bottom + 15, f"{sign * tick:+g} %" if tick else "0", "middle small")
    for number, each in enumerate(effects):
        y = top + line * number
        picture.text(left - 8, y + 13, each.knob, "end small")
        for value_s, style, turned in ((each.low_s, "orange", "-"), (each.high_s, "sky", "+")):
            change = 100 * each.change(value_s)
            x = min(middle, middle + change * scale)
            hover = f"{each.knob} {turned}{by}: {format_seconds(value_s)} ({change:+.2f} %)"
            picture.rect(x, y + (0 if style == "orange" else 9), abs(change) * scale, 9, style, hover)
        picture.text(width - right + 8, y + 13, format_seconds(each.swing_s), "small")
    base = format_seconds(effects[0].base_s) if effects else ""
    said = f"change of the predicted step time of {base}; at the right the swing" if effects else ""
    picture.text(middle, height - 8, said, "middle small")
    return picture
