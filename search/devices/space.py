"""The search space: every configuration that the sizes of the model, the devices and the fixed options allow.

A configuration is a mesh (dp, cp, tp, pp), a micro-batch, sequence parallelism, a recompute mode with the number of
recomputed blocks per chunk, a schedule with its chunks per rank, a layer split, an optimizer level, and the order of
axes. Sizes are any divisors, not only powers of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from costmodels.price.group import Group, axes_group
from plans.degrees import ORDER, Degrees
from plans.degrees.check import impossible
from plans.degrees.groups import rank_groups, stride_of
from plans.degrees.rules import OF_DEGREES, broken, unpredicted
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, sizes_of
from plans.schedules import Schedule, chunks_per_rank, make_schedule, schedule_names
from search.devices.problem import MAX_VIRTUAL, Problem

__all__ = [
    "LEAST_TOKENS",
    "MAX_MICRO_BATCH",
    "MAX_VIRTUAL",
    "MOST_FEWER",
    "Mesh",
    "Placement",
    "ScheduleChoice",
    "divisors",
    "enumerate_degrees",
    "layer_choices",
    "meshes",
    "micro_batches",
    "orders",
    "placement",
    "recompute_counts",
    "refusal",
    "shapes",
]

MAX_MICRO_BATCH = 64
"""Samples of a micro-batch on a rank; more have never paid."""

LEAST_TOKENS = 512
"""Tokens of a sequence that a rank of cp holds at least, unless cp is pinned."""

MOST_FEWER = 6
"""By how many layers fewer than an even share the last chunk, which has the head, may hold at most."""

_FIRST_FEWER = 2
"""Likewise the first chunk, which has the embedding."""


@dataclass(frozen=True, slots=True, order=True)
class Mesh:
    """Degrees; dp x cp x tp x pp is the number of devices, ep a part of dp. `order` is that of `Degrees`."""

    dp: int
    cp: int
    tp: int
    pp: int
    ep: int = 1
    order: tuple[str, ...] = ORDER

    @property
    def values(self) -> dict[str, Any]:
        """Degrees by name."""
        return {
            "dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp, "ep": self.ep, "order": self.order,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class ScheduleChoice:
    """A schedule and its chunks per rank."""

    schedule: str
    virtual: int

    def __str__(self) -> str:
        return self.schedule if self.virtual == 1 else f"{self.schedule} x {self.virtual}"


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return tuple(low + [number // each for each in reversed(low) if each * each != number])


def refusal(config: TransformerConfig, *, tp: int, cp: int, sequence_parallel: bool) -> str | None:
    """Why a model's sizes cannot be cut so, or cannot be forecast; None where they can.

    >>> from plans.model.transformer import transformer_config
    >>> refusal(transformer_config("llama-3-8b"), tp=3, cp=1, sequence_parallel=False)
    'llama-3-8b: 32 query heads cannot be split over tp 3: 32 % 3 != 0; the next valid tp is 4'
    """
    sizes = sizes_of(config)
    known = {"tp": tp, "cp": cp, "sequence_parallel": sequence_parallel}
    return next(impossible(known, sizes), None) or unpredicted(sizes, tp, sequence_parallel)


def meshes(problem: Problem) -> tuple[list[Mesh], dict[str, int]]:
    """The meshes that are possible, and how many are not for which reason."""
    pins, config, count = problem.pins, problem.config, problem.num_devices
    found: list[Mesh] = []
    refused: dict[str, int] = {}

    def no(reason: str) -> None:
        refused[reason] = refused.get(reason, 0) + 1

    for tp in _of(count, pins.tp):
        for cp in _of(count // tp, pins.cp):
            if cp > 1 and pins.cp is None and config.seq < cp * LEAST_TOKENS:
                continue
            sp = bool(pins.sequence_parallel) and tp > 1
            if reason := refusal(config, tp=tp, cp=cp, sequence_parallel=sp):
                no(reason)
                continue
            for pp in _of(count // tp // cp, pins.pp):
                dp = count // tp // cp // pp
                if pins.dp not in (None, dp):
                    continue
                known = {"dp": dp, "global_batch": problem.global_batch}
                if pp > config.num_layers + 2:
                    no(f"{config.num_layers} layers cannot fill more than {config.num_layers + 2} stages")
                elif reason := next(broken(OF_DEGREES, known), None):
                    no(reason)
                else:
                    for ep in _expert_degrees(problem, dp):
                        mesh = Mesh(dp, cp, tp, pp, ep, pins.order or ORDER)
                        if reason := problem.refused(**mesh.values):
                            no(reason)
                        else:
                            found.append(mesh)
    return found, refused


def _expert_degrees(problem: Problem, dp: int) -> tuple[int, ...]:
    experts = problem.config.experts
    possible = divisors(math.gcd(dp, 1 if experts is None else experts.num_experts))
    return tuple(each for each in possible if problem.pins.ep in (None, each))


def _of(count: int, pinned: int | None) -> tuple[int, ...]:
    if pinned is None:
        return divisors(count)
    return (pinned,) if count % pinned == 0 else ()


@dataclass(frozen=True, slots=True)
class Placement:
    """On which tiers of links the groups of a mesh lie: the only effect of the order of its axes on a forecast.

    Args:
        inner: of the groups whose communication is inside the blocks.
        groups: of those of the optimizer.
        hops: of the transfers from each pipeline rank to the next.
    """

    inner: tuple[tuple[str, Group], ...]
    groups: tuple[Group, ...]
    hops: tuple[int, ...] = ()


def placement(problem: Problem, mesh: Mesh) -> Placement:
    """The location of a mesh's groups on the network."""
    machine, ranks = problem.machine, problem.num_devices
    groups, stages = rank_groups(mesh, problem.config.kv_heads), (mesh.pp, stride_of(mesh)["pp"])
    inner = {
        name: axes_group(machine, axes, ranks, stages) for name, axes in groups.items()
        if name in ("tp", "cp", "ep", "tp_q", "tp_kv")
    }  # fmt: skip
    outer = tuple(  # the optimizer communicates among ranks with the same weights, and with those of tp next to them
        axes_group(machine, axes, ranks, stages)
        for name in ("dp", "copies") if name in groups for axes in (groups[name], groups[name] + groups["tp"])
    )  # fmt: skip
    hops: tuple[int, ...] = ()
    if mesh.pp > 1:
        hops = _hops(tuple(link.ranks for link in machine.links), *stages)
    return Placement(tuple(sorted(inner.items())), outer, hops)


