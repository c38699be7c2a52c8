"""Physical lower bounds on the step time of any plan of a graph on a machine."""

from __future__ import annotations

from costmodels import Machine
from costmodels.price.compute import rate
from plans.model.flops import necessary_flops
from plans.model.graph import Graph
from plans.optimizer import Optimizer

__all__ = ["physics_s"]


def physics_s(graph: Graph, machine: Machine, num_devices: int, optimizer: Optimizer) -> float:
    """Seconds of one step that no plan of `graph` can beat: the slower of its arithmetic and its memory traffic.

    The arithmetic runs at the peak rates of all devices. Every weight, gradient, master weight and optimizer state
    passes through memory once, at the memories' full bandwidth. Nothing is counted for communication, dispatch,
    activations or a rank that waits.

    Args:
        graph: graph of the full batch.
        machine: its device, and cores if ranks share them.
        num_devices: that work together.
        optimizer: what it keeps for every parameter.

    >>> from plans.model.mlp import mlp_graph
    >>> graph, machine = mlp_graph([64, 32], 16), Machine.load("h200-x8")
    >>> physics_s(graph, machine, 8, Optimizer()) == physics_s(graph, machine, 1, Optimizer()) / 8
    True
    """
    compute, workers = machine.compute, num_devices
    if machine.cores_per_node is not None:  # ranks of a node share its cores
        workers = min(num_devices, machine.cores_per_node * -(-num_devices // machine.devices_per_node))
    faster = max(1.0, *(1.0 / cost for cost in compute.form_cost.values())) if compute.form_cost else 1.0
    arithmetic_s = 0.0
    for dtype, flops in necessary_flops(graph).items():
        peaks = [rate(compute, name, dtype, machine.name) for name in ("matrix_flops_per_s", "vector_flops_per_s")]
        arithmetic_s += flops / (max(peaks) * faster)
    moved_bytes = optimizer.bytes_of(graph.parameters)
    return max(arithmetic_s, moved_bytes / compute.memory_Bps) / workers
