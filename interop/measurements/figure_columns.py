"""Columns of figures: what their headers and cells state besides the number, and a row for each figure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from interop.measurements.capacities import CAPACITY
from interop.measurements.cells import BAD_COLUMN, BAD_REASON, BAD_VALUE, FIGURE, OUT_OF_MEMORY, REMARK
from interop.measurements.figures import measured
from interop.measurements.grids import Grid
from interop.measurements.headers import Figure, figure_named, has_units_in_cells, without_devices
from interop.measurements.numbers import number
from interop.measurements.pairs import failure_of, is_nothing, is_out_of_memory
from interop.measurements.software import names_software
from interop.measurements.titles import CONDITIONS, stated_in_titles, without_conditions

__all__ = ["OF_PRECISION", "FigureColumn", "figures_of", "rows_of_figures"]

OF_PRECISION = "figures of a precision"
"""Column of figures whose header is the name of a precision. No header has this name: the cells decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureColumn:
    """A column of figures: position, header, metric (None: stated in its cells), and cells that its header states."""

    place: int
    header: str
    figure: Figure | None
    stated: Mapping[str, str] = field(default_factory=dict)


def figures_of(grid: Grid, columns: Sequence[str]) -> list[FigureColumn]:
    """The columns of figures: those whose headers name one, and of a figure that a title or their cells name those of
    a precision and, where no header names a figure, those whose headers state a device or the like."""
    found = []
    for place, (header, above) in enumerate(zip(grid.headers, grid.above, strict=True)):
        column = None if columns[place] == CAPACITY else _figure_of(place, header, columns[place])
        if column is None or (column.figure is not None and column.figure.tokens == 0 and "tokens" not in columns):
            continue
        stated = {**stated_in_titles((above,), ()), **column.stated} if above else column.stated
        found.append(replace(column, stated=stated))
    header, figure = _figure_of_titles(grid.titles)
    by_condition = [
        FigureColumn(place=place, header=header or name, figure=figure, stated=stated)
        for place, name in enumerate(grid.headers)
        if columns[place] == OF_PRECISION or not (columns[place] or found)
        if (stated := _condition(name))
    ]
    return [*_on_one_device(found), *by_condition]


def _condition(header: str) -> dict[str, str]:
    """The condition that the header of figures states where a title names them: a device, a sequence ("32K")."""
    length = re.fullmatch(r"(\d{1,4} ?k)(?: tokens)?", header, re.I)
    if length:
        return {"seq": length.group(1).lower()}
    stated = stated_in_titles((header,), ())
    return stated or ({"zero_level": header} if _LEVEL.fullmatch(f"{header} ") else {})


def _figure_of_titles(titles: Sequence[str]) -> tuple[str, Figure | None]:
    """The words of a title that name a figure, and the figure; None if no title names one."""
    clauses = (
        clause for title in titles for clause in re.split(r"[.:;,](?:\s|$)|\s[-\u2013\u2014]\s", title.strip("* #"))
    )
    starts = (
        clause[:end].strip()
        for clause in clauses
        for end in (len(clause), *(found.start() for found in _TITLE_END.finditer(clause)))
    )
    return next(((words, own) for words in starts if (own := figure_named(words))), ("", None))


def _on_one_device(figures: Sequence[FigureColumn]) -> list[FigureColumn]:
    """Figures of the device that the header of one of them states, where no header states another one."""
    devices = {
        each.stated["gpu_type"].lower(): each.stated["gpu_type"] for each in figures if "gpu_type" in each.stated
    }
    if len(devices) != 1:
        return list(figures)
    device = {"gpu_type": next(iter(devices.values()))}
    return [
        each if _OTHERS.search(each.header) else replace(each, stated={**device, **each.stated}) for each in figures
    ]


_REFERENCE = re.compile(r"\u53c2\u8003|\bref(?:erence)?\b", re.I)
"""Headers of figures of other devices, which their tables do not state."""

_OTHERS = re.compile(rf"{_REFERENCE.pattern}|\bbaseline\b", re.I)
"""Headers of figures of other devices or software, to compare with."""


_NPU = "NPU"
"""An Ascend device whose name is not stated."""

_OF_NPUS = re.compile(r"tok\w*/s(?:ec)?/p\b|tok\w*/p/s", re.I)
"""Rates a device as the cards of MindFormers and MindSpeed write them; Ascend devices are meant."""


_TITLE_END = re.compile(r"\b(?:of|for|on|with|in|by|vs|versus)\b|[:;,]|\((?!m?s\))")
"""Where the name of a figure at the beginning of a title may end."""


