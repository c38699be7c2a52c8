"""Calls that run several kernels: operators without a kernel of their own, and gradients by autograd."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PLAIN", "Composite", "composite"]


class Composite(NamedTuple):
    """Host time, kernels and traffic of a call, in plain calls of one kernel.

    Args:
        host: time to issue it.
        kernels: that it launches.
        moved: bytes that they move, in bytes of its operands.
    """

    host: float
    kernels: float
    moved: float


PLAIN = Composite(host=1.0, kernels=1.0, moved=1.0)

_FORWARD = Composite(host=3.5, kernels=3.0, moved=3.0)
_GRADIENT = Composite(host=19.0, kernels=5.5, moved=3.7)
_KINDS = {
    "opaque": (_FORWARD, _GRADIENT),
    "function": (_FORWARD, _GRADIENT),
    "recurrent": (Composite(31.5, 10.0, 1.0), Composite(113.0, 24.0, 1.0)),
}
"""Kind -> forward and gradient: means over 14 operators and 3 recurrent layers on an H100
(`python -m benchmarks.devices.opaque_calls`, benchmarks/results/opaque_calls_h100.json). That each kernel reads and
writes one tensor is assumed; so is that functions with a backward of their own are like single operators. Recurrent
layers have the kernels of `recurrent_s`."""


def composite(call: str) -> Composite:
    """The parts of a COMPUTE call; `PLAIN` where it is one kernel.

    >>> composite("opaque.grad0").host, composite("mul.forward").host
    (19.0, 1.0)
    """
    kind, _, part = call.partition(".")
    if kind not in _KINDS:
        return PLAIN
    return _KINDS[kind][part != "forward"]
