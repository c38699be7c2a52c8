"""Costs of the tensors between operators: one edge per tensor, over the strategies of its producer and readers.

For every tensor, the redistributions from the producer's layout to each distinct layout of its readers are paid,
forward and backward. Strategies that write or read it in the same layouts are of one kind, and tensors with equal kinds
have equal edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from plans.layout import Layout, TensorLayout
from plans.model.graph import Graph, Operator
from plans.plan import Strategy
from search.operators.moves import Moves
from search.operators.tensor_edges import Layouts, TensorEdge

__all__ = ["TensorCosts"]


@dataclass(slots=True)
class TensorCosts:
    """Edges of the tensors of one stage on one mesh.

    Args:
        micro: the graph of one micro-batch.
        operators: the operators of the stage, in graph order.
        choices: the strategies of each operator. This is the stage's own list, which may still change
            until tensors are priced.
        mesh: the stage's mesh.
        num_micro_batches: how often tensors are passed in a step.
        full_batch: whether inputs are fed whole (any layout is a free slice) or in parts.
        moves: seconds of redistributions, or bounds of them.
        check_time: as of `StageCosts`.
    """

    micro: Graph
    operators: Sequence[Operator]
    choices: list[list[Strategy]]
    mesh: Layout
    num_micro_batches: int
    full_batch: bool
    moves: Moves
    check_time: Callable[[], None] = lambda: None
    _position: dict[str, int] = field(init=False)
    _edges: list[TensorEdge] | None = field(init=False, default=None)
    _kinds: dict[object, tuple[list[Layouts], np.ndarray]] = field(init=False, default_factory=dict)
    _seconds: dict[object, tuple[int, np.ndarray]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._position = {operator.name: number for number, operator in enumerate(self.operators)}

    def price(self, values: Sequence[int]) -> bool:
        """Make the seconds exact for one value of every variable; returns whether any of them was a bound."""
        rose = False
        for edge in self.edges():
            tensor = self.micro.tensors[edge.tensor]
            rose |= self.moves.price_all(tensor.shape, tensor.dtype, edge.moves(values))
        return rose

    def seconds(self, edge: TensorEdge) -> np.ndarray:
        """[layouts, layouts]: seconds per step from one to another, for the tensor of an edge; the same array until a
        price changes."""
        self.check_time()
        tensor = self.micro.tensors[edge.tensor]
        if self.moves.floors is None:
            self._price_all(edge)
        key = tensor.shape, tensor.dtype
        version = self.moves.version(*key)
        if (known := self._seconds.get(key)) is None or known[0] != version:
            known = self._seconds[key] = version, self.moves.table(*key) * self.num_micro_batches
        return known[1]

    def _price_all(self, edge: TensorEdge) -> None:
        """Price all moves between any of the strategies."""
        tensor = self.micro.tensors[edge.tensor]
        pairs = {pair for _, read, _ in edge.slots for pair in product(edge.source.tolist(), read.tolist())}
        if edge.wanted:
            pairs |= {pair for _, _, back in edge.slots for pair in product(back.tolist(), edge.arrives.tolist())}
        self.moves.price_all(tensor.shape, tensor.dtype, sorted(pairs))

    # ------------------------------------------------------------------ tensors

    def edges(self) -> list[TensorEdge]:
        """The tensors whose layouts affect the cost, registered with `moves`."""
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
        wanted = wanted and tensor.kind != "parameter"
        around = [*([] if maker is None else [maker]), *readers]
        positions = [self._position[operator.name] for operator in around]
        kinds: list[list[Layouts]] = []
        kind_of: list[np.ndarray] = []
        for number, (operator, position) in enumerate(zip(around, positions, strict=True)):
            found, which = self._kinds_of(name, operator, position, maker is not None and number == 0, wanted)
            kinds.append(found)
            kind_of.append(which)
        every = dict.fromkeys(layout for known in kinds for pairs in known for pair in pairs for layout in pair)
        every |= dict.fromkeys(layout.without_partial() for layout in every)
        self.moves.add(tensor.shape, tensor.dtype, list(every))

        def numbers(layouts: Sequence[TensorLayout]) -> np.ndarray:
            return self.moves.numbers(tensor.shape, tensor.dtype, layouts)

        first = [pairs[0][0] for pairs in kinds[0]]  # an input arrives in the layout of its first reader
        slots = []
        for number in range(maker is not None, len(kinds)):
            for slot in range(len(kinds[number][0])):
                read = numbers([pairs[slot][0] for pairs in kinds[number]])
                back = numbers([pairs[slot][1] for pairs in kinds[number]])
                slots.append((number, read, back))
        return TensorEdge(
            tensor=name, form=(tensor.shape, tensor.dtype), variables=tuple(positions), source=numbers(first),
            arrives=numbers([layout.without_partial() for layout in first]), slots=slots, kind_of=kind_of,
            sizes=tuple(len(known) for known in kinds), wanted=wanted,
        )  # fmt: skip

    def _kinds_of(
        self, name: str, operator: Operator, position: int, made: bool, wanted: bool
    ) -> tuple[list[Layouts], np.ndarray]:
        """The different layouts of a tensor at one operator, and which of them each strategy has."""
        side = operator.outputs if made else operator.inputs
        where = tuple(at for at, each in enumerate(side) if each == name)
        key = id(self.micro.spec(operator)), id(self.choices[position]), made, wanted, where
        if key not in self._kinds:
            known: dict[Layouts, int] = {}
            layouts = [self._layouts_of(name, operator, strategy, made, wanted) for strategy in self.choices[position]]
            which = np.array([known.setdefault(layout, len(known)) for layout in layouts])
            self._kinds[key] = list(known), which
        return self._kinds[key]

    def _layouts_of(self, name: str, operator: Operator, strategy: Strategy, made: bool, wanted: bool) -> Layouts:
        """The output layout of a strategy, or the layouts in which a tensor is read and its gradient computed.

        If no gradient is needed, its layout does not matter, and the layout of the tensor is returned for it.
        """
        spec, mesh = self.micro.spec(operator), strategy.mesh or self.mesh
        if made:
            layout = strategy.output_layout(spec, operator.outputs.index(name), mesh)
            return ((layout, layout),)
        found = []
        for index, read in enumerate(operator.inputs):
            if read == name:
                layout = spec.input_layout(index, mesh, strategy.dims)
                found.append((layout, spec.gradient_layout(index, mesh, strategy.dims) if wanted else layout))
        return tuple(found)
