"""The operator graph before and after a search, as data and as a picture.

Before: operators, shapes, parameters. With a plan: stage by colour, strategies, and on the edges the redistributions
between the layout in which a tensor is made and the one in which it is read. A graph of more than `MAX_NODES` operators
is folded: operators that follow one another in one module become one node.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from plans.files import write_atomically
from plans.layout import TensorLayout
from plans.lower.redistribution_policy import stored_ways
from plans.model.graph import Graph, Operator
from plans.plan import Plan
from reports.layered import place
from reports.page import Markup, render
from reports.tables import format_axes
from reports.units import Bytes

__all__ = [
    "MAX_NODES",
    "GraphData",
    "GraphEdge",
    "GraphNode",
    "GraphPicture",
    "graph_data",
    "graph_picture",
    "save_graph",
]

MAX_NODES = 60

_STAGE_FILLS = ("sky", "orange", "green", "purple", "yellow", "vermillion", "blue", "grey")


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
    nodes = [GraphNode(name=tensor.name, kind="input", outputs=(_shape(tensor.shape),)) for tensor in shown.inputs]
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


def save_graph(folder: str | os.PathLike[str], graph: Graph, plan: Plan | None = None) -> list[Path]:
    """Write `graph_before.json` and `.svg`, or with a plan `graph_after.json` and `.svg`; returns the paths."""
    stem = "graph_before" if plan is None else "graph_after"
    everything = graph_data(graph, plan, max_nodes=len(graph.operators))
    text = msgspec.json.format(msgspec.json.encode(everything), indent=1)
    return [
        write_atomically(Path(folder) / f"{stem}.json", text + b"\n"),
        graph_picture(graph_data(graph, plan)).save(Path(folder) / f"{stem}.svg"),
    ]


@dataclass(frozen=True, slots=True)
class GraphPicture:
    """The graph in layers from top to bottom, drawn by `templates/graph.html`."""

    data: GraphData

    def __html__(self) -> Markup:
        return Markup('<figure class="scroll">{}</figure>').format(Markup(self._svg(alone=False)))

    def alone(self) -> str:
        """The picture as the text of a standalone SVG file."""
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + self._svg(alone=True)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the SVG file atomically."""
        return write_atomically(path, self.alone().encode())

    def _svg(self, *, alone: bool) -> str:
        data = self.data
        lines = {node.name: _lines(node) for node in data.nodes}
        sizes = {name: _size(each) for name, each in lines.items()}
        labels = [_edge_lines(edge) for edge in data.edges]
        gap = 30.0 + 13 * max((len(each) for each in labels), default=0)
        placed = place(sizes, [(edge.source, edge.target) for edge in data.edges], layer_gap=gap)
        title = f"Graph {data.name!r} {data.state}, {data.batch_size} samples"
        width, top = max(placed.width + 40, 9 * len(title) + 20, 7 * len(data.note) + 20), 66 if data.note else 50
        num_in = Counter(edge.target for edge in data.edges)
        return render(
            "graph.html", title=title, note=data.note, alone=alone, width=round(width), top=top,
            shift=(width - placed.width) / 2, height=round(placed.height + top + 20),
            legend=[(stage, _fill(stage)) for stage in sorted({n.stage for n in data.nodes if n.stage is not None})],
            edges=[
                _drawn(edge, label, route, num_in[edge.target] > 1)
                for edge, label, route in zip(data.edges, labels, placed.routes, strict=True)
            ],
            nodes=[
                {"x": placed.corners[node.name][0], "y": placed.corners[node.name][1], "width": sizes[node.name][0],
                 "height": sizes[node.name][1], "lines": lines[node.name], "fill": _fill(node.stage),
                 "said": ", ".join(node.operators) or f"input {node.name}"}
                for node in data.nodes
            ],
        )  # fmt: skip


def graph_picture(data: GraphData) -> GraphPicture:
    """Draw the graph."""
    return GraphPicture(data)


def _fill(stage: int | None) -> str:
    return "" if stage is None else _STAGE_FILLS[stage % len(_STAGE_FILLS)]


def _drawn(edge: GraphEdge, label: list[str], route: Sequence[tuple[float, float]], joins: bool) -> dict[str, Any]:
    """What the template draws of an edge; `joins`: others lead to its target too."""
    path = f"M{route[0][0]:.1f} {route[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(route):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    (x0, y0), (x1, y1) = route[-2:]
    left = x0 < x1 - 4 if joins else x1 < x0 - 4  # on the outer side of a bent edge
    said = f"{edge.tensor} {_shape(edge.shape)}, {Bytes(edge.size_bytes)}"
    said += f": made as {edge.made_as}, read as {edge.read_as}" if edge.read_as else ""
    return {"path": path, "style": "moved" if edge.steps else "edge", "said": said, "x": x1, "y": y1, "label": label,
            "left": left, "at": ((x0 + x1) / 2 + (-7 if left else 7), (y0 + y1) / 2 + 4)}  # fmt: skip


def _size(lines: Sequence[str]) -> tuple[float, float]:
    """Width and height of a node with these lines."""
    widths = [0.58 * (10.5 if at else 12) * len(line) for at, line in enumerate(lines)]  # about, of any font
    return max(120.0, 20 + max(widths)), 16.0 * len(lines) + 12


def _lines(node: GraphNode) -> list[str]:
    if node.kind == "input":
        return [node.name, f"input {', '.join(node.outputs)}"]
    lines = [node.name]
    if len(node.operators) > 1:
        lines.append(f"{len(node.operators)} operators")
    else:
        lines.append(f"{node.kind} → {', '.join(node.outputs)}" + (", recomputed" if node.recomputed else ""))
    if node.strategy:
        lines.append(node.strategy)
    kept = list(node.parameters[:3])
    if len(node.parameters) > 3:
        kept.append(f"and {len(node.parameters) - 3} more parameters")
    return lines + kept


def _edge_lines(edge: GraphEdge) -> list[str]:
    """Before the search the shape; after it what moves, or nothing."""
    return list(edge.steps) if edge.read_as else [_shape(edge.shape)]


def _node(graph: Graph, plan: Plan | None, name: str, members: Sequence[Operator]) -> GraphNode:
    made = {tensor for operator in members for tensor in operator.outputs}
    read_outside = {tensor for operator in graph.operators if operator not in members for tensor in operator.inputs} | {
        graph.loss
    }
    outputs = [tensor for operator in members for tensor in operator.outputs if tensor in made & read_outside]
    parameters = dict.fromkeys(
        tensor for operator in members for tensor in operator.inputs if graph.tensors[tensor].kind == "parameter"
    )
    texts = tuple(f"{_tail(tensor)} {_shape(graph.tensors[tensor].shape)}" for tensor in parameters)
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
        outputs=tuple(_shape(graph.tensors[tensor].shape) for tensor in outputs),
        parameters=texts,
        stage=stage,
        strategy=strategy,
        recomputed=plan is not None and any(operator.name in plan.recompute for operator in members),
    )


def _parameter(graph: Graph, plan: Plan, members: Sequence[Operator], tensor: str) -> str:
    reader = next(operator for operator in members if tensor in operator.inputs)
    layout = _read_as(graph, plan, reader, reader.inputs.index(tensor))
    return f"{_tail(tensor)} {_shape(graph.tensors[tensor].shape)} {layout}"


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


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _tail(name: str) -> str:
    return name.rpartition(".")[2]
