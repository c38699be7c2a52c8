"""The operator graph before and after a search as nodes and edges, for pictures and files.

Before the search: operators, shapes, parameters. With a plan: stages, strategies, and on the edges the redistributions
from the layout of the producer to that of the reader. A graph of more than `MAX_NODES` operators is folded: consecutive
operators of one module become one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plans.layout import TensorLayout
from plans.lower.redistribution_policy import stored_ways
from plans.model.graph import Graph, Operator
from plans.plan import Plan
from plans.ranks import format_axes, format_shape

__all__ = ["MAX_NODES", "GraphData", "GraphEdge", "GraphNode", "graph_data"]

MAX_NODES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """An input of the graph, an operator, or several folded into one: `operators` names them, `stage` is the plan's."""

    name: str
    operators: tuple[str, ...] = ()
    kind: str = ""
    outputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    stage: int | None = None
    strategy: str = ""
    recomputed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEdge:
    """A tensor read by another node; with a plan the `steps` of its redistribution, in words."""

    source: str
    target: str
    tensor: str
    shape: tuple[int, ...]
    size_bytes: int
    made_as: str = ""
    read_as: str = ""
    steps: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphData:
    """The data of the picture and of the JSON file."""

    name: str
    state: str
    batch_size: int
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    note: str = ""


def graph_data(graph: Graph, plan: Plan | None = None, *, max_nodes: int = MAX_NODES) -> GraphData:
    """The nodes and edges of a graph; with a plan those of one micro-batch, with stages, strategies and what moves.

    Args:
        graph: as captured; with a plan the plan's own graph is drawn.
        plan: what the search found.
        max_nodes: operators beyond this many are folded by module.
    """
    shown = graph if plan is None else plan.micro_graph
    stage_of = {} if plan is None else plan.stage_of()
    runs, note = _runs(shown, stage_of, max_nodes)
    node_of = {operator.name: name for name, members in runs for operator in members}
    nodes = [
        GraphNode(name=tensor.name, kind="input", outputs=(format_shape(tensor.shape),)) for tensor in shown.inputs
    ]
    nodes += [_node(shown, plan, name, members) for name, members in runs]
    producers, edges = shown.producers(), {}
    for operator in shown.operators:
        for index, name in enumerate(operator.inputs):
            tensor, maker = shown.tensors[name], producers.get(name)
            if tensor.kind in ("parameter", "constant"):
                continue
            source, target = name if maker is None else node_of[maker.name], node_of[operator.name]
            if source == target:
                continue
            made_as, read_as, steps = ("", "", ()) if plan is None else _moves(shown, plan, maker, operator, index)
            edges[source, target, name, read_as] = GraphEdge(
                source=source, target=target, tensor=name, shape=tensor.shape, size_bytes=tensor.size_bytes,
                made_as=made_as, read_as=read_as, steps=steps,
            )  # fmt: skip
    return GraphData(
        name=shown.name,
        state="before the search" if plan is None else "after the search",
        batch_size=shown.batch_size,
        nodes=tuple(nodes),
        edges=tuple(edges.values()),
        note=note,
    )


def _node(graph: Graph, plan: Plan | None, name: str, members: Sequence[Operator]) -> GraphNode:
    made = {tensor for operator in members for tensor in operator.outputs}
    read_outside = {tensor for operator in graph.operators if operator not in members for tensor in operator.inputs} | {
        graph.loss
    }
    outputs = [tensor for operator in members for tensor in operator.outputs if tensor in made & read_outside]
    parameters = dict.fromkeys(
        tensor for operator in members for tensor in operator.inputs if graph.tensors[tensor].kind == "parameter"
    )
    texts = tuple(f"{tensor.rpartition('.')[2]} {format_shape(graph.tensors[tensor].shape)}" for tensor in parameters)
    stage, strategy = None, ""
    if plan is not None:
        stage = plan.stage_of()[members[0].name]
        texts = tuple(_parameter(graph, plan, members, tensor) for tensor in parameters)
        if len(members) == 1:
            dims = plan.strategy(members[0]).dims
            strategy = ", ".join(f"{dim}→{format_axes(axes)}" for dim, axes in dims.items() if axes) or "whole"
    return GraphNode(
        name=name,
        operators=tuple(operator.name for operator in members),
        kind=members[0].kind if len(members) == 1 else "",
        outputs=tuple(format_shape(graph.tensors[tensor].shape) for tensor in outputs),
        parameters=texts,
        stage=stage,
        strategy=strategy,
        recomputed=plan is not None and any(operator.name in plan.recompute for operator in members),
    )


