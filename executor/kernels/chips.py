"""Capabilities of the chip that holds a tensor, so that kernels test capabilities instead of device names."""

from __future__ import annotations

from functools import cache

from torch import Tensor

__all__ = ["has_triton", "is_gpu"]


def is_gpu(x: Tensor) -> bool:
    """Whether torch's fused CUDA kernels take `x`."""
    return x.is_cuda


def has_triton(x: Tensor) -> bool:
    """Whether kernels written in Triton can run on `x`: it is on a GPU, and Triton is installed with torch."""
    return x.is_cuda and _triton_is_installed()


@cache
def _triton_is_installed() -> bool:
    try:
        import triton  # noqa: F401 - it comes with torch's builds for GPUs alone
    except ImportError:
        return False
    return True