def _figure_of(place: int, header: str, column: str) -> FigureColumn | None:
    bare, devices = without_devices(header)
    if devices and (figure := figure_named(bare)) is not None:
        return FigureColumn(place=place, header=bare, figure=figure, stated={"gpu_count": devices})
    figure = figure_named(header)
    if figure is not None or (has_units_in_cells(header) and not column):
        return FigureColumn(place=place, header=header, figure=figure, stated=_stated_in_header(header, figure))
    bare = _without_software(_LEVEL.sub("", without_conditions(header)))
    if not column and bare != header and (figure := figure_named(bare)) is not None:
        return FigureColumn(place=place, header=bare, figure=figure, stated=_stated_in_header(header, figure))
    return None


_LEVEL = re.compile(r"(?:zero(?:[- ]?[0-3]|\+\+)|hsdp|ddp)\s+", re.I)
"""A sharding level in front of a figure's name: "ZeRO-3 TFLOPs"."""


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
    if level := _LEVEL.match(header):
        stated["zero_level"] = level.group().strip()
    if re.match(r"npu\b(?! *(?:memory|mem|hbm))", header, re.I) or (
        _OF_NPUS.search(header) and not _OTHERS.search(header)
    ):
        stated.setdefault("gpu_type", _NPU)
    if figure is not None and figure.metric == "mfu_percent":
        stated.pop("precision", None)
    return stated


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


def rows_of_figures(
    made: Mapping[str, str], row: Sequence[str], figures: Sequence[FigureColumn]
) -> Iterator[dict[str, str]]:
    """A row for each figure of a row of the table and each run out of memory, or one that says that it has none."""
    cells = [row[figure.place] for figure in figures]
    conditional = [figure for figure in figures if figure.stated and is_out_of_memory(row[figure.place])]  # "mbs 4"
    for figure in conditional:
        yield _without_figure({**made, **figure.stated}, figure.header, row[figure.place])
    if all(map(is_nothing, cells)) and not conditional:
        yield _without_figure(made, "value", _failure([*cells, made.get("notes", "")]))
    if not made.get("gpu_type") and (device := _of_its_peak(cells, figures)):
        made = {**made, "gpu_type": device, REMARK: f"device not stated: {device}, by the peak that its share is of"}
    has_own = not all(_REFERENCE.search(figure.header) for figure in figures)
    for figure in figures:
        if has_own and _REFERENCE.search(figure.header) and not is_nothing(row[figure.place]):
            reason = f"{figure.header} is of another device, which the row does not state"
            yield {**made, BAD_COLUMN: figure.header, BAD_VALUE: row[figure.place], BAD_REASON: reason}
        elif not is_nothing(row[figure.place]):
            meaning = figure.figure or figure_named(made.get("unit", ""))
            cell, stated = _conditioned(row[figure.place], figure.stated)
            if stated.get("gpu_type") == _NPU and made.get("gpu_type"):  # which the row names better
                stated.pop("gpu_type")
            own = measured({**made, **stated}, figure.header, cell, meaning)
            own.pop("unit", None)
            yield own | {FIGURE: repr((figure.place, cells))}


_PEAKS = {"V100": 125, "A100": 312, "H100": 989, "B200": 2250, "GB200": 2500, "MI300X": 1307.4}
"""TFLOP/s of 16-bit products (data sheets) by which a device is known that a table does not name."""

_NEAR = 0.03
"""Largest relative error of a peak that follows from a rate and its share, both rounded."""


def _of_its_peak(cells: Sequence[str], figures: Sequence[FigureColumn]) -> str:
    """The device of a row with a rate in TFLOP/s and its share of the peak; "" where they give none.

    >>> figures = figures_of(Grid(headers=["TFLOP/s/GPU", "MFU"], above=["", ""], rows=iter(())), ["", ""])
    >>> _of_its_peak(["137", "44%"], figures)
    'A100'
    """
    found: dict[str, float] = {}
    for cell, column in zip(cells, figures, strict=True):
        own, value = column.figure, number(cell)
        if own is not None and not own.of_all and value and own.metric in ("tflops_per_gpu", "mfu_percent"):
            found.setdefault(own.metric, value * own.factor)
    share = found.get("mfu_percent", 0)
    peak = found.get("tflops_per_gpu", 0) / (share / 100 if share > 1 else share) if share else 0
    return next((device for device, own in _PEAKS.items() if abs(peak / own - 1) < _NEAR), "")


def _without_figure(made: Mapping[str, str], column: str, failed: str) -> dict[str, str]:
    """A row in which nothing was measured, with the words that say why, if any."""
    reason = f"nothing was measured: {failed!r}" if failed else "it has no figure"
    memory = {OUT_OF_MEMORY: failed} if is_out_of_memory(failed) else {}
    return {**made, BAD_COLUMN: column, BAD_VALUE: failed, BAD_REASON: reason, **memory}


def _failure(cells: Sequence[str]) -> str:
    """The cell that explains why a row has no figure; "" if nothing explains it."""
    return next(filter(None, map(failure_of, cells)), "")
