"""Bounds for a mesh before a schedule is chosen: its time, and whether it may fit the memory."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plans.model.graph import itemsize
from search.devices.axis_orders import AxisOrders, Tiers
from search.devices.bubbles import Bubbles
from search.devices.costs import Costs, Table, num_dense
from search.devices.linear import Longer
from search.devices.peak_memory import PeakMemory
from search.devices.problem import Problem
from search.devices.schedule_space import ScheduleSpaces
from search.devices.space import Mesh, levels, recomputes, schedule_of, shapes
from search.devices.stage_config import StageConfig, in_any_order, in_any_place, in_order, without_recompute
from search.result import Rejected
from simulator.estimate.layout import is_split

__all__ = ["Estimates"]

Floats = NDArray[np.float64]


@dataclass(kw_only=True)
class Estimates:
    """Bounds for the meshes of a problem, for any order of the axes and any schedule.

    Args:
        problem: what is asked.
        keep: how many of the fastest are searched for.
        costs, peak_memory, spaces, places: of the problem.
        rejected: filled with what cannot fit.

    Attributes:
        modes: of recomputing, that may be chosen.
    """

    problem: Problem
    keep: int
    costs: Costs
    peak_memory: PeakMemory
    spaces: ScheduleSpaces
    axis_orders: AxisOrders
    rejected: list[Rejected]

    def __post_init__(self) -> None:
        self.bubbles = Bubbles(problem=self.problem, together=self.spaces.together)
        self.modes = recomputes(self.problem)
        self._plain_bounds: dict[tuple[int, int, StageConfig], float] = {}
        self._level_bounds: dict[tuple[Mesh, StageConfig, int], float] = {}
        self._busy: dict[tuple[Mesh, bool, bool, int], tuple[Floats, Floats]] = {}
        config, dense = self.problem.config, num_dense(self.problem.config)
        self._block_parameters = dense * config.block_parameters()
        self._block_parameters += (config.num_layers - dense) * config.block_parameters(dense)

    def may_hold(self, mesh: Mesh, size: int, sp: bool) -> bool:
        """Whether the inputs of the blocks alone, kept in every recompute mode, leave room for sharded weights."""
        problem, config = self.problem, self.problem.config
        tokens = size * config.seq / (mesh.cp * (mesh.tp if sp else 1))
        kept = tokens * config.hidden * itemsize(config.dtype)
        assert problem.optimizer is not None
        each = problem.optimizer.bytes_per_element(config.dtype)
        each -= itemsize(problem.optimizer.accumulates_in(config.dtype))  # gradients may come where activations were
        weights = self._block_parameters / mesh.tp * each
        weights /= mesh.dp * mesh.cp if max(levels(problem, mesh)) > 0 else mesh.ep
        least = (kept * config.num_layers + weights) / mesh.pp
        if least > problem.limit_bytes:
            what = f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp} micro-batch {size}"
            self.rejected.append(Rejected(what=what, reason="memory", excess_bytes=int(least) - problem.limit_bytes))
        return least <= problem.limit_bytes

    def splits(self, mesh: Mesh) -> tuple[bool, ...]:
        """Whether a schedule's backward may be in two parts, or must be."""
        if self.problem.pins.schedule is not None:
            found = {
                is_split(schedule)
                for shape in shapes(self.problem, mesh.pp)
                if (schedule := schedule_of(shape, mesh.pp, 4 * mesh.pp)) is not None
            }
            return tuple(sorted(found)) or (False, True)
        return (False,) if mesh.pp == 1 else (False, True)

    def mesh_bound_s(
        self, mesh: Mesh, size: int, sp: bool, tiers: Tiers | None = None, *, enough_s: float = float("inf")
    ) -> float:
        """A bound for everything on a mesh, with its groups or on other `tiers`.

        Forwards are priced first, then backwards: a bound that reaches `enough_s` on the way is returned as it is.
        """
        stages = [
            self.axis_orders.stage_config(mesh, sp, size, self.modes[0], split, tiers) for split in self.splits(mesh)
        ]
        return min(self._mesh_bound_s(mesh, size, stage, enough_s) for stage in stages)

    def _pipeline_bound_s(
        self, mesh: Mesh, size: int, split: bool, pieces_s: Floats, more_s: float = 0.0, enough_s: float = float("inf"),
        transfers_s: Sequence[float] = (),
    ) -> float:  # fmt: skip
        """A bound for any schedule and any spread of the layers; one that reaches `enough_s` may be lower.

        Args:
            mesh, size: with the samples of a micro-batch.
            split: whether the schedules split the backward.
            pieces_s: (piece, part) of one micro-batch: forward and backward, or forward and both parts of the backward.
            more_s: time of a micro-batch that the blocks of the model need beyond that, wherever they are.
            transfers_s: as of `Bubbles.bound_s`.
        """
        counts, count = self.costs.all_counts, self.problem.global_batch // (mesh.dp * size)
        forward, backward = pieces_s[:, 0], pieces_s[:, 1:].sum(axis=1)
        mean = (float(counts @ (forward + backward)) + more_s) * count / mesh.pp
        way = float(counts @ (forward + pieces_s[:, 1]))
        if (least_s := max(mean, way)) >= enough_s:
            return least_s
        whole_s = self.bubbles.bound_s(
            mesh.pp, count, forward, pieces_s[:, 1], backward, split=split, transfers_s=transfers_s
        )
        return max(least_s, whole_s)

    def fitting_levels(self, mesh: Mesh, stage: StageConfig, chosen: Sequence[int]) -> tuple[int, ...]:
        """The optimizer levels among `chosen` with which it may fit."""
        limit = self.problem.limit_bytes
        found, least = [], float("inf")
        for level in chosen:
            needed = self.peak_memory.least_bytes(in_any_place(stage), pp=mesh.pp, dp=mesh.dp, level=level)
            least = min(least, needed)
            if needed <= limit:
                found.append(level)
        if not found:
            what = (
                f"dp {mesh.dp} cp {mesh.cp} tp {mesh.tp} pp {mesh.pp} micro-batch {stage.micro_batch} recompute "
                f"{stage.recompute}"
            )
            self.rejected.append(Rejected(what=what, reason="memory", excess_bytes=int(least) - limit))
        return tuple(found)

    def saves_nothing(self, stage: StageConfig) -> bool:
        """Whether a mode keeps no less than none at all, which takes no longer."""
        if self.keep > 1 or stage.recompute == "none" or "none" not in self.modes:
            return False
        own, whole = self.peak_memory.kept_bytes(stage), self.peak_memory.kept_bytes(without_recompute(stage))
        return self.costs.recompute_only_adds and all(map(operator.ge, own, whole))

    def excess_bytes(self, mesh: Mesh, stage: StageConfig, level: int) -> float:
        """The bytes that recomputing must save in the model, if not all blocks have to recompute."""
        if not self.spaces.is_partial(stage.recompute):
            return 0.0
        return self.peak_memory.excess_bytes(
            in_any_place(stage), pp=mesh.pp, dp=mesh.dp, level=level, limit=self.problem.limit_bytes
        )

    def level_bound_s(
        self, mesh: Mesh, size: int, stage: StageConfig, level: int, enough_s: float = float("inf")
    ) -> float:
        """A bound for everything with one stage configuration and optimizer level, with what has to be recomputed to
        fit; one that reaches `enough_s` may be lower."""
        excess_bytes = self.excess_bytes(mesh, stage, level)
        bound_s = self.plain_level_bound_s(mesh, size, stage, level)
        if bound_s >= enough_s or (not excess_bytes and self._plain_stage(stage) is not None):
            return bound_s
        sums = not self.costs.reduces_per_micro_batch(stage, mesh.dp, level)
        pieces_s, more_s = self._least_s(stage, excess_bytes, sums=sums)
        return self._bound_with_optimizer_s(mesh, size, stage, level, pieces_s, more_s)

    def plain_level_bound_s(self, mesh: Mesh, size: int, stage: StageConfig, level: int) -> float:
        """The same whatever has to be recomputed; 0 where it is not known which blocks take the least."""
        plain = self._plain_stage(stage)
        if plain is None:
            return 0.0
        key = mesh, plain, level
        if key not in self._level_bounds:
            sums = not self.costs.reduces_per_micro_batch(stage, mesh.dp, level)
            pieces_s = self.costs.piece_seconds(plain, sums=sums)
            self._level_bounds[key] = self._bound_with_optimizer_s(mesh, size, plain, level, pieces_s)
        return self._level_bounds[key]

    def _plain_stage(self, stage: StageConfig) -> StageConfig | None:
        """The stage whose blocks take the least of all that `stage` may have; None where it is not known."""
        if not self.spaces.is_partial(stage.recompute):
            return stage
        return without_recompute(stage) if self.costs.recompute_only_adds else None

    def _bound_with_optimizer_s(
        self, mesh: Mesh, size: int, stage: StageConfig, level: int, pieces_s: Floats, more_s: float = 0.0
    ) -> float:
        """`_pipeline_bound_s` with transfers, and with gathers and reductions that every micro-batch waits for: a block
        takes no less than these keep their channels busy."""
        gathers = self.costs.gathers_per_use(stage, mesh.dp, level)
        reduces = self.costs.reduces_per_micro_batch(stage, mesh.dp, level)
        if gathers or reduces:
            gathered, reduced = self._least_busy_s(mesh, stage, level)
            pieces_s, backward = pieces_s.copy(), pieces_s[:, 1:].sum(axis=1)
            if gathers:
                np.maximum(pieces_s[:, 0], gathered, out=pieces_s[:, 0])
            busy = np.maximum(gathers * gathered, reduces * reduced)
            pieces_s[:, -1] += np.maximum(busy - backward, 0.0)
        transfers_s = self.transfers_s(mesh, stage)
        return self._pipeline_bound_s(mesh, size, stage.split, pieces_s, more_s, transfers_s=transfers_s)

    def _least_busy_s(self, mesh: Mesh, stage: StageConfig, level: int) -> tuple[Floats, Floats]:
        """(piece) seconds of gathers and of reductions (`Costs.optimizer_s`), the least of all orders of the axes."""
        key = mesh, stage.sequence_parallel, stage.split, level
        if key not in self._busy:
            every = [self.costs.optimizer_s(ordered, mesh.dp, level)[:2] for ordered in self.in_orders(mesh, stage)]
            gathered, reduced = (functools.reduce(np.minimum, part) for part in zip(*every, strict=True))
            self._busy[key] = gathered, reduced
        return self._busy[key]

    def transfers_s(self, mesh: Mesh, stage: StageConfig) -> tuple[float, ...]:
        """Between stages; the least of all orders where none is chosen yet."""
        if stage.order:
            return self.costs.transfer_s(stage, mesh.dp, mesh.pp)
        every = [
            self.costs.transfer_s(in_order(stage, order), mesh.dp, mesh.pp) for order in self.axis_orders.orders(mesh)
        ]
        return tuple(map(min, *every)) if len(every) > 1 else every[0]

    def _mesh_bound_s(self, mesh: Mesh, size: int, stage: StageConfig, enough_s: float) -> float:
        """A bound for everything with one stage configuration, whatever is recomputed and at any optimizer level."""
        plain = self._plain_stage(stage)
        if plain is None:
            return self._pipeline_bound_s(mesh, size, stage.split, self._least_s(stage, 0.0)[0], enough_s=enough_s)
        return self._plain_bound_s(mesh, size, plain, enough_s)

    def _plain_bound_s(self, mesh: Mesh, size: int, stage: StageConfig, enough_s: float) -> float:
        """The same if all blocks recompute in the mode of `stage`; made once for all modes and meshes that share it."""
        key = mesh.pp, mesh.dp, in_any_order(stage)
        if key in self._plain_bounds:
            return self._plain_bounds[key]
        last = 3 if stage.split else 2
        bound_s = 0.0
        for num_parts in range(1 if enough_s < float("inf") else last, last + 1):
            pieces_s = self.costs.piece_seconds(stage, num_parts)
            bound_s = self._pipeline_bound_s(mesh, size, stage.split, pieces_s, enough_s=enough_s)
            if bound_s >= enough_s:
                return bound_s
        self._plain_bounds[key] = bound_s
        return bound_s

    def quick_floor(self, mesh: Mesh, stage: StageConfig, level: int) -> Table:
        """An early table no entry of which is above `floor`, from quickly known values."""
        if level < 2 or not self.costs.recompute_only_adds:
            return self.floor(mesh, stage, level)
        return self._least_table(
            [
                self.costs.with_optimizer(self.costs.quick_floor(ordered, mesh.dp, level), ordered, mesh.dp, level)
                for ordered in self.in_orders(mesh, stage)
            ]
        )

    def _least_s(self, stage: StageConfig, excess_bytes: float, *, sums: bool = False) -> tuple[Floats, float]:
        """(piece, part) seconds of one micro-batch at least, and what recomputing adds to the model beyond that.

        Where some blocks may keep everything: each piece as the shorter of its two kinds, and what recomputing adds to
        save that number of bytes, where it adds least per byte. `sums` as of `Costs.piece_seconds`.
        """
        costs = self.costs
        if not self.spaces.is_partial(stage.recompute):
            return costs.piece_seconds(stage, sums=sums), 0.0
        if not excess_bytes and costs.recompute_only_adds:
            return costs.piece_seconds(without_recompute(stage), sums=sums), 0.0
        again = costs.piece_seconds(stage, sums=sums)
        least = np.minimum(again, costs.piece_seconds(without_recompute(stage), sums=sums))
        again_bytes, once_bytes = (
            self.peak_memory.kept_bytes(in_any_place(variant)) for variant in (stage, without_recompute(stage))
        )
        saved = np.array(once_bytes) - np.array(again_bytes)
        longer = (again - least)[list(costs.blocks)].sum(axis=1)
        if excess_bytes > 0 and (saved > 0).any():
            return least, excess_bytes * float((longer[saved > 0] / saved[saved > 0]).min())
        return least, 0.0

    def floor(self, mesh: Mesh, stage: StageConfig, level: int) -> Table:
        """An early table that no configuration of a node is below, in whichever order of the axes."""
        partial = self.spaces.is_partial(stage.recompute)
        return self._least_table([
            self.costs.with_optimizer(
                self.costs.floor_table(ordered, mesh.dp, level, partial=partial), ordered, mesh.dp, level
            )
            for ordered in self.in_orders(mesh, stage)
        ])  # fmt: skip

    def floor_and_longer(
        self, mesh: Mesh, stage: StageConfig, level: int, count: int, blocks: Floats
    ) -> tuple[Table, Longer]:
        """An early table of blocks that keep everything, and what each of `blocks` that recompute adds to it.

        No gather or reduction runs beside either of them.
        """
        once = self.costs.floor_table(stage, mesh.dp, 0, partial=True)
        table = self._least_table(
            [self.costs.with_optimizer(once, ordered, mesh.dp, level) for ordered in self.in_orders(mesh, stage)]
        )
        again = self.costs.relaxed_table(stage, mesh.dp, 0)
        return table, Longer.of(once, again, list(self.costs.blocks), count, blocks)

    @staticmethod
    def _least_table(tables: Sequence[Table]) -> Table:
        return functools.reduce(Table.least, tables)

    def in_orders(self, mesh: Mesh, stage: StageConfig) -> list[StageConfig]:
        """The orders of the axes in which the optimizer's communication may be fastest."""
        return [in_order(stage, order) for order in self.axis_orders.nearest(mesh)]
