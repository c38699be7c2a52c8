"""Two runs in one row of a table: "BF16 (FP8)" next to "100 (150)"."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from interop.measurements.devices import is_device
from interop.measurements.numbers import number
from interop.measurements.precisions import precision_named

__all__ = ["NOTHING", "failure_of", "is_nothing", "is_out_of_memory", "runs_of"]

NOTHING = (
    "", "-", "--", "\u2013", "\u2014", "n/a", "na", "nan", "x", "\u2717", "\u00d7", "/", "none", "tbd", "n.a.", "\\",
)  # fmt: skip
"""Cells of a column of figures in which nothing was measured."""

_FAILED = re.compile(
    r"\W*(?:(?P<memory>(?:(?:cuda|gpu|npu) ?)?(?:oom|out[- ]of[- ]memory)|显存不足)|oor|failed|crash\w*|error)\b",
    re.I,
)
"""Cells of runs that did not finish."""


def failure_of(cell: str) -> str:
    """The words by which a cell says that a run did not finish; "" where it does not.

    >>> failure_of("OOM w/o AC"), failure_of("12.5")
    ('OOM w/o AC', '')
    """
    return cell if _FAILED.match(cell) else ""


def is_out_of_memory(cell: str) -> bool:
    """Whether a cell says that a run needed more memory than there is.

    >>> is_out_of_memory("CUDA OOM"), is_out_of_memory("failed")
    (True, False)
    """
    found = _FAILED.match(cell)
    return found is not None and found["memory"] is not None


def is_nothing(cell: str) -> bool:
    """Whether nothing was measured by a cell of a column of figures.

    >>> is_nothing("-"), is_nothing("OOM"), is_nothing("0.1")
    (True, True, False)
    """
    return cell.lower() in NOTHING or bool(failure_of(cell))


_PAIR = re.compile(r"([^()]*[^()\s]) *\(([^()]+)\)|([^/]*\S) / (\S[^/]*)")

_LABELLED = re.compile(r"([^()/]*\d[^()/]*?) *\(([^()]+)\) *[/,;] *([^()/]*\d[^()/]*?) *\(([^()]+)\)")
"""Two values, each with its condition."""


def runs_of(row: Sequence[str], figures: Collection[int]) -> Iterator[Sequence[str]]:
    """The runs of a row: two where its figures are "12.1 (11.3)" and other cells are pairs too, as "FP8-CS (FP8-MX)".

    Args:
        row: its cells.
        figures: places of its figures.

    >>> list(runs_of(["Llama (ours)", "BF16 (FP8)", "100 (150)"], {2}))
    [['Llama (ours)', 'BF16', '100'], ['Llama (ours)', 'FP8', '150']]
    """
    if not figures:
        yield row
        return
    pairs = {
        place: [part for part in found.groups() if part is not None]
        for place, cell in enumerate(row) if (found := _PAIR.fullmatch(cell))
    }  # fmt: skip
    labels = {found[2]: found[4] for cell in row if (found := _LABELLED.fullmatch(cell))}
    if len(labels) == 1 and None not in map(precision_named, (*labels, *labels.values())):
        for which in (1, 3):  # "2 (FP8-CS) / 1 (FP8-MX)"
            yield [
                (f"{found[which]} ({found[which + 1]})" if place in figures else found[which]) if found else cell
                for place, cell in enumerate(row) for found in [_LABELLED.fullmatch(cell)]
            ]  # fmt: skip
        return
    split = [place for place in pairs if place in figures or _are_alike(pairs[place])]
    if _are_pairs(row, figures, pairs) and not set(split) <= set(figures):
        for which in (0, 1):
            yield [pairs[place][which] if place in split else cell for place, cell in enumerate(row)]
    else:
        yield row


def _are_pairs(row: Sequence[str], figures: Collection[int], pairs: Mapping[int, Sequence[str]]) -> bool:
    """Whether every figure of a row is a pair of numbers."""
    filled = [place for place in figures if not is_nothing(row[place])]
    return bool(filled) and all(
        place in pairs and all(number(part) is not None and "%" not in part for part in pairs[place])
        for place in filled
    )  # fmt: skip


def _are_alike(pair: Sequence[str]) -> bool:
    """Whether a pair of cells are two values of one column: two numbers, two precisions, two devices."""
    numbers = [number(part) is not None for part in pair]
    if any(numbers):
        return all(is_one or is_nothing(part) for is_one, part in zip(numbers, pair, strict=True))
    return None not in map(precision_named, pair) or all(map(is_device, pair))
