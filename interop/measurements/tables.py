"""Tables of measurements as people publish them: CSV, TSV or Markdown, columns of many names, one metric a row or
several."""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from interop.measurements.batches import BadCell
from interop.measurements.capacities import CAPACITY, capacity_place
from interop.measurements.carried import heading_of, with_cells_above
from interop.measurements.cells import BAD_COLUMN, BAD_REASON, BAD_VALUE, FROM_ABOVE, FROM_TITLE, ROW
from interop.measurements.columns import COLUMNS, KINDS_OF_CONTEXT, column_inside, column_named, rank_of
from interop.measurements.composed import ordered_degrees, plain_row
from interop.measurements.devices import is_device
from interop.measurements.figure_columns import OF_PRECISION, figures_of, rows_of_figures
from interop.measurements.figures import with_unit
from interop.measurements.grids import Grid, grids_of
from interop.measurements.headers import figure_named
from interop.measurements.model_names import named_parameters
from interop.measurements.models import catalogued
from interop.measurements.numbers import number
from interop.measurements.pairs import is_nothing, runs_of
from interop.measurements.precisions import precision_named
from interop.measurements.software import names_software, software_of_headers
from interop.measurements.spellings import level_named, schedule_named, switch_named
from interop.measurements.systems import system_named
from interop.measurements.titles import stated_in_titles, without_conditions
from plans.errors import TwofoldError
from plans.reading import read_text

__all__ = ["COLUMNS", "column_named", "read_table", "rows_of"]


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
    """Iterate over the rows of `read_table`, without keeping a long table in memory.

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


_LOOKED_AT = 200
"""Rows at the beginning of a table whose cells decide what its columns are."""


def _rows(grid: Grid, table: str, before: int) -> Iterator[dict[str, str]]:
    """The rows of a table that follows `before` rows of other tables."""
    headers = grid.headers
    begin = list(itertools.islice(grid.rows, _LOOKED_AT))
    columns = _columns(headers)
    _name_by_cells(columns, begin, headers, grid.titles)
    figures = figures_of(grid, columns) if "metric" not in columns else []
    for figure in figures:
        columns[figure.place] = ""
    stated = _stated_above(grid, columns)
    first = next((row for row in begin if not heading_of(row)), [])
    if not {"model", "hidden"} & {*columns, *stated} and (place := _place_of_models(first, columns)) is not None:
        columns[place] = "model"
    words = [cell for cell, column in zip(first, columns, strict=False) if column in ("", *_WORDY)]
    words += map(heading_of, begin[:1])
    in_headers = itertools.chain.from_iterable(figure.stated for figure in figures)
    _check([*columns, *stated, *in_headers, *stated_in_titles(words, ())], headers, figures, table)
    places = {figure.place for figure in figures}
    order = _order(columns, headers, places)
    named = {columns[place]: headers[place] for place in reversed(order) if columns[place]}
    carried = with_cells_above(itertools.chain(begin, grid.rows), headers, columns, places)
    for count, row in enumerate(carried, start=before + 1):
        about = {**stated, **stated_in_titles((row.heading,), ())} if row.heading else stated
        repeated = ", ".join(sorted({columns[place] or headers[place] for place in row.places}))
        for each in runs_of(row.cells, places):
            made = _row(each, columns, order, headers, named, about)
            made[ROW] = str(count)
            if repeated:
                made[FROM_ABOVE] = repeated
            if figures:
                yield from rows_of_figures(made, each, figures)
            else:
                yield with_unit(made)


def _order(columns: Sequence[str], headers: Sequence[str], figures: Collection[int]) -> list[int]:
    """The places of a row's cells without its figures, the most definite headers first and the unknown ones last."""
    known = sorted((place for place, column in enumerate(columns) if column), key=lambda place: rank_of(headers[place]))
    return known + [place for place, column in enumerate(columns) if not column and place not in figures]


_LOCAL_BATCH = re.compile(r"\blocal batch(?: size)?\b", re.I)
"""What torchtitan calls the batch of a device, in titles."""


