"""The tables in a text, cell by cell: CSV, TSV, Markdown, HTML, LaTeX, JSON, or columns of spaces."""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from interop.measurements.headers import figure_named
from interop.measurements.markup import html_tables, latex_tables
from interop.measurements.numbers import number
from interop.measurements.titles import stated_in_titles
from interop.measurements.units import figure_of_unit
from plans.errors import TwofoldError
from plans.reading import json_of

__all__ = ["Grid", "grids_of"]

_MARKUP = re.compile(r"\*\*|__|`|<br ?/?>|\\(?=[*_~])|\[([^\]]*)\]\([^)]*\)")
_RAISED = re.compile(r"<sup>\\?([^<]*)</sup>")
"""The mark of a footnote in HTML."""

_MOST_ABOVE = 30
"""Lines of titles above a table."""

_RULE = re.compile(r"\s*[|+]?[\s:|+=-]*-[\s:|+=-]*[|+][\s:|+=-]*$|\s*\|\s*:?-+:?\s*\|\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One table.

    Args:
        headers: of the columns.
        rows: as long as `headers`.
        above: words that qualify each column, from merged cells above its header or parts of one below it.
        titles: the lines about it, the nearest first: those between it and the table before it, then the headings
            above.
    """

    headers: list[str]
    rows: Iterator[list[str]]
    above: list[str]
    titles: tuple[str, ...] = ()


def grids_of(text: str, knows: Callable[[str], bool]) -> Iterator[Grid]:
    """The tables of a text, one after the other.

    Args:
        text: of a file.
        knows: whether a header is known. The line with the most known headers is the header. A table with the known
            headers in its first column is transposed.

    Raises:
        csv.Error: cells that cannot be separated.

    >>> (grid,) = grids_of("Our runs\\n\\n| a | b |\\n|--|--|\\n| 1 | **2** |", {"a", "b"}.__contains__)
    >>> grid.headers, list(grid.rows), grid.titles
    (['a', 'b'], [['1', '2']], ('Our runs',))
    """
    start = text.lstrip()[:1]
    if start in ("{", "[") and (records := _records(text, knows)):
        yield _of_records(records)
    elif re.search(r"<table\b", text, re.I):
        yield from (_grid(rows, knows, titles) for titles, rows in html_tables(text))
    elif r"\begin{tabular" in text:
        yield from (_grid(rows, knows, titles) for titles, rows in latex_tables(text))
    elif any(_RULE.match(line) for line in text.splitlines()):
        yield from _of_markdown(text.splitlines(), knows)
    elif bullets := _of_bullets(text.splitlines()):
        yield bullets
    else:
        yield _of_lines(text.splitlines(), knows)


def _grid(cells: Iterable[list[str]], knows: Callable[[str], bool], titles: Sequence[str] = ()) -> Grid:
    """A table. Its header is the line with the most known headers and the lines next to it; lines above are titles."""
    rows = iter(cells)
    first = [row for _, row in zip(range(_MOST_ABOVE), rows, strict=False)]
    known = [sum(knows(header) for header in row) for row in first]
    place = known.index(max(known)) if known else 0
    num_named = sum(knows(row[0]) for row in first if row)
    if len(first) < _MOST_ABOVE and known[place:] and known[place] < num_named and not _has_figures(first[place][1:]):
        first = [row for row in first if any(re.search(r"[^\s:|=+-]", cell) for cell in row)]
        first = [list(column) for column in itertools.zip_longest(*first, fillvalue="")]
        place = 0
    if place and (spread := _spread(first[place - 1], first[place])):
        first[place - 1] = spread
    start, stop = _header_lines(first, place, knows)
    stacks = list(itertools.zip_longest(*first[start:stop], fillvalue=""))
    headers, above = zip(*(_header(stack, knows) for stack in stacks), strict=True) if stacks else ((), ())
    said = tuple(" ".join(filter(None, map(str.strip, row))) for row in reversed(first[:start]))
    titles = _with_notes_apart(titles)
    notes = _footnotes(titles, first[stop:])
    more = ["notes"] if notes else []
    return Grid(
        headers=[*headers, *more], above=[*above, *[""] * len(more)],
        rows=_filled(headers, first[stop:], rows, notes),
        titles=(*filter(None, said), *(title for title in titles if title not in notes.values())),
    )  # fmt: skip


def _with_notes_apart(titles: Sequence[str]) -> list[str]:
    """Titles with the footnotes inside them as lines of their own."""
    return [part for title in titles for part in _BEFORE_NOTE.split(title) if part.strip()]


def _has_figures(headers: Iterable[str]) -> bool:
    """Whether one of the headers names a figure: then a table has one row for each run."""
    return any(figure_named(header) is not None for header in headers)


def _footnotes(lines: Sequence[str], rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """The mark and the line of every footnote that cells of the first rows refer to.

    >>> _footnotes(["\u00b9 full recomputation", "\u2020 by the authors"], [["7B\u00b9", "120"]])
    {'\u00b9': '\u00b9 full recomputation'}
    """
    marks = {found.group(1) for row in rows for cell in row if (found := _MARKED.search(cell.strip()))}
    begins = {found.group(1): line for line in lines if (found := _NOTE.match(line))}
    return {mark: line for mark, line in begins.items() if mark in marks}


def _spread(row: Sequence[str], below: Sequence[str]) -> list[str]:
    """The merged cells of a line above a header, each repeated over the blank ones behind it; none if it has none.

    >>> _spread(["", "FSDP", "", "DDP", ""], ["Model", "MFU", "GB", "MFU", "GB"])
    ['', 'FSDP', 'FSDP', 'DDP', 'DDP']
    >>> _spread(["Parallelism", "", "Batch"], ["T", "P", ""])
    ['Parallelism', 'Parallelism', 'Batch']
    """
    filled = [cell for cell in row if cell.strip()]
    repeats = len({cell.strip() for cell in below if cell.strip()}) < sum(bool(cell.strip()) for cell in below)
    if len(filled) < 2 or not (repeats or _completes(row, below)) or any(number(cell) is not None for cell in filled):
        return []
    found: list[str] = []
    for cell in row:
        found.append(cell if cell.strip() or not found else found[-1])
    return found


def _completes(row: Sequence[str], below: Sequence[str]) -> bool:
    """Whether a line above a header names columns that the header leaves blank."""
    pairs = itertools.zip_longest(row, below, fillvalue="")
    return sum(map(bool, row)) > 1 and any(cell.strip() and not under.strip() for cell, under in pairs)


def _header_lines(rows: Sequence[Sequence[str]], place: int, knows: Callable[[str], bool]) -> tuple[int, int]:
    """The range of lines of a header: merged cells above, units and parts of merged cells below."""
    start, stop = place, place + 1
    while stop < len(rows) and _continues(rows[stop], rows[stop - 1], knows):
        stop += 1
    while start and len(rows[start - 1]) > 1 and (
        any(cell and cell == other for cell, other in itertools.pairwise(rows[start - 1]))
        or (start == place and _completes(rows[start - 1], rows[place]))
    ) and not any(number(cell) is not None for cell in rows[start - 1]):  # fmt: skip
        start -= 1
    return (start, stop) if rows else (0, 0)


def _continues(row: Sequence[str], above: Sequence[str], knows: Callable[[str], bool]) -> bool:
    """Whether a line below a header belongs to it: it has a known header and no figures, or units or devices only, or
    words below headers of figures only ("no AC", "full AC")."""
    cells = [cell.strip() for cell in row if cell.strip()]
    devices = [cell for cell in cells if _DEVICES.fullmatch(cell)]
    if devices and all(cell in devices or cell in above for cell in cells):
        return True
    if not cells or any(re.match(r"[~\d](?!f1b)", cell, re.I) for cell in cells):
        return False
    if all(_UNIT.fullmatch(cell) for cell in cells) or (len(cells) > 1 and any(map(knows, cells))):
        return True
    return all(figure_named(header) is not None for cell, header in zip(row, above, strict=False) if cell.strip())


_UNIT = re.compile(
    r"\(.*\)|\[.*\]|m?s|min|tokens|samples|seqs?|sequences|%|[GM]i?B|(?:[kM]?tok(?:en)?s?|samples)/s(?:ec)?(?:/\w+)?"
    r"|[TP]FLOP/?s?(?:/s)?(?:/\w+)?", re.I,
)  # fmt: skip
"""Cells below headers that are units of theirs."""

_DEVICES = re.compile(r"\d+ ?(?:x )?(?:gpus?|npus?|devices|nodes)", re.I)
"""Cells below the headers of figures that state how many devices they are of."""


def _header(stack: Sequence[str], knows: Callable[[str], bool]) -> tuple[str, str]:
    """The header of a column and the words that qualify it, from its cells in the header lines, top first."""
    parts = [_without_marks(part) for part in dict.fromkeys(map(str.strip, stack)) if part]
    if not parts:
        return "", ""
    *above, last = parts
    if above and figure_named(last) is not None and stated_in_titles(above, ()):
        return last, " ".join(above)  # "Seq = 2048" above rates
    if above and _UNIT.fullmatch(last):
        last = f"{above.pop()} {last if last[0] in '([' else f'({last})'}"
    group = " ".join(above)
    if group and figure_named(group) is not None and figure_named(last) is None:
        return group, last  # "eager" and "compile" below a rate
    candidates = ((f"{group} {last}".strip(), ""), (last, group), (f"{last} {group}", ""), (group, last))
    return next((each for each in candidates if each[0] and knows(each[0])), (last, group))


def _without_marks(cell: str) -> str:
    """A cell without the marks of footnotes.

    >>> _without_marks("Model[^1]"), _without_marks("MFU\u2020"), _without_marks("12.5*")
    ('Model', 'MFU', '12.5')
    """
    if cell.isascii() and cell[-1:].isalnum():  # most cells
        return cell
    return _MARKED.sub("", cell).rstrip()


_MARK = r"(\[\^\w+\]|[\u2020\u2021\u00a7\u00b9\u00b2\u00b3\u2074\u2075]|\*+)"
_MARKED = re.compile(rf"(?<=.){_MARK}+$")
_NOTE = re.compile(rf"\s*{_MARK}:?\s*\S")
"""The mark of a footnote, behind a cell and in front of the note."""

_BEFORE_NOTE = re.compile(r"(?<=\s)(?=[\u2020\u2021\u00a7\u00b9\u00b2\u00b3\u2074\u2075]:? ?\w)")
"""Where a footnote begins inside a line: "Runs of 2024. \u2020 full recomputation"."""


def _filled(
    headers: Sequence[str], first: Iterable[list[str]], rest: Iterable[list[str]], notes: Mapping[str, str]
) -> Iterator[list[str]]:  # fmt: skip
    """Rows with a cell for every header, and one for their footnotes if there are any; empty rows and the rule below a
    header are left out."""
    for row in itertools.chain(first, rest):
        if any(re.search(r"[^\s:|=+-]", cell) for cell in row):
            own = [cell.strip() for cell in row[: len(headers)]]
            cells = [_without_marks(cell) for cell in own]
            cells += [""] * (len(headers) - len(cells))
            if notes:
                marks = (found.group(1) for cell in own if (found := _MARKED.search(cell)))
                cells.append("; ".join(dict.fromkeys(notes[mark] for mark in marks if mark in notes)))
            yield cells


_BULLET = re.compile(r"\s*[-*\u2022] +(.+)$")
_CLAUSE = r"(?:,(?!\d{3}(?!\d))|[;:=\u2192\u2013\u2014]| - |->)"
_LAST_CLAUSE = re.compile(rf"(.+?) *{_CLAUSE}(?!.*{_CLAUSE}) *(.+)$")
"""What is in front of the last clause of a line, and the clause; a comma between thousands ends none."""

_AMOUNT = re.compile(r"[~\u2248]?\d[\d.,]*[kM]? *([A-Za-z%][^,;:]*)")
_NAMED_AMOUNT = re.compile(r"([A-Za-z][A-Za-z ]*?) *(?:of |is |= ?)?([~\u2248]?\d[\d.]* ?%)")


def _of_bullets(lines: Sequence[str]) -> Grid | None:
    """A list of runs as a table; None if most lines of the text are no such runs.

    >>> grid = _of_bullets(["- 8B, 8 H100, TP2: 410 TFLOPS/GPU, MFU 41%", "- 8B, 16 H100, 9.1 s per step"])
    >>> list(grid.rows)
    [['8B, 8 H100, TP2', '410 TFLOPS/GPU', '41% MFU'], ['8B, 16 H100', '9.1 s per step', '']]
    """
    runs = [_run_and_figures(found[1]) for line in lines if (found := _BULLET.match(line))]
    others = [line.strip("# ") for line in lines if line.strip() and not _BULLET.match(line)]
    most = max(map(len, runs), default=1) - 1
    num_measured = sum(len(run) > 1 for run in runs)
    if num_measured < 2 or num_measured < max(len(others), len(runs) - num_measured):
        return None
    rows = ([*run, *[""] * (most + 1 - len(run))] for run in runs)
    headers = ["notes", *["throughput"] * most]
    return Grid(headers=headers, rows=rows, above=[""] * len(headers), titles=tuple(map(_plain_line, others)))


def _run_and_figures(line: str) -> list[str]:
    """The words of a line about a run, and the figures at its end: "410 TFLOPS/GPU", "MFU 41 %"."""
    rest, figures = _plain_line(line).rstrip(". "), []
    while found := _LAST_CLAUSE.match(rest):
        clause = found[2].strip()
        if named := _NAMED_AMOUNT.fullmatch(clause):
            clause = f"{named[2]} {named[1]}"
        if (amount := _AMOUNT.fullmatch(clause)) is None or not _is_unit(amount[1]):
            break
        figures.append(clause)
        rest = found[1]
    return [rest, *reversed(figures)]


def _is_unit(words: str) -> bool:
    try:
        return figure_of_unit(words, "throughput") is not None or words.strip() == "%"
    except ValueError:
        return False


def _of_lines(lines: list[str], knows: Callable[[str], bool]) -> Grid:
    """Cells separated by commas, semicolons, tabs, bars or two spaces, whichever gives the most known headers."""
    ways: list[Callable[[list[str]], Iterable[list[str]]]] = [partial(csv.reader, delimiter=each) for each in ",;\t|"]
    ways.append(lambda rows: _columns([_spaced(line) for line in rows], knows))

    def num_known(way: Callable[[list[str]], Iterable[list[str]]]) -> int:
        rows = [row for row in way(lines[:_MOST_ABOVE]) if len(row) > 1]
        lengths = Counter(map(len, rows))
        # a line apart is no table: one description may have bars in it
        found = (sum(map(knows, row)) for row in rows if lengths[len(row)] + lengths[len(row) + 1] > 1)
        return max(found, default=0)

    if pairs := _of_names(lines, knows):
        ways = [lambda _: pairs]
    if _COMMAS.search("\n".join(lines[:_MOST_ABOVE])):
        ways = [partial(_with_points, way) for way in ways[1:3]]
    stop = len(lines)
    while stop and _is_caption(lines[stop - 1]):
        stop -= 1
    below = [line.strip(',;|"\t ') for line in lines[stop:] if line.strip(",;|\t ")] if stop else []
    return _grid(max(ways, key=num_known)(lines[:stop] if below else lines), knows, below)


_NAME_AND_VALUE = re.compile(r"\s*([^:,;|]*[^:,;|\s]) *(?: : |: +|=) *(\S.*)$")


def _of_names(lines: Sequence[str], knows: Callable[[str], bool]) -> list[list[str]]:
    """The lines of one run that is written as "Global batch: 512", a line for each value; none if they are no such."""
    found = [_NAME_AND_VALUE.match(line) for line in lines if line.strip()]
    pairs = [[each[1], each[2].strip()] for each in found if each is not None]
    is_run = len(pairs) > len(found) / 2 and sum(knows(name) for name, _ in pairs) > max(2, len(pairs) / 2)
    return pairs if is_run else []


def _is_caption(line: str) -> bool:
    """Whether a line below a table has one cell only."""
    bare = line.strip(",;|\t ")
    is_quoted = re.fullmatch(r'"[^"]*"', bare) is not None
    return is_quoted or (len(_spaced(bare)) == 1 and not re.search(r"[,;|]\S|\t", bare))


_COMMAS = re.compile(r"(?:^|[;\t])[~\s]*(?:\d{1,3}(?:\.\d{3})+,\d+|\d+,(?:\d{1,2}|\d{4,}))\s*%?\s*(?:[;\t]|$)", re.M)
"""A cell with a decimal comma, in a table whose cells are apart by semicolons or tabs."""

_GERMAN = re.compile(r"(?<![\d.,])(?:\d{1,3}(?:\.\d{3})+(?:,\d+)?|\d+,\d+)(?![\d.,])")
"""Numbers of such tables: "27.095" is twenty-seven thousand."""


def _with_points(way: Callable[[list[str]], Iterable[list[str]]], lines: list[str]) -> Iterator[list[str]]:
    """Rows with decimal points instead of decimal commas."""
    for row in way(lines):
        yield [
            _GERMAN.sub(lambda found: found.group().replace(".", "").replace(",", "."), cell)
            if number(cell) is not None or _RANGE.fullmatch(cell) else cell
            for cell in row
        ]  # fmt: skip


_RANGE = re.compile(r"[~\s]*[\d.,]+ *(?:[-\u2013\u2014]|to) *[\d.,]+\s*%?")


def _spaced(line: str) -> list[str]:
    return re.split(r" {2,}|\t", line.strip())


def _columns(rows: list[list[str]], knows: Callable[[str], bool]) -> list[list[str]]:
    """Rows of equal length: cells with several known headers or numbers one space apart are split."""
    wide = [_apart(row, knows) for row in rows]
    most = max(map(len, wide), default=0)
    for place, row in enumerate(wide):
        behind = [own[0] for own in wide[place + 1 :] if len(own) == most]
        if len(row) == most - 1 and behind and (_is_counted(behind) or _lacks_first(row, behind, knows)):
            rows[place], wide[place] = ["", *rows[place]], ["", *row]
            break
    split = ([word for cell in row for word in cell.split()] for row in rows)
    return [
        row if len(row) == most else other if len(other) == most else words if len(words) == most else row
        for row, other, words in zip(rows, wide, split, strict=True)
    ]


def _is_counted(cells: Sequence[str]) -> bool:
    """Whether cells are a data frame's index, which has no header."""
    return list(cells) == [str(number) for number in range(len(cells))]


def _lacks_first(row: Sequence[str], behind: Sequence[str], knows: Callable[[str], bool]) -> bool:
    """Whether a row is a header whose first cell is blank, above words."""
    return sum(map(knows, row)) > 1 and not any(number(cell) is not None or knows(cell) for cell in behind)


def _apart(row: Sequence[str], knows: Callable[[str], bool]) -> list[str]:
    """A row with the cells split that hold several known headers or several numbers."""
    found: list[str] = []
    for cell in row:
        words = cell.split()
        several = len(words) > 1 and not knows(cell) and (
            all(map(knows, words)) or all(number(word) is not None for word in words)
        )  # fmt: skip
        found += words if several else [cell]
    return found


def _of_markdown(lines: list[str], knows: Callable[[str], bool]) -> Iterator[Grid]:
    """Every run of lines with bars is a table; headings and the lines above it are its titles, and the lines below the
    last one."""
    headings: dict[int, list[str]] = {}
    said: list[str] = []
    is_row = [("|" in line or bool(_RULE.match(line))) for line in lines]
    last = max((place for place, own in enumerate(is_row) if own), default=0)
    below = [_plain_line(line) for line in lines[last + 1 :] if line.strip() and not line.lstrip().startswith("#")]
    done = 0
    for is_table, group in itertools.groupby(zip(is_row, lines, strict=True), key=lambda each: each[0]):
        run = [line for _, line in group]
        done += len(run)
        if is_table:
            titles = [*reversed(said), *(line for depth in sorted(headings, reverse=True) for line in headings[depth])]
            rows = [_bars(line) for line in run if "|" in line and not _RULE.match(line)]
            yield _grid(rows, knows, [*titles, *below] if done > last else titles)
            said = []
            continue
        for line in filter(None, map(str.strip, run)):
            if heading := re.match(r"(#+) *(.*)", line):
                if headings:  # what stands below a heading holds for those of lower levels too
                    headings[max(headings)] = [*reversed(said), *headings[max(headings)]]
                depth = len(heading.group(1))
                headings = {own: words for own, words in headings.items() if own < depth} | {depth: [heading.group(2)]}
                said = []
            else:
                said.append(_plain_line(line))


def _plain_line(line: str) -> str:
    r"""A line of Markdown without markup.

    >>> _plain_line("| **7B**<sup>1</sup> | 12\\* |"), _plain_line("<sup>*</sup> with FP8")
    ('| 7B[^1] | 12* |', '* with FP8')
    """
    line = _RAISED.sub(lambda found: f"[^{found[1]}]" if found[1].isalnum() else found[1], line.strip())
    return _MARKUP.sub(lambda found: found.group(1) or "", line)


def _bars(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", _plain_line(line).strip("|"))]


def _records(text: str, knows: Callable[[str], bool]) -> list[Mapping[str, str]]:
    """The innermost objects of a JSON text or of its lines, each with what the objects around it state; none where it
    is neither."""
    try:
        found: Any = json_of(text.encode(), "the table")
    except TwofoldError:
        try:
            found = [json_of(line.encode(), "the table") for line in text.splitlines() if line.strip()]
        except TwofoldError:
            return []
    return list(_flat(found, {}, knows))


def _flat(value: Any, around: Mapping[str, str], knows: Callable[[str], bool]) -> Iterator[Mapping[str, str]]:
    if isinstance(value, list):
        for item in value:
            yield from _flat(item, around, knows)
    elif isinstance(value, dict):
        own = {**around, **dict(_leaves(value, knows))}
        lists = [item for item in value.values() if _has_records(item)]
        if not lists:
            yield own
        for item in lists:
            yield from _flat(item, own, knows)


def _has_records(value: Any) -> bool:
    """Whether a value has a list of objects."""
    if isinstance(value, dict):
        return any(map(_has_records, value.values()))
    return isinstance(value, list) and any(isinstance(part, dict) for part in value)


def _of_records(records: Sequence[Mapping[str, str]]) -> Grid:
    headers = list(dict.fromkeys(name for record in records for name in record))
    rows = ([record.get(name, "") for name in headers] for record in records)
    return Grid(headers=headers, above=[""] * len(headers), rows=rows)


def _leaves(
    record: Mapping[str, Any], knows: Callable[[str], bool], around: str = ""
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Names and values of an object and of those in it, whose own names may need that of the outer one: "gpu name"."""
    for name, value in record.items():
        whole = f"{around} {name}"
        if isinstance(value, dict):
            yield from _leaves(value, knows, name)
        elif not isinstance(value, list):
            yield whole if around and knows(whole) else name, "" if value is None else str(value)
