"""The floating-point operations that a step of a graph needs."""

from __future__ import annotations

from plans.model.graph import Graph

__all__ = ["necessary_flops"]


def necessary_flops(graph: Graph) -> dict[str, int]:
    """dtype -> floating-point operations that every step of the graph needs.

    These are every operator's forward and the gradients that are needed, without anything recomputed.

    >>> from plans.model.mlp import mlp_graph
    >>> necessary_flops(mlp_graph([64, 32], 16))["float32"] >= 2 * 2 * 16 * 64 * 32
    True
    """
    flops: dict[str, int] = {}
    for operator in graph.operators:
        spec, trained = graph.spec(operator), graph.trained_inputs(operator)
        gradients = sum(spec.gradients[index].flops - spec.gradients[index].remade_flops for index in trained)
        dtype = graph.tensors[operator.outputs[0]].dtype
        flops[dtype] = flops.get(dtype, 0) + spec.flops + gradients
    return flops
