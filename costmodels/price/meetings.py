"""How often a rank waits for others in a step: collectives that its compute does not hide.

The clock of a chip at its power limit varies within a step. Ranks that meet go on at the pace of the one that is slower
at that moment, so it matters how often they do (`costmodels.price.power.settled_MHz`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = ["Event", "num_meetings"]


class Event(NamedTuple):
    """What happens in a body: compute, the issue of a collective, the wait for it.

    Args:
        kind: which of them.
        work_ps: of the compute, or of the collective that is issued.
        token: of the collective.
    """

    kind: Literal["compute", "issue", "wait"]
    work_ps: int = 0
    token: str = ""


def num_meetings(events: Iterable[Event]) -> int:
    """The collectives of a body that take longer than the compute between their issue and the wait for them.

    Collectives that another body issued are not counted.

    >>> hidden = [Event("issue", 100, "a"), Event("compute", 120), Event("wait", token="a")]
    >>> waited_for = [Event("issue", 100, "b"), Event("compute", 80), Event("wait", token="b")]
    >>> num_meetings([*hidden, *waited_for])
    1
    """
    found, left_ps = 0, dict[str, int]()
    for kind, work_ps, token in events:
        if kind == "compute":
            left_ps = {name: left - work_ps for name, left in left_ps.items()}
        elif kind == "issue":
            left_ps[token] = work_ps
        else:
            found += left_ps.pop(token, 0) > 0
    return found
