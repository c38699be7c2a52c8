"""How long a large table takes: `python -m benchmarks.validate_speed TABLE.csv ... [--rows 100000]`.

Rows are drawn from the tables, each with a batch of its own and a value of its own, so that many configurations and no
duplicates are there. Seconds are processor time of one process, with the reading of the table.
"""

from __future__ import annotations

import argparse
import csv
import random
import resource
import tempfile
import time
from pathlib import Path

from interop.measurements.scores import validate
from interop.measurements.tables import COLUMNS, read_table

BATCHES = (1, 2, 4, 8)


def main() -> None:
    """Print rows, seconds and the most memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    rng, known = random.Random(2026), [row for table in options.tables for row in read_table(table)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            writer.writeheader()
            for _ in range(options.rows):
                row = rng.choice(known)
                batch = int(row.get("global_batch") or 1) * rng.choice(BATCHES)
                value = float(row["value"]) * rng.uniform(0.5, 1.0)
                writer.writerow({**row, "global_batch": str(batch), "value": f"{value:.8g}"})
        begun = time.process_time()
        found = validate(path)
        seconds = time.process_time() - begun
    most_MiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{options.rows:,} rows, {len(found.rows):,} predicted, {len(found.skipped):,} skipped: {seconds:.1f} s of "
        f"processor time, {most_MiB:.0f} MiB"
    )


if __name__ == "__main__":
    main()