def _stated_above(grid: Grid, columns: Sequence[str]) -> dict[str, str]:
    """Cells of all rows, from the titles and the headers of a table."""
    present = {*columns, "gpu_count"} if "nodes" in columns else columns
    stated = stated_in_titles(grid.titles, present) if grid.titles else {}
    counted = [header for header, column in zip(grid.headers, columns, strict=True) if column in ("gpu_count", "nodes")]
    if "gpu_type" not in columns and (device := (of_counts := stated_in_titles(counted, ())).get("gpu_type")):
        stated["gpu_type"] = device  # "GPUs (V100 32GB)"
        if "nodes" in columns and "gpu_count" in of_counts:  # "nodes (8x MI300X)"
            stated["per_node"] = of_counts["gpu_count"]
    if "source" not in columns:
        names = [*grid.headers, *(found.group() for title in grid.titles for found in _LOCAL_BATCH.finditer(title))]
        stated |= software_of_headers(names, stated.get("source", ""))
    return stated


def _columns(headers: Sequence[str]) -> list[str]:
    """The column of every header; "b" next to "B" is a micro-batch and "v" next to "p" the chunks of a stage, as in
    Narayanan et al. 2021, arXiv 2104.04473.

    >>> _columns(["B", "T", "tok/s"]), _columns(["B", "b", "t", "p", "v"])
    (['micro_batch', 'seq', ''], ['global_batch', 'micro_batch', 'tp', 'pp', 'vpp'])
    """
    columns = [column_named(header) for header in headers]
    plain = [re.sub(r"[^A-Za-z]", "", header) for header in headers]
    if "b" in plain and "B" in plain:
        columns[plain.index("b")] = "micro_batch"
    if {"p", "v"} <= set(plain):
        columns[plain.index("v")] = "vpp"
    if {"B", "T"} <= set(plain) and not {"seq", "pp"} & set(columns):  # llm.c's and nanoGPT's: micro-batch and sequence
        columns[plain.index("B")], columns[plain.index("T")] = "micro_batch", "seq"
    _name_kinds_of_context(columns, headers)
    if "model" in columns and columns.count("model") > 1 and "Network" in plain:
        columns[plain.index("Network")] = "interconnect"
    if "metric" in columns and "value" not in columns:  # of another task, as "accuracy"
        columns[columns.index("metric")] = ""
    return columns


def _name_kinds_of_context(columns: list[str], headers: Sequence[str]) -> None:
    """Give the degrees of Ulysses and ring attention columns of their own where a table has both; none where it has
    their product too."""
    degrees = [place for place, column in enumerate(columns) if column == "cp"]
    kinds = {place: kind for place in degrees for kind in KINDS_OF_CONTEXT if kind in headers[place].lower()}
    if len(degrees) > 1 and kinds:
        for place, kind in kinds.items():
            columns[place] = kind if len(kinds) == len(degrees) else ""


def _name_by_cells(
    columns: list[str], rows: Sequence[Sequence[str]], headers: Sequence[str], titles: Sequence[str]
) -> None:  # fmt: skip
    """Change the columns whose cells show that they are not what their headers alone mean.

    Args:
        columns: of the headers; changed in place.
        rows: the first rows of the table.
        headers, titles: of the table.
    """
    said = stated_in_titles(titles, ())
    if (place := capacity_place(rows, headers, columns, said.get("gpu_type", ""))) is not None:
        columns[place] = CAPACITY
    if "global_batch" in said and "micro_batch" not in columns and "b" in headers:
        columns[headers.index("b")] = "micro_batch"
    for place, header in enumerate(headers):
        cells = [row[place] for row in rows]
        if header == "#" and "gpu_count" not in columns and not _is_index(cells):
            columns[place] = "gpu_count"
        elif header.lower() == "deepspeed" and all(re.search("^[0-3]?$|^-$|z|stage", cell, re.I) for cell in cells):
            columns[place] = "zero_level"
        elif not (header or columns[place]) and all(_SEQUENCE.fullmatch(cell) for cell in cells):
            columns[place] = "seq"
    _name_stages(columns, rows, headers, titles)
    precisions = [place for place, header in enumerate(headers) if header and not without_conditions(header)]
    figures = [place for place in precisions if _are_figures([row[place] for row in rows])]
    if len(figures) > 1:  # "BF16" and "FP8", which alone is a switch
        for place in figures:
            columns[place] = OF_PRECISION


