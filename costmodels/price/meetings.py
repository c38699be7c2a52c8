"""How often a rank waits for others in a step: collectives that its compute does not hide.

The clock of a chip at its power limit varies within a step. Ranks that meet go on at the pace of the one that is slower
at that moment, so it matters how often they do (`costmodels.price.power.settled_MHz`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

__all__ = ["Event", "meetings"]


class Event(NamedTuple):
    """What happens in a body: compute, the issue of a collective, the wait for it.

    Args:
        kind: which of them.
        work_ps: of the compute, or of the collective that is issued.
        token: of the collective.
        members: ranks that take part in the collective that is issued.
    """

    kind: Literal["compute", "issue", "wait"]
    work_ps: int = 0
    token: str = ""
    members: int = 1


def meetings(events: Iterable[Event]) -> Counter[int]:
    """How many collectives of each number of ranks take longer than the compute between their issue and the wait for
    them, in a body.

    Collectives that another body issued are not counted.

    >>> hidden = [Event("issue", 100, "a", 8), Event("compute", 120), Event("wait", token="a")]
    >>> waited_for = [Event("issue", 100, "b", 4), Event("compute", 80), Event("wait", token="b")]
    >>> meetings([*hidden, *waited_for])
    Counter({4: 1})
    """
    found, under_way = Counter[int](), dict[str, tuple[int, int]]()
    for kind, work_ps, token, members in events:
        if kind == "compute":
            under_way = {name: (left_ps - work_ps, count) for name, (left_ps, count) in under_way.items()}
        elif kind == "issue":
            under_way[token] = work_ps, members
        else:
            left_ps, count = under_way.pop(token, (0, 1))
            if left_ps > 0:
                found[count] += 1
    return found
