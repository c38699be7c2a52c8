"""CPUs, on which the tests run. Ranks communicate over gloo, and the host itself computes."""

from __future__ import annotations

import os
import platform

from executor.kinds.kind import DeviceKind

__all__ = ["Cpu", "usable_cores"]


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Cpu(DeviceKind):
    """The processor of the host."""

    name = "cpu"
    backend = "gloo"

    def product(self, index: int) -> str:
        """The product name, or the architecture."""
        return platform.processor() or platform.machine()

    def memory_bytes(self, index: int) -> tuple[int, int]:
        """Bytes of free memory and of all memory of the host."""
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")

    def cache_bytes(self, index: int) -> int:
        """Bytes of the last-level cache, assumed."""
        return 32 * 2**20

    def num_processors(self, index: int) -> int:
        """Cores that this process may use."""
        return usable_cores()
