"""The clock of a chip in a training step, from the power that it draws.

A chip whose mean power reaches its limit lowers its clock until it draws no more, so the clock of a step follows from
the work of that step. With r the clock relative to the highest one, dynamic power is proportional to r V^2 and the
voltage V falls with the clock: the time of compute-bound kernels is proportional to 1 / r and their power to r^g, g
between 1 (a fixed voltage) and 3; for memory-bound kernels a small share of the time depends on the clock, and their
power is proportional to r^d. A step of T seconds, in which a device's products and attention would take M and A seconds
at the peak rate, and its kernels bound by memory take B, draws in the mean

    idle_W + (r^(g - 1) (matrix_W M + attention_W A) + r^d memory_W B) / T.

`settled_MHz` finds the clock at which that is the limit; T itself grows as the clock falls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from statistics import NormalDist
from types import MappingProxyType
from typing import NamedTuple

from costmodels.machine.sections import Section, check_share
from plans.errors import TwofoldError

__all__ = ["WANDER_S", "Load", "Power", "limited_clock", "mean_W", "settled_MHz", "slower", "slowest_of"]

WANDER_S = 1.5e-3
WANDER_FALLS = 0.25
"""The mean clock over t seconds deviates by t to the power of -0.25. H200: about 6 % over 0.45 ms and 4 % over 1.6 ms,
between meetings of two and of four (`python -m benchmarks.devices.meetings --wander`); 1.6 % over steps of 0.1 s, the
spread of replayed steps of one device (benchmarks/results/peers_h200_ninth.json)."""

_LOWEST = 0.2
_FREE = 1.5
"""Of the highest clock. A step that would draw less than the limit even at this clock is slowed on no chip; one that
draws less at the highest clock only is slowed on the slowest chips."""
_HALVINGS = 40


class Power(Section, frozen=True, kw_only=True):
    """The power that a chip draws, by kind of kernel.

    Args:
        limit_W: that the mean over many kernels does not exceed.
        highest_MHz: clock of a chip below its limit.
        idle_W: of a chip that waits, at the highest clock; everything below is drawn next to it.
        matrix_W: by matrix products, at the peak rate and the highest clock.
        attention_W: likewise by attention.
        memory_W: by kernels bound by memory.
        update_W: by updates of the optimizer.
        message_W: by communication.
        peak_W: that products draw at most for as long as they last, whatever the mean is.
        exponent: exponent of the clock in the power of products and attention.
        memory_exponent: likewise of kernels bound by memory.
        memory_share: share of the time of memory-bound kernels that depends on the clock, at the highest one: alone
            they draw so little that they were measured there.
        update_share: likewise of updates.
        message_share: likewise of the bytes of communication inside a node. Its start and its steps depend on the clock
            entirely.
        chip_spread: standard deviation of the logarithm of the clock among equal chips at their limit.
        wander: standard deviation of the logarithm of the mean clock of one chip at its limit, over `WANDER_S` seconds
            against all the time.
    """

    limit_W: float
    highest_MHz: float
    idle_W: float
    matrix_W: float
    attention_W: float
    memory_W: float
    update_W: float
    peak_W: float
    exponent: float = 2.0
    memory_exponent: float = 1.0
    memory_share: float = 0.0
    update_share: float = 0.0
    message_share: float = 0.0
    message_W: float = 0.0
    chip_spread: float = 0.0
    wander: float = 0.0

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        check_share("memory_share", self.memory_share)
        check_share("update_share", self.update_share)
        check_share("message_share", self.message_share)
        if not self.idle_W < self.limit_W <= self.peak_W:
            raise TwofoldError(
                f"power: idle_W {self.idle_W:g} < limit_W {self.limit_W:g} <= peak_W {self.peak_W:g} does not hold"
            )


class Load(NamedTuple):
    """The work of one device in a step.

    Args:
        clock_MHz: at which it was priced.
        step_s: the step at that clock.
        seconds: "matrix", "attention", "memory" -> the seconds of these kernels at that clock, and of its messages
            ("message").
        energy_J: the same -> what they draw in all at the highest clock (`Cost.energy_pJ`).
        meetings: number of ranks -> how often that many wait for each other (`costmodels.price.meetings`).
    """

    clock_MHz: float
    step_s: float
    seconds: Mapping[str, float]
    energy_J: Mapping[str, float]
    meetings: Mapping[int, int] = MappingProxyType({})

    @property
    def compute_s(self) -> float:
        """The seconds of all kernels."""
        return sum(seconds for name, seconds in self.seconds.items() if name != "message")


def mean_W(power: Power, load: Load, clock_MHz: float) -> float:
    """The mean power of a step at a clock.

    >>> power = Power(limit_W=700, highest_MHz=2000, idle_W=100, matrix_W=1200, attention_W=700, memory_W=450,
    ...               update_W=400, peak_W=950)
    >>> mean_W(power, Load(2000.0, 1.0, {"matrix": 0.5}, {"matrix": 480.0}), 2000.0)
    580.0
    """
    clock, drawn_J = clock_MHz / power.highest_MHz, load.energy_J
    heat = clock ** (power.exponent - 1) * (drawn_J.get("matrix", 0.0) + drawn_J.get("attention", 0.0))
    heat += clock**power.memory_exponent * drawn_J.get("memory", 0.0)
    heat += power.message_W * load.seconds.get("message", 0.0)
    step_s = load.step_s + _later_s(power, load, clock_MHz)
    return power.idle_W + heat / step_s if step_s > 0 else power.idle_W


def _later_s(power: Power, load: Load, clock_MHz: float) -> float:
    """By how much a step is longer at a clock: compute-bound work scales with it."""
    products_s, clocks = load.seconds.get("matrix", 0.0), (load.clock_MHz, clock_MHz)
    peak_s = load.energy_J.get("matrix", 0.0) / power.matrix_W
    share = peak_s / products_s * power.highest_MHz / load.clock_MHz if products_s else 0.0
    now, then = (limited_clock(power, share, clock) for clock in clocks)
    return products_s * (now / then - 1) + load.seconds.get("attention", 0.0) * (clocks[0] / clocks[1] - 1)


def limited_clock(power: Power, share: float, clock_MHz: float) -> float:
    """The clock of products on a chip whose clock is `clock_MHz`: their own power may allow less.

    Args:
        power: of the chip.
        share: of the peak rate that they would reach at the highest clock.
        clock_MHz: of the chip.

    >>> power = Power(limit_W=700, highest_MHz=2000, idle_W=100, matrix_W=1200, attention_W=700, memory_W=450,
    ...               update_W=400, peak_W=850, exponent=2)
    >>> round(limited_clock(power, 0.9, 2000.0)), limited_clock(power, 0.9, 1500.0)
    (1667, 1500.0)
    """
    if share <= 0:
        return clock_MHz
    most = ((power.peak_W - power.idle_W) / (power.matrix_W * share)) ** (1 / power.exponent)
    return min(clock_MHz, power.highest_MHz * most)


def settled_MHz(power: Power, load: Load, num_chips: int = 1) -> float:
    """The clock at which a device that repeats a step settles, in whole MHz.

    Args:
        power: of the chip.
        load: the step.
        num_chips: that work in step, at the pace of the slowest.

    >>> power = Power(limit_W=700, highest_MHz=2000, idle_W=100, matrix_W=1200, attention_W=700, memory_W=450,
    ...               update_W=400, peak_W=950)
    >>> settled_MHz(power, Load(2000.0, 1.0, {"matrix": 0.5}, {"matrix": 480.0}))
    2000
    >>> 1400 < settled_MHz(power, Load(2000.0, 1.0, {"matrix": 1.0}, {"matrix": 960.0})) < 1700
    True
    """
    low, high = _LOWEST * power.highest_MHz, _FREE * power.highest_MHz
    if mean_W(power, load, high) <= power.limit_W:
        return power.highest_MHz
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_W(power, load, middle) <= power.limit_W else (low, middle)
    return min(power.highest_MHz, float(math.floor(low * (1 - _later(power, load, num_chips)))))


def _later(power: Power, load: Load, num_chips: int) -> float:
    """The share by which chips that wait for each other are slower than their mean.

    Chips differ, and the clock of each wanders. Those that meet often wait for the slowest of them between two
    meetings; more chips meet less often, over times in which clocks wander less.
    """
    share, fewer = 0.0, 1
    for members in sorted({num_chips, *(each for each in load.meetings if each < num_chips)}):
        between_s = load.step_s / (1 + sum(count for of, count in load.meetings.items() if of >= members))
        spread = math.hypot(power.chip_spread, power.wander * (between_s / WANDER_S) ** -WANDER_FALLS)
        share += spread * (slowest_of(members) - slowest_of(fewer))
        fewer = members
    return share


def slower(power: Power, clock_MHz: float, *, is_update: bool) -> float:
    """The factor on the time of a memory-bound kernel at a clock, relative to the highest one.

    >>> power = Power(limit_W=700, highest_MHz=2000, idle_W=100, matrix_W=1200, attention_W=700, memory_W=450,
    ...               update_W=400, peak_W=950, memory_share=0.1)
    >>> round(slower(power, 1500.0, is_update=False), 4), slower(power, 1500.0, is_update=True)
    (1.0333, 1.0)
    """
    share = power.update_share if is_update else power.memory_share
    return 1 + share * (power.highest_MHz / clock_MHz - 1)


@lru_cache(maxsize=1024)
def slowest_of(count: int) -> float:
    """By how many standard deviations the slowest of `count` equal chips is expected to be slower than their mean.

    Blom 1958, the expected largest of a normal sample: Phi^-1((count - 0.375) / (count + 0.25)).

    >>> slowest_of(1), round(slowest_of(8), 2), round(slowest_of(1024), 2)
    (0.0, 1.43, 3.23)
    """
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
