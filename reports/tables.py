"""Small tables, as text for the terminal and as HTML, and the table of a verification."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from executor.reference.check import Check
from reports.units import format_bytes, format_seconds

__all__ = ["Check", "Table", "format_axes", "verification_table"]

_LONG_CELL = 40
"""Cells of more characters are broken into lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A title, column names and rows of texts; columns in `right` are set flush right, `notes` stand below.

    >>> print(Table(title="T", columns=("name", "n"), rows=(("a", "1"), ("bb", "10")), right=frozenset({"n"})).text())
    T
    name   n
    ----  --
    a      1
    bb    10
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()

    def text(self, width: int | None = None) -> str:
        """Aligned columns; where they are wider than `width` characters the widest ones are broken into lines."""
        widths = [max(len(row[at]) for row in [self.columns, *self.rows]) for at in range(len(self.columns))]
        while width is not None and sum(widths) + 2 * (len(widths) - 1) > width and max(widths) > 12:
            widths[widths.index(max(widths))] -= 1

        def lines(row: Sequence[str]) -> list[str]:
            cells = [textwrap.wrap(cell, size) or [""] for cell, size in zip(row, widths, strict=True)]
            shown = []
            for parts in zip_longest(*cells, fillvalue=""):
                placed = zip(parts, widths, self.columns, strict=True)
                flush = (part.rjust(size) if name in self.right else part.ljust(size) for part, size, name in placed)
                shown.append("  ".join(flush).rstrip())
            return shown

        rule = "  ".join("-" * size for size in widths)
        body = [line for row in self.rows for line in lines(row)]
        return "\n".join([self.title, *lines(self.columns), rule, *body, *self.notes])

    def html(self, max_rows: int | None = None) -> str:
        """A table element; rows beyond `max_rows` are left out, and a note says so."""
        kept = self.rows if max_rows is None else self.rows[:max_rows]
        notes = list(self.notes)
        if len(kept) < len(self.rows):
            notes.append(f"{len(self.rows) - len(kept)} of {len(self.rows)} rows are left out here.")
        flush = [' class="number"' if name in self.right else "" for name in self.columns]
        head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(self.columns, flush, strict=True))
        body = "".join(
            "<tr>" + "".join(_cell(cell, kind) for cell, kind in zip(row, flush, strict=True)) + "</tr>" for row in kept
        )
        below = "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        inner = f"<caption>{escape(self.title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        return f'<div class="scroll"><table>{inner}</table></div>{below}'


def verification_table(checks: Iterable[Check]) -> Table:
    """Every check with its limit and whether it passed."""
    rows = []
    for check in checks:
        bounds = (check.low, check.high)
        if isinstance(check.value, bool) or bounds == (None, None):
            limit = ""
        elif check.low is None:
            limit = f"at most {_number(check.high, check.unit)}"
        elif check.high is None:
            limit = f"at least {_number(check.low, check.unit)}"
        else:
            limit = f"{_number(check.low, check.unit)} to {_number(check.high, check.unit)}"
        value = ("yes" if check.value else "no") if isinstance(check.value, bool) else _number(check.value, check.unit)
        words = ("inside", "OUTSIDE") if check.informs else ("pass", "FAIL")
        rows.append((check.name, value, limit, words[0] if check.passed else words[1], check.detail))
    return Table(
        title="Verification", columns=("check", "value", "limit", "result", "detail"), rows=tuple(rows),
        right=frozenset({"value"}),
    )  # fmt: skip


def format_axes(axes: Sequence[str]) -> str:
    """Axes as one word: "tp" or "(dp, tp)"."""
    return axes[0] if len(axes) == 1 else f"({', '.join(axes)})"


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit in ("s", "B"):
        return (format_seconds if unit == "s" else format_bytes)(value)
    return f"{value:.3g}{' ' if unit else ''}{unit}"


def _cell(cell: str, kind: str) -> str:
    marks = {"pass": ' class="pass"', "FAIL": ' class="fail"', "OUTSIDE": ' class="warn"'}
    mark = marks.get(cell, ' class="long"' if len(cell) > _LONG_CELL else kind)
    return f"<td{mark}>{escape(cell)}</td>"
