"""What the tensors cost that operators hand on: one table for each, over the strategies of its maker and readers.

For every tensor the redistributions between its maker's layout and each distinct layout its readers ask for are paid,
forward and backward. Strategies that hand it on, or read it, in the same layouts are of one kind, and tensors whose
kinds are alike share one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from plans.layout import Layout, TensorLayout
from plans.model.graph import Graph, Operator
from plans.plan import Strategy
from search.operators.eliminate import Table
from search.operators.moves import Moves
from search.operators.tensor_edges import Layouts, TensorEdge

__all__ = ["TensorCosts"]


@dataclass(slots=True)
class TensorCosts:
    """Tables of the tensors of one stage on one mesh.

    Args:
        micro: the graph of one micro-batch.
        operators: of the stage, in graph order.
        choices: per operator its strategies; the stage's own list, which may still change before tensors are asked for.
        variable_of: per operator its variable, likewise.
        mesh: the stage's mesh.
        num_micro_batches: how often tensors are handed on in a step.
        full_batch: whether inputs are fed whole (any layout is a free slice) or in parts.
        moves: seconds of redistributions, or bounds of them.
    """

    micro: Graph
    operators: Sequence[Operator]
    choices: list[list[Strategy]]
    variable_of: list[int]
    mesh: Layout
    num_micro_batches: int
    full_batch: bool
    moves: Moves
    _position: dict[str, int] = field(init=False)
    _edges: list[TensorEdge] | None = field(init=False, default=None)
    _kinds: dict[object, tuple[list[Layouts], np.ndarray]] = field(init=False, default_factory=dict)
    _tables: dict[object, np.ndarray] = field(init=False, default_factory=dict)
    _version: dict[tuple[tuple[int, ...], str], int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._position = {operator.name: number for number, operator in enumerate(self.operators)}

    def forget(self) -> None:
        """Look at the strategies and variables anew: they have changed."""
        self._edges = None

    def scopes(self) -> list[tuple[int, ...]]:
        """The variables of every table."""
        return [tuple(dict.fromkeys(edge.variables)) for edge in self._tensors()]

    def tables(self) -> list[Table]:
        """One per tensor; where `moves` has bounds, cells are bounds too until `price` has been asked for them."""
        return [self.table(edge) for edge in self._tensors()]

    def price(self, values: Sequence[int]) -> bool:
        """Make the tables exact for one value of every variable; whether anything of it was a bound."""
        changed = set()
        for edge in self._tensors():
            tensor = self.micro.tensors[edge.tensor]
            for source, target in self._moves_of(edge, values):
                if not self.moves.is_exact(source, target, tensor.shape, tensor.dtype):
                    self.moves.price(source, target, tensor.shape, tensor.dtype)
                    changed.add((tensor.shape, tensor.dtype))
        for each in changed:
            self._version[each] = self._version.get(each, 0) + 1
        return bool(changed)

    def _moves_of(self, edge: TensorEdge, values: Sequence[int]) -> set[tuple[TensorLayout, TensorLayout]]:
        """The pairs of layouts that a choice of strategies moves the tensor, and its gradient, between."""
        tensor = self.micro.tensors[edge.tensor]
        layouts = self.moves.layouts(tensor.shape, tensor.dtype)
        kinds = [int(kind_of[values[variable]]) for kind_of, variable in zip(edge.kind_of, edge.variables, strict=True)]
        source, arrives = layouts[edge.source[kinds[0]]], layouts[edge.arrives[kinds[0]]]
        found = set()
        for variable, read, back in edge.slots:
            found.add((source, layouts[read[kinds[variable]]]))
            if edge.wanted:
                found.add((layouts[back[kinds[variable]]], arrives))
        return found

    # ------------------------------------------------------------------- tables

    def table(self, edge: TensorEdge) -> Table:
        """[values of every variable of the tensor]: seconds per step."""
        tensor = self.micro.tensors[edge.tensor]
        version = self._version.get((tensor.shape, tensor.dtype), 0)
        key = (tensor.shape, tensor.dtype), version, edge.key
        if key not in self._tables:
            if self.moves.floors is None:
                self._price_all(edge)
            costs = edge.costs(self.moves.table(tensor.shape, tensor.dtype)) * self.num_micro_batches
            for at, kinds in enumerate(edge.kind_of):
                costs = costs.take(kinds, axis=at)
            self._tables.pop((key[0], version - 1, key[2]), None)
            self._tables[key] = costs
        return Table(edge.variables, self._tables[key])

    def _price_all(self, edge: TensorEdge) -> None:
        """Take the prices of all moves that any strategies make."""
        tensor = self.micro.tensors[edge.tensor]
        pairs = {pair for _, read, _ in edge.slots for pair in product(edge.source.tolist(), read.tolist())}
        if edge.wanted:
            pairs |= {pair for _, _, back in edge.slots for pair in product(back.tolist(), edge.arrives.tolist())}
        self.moves.price_all(tensor.shape, tensor.dtype, sorted(pairs))

    # ------------------------------------------------------------------ tensors

    def _tensors(self) -> list[TensorEdge]:
        """The tensors whose layouts make a difference, announced to `moves`."""
        if self._edges is None:
            self._edges = []
            producers, consumers = self.micro.producers(), self.micro.consumers()
            wanted = self.micro.needs_gradient()
            names = (name for operator in self.operators for name in (*operator.inputs, *operator.outputs))
            for name in dict.fromkeys(names):
                readers = [operator for operator in consumers[name] if operator.name in self._position]
                maker, kind = producers.get(name), self.micro.tensors[name].kind
                fed = self.full_batch and kind != "parameter"
                if not readers or (maker is None and (fed or kind == "constant")):
                    continue  # nothing to move, or something whole, of which every rank takes its part
                inside = maker if maker is not None and maker.name in self._position else None
                if inside is None and len(readers) < 2:
                    continue  # arrives in its reader's layout
                self._edges.append(self.edge_of(name, inside, readers, name in wanted))
        return self._edges

    def edge_of(self, name: str, maker: Operator | None, readers: Sequence[Operator], wanted: bool) -> TensorEdge:
        """A tensor with its maker, if that is in the stage, and its readers in it; `wanted`: has it a gradient?"""
        tensor = self.micro.tensors[name]
        around = [*([] if maker is None else [maker]), *readers]
        positions = [self._position[operator.name] for operator in around]
        kinds: list[list[Layouts]] = []
        kind_of: list[np.ndarray] = []
        for number, (operator, position) in enumerate(zip(around, positions, strict=True)):
            found, which = self._kinds_of(name, operator, position, maker is not None and number == 0)
            kinds.append(found)
            kind_of.append(which)
        every = dict.fromkeys(layout for known in kinds for pairs in known for pair in pairs for layout in pair)
        every |= dict.fromkeys(layout.without_partial() for layout in every)
        self.moves.add(tensor.shape, tensor.dtype, list(every))

        def numbers(layouts: Sequence[TensorLayout]) -> np.ndarray:
            return self.moves.numbers(tensor.shape, tensor.dtype, layouts)

        first = [pairs[0][0] for pairs in kinds[0]]  # without a maker it arrives as its first reader wants it
        slots = []
        for number in range(maker is not None, len(kinds)):
            for slot in range(len(kinds[number][0])):
                read = numbers([pairs[slot][0] for pairs in kinds[number]])
                back = numbers([pairs[slot][1] for pairs in kinds[number]])
                slots.append((number, read, back))
        edge = TensorEdge(
            tensor=name, variables=tuple(self.variable_of[position] for position in positions), source=numbers(first),
            arrives=numbers([layout.without_partial() for layout in first]), slots=slots, kind_of=kind_of,
            sizes=tuple(len(known) for known in kinds), wanted=wanted and tensor.kind != "parameter",
        )  # fmt: skip
        return edge.joined()

    def _kinds_of(self, name: str, operator: Operator, position: int, made: bool) -> tuple[list[Layouts], np.ndarray]:
        """The different layouts of a tensor at one operator, and which of them each strategy has."""
        side = operator.outputs if made else operator.inputs
        where = tuple(at for at, each in enumerate(side) if each == name)
        key = id(self.micro.spec(operator)), id(self.choices[position]), made, where
        if key not in self._kinds:
            known: dict[Layouts, int] = {}
            layouts = [self._layouts_of(name, operator, strategy, made) for strategy in self.choices[position]]
            which = np.array([known.setdefault(each, len(known)) for each in layouts])
            self._kinds[key] = list(known), which
        return self._kinds[key]

    def _layouts_of(self, name: str, operator: Operator, strategy: Strategy, made: bool) -> Layouts:
        """In which layout a strategy hands a tensor on; or in which it is read, and its gradient made, each time."""
        spec, mesh = self.micro.spec(operator), strategy.mesh or self.mesh
        if made:
            layout = strategy.output_layout(spec, operator.outputs.index(name), mesh)
            return ((layout, layout),)
        return tuple(
            (spec.input_layout(index, mesh, strategy.dims), spec.gradient_layout(index, mesh, strategy.dims))
            for index, read in enumerate(operator.inputs)
            if read == name
        )
