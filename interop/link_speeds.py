"""Compares recorded communication with the links of a machine: each kind of call with its price and the likely cause.

If the price of a call depends mainly on the bandwidth of its slowest tier of links, the difference is explained by a
factor on that bandwidth. For short messages the difference is given in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from costmodels import Machine, price_collective, price_transfer, ranks_group
from costmodels.price.group import Group
from interop.seen_calls import SeenCall
from plans.errors import TwofoldError
from simulator.engine.link_change import LinkChange, machine_with

__all__ = ["LinkCall", "Spent", "Tier", "changes_seen", "link_calls", "spent", "tiers_of_calls"]

_PS_PER_S = 1e12

_MOST = 64.0
"""Factors on the bandwidth are looked for up to this one, and down to its inverse."""

_BOUND = 1.5
"""A call hangs on the bandwidth if half of it makes the price this many times as long."""

_EXACT = 1e-6

_EQUAL = 0.02
"""Factors on the bandwidth that are no farther from 1 are taken for none."""

_ALONE = 0.05
"""Calls that overlap with other kernels for a larger share of their time count as slowed down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCall:
    """All calls of one kind: the same collective, size and place of the group on the links.

    Args:
        call: such as "all_reduce".
        size_bytes: of the larger of a member's input and output.
        num_ranks: number of ranks of a group.
        tier: number of the slowest tier of links that it needs.
        times: how often it was seen.
        seconds: measured, the median of those that ran alone, else of all; the shortest where ranks have no trace; None
            without times.
        waited_s: that the first rank waited for the last, the median.
        beside: share of their time in which other kernels ran, the median.
        predicted_s: on the machine, alone.
        bandwidth_factor: on the tier's bandwidth that explains the difference; None where none does.
        is_short: whether it hangs on fixed times, not on bandwidth.
        total_s: of all of them and all of their ranks.
        exposed_s: the part of it next to which no other kernel ran.
        changed: factor on the predicted time by a change of links; 1 without a change.
        is_alone: whether `seconds` are of calls without other kernels next to them.
        is_whole: whether all of its ranks have a trace.
    """

    call: str
    size_bytes: int
    num_ranks: int
    tier: int
    times: int
    seconds: float | None
    waited_s: float
    beside: float
    predicted_s: float
    bandwidth_factor: float | None
    is_short: bool
    total_s: float
    exposed_s: float
    changed: float
    is_alone: bool
    is_whole: bool

    @property
    def bus_Bps(self) -> float | None:
        """Bytes a second that every rank sends in a ring, as nccl-tests defines it."""
        n = self.num_ranks
        share = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "reduce": 1.0, "transfer": 1.0}
        return None if not self.seconds else share.get(self.call, (n - 1) / n) * self.size_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """The result of all calls over one tier of links.

    Args:
        number, name: of the tier.
        times: calls with a time.
        measured_s, predicted_s: of all of them.
        bandwidth_factor: the median of the calls that hang on bandwidth; None without such calls.
        low, high: the smallest and the largest factor of a kind of call.
        short_extra_s: how much longer than predicted short messages took, the median; None without such calls.
        is_alone: False where other kernels ran next to all calls that the factor is of, so that links may be faster.
        is_whole: False where some ranks of all calls that the factor is of have no trace.
    """

    number: int
    name: str
    times: int
    measured_s: float
    predicted_s: float
    bandwidth_factor: float | None
    low: float | None
    high: float | None
    short_extra_s: float | None
    is_alone: bool
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of the mean rank in communication.

    Args:
        communication_s: in all of it.
        exposed_s: while no other kernel ran.
    """

    communication_s: float
    exposed_s: float


def spent(calls: Sequence[SeenCall], found: Sequence[LinkCall]) -> tuple[Spent, Spent]:
    """The communication time of the mean rank, as measured and with the change of links.

    Every call changes in the ratio of its prices.
    """
    num_ranks = len({rank for call in calls for rank in call.ranks})
    before, after = (
        Spent(
            communication_s=sum(link_call.total_s * factor for link_call, factor in zip(found, factors, strict=True))
            / num_ranks,
            exposed_s=sum(link_call.exposed_s * factor for link_call, factor in zip(found, factors, strict=True))
            / num_ranks,
        )
        for factors in ([1.0] * len(found), [link_call.changed for link_call in found])
    )
    return before, after


def link_calls(
    calls: Sequence[SeenCall], machine: Machine, changes: Sequence[LinkChange] = ()
) -> list[LinkCall]:  # fmt: skip
    """The kinds of calls, those that took longest in all first.

    Args:
        calls: that were seen.
        machine: whose prices they are compared with.
        changes: of whole tiers of links, whose effect is asked.

    Raises:
        TwofoldError: a machine whose links are a graph, ranks that it does not have, a change that is not of its tiers.
    """
    if machine.graph is not None:
        raise TwofoldError(f"the links of machine {machine.name!r} are a graph; name a machine with tiers of links")
    kinds: dict[tuple[str, int, int, Group], list[SeenCall]] = {}
    for each in calls:
        key = each.call, each.size_bytes, each.item_bytes, ranks_group(machine, each.ranks)
        kinds.setdefault(key, []).append(each)
    changed = machine_with(machine, changes)
    found = [_judged(own, machine, changed) for own in kinds.values()]
    return sorted(found, key=lambda each: -each.times * (each.seconds or each.predicted_s))


def tiers_of_calls(found: Sequence[LinkCall], machine: Machine) -> list[Tier]:
    """The tiers of links that were used with times, the fastest first."""
    tiers = []
    for number in sorted({link_call.tier for link_call in found if link_call.seconds is not None}):
        own = [link_call for link_call in found if link_call.tier == number and link_call.seconds is not None]
        is_whole, is_alone = max((link_call.is_whole, link_call.is_alone) for link_call in own)
        judged = [link_call for link_call in own if (link_call.is_whole, link_call.is_alone) == (is_whole, is_alone)]
        factors = [
            link_call.bandwidth_factor
            for link_call in judged
            for _ in range(link_call.times)
            if link_call.bandwidth_factor
        ]
        extra_s = [
            link_call.seconds - link_call.predicted_s
            for link_call in judged
            for _ in range(link_call.times)
            if link_call.is_short and link_call.seconds is not None
        ]
        tiers.append(Tier(
            number=number, name=machine.links[number].name, times=sum(link_call.times for link_call in own),
            measured_s=sum(link_call.times * (link_call.seconds or 0.0) for link_call in own),
            predicted_s=sum(link_call.times * link_call.predicted_s for link_call in own),
            bandwidth_factor=median(factors) if factors else None,
            low=min(factors, default=None), high=max(factors, default=None),
            short_extra_s=median(extra_s) if extra_s else None, is_whole=is_whole, is_alone=is_alone,
        ))  # fmt: skip
    return tiers


def changes_seen(tiers: Sequence[Tier]) -> list[LinkChange]:
    """Changes that make the links of a machine match the measured bandwidth of each tier.

    Tiers on which other kernels slowed all calls, or whose ranks have no trace, are left out.
    """
    return [
        LinkChange(tier=tier.name, bandwidth=tier.bandwidth_factor)
        for tier in tiers
        if tier.bandwidth_factor is not None and tier.is_whole and tier.is_alone
        and abs(tier.bandwidth_factor - 1) > _EQUAL
    ]  # fmt: skip


def _judged(own: Sequence[SeenCall], machine: Machine, changed: Machine) -> LinkCall:
    first, tier = own[0], machine.tier(own[0].ranks)
    timed = [seen_call for seen_call in own if seen_call.seconds is not None]
    is_whole = not any(seen_call.num_unseen for seen_call in own)
    alone = [seen_call for seen_call in timed if seen_call.beside <= _ALONE]
    lengths = [seen_call.seconds for seen_call in alone or timed if seen_call.seconds is not None]
    seconds = (median(lengths) if is_whole else min(lengths)) if lengths else None
    predicted_s = _price_s(first, machine)
    members = len(first.ranks)
    is_short = _price_s(first, _scaled(machine, tier, 0.5)) < _BOUND * predicted_s
    return LinkCall(
        call=first.call,
        size_bytes=first.size_bytes,
        num_ranks=members,
        tier=tier,
        times=len(own),
        seconds=seconds,
        waited_s=median([seen_call.waited_s for seen_call in timed]) if timed else 0.0,
        beside=median([seen_call.beside for seen_call in timed]) if timed else 0.0,
        is_alone=bool(alone) or not timed,
        total_s=sum(seen_call.seconds * members for seen_call in timed if seen_call.seconds is not None),
        exposed_s=sum(
            seen_call.seconds * (1 - seen_call.beside) * members for seen_call in timed if seen_call.seconds is not None
        ),
        changed=_price_s(first, changed) / predicted_s if predicted_s else 1.0,
        predicted_s=predicted_s,
        is_short=is_short,
        is_whole=is_whole,
        bandwidth_factor=None if is_short or seconds is None else _factor(first, machine, tier, seconds),
    )


def _scaled(machine: Machine, tier: int, factor: float) -> Machine:
    return machine if factor == 1 else machine_with(machine, [LinkChange(tier=tier, bandwidth=factor)])


def _price_s(call: SeenCall, machine: Machine) -> float:
    if call.call == "transfer":
        sender, receiver = call.ranks
        return price_transfer(machine, sender, receiver, call.size_bytes).work_ps / _PS_PER_S
    group = ranks_group(machine, call.ranks)
    return price_collective(machine, call.call, group, call.size_bytes, call.item_bytes).work_ps / _PS_PER_S


def _factor(call: SeenCall, machine: Machine, tier: int, seconds: float) -> float | None:
    """The factor on the bandwidth of a tier with which a call takes so long, by bisection; None beyond `_MOST`."""
    low, high = 1 / _MOST, _MOST
    if not _price_s(call, _scaled(machine, tier, high)) <= seconds <= _price_s(call, _scaled(machine, tier, low)):
        return None
    while high / low > 1 + _EXACT:
        middle = (low * high) ** 0.5
        if _price_s(call, _scaled(machine, tier, middle)) > seconds:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5
