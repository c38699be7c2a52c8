"""Max-min fair sharing of links: how fast flows proceed that need more of a link than there is.

Every flow has a limit on its rate (1 is its speed alone) and needs a share of each link that it crosses, in proportion
to its rate. All flows are raised together; a flow stops at its limit or when a link that it crosses is full, and the
others take what it leaves (progressive filling: Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2). So no
link has room while a flow that needs only this link could go faster: the sharing is work-conserving.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from operator import add
from typing import TypeVar

__all__ = ["Claims", "claims_of", "max_min_rates"]

Claims = Sequence[tuple[Hashable, Fraction]]
"""(link, share of it that a flow needs to proceed at rate 1), each link once, shares above 0."""

Number = TypeVar("Number", Fraction, float)

_PARTS = 2**40


def claims_of(needed: Mapping[Hashable, int], work_ps: int) -> Claims:
    """The shares of links that a communication claims, which takes `work_ps` alone and fills each link for some time.

    At most one of each: that a communication alone is slower than its link is a matter of its price. Shares are whole
    parts of 2**-40, less than a picosecond in a second off, so that they are added up quickly.
    """
    shares = ((link, min(_PARTS, (own_ps * _PARTS + work_ps // 2) // work_ps)) for link, own_ps in needed.items())
    return tuple((link, Fraction(parts, _PARTS)) for link, parts in shares if parts)


def max_min_rates(limits: Sequence[Number], claims: Sequence[Sequence[tuple[Hashable, Number]]]) -> list[Number]:
    """The max-min fair rates of flows: exact in fractions, quicker in floating-point numbers.

    Args:
        limits: of each flow the highest rate, above 0.
        claims: for each flow its need of links; without any it proceeds at its limit.

    >>> one = Fraction(1)
    >>> a, b, c = max_min_rates([one] * 3, [(("x", one),), (("x", one), ("y", one)), (("y", 3 * one),)])
    >>> str(a), str(b), str(c)
    ('3/4', '1/4', '1/4')
    """
    rates = list(limits)
    flows_of: dict[Hashable, dict[int, Number]] = {}
    for flow, own in enumerate(claims):
        for link, share in own:
            flows_of.setdefault(link, {})[flow] = share
    left: dict[Hashable, Number] = {link: type(limits[0])(1) for link in flows_of}
    load: dict[Hashable, Number] = {link: reduce(add, shares.values()) for link, shares in flows_of.items()}
    count = {link: len(shares) for link, shares in flows_of.items()}
    rising = dict.fromkeys(flow for flow, own in enumerate(claims) if own)
    while rising:
        level = min(limits[flow] for flow in rising)
        full = {link: left[link] / share for link, share in load.items() if left[link] < level * share}
        if full:
            level = min(full.values())
            stopped = dict.fromkeys(
                flow for link, reached in full.items() if reached == level for flow in flows_of[link] if flow in rising
            )
        else:
            stopped = dict.fromkeys(flow for flow in rising if limits[flow] == level)
        for flow in stopped:
            del rising[flow]
            rates[flow] = level
            for link, share in claims[flow]:
                left[link] -= level * share
                load[link] -= share
                count[link] -= 1
                if not count[link]:
                    del load[link]
    return rates
