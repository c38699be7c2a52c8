"""What graphs, schedules, programs and searches are of small cases, kept in `tests/data/kept.txt`.

A line has the name of a case, some totals, and the hash of everything that it says. Other tests compare with other
software, formulas and brute force; these notice what none of them looks at. If a change is meant, write the file anew
with `python -m tests.kept`, look at which lines of it differ, and say why in the message of the commit.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from plans.layout import Layout
from plans.redistribution.pieces import TransferPieces

FILE = Path(__file__).parent / "data" / "kept.txt"
HOW = "if this is meant, write the file anew (python -m tests.kept) and look at which lines of it differ"

Case = Callable[[], str]


def hash_of(value: object) -> str:
    """Of everything that a value consists of."""
    return hashlib.sha256(_ENCODER.encode(value)).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """What a value consists of, for those that msgspec does not know."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Layout):
        return [value.device_matrix, value.alias_name, value.rank_list]
    if isinstance(value, TransferPieces):
        return [value.src_ranks, value.dst_ranks, value.num_elements]
    if isinstance(value, Mapping):
        return [[key, value[key]] for key in value]
    if isinstance(value, Iterable):
        return list(value)
    return str(value)


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)


def kept() -> dict[str, str]:
    """The kept lines, by name of the case."""
    return dict(line.split(": ", 1) for line in FILE.read_text().splitlines())


def check(name: str, case: Case) -> None:
    """Compare a case with what is kept of it.

    Raises:
        AssertionError: they differ; the message has both lines.
    """
    before, now = kept().get(name), case()
    assert before == now, f"{name}:\n  kept {before}\n  now  {now}\n{HOW}"


def _write() -> None:
    from tests import kept_numbers
    from tests.kept_cases import CASES
    from tests.kept_searches import SEARCHES

    lines = [f"{name}: {case()}" for name, case in (CASES | SEARCHES).items()]
    FILE.write_text("".join(line + "\n" for line in lines))
    print(f"{FILE}: {len(lines)} cases")
    kept_numbers.write()


if __name__ == "__main__":
    sys.exit(_write())
