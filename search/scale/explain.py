"""Why the best is the best: what its neighbours cost, and what would have to give where nothing fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from costmodels import Machine
from plans.errors import TwofoldError
from search.scale.branch import Branching
from search.scale.costs import Inner
from search.scale.found import Found
from search.scale.problem import Pins, Problem
from search.scale.space import (
    Shape,
    divisors,
    levels,
    meshes,
    micro_batches,
    recomputes,
    schedule_of,
    sequence_parallels,
    shapes,
    spreads,
)
from simulator.scale.case import is_split

__all__ = ["Neighbour", "Relaxation", "least_memory_bytes", "neighbours", "relaxations"]

_LEAN = ("1f1b", "v_half", "v_min")
"""Schedules that keep the fewest activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """The best with one degree changed; the layers are spread anew.

    Args:
        change: what is different, in words.
        found: its forecast; None where it cannot be.
        reason: why it lost.
        extra_s: seconds that it takes longer; None where it cannot be or does not fit.
    """

    change: str
    found: Found | None
    reason: str
    extra_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """A change of the question under which something fits."""

    what: str
    value: Any
    text: str


# ------------------------------------------------------------------- neighbours


def neighbours(branching: Branching, best: Found) -> tuple[Neighbour, ...]:
    """One degree of the best changed at a time, the least loss first; then what cannot be."""
    results = [_neighbour(branching, best, change, pins) for change, pins in _changes(branching.problem, best)]
    return tuple(sorted(results, key=lambda each: (each.extra_s is None, each.extra_s or 0.0, each.change)))


