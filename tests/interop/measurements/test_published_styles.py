"""Tables in the styles of published ones, in data/published_styles.txt, with the runs that their rows describe.

The figures are made up. A line that begins with ">" describes one run of the table above it: the row, layers x width,
the batch in sequences / micro-batch x length, degrees, recomputation, sharding, machine and software, and the figures.
"""

from __future__ import annotations

import contextlib
import random
import re

import pytest

from interop.measurements.cells import ROW, Skip
from interop.measurements.readings import needed_fillings
from interop.measurements.rows import case_of
from interop.measurements.tables import rows_of
from interop.measurements.validation import validate
from plans.errors import TwofoldError
from tests import DATA

SECTIONS = re.split(r"^=== (.+)\n", (DATA / "published_styles.txt").read_text(), flags=re.M)
TABLES = dict(zip(SECTIONS[1::2], SECTIONS[2::2], strict=True))


def described(row):
    """The configuration of a row in words, and its figure; the reason where it is skipped."""
    fillings = needed_fillings(row)
    try:
        case = case_of({**row, **fillings[(len(fillings) - 1) // 2]}, int(row[ROW]))
    except (Skip, TwofoldError) as error:
        return f"{row[ROW]} skipped: {getattr(error, 'column', '') or error}", ""
    config, degrees = case.config, case.degrees
    experts = f" {config.experts.num_experts} experts" if config.experts else ""
    ways = " ".join(
        f"{name}{size}" for name, size in (
            ("tp", degrees.tp), ("pp", degrees.pp), ("dp", degrees.dp), ("cp", degrees.cp), ("ep", degrees.ep),
            ("vpp", degrees.virtual),
        ) if size > 1 or name in ("tp", "pp", "dp")
    )  # fmt: skip
    schedule = f" {degrees.schedule}" if degrees.pp > 1 else ""
    again = f"{degrees.recompute} {degrees.recompute_layers or ''}".strip()
    words = (
        f"{row[ROW]} {config.num_layers} x {config.hidden}{experts}, {degrees.global_batch}/{degrees.micro_batch} x "
        f"{config.seq}, {ways}{schedule}, {again}, zero {degrees.optimizer.parallel_level}, "
        f"{case.machine}, {case.stack}"
    )
    return words, f"{case.metric} {case.value:.5g}"


def write(folder, name):
    """Writes a table without the lines about its runs, and returns its path and those lines."""
    lines = TABLES[name].splitlines()
    (folder / name).write_text("\n".join(line for line in lines if not line.startswith("> ")))
    return folder / name, [line[2:] for line in lines if line.startswith("> ")]


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_understood(tmp_path, name):
    path, wanted = write(tmp_path, name)
    found = {}
    for words, figure in map(described, rows_of(path)):
        found.setdefault(words, []).extend([figure] if figure else [])
    assert [f"{words}{' -> ' if own else ''}{', '.join(own)}" for words, own in found.items()] == wanted


@pytest.mark.parametrize("name", list(TABLES)[2::8])
def test_predictions_are_plausible(tmp_path, name):
    """A share of the peak that training runs reach; 65 % is the most for the tables' own figures."""
    path, wanted = write(tmp_path, name)
    scores = validate(path)
    assert len({row["row"] for row in scores.skipped}) >= sum("skipped" in line for line in wanted)
    for row in scores.rows:
        assert row["low"] <= row["predicted"] <= row["high"] and 0.1 < row["mfu"] < 0.75, row


ODD = (
    "", "-1", "0", "1e400", "nan", "1/0", "8x8x", "(", "\u00bd", "8 (8)", "12 (13)", "FP8 (BF16)", "0-0", "zero-9",
    "every 0", "v=0", "HSDP (0x0)", "0 nodes x 0", "0x A100", "4K tokens", "0x 0 Gb/s", "0 GPUs per node", "OOM",
)  # fmt: skip


def test_odd_cells_end_no_table(tmp_path):
    """One cell in each table is odd: its rows are read or skipped with a reason, or the table is refused."""
    draw = random.Random(14)
    for name in TABLES:
        path, _ = write(tmp_path, name)
        lines = path.read_text().splitlines()
        place = draw.randrange(len(lines))
        separator = max(",;|\t&", key=lines[place].count)
        cells = lines[place].split(separator)
        cells[draw.randrange(len(cells))] = draw.choice(ODD)
        path.write_text("\n".join([*lines[:place], separator.join(cells), *lines[place + 1 :]]))
        with contextlib.suppress(TwofoldError):
            assert all(words for words, _ in map(described, rows_of(path)))
