"""The interval of a complete step, from the errors of single prices.

Prices of one class of instructions (matrix products, for example) have a common error: they share their parameters and
the chip that was measured. Different classes have separate parameters, and their errors are independent. Matrix
products and attention are an exception: they run on the same units at the same clock, so an error of the clock under
load affects both (`TOGETHER`).

If class i takes a share f_i of the step, and the logarithm of the sum of its prices has the standard deviation s_i,
then the logarithm of the step has the standard deviation sqrt(sum_ij r_ij f_i s_i f_j s_j + b^2), with r_ij = 1 for i =
j, and b the unexplained part (`Machine.interval`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from costmodels.machine.machine import SPREAD_CLASSES, Machine
from costmodels.machine.sections import Interval, check_known
from costmodels.price.instruction import PS_PER_S, Cost, compute_class, overlap_class
from costmodels.price.meetings import Event, meetings
from costmodels.price.power import Load
from costmodels.price.program import ProgramPrices
from costmodels.widths import NINETY, TOGETHER
from plans.program import GroupProgram, Instruction, Kind

__all__ = ["class_seconds", "dispatch_seconds", "price_interval", "program_load", "step_interval"]


def step_interval(
    machine: Machine, step_s: float, seconds_by_class: Mapping[str, float], unexplained: Interval | None = None,
    host_share: float = 0.0, host_later: float = 0.0,
) -> tuple[float, float]:  # fmt: skip
    """The 90 % interval of a step time, in seconds.

    Args:
        machine: whose `spreads` are the standard deviations by class, and whose `interval` is the unexplained part.
        step_s: the prediction.
        seconds_by_class: class -> its seconds on the critical path, or of the busiest rank; what another class hides
            counts less than its full length. Classes are `costmodels.machine.machine.SPREAD_CLASSES`.
        unexplained: the unexplained part of other software (`costmodels.widths.SOFTWARE`); by default the machine's.
        host_share: seconds in which the host issues the step over those in which its device does the work. The step is
            the longer of the two, and so are its edges: a slow host may bind a step whose device is predicted to, and
            behind a fast one the device does. 0: the host is a class like the others.
        host_later: logarithm of what the median host takes over the priced one.

    Raises:
        TwofoldError: an unknown class.

    >>> machine = Machine.load("h200-x8")
    >>> low, high = step_interval(machine, 1.0, {"matrix": 0.6, "collective": 0.2})
    >>> low < 1.0 < high
    True
    """
    apart = bool(host_share and machine.spreads.get("dispatch"))
    device_s = step_s - (seconds_by_class.get("dispatch", 0.0) if apart else 0.0)
    parts = {}
    for name, seconds in seconds_by_class.items():
        check_known("class of instructions", name, SPREAD_CLASSES)
        if not (apart and name == "dispatch"):
            share = min(1.0, seconds / device_s) if device_s > 0 else 0.0
            parts[name] = NINETY * share * machine.spreads.get(name, 0.0)
    squares = sum(part**2 for part in parts.values())
    for (one, first), (other, second) in itertools.combinations(parts.items(), 2):
        squares += 2 * TOGETHER.get(frozenset({one, other}), 0.0) * first * second
    rest = unexplained or machine.interval
    below = -math.sqrt(math.log(rest.low) ** 2 + squares)
    above = math.sqrt(math.log(rest.high) ** 2 + squares)
    if apart:
        device = min(0.0, -math.log(host_share))
        host = min(0.0, math.log(host_share)) + host_later, machine.spreads["dispatch"]
        below = min(0.0, _quantile_of_greater(0.05, (device, -below / NINETY), host))
        above = _quantile_of_greater(0.95, (device, above / NINETY), host)
        slow_host = host_later + NINETY * machine.spreads["dispatch"]
        # the device waits longer, too, in the phases that the host already binds
        waits_s = seconds_by_class.get("dispatch", 0.0) * math.expm1(slow_host)
        above = max(above, math.log1p(waits_s / step_s))
    return step_s * math.exp(below), step_s * math.exp(above)


def _quantile_of_greater(share: float, one: tuple[float, float], other: tuple[float, float]) -> float:
    """The value that the greater of two independent normal variables is below with a probability of `share`.

    Args:
        share: 0.05 or 0.95.
        one, other: their means and standard deviations.
    """
    (mean, deviation), (far, far_deviation) = one, other
    edge = mean + math.copysign(NINETY, share - 0.5) * deviation
    if far + 4 * far_deviation < edge:
        return edge
    low, high = edge - 1e-9, max(mean + 4 * deviation, far + 4 * far_deviation)
    while high - low > 1e-4:
        middle = 0.5 * (low + high)
        within = _normal((middle - mean) / max(deviation, 1e-9)) * _normal((middle - far) / far_deviation)
        low, high = (middle, high) if within < share else (low, middle)
    return high


def _normal(deviations: float) -> float:
    return 0.5 * (1 + math.erf(deviations / math.sqrt(2)))


def price_interval(machine: Machine, name: str, seconds: float) -> tuple[float, float]:
    """The 90 % interval of the price of one instruction, in seconds.

    Args:
        machine: whose `price_intervals` come from the errors of single measured points.
        name: its class, one of `costmodels.machine.machine.SPREAD_CLASSES`; one that was not measured has that of
        its spread.
        seconds: the price.

    Raises:
        TwofoldError: an unknown class.

    >>> low_s, high_s = price_interval(Machine.load("h200-x1"), "matrix", 1e-3)
    >>> low_s < 1e-3 < high_s
    True
    """
    check_known("class of instructions", name, SPREAD_CLASSES)
    known = machine.price_intervals.get(name)
    if known is not None:
        return seconds * known.low, seconds * known.high
    factor = math.exp(NINETY * machine.spreads.get(name, 0.0))
    return seconds / factor, seconds * factor


def class_seconds(prices: ProgramPrices) -> dict[str, float]:
    """Seconds of one step by class of instructions, on the ranks that have most of them; what overlaps counts in full.

    Only device time counts: the host's is hidden or not, which a sum cannot tell. Views and waits have none.
    """
    most: Counter[str] = Counter()
    for group in prices.program.groups:
        own: Counter[str] = Counter()
        for instruction, cost, count in prices.of(group):
            if instruction.kind is Kind.WAIT:
                continue
            if instruction.kind is Kind.COMPUTE:
                name = compute_class(instruction.call)
            else:
                name = "collective" if instruction.kind is Kind.COLLECTIVE else "transfer"
            if name != "view":
                own[name] += count * cost.work_ps
        most = max(most, own, key=lambda each: each.total())
    return {name: picoseconds / PS_PER_S for name, picoseconds in most.items()}


def program_load(prices: ProgramPrices, step_s: float) -> Load:
    """The work of the rank that computes most in a step, from which its clock follows (`costmodels.price.power`).

    Args:
        prices: of the step's program on a machine at a clock (`at_clock`).
        step_s: how long the step takes there.
    """
    at_MHz = prices.machine.compute.at_MHz
    assert at_MHz is not None
    loads = []
    for group in prices.program.groups:
        work = dict.fromkeys(("matrix", "attention", "memory", "message"), 0)
        energy = dict.fromkeys(work, 0)
        for instruction, cost, count in prices.of(group):
            if instruction.kind is Kind.COMPUTE:
                name = overlap_class(instruction.call)
            elif instruction.kind is Kind.COLLECTIVE:
                name = "message"
            else:
                continue
            work[name] += count * cost.together_ps
            energy[name] += count * cost.energy_pJ
        seconds, energy_J = ({name: each / PS_PER_S for name, each in some.items()} for some in (work, energy))
        met = Counter[int]()
        for lines, count in prices.bodies(group):
            met += Counter({members: count * each for members, each in meetings(_events(group, lines)).items()})
        loads.append(Load(at_MHz, step_s, seconds, energy_J, met))
    return max(loads, key=lambda load: load.compute_s)


def _events(group: GroupProgram, lines: Sequence[tuple[Instruction, Cost]]) -> Iterator[Event]:
    for line, cost in lines:
        if line.kind is Kind.COMPUTE:
            yield Event("compute", cost.work_ps)
        elif line.kind is Kind.COLLECTIVE:
            members = (line.mesh or group.mesh).size(line.axes)
            yield Event("issue", cost.together_ps, line.token or line.name, members)
            if line.token is None:
                yield Event("wait", token=line.name)
        elif line.kind is Kind.WAIT:
            yield Event("wait", token=str(line.waits))


def dispatch_seconds(prices: ProgramPrices, step_s: float) -> float:
    """Seconds of one step that count as the host's, for `step_interval`: all of it where issuing takes that long.

    A host that is slow by 1.64 deviations issues for h; where that is longer than the step, the step is that much
    longer, and the class "dispatch" gets the share that makes its interval reach it. The other side is computed in the
    same way.

    Args:
        prices: of the step's program on a machine whose hosts run ahead of their devices.
        step_s: the prediction.
    """
    machine, groups = prices.machine, prices.program.groups
    picoseconds = (sum(count * cost.dispatch_ps for _, cost, count in prices.of(group)) for group in groups)
    issued_s = max(picoseconds, default=0) / PS_PER_S
    reach = NINETY * machine.spreads.get("dispatch", 0.0)
    if not reach or step_s <= 0 or not machine.host_async:
        return 0.0
    return step_s * min(1.0, max(0.0, math.log(max(issued_s, 1e-30) / step_s) + reach) / reach)
