"""The one file that knows device names: which device a rank uses, its backend, clocks, memory, seeds and versions.

Everything else in this package speaks of a `Device`. CPU ranks talk over gloo, CUDA ranks over NCCL, Ascend ranks over
HCCL. The CPU path is what the tests run; the CUDA path was not run here, and the NPU path was **not run on Ascend**.

    >>> device = pick_device("cpu")
    >>> device.backend, device.is_async
    ('gloo', False)
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plans.errors import TwofoldError

__all__ = ["BACKENDS", "Device", "Mark", "environment", "now_ns", "pick_device", "seed_everything"]

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

Mark = Any
"""A point on a device's own time line: nanoseconds on a CPU, a recorded event on an accelerator."""

now_ns = time.perf_counter_ns
"""The host's clock. On Linux it is CLOCK_MONOTONIC, which all processes of a host share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one rank.

    Args:
        kind: "cpu", "cuda" or "npu".
        index: which one of this host's; 0 for a CPU.
    """

    kind: str
    index: int = 0

    @property
    def backend(self) -> str:
        """The name of the communication backend."""
        return BACKENDS[self.kind]

    @property
    def is_async(self) -> bool:
        """Whether work runs behind the host, on streams."""
        return self.kind != "cpu"

    @property
    def torch_device(self) -> torch.device:
        """For `tensor.to(...)`."""
        return torch.device(self.kind, self.index) if self.is_async else torch.device("cpu")

    @property
    def name(self) -> str:
        """What it is called, for records."""
        if not self.is_async:
            return platform.processor() or platform.machine()
        return str(torch.get_device_module(self.kind).get_device_name(self.index))

    def use(self) -> None:
        """Make it this process's device; on a CPU share the cores evenly among the ranks of this host."""
        if self.is_async:
            torch.accelerator.set_device_index(self.index)
        else:
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            torch.set_num_threads(max(1, _usable_cores() // ranks_here))

    def synchronize(self) -> None:
        """Wait until everything issued so far has run."""
        if self.is_async:
            torch.accelerator.synchronize()

    def stream(self) -> torch.Stream | None:
        """A new stream, or None on a CPU, which has none."""
        return torch.Stream(device=self.torch_device) if self.is_async else None

    def mark(self) -> Mark:
        """A point in time after everything issued so far on the current stream."""
        if not self.is_async:
            return now_ns()
        event = torch.Event(device=self.torch_device, enable_timing=True)
        event.record()
        return event

    def between_ns(self, first: Mark, second: Mark) -> int:
        """Nanoseconds from one mark to another; both must have been reached (`synchronize`)."""
        return second - first if not self.is_async else round(first.elapsed_time(second) * 1e6)

    def memory_allocated(self) -> int:
        """Bytes that tensors hold on the device now; 0 on a CPU, where torch does not count them."""
        return torch.accelerator.memory_allocated(self.index) if self.is_async else 0

    def max_memory_allocated(self) -> int:
        """The most bytes since `reset_peak_memory`; 0 on a CPU."""
        return torch.accelerator.max_memory_allocated(self.index) if self.is_async else 0

    def reset_peak_memory(self) -> None:
        """Start counting the peak anew."""
        if self.is_async:
            torch.accelerator.reset_peak_memory_stats(self.index)


def pick_device(kind: str = "auto", local_rank: int | None = None) -> Device:
    """The device of this rank.

    Args:
        kind: "cpu", "cuda", "npu", or "auto" for an accelerator where there is one.
        local_rank: which of the host's accelerators; LOCAL_RANK by default.

    Raises:
        TwofoldError: an unknown kind, a device that is not there, more ranks on the host than accelerators.
    """
    if kind not in (*BACKENDS, "auto"):
        raise TwofoldError(f"device {kind!r} is not known; known: auto, {', '.join(BACKENDS)}")
    if kind == "cpu":
        return Device(kind="cpu")
    if kind == "npu" or (kind == "auto" and torch.accelerator.current_accelerator() is None):
        _load_npu(required=kind == "npu")
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None and kind == "auto":
        return Device(kind="cpu")
    if there is None or there.type not in BACKENDS or kind not in ("auto", there.type):
        found = "none" if there is None else there.type
        raise TwofoldError(f"device {kind!r} was asked for, this host's accelerator is {found}; use cpu or {found}")
    index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    count = torch.accelerator.device_count()
    if index >= count:
        raise TwofoldError(f"local rank {index} has no {there.type} device: this host has {count}; start {count} ranks")
    return Device(kind=there.type, index=index)


def seed_everything(seed: int) -> None:
    """Seed torch on every device (numpy generators of this project carry their own seeds)."""
    torch.manual_seed(seed)


def environment(device: Device) -> dict[str, str]:
    """Versions and names that belong beside every measurement."""
    record = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "platform": platform.platform(),
        "cores": str(_usable_cores()),
        "device": device.kind,
        "device_name": device.name,
        "backend": device.backend,
    }
    if device.kind == "cuda":
        version = torch.get_device_module("cuda").nccl.version()
        record["nccl"] = ".".join(str(part) for part in version)
    return record


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load_npu(*, required: bool) -> None:
    """Import torch-npu, which registers the device; not run on Ascend."""
    if importlib.util.find_spec("torch_npu") is None:
        if required:
            raise TwofoldError("device 'npu' needs torch-npu in the version of your torch: pip install twofold[npu]")
        return
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        if required:
            raise TwofoldError(f"torch-npu does not load ({error}); is the Ascend toolkit (CANN) installed?") from None
