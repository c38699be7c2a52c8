"""The plan: how one training step is spread over devices, as a value and as a file.

A plan holds its graph, so that a plan file alone can be simulated and run. Files are JSON, versioned, written
atomically; unknown keys are refused with their path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.layout import DimAxes, Layout, TensorLayout
from plans.model.graph import Graph, Operator
from plans.operators import OperatorSpec
from plans.optimizer import Optimizer
from plans.reading import json_of, read_file
from plans.shown import Shown
from plans.step_check import StepCheck
from plans.stored_redistribution import Redistribution

__all__ = [
    "EXECUTIONS",
    "PLAN_VERSION",
    "RECEIVES",
    "Plan",
    "Prediction",
    "Stage",
    "Strategy",
    "check_execution",
    "load_plan",
    "plan_digest",
    "save_plan",
    "slices_refused",
]

PLAN_VERSION = 2

EXECUTIONS = ("graph", "eager")
"""Ways to run a step (`Plan.execution`)."""

RECEIVES = ("ahead", "needed")
"""Values of `Plan.receives`: when to receive from other stages."""


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which mesh axes split which dims of one operator; dims that are absent stay whole.

    `mesh` is the operator's own mesh over its stage's ranks; None is the stage's mesh. `out` gives, per dim of the
    output, the axes that split it for its readers: the output (maybe of partial sums) is brought to that layout
    right after the operator. None keeps the layout in which it is computed.
    """

    dims: dict[str, DimAxes] = {}
    mesh: Layout | None = None
    out: tuple[DimAxes, ...] | None = None

    def __hash__(self) -> int:
        return hash((tuple(sorted(self.dims.items())), self.mesh, self.out))

    def output_layout(self, spec: OperatorSpec, index: int, mesh: Layout) -> TensorLayout:
        """The layout of output `index` as later operators read it: `out` if it is given; `mesh` is the operator's."""
        if self.out is None or index:
            return spec.output_layout(index, mesh, self.dims)
        return TensorLayout(mesh=mesh, dims=self.out)

    def check(self, spec: OperatorSpec, mesh: Layout, name: str) -> None:
        """Refuse what operator `name` cannot carry out on `mesh`.

        Raises:
            TwofoldError: what `OperatorSpec.check` refuses, or an `out` that does not cut the output evenly.
        """
        spec.check(mesh, self.dims, name)
        if self.out is None:
            return
        shape = spec.output_shape(0)
        if not shape:
            raise TwofoldError(f"operator {name!r} ({spec.kind}) returns a scalar, which cannot be split")
        self.output_layout(spec, 0, mesh).check(shape, f"the output of operator {name!r}")


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A chunk of the graph on a mesh of ranks; chunks in order are the virtual stages of the pipeline."""

    mesh: Layout
    operators: tuple[str, ...]


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The prediction for the plan when it was chosen, with the figures of `plans.figures`."""

    machine: str
    step_s: float
    peak_bytes: int
    exposed_comm_s: float | None = None
    bubble_fraction: float | None = None
    low_s: float | None = None
    high_s: float | None = None


