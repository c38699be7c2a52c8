"""Tables: one value, shown in a terminal by rich and in a page by a template, and exported through pandas."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from executor.reference.check import Check
from plans.ranks import format_ranks
from plans.units import Bytes, Quantity, Seconds, wrapped
from reports.page import Link, Markup, render

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Cell", "Check", "Table", "verification_table"]

Cell = str | float | Link | None
"""A text, a number (a `Quantity` has a unit), a link, or nothing."""

_MOST_ROWS = 1000
"""Largest number of rows of a table in a page."""

_LONGEST_NAME = 28
"""A first column with cells up to this length is not broken in a terminal."""

_MARKS = {"pass": "pass", "FAIL": "fail", "OUTSIDE": "warn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A title, column names and rows of cells (`Cell`); columns of numbers are flush right, `notes` are printed below.

    >>> table = Table(title="Steps", columns=("plan", "step"), rows=(("a", Seconds(0.5)), ("b", Seconds(2))))
    >>> print(table.text())
    Steps
    plan    step
    ────────────
    a     500 ms
    b     2.00 s
    >>> table.to_pandas()["step"].max()
    np.float64(2.0)
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, title: str, records: Iterable[Mapping[str, Any]], *, notes: Iterable[str] = ()) -> Table:
        """The table of records (column -> cell), which all have the columns of the first one.

        >>> Table.of("Steps", [{"plan": "a", "step": Seconds(0.5)}]).columns
        ('plan', 'step')
        """
        known = list(records)
        columns = tuple(known[0]) if known else ()
        return cls(
            title=title, columns=columns, rows=tuple(tuple(record.values()) for record in known), notes=tuple(notes)
        )

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a DataFrame with plain numbers in SI units."""
        import pandas as pd

        plain = [[float(cell) if isinstance(cell, Quantity) else cell for cell in row] for row in self.rows]
        return pd.DataFrame(plain, columns=list(self.columns))

    def csv(self) -> str:
        """Comma-separated values with plain numbers in SI units."""
        return self.to_pandas().to_csv(index=False)

    def text(self, width: int = 100) -> str:
        """Aligned columns for a terminal; where they are wider than `width` characters long cells are broken."""
        from rich.box import Box
        from rich.console import Console
        from rich.table import Table as Grid

        rule = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
        grid = Grid(box=rule, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for at, (name, is_number) in enumerate(zip(self.columns, self._numbers(), strict=True)):
            has_names = at == 0 and max((len(str(_text(row[0]))) for row in self.rows), default=0) <= _LONGEST_NAME
            grid.add_column(
                name, justify="right" if is_number else "left", overflow="fold", no_wrap=has_names
            )  # fmt: skip
        for row in self.rows:
            grid.add_row(*(str(_text(cell)) for cell in row))
        out = io.StringIO()
        Console(file=out, width=width, markup=False, highlight=False, color_system=None).print(grid)
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        title, *notes = (wrapped(text, width) for text in (self.title, *self.notes))
        return "\n".join([title, *lines, *notes])

    def without(self, *columns: str) -> Table:
        """The table without these columns.

        >>> Table(title="", columns=("plan", "step"), rows=(("a", 1.0),)).without("step").rows
        [('a',)]
        """
        kept = [at for at, name in enumerate(self.columns) if name not in columns]
        rows = [tuple(row[at] for at in kept) for row in self.rows]
        return replace(self, columns=tuple(self.columns[at] for at in kept), rows=rows)

    def joined(self, column: str) -> Table:
        """The table with one row for layers that differ in nothing but the number in their name.

        Args:
            column: of dotted names such as layers.3.norm.

        >>> rows = (("layers.0.norm", "dp"), ("layers.0.act", "tp"), ("layers.1.norm", "dp"), ("layers.1.act", "dp"))
        >>> [row[0] for row in Table(title="", columns=("operator", "split"), rows=rows).joined("operator").rows]
        ['layers.0-1.norm', 'layers.0.act', 'layers.1.act']
        """
        at = self.columns.index(column)
        numbers: dict[tuple[Any, ...], list[int]] = {}
        for row in self.rows:
            name, number = _without_number(row[at])
            numbers.setdefault((*row[:at], name, *row[at + 1 :]), []).extend(number)
        rows = [
            (*row[:at], row[at].format(format_ranks(known, ",")) if known else row[at], *row[at + 1 :])
            for row, known in numbers.items()
        ]
        return replace(self, rows=rows)

    def html(self, max_rows: int = _MOST_ROWS) -> str:
        """A table element whose columns sort at a click; rows beyond `max_rows` are left out, and a note says so."""
        left = len(self.rows) - max_rows
        rows = [[(_text(cell), _key(cell), _MARKS.get(str(cell), "")) for cell in row] for row in self.rows]
        notes = [*self.notes, *([f"{left} of {len(self.rows)} rows are left out here."] if left > 0 else [])]
        columns = list(zip(self.columns, self._numbers(), strict=True))
        return render("table.html", title=self.title, columns=columns, rows=rows[:max_rows], notes=notes)

    def __html__(self) -> Markup:
        return Markup(self.html())

    def _numbers(self) -> list[bool]:
        """Whether each column holds numbers."""
        return [any(isinstance(row[at], int | float) for row in self.rows) for at in range(len(self.columns))]


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
    return Table(title="Checks", columns=("check", "value", "limit", "result", "detail"), rows=tuple(rows))


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit in ("s", "B"):
        return str((Seconds if unit == "s" else Bytes)(value))
    return f"{value:.3g}{' ' if unit else ''}{unit}"


def _without_number(name: str) -> tuple[str, list[int]]:
    """A dotted name with its one number left open, and that number; names with none or several stay as they are."""
    parts = name.split(".")
    places = [at for at, part in enumerate(parts) if part.isdecimal()]
    if len(places) != 1 or "{" in name:
        return name, []
    (at,) = places
    return ".".join([*parts[:at], "{}", *parts[at + 1 :]]), [int(parts[at])]


def _text(cell: Cell) -> Any:
    """A cell as a template and rich show it."""
    if isinstance(cell, Link):
        return cell
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) and not isinstance(cell, Quantity) else str(cell)


def _key(cell: Cell) -> str:
    """The sort key of a cell; "" if that is its text."""
    return repr(float(cell)) if isinstance(cell, int | float) else ""