def _name_stages(
    columns: list[str], rows: Sequence[Sequence[str]], headers: Sequence[str], titles: Sequence[str]
) -> None:  # fmt: skip
    """Change a column "Stage" whose cells are no levels of ZeRO, or count the rows of a table without a word of it."""
    for place, header in enumerate(headers):
        if header.lower() != "stage" or columns[place] != "zero_level":
            continue
        cells = [row[place] for row in rows]
        may_count = len(cells) > 1 and _is_index(cells)
        mentioned = re.search("zero|deepspeed", " ".join((*titles, *headers, *cells)), re.I) is not None
        if may_count and not mentioned:
            columns[place] = ""  # of a curriculum


def _is_index(cells: Sequence[str]) -> bool:
    """Whether cells count the rows from 0 or 1."""
    return any(list(cells) == [str(count + start) for count in range(len(cells))] for start in (0, 1))


_SEQUENCE = re.compile(r"\d{1,4} ?k(?: tokens)?", re.I)
"""Lengths of sequences in a column without a header."""


def _are_figures(cells: Sequence[str]) -> bool:
    """Whether the cells of a column are numbers above 1, or state that nothing was measured."""
    values = [number(cell) for cell in cells if not is_nothing(cell)]
    return bool(values) and all(value is not None and value > 1 for value in values)


def _place_of_models(cells: Sequence[str], columns: Sequence[str]) -> int | None:
    """The first unknown column whose first cell is a model or its size, such as "config"; None if there is none."""
    pairs = enumerate(zip(cells, columns, strict=False))
    return next(
        (place for place, (cell, own) in pairs
         if own in ("", "notes") and (catalogued(cell) or _SIZE.fullmatch(cell.lower()))), None,
    )  # fmt: skip


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
    """The cells of a row by column. If two headers mean the same column, the more specific header wins."""
    found: dict[str, str] = {}
    free: list[str] = []
    bad: BadCell | None = None
    for place in order:
        cell, header = cells[place], headers[place]
        column = _column_of(columns[place], cell, named)
        if column == "source" and "gpu_type" not in named and is_device(cell):
            found.setdefault("gpu_type", cell)
        if not column and header and (is_on := switch_named(cell)) is not None:
            column, cell = "notes", header if is_on else f"no {header}"
            if is_on and precision_named(header) is not None:  # "bf16": true
                column = "precision"
        free += [] if column else [cell]
        try:
            if (inside := column_inside(header)) and (both := _BESIDE.fullmatch(cell)):  # "8 (3)" below "PP (VPP)"
                found, cell = _joined(found, inside, both[2], header), both[1]
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
    """A row with blank cells filled from the words of its notes, strategy, source and unknown columns.

    Args:
        found: column -> cell.
        free: cells of unknown columns.
    """
    device, model = (stated_in_titles((found.get(column, ""),), ()) for column in ("gpu_type", "model"))
    said = {name: cell for name, cell in device.items() if name in _BESIDE_DEVICES}
    several = len(re.split(r"[,;|]| / ", found.get("model", ""))) > 2  # "Llama-2-7B, 8x A100, FSDP"
    several = several or bool(model.keys() & _BESIDE_MODELS and not catalogued(found.get("model", "")))
    beside = ("precision", "gpu_type", "gpu_count", "layers", "hidden", "heads")  # "18.4B (128 GPUs)", "(40 layers)"
    said |= {name: cell for name, cell in model.items() if name in beside or (several and name != "family")}
    if several and "model" in model:
        notes = "; ".join(filter(None, (found.get("notes", ""), found["model"])))  # "Llama-2-7B, ZeRO-2, ckpt"
        found = {**found, "model": model["model"], "notes": notes}
    words = [found.get(name, "") for name in ("notes", "layout", "source", "zero_level")]  # "FSDP + compile"
    said |= stated_in_titles(words, _READ_IN_NOTES) | stated_in_titles(free, ())
    return found | {name: cell for name, cell in said.items() if not found.get(name)}


