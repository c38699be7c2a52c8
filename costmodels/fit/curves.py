"""Fitted curves: rates and bandwidths over size."""

from __future__ import annotations

from costmodels.fit.predict import library_of
from costmodels.machine.catalogue import Device
from costmodels.price.communication import wire_s
from costmodels.price.compute import Compute, matrix_s
from costmodels.price.group import first_group
from costmodels.price.traffic import Traffic, collective_traffic, transfer_traffic

__all__ = ["Curve", "kernel_bandwidths", "message_bandwidths", "moved_bytes", "product_rates"]

Curve = list[tuple[float, float]]

_ROWS = sorted({round(2 ** (at / 12)) for at in range(169)})


def product_rates(compute: Compute, dtype: str, n: int, k: int) -> Curve:
    """(Rows m, FLOPs a second) of products of 16-bit operands with these columns and this length of the sums."""
    curve = []
    for m in _ROWS:
        seconds = matrix_s(compute, (m, n, k), compute.matrix_flops_per_s[dtype], 2 * (m * k + n * k + m * n))
        curve.append((float(m), 2 * m * n * k / seconds))
    return curve


def kernel_bandwidths(compute: Compute, low_bytes: float, high_bytes: float) -> Curve:
    """(Bytes, bytes a second) of memory-bound kernels."""
    reached_Bps = compute.memory_Bps * compute.memory_efficiency
    sizes = _between(low_bytes, high_bytes if high_bytes > low_bytes else 2.0 * low_bytes, 61)
    return [(size, size / (compute.kernel_s + size / reached_Bps)) for size in sizes]


def message_bandwidths(device: Device, call: str, ranks: int, low_bytes: float, high_bytes: float) -> Curve:
    """(Bytes of the message, bytes a second that a rank sends) of communication inside a node."""
    curve = []
    for size in map(int, _between(low_bytes, high_bytes, 81)):
        moved = _traffic(device, call, ranks, size)
        seconds = wire_s(device.collectives[call], device.node, first_group(device.node, ranks), call, moved)
        curve.append((float(size), moved.moved_bytes / seconds))
    return curve


def moved_bytes(device: Device, call: str, ranks: int, size_bytes: int) -> float:
    """The bytes that a rank sends for a message."""
    return _traffic(device, call, ranks, size_bytes).moved_bytes


def _traffic(device: Device, call: str, ranks: int, size_bytes: int) -> Traffic:
    if call == "transfer":
        return transfer_traffic(1, size_bytes)
    return collective_traffic(call, ranks, size_bytes, 2, library_of(device))


def _between(low: float, high: float, count: int) -> list[float]:
    """Sizes between two limits, with equal ratios."""
    return [low * (high / low) ** (at / (count - 1)) for at in range(count)]
