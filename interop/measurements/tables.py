"""Tables of measurements as people publish them: CSV, TSV or Markdown, columns of many names, one metric a row or
several."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from interop.measurements.batches import BadCell
from interop.measurements.cells import (
    BAD_COLUMN,
    BAD_REASON,
    BAD_VALUE,
    FIGURE,
    FROM_TITLE,
    ROW,
)
from interop.measurements.columns import COLUMNS, column_named, rank_of
from interop.measurements.composed import ordered_degrees, plain_row
from interop.measurements.devices import UnknownDevice, device_named, devices_meant
from interop.measurements.figures import measured, with_unit
from interop.measurements.grids import Grid, grids_of
from interop.measurements.headers import Figure, devices_told, figure_named, has_units_in_cells
from interop.measurements.models import catalogued, named_parameters
from interop.measurements.numbers import number
from interop.measurements.precisions import precision_named
from interop.measurements.software import names_software
from interop.measurements.spellings import level_named, switch_named
from interop.measurements.titles import CONDITIONS, stated_in_titles, without_conditions
from plans.errors import TwofoldError
from plans.reading import read_text

__all__ = ["COLUMNS", "column_named", "read_table", "rows_of"]

_FAILED = ("oom", "out of memory", "oor", "failed")
_NOTHING = ("", "-", "--", "\u2013", "\u2014", "n/a", "na", "x", "\u2717", *_FAILED)
"""Cells of a column of figures in which nothing was measured."""


def read_table(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a table, by the names of `COLUMNS`.

    Commas, semicolons, tabs or spaces are between the cells, or bars as in Markdown; tables of HTML and LaTeX and
    records of JSON are read too. A table without the columns "metric" and "value" may have a column for each metric, as
    "TFLOP/s/GPU" or "MFU": every figure of it becomes a row. A text may have several tables; what their titles say
    fills the columns that they lack.

    Raises:
        TwofoldError: no such file, no rows, or columns missing.
    """
    rows = list(rows_of(path))
    if not rows:
        raise TwofoldError(f"table {os.fspath(path)!r} has no rows")
    return rows


def rows_of(path: str | os.PathLike[str]) -> Iterator[dict[str, str]]:
    """The rows of `read_table` one after the other, so that a long table is never held as rows.

    Raises:
        TwofoldError: no such file, or columns missing.
    """
    name = os.fspath(path)
    text = read_text(path, "the table")
    incomplete: list[TwofoldError] = []
    num_rows = 0
    try:
        for grid in grids_of(text, lambda header: bool(column_named(header) or figure_named(header))):
            try:
                for row in _rows(grid, name, num_rows):
                    num_rows = int(row[ROW])
                    yield row
            except TwofoldError as error:
                incomplete.append(error)
    except csv.Error as error:
        raise TwofoldError(f"cannot read the table {name!r}: {error}") from None
    if incomplete and not num_rows:
        raise incomplete[0]
    for reason in map(str, incomplete):
        if "no column model (" in reason:  # it has figures
            num_rows += 1
            yield {ROW: str(num_rows), BAD_COLUMN: "model", BAD_VALUE: "", BAD_REASON: reason}


def _rows(grid: Grid, table: str, before: int) -> Iterator[dict[str, str]]:
    """Every row of a table; `before` rows of other tables stand before it."""
    headers = grid.headers
    columns = _columns(headers)
    figures = _figures(grid, columns) if "metric" not in columns else []
    for figure in figures:
        columns[figure.place] = ""
    stated = stated_in_titles(grid.titles, columns) if grid.titles else {}
    first = next(grid.rows, [])
    if not {"model", "hidden"} & {*columns, *stated} and (place := _place_of_models(first, columns)) is not None:
        columns[place] = "model"
    free = [cell for cell, column in zip(first, columns, strict=False) if column in ("", *_WORDY)]
    known = [*columns, *stated, *(name for figure in figures for name in figure.stated), *stated_in_titles(free, ())]
    _check(known, headers, figures, table)
    order = sorted((place for place, column in enumerate(columns) if column), key=lambda place: rank_of(headers[place]))
    named = {column: headers[place] for place in reversed(order) for column in [columns[place]]}
    order += [place for place, column in enumerate(columns) if not column and place not in {f.place for f in figures}]
    places = {figure.place for figure in figures}
    for place, row in enumerate(itertools.chain([first] if first else [], grid.rows), start=before + 1):
        for each in _variants(row, places):
            made = _row(each, columns, order, headers, named, stated)
            made[ROW] = str(place)
            if figures:
                yield from _of_figures(made, each, figures)
            else:
                yield with_unit(made)


