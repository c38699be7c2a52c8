"""A table of measurements as users write them."""

import csv

from interop.measurements.tables import COLUMNS


def write_table(path, rows):
    """Writes the rows under the header and says where."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path
