"""The tables in a text, cell by cell: CSV, TSV, Markdown, HTML, LaTeX, JSON, or columns of spaces."""

from __future__ import annotations

import csv
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from plans.errors import TwofoldError
from plans.reading import json_of

__all__ = ["Grid", "grids_of"]

_MARKUP = re.compile(r"\*\*|__|`|<br ?/?>|\[([^\]]*)\]\([^)]*\)")
_MOST_ABOVE = 30
"""Lines of titles above a table."""

_RULE = re.compile(r"\s*[|+]?[\s:|+=-]*-[\s:|+=-]*[|+][\s:|+=-]*$|\s*\|\s*:?-+:?\s*\|\s*$")


_TABULAR = re.compile(r"\\begin\{tabular\w*\*?\}(?:\[[^\]]*\])?\{(?:[^{}]|\{[^{}]*\})*\}(.*?)\\end\{tabular", re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One table.

    Args:
        headers: of the columns.
        rows: as long as `headers`.
        titles: the lines about it, the nearest first: those between it and the table before it, then the headings
            above.
    """

    headers: list[str]
    rows: Iterator[list[str]]
    titles: tuple[str, ...] = ()


def grids_of(text: str, knows: Callable[[str], bool]) -> Iterator[Grid]:
    """The tables of a text, one after the other.

    Args:
        text: of a file.
        knows: whether a header is a known one; the header is the line that has most of them. A table whose known
            headers stand in its first column is turned.

    Raises:
        csv.Error: cells that cannot be told apart.

    >>> (grid,) = grids_of("Our runs\\n\\n| a | b |\\n|--|--|\\n| 1 | **2** |", {"a", "b"}.__contains__)
    >>> grid.headers, list(grid.rows), grid.titles
    (['a', 'b'], [['1', '2']], ('Our runs',))
    """
    start = text.lstrip()[:1]
    if start in ("{", "[") and (records := _records(text)):
        yield _of_records(records)
    elif re.search(r"<table\b", text, re.I):
        yield from _of_html(text, knows)
    elif r"\begin{tabular" in text:
        yield from _of_latex(text, knows)
    elif any(_RULE.match(line) for line in text.splitlines()):
        yield from _of_markdown(text.splitlines(), knows)
    else:
        yield _of_lines(text.splitlines(), knows)


def _grid(cells: Iterable[list[str]], knows: Callable[[str], bool], titles: Sequence[str] = ()) -> Grid:
    """A table whose header is the line with most known headers; the lines above it are a title."""
    rows = iter(cells)
    above = [row for _, row in zip(range(_MOST_ABOVE), rows, strict=False)]
    known = [sum(knows(header) for header in row) for row in above]
    place = known.index(max(known)) if known else 0
    if len(above) < _MOST_ABOVE and known[place:] and known[place] < sum(knows(row[0]) for row in above if row):
        above = [list(column) for column in itertools.zip_longest(*above, fillvalue="")]
        place = 0
    headers = [header.strip() for header in above[place]] if above else []
    said = tuple(" ".join(filter(None, map(str.strip, row))) for row in reversed(above[:place]))
    return Grid(
        headers=headers, rows=_filled(headers, above[place + 1 :], rows),
        titles=(*filter(None, said), *titles),
    )  # fmt: skip


def _filled(headers: list[str], first: Iterable[list[str]], rest: Iterable[list[str]]) -> Iterator[list[str]]:
    """Rows with a cell for every header; empty ones and the rule below a header are left out."""
    for row in itertools.chain(first, rest):
        if any(re.search(r"[^\s:|=+-]", cell) for cell in row):
            cells = [cell.strip() for cell in row[: len(headers)]]
            yield cells + [""] * (len(headers) - len(cells))


def _of_lines(lines: list[str], knows: Callable[[str], bool]) -> Grid:
    """Cells apart by commas, semicolons, tabs, or two spaces and more."""
    first = next((line for line in lines if line.strip()), "")
    counts = {each: sum(line.count(each) for line in lines[:_MOST_ABOVE]) for each in ",;\t"}
    delimiter = max(counts, key=lambda each: counts[each])
    if first.count("\t") >= 2:
        delimiter = "\t"
    if not any(counts.values()) or max(len(_spaced(line)) for line in lines[:_MOST_ABOVE]) > 2 > first.count(delimiter):
        return _grid(_columns([_spaced(line) for line in lines]), knows)
    return _grid(csv.reader(lines, delimiter=delimiter), knows)


def _spaced(line: str) -> list[str]:
    return re.split(r" {2,}|\t", line.strip())


def _columns(rows: list[list[str]]) -> list[list[str]]:
    """Rows of as many cells as most have: where two stand one space apart they are two."""
    most = max(map(len, rows), default=0)
    split = ([word for cell in row for word in cell.split()] for row in rows)
    return [words if len(row) < most == len(words) else row for row, words in zip(rows, split, strict=True)]


def _of_markdown(lines: list[str], knows: Callable[[str], bool]) -> Iterator[Grid]:
    """Every run of lines with bars is a table; headings and the lines above it are its titles."""
    headings: dict[int, str] = {}
    said: list[str] = []
    for is_table, run in itertools.groupby(lines, key=lambda line: "|" in line or bool(_RULE.match(line))):
        if is_table:
            titles = [*reversed(said), *(headings[depth] for depth in sorted(headings, reverse=True))]
            yield _grid([_bars(line) for line in run if "|" in line], knows, titles)
            said = []
            continue
        for line in filter(None, map(str.strip, run)):
            if heading := re.match(r"(#+) *(.*)", line):
                depth = len(heading.group(1))
                headings = {own: words for own, words in headings.items() if own < depth} | {depth: heading.group(2)}
                said = []
            else:
                said.append(_MARKUP.sub(lambda found: found.group(1) or "", line))


def _bars(line: str) -> list[str]:
    plain = _MARKUP.sub(lambda found: found.group(1) or "", line.strip())
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", plain.strip("|"))]


def _of_latex(text: str, knows: Callable[[str], bool]) -> Iterator[Grid]:
    """The tabulars of a LaTeX text; their captions are titles."""
    captions = re.findall(r"\\caption\{((?:[^{}]|\{[^{}]*\})*)\}", text)
    for body in re.findall(
        r"\\begin\{tabular\w*\*?\}(?:\[[^\]]*\])?\{(?:[^{}]|\{[^{}]*\})*\}(.*?)\\end\{tabular", text, re.S
    ):
        plain = re.sub(r"(?<!\\)%.*|\\(top|mid|bottom|c?mid|h|c)(rule|line)(\([^)]*\))?(\{[^}]*\})?", "", body)
        lines = [re.split(r"(?<!\\)&", line) for line in re.split(r"\\\\(?:\[[^\]]*\])?", plain)]
        yield _grid([[_plain_latex(cell) for cell in line] for line in lines], knows, captions)


def _plain_latex(cell: str) -> str:
    cell = re.sub(r"\\multi(?:column|row)\{\d+\}\{[^}]*\}", "", cell)
    cell = re.sub(r"\\times|\\cdot", "x", re.sub(r"\\pm", "\u00b1", cell))
    cell = re.sub(r"\\(?:textbf|textit|underline|mathbf|text|emph|texttt)\b", "", cell)
    return re.sub(r"[{}$]|\\(?=[%&_#,])|~", "", cell).strip()


class _Tables(HTMLParser):
    """The cells of all tables of a page, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[tuple[list[str], list[list[str]]]] = []
        self._said: list[str] = []
        self._rows: list[list[str]] | None = None
        self._cell: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "table":
            self._rows = []
            self.tables.append((self._said[::-1], self._rows))
            self._said = []
        elif tag == "tr" and self._rows is not None:
            self._rows.append([])
        elif tag in ("td", "th") and self._rows:
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None and self._rows:
            self._rows[-1].append(" ".join("".join(self._cell).split()))
            self._cell = None
        elif tag == "table":
            self._rows = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)
        elif self._rows is None and data.strip():
            self._said.append(data.strip())


def _of_html(text: str, knows: Callable[[str], bool]) -> Iterator[Grid]:
    parser = _Tables()
    parser.feed(text)
    for titles, rows in parser.tables:
        yield _grid(rows, knows, titles)


def _records(text: str) -> list[Mapping[str, Any]]:
    """The objects of a JSON text or of its lines; none where it is neither."""
    found: Any
    try:
        found = json_of(text.encode(), "the table")
    except TwofoldError:
        try:
            found = [json_of(line.encode(), "the table") for line in text.splitlines() if line.strip()]
        except TwofoldError:
            return []
    if isinstance(found, dict):
        found = next((own for own in found.values() if isinstance(own, list)), [found])
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _of_records(records: Sequence[Mapping[str, Any]]) -> Grid:
    flat = [dict(_leaves(record)) for record in records]
    headers = list(dict.fromkeys(name for each in flat for name in each))
    return Grid(headers=headers, rows=([each.get(name, "") for name in headers] for each in flat))


def _leaves(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in record.items():
        if isinstance(value, dict):
            yield from _leaves(value)
        else:
            yield name, "" if value is None else str(value)