def _columns(headers: Sequence[str]) -> list[str]:
    """The column of every header; "b" next to "B" is a micro-batch, as in Narayanan et al. 2021, arXiv 2104.04473.

    >>> _columns(["B", "T", "tok/s"]), _columns(["B", "b", "t", "p"])
    (['micro_batch', 'seq', ''], ['global_batch', 'micro_batch', 'tp', 'pp'])
    """
    columns = [column_named(header) for header in headers]
    plain = [re.sub(r"[^A-Za-z]", "", header) for header in headers]
    if "b" in plain and "B" in plain:
        columns[plain.index("b")] = "micro_batch"
    if {"B", "T"} <= set(plain) and not {"seq", "pp"} & set(columns):  # llm.c's and nanoGPT's: micro-batch and sequence
        columns[plain.index("B")], columns[plain.index("T")] = "micro_batch", "seq"
    if "metric" in columns and "value" not in columns:  # of another task, as "accuracy"
        columns[columns.index("metric")] = ""
    return columns


def _place_of_models(cells: Sequence[str], columns: Sequence[str]) -> int | None:
    """The first column without a meaning of its own whose first cell names a model or its size, as "config"; None: no
    column."""
    pairs = enumerate(zip(cells, columns, strict=False))
    return next(
        (place for place, (cell, own) in pairs
         if own in ("", "notes") and (catalogued(cell) or _SIZE.fullmatch(cell.lower()))), None,
    )  # fmt: skip


def _of_figures(made: Mapping[str, str], row: Sequence[str], figures: Sequence[_Column]) -> Iterator[dict[str, str]]:
    """A row for each figure of a row of the table."""
    cells = [row[figure.place] for figure in figures]
    if failed := _failure(cells):
        reason = f"nothing was measured: {failed!r}"
        yield {**made, BAD_COLUMN: "value", BAD_VALUE: failed, BAD_REASON: reason}
    for figure in figures:
        if row[figure.place].lower() not in _NOTHING:
            meaning = figure.figure or figure_named(made.get("unit", ""))
            cell, stated = _conditioned(row[figure.place], figure.stated)
            if stated.get("gpu_type") == _NPU and made.get("gpu_type"):  # which the row names better
                stated.pop("gpu_type")
            own = measured({**made, **stated}, figure.header, cell, meaning)
            own.pop("unit", None)
            yield own | {FIGURE: repr((figure.place, cells))}


