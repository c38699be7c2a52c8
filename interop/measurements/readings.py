"""What a row leaves open: the cells that somebody could have filled in otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from interop.measurements.cells import ZERO_BUBBLE, Cells, Skip
from interop.measurements.rows import Case

__all__ = ["Filling", "needed_fillings", "other_fillings"]

Filling = Mapping[str, str]
"""Column -> what a blank cell of it is read as."""

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_VIRTUAL = (2, 3, 4, 6, 8)
_MOST_READINGS = 4


def needed_fillings(row: Mapping[str, str]) -> list[Filling]:
    """The fillings of cells without which a row cannot be priced; one empty filling where none is missing.

    The micro-batch where it is blank and the batch is not one sample a replica; the chunks of a stage where the
    schedule is interleaved and they are blank.

    >>> needed_fillings({"global_batch": "8", "dp": "2", "gpu_count": "2"})
    [{'micro_batch': '1'}, {'micro_batch': '2'}, {'micro_batch': '4'}]
    """
    cells = Cells(row)
    found: list[Filling] = [{}]
    if not cells.text("micro_batch") and (samples := _samples_of_a_replica(cells)) > 1:
        sizes = [size for size in _MICRO_BATCHES if samples % size == 0][:_MOST_READINGS]
        found = [{"micro_batch": str(size)} for size in sizes]
    if not cells.text("vpp") and cells.plain("schedule").startswith(("interleaved", "1f1bi", "vp")):
        stages, layers = _count(cells, "pp"), _count(cells, "layers")
        counts = [each for each in _VIRTUAL if stages and layers % (stages * each) == 0][:_MOST_READINGS]
        if counts:
            found = [{**each, "vpp": str(count)} for each in found for count in counts]
    return found


def other_fillings(row: Mapping[str, str], case: Case, *, stack_is_given: bool) -> Iterator[Filling]:
    """Other fillings of the cells that `case` assumes, one at a time.

    Args:
        row: as it was read.
        case: made of it.
        stack_is_given: whether the caller says which software ran it.
    """
    cells, degrees = Cells(row), case.degrees
    if ZERO_BUBBLE in cells.words("source"):  # its script states what its tables leave blank
        return
    for column, values in _OPEN.items():
        if cells.text(column):
            continue
        for value in values(case):
            yield {column: value}
    torch = case.stack.startswith("torch")
    if not stack_is_given and torch and not cells.text("compile") and not case.stack.endswith("-compile"):
        yield {"compile": "y"}
    if not cells.text("vpp") and not cells.text("schedule") and degrees.pp > 1:
        if case.config.num_layers % (2 * degrees.pp) == 0:
            yield {"schedule": "interleaved", "vpp": "2"}


def _recompute(case: Case) -> tuple[str, ...]:
    return tuple(mode for mode in ("none", "selective", "full") if mode != case.degrees.recompute)


def _sequence_parallel(case: Case) -> tuple[str, ...]:
    if case.degrees.tp == 1:
        return ()
    return ("n",) if case.degrees.sequence_parallel else ("y",)


def _level(case: Case) -> tuple[str, ...]:
    if case.degrees.dp == 1:
        return ()
    usual = (0, 2, 3) if case.stack.startswith("torch") else (0, 1)
    return tuple(str(level) for level in usual if level != case.degrees.optimizer.parallel_level)


_OPEN: Mapping[str, Callable[[Case], tuple[str, ...]]] = {
    "recompute": _recompute, "sequence_parallel": _sequence_parallel, "zero_level": _level,
}  # fmt: skip
"""Column -> what else a blank cell could mean."""


def _samples_of_a_replica(cells: Cells) -> int:
    """Of one step; 0 where that is not known."""
    batch, ways = _count(cells, "global_batch"), _count(cells, "dp")
    if not ways:
        split = (_count(cells, "tp") or 1) * (_count(cells, "pp") or 1) * (_count(cells, "cp") or 1)
        ways = _count(cells, "gpu_count") // split
    return batch // ways if ways and batch % ways == 0 else 0


def _count(cells: Cells, name: str) -> int:
    """A cell's number; 0 where it is blank or none."""
    try:
        return cells.count(name, 0)
    except Skip:
        return 0
