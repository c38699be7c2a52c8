"""Keys of everything that the cost of an operator depends on. Operators and strategies with equal keys have equal
costs.

A transformer has hundreds of operators, but only a few dozen different ones. Many strategies of an operator differ only
in which of several axes of equal size they use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations

import msgspec

from plans.layout import Layout
from plans.model.graph import Graph, Operator
from plans.operators import OperatorSpec
from plans.optimizer import Optimizer
from plans.plan import Strategy

__all__ = ["CostKeys"]


@dataclass(slots=True)
class CostKeys:
    """Keys of the operators of a graph on one mesh.

    Args:
        micro: the graph of one micro-batch.
        mesh: the stage's mesh.
        num_micro_batches: number of micro batches of a step.
        optimizer: what happens to the parameters; operators without any cost the same with every optimizer.
        group_key: (mesh, axes) -> a key; collectives over sets of axes with equal keys cost the same.
    """

    micro: Graph
    mesh: Layout
    num_micro_batches: int
    optimizer: Optimizer
    group_key: Callable[[Layout, tuple[str, ...]], object]
    _axis_sizes: dict[str, int] = field(init=False)
    _signatures: dict[str, object] = field(init=False, default_factory=dict)
    _summed_dims: dict[str, list[tuple[str, ...]]] = field(init=False, default_factory=dict)
    _groups: dict[frozenset[str], object] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._axis_sizes = {axis: self.mesh.size((axis,)) for axis in self.mesh.alias_name}

    def signature(self, operator: Operator) -> object:
        """A key of an operator that ignores its name, its strategy and the optimizer's level."""
        if operator.name not in self._signatures:
            tensors = tuple(
                (tensor.shape, tensor.dtype, tensor.kind == "parameter")
                for tensor in (self.micro.tensors[name] for name in (*operator.inputs, *operator.outputs))
            )
            trained, attrs = self.micro.trained_inputs(operator), repr(sorted(operator.attrs.items()))
            made = operator.outputs[0] == self.micro.loss
            optimizer = msgspec.structs.replace(self.optimizer, parallel_level=0)
            settings = repr(optimizer) if any(is_parameter for *_, is_parameter in tensors) else ""
            self._signatures[operator.name] = (
                operator.kind, attrs, tensors, trained, made, self.num_micro_batches, settings,
            )  # fmt: skip
        return self._signatures[operator.name]

    def of(self, operator: Operator, spec: OperatorSpec, strategy: Strategy) -> object:
        """A key of an operator with a strategy."""
        signature = self.signature(operator), self._level(operator, spec, strategy)
        shards = self._shards(spec, strategy)
        is_sorted = list(shards) == sorted(shards, key=self.mesh.alias_name.index)
        if strategy.out is not None or strategy.mesh is not None or not is_sorted:
            return signature, self.mesh, strategy.mesh, tuple(strategy.dims.items()), strategy.out
        return signature, self._cuts(operator, spec, strategy), self._gathers(shards)

    def _level(self, operator: Operator, spec: OperatorSpec, strategy: Strategy) -> int:
        """The optimizer's level if it shards a parameter of the operator; else 0."""
        mesh = strategy.mesh or self.mesh
        for index, name in enumerate(operator.inputs):
            tensor = self.micro.tensors[name]
            if tensor.kind == "parameter" and tensor.size_bytes >= self.optimizer.threshold_bytes:
                if math.prod(spec.input_layout(index, mesh, strategy.dims).split_counts) < mesh.num_ranks:
                    return self.optimizer.parallel_level
        return 0

    def of_kernels(self, operator: Operator, spec: OperatorSpec, strategy: Strategy) -> object:
        """A key of the kernels of an operator with a strategy, and of what is gathered between them."""
        if spec.statistic_layout(strategy.mesh or self.mesh, strategy.dims) is not None:
            return self.of(operator, spec, strategy)
        return self.of_kernels_alone(operator, spec, strategy)

    def of_kernels_alone(self, operator: Operator, spec: OperatorSpec, strategy: Strategy) -> object:
        """A key of the kernels themselves: these depend on the shapes of the parts alone."""
        if strategy.out is not None or strategy.mesh is not None:
            return self.of(operator, spec, strategy)
        return self.signature(operator), self._parts(spec, strategy)

    def _parts(self, spec: OperatorSpec, strategy: Strategy) -> tuple[int, ...]:
        """The number of parts of every dim."""
        dims, sizes = strategy.dims, self._axis_sizes
        return tuple([math.prod([sizes[axis] for axis in dims.get(dim, ())]) for dim in spec.sizes])

    def _cuts(self, operator: Operator, spec: OperatorSpec, strategy: Strategy) -> object:
        """Numbers of parts of the dims, and the groups over which parameters and the loss are summed or gathered."""
        dims, sizes = strategy.dims, self._axis_sizes
        parts = self._parts(spec, strategy)
        groups: list[object] = []
        for summed in self._summed(operator, spec):
            axes = [axis for dim in summed for axis in dims.get(dim, ())]
            own = {axis for dim, given in dims.items() if dim not in summed for axis in given}
            groups += [self._group(frozenset(axes)), self._group(frozenset(sizes) - own)]  # all with the same weight
        if operator.outputs[0] == self.micro.loss:
            groups.append(self._group(frozenset(axis for dim in spec.contracted for axis in dims.get(dim, ()))))
        return parts, tuple(groups)

    @staticmethod
    def _shards(spec: OperatorSpec, strategy: Strategy) -> tuple[str, ...]:
        """The axes over which a statistic is gathered."""
        return () if spec.statistic is None else strategy.dims.get(spec.statistic.over, ())

    def _gathers(self, shards: tuple[str, ...]) -> tuple[object, ...]:
        """The groups of all sets of axes over which a gather may pass, in mesh order."""
        sets = [axes for count in range(1, len(shards) + 1) for axes in combinations(shards, count)]
        return tuple(self._group(frozenset(axes)) for axes in sets)

    def _group(self, axes: frozenset[str]) -> object:
        if axes not in self._groups:
            self._groups[axes] = self.group_key(self.mesh, tuple(sorted(axes)))
        return self._groups[axes]

    def _summed(self, operator: Operator, spec: OperatorSpec) -> list[tuple[str, ...]]:
        """The dims over which the gradient of every trained parameter is summed."""
        if operator.name not in self._summed_dims:
            self._summed_dims[operator.name] = [
                spec.gradient_sums(index)
                for index, name in enumerate(operator.inputs)
                if self.micro.tensors[name].kind == "parameter" and index in spec.gradients
            ]
        return self._summed_dims[operator.name]
