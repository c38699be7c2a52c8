"""What no plan of a graph can beat on a machine, whatever it does."""

from __future__ import annotations

from costmodels import Machine
from costmodels.price.compute import rate
from plans.model.graph import Graph

__all__ = ["graph_flops", "physics_s"]


def graph_flops(graph: Graph) -> dict[str, int]:
    """dtype -> floating-point operations of one step: every operator's forward and the gradients that are wanted.

    >>> from plans.model.mlp import mlp_graph
    >>> graph_flops(mlp_graph([64, 32], 16))["float32"] >= 2 * 2 * 16 * 64 * 32
    True
    """
    found: dict[str, int] = {}
    for operator in graph.operators:
        spec = graph.spec(operator)
        gradients = sum(spec.gradients[index].flops for index in graph.trained_inputs(operator))
        dtype = graph.tensors[operator.outputs[0]].dtype
        found[dtype] = found.get(dtype, 0) + spec.flops + gradients
    return found


def physics_s(graph: Graph, machine: Machine, num_devices: int) -> float:
    """All arithmetic at the peak rates, or every parameter read and written once at the bandwidth of the memory.

    Nothing is counted for communication, dispatch, activations or a rank that waits.
    """
    compute, workers = machine.compute, num_devices
    if machine.cores_per_node is not None:  # what a core does
        workers = min(num_devices, machine.cores_per_node * -(-num_devices // machine.devices_per_node))
    faster = max(1.0, *(1.0 / cost for cost in compute.form_cost.values())) if compute.form_cost else 1.0
    arithmetic_s = 0.0
    for dtype, flops in graph_flops(graph).items():
        peaks = [rate(compute, name, dtype, machine.name) for name in ("matrix_flops_per_s", "vector_flops_per_s")]
        arithmetic_s += flops / (max(peaks) * faster)
    memory_s = 2 * sum(tensor.size_bytes for tensor in graph.parameters) / compute.memory_Bps
    return max(arithmetic_s, memory_s) / workers
