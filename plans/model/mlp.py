"""Graphs of multi-layer perceptrons without torch: for probes, benchmarks and tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator, Tensor

__all__ = ["mlp_graph"]


def mlp_graph(sizes: Sequence[int], batch_size: int, *, bias: bool = True, name: str = "mlp") -> Graph:
    """Linear layers of `sizes` with relus between and the mean squared error at the end.

    Args:
        sizes: features of the input, of each layer's output in turn; at least two.
        batch_size: of a step.
        bias: whether layers add one.
        name: name of the graph.

    Raises:
        TwofoldError: fewer than two sizes.

    >>> graph = mlp_graph([8, 4, 2], 16)
    >>> [operator.name for operator in graph.operators]
    ['layer1.linear', 'layer1.relu', 'layer2.linear', 'loss.mse_loss']
    """
    if len(sizes) < 2:
        raise TwofoldError(f"a perceptron needs at least an input and an output size, got {list(sizes)}")
    tensors = {
        "x": Tensor(name="x", shape=(batch_size, sizes[0]), kind="input"),
        "y": Tensor(name="y", shape=(batch_size, sizes[-1]), kind="input"),
    }
    operators: list[Operator] = []

    def add(made: str, kind: str, shape: tuple[int, ...], inputs: tuple[str, ...], module: str) -> str:
        tensors[made] = Tensor(name=made, shape=shape)
        operators.append(Operator(name=f"{module}.{kind}", kind=kind, inputs=inputs, outputs=(made,), module=module))
        return made

    value = "x"
    for number, (before, after) in enumerate(pairwise(sizes), 1):
        module = f"layer{number}"
        weights = [f"{module}.weight"]
        tensors[weights[0]] = Tensor(name=weights[0], shape=(after, before), kind="parameter")
        if bias:
            weights.append(f"{module}.bias")
            tensors[weights[1]] = Tensor(name=weights[1], shape=(after,), kind="parameter")
        value = add(f"{module}.out", "linear", (batch_size, after), (value, *weights), module)
        if number < len(sizes) - 1:
            value = add(f"{module}.act", "relu", (batch_size, after), (value,), module)
    add("loss", "mse_loss", (), (value, "y"), "loss")
    return Graph(name=name, batch_size=batch_size, tensors=tensors, operators=tuple(operators), loss="loss")