_BESIDE = re.compile(r"([^()]*[^() ]) *\(([^()]+)\)")
"""A cell with another value in brackets."""

_WORDY = ("notes", "source", "gpu_type")
"""Columns whose cells may name the model."""

_BESIDE_DEVICES = (
    "model", "precision", "source", "recompute", "seq", "global_batch", "micro_batch", "tp", "pp", "dp", "cp", "ep",
    "vpp",
)  # fmt: skip
"""Columns that the cell of a device may state too: "8x H100, TP4 PP2, 8K context"."""

_BESIDE_MODELS = {"source", "compile", "recompute", "seq", "micro_batch"}
"""Columns whose words are no part of a model's name: "Llama-3-8B FSDP2 seq 8192"."""

_READ_IN_NOTES = ("source", "interconnect")
"""Columns that are read from notes and sources elsewhere."""


def _joined(found: dict[str, str], column: str, cell: str, header: str) -> dict[str, str]:
    """A row with one more cell.

    Raises:
        BadCell: the column already has another value, or the cell has fewer degrees than its header.
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


def _column_of(column: str, cell: str, named: Mapping[str, str]) -> str:
    """The column that a cell belongs to, given the column of its header; "" if it is unknown.

    Args:
        named: the columns that the table has, and their headers.
    """
    if not cell or (column in _COUNTS and cell.lower() in ("none", "null", "not stated")):
        return ""
    if not column:
        return "notes" if _TUNES.search(cell) else _method(cell, named)
    if column == "zero_level" and level_named(cell)[0] is None and re.match(r"pre-?train|sft|fine|long", cell, re.I):
        return "task"  # a stage of training
    if column == "gpu_type" and number(cell) is not None and not is_device(cell):  # a column "GPU" may count them
        return "gpu_count"
    if column in ("source", "gpu_count") and system_named(cell) is not None:  # "System", "Cluster"
        return "system"
    if column == "gpu_count" and not re.search(r"\d", cell) and "cluster" in named[column].lower():
        return "notes"  # a cluster without a name that is known
    if column in ("source", "gpu_count") and "gpu_type" not in named and is_device(cell):
        return "source" if column == "source" and names_software(cell) else "gpu_type"
    return column


_COUNTS = ("tp", "pp", "dp", "cp", "ep", "vpp", "seq", "global_batch", "micro_batch", "kv_heads", "gpu_count")
"""Columns of whole numbers, where "none" means not stated."""


def _method(cell: str, named: Collection[str]) -> str:
    """The column of a cell whose header is not known, as "Method": a schedule or a sharding level."""
    if "schedule" not in named and schedule_named(cell)[0] and _SCHEDULES.match(cell):
        return "schedule"
    return "zero_level" if "zero_level" not in named and _LEVELS.fullmatch(cell) else ""


_SCHEDULES = re.compile(
    r"(?:interleaved|1f1b|zb|zero[- ]?bubble|g-?pipe|dual-?pipe|v-?(?:half|min)|dapple|pipedream|chimera|hanayo)", re.I
)
_LEVELS = re.compile(r"(?:ddp|fsdp2?|hsdp|zero[- ]?[1-3]|(?:no|non|without|w/o)[- ]zero(?![- ]*bubble))\b.*", re.I)

_TUNES = re.compile(
    r"\b(q?lora|peft|freeze|inference|prefill|decode|decoding|generation|serving|dpo|ppo|grpo|rlhf|distillation)\b",
    re.I,
)
"""Words of other tasks than training all weights."""

_BATCH_TOKENS = re.compile(r"tok|\(t\)")


def _model(name: str, cell: str, header: str) -> str:
    """The name of a model, with the number of parameters from another column."""
    count = number(cell)
    if count is not None and named_parameters(cell) is None:
        header = header.replace("_", " ")
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
