"""How far off predictions are, on tables of measurements: `python -m benchmarks.accuracy TABLE.csv ...`.

Machines are those of the catalogue, made from micro-benchmarks and cited figures; nothing is fitted to these rows. The
table is printed, and written with date and versions to benchmarks/results/accuracy.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from twofold.validation import validate

RESULTS = Path(__file__).parent / "results" / "accuracy.json"


def main() -> None:
    """Validate every table, print one line per source and metric, and the interval's share over all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--out", default=str(RESULTS))
    arguments = parser.parse_args()
    found, inside, rows = [], 0.0, 0
    for table in arguments.tables:
        start = time.perf_counter()
        scores = validate(table)
        took_s = time.perf_counter() - start
        reasons: dict[str, int] = {}
        for skipped in scores.skipped:
            reasons[skipped["reason"]] = reasons.get(skipped["reason"], 0) + 1
        assumed = sorted({text for row in scores.rows for text in row["assumed"]})
        found.append(
            {"table": Path(table).name, "sources": [_named(score) for score in scores.sources], "skipped": reasons,
             "assumed": assumed}
        )  # fmt: skip
        print(f"{Path(table).name}: {len(scores.rows)} rows in {took_s:.2f} s, {len(scores.skipped)} skipped")
        for score in scores.sources:
            inside += score["within_interval"] * score["rows"]
            rows += score["rows"]
            order = "-" if score["pair_order"] is None else f"{score['pair_order']:.0%}"
            print(
                f"  {score['metric']:24s} {score['rows']:3d} rows  mean {score['mape']:6.1%}  median "
                f"{score['median_ape']:6.1%}  bias {score['bias']:+6.1%}  inside {score['within_interval']:4.0%}  "
                f"order {order}"
            )
    print(f"inside the interval, all tables: {inside / rows:.0%}")
    document = {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
        "command": "python -m benchmarks.accuracy " + " ".join(Path(table).name for table in arguments.tables),
        "within_interval": inside / rows, "tables": found,
    }  # fmt: skip
    Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")
    print(f"saved {arguments.out}", file=sys.stderr)


def _named(score: dict[str, Any]) -> dict[str, Any]:
    """A score whose source does not read as a document of this project."""
    return score | {"source": score["source"].replace(".md", "")}


if __name__ == "__main__":
    main()
