"""The searched choices of a plan other than its stages and strategies.

These are the optimizer level, the schedule with its chunks, slices of micro-batches, and recomputed blocks. This module
makes plans that differ in one of them, and simulation decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.blocks import block_of
from plans.model.graph import Graph
from plans.plan import Plan, Stage
from plans.schedules import chunks_per_rank, make_schedule, schedule_names
from search.operators.stages import balanced_cuts

__all__ = ["LEVELS", "Ways", "at_level", "recomputable"]

LEVELS = (0, 1, 2, 3)
"""The optimizer-parallel levels."""

_CHUNKS = (2, 3)
"""Chunks per rank that are tried where a schedule leaves their number open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Which of these are searched; the others stay unchanged.

    Args:
        levels, schedules, slices, recompute: whether each is searched.
    """

    levels: bool
    schedules: bool
    slices: bool
    recompute: bool

    def others(self, plan: Plan, weights: Callable[[], Sequence[float]]) -> Iterator[Plan]:
        """The plans that differ from `plan` in its level, its schedule or its slices.

        Args:
            plan: any plan.
            weights: about the work of every operator, in graph order; chunks are balanced by it.
        """
        if self.levels and any(stage.mesh.num_ranks > 1 for stage in plan.stages):
            yield from (at_level(plan, level) for level in LEVELS if level != plan.optimizer.parallel_level)
        if self.schedules and len(plan.stages) > 1:
            yield from _scheduled(plan, weights)
        if self.slices:
            with contextlib.suppress(TwofoldError):  # a layout that does not cut half the rows
                yield _changed(plan, interleave=3 - min(plan.interleave, 2))

    def leaner(self, plan: Plan, fits: Callable[[Plan], bool]) -> Iterator[Plan]:
        """Plans that need less memory, one per optimizer level: the first that fits, with as few recomputed blocks as
        possible, or the one with the least memory if none fits.

        Args:
            plan: the plan that is too large.
            fits: whether a plan fits the memory.
        """
        current = plan.optimizer.parallel_level
        for level in LEVELS if self.levels else (current,):
            kept = plan if level == current else at_level(plan, level)
            blocks = recomputable(plan.graph) if self.recompute else []
            fewest, most = 0, len(blocks)
            while fewest < most:  # memory falls with every block
                middle = (fewest + most) // 2
                if fits(_again(kept, blocks[:middle])):
                    most = middle
                else:
                    fewest = middle + 1
            yield _again(kept, blocks[:most])


def _scheduled(plan: Plan, weights: Callable[[], Sequence[float]]) -> Iterator[Plan]:
    """The plan with every other schedule, and the number of chunks per rank that the schedule needs."""
    meshes = list(dict.fromkeys(stage.mesh for stage in plan.stages))
    alike = len({(mesh.device_matrix, mesh.alias_name) for mesh in meshes}) == 1
    bound = any(strategy.mesh is not None for strategy in plan.strategies.values())
    for name in schedule_names():
        fixed = chunks_per_rank(name)
        for chunks in (fixed,) if fixed is not None else _CHUNKS:
            with contextlib.suppress(TwofoldError):  # a schedule that these ranks or micro-batches do not allow
                if chunks == 1 and len(plan.stages) == len(meshes):
                    yield _changed(plan, schedule=name)
                elif chunks > 1 and alike and not bound:
                    yield _chunked(plan, meshes, name, chunks, weights())


def _chunked(plan: Plan, meshes: Sequence[Layout], name: str, chunks: int, weights: Sequence[float]) -> Plan:
    virtual = chunks if chunks_per_rank(name) is None else None
    placement = make_schedule(name, len(meshes), plan.num_micro_batches, virtual=virtual).placement
    names = [operator.name for operator in plan.graph.operators]
    stages = tuple(
        Stage(mesh=meshes[owner], operators=tuple(names[start:end]))
        for owner, (start, end) in zip(placement, balanced_cuts(weights, len(placement)), strict=True)
    )
    return _changed(plan, stages=stages, schedule=name)


def at_level(plan: Plan, level: int) -> Plan:
    """The plan with its optimizer sharded to a level."""
    return _changed(plan, optimizer=msgspec.structs.replace(plan.optimizer, parallel_level=level))


def recomputable(graph: Graph) -> list[tuple[str, ...]]:
    """Per block the operators that may be computed again, blocks with the most bytes first.

    What other blocks read is kept, so that a block is computed again from its inputs alone.

    >>> from plans.model.mlp import mlp_graph
    >>> recomputable(mlp_graph([8, 8, 8], 4))
    [('layer1.linear',)]
    """
    consumers = graph.consumers()
    blocks: dict[str, list[str]] = {}
    saved: dict[str, int] = {}
    for operator in graph.operators:
        block = block_of(operator)
        readers = {block_of(reader) for name in operator.outputs for reader in consumers[name]}
        if readers == {block}:
            blocks.setdefault(block, []).append(operator.name)
            saved[block] = saved.get(block, 0) + sum(graph.tensors[name].size_bytes for name in operator.outputs)
    return [tuple(blocks[block]) for block in sorted(blocks, key=lambda block: -saved[block])]


def _again(plan: Plan, blocks: Sequence[Sequence[str]]) -> Plan:
    """The plan with these blocks recomputed too."""
    again = {*plan.recompute, *(name for block in blocks for name in block)}
    names = tuple(operator.name for operator in plan.graph.operators if operator.name in again)
    return plan if names == plan.recompute else _changed(plan, recompute=names)


def _changed(plan: Plan, **fields: object) -> Plan:
    """The plan with other fields, without results that were computed for the old one."""
    return msgspec.structs.replace(plan, redistributions=(), prediction=None, **fields)
