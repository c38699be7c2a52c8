"""A picture of the operator graph before and after a search (`plans.graph_data`).

Colours are stages; redistributions are written next to their edges.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from plans.files import write_atomically
from plans.graph_data import GraphData, GraphEdge, GraphNode, graph_data
from plans.model.graph import Graph
from plans.plan import Plan
from plans.ranks import format_shape
from plans.units import Bytes
from reports.colours import COLOURS
from reports.layered import place
from reports.page import Markup, render

__all__ = ["GraphPicture", "save_graph"]

_STAGE_FILLS = tuple(COLOURS)


def save_graph(folder: str | os.PathLike[str], graph: Graph, plan: Plan | None = None) -> list[Path]:
    """Write `graph_before.json` and `.svg`, or with a plan `graph_after.json` and `.svg`; returns the paths."""
    stem = "graph_before" if plan is None else "graph_after"
    everything = graph_data(graph, plan, max_nodes=len(graph.operators))
    text = msgspec.json.format(msgspec.json.encode(everything), indent=1)
    return [
        write_atomically(Path(folder) / f"{stem}.json", text + b"\n"),
        GraphPicture(graph_data(graph, plan)).save(Path(folder) / f"{stem}.svg"),
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
        sizes = {name: _size(line) for name, line in lines.items()}
        labels = [_edge_lines(edge) for edge in data.edges]
        gap = 30.0 + 13 * max((len(label) for label in labels), default=0)
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


def _fill(stage: int | None) -> str:
    return "" if stage is None else _STAGE_FILLS[stage % len(_STAGE_FILLS)]


def _drawn(edge: GraphEdge, label: list[str], route: Sequence[tuple[float, float]], joins: bool) -> dict[str, Any]:
    """The data of an edge for the template; `joins`: others lead to its target too."""
    path = f"M{route[0][0]:.1f} {route[0][1]:.1f}"
    for (x0, y0), (x1, y1) in pairwise(route):
        middle = (y0 + y1) / 2
        path += f"C{x0:.1f} {middle:.1f} {x1:.1f} {middle:.1f} {x1:.1f} {y1:.1f}"
    (x0, y0), (x1, y1) = route[-2:]
    left = x0 < x1 - 4 if joins else x1 < x0 - 4  # on the outer side of a bent edge
    tooltip = f"{edge.tensor} {format_shape(edge.shape)}, {Bytes(edge.size_bytes)}"
    tooltip += f": made as {edge.made_as}, read as {edge.read_as}" if edge.read_as else ""
    return {"path": path, "style": "moved" if edge.steps else "edge", "said": tooltip, "x": x1, "y": y1, "label": label,
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
    return list(edge.steps) if edge.read_as else [format_shape(edge.shape)]