def _parameter(graph: Graph, plan: Plan, members: Sequence[Operator], tensor: str) -> str:
    reader = next(operator for operator in members if tensor in operator.inputs)
    layout = _read_as(graph, plan, reader, reader.inputs.index(tensor))
    return f"{tensor.rpartition('.')[2]} {format_shape(graph.tensors[tensor].shape)} {layout}"


def _read_as(graph: Graph, plan: Plan, operator: Operator, index: int) -> TensorLayout:
    strategy = plan.strategy(operator)
    mesh = strategy.mesh or plan.stages[plan.stage_of()[operator.name]].mesh
    return graph.spec(operator).input_layout(index, mesh, strategy.dims)


def _moves(
    graph: Graph, plan: Plan, maker: Operator | None, operator: Operator, index: int
) -> tuple[str, str, tuple[str, ...]]:
    """(layout made, layout read, steps between them) of one input of an operator."""
    target, tensor = _read_as(graph, plan, operator, index), graph.tensors[operator.inputs[index]]
    if maker is None:
        return "fed", f"{target}", ()
    strategy, stage_of = plan.strategy(maker), plan.stage_of()
    mesh = strategy.mesh or plan.stages[stage_of[maker.name]].mesh
    source = graph.spec(maker).output_layout(maker.outputs.index(tensor.name), mesh, strategy.dims)
    across = stage_of[maker.name] != stage_of[operator.name]
    goal = source.without_partial() if across else target
    steps = () if source == goal else stored_ways(plan)(source, goal, tensor.shape, tensor.dtype)
    words = [str(step.kind) + (f" over {format_axes(step.axes)}" if step.axes else "") for step in steps]
    if across:
        words.append(f"send to stage {stage_of[operator.name]}")
    return f"{source}", f"{target}", tuple(words)


def _runs(
    graph: Graph, stage_of: Mapping[str, int], max_nodes: int
) -> tuple[list[tuple[str, tuple[Operator, ...]]], str]:
    """(name, operators) of every node: single operators if they are few, else runs in modules as deep as possible."""
    num = len(graph.operators)
    if num <= max_nodes:
        return [(operator.name, (operator,)) for operator in graph.operators], ""
    depth = max((operator.module.count(".") + 1 for operator in graph.operators), default=1)
    for level in range(depth, 0, -1):
        runs = _group(graph, stage_of, [".".join(operator.module.split(".")[:level]) for operator in graph.operators])
        if len(runs) <= max_nodes:
            return runs, f"{num} operators folded by module into {len(runs)} nodes"
    per_node = -(-num // max(1, max_nodes - len(set(stage_of.values()))))
    runs = _group(graph, stage_of, [f"operators from {at // per_node * per_node + 1}" for at in range(num)])
    return runs, f"{num} operators folded into {len(runs)} nodes of up to {per_node}"


def _group(graph: Graph, stage_of: Mapping[str, int], keys: Sequence[str]) -> list[tuple[str, tuple[Operator, ...]]]:
    """Runs of neighbours with one key and stage: neighbours in a topological order, so folding makes no cycle."""
    runs: list[tuple[str, list[Operator]]] = []
    before: tuple[str, int | None] | None = None
    for key, operator in zip(keys, graph.operators, strict=True):
        here = (key, stage_of.get(operator.name))
        if here != before:
            runs.append((key or operator.name, []))
        before = here
        runs[-1][1].append(operator)
    seen: dict[str, int] = {}
    named = []
    for key, members in runs:
        seen[key] = seen.get(key, 0) + 1
        named.append((key if seen[key] == 1 else f"{key} ({seen[key]})", tuple(members)))
    return named
