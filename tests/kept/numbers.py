"""Numbers that are computed of made-up machines, kept in `tests/data/kept_numbers.json`.

Other tests say what is right, where something else can say it; these notice that a price, a forecast, a simulated step
or a fit is another one than before. If that is meant, write the file again with `python -m tests.kept`, look at which
lines of it differ, and say why in the message of the commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from tests import DATA
from tests.kept import fits, predictions

FILE = DATA / "kept_numbers.json"
CASES = {**predictions.CASES, **fits.CASES}

Numbers = Mapping[str, list[float]]


def kept() -> Mapping[str, Numbers]:
    """Case -> name of a row -> numbers, as they were written."""
    found: Mapping[str, Numbers] = json.loads(FILE.read_text())
    return found


def computed(case: str) -> Numbers:
    """The rows of a case as they are now."""
    return {name: [*map(_short, values)] for name, values in CASES[case]()}


def write() -> None:
    """Keep what is computed now; a line for each row."""
    FILE.write_text("\n".join(_lines({case: computed(case) for case in CASES})) + "\n")
    print(f"{FILE}: {len(CASES)} cases")


def _lines(results: Mapping[str, Numbers]) -> Iterator[str]:
    yield "{"
    for at, (case, rows) in enumerate(results.items()):
        yield f"{json.dumps(case)}: {{"
        for number, (name, values) in enumerate(rows.items()):
            yield f" {json.dumps(name)}: {json.dumps(values, separators=(',', ':'))}" + "," * (number + 1 < len(rows))
        yield "}" + "," * (at + 1 < len(results))
    yield "}"


def _short(value: float) -> float:
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
