"""Strategies that the user has fixed: their placement on the ranks of a stage, and the strategies that they imply
nearby.

A fixed operator may have its own mesh, whose layouts the search's meshes cannot express (another order of axes). To
avoid redistributions next to it, operators that read its output or compute its input may also use exactly that layout,
and so may their neighbours in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from plans.errors import TwofoldError
from plans.layout import DimAxes, Layout, TensorLayout
from plans.model.graph import Graph, Operator
from plans.operators import factors
from plans.plan import Strategy

__all__ = ["on_ranks", "suggestions"]

MAX_SUGGESTIONS = 4
"""Per operator; the nearest pinned operators come first."""


def on_ranks(strategy: Strategy, mesh: Layout, name: str) -> Strategy:
    """`strategy` of operator `name` on a stage with `mesh`; ranks counted from 0 within the stage become the stage's.

    Raises:
        TwofoldError: its own mesh has other ranks.
    """
    own = strategy.mesh
    if own is None or set(own.rank_list) == set(mesh.rank_list):
        return strategy
    if set(own.rank_list) != set(range(mesh.num_ranks)):
        raise TwofoldError(
            f"operator {name!r} is pinned to {own!r}, whose ranks are neither its stage's, {list(mesh.rank_list)}, nor "
            f"0 to {mesh.num_ranks - 1} within the stage"
        )
    ranks = [mesh.rank_list[rank] for rank in own.rank_list]
    return msgspec.structs.replace(strategy, mesh=Layout(own.device_matrix, own.alias_name, ranks))


def suggestions(
    graph: Graph, names: set[str], pinned: Mapping[str, Strategy], mesh: Layout
) -> dict[str, list[Strategy]]:
    """operator name -> strategies that take over the layouts of pinned operators around it.

    Args:
        graph: graph of what is computed at a time.
        names: operators of the stage.
        pinned: with meshes on the stage's ranks.
        mesh: mesh of the stage.
    """
    return _Spreading(graph, names, pinned, mesh).run() if pinned else {}


@dataclass(slots=True)
class _Spreading:
    graph: Graph
    names: set[str]
    pinned: Mapping[str, Strategy]
    mesh: Layout
    found: dict[str, list[Strategy]] = field(default_factory=dict)

    def run(self) -> dict[str, list[Strategy]]:
        producers, consumers = self.graph.producers(), self.graph.consumers()
        operators = {operator.name: operator for operator in self.graph.operators}
        waiting = deque((operators[name], strategy) for name, strategy in self.pinned.items())
        while waiting:
            operator, strategy = waiting.popleft()
            spec, mesh = self.graph.spec(operator), strategy.mesh or self.mesh
            for index, name in enumerate(operator.outputs):
                layout = strategy.output_layout(spec, index, mesh).without_partial()
                for reader in consumers[name]:
                    waiting.extend(self._suggest(reader, reader.inputs.index(name), layout, False))
            for index, name in enumerate(operator.inputs):
                if (maker := producers.get(name)) is not None:
                    layout = spec.input_layout(index, mesh, strategy.dims)
                    waiting.extend(self._suggest(maker, maker.outputs.index(name), layout, True))
        return self.found

    def _suggest(
        self, operator: Operator, index: int, layout: TensorLayout, made: bool
    ) -> list[tuple[Operator, Strategy]]:
        """The operator split so that it writes (or reads) tensor `index` in `layout`, if that is possible and new."""
        mine = self.found.setdefault(operator.name, [])
        if operator.name not in self.names or operator.name in self.pinned or len(mine) >= MAX_SUGGESTIONS:
            return []
        spec = self.graph.spec(operator)
        dims: dict[str, DimAxes] = {}
        for dim, axes in zip((spec.outputs if made else spec.inputs)[index], layout.dims, strict=True):
            if axes:
                dims[factors(dim)[0]] = axes
        strategy = Strategy(dims=dims, mesh=None if layout.mesh == self.mesh else layout.mesh)
        if strategy in mine or not spec.fits(layout.mesh, dims):
            return []
        mine.append(strategy)
        return [(operator, strategy)]
