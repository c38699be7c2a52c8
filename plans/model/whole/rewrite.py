"""Rewrites a graph: a rule finds several operators and replaces them by others that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from plans.model.graph import Attr, Graph, Operator, Tensor
from plans.model.part import Part

__all__ = ["New", "Piece", "Rule", "View", "part_as_tensor", "rewritten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a parameter or constant, as a tensor of the graph."""

    tensor: Tensor
    part: Part


def part_as_tensor(tensor: Tensor, word: str, shape: tuple[int, ...], part: Part) -> Piece:
    """A part of a tensor, named by the tensor and a suffix: "attn.c_attn.weight" and "0" are "attn.c_attn.0.weight"."""
    path, dot, leaf = tensor.name.rpartition(".")
    name = f"{path}{dot}{word}.{leaf}"
    return Piece(tensor=Tensor(name=name, shape=shape, dtype=tensor.dtype, kind=tensor.kind), part=part)


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """An operator to add.

    `inputs` are names of tensors, numbers of operators made before it for the same result, or pieces of weights.
    `shape` and `dtype` are those of its output, `module` is where it stands: by default that of the replaced operator.
    """

    kind: str
    inputs: tuple[str | int | Piece, ...]
    shape: tuple[int, ...]
    dtype: str
    attrs: dict[str, Attr] = field(default_factory=dict)
    module: str | None = None


class View:
    """The operators of a graph, with the producer and readers of each tensor."""

    def __init__(
        self, tensors: dict[str, Tensor], operators: Sequence[Operator], parts: Mapping[str, Part],
        doubled: Collection[str],
    ) -> None:  # fmt: skip
        self.tensors = tensors
        self.doubled = doubled
        self.parts = parts
        self.operators = operators
        self.makers = {name: operator for operator in operators for name in operator.outputs}
        self.readers: dict[str, list[Operator]] = {}
        for operator in operators:
            for name in dict.fromkeys(operator.inputs):
                self.readers.setdefault(name, []).append(operator)

    def made(self, name: str, kind: str) -> Operator | None:
        """The operator that computes a tensor, if it is of one of these kinds."""
        maker = self.makers.get(name)
        return maker if maker is not None and maker.kind == kind else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self.tensors[name].shape

    def behind(self, name: str, *kinds: str) -> str:
        """The input of a chain of operators of these kinds with one input; the tensor itself if there is none."""
        while (maker := self.makers.get(name)) is not None and maker.kind in kinds and len(maker.inputs) == 1:
            name = maker.inputs[0]
        return name


Rule = Callable[[View, Operator], Sequence[New] | str | None]
"""(the graph, an operator) -> the operators that make its output instead, the last one makes it; or the tensor that its
output is equal to; or None."""


def rewritten(graph: Graph, rules: Iterable[Rule], doubled: Collection[str] = ()) -> Graph:
    """The graph after every rule was tried at every operator, one rule after the other, each until it finds no more.

    `doubled` are constants whose last dim has two equal halves.

    Unread operators are removed. New operators are in the module of the one that they replace, and are called after it
    and their kind.
    """
    rewriting = _Rewriting(graph, doubled)
    for rule in rules:
        while rewriting.apply(rule):
            pass
    return rewriting.named(graph)


class _Rewriting:
    """A graph that is being rewritten; new operators have provisional names, which no operator of a model can have."""

    def __init__(self, graph: Graph, doubled: Collection[str]) -> None:
        self.doubled = doubled
        self.tensors = dict(graph.tensors)
        self.operators = list(graph.operators)
        self.loss = graph.loss
        self.parts = dict(graph.parts)
        self.again = set(graph.recompute)
        self.new: dict[str, str] = {}
        """Provisional name -> what the operator is to be called, if the name is free."""

    def apply(self, rule: Rule) -> bool:
        """Try a rule at every operator; returns whether it found anything."""
        view = View(self.tensors, self.operators, self.parts, self.doubled)
        found = [(operator, rule(view, operator)) for operator in self.operators]
        if all(news is None for _, news in found):
            return False
        equal: dict[str, str] = {}
        made: list[Operator] = []
        for operator, news in found:
            if isinstance(news, str):
                equal[operator.outputs[0]] = equal.get(news, news)
                continue
            made += (
                structs.replace(each, inputs=tuple(equal.get(name, name) for name in each.inputs))
                for each in ([operator] if news is None else self._made(operator, news))
            )
        self.operators = _read(made, self.loss)
        return True

    def _made(self, operator: Operator, news: Sequence[New]) -> Iterator[Operator]:
        outputs: list[str] = []
        for number, new in enumerate(news):
            name = f"new {len(self.new)}"
            module = operator.module if new.module is None else new.module
            self.new[name] = f"{module}.{new.kind}" if module else new.kind
            if operator.name in self.again:
                self.again.add(name)
            output = operator.outputs[0] if number == len(news) - 1 else f"{name}.out"
            self.tensors[output] = Tensor(name=output, shape=new.shape, dtype=new.dtype)
            inputs = tuple(outputs[each] if isinstance(each, int) else self._name(each) for each in new.inputs)
            outputs.append(output)
            yield Operator(name=name, kind=new.kind, inputs=inputs, outputs=(output,), attrs=new.attrs, module=module)

    def _name(self, read: str | Piece) -> str:
        if isinstance(read, str):
            return read
        self.tensors[read.tensor.name] = read.tensor
        self.parts[read.tensor.name] = read.part
        return read.tensor.name

    def named(self, graph: Graph) -> Graph:
        """The graph, new operators and what they make with separate names."""
        taken = {operator.name for operator in self.operators}
        called: dict[str, str] = {}
        operators, again = [], []
        for operator in self.operators:
            is_again = operator.name in self.again
            if operator.name in self.new:
                name = _free(self.new[operator.name], taken)
                called[operator.outputs[0]] = f"{name}.out"
                operator = structs.replace(operator, name=name, outputs=(f"{name}.out",))
            operators.append(
                structs.replace(operator, inputs=tuple(called.get(each, each) for each in operator.inputs))
            )
            if is_again:
                again.append(operator.name)
        read = {name for operator in self.operators for name in (*operator.inputs, *operator.outputs)}
        kept = (tensor for name, tensor in self.tensors.items() if name in read or tensor.kind == "input")
        tensors = (structs.replace(tensor, name=called.get(tensor.name, tensor.name)) for tensor in kept)
        return structs.replace(
            graph, tensors={tensor.name: tensor for tensor in tensors}, operators=tuple(operators),
            loss=called.get(self.loss, self.loss), recompute=tuple(again),
            parts={name: part for name, part in self.parts.items() if name in read},
        )  # fmt: skip


def _free(name: str, taken: set[str]) -> str:
    """A name that no operator has, and takes it."""
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    taken.add(free)
    return free


def _read(operators: Sequence[Operator], loss: str) -> list[Operator]:
    """The operators that the loss depends on."""
    wanted, kept = {loss}, []
    for operator in reversed(operators):
        if wanted.intersection(operator.outputs):
            wanted.update(operator.inputs)
            kept.append(operator)
    kept.reverse()
    return kept
