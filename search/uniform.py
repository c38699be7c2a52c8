"""A plan stated in the usual degrees: data, context, tensor and pipeline parallel, the same for every operator.

For a graph of `tf.transformer` all is stated, nothing searched: `plans.model.transformer.strategies` gives the
layouts. For any other graph the data-parallel axis splits the batch dim of every operator that can be split there,
and what the
tensor-parallel axis splits is chosen by the exact search over the other dims, which finds the well-known
column-then-row pattern by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from costmodels import Machine
from plans.degrees import ORDER, Degrees, check_order, check_recompute_layers
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower.collectives import by_collectives
from plans.model.graph import Graph, Operator
from plans.model.transformer import (
    block_strategies,
    check_degrees,
    is_transformer,
    mesh_axes,
    parts_of,
    recompute_set,
)
from plans.operators import OperatorSpec
from plans.plan import Optimizer, Plan, Stage, Strategy
from plans.schedules import chunks_per_rank, make_schedule
from search.attach_prediction import predicted
from search.operators.additive import StageCosts
from search.operators.eliminate import best_assignment
from search.operators.pricing import instruction_cost
from search.operators.stages import balanced_cuts

__all__ = ["spread_layers", "uniform_plan"]


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
) -> Plan:
    """The plan of given degrees.

    Args:
        graph: of the whole batch.
        machine: that it must fit on; it prices the choices where something is searched.
        dp, tp, pp: data-, tensor- and pipeline-parallel degree.
        cp: context-parallel degree: ranks share a sequence; transformers only.
        ep: expert-parallel degree: which part of the data-parallel ranks shares the experts out among themselves;
            transformers with a mixture of experts only.
        micro_batch: samples of one micro-batch per data-parallel rank; the whole batch by default.
        schedule: of the pipeline.
        virtual: chunks of the model per pipeline rank, in turn (chunk i on rank i % pp); V-shaped schedules have two
            by themselves, placed as a V.
        recompute: "none", "selective" (the attention core), "full" (all of a block but its input), or names of
            operators or modules whose outputs are made again in the backward.
        recompute_layers: that many blocks of every chunk, its first ones, recompute, the others keep everything;
            transformers and modes only.
        zero: optimizer-parallel level; None: that of `optimizer`.
        sequence_parallel: tp splits the sequence where it splits nothing else; transformers only.
        optimizer: its kind and settings.
        layers_per_stage: blocks of each chunk, in the order of the model; spread evenly by default, chunks in the
            middle first. The embedding is on the first chunk, the head on the last. Transformers only.
        stages: operators per chunk; balanced by compute when absent.
        order: in which ranks count along the axes, the innermost first; another than pp outermost, then dp, cp and tp
            is for transformers only.
        full_batch: see `Plan`.

    Returns:
        The plan. Its `prediction` is made for searched graphs only: a transformer may be for 100,000 ranks.

    Raises:
        TwofoldError: degrees that do not fit the machine or the model, a micro-batch that does not divide the batch.

    >>> from plans.model.transformer import transformer
    >>> plan = uniform_plan(transformer("llama-3-8b", batch_size=16), Machine.load("h200-x8"), dp=2, tp=2, pp=2,
    ...                     micro_batch=1, sequence_parallel=True)
    >>> plan.num_micro_batches, [stage.operators[-1] for stage in plan.stages]
    (8, ['layers.15.residual', 'loss'])
    """
    stated = is_transformer(graph)
    _check(graph, machine, {"dp": dp, "cp": cp, "tp": tp, "pp": pp}, stated)
    asked = {"cp": cp > 1, "ep": ep > 1, "sequence_parallel": sequence_parallel}
    check_order(order)
    asked |= {
        "order": order != ORDER,
        "layers_per_stage": layers_per_stage is not None,
        "recompute_layers": recompute_layers is not None,
    }
    if not stated and any(asked.values()):
        which = ", ".join(name for name, given in asked.items() if given)
        raise TwofoldError(f"{which}: for graphs of tf.transformer only; graph {graph.name!r} is searched")
    if graph.batch_size % dp:
        raise TwofoldError(f"a batch of {graph.batch_size} cannot be split over dp {dp}: {graph.batch_size % dp} left")
    per_rank = graph.batch_size // dp
    micro_batch = per_rank if micro_batch is None else micro_batch
    if micro_batch < 1 or per_rank % micro_batch:
        raise TwofoldError(
            f"micro-batches of {micro_batch} on each of {dp} data-parallel ranks do not divide the batch of "
            f"{graph.batch_size}: {per_rank} % {micro_batch} != 0"
        )
    count = per_rank // micro_batch
    chosen = optimizer or Optimizer()
    check_recompute_layers(recompute if isinstance(recompute, str) else "none", recompute_layers)
    if zero is not None:
        chosen = msgspec.structs.replace(chosen, parallel_level=zero)
    placement = _placement(schedule, pp, count, virtual)
    if stated:
        kv_heads = graph.tensors["layers.0.attention.k_heads.out"].shape[2]
        axes = mesh_axes(dp=dp, cp=cp, tp=tp, num_kv_heads=kv_heads, ep=ep)
        check_degrees(graph, cp=cp, tp=tp, sequence_parallel=sequence_parallel, ep=ep)
        if "output.weight" not in graph.tensors and placement[0] != placement[-1]:
            raise TwofoldError(
                f"{graph.name}: the head's matrix is the table of embeddings, but with pp {pp} and schedule "
                f"{schedule!r} they are on different ranks; take a V-shaped schedule such as zb_v, or a head of its "
                "own: tf.transformer(..., tied=False)"
            )
        degrees = Degrees(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, global_batch=dp, order=order)
        meshes = [axes.mesh(degrees.stage_ranks(number)) for number in range(pp)]
        parts = stages or spread_layers(graph, len(placement), layers_per_stage)
        strategies: Mapping[str, Strategy] = block_strategies(graph, axes, sequence_parallel=sequence_parallel)
    else:
        width = dp * tp
        meshes = [
            Layout((dp, tp), ("dp", "tp"), range(number * width, (number + 1) * width)) for number in range(pp)
        ]  # fmt: skip
        searched = _Searched(
            graph=graph, machine=machine, count=count, optimizer=chosen, full_batch=full_batch, num_ranks=width * pp
        )
        parts = stages or searched.balanced(len(placement), meshes[0])
        strategies = searched.strategies(parts, [meshes[owner] for owner in placement])
    if len(parts) != len(placement):
        raise TwofoldError(f"operators are given for {len(parts)} chunks; pp {pp} has {len(placement)} of them")
    plan = Plan(
        graph=graph,
        stages=tuple(
            Stage(mesh=meshes[owner], operators=tuple(part)) for owner, part in zip(placement, parts, strict=True)
        ),
        strategies={name: strategy for name, strategy in strategies.items() if strategy.dims},
        num_micro_batches=count, schedule=schedule, optimizer=chosen, full_batch=full_batch,
        recompute=recompute_set(
            graph, recompute, None if recompute_layers is None else _first_layers(graph, parts, recompute_layers)
        ),
    )  # fmt: skip
    if ep > 1 and tp > 1:
        plan = by_collectives(plan)  # tokens go by all-to-all, not rank to rank
    return plan if stated else predicted(plan, machine)


def _check(graph: Graph, machine: Machine, degrees: Mapping[str, int], stated: bool) -> None:
    num_ranks = 1
    for degree in degrees.values():
        num_ranks *= degree
    if min(degrees.values()) < 1 or num_ranks > machine.num_devices:
        shown = " * ".join(f"{name}({degree})" for name, degree in degrees.items() if name != "cp" or degree != 1)
        raise TwofoldError(f"{shown} = {num_ranks} ranks; machine {machine.name!r} has {machine.num_devices}")


def _placement(schedule: str, pp: int, num_micro_batches: int, virtual: int) -> tuple[int, ...]:
    """For each chunk of the model the pipeline rank that has it."""
    fixed = chunks_per_rank(schedule)
    given = virtual if fixed is None or virtual != 1 else None
    return make_schedule(schedule, pp, num_micro_batches, virtual=given).placement


def spread_layers(
    graph: Graph, num_chunks: int, layers_per_stage: Sequence[int] | None = None
) -> list[tuple[str, ...]]:
    """The operators of each chunk of a transformer: blocks spread evenly or as given, embedding first, head last.

    Where the blocks do not divide, chunks in the middle get one more: the first has the embedding, the last the head.

    Raises:
        TwofoldError: fewer blocks than chunks, numbers that do not add up to the blocks.

    >>> from plans.model.transformer import transformer
    >>> [len(part) for part in spread_layers(transformer("llama-2-7b", num_layers=6), 4)]
    [21, 40, 40, 24]
    """
    parts = parts_of(graph)
    num_layers = len(parts.blocks)
    if layers_per_stage is None:
        if num_layers < num_chunks:
            raise TwofoldError(
                f"{graph.name}: {num_layers} blocks for {num_chunks} chunks of the pipeline; take fewer, or give "
                "layers_per_stage with zeros for the first or the last chunk"
            )
        base, left = divmod(num_layers, num_chunks)
        inner_first = sorted(range(num_chunks), key=lambda chunk: (-min(chunk, num_chunks - 1 - chunk), chunk))
        more = set(inner_first[:left])
        layers_per_stage = [base + (chunk in more) for chunk in range(num_chunks)]
    if len(layers_per_stage) != num_chunks or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 0:
        raise TwofoldError(
            f"layers_per_stage {list(layers_per_stage)} gives {sum(layers_per_stage)} blocks to "
            f"{len(layers_per_stage)} chunks; {graph.name} has {num_layers} blocks for {num_chunks} chunks"
        )
    if empty := [chunk for chunk, layers in enumerate(layers_per_stage) if not layers and 0 < chunk < num_chunks - 1]:
        raise TwofoldError(f"layers_per_stage {list(layers_per_stage)} leaves nothing for chunk {empty[0]}")
    found, first = [], 0
    for layers in layers_per_stage:
        found.append([name for block in parts.blocks[first : first + layers] for name in block])
        first += layers
    found[0] = [*parts.embedding, *found[0]]
    found[-1] = [*found[-1], *parts.head]
    return [tuple(names) for names in found]


def _first_layers(graph: Graph, chunks: Sequence[Sequence[str]], count: int) -> set[int]:
    """The numbers of the first `count` blocks of every chunk."""
    owner = {name: number for number, chunk in enumerate(chunks) for name in chunk}
    found: dict[int, list[int]] = {}
    for number, block in enumerate(parts_of(graph).blocks):
        found.setdefault(owner[block[0]], []).append(number)
    return {number for own in found.values() for number in own[:count]}


class _Searched:
    """Stage boundaries and strategies of a graph of any kind."""

    def __init__(
        self, *, graph: Graph, machine: Machine, count: int, optimizer: Optimizer, full_batch: bool, num_ranks: int
    ) -> None:
        self.machine, self.count, self.optimizer = machine, count, optimizer
        self.full_batch, self.num_ranks = full_batch, num_ranks
        self.micro = graph.with_batch(graph.batch_size // count)

    def _costs(self, names: Sequence[str] | None, mesh: Layout) -> StageCosts:
        chosen = None if names is None else set(names)
        return StageCosts(
            micro=self.micro, operators=[op for op in self.micro.operators if chosen is None or op.name in chosen],
            mesh=mesh, num_micro_batches=self.count, optimizer=self.optimizer, full_batch=self.full_batch,
            cost=instruction_cost(self.machine, mesh, self.num_ranks), allowed=_follows_the_degrees,
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
            _, values = best_assignment(table.sizes, table.tables())
            found |= table.picked(values)
        return found


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
