"""A table of measurements as users write them."""

import csv

import pytest

from interop.measurements.tables import COLUMNS, read_table


def write_table(path, rows):
    """Writes the rows under the header and returns the path."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def assert_read(path, wanted):
    """Fails unless the table has these rows; of each row some cells are stated."""
    found = read_table(path)
    assert len(found) == len(wanted)
    for row, cells in zip(found, wanted, strict=True):
        for column, cell in cells.items():
            own = row[column]
            assert own == cell or float(own) == pytest.approx(float(cell), rel=1e-4), (column, own, cell)
