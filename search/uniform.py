"""A plan stated in the usual degrees: data, tensor and pipeline parallel, the same for every operator.

The data-parallel axis splits the batch dim of every operator that can be split there. What the tensor-parallel axis
splits is chosen by the exact search over the other dims, which finds the well-known column-then-row pattern by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from costmodels import Machine
from plans.errors import TwofoldError
from plans.graph import Graph, Operator
from plans.layout import Layout
from plans.operators import OperatorSpec
from plans.plan import Optimizer, Plan, Stage, Strategy
from search.additive import StageCosts
from search.eliminate import best_assignment
from search.predicting import predicted
from search.pricing import instruction_cost
from search.stages import balanced_cuts

__all__ = ["uniform_plan"]


def uniform_plan(
    graph: Graph,
    machine: Machine,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    micro_batch: int | None = None,
    schedule: str = "1f1b",
    recompute: Sequence[str] = (),
    zero: int = 0,
    optimizer: Optimizer | None = None,
    stages: Sequence[Sequence[str]] | None = None,
    full_batch: bool = True,
) -> Plan:
    """The plan of given degrees.

    Args:
        graph: of the whole batch.
        dp, tp, pp: data-, tensor- and pipeline-parallel degree; ranks are laid out pp outermost, tp innermost.
        micro_batch: samples of one micro-batch over all data-parallel ranks; the whole batch by default.
        schedule: of the pipeline.
        recompute: operators whose outputs are made again in the backward.
        zero: optimizer-parallel level.
        optimizer: its kind and settings.
        stages: operators per stage; balanced by compute when absent.
        full_batch: see `Plan`.

    Raises:
        TwofoldError: degrees that do not fit the machine, a micro-batch that does not divide the batch.
    """
    if min(dp, tp, pp) < 1 or dp * tp * pp > machine.num_devices:
        raise TwofoldError(
            f"dp({dp}) * tp({tp}) * pp({pp}) = {dp * tp * pp} ranks; machine {machine.name!r} has {machine.num_devices}"
        )
    micro_batch = graph.batch_size if micro_batch is None else micro_batch
    if micro_batch < 1 or graph.batch_size % micro_batch:
        raise TwofoldError(f"micro-batches of {micro_batch} do not divide the batch of {graph.batch_size}")
    chosen = msgspec.structs.replace(optimizer or Optimizer(), parallel_level=zero)
    width = dp * tp
    meshes = [Layout((dp, tp), ("dp", "tp"), list(range(number * width, (number + 1) * width))) for number in range(pp)]
    count = graph.batch_size // micro_batch
    micro = graph.with_batch(micro_batch)

    def costs(names: Sequence[str] | None, mesh: Layout) -> StageCosts:
        return StageCosts(
            micro=micro, operators=[op for op in micro.operators if names is None or op.name in names], mesh=mesh,
            num_micro_batches=count, optimizer=chosen, full_batch=full_batch,
            cost=instruction_cost(machine, mesh, dp * tp * pp), allowed=_follows_the_degrees,
        )  # fmt: skip

    if stages is None:
        every = costs(None, meshes[0])
        weights = [every.compute_s(operator, Strategy()) for operator in every.operators]
        names = [operator.name for operator in every.operators]
        stages = [names[start:end] for start, end in balanced_cuts(weights, pp)] if pp > 1 else [names]
    strategies: dict[str, Strategy] = {}
    for stage, mesh in zip(stages, meshes, strict=True):
        table = costs(stage, mesh)
        _, values = best_assignment(table.sizes, table.tables())
        for operator, choices, value in zip(table.operators, table.choices, values, strict=True):
            strategies[operator.name] = choices[value]
    plan = Plan(
        graph=graph,
        stages=tuple(Stage(mesh=mesh, operators=tuple(stage)) for stage, mesh in zip(stages, meshes, strict=True)),
        strategies={name: strategy for name, strategy in strategies.items() if strategy.dims},
        num_micro_batches=count, schedule=schedule, recompute=tuple(recompute), optimizer=chosen, full_batch=full_batch,
    )  # fmt: skip
    return predicted(plan, machine)


def _follows_the_degrees(operator: Operator, spec: OperatorSpec, strategy: Strategy, mesh: Layout) -> bool:
    """The data-parallel axis on the batch dim wherever that divides; the tensor-parallel one on another dim.

    An operator that contracts (a matrix product) must use the tensor-parallel axis if any of its other dims divides.
    """
    batch = spec.leading
    given = {axis: dim for dim, axes in strategy.dims.items() for axis in axes}
    if given.get("dp") != (batch if _divides(spec, batch, mesh.size(("dp",))) else None) or given.get("tp") == batch:
        return False
    others = [dim for dim in spec.splittable if dim != batch]
    must = (
        bool(spec.contracted) and bool(spec.outputs[0]) and any(_divides(spec, d, mesh.size(("tp",))) for d in others)
    )
    return not must or "tp" in given


def _divides(spec: OperatorSpec, dim: str, degree: int) -> bool:
    return degree > 1 and dim in spec.splittable and spec.sizes[dim] % degree == 0
