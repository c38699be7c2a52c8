"""The cells of a table in a text: comma, semicolon or tab between them, or Markdown; titles are passed over."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator

__all__ = ["Grid", "grid_of"]

_MARKUP = re.compile(r"\*\*|__|`|<br ?/?>|\[([^\]]*)\]\([^)]*\)")
_MOST_ABOVE = 30
"""Lines of titles above a table."""

Grid = tuple[list[str], Iterator[list[str]]]
"""The headers, and the rows as long as they."""


def grid_of(text: str, knows: Callable[[str], bool]) -> Grid:
    """The header and the rows of a table.

    Args:
        text: of a file.
        knows: whether a header is a known one; the header is the line that has most of them.

    Raises:
        csv.Error: cells that cannot be told apart.

    >>> headers, rows = grid_of("Our runs\\n\\n| a | b |\\n|--|--|\\n| 1 | **2** |", {"a", "b"}.__contains__)
    >>> headers, list(rows)
    (['a', 'b'], [['1', '2']])
    """
    lines = text.splitlines()
    if any(re.match(r"\s*\|?[\s:|-]*-[\s:|-]*\|[\s:|-]*$", line) for line in lines[: 2 * _MOST_ABOVE]):
        cells: Iterable[list[str]] = (_markdown(line) for line in lines if "|" in line)
    else:
        first = next((line for line in lines if line.strip()), "")
        delimiter = max(",;\t", key=lambda each: sum(line.count(each) for line in lines[:_MOST_ABOVE]))
        if first.count("\t") >= 2:
            delimiter = "\t"
        cells = csv.reader(lines, delimiter=delimiter)
    rows = iter(cells)
    above = [row for _, row in zip(range(_MOST_ABOVE), rows, strict=False)]
    known = [sum(knows(header) for header in row) for row in above]
    place = known.index(max(known)) if known else 0
    headers = [header.strip() for header in above[place]] if above else []
    return headers, _filled(headers, [*above[place + 1 :]], rows)


def _filled(headers: list[str], first: Iterable[list[str]], rest: Iterable[list[str]]) -> Iterator[list[str]]:
    """Rows with a cell for every header; empty ones and the rule below a header are left out."""
    for source in (first, rest):
        for row in source:
            if any(re.search(r"[^\s:|-]", cell) for cell in row):
                cells = [cell.strip() for cell in row[: len(headers)]]
                yield cells + [""] * (len(headers) - len(cells))


def _markdown(line: str) -> list[str]:
    plain = _MARKUP.sub(lambda found: found.group(1) or "", line.strip())
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", plain.strip("|"))]
