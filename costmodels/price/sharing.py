"""Max-min fair sharing of links: how fast flows proceed that need more of a link than there is.

Every flow has a limit on its rate (1 is its speed alone) and needs a share of each link that it crosses, in proportion
to its rate. All flows are raised together; a flow stops at its limit or when a link that it crosses is full, and the
others take what it leaves (progressive filling: Bertsekas and Gallager, "Data Networks", 1992, section 6.5.2). So no
link has room while a flow that needs only this link could go faster: the sharing is work-conserving.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction

__all__ = ["Claims", "max_min_rates"]

Claims = Sequence[tuple[Hashable, Fraction]]
"""(link, share of it that a flow needs to proceed at rate 1), each link once, shares above 0."""


def max_min_rates(limits: Sequence[Fraction], claims: Sequence[Claims]) -> list[Fraction]:
    """The max-min fair rates of flows, exactly.

    Args:
        limits: of each flow the highest rate, above 0.
        claims: of each flow what it needs of links; without any it proceeds at its limit.

    >>> one = Fraction(1)
    >>> a, b, c = max_min_rates([one] * 3, [(("x", one),), (("x", one), ("y", one)), (("y", 3 * one),)])
    >>> str(a), str(b), str(c)
    ('3/4', '1/4', '1/4')
    """
    rates = list(limits)
    flows_of: dict[Hashable, list[int]] = {}
    share_of: dict[Hashable, list[Fraction]] = {}
    for flow, own in enumerate(claims):
        for link, share in own:
            flows_of.setdefault(link, []).append(flow)
            share_of.setdefault(link, []).append(share)
    left = dict.fromkeys(flows_of, Fraction(1))
    load = {link: sum(shares, Fraction(0)) for link, shares in share_of.items()}
    rising = dict.fromkeys(flow for flow, own in enumerate(claims) if own)
    while rising:
        level = min(limits[flow] for flow in rising)
        full = [link for link, share in load.items() if share and left[link] < level * share]
        if full:
            level = min(left[link] / load[link] for link in full)
            stopped = dict.fromkeys(
                flow for link in full if left[link] == level * load[link] for flow in flows_of[link] if flow in rising
            )
        else:
            stopped = dict.fromkeys(flow for flow in rising if limits[flow] == level)
        for flow in stopped:
            del rising[flow]
            rates[flow] = level
            for link, share in claims[flow]:
                left[link] -= level * share
                load[link] -= share
    return rates