@lru_cache(maxsize=4096)
def _hops(domains: tuple[int, ...], pp: int, stride: int) -> tuple[int, ...]:
    """The tiers between a pipeline rank and the next, the last one and the first included."""
    at = np.arange(pp) * stride
    joined = [at // ranks == np.roll(at, -1) // ranks for ranks in domains]
    return tuple(np.argmax(joined, axis=0).tolist())


def orders(problem: Problem, mesh: Mesh) -> list[tuple[tuple[str, ...], Placement]]:
    """The orders of the axes that differ in where they put groups, `mesh`'s own first.

    Only the first order with all groups on the same tiers is included, because the others have the same forecast.
    """
    found = {placement(problem, mesh): mesh.order}
    if problem.pins.order is None and problem.num_devices > problem.machine.links[0].ranks:
        used = [axis for axis in ORDER if getattr(mesh, axis) > 1]
        rest = tuple(axis for axis in ORDER if axis not in used)
        for first in itertools.permutations(used):
            order = (*first, *rest)
            if problem.refused(**replace(mesh, order=order).values) is None:
                found.setdefault(placement(problem, replace(mesh, order=order)), order)
    return [(order, where) for where, order in found.items()]


def micro_batches(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """The samples of a micro-batch on a rank that are possible."""
    each = problem.global_batch // mesh.dp
    slices = problem.pins.interleave or 1
    if problem.pins.micro_batch is not None:
        return (problem.pins.micro_batch,) if each % problem.pins.micro_batch == 0 else ()
    return tuple(size for size in divisors(each) if size <= MAX_MICRO_BATCH and size % slices == 0)


def sequence_parallels(problem: Problem, mesh: Mesh) -> tuple[bool, ...]:
    """Whether the sequence may or must be split over tp."""
    pinned = problem.pins.sequence_parallel
    if mesh.tp == 1:
        return () if pinned else (False,)
    wanted = (True, False) if pinned is None else (pinned,)
    return tuple(
        each for each in wanted
        if refusal(problem.config, tp=mesh.tp, cp=mesh.cp, sequence_parallel=each) is None
        and problem.refused(tp=mesh.tp, sequence_parallel=each) is None
    )  # fmt: skip


def recomputes(problem: Problem) -> tuple[str, ...]:
    """The recompute modes that the stack has."""
    pins = problem.pins
    modes = problem.stack.recompute_modes if pins.recompute is None else (pins.recompute,)
    some = pins.recompute_layers
    modes = tuple(mode for mode in modes if problem.refused(recompute=mode, recompute_layers=some) is None)
    return modes if some is None else tuple(mode for mode in modes if mode != "none")


def recomputes_some(problem: Problem, mode: str) -> bool:
    """Whether some blocks of a chunk may recompute while the others keep everything."""
    return mode in problem.stack.recomputes_some


def recompute_counts(problem: Problem, mode: str, most: int) -> tuple[int | None, ...]:
    """Possible numbers of recomputing blocks of a chunk, where the largest chunk has `most`; None for all.

    >>> from costmodels import Machine
    >>> from plans.model.transformer import transformer_config
    >>> asked = Problem(config=transformer_config("llama-3-8b"), machine=Machine.load("h100-sxm-x8"), num_devices=8,
    ...                 global_batch=8)
    >>> recompute_counts(asked, "full", 4), recompute_counts(asked, "none", 4)
    ((1, 2, 3, None), (None,))
    """
    pinned = problem.pins.recompute_layers
    if pinned is not None and pinned < most:
        return (pinned,) if recomputes_some(problem, mode) else ()
    if pinned is not None:
        return (None,)
    if not recomputes_some(problem, mode) or problem.refused(recompute=mode, recompute_layers=1):
        return (None,)
    return (*range(1, most), None)


def levels(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """The optimizer-parallel levels; with one rank for every weight there is nothing to shard."""
    if problem.pins.zero is not None:
        return (problem.pins.zero,)
    every = (0, 1, 2, 3) if mesh.dp * mesh.cp > 1 else (0,)
    return tuple(zero for zero in every if problem.refused(**mesh.values, zero=zero) is None)


@lru_cache(maxsize=4096)
def _possible(schedule: str, pp: int, count: int, virtual: int | None) -> Schedule | None:
    try:
        return make_schedule(schedule, pp, count, virtual=virtual)
    except TwofoldError:
        return None


def schedule_of(shape: ScheduleChoice, pp: int, count: int) -> Schedule | None:
    """The schedule of a shape, or None if there is none for these ranks and micro-batches."""
    free = chunks_per_rank(shape.schedule) is None
    return _possible(shape.schedule, pp, count, shape.virtual if free else None)


def shapes(problem: Problem, pp: int) -> tuple[ScheduleChoice, ...]:
    """The schedules and chunks per rank to try with `pp` pipeline ranks.

    With one pipeline rank every order does the same work, so only 1F1B, which keeps the least, is tried, unless pinned.
    Pairs are those of DualPipe-V, unless another schedule is pinned.
    """
    pinned = problem.pins.schedule or ("dualpipe_v" if problem.pins.overlap_pairs else None)
    every = _shapes(pinned, problem.pins.virtual, problem.config.num_layers, pp)
    return tuple(
        choice for choice in every if problem.refused(schedule=choice.schedule, virtual=choice.virtual, pp=pp) is None
    )


@lru_cache(maxsize=4096)
def _shapes(pinned: str | None, pinned_virtual: int | None, num_layers: int, pp: int) -> tuple[ScheduleChoice, ...]:
    names = schedule_names() if pinned is None else (pinned,)
    if pp == 1 and pinned is None and pinned_virtual in (None, 1):
        return (ScheduleChoice("1f1b", 1),)
    found = []
    for name in names:
        fixed = chunks_per_rank(name)
        for virtual in range(2, MAX_VIRTUAL + 1) if fixed is None else (fixed,):
            own = pinned is not None and fixed is not None and pinned_virtual == 1  # leaves it to the schedule
            if (pinned_virtual not in (None, virtual) and not own) or (fixed is None and pp * virtual > num_layers + 2):
                continue
            found.append(ScheduleChoice(name, virtual))
        if fixed is None and pinned_virtual is not None and not 2 <= pinned_virtual <= MAX_VIRTUAL:
            found.append(ScheduleChoice(name, pinned_virtual))
    return tuple(found)


@lru_cache(maxsize=4096)
def layer_choices(num_layers: int, num_chunks: int, last_fewer: int = 2) -> tuple[tuple[int, ...], ...]:
    """Spreads of the layers over chunks: even, or with fewer on the first and the last, which have more to do.

    What does not divide goes to the first chunks, or to the last ones, which keep fewer activations. The last chunk
    holds up to `last_fewer` layers fewer than the others.

    >>> layer_choices(8, 4)[0]
    (2, 2, 2, 2)
    >>> (2, 3, 2, 1) in layer_choices(8, 4)
    True
    """
    if num_chunks == 1:
        return ((num_layers,),)
    most = -(-num_layers // num_chunks)
    found: dict[tuple[int, ...], None] = {}
    if num_layers >= num_chunks:
        whole, rest = divmod(num_layers, num_chunks)
        found[tuple(whole + (chunk < rest) for chunk in range(num_chunks))] = None
        found[tuple(whole + (chunk >= num_chunks - rest) for chunk in range(num_chunks))] = None
    for last in range(most, max(-1, most - last_fewer - 1), -1):
        if num_chunks == 2:
            if num_layers - last >= 0:
                found[num_layers - last, last] = None
            continue
        for first in range(most, max(-1, most - _FIRST_FEWER - 1), -1):
            inner, count = num_layers - first - last, num_chunks - 2
            if inner < count:
                continue
            whole, rest = divmod(inner, count)
            found[(first, *(whole + (chunk < rest) for chunk in range(count)), last)] = None
            found[(first, *(whole + (chunk >= count - rest) for chunk in range(count)), last)] = None
    return tuple(found)


def scheduled(
    problem: Problem, shape: ScheduleChoice, pp: int, count: int
) -> tuple[Schedule | None, tuple[tuple[int, ...], ...]]:
    """The schedule of a shape for these ranks and micro-batches, if there is one that the software runs, and the
    spreads of the layers to try with it."""
    known = {"schedule": shape.schedule, "virtual": shape.virtual, "pp": pp, "num_micro_batches": count}
    schedule = schedule_of(shape, pp, count)
    if schedule is None or problem.refused(**known):
        return None, ()
    every = spreads(problem, schedule.num_stages)
    return schedule, tuple(each for each in every if problem.refused(**known, layers=each) is None)


def spreads(problem: Problem, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    pinned = problem.pins.layers
    if pinned is not None:
        return (pinned,) if len(pinned) == num_chunks else ()
    config = problem.config
    head = config.vocab * config.hidden / config.block_parameters(config.num_layers - 1)
    return layer_choices(config.num_layers, num_chunks, min(MOST_FEWER, 1 + math.ceil(head)))


def enumerate_degrees(problem: Problem) -> Iterator[Degrees]:
    """Every configuration of the space, one by one: the search without bounds."""
    placed = (replace(mesh, order=order) for mesh in meshes(problem)[0] for order, _ in orders(problem, mesh))
    for mesh in placed:
        for size in micro_batches(problem, mesh):
            count = problem.global_batch // (mesh.dp * size)
            for shape in shapes(problem, mesh.pp):
                layer_spreads = scheduled(problem, shape, mesh.pp, count)[1]
                for sp in sequence_parallels(problem, mesh):
                    for recompute in recomputes(problem):
                        for zero in levels(problem, mesh):
                            for layers in layer_spreads:
                                for some in recompute_counts(problem, recompute, max(layers)):
                                    yield problem.degrees(
                                        values_of(mesh, size, sp, recompute, shape, zero, layers, some)
                                    )


def values_of(
    mesh: Mesh,
    size: int,
    sp: bool,
    recompute: str,
    shape: ScheduleChoice,
    zero: int,
    layers: tuple[int, ...],
    recompute_layers: int | None = None,
) -> dict[str, Any]:
    """The plain values of a configuration."""
    return {
        "dp": mesh.dp, "cp": mesh.cp, "tp": mesh.tp, "pp": mesh.pp, "ep": mesh.ep, "micro_batch": size,
        "sequence_parallel": sp, "recompute": recompute, "recompute_layers": recompute_layers,
        "schedule": shape.schedule, "virtual": shape.virtual, "zero": zero, "layers": layers, "order": mesh.order,
    }  # fmt: skip
