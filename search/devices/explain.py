"""Alternatives to a configuration, and the changes under which something fits."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodels import Machine
from plans.degrees import Degrees, even_layers
from plans.degrees.words import blocks_per_chunk
from plans.errors import TwofoldError
from plans.units import Bytes, Seconds
from search.candidate import Candidate, describe
from search.devices.branch import Branching
from search.devices.problem import Pins, Problem
from search.devices.space import (
    Mesh,
    ScheduleChoice,
    divisors,
    levels,
    meshes,
    micro_batches,
    orders,
    recomputes,
    sequence_parallels,
    shapes,
    values_of,
)
from search.devices.stage_config import StageConfig
from search.result import Alternative
from simulator.engine.garbage import without_collection
from simulator.forecast import forecast

__all__ = ["Relaxation", "at_own_clock", "least_memory", "neighbours", "relaxations"]

_LEAN = ("1f1b", "v_half", "v_min")
"""Schedules that keep the fewest activations."""

_MOST_LEAN = 40
"""Lean configurations that are forecast at most."""

_EQUAL_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """A change of the question under which something fits."""

    what: str
    value: Any
    text: str


# ------------------------------------------------------------------- neighbours


def at_own_clock(asked: Problem, degrees: Degrees) -> Candidate:
    """A configuration with its forecast at the clock of its own step."""
    return Candidate(degrees=degrees, forecast=forecast(asked.config, degrees, asked.machine, stack=asked.stack))


@without_collection()
def neighbours(branching: Branching, asked: Problem, best: Candidate) -> tuple[Alternative, ...]:
    """Alternatives to a configuration, with one degree changed: the smallest loss first, then the impossible ones.

    Args:
        branching: the search, at one clock, that found the configuration.
        asked: the same problem with the machine as it was given, where every step has its own clock.
        best: the configuration, with its forecast on that machine.
    """
    results = [_neighbour(branching, asked, best, change, pins) for change, pins in _changes(branching.problem, best)]
    return tuple(sorted(results, key=lambda each: (each.extra_s is None, each.extra_s or 0.0, each.change)))


def _changes(problem: Problem, best: Candidate) -> Iterator[tuple[str, Pins]]:
    """A change in words, and the pins of the part of the space with this change."""
    degrees = best.degrees
    base = Pins(**degrees.values).changed(
        layers=None, interleave=None, overlap_pairs=None, recompute_layers=problem.pins.recompute_layers
    )
    yield from _mesh_changes(problem, degrees, base)
    yield from _placement_changes(problem, degrees, base)
    yield from _micro_batch_changes(problem, degrees, base)
    yield from _schedule_changes(problem, degrees, base)
    yield from _recompute_changes(problem, degrees, base)
    yield from _optimizer_changes(problem, degrees, base)
    yield from _layer_changes(problem, degrees, base)


def _mesh_changes(problem: Problem, degrees: Degrees, base: Pins) -> Iterator[tuple[str, Pins]]:
    """tp, cp or pp one divisor up or down; its factor comes from, or goes to, another degree."""
    fixed = problem.pins.given
    for name in ("tp", "cp", "pp"):
        now = getattr(degrees, name)
        for value, other in itertools.product(_beside(now, divisors(problem.num_devices)), ("dp", "tp", "pp", "cp")):
            have = getattr(degrees, other)
            if other == name or {name, other} & set(fixed) or have * now % value:
                continue
            if other != "dp" and value < now:
                continue  # the same pair of degrees is changed from the other side
            given: dict[str, Any] = {name: value, other: have * now // value}
            split = fixed.get("sequence_parallel") if degrees.tp == 1 else degrees.sequence_parallel
            given["sequence_parallel"] = split if given.get("tp", degrees.tp) > 1 else False
            again = []
            if "pp" in given:
                given |= {"schedule": fixed.get("schedule"), "virtual": fixed.get("virtual")}
                again.append("schedule")
            if given.get("dp", degrees.dp) % degrees.ep:
                if "ep" in fixed:
                    continue
                given["ep"] = None
                again.append("ep")
            chosen = f", {' and '.join(again)} chosen again" if again else ""
            yield f"{name} {now} -> {value}, {other} {have} -> {have * now // value}{chosen}", base.changed(**given)


def _placement_changes(problem: Problem, degrees: Degrees, base: Pins) -> Iterator[tuple[str, Pins]]:
    """Another order of the axes; experts spread over more or fewer ranks."""
    mesh = Mesh(degrees.dp, degrees.cp, degrees.tp, degrees.pp, degrees.ep, degrees.order)
    for order, _ in orders(problem, mesh) if problem.pins.order is None else ():
        if order != degrees.order:
            shown = (tuple(axis for axis in axes if getattr(degrees, axis) > 1) for axes in (degrees.order, order))
            yield f"order {' -> '.join('-'.join(axes) for axes in shown)}", base.changed(order=order)
    experts = problem.config.experts
    if experts is not None and "ep" not in problem.pins.given:
        for value in _beside(degrees.ep, divisors(math.gcd(degrees.dp, experts.num_experts))):
            yield f"ep {degrees.ep} -> {value}", base.changed(ep=value)


def _micro_batch_changes(problem: Problem, degrees: Degrees, base: Pins) -> Iterator[tuple[str, Pins]]:
    if "micro_batch" in problem.pins.given:
        return
    for value in _beside(degrees.micro_batch, divisors(problem.global_batch // degrees.dp)):
        yield f"micro-batch {degrees.micro_batch} -> {value}", base.changed(micro_batch=value)


def _schedule_changes(problem: Problem, degrees: Degrees, base: Pins) -> Iterator[tuple[str, Pins]]:
    now = ScheduleChoice(degrees.schedule, degrees.virtual)
    for choice in shapes(problem, degrees.pp):
        if choice != now:
            yield f"{now} -> {choice}", base.changed(schedule=choice.schedule, virtual=choice.virtual)


def _optimizer_changes(problem: Problem, degrees: Degrees, base: Pins) -> Iterator[tuple[str, Pins]]:
    """Another optimizer level; sequence parallelism on or off."""
    now = degrees.optimizer.parallel_level
    for level in (0, 1, 2, 3) if problem.pins.zero is None else ():
        if level != now:
            yield f"optimizer level {now} -> {level}", base.changed(zero=level)
    if degrees.tp > 1 and problem.pins.sequence_parallel is None:
        yield (
            "without sequence parallel" if degrees.sequence_parallel else "with sequence parallel",
            base.changed(sequence_parallel=not degrees.sequence_parallel),
        )


def _layer_changes(problem: Problem, degrees: Degrees, base: Pins) -> Iterator[tuple[str, Pins]]:
    even = even_layers(problem.config.num_layers, degrees.num_chunks)
    if degrees.layers != even and min(even) and problem.pins.layers is None:
        yield "layers spread evenly", base.changed(layers=even)


def _recompute_changes(problem: Problem, degrees: Degrees, base: Pins) -> Iterator[tuple[str, Pins]]:
    """Another mode, in as many blocks as is best and in all; one block of a chunk more or fewer."""
    now = f"recompute {degrees.recompute}"
    pinned = problem.pins.recompute_layers is not None
    for mode in recomputes(problem):
        plain = base.changed(recompute=mode, recompute_layers=None if mode == "none" else base.recompute_layers)
        if mode != degrees.recompute:
            yield f"{now} -> {mode}", plain
        if mode != "none" and not pinned and (mode != degrees.recompute or degrees.recompute_layers is not None):
            yield f"{now} -> {mode} in all blocks", plain.changed(recompute_layers=problem.config.num_layers)
    if degrees.recompute_layers is not None and not pinned:
        most = max(degrees.layers_of(problem.config.num_layers))
        for count in (degrees.recompute_layers - 1, degrees.recompute_layers + 1):
            if 0 < count < most:
                title = f"{now} in {degrees.recompute_layers} -> {blocks_per_chunk(count)}"
                yield title, base.changed(recompute_layers=count)


def _beside(now: int, values: tuple[int, ...]) -> list[int]:
    """The next smaller and the next larger value."""
    smaller, larger = [value for value in values if value < now], [value for value in values if value > now]
    return smaller[-1:] + larger[:1]


def _neighbour(branching: Branching, asked: Problem, best: Candidate, change: str, pins: Pins) -> Alternative:
    try:
        part = branching.narrowed(pins, proves=False)
        part.run()
    except TwofoldError as error:
        return Alternative(subject="degrees", change=change, reason=str(error), extra_s=None)
    if part.candidates:
        found = part.candidates[0]
        if asked.machine is not branching.problem.machine:
            found = at_own_clock(asked, found.degrees)
        extra = found.forecast.step_s - best.forecast.step_s
        some = found.degrees.recompute_layers
        if some is not None and some != best.degrees.recompute_layers and "blocks" not in change:
            change += f", recompute in {blocks_per_chunk(some)}"
        return Alternative(
            subject="degrees", change=change, candidate=found, reason=_difference(best, found), extra_s=extra
        )
    memory = [each.excess_bytes or 0 for each in part.rejected if each.reason == "memory"]
    if memory:
        reason = f"does not fit: {Bytes(min(memory))} too much"
    else:
        reason = "; ".join(dict.fromkeys(each.reason for each in part.rejected)) or "cannot be made"
    return Alternative(subject="degrees", change=change, reason=reason, extra_s=None)


def _difference(best: Candidate, other: Candidate) -> str:
    """The part of the step that grew most."""
    parts = {
        name: composition(other)[name] - seconds for name, seconds in composition(best).items()
    }  # fmt: skip
    name = max(sorted(parts), key=lambda each: parts[each])
    return f"{name} +{Seconds(parts[name])}" if parts[name] > _EQUAL_S else "equal"


def composition(found: Candidate) -> dict[str, float]:
    """Seconds of the mean rank: compute, exposed communication, the wait for its host and the bubble; their sum is the
    step."""
    seen = found.forecast
    waited = {
        "exposed communication": seen.exposed_comm_s, "host wait": seen.host_wait_s,
        "bubble": seen.step_s * seen.bubble_fraction,
    }  # fmt: skip
    return {"compute": max(0.0, seen.step_s - sum(waited.values())), **waited}


# ------------------------------------------------------------------- nothing fits


def least_memory(problem: Problem, *, enough_bytes: int = 0) -> Candidate | None:
    """The configuration with the least forecast peak of those looked at; None where there is none at all.

    Only what keeps least is looked at: the smallest micro-batch, most recomputing, the leanest schedules. The leanest
    few of these are forecast, with what the stack adds, until one takes no more than `enough_bytes` or the others
    cannot be better.
    """
    branching = Branching(problem=problem)
    best: Candidate | None = None
    for least, _, values in sorted(_lean(branching), key=operator.itemgetter(0, 1))[:_MOST_LEAN]:
        if best is not None and best.forecast.peak_bytes <= max(least, enough_bytes):
            break
        if least > enough_bytes > 0:
            return None
        try:
            found = branching.evaluate(problem.degrees(values))
        except TwofoldError:
            continue
        if best is None or found.forecast.peak_bytes < best.forecast.peak_bytes:
            best = found
    return best


def _lean(branching: Branching) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """(a lower bound on the peak in bytes, number, values) of lean configurations."""
    problem, number = branching.problem, 0
    for mesh in meshes(problem)[0]:
        sizes, sps = micro_batches(problem, mesh), sequence_parallels(problem, mesh)
        if not sizes or not sps:
            continue
        tried = shapes(problem, mesh.pp)
        for shape in [choice for choice in tried if choice.schedule in _LEAN] or tried:
            space = branching.space(shape, mesh.pp, problem.global_batch // (mesh.dp * sizes[0]))
            if space is None:
                continue
            mode = recomputes(problem)[-1]
            stage, rows = (
                StageConfig(mesh.tp, mesh.cp, sps[0], sizes[0], mode, space.split, mesh.ep),
                branching.rows(space, mode),
            )
            for level in levels(problem, mesh)[-2:] if len(rows.spread) else ():
                peaks = branching.peak_memory.peaks_bytes(stage, space, dp=mesh.dp, level=level, rows=rows)
                least = len(peaks) - 1 - int(np.argmin(peaks[::-1]))  # of equal ones that which recomputes most
                layers, some = space.choice(rows, least)
                values = values_of(mesh, sizes[0], sps[0], mode, shape, level, layers, some)
                number += 1
                yield int(np.min(peaks)), number, values


def relaxations(problem: Problem) -> list[Relaxation]:
    """The smallest changes under which something would fit, one kind at a time."""
    found: list[Relaxation] = []
    least = least_memory(problem)
    if least is not None and (peak := least.forecast.peak_bytes) > problem.limit_bytes:
        found.append(
            Relaxation(
                what="memory", value=peak, text=f"{_GB(peak)} per device would be enough ({describe(least.degrees)})"
            )
        )
    for pin in problem.pins.given:
        rest = problem.pins.changed(**{pin: None})
        if fits := _fitting(problem, pins=rest):
            given = problem.pins.given[pin]
            found.append(
                Relaxation(what=pin, value=None, text=f"without {pin}={given} a configuration fits ({_in_words(fits)})")
            )
    for factor in (2, 4, 8, 16, 32, 64, 128):
        count = problem.num_devices * factor
        machine = _larger(problem.machine, count)
        if machine is not None and (fits := _fitting(problem, num_devices=count, machine=machine)):
            found.append(
                Relaxation(what="devices", value=count, text=f"{count} devices would be enough ({_in_words(fits)})")
            )
            break
    for batch in _batches(problem.global_batch):
        if fits := _fitting(problem, global_batch=batch):
            text = f"a global batch of {batch} would fit ({_in_words(fits)})"
            found.append(Relaxation(what="batch", value=batch, text=text))
            break
    return found


def _in_words(found: Candidate) -> str:
    return f"{_GB(found.forecast.peak_bytes)}: {describe(found.degrees)}"


def _GB(size_bytes: int) -> str:
    """Format bytes in GB, rounded up so that the stated amount suffices."""
    return f"{math.ceil(size_bytes / 1e9 * 100) / 100:.2f} GB"


def _batches(batch: int) -> list[int]:
    """Smaller and larger batch sizes, the nearest first."""
    smaller = [batch // factor for factor in (2, 4, 8, 16, 32, 64) if batch % factor == 0]
    larger = [batch * factor for factor in (2, 4, 8)]
    return sorted({*smaller, *larger}, key=lambda each: (abs(each - batch), each))


def _fitting(problem: Problem, **values: Any) -> Candidate | None:
    """The best configuration that fits the changed problem."""
    try:
        changed = problem.changed(**values)
        found = least_memory(changed, enough_bytes=changed.limit_bytes)
    except TwofoldError:
        return None
    return found if found is not None and found.forecast.peak_bytes <= changed.limit_bytes else None


def _larger(machine: Machine, count: int) -> Machine | None:
    if count <= machine.num_devices:
        return machine
    family = machine.name.rpartition("-x")[0]
    try:
        return Machine.load(f"{family}-x{count}")
    except TwofoldError:
        return None
