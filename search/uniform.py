"""A plan for given degrees: data, context, tensor and pipeline parallel, the same for every operator.

For a graph of `tf.transformer` nothing is searched: `plans.degrees.plan` makes the plan. For any other graph, the
data-parallel axis splits the batch dim of every operator that supports it, and an exact search over the other dims
chooses what the tensor-parallel axis splits. It finds the usual column-then-row pattern by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from costmodels import Machine
from plans.degrees import DEGREES, ORDER, Degrees, check, check_stated
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.model.graph import Graph, Operator
from plans.model.transformer import is_transformer, recompute_set
from plans.operators import OperatorSpec
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from search.attach_prediction import predicted
from search.operators.additive import StageCosts
from search.operators.pricing import instruction_cost
from search.operators.refine import cheapest
from search.operators.stages import balanced_cuts

__all__ = ["uniform_plan"]

_ANY_GRAPH = ("dp", "tp", "pp", "micro_batch", "schedule", "virtual", "zero")
"""Degrees that any graph can have; the others are for transformers."""


def uniform_plan(
    graph: Graph,
    machine: Machine,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    micro_batch: int | None = None,
    schedule: str = "1f1b",
    virtual: int = 1,
    recompute: str | Sequence[str] = "none",
    recompute_layers: int | None = None,
    zero: int | None = None,
    sequence_parallel: bool = False,
    optimizer: Optimizer | None = None,
    layers_per_stage: Sequence[int] | None = None,
    stages: Sequence[Sequence[str]] | None = None,
    order: tuple[str, ...] = ORDER,
    full_batch: bool = True,
    fused: bool = True,
) -> Plan:
    """Make a plan for given degrees.

    Args:
        graph: graph of the full batch.
        machine: machine of the plan; it prices choices that are searched.
        dp, tp, pp: data-, tensor- and pipeline-parallel degree.
        cp: context-parallel degree: number of ranks that share a sequence; transformers only.
        ep: expert-parallel degree: number of data-parallel ranks that share the experts; transformers with experts
            only.
        micro_batch: samples of a micro-batch per data-parallel rank; by default the full batch.
        schedule: pipeline schedule.
        virtual: chunks of the model per pipeline rank (chunk i on rank i % pp); V-shaped schedules always have two.
        recompute: "none"; "memory_bound" (norms and activation functions), "selective" (the attention core),
            "selective_op" (as torchtitan) or "full" (all of a block but its input) for transformers; or names of
            operators or modules whose outputs are recomputed in the backward. With "none", those of `graph.recompute`.
        recompute_layers: number of first blocks of every chunk that recompute; for transformers with a mode only.
        zero: optimizer-parallel level; None: that of `optimizer`.
        sequence_parallel: split the sequence over tp where tp splits nothing else; transformers only.
        optimizer: kind and settings of the optimizer.
        layers_per_stage: blocks of each chunk, in the order of the model; even by default. The embedding is on the
            first chunk, the head on the last. Transformers only.
        stages: operators per chunk; by default balanced by compute.
        order: order of the mesh axes over the ranks, innermost first; only transformers allow another than tp, cp, dp,
            pp.
        full_batch: see `Plan`.
        fused: whether to fuse memory-bound instructions if the machine gains by it (`Machine.fuses`).

    Returns:
        The plan. Only searched graphs have a `prediction`, because a transformer may have 100,000 ranks.

    Raises:
        TwofoldError: what `plans.degrees.check` refuses; degrees of transformers for another graph.

    >>> from plans.model.transformer import transformer
    >>> plan = uniform_plan(transformer("llama-3-8b", batch_size=16), Machine.load("h200-x8"), dp=2, tp=2, pp=2,
    ...                     micro_batch=1, sequence_parallel=True)
    >>> plan.num_micro_batches, [stage.operators[-1] for stage in plan.stages]
    (8, ['layers.15.residual', 'loss'])
    """
    by_name = isinstance(recompute, str)
    level = (optimizer or Optimizer()).parallel_level if zero is None else zero
    values: dict[str, Any] = {
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": micro_batch, "schedule": schedule,
        "virtual": virtual, "recompute": recompute if by_name else "none", "recompute_layers": recompute_layers,
        "zero": level, "sequence_parallel": sequence_parallel, "order": order,
        "layers": None if layers_per_stage is None else tuple(layers_per_stage),
    }  # fmt: skip
    if micro_batch is None:
        check_stated({"dp": dp, "global_batch": graph.batch_size})
        values["micro_batch"] = graph.batch_size // dp
    degrees = Degrees.of(
        values, global_batch=graph.batch_size, optimizer=optimizer or Optimizer(), fused=fused and machine.fuses
    )
    check(degrees, num_devices=machine.num_devices, machine=machine.name)
    names = tuple(recompute) if not by_name else graph.recompute if recompute == "none" else ()
    if is_transformer(graph):
        return plan_of(degrees, graph, recompute=names, stages=stages, full_batch=full_batch)
    for name, degree in DEGREES.items():
        if name not in (*_ANY_GRAPH, "recompute") and values.get(name, degree.default) != degree.default:
            raise TwofoldError(f"{name}: for graphs of tf.transformer only; graph {graph.name!r} is searched")
    return predicted(_searched_plan(degrees, graph, machine, names, stages, full_batch), machine)


def _searched_plan(
    degrees: Degrees,
    graph: Graph,
    machine: Machine,
    recompute: Sequence[str],
    stages: Sequence[Sequence[str]] | None,
    full_batch: bool,
) -> Plan:
    """The plan of a graph of any kind: stages balanced where not given, strategies chosen."""
    placement, width = degrees.pipeline.placement, degrees.width
    meshes = [
        Layout((degrees.dp, degrees.tp), ("dp", "tp"), range(number * width, (number + 1) * width))
        for number in range(degrees.pp)
    ]
    searched = _Searched(graph=graph, machine=machine, degrees=degrees, full_batch=full_batch)
    chunks = stages or searched.balanced(len(placement), meshes[0])
    if len(chunks) != len(placement):
        raise TwofoldError(
            f"operators are given for {len(chunks)} chunks; pp {degrees.pp} has {len(placement)} of them"
        )
    strategies = searched.strategies(chunks, [meshes[owner] for owner in placement])
    return Plan(
        graph=graph,
        stages=tuple(
            Stage(mesh=meshes[owner], operators=tuple(part)) for owner, part in zip(placement, chunks, strict=True)
        ),
        strategies={name: strategy for name, strategy in strategies.items() if strategy.dims},
        num_micro_batches=degrees.num_micro_batches, schedule=degrees.schedule, optimizer=degrees.optimizer,
        full_batch=full_batch, recompute=recompute_set(graph, recompute or degrees.recompute), fused=degrees.fused,
    )  # fmt: skip


class _Searched:
    """Stage boundaries and strategies of a graph of any kind."""

    def __init__(self, *, graph: Graph, machine: Machine, degrees: Degrees, full_batch: bool) -> None:
        self.machine, self.degrees, self.full_batch = machine, degrees, full_batch
        self.micro = graph.with_batch(graph.batch_size // degrees.num_micro_batches)

    def _costs(self, names: Sequence[str] | None, mesh: Layout) -> StageCosts:
        chosen = None if names is None else set(names)
        return StageCosts(
            micro=self.micro, operators=[op for op in self.micro.operators if chosen is None or op.name in chosen],
            mesh=mesh, num_micro_batches=self.degrees.num_micro_batches, optimizer=self.degrees.optimizer,
            full_batch=self.full_batch, cost=instruction_cost(self.machine, mesh, self.degrees.num_ranks),
            allowed=self._follows_the_degrees,
        )  # fmt: skip

    def balanced(self, num_chunks: int, mesh: Layout) -> list[list[str]]:
        """Chunks of about equal compute."""
        names = [operator.name for operator in self.micro.operators]
        if num_chunks == 1:
            return [names]
        every = self._costs(None, mesh)
        weights = [every.own.compute_s(operator, Strategy()) for operator in every.operators]
        return [names[start:end] for start, end in balanced_cuts(weights, num_chunks)]

    def strategies(self, parts: Sequence[Sequence[str]], meshes: Sequence[Layout]) -> dict[str, Strategy]:
        """The cheapest strategies that follow the degrees."""
        found: dict[str, Strategy] = {}
        for part, mesh in zip(parts, meshes, strict=True):
            table = self._costs(part, mesh)
            found |= table.picked(cheapest(table.question(), 1).found[0].values)
        return found

    def _follows_the_degrees(self, operator: Operator, spec: OperatorSpec, strategy: Strategy, mesh: Layout) -> bool:
        """The data-parallel axis on the batch dim wherever that divides; the tensor-parallel one on another dim.

        An operator that contracts (a matrix product) must use the tensor-parallel axis if any of its other dims
        divides.
        """
        batch = self.micro.batch_dims.get(operator.name)
        given = {axis: dim for dim, axes in strategy.dims.items() for axis in axes}
        split = batch if _divides(spec, batch, mesh.size(("dp",))) else None
        if given.get("dp") != split or (batch is not None and given.get("tp") == batch):
            return False
        others = [dim for dim in spec.splittable if dim != batch]
        must = (
            bool(spec.contracted) and bool(spec.outputs[0])
            and any(_divides(spec, dim, mesh.size(("tp",))) for dim in others)
        )  # fmt: skip
        return not must or "tp" in given


def _divides(spec: OperatorSpec, dim: str | None, degree: int) -> bool:
    return degree > 1 and dim in spec.splittable and spec.sizes[dim] % degree == 0
