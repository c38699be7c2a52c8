"""What graphs, schedules, programs and searches are of small cases, kept in `tests/data/kept.txt`; and what captured
modules become, in `kept_captures.txt`.

A line has the name of a case, some totals, and the hash of everything that it says. Other tests compare with other
software, formulas and brute force; these notice what none of them looks at. If a change is meant, write the file anew
with `python -m tests.kept` (`python -m tests.kept captures`), look at which lines of it differ, and say why in the
message of the commit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from plans.layout import Layout
from plans.redistribution.pieces import TransferPieces
from tests import DATA

FOLDER = DATA
HOW = "if this is meant, write the file anew (python -m tests.kept) and look at which lines of it differ"

Case = Callable[[], str]


def hash_of(value: object) -> str:
    """Of everything that a value consists of; numbers to nine digits, so that other versions of Python, numpy and
    libm agree."""
    text = _FRACTION.sub(lambda found: b"%.9g" % float(found[0]), _ENCODER.encode(value))
    return hashlib.sha256(text).hexdigest()[:12]


_FRACTION = re.compile(rb"-?\d+(?:\.\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+)")
"""A number in JSON that is not whole."""


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


def kept(what: str = "kept") -> dict[str, str]:
    """The kept lines, by name of the case."""
    return dict(line.split(": ", 1) for line in (FOLDER / f"{what}.txt").read_text().splitlines())


def check(name: str, now: str, what: str = "kept") -> None:
    """Compare the line of a case with what is kept of it.

    Raises:
        AssertionError: they differ; the message has both lines.
    """
    before, how = kept(what).get(name), HOW.replace("kept", what.replace("_", " "))
    assert before == now, f"{name}:\n  kept {before}\n  now  {now}\n{how}"