def _conditioned(cell: str, stated: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """A figure without the condition that its cell states, and what it states with its header.

    >>> _conditioned("30000 (FP8)", {}), _conditioned("2560 tokens/s/p", {})
    (('30000', {'precision': 'fp8'}), ('2560 tokens/s/p', {'gpu_type': 'NPU'}))
    """
    if _OF_NPUS.search(cell):
        return cell, {"gpu_type": _NPU, **stated}
    found = re.fullmatch(r"([^()]*\d[^()]*?) *\(([^()]*[A-Za-z][^()]*)\)", cell)
    own = stated_in_titles((found[2],), ()) if found else {}
    own = {name: words for name, words in own.items() if name in CONDITIONS}
    return (found[1] if found and own else cell), {**stated, **own}


_PAIR = re.compile(r"([^()]*[^()\s]) *\(([^()]+)\)|([^/]*\S) / (\S[^/]*)")


_LABELLED = re.compile(r"([^()/]*\d[^()/]*?) *\(([^()]+)\) *[/,;] *([^()/]*\d[^()/]*?) *\(([^()]+)\)")
"""Two values, each with its condition."""


def _variants(row: Sequence[str], places: Collection[int]) -> Iterator[Sequence[str]]:
    """The runs of a row: two where its figures are "12.1 (11.3)" and other cells are pairs too, as "FP8-CS (FP8-MX)".

    >>> list(_variants(["Llama", "BF16 (FP8)", "100 (150)"], {2}))
    [['Llama', 'BF16', '100'], ['Llama', 'FP8', '150']]
    """
    pairs = {place: [part for part in found.groups() if part is not None]
             for place, cell in enumerate(row) if (found := _PAIR.fullmatch(cell))}  # fmt: skip
    labels = {found[2]: found[4] for cell in row if (found := _LABELLED.fullmatch(cell))}
    if len(labels) == 1 and None not in map(precision_named, (*labels, *labels.values())):
        for which in (1, 3):  # "2 (FP8-CS) / 1 (FP8-MX)"
            yield [
                f"{found[which]} ({found[which + 1]})" if place in places and found else found[which] if found else cell
                for place, cell in enumerate(row) for found in [_LABELLED.fullmatch(cell)]
            ]  # fmt: skip
    elif _are_pairs(row, places, pairs) and any(
        place not in places and _differs(row[place], pairs[place]) for place in pairs
    ):
        for which in (0, 1):
            yield [pairs[place][which] if place in pairs else cell for place, cell in enumerate(row)]
    else:
        yield row


def _are_pairs(row: Sequence[str], places: Collection[int], pairs: Mapping[int, Sequence[str]]) -> bool:
    """Whether every figure of a row is a pair of numbers."""
    filled = [place for place in places if row[place].lower() not in _NOTHING]
    return bool(filled) and all(
        place in pairs and all(number(part) is not None and "%" not in part for part in pairs[place])
        for place in filled
    )  # fmt: skip


def _differs(cell: str, pair: Sequence[str]) -> bool:
    """Whether a pair of cells are two values of one column: two numbers, two precisions, two devices."""
    first, second = pair
    if number(first) is not None or number(second) is not None:
        return number(first) is not None and number(second) is not None
    both = precision_named(first), precision_named(second)
    return None not in both or (_is_device(first) and _is_device(second))


def _failure(cells: Sequence[str]) -> str:
    """The cell that explains why a row has no figure; "" if it has one or nothing explains it."""
    if any(cell.lower() not in _NOTHING for cell in cells):
        return ""
    return next((cell for cell in cells if cell.lower() in _FAILED), "")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """A column of figures: position, header, metric (None: stated in its cells), and cells that its header states."""

    place: int
    header: str
    figure: Figure | None
    stated: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _figures(grid: Grid, columns: Sequence[str]) -> list[_Column]:
    """The columns of figures; where none is named, those whose headers state a device, a precision or the like, of a
    figure that a title or their cells name."""
    found = []
    for place, (header, above) in enumerate(zip(grid.headers, grid.above, strict=True)):
        column = _figure_of(place, header, columns[place])
        if column is None or (column.figure is not None and column.figure.tokens == 0 and "tokens" not in columns):
            continue
        stated = {**stated_in_titles((above,), ()), **column.stated} if above else column.stated
        found.append(dataclasses.replace(column, stated=stated))
    if found:
        return _on_one_device(found)
    starts = (_TITLE_END.split(title.strip("* "))[0] for title in grid.titles)
    header, figure = next(((words, own) for words in starts if (own := figure_named(words))), ("", None))
    conditions = (
        (place, stated_in_titles((name,), ())) for place, name in enumerate(grid.headers) if not columns[place]
    )
    return [_Column(place=place, header=header, figure=figure, stated=stated) for place, stated in conditions if stated]


def _on_one_device(figures: Sequence[_Column]) -> list[_Column]:
    """Figures of the device that the header of one of them states, where no header states another one."""
    devices = {
        each.stated["gpu_type"].lower(): each.stated["gpu_type"] for each in figures if "gpu_type" in each.stated
    }
    if len(devices) != 1:
        return list(figures)
    device = {"gpu_type": next(iter(devices.values()))}
    return [
        each if _OTHERS.search(each.header) else dataclasses.replace(each, stated={**device, **each.stated})
        for each in figures
    ]


_OTHERS = re.compile(r"\u53c2\u8003|\bref(?:erence)?\b|\bbaseline\b", re.I)
"""Headers of figures of other devices or software, to compare with."""


_NPU = "NPU"
"""An Ascend device whose name is not stated."""

_OF_NPUS = re.compile(r"tok\w*/s(?:ec)?/p\b|tok\w*/p/s", re.I)
"""Rates a device as the cards of MindFormers and MindSpeed write them; Ascend devices are meant."""


_TITLE_END = re.compile(r"\b(?:of|for|on|with|in|by|vs|versus)\b|[:;,]|\((?!m?s\))")
"""Where the name of a figure at the beginning of a title ends."""


def _figure_of(place: int, header: str, column: str) -> _Column | None:
    bare, devices = devices_told(header)
    if devices and (figure := figure_named(bare)) is not None:
        return _Column(place=place, header=bare, figure=figure, stated={"gpu_count": devices})
    figure = figure_named(header)
    if figure is not None or (has_units_in_cells(header) and not column):
        return _Column(place=place, header=header, figure=figure, stated=_stated_in_header(header, figure))
    bare = _without_software(without_conditions(header))
    if not column and bare != header and (figure := figure_named(bare)) is not None:
        return _Column(place=place, header=bare, figure=figure, stated=_stated_in_header(header, figure))
    return None


def _without_software(header: str) -> str:
    """A header without the software in front of its figure: "FSDP2 tokens/s/GPU"."""
    words = header.split()
    ends = (place for place in range(1, len(words)) if names_software(" ".join(words[:place])))
    return next((rest for place in ends if figure_named(rest := " ".join(words[place:]))), header)


def _stated_in_header(header: str, figure: Figure | None) -> dict[str, str]:
    """The device, precision and switches that a figure's header states: "TFLOPS (FP8)", "H100 tokens/s/GPU".

    A precision next to a share of the peak is that of the peak.
    """
    stated = {name: cell for name, cell in stated_in_titles((header,), ()).items() if name in CONDITIONS}
    if re.match(r"npu\b(?! *(?:memory|mem|hbm))", header, re.I) or (
        _OF_NPUS.search(header) and not _OTHERS.search(header)
    ):
        stated.setdefault("gpu_type", _NPU)
    if figure is not None and figure.metric == "mfu_percent":
        stated.pop("precision", None)
    return stated


def _check(columns: Sequence[str], headers: Sequence[str], figures: Sequence[object], table: str) -> None:
    missing = [] if {"model", "hidden"} & set(columns) else ["model"]
    missing += [each for each in ("metric", "value") if each not in columns and not figures]
    if missing:
        shown = ", ".join(repr(header) for header in headers[:8])
        raise TwofoldError(
            f"table {table!r} has no column {', '.join(missing)} (its header: {shown or 'none'}); see `twofold "
            "validate --help`"
        )


def _row(
    cells: Sequence[str], columns: Sequence[str], order: Sequence[int], headers: Sequence[str],
    named: Mapping[str, str], stated: Mapping[str, str],
) -> dict[str, str]:  # fmt: skip
    """The cells of a row by their columns; where two headers mean one column, the more definite one's."""
    found: dict[str, str] = {}
    free: list[str] = []
    bad: BadCell | None = None
    for place in order:
        cell, header = cells[place], headers[place]
        column = _column_of(columns[place], cell, named)
        if column == "source" and "gpu_type" not in named and _is_device(cell):
            found.setdefault("gpu_type", cell)
        if not column and header and (is_on := switch_named(cell)) is not None:
            column, cell = "notes", header if is_on else f"no {header}"
        free += [] if column else [cell]
        try:
            found = _joined(found, column, cell, header) if column else found
        except BadCell as error:
            bad = bad or error
    found = _with_words(found, free)
    if used := [column for column in stated if not found.get(column)]:
        found |= {column: stated[column] for column in used} | {FROM_TITLE: ", ".join(used)}
    try:
        found = plain_row(found, named)
    except BadCell as error:
        bad = bad or error
    if bad is not None:
        found |= {BAD_COLUMN: bad.column, BAD_VALUE: bad.value, BAD_REASON: str(bad)}
    return found


def _with_words(found: dict[str, str], free: Sequence[str]) -> dict[str, str]:
    """A row whose blank cells are filled from the words of notes, strategies and sources, and `free` cells of unknown
    columns."""
    device, model = (stated_in_titles((found.get(column, ""),), ()) for column in ("gpu_type", "model"))
    said = {name: cell for name, cell in device.items() if name in ("model", "precision")}
    several = len(re.split(r"[,;|]| / ", found.get("model", ""))) > 2  # "Llama-2-7B, 8x A100, FSDP"
    beside = ("precision", "gpu_type", "gpu_count")  # "18.4B (128 GPUs)"
    said |= {name: cell for name, cell in model.items() if name in beside or (several and name != "family")}
    if several and "model" in model:
        found = {**found, "model": model["model"]}
    words = [found.get(name, "") for name in ("notes", "layout", "source")]
    said |= stated_in_titles(words, _READ_IN_NOTES) | stated_in_titles(free, ())
    return found | {name: cell for name, cell in said.items() if not found.get(name)}


_WORDY = ("notes", "source", "gpu_type")
"""Columns whose cells may name the model."""

_READ_IN_NOTES = ("source", "precision", "interconnect")
"""Columns that other readers find in notes and sources."""


def _joined(found: dict[str, str], column: str, cell: str, header: str) -> dict[str, str]:
    """The cells of a row with another one.

    Raises:
        BadCell: the column has another one already, or the cell has fewer degrees than its header.
    """
    if column == "layout" and (own := ordered_degrees(cell, header)):
        return own | found
    if column == "model":
        return found | {column: _model(found.get(column, ""), cell, header)}
    before = found.get(column, cell)
    if before == cell:
        return found | {column: cell}
    if column == "notes":
        return found | {column: f"{before}; {cell}"}
    if column in ("source", "provenance", "gpu_type") or (
        column == "global_batch" and _BATCH_TOKENS.search(header.lower())
    ):
        return found
    raise BadCell(column, cell, f"two columns for {column} hold {before!r} and {cell!r}")


def _column_of(column: str, cell: str, named: Collection[str]) -> str:
    """The column of a cell, given the column of its header; "" if the cell does not determine one.

    Args:
        named: the columns that the table has.
    """
    if not cell or (column in _COUNTS and cell.lower() in ("none", "null", "not stated")):
        return ""
    if not column:
        known = (name for name, words in _METHODS if name not in named and words.fullmatch(cell))
        return "notes" if _TUNES.search(cell) else next(known, "")
    if column == "zero_level" and level_named(cell)[0] is None and re.match(r"pre-?train|sft|fine|long", cell, re.I):
        return "task"  # a stage of training
    if column == "gpu_type" and number(cell) is not None and not _is_device(cell):  # a column "GPU" may count them
        return "gpu_count"
    if column in ("source", "gpu_count") and "gpu_type" not in named and _is_device(cell):  # "System", "Cluster"
        return "source" if column == "source" and names_software(cell) else "gpu_type"
    return column


_COUNTS = ("tp", "pp", "dp", "cp", "ep", "vpp", "seq", "global_batch", "micro_batch", "kv_heads", "gpu_count")
"""Columns of whole numbers, in which "none" means that nothing is stated."""

_METHODS = (
    ("schedule", re.compile(r"(?:interleaved[- ])?1f1b\b.*|zb-?\w{1,2}|gpipe|dualpipe\w*|v-?(?:half|min)", re.I)),
    ("zero_level", re.compile(r"(?:ddp|fsdp2?|hsdp|zero[- ]?[1-3])\b.*", re.I)),
)  # fmt: skip
"""Column -> cells of columns that are not known, as "Method", that belong to it."""

_TUNES = re.compile(r"\b(q?lora|peft)\b", re.I)

_BATCH_TOKENS = re.compile(r"tok|\(t\)")


def _model(name: str, cell: str, header: str) -> str:
    """The name of a model, with the number of parameters that another column tells."""
    count = number(cell)
    if count is not None and named_parameters(cell) is None:
        billions = count if re.search(r"billion|\bb\b", header.lower()) else count / 1e9
        million = re.search(r"million|\bm\b", header.lower()) is not None and count < 1e6
        if not million and not 1e-3 <= billions < 1e5:
            return name or cell
        cell = f"{count:g}M" if million else f"{billions:.3g}B"
    if not name:
        return cell
    if _SIZE.fullmatch(name.lower()) and not _SIZE.fullmatch(cell.lower()):
        name, cell = cell, name
    states = named_parameters(name) is not None or re.search(r"\d ?x ?[\d.]+ ?b", name.lower()) is not None
    return f"{name} {cell}" if _SIZE.fullmatch(cell.lower()) and not states else name


_SIZE = re.compile(r"(?:\d+ ?x ?)?\d+(?:\.\d+)? ?[mbt](?:[- ]?a\d+(?:\.\d+)?b)?|\d+b\d")
"""A number of parameters, or of experts and of an expert's."""


def _is_device(cell: str) -> bool:
    if re.search(r"dgx|hgx|[ahvb]\d00|910", cell.lower()) is None:
        return False
    try:
        return bool(devices_meant(cell) or device_named(cell))
    except UnknownDevice:
        return False