class Plan(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The distribution of one training step over devices.

    Args:
        graph: for the full batch of a step.
        stages: chunks in pipeline order; several chunks may have the same ranks (virtual stages).
        strategies: strategy by operator name; operators without one are replicated on their stage.
        num_micro_batches: number of equal parts of the batch; the loss is the mean over them.
        schedule: name of a schedule of `plans.schedules`.
        recompute: operators whose outputs are freed after the forward and recomputed in the backward.
        optimizer: its kind, settings and sharding.
        full_batch: True: every rank reads the full batch and takes its part; False: every rank of a stage reads its
            part, dim 0 split over all ranks of the stage.
        output_broadcast: whether every stage gets the loss, or only the last.
        interleave: number of slices of a micro-batch that overlap communication with compute; 1 for none.
        interleave_order: "interleaved", or "sequential": one slice after the other (to compare with).
        overlap_pairs: whether a forward and the following backward of another chunk run at the same time, as in
            dualpipe_v (`plans.schedules.pairs`).
        memory_limit_bytes: memory limit per rank, or None.
        execution: "graph": from the third step on, a step is one launch of a recorded graph, if the device supports it
            (a CPU runs eagerly); "eager": the host issues every instruction.
        fused: whether consecutive memory-bound instructions are fused (`plans.lower.fuse`). Only GPUs gain by it.
        receives: when to receive from other stages: "ahead", during the action before the one that needs it, or
            "needed", when that action begins. The executor always uses "needed" on GPUs, where a transfer occupies
            multiprocessors while it waits for its peer.
        redistributions: steps chosen by a machine's price, where they are not those with the fewest bytes.
        step_check: which steps are skipped; None skips none.
        prediction: the simulator's prediction, for information.

    Raises:
        TwofoldError: see `check`.

    >>> from plans.model.mlp import mlp_graph
    >>> graph = mlp_graph([64, 32, 8], batch_size=16)
    >>> names = tuple(operator.name for operator in graph.operators)
    >>> Plan(graph=graph, stages=(Stage(mesh=Layout((2,), ("dp",)), operators=names),), num_micro_batches=4)
    <Plan mlp: 2 ranks, 1 stage, 4 micro-batches, 1f1b>
    """

    version: int = PLAN_VERSION
    graph: Graph
    stages: tuple[Stage, ...]
    strategies: dict[str, Strategy] = {}
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: tuple[str, ...] = ()
    optimizer: Optimizer = Optimizer()
    full_batch: bool = True
    output_broadcast: bool = False
    interleave: int = 1
    interleave_order: str = "interleaved"
    overlap_pairs: bool = False
    memory_limit_bytes: int | None = None
    execution: str = "graph"
    fused: bool = True
    receives: str = "ahead"
    redistributions: tuple[Redistribution, ...] = ()
    step_check: StepCheck | None = None
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        self.check()

    def __repr__(self) -> str:
        ranks, stages = self.num_ranks, len(self.stages)
        summary = f"{ranks} rank{'s' * (ranks != 1)}, {stages} stage{'s' * (stages != 1)}"
        name = "custom schedule" if "\n" in self.schedule else self.schedule
        micro_batches = f"{self.num_micro_batches} micro-batch{'es' * (self.num_micro_batches != 1)}"
        return f"<Plan {self.graph.name}: {summary}, {micro_batches}, {name}>"

    def __hash__(self) -> int:
        return hash((self.graph, self.stages, self.num_micro_batches, self.schedule, tuple(sorted(self.strategies))))

    def check(self) -> None:
        """Raise an error if the plan cannot be lowered.

        Raises:
            TwofoldError: wrong version, operators that are missing or in two stages, a stage that runs before its
                inputs, overlapping or unequal rank sets, invalid strategies, a batch that is not divisible.
        """
        if self.version != PLAN_VERSION:
            raise TwofoldError(
                f"the plan has version {self.version}, this twofold reads version {PLAN_VERSION}; plan again"
            )
        self._check_batch()
        placed = self._check_stages()
        self._check_names()
        self._check_ranks()
        self._check_strategies(placed)
        if self.step_check is not None:
            self.step_check.check(self.graph, self.optimizer.master_dtype)

    def _check_batch(self) -> None:
        if self.num_micro_batches < 1 or self.graph.batch_size % self.num_micro_batches:
            raise TwofoldError(
                f"{self.num_micro_batches} micro-batches do not divide the batch of {self.graph.batch_size}: "
                f"{self.graph.batch_size} % {self.num_micro_batches} != 0"
            )
        if self.interleave_order not in ("interleaved", "sequential"):
            raise TwofoldError(f"interleave_order {self.interleave_order!r} is not known: interleaved or sequential")
        check_execution(self.execution)
        if self.receives not in RECEIVES:
            raise TwofoldError(f"receives {self.receives!r} is not known: {' or '.join(RECEIVES)}")
        if sentence := slices_refused(self.graph.batch_size // self.num_micro_batches, self.interleave):
            raise TwofoldError(sentence)

    def _check_stages(self) -> dict[str, int]:
        """Check the order of the stages and return operator -> the number of its stage."""
        known = {operator.name for operator in self.graph.operators}
        placed: dict[str, int] = {}
        for number, stage in enumerate(self.stages):
            for name in stage.operators:
                if name not in known:
                    raise TwofoldError(f"stage {number} lists the operator {name!r}, which is not in the graph")
                if name in placed:
                    raise TwofoldError(f"operator {name!r} is in stage {placed[name]} and in stage {number}")
                placed[name] = number
        if missing := [operator.name for operator in self.graph.operators if operator.name not in placed]:
            raise TwofoldError(f"no stage contains {', '.join(missing)}")
        made = {name: placed[operator.name] for operator in self.graph.operators for name in operator.outputs}
        for operator in self.graph.operators:
            for name in operator.inputs:
                if made.get(name, 0) > placed[operator.name]:
                    raise TwofoldError(
                        f"operator {operator.name!r} in stage {placed[operator.name]} reads {name!r}, which is "
                        f"written later, in stage {made[name]}"
                    )
        return placed

    def _check_names(self) -> None:
        known = {operator.name for operator in self.graph.operators}
        if unknown := set(self.strategies) - known:
            raise TwofoldError(f"strategies are given for {sorted(unknown)}, which the graph does not have")
        if unknown := set(self.recompute) - known:
            raise TwofoldError(f"recompute names {sorted(unknown)}, which the graph does not have")
        keys = [redistribution.key for redistribution in self.redistributions]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            raise TwofoldError(f"the redistribution from {twice[0][0]} to {twice[0][1]} is stored more than once")

    def _check_ranks(self) -> None:
        groups = {frozenset(stage.mesh.rank_list) for stage in self.stages}
        ranks = [rank for group in groups for rank in group]
        if sorted(ranks) != list(range(len(ranks))):
            raise TwofoldError(f"the stages' ranks {sorted(ranks)} must be 0 to n-1, each in one group of ranks")
        if len({stage.mesh.rank_list for stage in self.stages}) != len(groups):
            lists = [list(stage.mesh.rank_list) for stage in self.stages]
            raise TwofoldError(f"stages on the same ranks must list them in the same order; the stages have {lists}")

    def _check_strategies(self, placed: Mapping[str, int]) -> None:
        part = self.slice_graph
        for operator in part.operators:
            strategy = self.strategy(operator)
            stage_mesh = self.stages[placed[operator.name]].mesh
            mesh = strategy.mesh or stage_mesh
            if mesh is not stage_mesh and set(mesh.rank_list) != set(stage_mesh.rank_list):
                raise TwofoldError(
                    f"the mesh of operator {operator.name!r} has the ranks {sorted(mesh.rank_list)}, its stage runs "
                    f"on {sorted(stage_mesh.rank_list)}; the mesh of an operator must reorder the ranks of its stage"
                )
            strategy.check(part.spec(operator), mesh, operator.name)

    def strategy(self, operator: Operator) -> Strategy:
        """The strategy of an operator; replicated when none is given."""
        return self.strategies.get(operator.name, _REPLICATED)

    def stage_of(self) -> Mapping[str, int]:
        """The stage number of each operator, by operator name."""
        return {name: number for number, stage in enumerate(self.stages) for name in stage.operators}

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the plan."""
        return len({rank for stage in self.stages for rank in stage.mesh.rank_list})

    @property
    def micro_graph(self) -> Graph:
        """The graph of one micro-batch."""
        return self.graph.with_batch(self.graph.batch_size // self.num_micro_batches)

    @property
    def num_slices(self) -> int:
        """Number of parts that the batch of a step is cut into: the slices of all micro-batches."""
        return self.num_micro_batches * self.interleave

    @property
    def slice_graph(self) -> Graph:
        """The graph of one slice of a micro-batch, or of the micro-batch if it is not sliced."""
        return self.graph.with_batch(self.graph.batch_size // self.num_slices)


_REPLICATED = Strategy()


def slices_refused(micro_batch: int, interleave: int) -> str | None:
    """Why a micro-batch cannot be cut into `interleave` slices; None where it can.

    >>> slices_refused(4, 2)
    """
    if interleave >= 1 and micro_batch % interleave == 0:
        return None
    rest = f": {micro_batch} % {interleave} != 0" if interleave >= 1 else ""
    return f"interleave {interleave} does not divide the micro-batch of {micro_batch}{rest}"


def check_execution(execution: str) -> None:
    """Refuse an unknown execution.

    Raises:
        TwofoldError: anything but "graph" and "eager".
    """
    if execution not in EXECUTIONS:
        raise TwofoldError(
            f"execution {execution!r} is not known: graph (a step is one launch, if the device supports it) or eager"
        )


def _encode(value: Any) -> Any:
    if isinstance(value, Layout):
        return {"device_matrix": value.device_matrix, "alias_name": value.alias_name, "rank_list": value.rank_list}
    raise NotImplementedError(type(value))


def _decode(kind: type, value: Any) -> Any:
    if kind is not Layout:
        raise NotImplementedError(kind)
    if not isinstance(value, dict) or set(value) != {"device_matrix", "alias_name", "rank_list"}:
        raise ValueError(f"a mesh has the keys device_matrix, alias_name and rank_list, not {value!r}")
    return Layout(value["device_matrix"], value["alias_name"], value["rank_list"])


def plan_to_json(plan: Plan) -> bytes:
    """The plan as JSON, as it is written to a file."""
    return msgspec.json.format(msgspec.json.encode(plan, enc_hook=_encode), indent=1)


def plan_digest(plan: Plan) -> str:
    """16 hexadecimal digits that identify a plan: of everything in the plan's file."""
    return hashlib.blake2b(plan_to_json(plan), digest_size=8).hexdigest()


def plan_from_json(text: bytes, source: str = "plan") -> Plan:
    """The plan of a file's bytes.

    Raises:
        TwofoldError: not JSON, truncated, an unknown key (with its path), another version, an impossible plan.
    """
    advice = "it may be truncated, plan again"
    marks = json_of(text, source, _Marks, advice=advice)
    if marks.num_devices is not None:
        raise TwofoldError(f"{source}: a machine file, not a plan; name it with --machine")
    version = marks.version
    if version is None:
        raise TwofoldError(f"{source}: not a plan file, it has no `version`; write one with `twofold plan`")
    if version != PLAN_VERSION:
        raise TwofoldError(f"{source}: plan version {version}, this twofold reads version {PLAN_VERSION}; plan again")
    return json_of(text, source, Plan, advice=advice, dec_hook=_decode)


class _Marks(msgspec.Struct):
    """What tells a plan file from others; `num_devices` is a key of machine files only."""

    version: int | None = None
    num_devices: Any = None


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write a plan file atomically.

    >>> save_plan(plan, "plan.json")  # doctest: +SKIP
    PosixPath('plan.json')
    """
    return write_atomically(path, plan_to_json(plan) + b"\n")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file.

    Raises:
        TwofoldError: no such file, or what `plan_from_json` refuses.

    >>> load_plan("plan.json")  # doctest: +SKIP
    <Plan mlp: 2 ranks, 1 stage, 4 micro-batches, 1f1b>
    """
    return plan_from_json(read_file(path, "the plan file"), os.fspath(path))
