"""The plan of a transformer for given degrees. Nothing is searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plans.degrees.check import check
from plans.degrees.groups import mesh_axes
from plans.degrees.rules import tied_head
from plans.degrees.value import Degrees
from plans.errors import TwofoldError
from plans.lower.collectives import by_collectives
from plans.model.graph import Graph
from plans.model.transformer.parts import parts_of
from plans.model.transformer.recompute import recompute_set
from plans.model.transformer.sizes import sizes_of
from plans.model.transformer.strategies import block_strategies
from plans.plan import Plan, Stage

__all__ = ["chunk_operators", "plan_of"]


def plan_of(
    degrees: Degrees,
    graph: Graph,
    *,
    recompute: Sequence[str] = (),
    stages: Sequence[Sequence[str]] | None = None,
    full_batch: bool = True,
) -> Plan:
    """The plan of these degrees for a graph that `transformer` built.

    Args:
        degrees: everything they state is in the plan: layers per chunk, order of the axes, what recomputes.
        graph: graph of the full batch.
        recompute: names of operators or modules that recompute, instead of a mode.
        stages: operators per chunk, instead of full blocks.
        full_batch: see `Plan`.

    Raises:
        TwofoldError: degrees that are impossible for the graph, a graph of another batch.

    >>> from plans.model.transformer import transformer
    >>> plan = plan_of(Degrees(dp=2, tp=2, pp=2, global_batch=16), transformer("llama-3-8b", batch_size=16))
    >>> plan.num_micro_batches, [stage.operators[-1] for stage in plan.stages]
    (8, ['layers.15.residual', 'loss'])
    """
    if graph.batch_size != degrees.global_batch:
        raise TwofoldError(
            f"{graph.name} has a batch of {graph.batch_size}, the degrees have a batch of {degrees.global_batch}; "
            f"build it with batch_size={degrees.global_batch}"
        )
    sizes = sizes_of(graph)
    check(degrees, sizes if stages is None else replace(sizes, num_layers=0))
    placement = degrees.pipeline.placement
    if sentence := tied_head(sizes, degrees.pp, degrees.schedule, degrees.virtual):
        raise TwofoldError(sentence)
    axes = mesh_axes(dp=degrees.dp, cp=degrees.cp, tp=degrees.tp, num_kv_heads=sizes.kv_heads, ep=degrees.ep)
    meshes = [axes.mesh(degrees.stage_ranks(number)) for number in range(degrees.pp)]
    chunks = chunk_operators(graph, degrees.layers_of(sizes.num_layers)) if stages is None else stages
    if len(chunks) != len(placement):
        raise TwofoldError(f"operators are given for {len(chunks)} chunks, but pp {degrees.pp} has {len(placement)}")
    some = None if degrees.recompute_layers is None else _first_blocks(graph, chunks, degrees.recompute_layers)
    plan = Plan(
        graph=graph,
        stages=tuple(
            Stage(mesh=meshes[owner], operators=tuple(part)) for owner, part in zip(placement, chunks, strict=True)
        ),
        strategies=block_strategies(graph, axes, sequence_parallel=degrees.sequence_parallel),
        num_micro_batches=degrees.num_micro_batches, schedule=degrees.schedule, optimizer=degrees.optimizer,
        recompute=recompute_set(graph, recompute or degrees.recompute, some), full_batch=full_batch,
        fused=degrees.fused, interleave=degrees.interleave, overlap_pairs=degrees.overlap_pairs,
        receives=degrees.receives,
    )  # fmt: skip
    return by_collectives(plan) if degrees.ep > 1 and degrees.tp > 1 else plan  # tokens go by all-to-all


def chunk_operators(graph: Graph, layers: Sequence[int]) -> list[tuple[str, ...]]:
    """The operators of each chunk of a transformer, which has `layers` blocks: embedding first, head last.

    >>> from plans.degrees import even_layers
    >>> from plans.model.transformer import transformer
    >>> [len(chunk) for chunk in chunk_operators(transformer("llama-2-7b", num_layers=6), even_layers(6, 4))]
    [21, 40, 40, 24]
    """
    parts, first = parts_of(graph), 0
    chunks: list[list[str]] = []
    for count in layers:
        chunks.append([name for block in parts.blocks[first : first + count] for name in block])
        first += count
    chunks[0] = [*parts.embedding, *chunks[0]]
    chunks[-1] = [*chunks[-1], *parts.head]
    return [tuple(names) for names in chunks]


def _first_blocks(graph: Graph, chunks: Sequence[Sequence[str]], count: int) -> set[int]:
    """The numbers of the first `count` blocks of every chunk."""
    owner = {name: number for number, chunk in enumerate(chunks) for name in chunk}
    blocks: dict[int, list[int]] = {}
    for number, block in enumerate(parts_of(graph).blocks):
        blocks.setdefault(owner[block[0]], []).append(number)
    return {number for own in blocks.values() for number in own[:count]}
