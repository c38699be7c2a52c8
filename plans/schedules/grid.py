"""A schedule as a picture in text: ranks down, time to the right, the culprit between arrows."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_cells"]

_COLUMNS_AROUND = 6
_ROWS_AROUND = 8


def format_cells(rows: Sequence[Sequence[str]], *, mark: tuple[int, int] | None = None) -> str:
    """The cells as a table; with `mark` (row, column) only its surroundings, the marked cell as `>1B3<`.

    Empty cells print as a dot; the marked cell may lie just behind the end of its row.

    >>> print(format_cells([["0F0", "0B0"], ["", "1F0", "1B0"]], mark=(0, 1)))
    time    0    1     2
    rank 0  0F0 >0B0<  .
    rank 1  .    1F0   1B0
    """
    num_columns = max((len(row) for row in rows), default=0)
    first_row, last_row, first, last = 0, len(rows), 0, num_columns
    if mark is not None:
        num_columns = max(num_columns, mark[1] + 1)
        first_row, last_row = max(0, mark[0] - _ROWS_AROUND), min(len(rows), mark[0] + _ROWS_AROUND + 1)
        first, last = max(0, mark[1] - _COLUMNS_AROUND), min(num_columns, mark[1] + _COLUMNS_AROUND + 1)
    table = [["time", *(f" {column}" for column in range(first, last))]]
    for rank in range(first_row, last_row):
        row = rows[rank]
        texts = [row[column] if column < len(row) and row[column] else "." for column in range(first, last)]
        marked = [f">{text}<" if mark == (rank, first + i) else f" {text}" for i, text in enumerate(texts)]
        table.append([f"rank {rank}", *marked])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    return "\n".join(
        " ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in table
    )
