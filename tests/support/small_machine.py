"""A machine with figures that are easy to compute with: nodes of 4 devices, no latency, nothing to issue."""

from costmodels import Machine
from costmodels.machine.machine import COLLECTIVES, DISPATCH_CLASSES, Collective, Compute, Interval, Link

GB = 1e9


def small_machine(num_devices: int = 16, *, uplink_Bps: float | None = None, latency_s: float = 0.0, **rest) -> Machine:
    """1 TFLOP/s, 1 TB/s of memory; 100 GB/s inside a node, 10 GB/s from every rank between nodes."""
    settings = {
        "name": "small",
        "device": "cuda",
        "num_devices": num_devices,
        "devices_per_node": 4,
        "memory_bytes": 10**10,
        "compute": Compute(
            matrix_flops_per_s={"float32": 1e12}, vector_flops_per_s={"float32": 1e12}, memory_Bps=1e12, sharpness=64.0
        ),
        "links": (
            Link(name="node", ranks=4, latency_s=latency_s, bandwidth_Bps=100 * GB),
            Link(name="wire", ranks=64, latency_s=latency_s, bandwidth_Bps=10 * GB, uplink_Bps=uplink_Bps),
        ),
        "collectives": dict.fromkeys(COLLECTIVES, Collective()),
        "dispatch_s": dict.fromkeys(DISPATCH_CLASSES, 0.0),
        "host_async": True,
        "interval": Interval(low=0.8, high=1.25),
        "provenance": {},
    }
    return Machine(**settings | rest)
