"""Reads and writes of an operator in any run of fused instructions, whichever runs are formed.

Lowering fuses memory-bound instructions of neighbours into runs (`plans.lower.fuse`); which ones depends on the whole
plan. But a run reads from memory what a kernel made, and writes what a kernel reads. So an operator's own instructions
move that, whichever runs they become part of (`AtBorders`).

Sums over rows, for the weights of norms and for biases, take a kernel at least. Two operators share it only if one run
can hold both: not if a kernel lies between them in the flow of data, because a run is one kernel, too. `apart` has
operators of which no two share a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from plans.lower.fuse import FUSIBLE, MADE_AGAIN, block_names, fused_alone
from plans.model.graph import Graph, Operator
from plans.program import Instruction

__all__ = ["AtBorders", "at_borders", "border_values", "possible_runs"]

_SUMS = ("layer_norm.grad1", "rms_norm.grad1", "layer_norm.grad2", "linear.grad2")
"""Calls that sum over rows, the longest first."""


class AtBorders(NamedTuple):
    """The place of an operator between kernels and runs; operators with equal places have equal bounds.

    Args:
        alone: whether its memory-bound instructions join no others, in forward and backward (`fused_alone`).
        reads: inputs that no run makes, and that no earlier operator counts as its own.
        is_read: whether a kernel reads its output in the forward.
        is_given: whether a kernel makes the gradient of its output.
        kept: inputs that its backward reads as they were kept, unless an earlier operator counts them as its own.
        returns: inputs whose gradient a kernel reads.
        apart: its sums over rows, for which there is a run that no other operator counts as its own.
    """

    alone: tuple[bool, bool] = (True, True)
    reads: tuple[int, ...] = ()
    is_read: bool = False
    is_given: bool = False
    kept: tuple[int, ...] = ()
    returns: tuple[int, ...] = ()
    apart: tuple[str, ...] = ()


def at_borders(graph: Graph) -> dict[str, AtBorders]:
    """The place of every operator, by name.

    Runs that a loss may be part of read little of what they are given, and operators without effect on the loss are
    left out of runs: of both only `alone` is stated.

    >>> from plans.model.mlp import mlp_graph
    >>> places = at_borders(mlp_graph([8, 4, 2], 16))
    >>> places["layer1.relu"].alone, places["layer1.relu"].is_given, places["layer1.linear"].apart
    ((True, False), True, ('linear.grad2',))
    """
    alone, apart, borders, useful = fused_alone(graph), _Flow(graph).apart(), _Borders(graph), _useful(graph)
    blocks = block_names(graph.operators)
    losses = [each for each in graph.operators if each.kind == "cross_entropy"]
    logits = {(blocks[each.name], graph.tensors[each.inputs[0]].shape) for each in losses}
    found = {}
    for operator in graph.operators:
        tensors = (*operator.inputs, *operator.outputs)
        place = AtBorders(alone=alone[operator.name])
        shapes = {(blocks[operator.name], graph.tensors[each].shape) for each in tensors}
        if operator.name in useful and not shapes & logits:
            place = borders.of(operator, place._replace(apart=apart.get(operator.name, ())))
        found[operator.name] = place
    return found


@dataclass(slots=True)
class _Borders:
    """Finds what operators read and write at the borders of runs, in the order of the graph."""

    graph: Graph
    _producers: Mapping[str, Operator] = field(init=False)
    _consumers: Mapping[str, tuple[Operator, ...]] = field(init=False)
    _read_by: dict[str, str] = field(init=False, default_factory=dict)
    _kept_by: dict[str, str] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._producers, self._consumers = self.graph.producers(), self.graph.consumers()

    def of(self, operator: Operator, place: AtBorders) -> AtBorders:
        """The place with what the operator reads and writes."""
        graph, readers = self.graph, self._consumers[operator.outputs[0]]
        again = f"{operator.kind}.forward" in MADE_AGAIN and all(map(_is_fused, readers))
        if _is_fused(operator) and not again:
            is_read = any(not _is_fused(each) and not graph.spec(each).blind for each in readers)
            place = place._replace(reads=self._reads(operator), is_read=is_read)
        if any(f"{operator.kind}.grad{index}" in FUSIBLE for index in graph.spec(operator).gradients):
            place = place._replace(kept=self._kept(operator))
        is_given = len(readers) == 1 and _gives_by_kernel(graph, readers[0], operator.outputs[0])
        return place._replace(is_given=is_given, returns=self._returns(operator))

    def _reads(self, operator: Operator) -> tuple[int, ...]:
        return tuple(
            index for index, name in enumerate(operator.inputs)
            if not (name in self._producers and _is_fused(self._producers[name]))
            and self._read_by.setdefault(name, operator.name) == operator.name
        )  # fmt: skip

    def _kept(self, operator: Operator) -> tuple[int, ...]:
        return tuple(
            index for index, name in enumerate(operator.inputs)
            if not (name in self._producers and f"{self._producers[name].kind}.forward" in MADE_AGAIN)
            and self._kept_by.setdefault(name, operator.name) == operator.name
        )  # fmt: skip

    def _returns(self, operator: Operator) -> tuple[int, ...]:
        return tuple(
            index for index, name in enumerate(operator.inputs)
            if name in self._producers and len(self._consumers[name]) == 1 and operator.inputs.count(name) == 1
            and _reads_gradient_by_kernel(self.graph, self._producers[name])
        )  # fmt: skip


def _useful(graph: Graph) -> set[str]:
    """The operators that the loss depends on."""
    wanted, found = {graph.loss}, set()
    for operator in reversed(graph.operators):
        if not wanted.isdisjoint(operator.outputs):
            wanted.update(operator.inputs)
            found.add(operator.name)
    return found


def _is_fused(operator: Operator) -> bool:
    """Whether its forward may be part of a run."""
    return f"{operator.kind}.forward" in FUSIBLE


def _reads_gradient_by_kernel(graph: Graph, maker: Operator) -> bool:
    """Whether an instruction that is part of no run reads the gradient of what an operator makes."""
    passed = graph.spec(maker).passed
    return any(
        f"{maker.kind}.grad{index}" not in FUSIBLE and index not in passed for index in graph.trained_inputs(maker)
    )


def _gives_by_kernel(graph: Graph, reader: Operator, name: str) -> bool:
    """Whether a kernel makes the gradient that the only reader of a tensor returns for it."""
    spec, places = graph.spec(reader), [index for index, each in enumerate(reader.inputs) if each == name]
    return len(places) == 1 and f"{reader.kind}.grad{places[0]}" not in FUSIBLE and places[0] not in spec.passed


def border_values(place: AtBorders, operator: Operator, lines: Iterable[Instruction], *, forward: bool) -> set[str]:
    """The values that the runs with these instructions of an operator read from memory or write to it.

    Args:
        place: of the operator.
        operator: whose instructions these are.
        lines: those that may be part of runs, of its forward or of its backward.
        forward: which of both.
    """
    starts = [f"{operator.name}.kept"]
    if forward:
        starts += [f"{operator.inputs[index]}@" for index in place.reads]
        starts += [f"{operator.outputs[0]}@"] if place.is_read else []
    else:
        starts += [f"{operator.inputs[index]}@" for index in place.kept]
        starts += [f"d:{operator.outputs[0]}@"] if place.is_given else []
        starts += [f"d:{operator.inputs[index]}.{operator.name}.{index}" for index in place.returns]
    return {name for line in lines for name in (*line.inputs, *line.outputs) if name.startswith(tuple(starts))}


def possible_runs(graph: Graph) -> list[tuple[str, ...]]:
    """Sets of calls that runs may hold, as far as their prices differ (`costmodels.price.compute.fused_name`)."""
    kinds = {operator.kind for operator in graph.operators}
    calls = [call for call in _SUMS if call.split(".")[0] in kinds]
    calls += [f"{kind}.grad0" for kind in ("layer_norm", "rms_norm") if kind in kinds]
    return [("sum", *some) for count in range(3) for some in combinations(calls, count)]


@dataclass(slots=True)
class _Flow:
    """The flow of gradients from operator to operator, backwards.

    `_before` has for every operator those whose fusible gradients flow into it, and of them those from which all that
    flows passes a kernel at least once on some way. Both are sets of numbers of operators, as bits.
    """

    graph: Graph
    _joined: dict[str, str] = field(init=False, default_factory=dict)

    def apart(self) -> dict[str, tuple[str, ...]]:
        """Operator -> its calls that sum over rows, for operators of which no two may be part of one run."""
        graph = self.graph
        blocks, behind = block_names(graph.operators), self._behind_a_kernel()
        calls = {}
        for operator in graph.operators:
            mine = {f"{operator.kind}.grad{index}" for index in graph.trained_inputs(operator)}
            if some := tuple(call for call in _SUMS if call in mine):
                calls[operator.name] = some
        part = self._parts()
        held: dict[tuple[str, object], list[int]] = {}
        found = {}
        for name in sorted(calls, key=lambda name: (_SUMS.index(calls[name][0]), graph.position(graph.by_name[name]))):
            at = graph.position(graph.by_name[name])
            others = held.setdefault((blocks[name], part[name]), [])
            if all(behind[at] >> other & 1 or behind[other] >> at & 1 for other in others):
                others.append(at)
                found[name] = calls[name]
        return found

    def _behind_a_kernel(self) -> list[int]:
        """Per operator the set of those whose own gradient reaches it through a kernel."""
        graph, consumers = self.graph, self.graph.consumers()
        count = len(graph.operators)
        before, behind = [0] * count, [0] * count
        for at in reversed(range(count)):
            for name in graph.operators[at].outputs:
                for reader in consumers[name]:
                    other, spec = graph.position(reader), graph.spec(reader)
                    for index in (index for index in graph.trained_inputs(reader) if reader.inputs[index] == name):
                        if f"{reader.kind}.grad{index}" in FUSIBLE:
                            own = 1 << other if self._is_whole(reader) else 0
                            before[at] |= before[other] | own
                            behind[at] |= behind[other]
                        elif index in spec.passed or spec.aliases:
                            before[at] |= before[other]
                            behind[at] |= behind[other]
                        else:
                            before[at] |= before[other]
                            behind[at] |= before[other] | behind[other]
        return behind

    def _is_whole(self, operator: Operator) -> bool:
        """Whether a run with any of its gradients and with another operator has the one that flows on, too: nothing
        else reads what its sums over rows read."""
        consumers = self.graph.consumers()
        readers = consumers[operator.outputs[0]]
        others = [each for name in operator.inputs for each in consumers[name] if each is not operator]
        return (
            len(readers) == 1 and _gives_by_kernel(self.graph, readers[0], operator.outputs[0])
            and not any(
                f"{each.kind}.grad{index}" in FUSIBLE for each in others for index in self.graph.spec(each).gradients
            )
        )  # fmt: skip

    def _parts(self) -> Mapping[str, object]:
        """Per operator the part of the graph whose fusible gradients are joined by tensors."""
        graph = self.graph
        for operator in graph.operators:
            spec = graph.spec(operator)
            for index in spec.gradients:
                if f"{operator.kind}.grad{index}" in FUSIBLE:
                    needs = [each for each in spec.gradients[index].needs if each[0] == "x"]
                    touched = [f"d:{name}" for name in (*operator.outputs, operator.inputs[index])]
                    self._join(operator.name, [*touched, *(operator.inputs[int(each[1:])] for each in needs)])
                elif index in spec.passed or spec.aliases:
                    self._join(f"d:{operator.outputs[0]}", [f"d:{operator.inputs[index]}"])
        return {operator.name: self._root(operator.name) for operator in graph.operators}

    def _root(self, name: str) -> str:
        while (above := self._joined.setdefault(name, name)) != name:
            name = above
        return name

    def _join(self, name: str, others: Iterable[str]) -> None:
        for other in others:
            self._joined[self._root(other)] = self._root(name)