def _changes(problem: Problem, best: Found) -> Iterator[tuple[str, Pins]]:
    degrees, count = best.degrees, problem.num_devices
    base = Pins(
        dp=degrees.dp, tp=degrees.tp, pp=degrees.pp, cp=degrees.cp, ep=degrees.ep, micro_batch=degrees.micro_batch,
        schedule=degrees.schedule, virtual=degrees.virtual, recompute=degrees.recompute,
        zero=degrees.optimizer.parallel_level, sequence_parallel=degrees.sequence_parallel,
    )  # fmt: skip
    fixed = problem.pins.given
    for name in ("tp", "cp", "pp"):
        now = getattr(degrees, name)
        for value in _beside(now, divisors(count)):
            for other in ("dp", "tp", "pp", "cp"):
                # what the changed degree takes or gives comes from another one
                have = getattr(degrees, other)
                if other == name or {name, other} & set(fixed) or have * now % value:
                    continue
                if other != "dp" and value < now:
                    continue  # told from the other side
                given: dict[str, Any] = {name: value, other: have * now // value}
                given["sequence_parallel"] = degrees.sequence_parallel if given.get("tp", degrees.tp) > 1 else False
                if name == "pp" or other == "pp":
                    pipelined = given.get("pp", degrees.pp) > 1
                    plain = pipelined and degrees.pp > 1
                    given |= {} if plain else {"schedule": "1f1b", "virtual": 1}
                yield (
                    f"{name} {now} -> {value}, {other} {have} -> {have * now // value}", replace(base, **given)
                )  # fmt: skip
    experts = problem.config.experts
    if experts is not None and "ep" not in fixed:
        for value in _beside(degrees.ep, divisors(math.gcd(degrees.dp, experts.num_experts))):
            yield f"ep {degrees.ep} -> {value}", replace(base, ep=value)
    each = problem.global_batch // degrees.dp
    for value in _beside(degrees.micro_batch, divisors(each)):
        if "micro_batch" not in fixed:
            yield f"micro-batch {degrees.micro_batch} -> {value}", replace(base, micro_batch=value)
    for shape in shapes(problem, degrees.pp):
        if (shape.schedule, shape.virtual) != (degrees.schedule, degrees.virtual):
            yield (
                f"{Shape(degrees.schedule, degrees.virtual)} -> {shape}",
                replace(base, schedule=shape.schedule, virtual=shape.virtual),
            )
    for mode in recomputes(problem):
        if mode != degrees.recompute:
            yield f"recompute {degrees.recompute} -> {mode}", replace(base, recompute=mode)
    for level in (0, 1, 2, 3) if problem.pins.zero is None else ():
        if level != degrees.optimizer.parallel_level:
            yield f"optimizer level {degrees.optimizer.parallel_level} -> {level}", replace(base, zero=level)
    if degrees.tp > 1 and problem.pins.sequence_parallel is None:
        yield (
            "without sequence parallel" if degrees.sequence_parallel else "with sequence parallel",
            replace(base, sequence_parallel=not degrees.sequence_parallel),
        )
    if degrees.layers is not None and problem.pins.layers is None:
        chunks = len(degrees.layers)
        whole, rest = divmod(sum(degrees.layers), chunks)
        even = tuple(whole + (chunk < rest) for chunk in range(chunks))
        yield "layers spread evenly", replace(base, layers=even)


def _beside(now: int, values: tuple[int, ...]) -> list[int]:
    """The next smaller and the next larger."""
    smaller, larger = [each for each in values if each < now], [each for each in values if each > now]
    return smaller[-1:] + larger[:1]


def _neighbour(branching: Branching, best: Found, change: str, pins: Pins) -> Neighbour:
    try:
        part = branching.narrowed(pins)
        part.run()
    except TwofoldError as error:
        return Neighbour(change=change, found=None, reason=str(error), extra_s=None)
    if part.found:
        found = part.found[0]
        extra = found.forecast.step_s - best.forecast.step_s
        return Neighbour(change=change, found=found, reason=_difference(best, found), extra_s=extra)
    memory = [each.excess_bytes or 0 for each in part.refused if each.reason == "memory"]
    if memory:
        reason = f"does not fit: {min(memory) / 2**30:.2f} GiB too much"
    else:
        reason = "; ".join(dict.fromkeys(each.reason for each in part.refused)) or "cannot be made"
    return Neighbour(change=change, found=None, reason=reason, extra_s=None)


def _difference(best: Found, other: Found) -> str:
    """Which part of the step grew most."""
    parts = {
        name: composition(other)[name] - seconds for name, seconds in composition(best).items()
    }  # fmt: skip
    name = max(sorted(parts), key=lambda each: parts[each])
    return f"{name} {parts[name]:+.3g} s" if parts[name] > 0 else "equal"


def composition(found: Found) -> dict[str, float]:
    """Seconds of the mean rank: compute, communication that is not hidden, and waiting for other stages."""
    seen = found.forecast
    compute = seen.step_s * (1.0 - seen.bubble_fraction)
    return {
        "compute": compute,
        "exposed communication": seen.exposed_comm_s,
        "waiting": max(0.0, seen.step_s - compute - seen.exposed_comm_s),
    }


# ------------------------------------------------------------------- nothing fits


def least_memory_bytes(problem: Problem) -> tuple[int, str] | None:
    """The least peak of any configuration, and its words; None where there is none at all.

    Only what keeps least is looked at: the smallest micro-batch, most recomputing, the leanest schedules.
    """
    branching = Branching(problem=problem)
    best: tuple[int, str] | None = None
    for mesh in meshes(problem)[0]:
        sizes, sps = micro_batches(problem, mesh), sequence_parallels(problem, mesh)
        if not sizes or not sps:
            continue
        tried = shapes(problem, mesh.pp)
        for shape in [each for each in tried if each.schedule in _LEAN] or tried:
            schedule = schedule_of(shape, mesh.pp, problem.global_batch // (mesh.dp * sizes[0]))
            choices = () if schedule is None else spreads(problem, schedule.num_stages)
            if schedule is None or not choices:
                continue
            inner = Inner(mesh.tp, mesh.cp, sps[0], sizes[0], recomputes(problem)[-1], is_split(schedule), mesh.ep)
            for level in levels(problem, mesh)[-2:]:
                peaks = branching.footing.peaks_bytes(inner, schedule, choices, dp=mesh.dp, level=level)
                least = int(np.min(peaks))
                if best is None or least < best[0]:
                    best = (
                        least,
                        (
                            f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp}, {shape}, recompute "
                            f"{inner.recompute}, optimizer level {level}"
                        ),
                    )
    return best


def relaxations(problem: Problem) -> list[Relaxation]:
    """The smallest changes under which something would fit, one kind at a time."""
    found: list[Relaxation] = []
    least = least_memory_bytes(problem)
    if least is not None and least[0] > problem.limit_bytes:
        found.append(
            Relaxation(
                what="memory", value=least[0], text=f"{least[0] / 2**30:.2f} GiB per device would do ({least[1]})"
            )
        )
    for pin in problem.pins.given:
        rest = Pins(**{each.name: getattr(problem.pins, each.name) for each in fields(Pins) if each.name != pin})
        if _fits(problem, pins=rest):
            found.append(
                Relaxation(what=pin, value=None, text=f"without {pin}={problem.pins.given[pin]} something fits")
            )
    for factor in (2, 4, 8, 16, 32, 64, 128):
        count = problem.num_devices * factor
        machine = _larger(problem.machine, count)
        if machine is not None and _fits(problem, num_devices=count, machine=machine):
            found.append(Relaxation(what="devices", value=count, text=f"{count} devices would do"))
            break
    for batch in _batches(problem.global_batch):
        if _fits(problem, global_batch=batch):
            found.append(Relaxation(what="batch", value=batch, text=f"a global batch of {batch} would do"))
            break
    return found


def _batches(batch: int) -> list[int]:
    """Smaller and larger ones, the nearest first."""
    smaller = [batch // factor for factor in (2, 4, 8, 16, 32, 64) if batch % factor == 0]
    larger = [batch * factor for factor in (2, 4, 8)]
    return sorted({*smaller, *larger}, key=lambda each: (abs(each - batch), each))


def _fits(problem: Problem, **values: Any) -> bool:
    try:
        changed = problem.changed(**values)
        least = least_memory_bytes(changed)
    except TwofoldError:
        return False
    return least is not None and least[0] <= changed.limit_bytes


def _larger(machine: Machine, count: int) -> Machine | None:
    if count <= machine.num_devices:
        return machine
    family = machine.name.rpartition("-x")[0]
    try:
        return Machine.load(f"{family}-x{count}")
    except TwofoldError:
        return None
