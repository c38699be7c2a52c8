"""The device of a rank: its backend, clocks, memory, seeds and versions. Only this file knows device names.

Everything else in this package speaks of a `Device`. CPU ranks talk over gloo, CUDA ranks over NCCL, Ascend ranks over
HCCL. The CPU path is what the tests run; the CUDA path was run on H200; the NPU path was **not run on Ascend**.

    >>> device = pick_device("cpu")
    >>> device.backend, device.is_async
    ('gloo', False)
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from plans.errors import TwofoldError

__all__ = ["BACKENDS", "Device", "Mark", "Recording", "environment", "now_ns", "num_accelerators", "pick_device"]

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

Mark = Any
"""A point on a device's own time line: nanoseconds on a CPU, a recorded event on an accelerator."""

now_ns = time.perf_counter_ns
"""The host's clock. On Linux it is CLOCK_MONOTONIC, which all processes of a host share."""


_GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
"""The class that records launches; both have the same methods."""


class Recording:
    """Work that was recorded and is launched as one; it owns the memory of what it makes until it is released."""

    __slots__ = ("_graph",)

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()

    @property
    def pool(self) -> Any:
        """The memory that it uses; another recording may use it too if their replays never overlap."""
        return self._graph.pool()

    def release(self) -> None:
        """Free the recording and its memory; no replay may be running."""
        self._graph.reset()


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
        """The device as torch names it, for `tensor.to(...)`."""
        return torch.device(self.kind, self.index) if self.is_async else torch.device("cpu")

    @property
    def name(self) -> str:
        """The product name of the device, for records."""
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
        """Reset the peak of allocated memory."""
        if self.is_async:
            torch.accelerator.reset_peak_memory_stats(self.index)

    # -- measuring -----------------------------------------------------------------------------------------------------

    def use_own_stream(self) -> None:
        """Make a new stream the current one for all further work; work on the default stream cannot be captured."""
        if self.is_async:
            torch.accelerator.set_stream(torch.Stream(device=self.torch_device))

    @property
    def can_record(self) -> bool:
        """Whether `capture` records launches on this kind of device."""
        return self.kind in _GRAPHS

    def capture(self, run: Callable[[], object], pool: Any = None) -> Recording | None:
        """Record `run` as one launch whose replay has no host time between kernels; None if the device cannot record.

        Nothing of `run` is carried out. The current stream must not be the default one. With the `pool` of another
        recording both use one memory. What other threads do meanwhile is not recorded. Not run on Ascend.

        Raises whatever torch raises where `run` does something that cannot be recorded.
        """
        if not self.can_record:
            return None
        graph = getattr(torch.get_device_module(self.kind), _GRAPHS[self.kind])()
        self.synchronize()
        graph.capture_begin(**({} if pool is None else {"pool": pool}), capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError), warnings.catch_warnings(action="ignore"):
                graph.capture_end()
            raise
        with warnings.catch_warnings(action="ignore"):  # what is a view launches nothing
            graph.capture_end()
        return Recording(graph)

    def recorded_mark(self) -> Mark:
        """A mark for use inside `capture`: every replay sets it anew (an external event of CUDA).

        Raises:
            TwofoldError: this device or this version of torch has none.
        """
        if self.kind != "cuda":
            raise TwofoldError(f"a recording on {self.kind} cannot take times inside; not run on Ascend")
        event = torch.get_device_module(self.kind).Event(enable_timing=True, external=True)
        event.record()
        return event

    # -- feeding -------------------------------------------------------------------------------------------------------

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device can copy from while the host goes on: pinned, where there is a device."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_async)

    @contextlib.contextmanager
    def on(self, stream: torch.Stream | None) -> Iterator[None]:
        """Make `stream` the current one inside the `with`; None changes nothing."""
        if stream is None:
            yield
            return
        before = torch.accelerator.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def point(self) -> torch.Event | None:
        """A point on the current stream for others to wait for (`wait_for`, `reached`), or None on a CPU."""
        if not self.is_async:
            return None
        event = torch.Event(device=self.torch_device)
        event.record()
        return event

    def wait_for(self, point: torch.Event | None) -> None:
        """Let the current stream wait for a point of another."""
        if point is not None:
            torch.accelerator.current_stream().wait_event(point)

    def reads(self, tensor: torch.Tensor) -> None:
        """The current stream reads a tensor of another: its memory is not used anew before that is done."""
        if self.is_async:
            tensor.record_stream(torch.accelerator.current_stream())

    def reached(self, mark: Mark) -> None:
        """Let the host wait until a mark or a point is reached."""
        if self.is_async and mark is not None:
            mark.synchronize()

    # -- what it is ----------------------------------------------------------------------------------------------------

    def spin(self, cycles: int) -> bool:
        """Keep the current stream busy for so many cycles of its clock; False where that cannot be done."""
        sleep = getattr(torch.get_device_module(self.kind), "_sleep", None) if self.kind == "cuda" else None
        if sleep is None:
            return False
        sleep(cycles)
        return True

    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of free memory and of all memory: of the device, or of this host on a CPU."""
        if not self.is_async:
            page = os.sysconf("SC_PAGE_SIZE")
            return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        free, total = torch.get_device_module(self.kind).mem_get_info(self.index)
        return int(free), int(total)

    def memory_reserved(self) -> int:
        """Bytes that torch's allocator took from the device; 0 on a CPU."""
        return torch.accelerator.memory_reserved(self.index) if self.is_async else 0

    def release_memory(self) -> None:
        """Release memory that the allocator holds but no tensor uses, and the workspaces of matrix products."""
        if self.kind == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
        if self.is_async:
            torch.accelerator.empty_cache()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the last-level cache; assumed 32 MiB on a CPU and 192 MiB where the driver does not report it."""
        if self.kind == "cpu":
            return 32 * 2**20
        properties = torch.get_device_module(self.kind).get_device_properties(self.index)
        return int(getattr(properties, "L2_cache_size", 0) or 192 * 2**20)

    @property
    def num_processors(self) -> int:
        """Multiprocessors (or cores of an NPU) that one kernel can fill; usable cores on a CPU."""
        if self.kind == "cpu":
            return _usable_cores()
        properties = torch.get_device_module(self.kind).get_device_properties(self.index)
        return int(getattr(properties, "multi_processor_count", 0) or getattr(properties, "cube_core_num", 0) or 1)

    def sensors(self) -> dict[str, float]:
        """temperature_C, power_W and clock_MHz, as far as the driver reports them."""
        if self.kind != "cuda":
            return {}
        module = torch.get_device_module(self.kind)
        readings = {
            "temperature_C": (module.temperature, 1.0),
            "power_W": (module.power_draw, 1e-3),
            "clock_MHz": (module.clock_rate, 1.0),
        }
        found = {}
        for name, (read, scale) in readings.items():
            with contextlib.suppress(Exception):  # no NVML on this host, or a driver that does not tell
                found[name] = float(read(self.index)) * scale
        return found

    def limits(self) -> dict[str, str]:
        """The driver's version and what it lets the device do: power_limit_W, max_clock_MHz and so on.

        Empty where `nvidia-smi` does not tell.
        """
        asked = {
            "driver": "driver_version", "power_limit_W": "power.limit", "max_clock_MHz": "clocks.max.sm",
            "memory_clock_MHz": "clocks.max.memory", "persistence": "persistence_mode", "ecc": "ecc.mode.current",
        }  # fmt: skip
        if self.kind != "cuda":
            return {}
        command = ["nvidia-smi", f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run([*command, "-i", str(self.index)], capture_output=True, text=True, timeout=20)
            if said.returncode == 0:
                return dict(zip(asked, map(str.strip, said.stdout.strip().split(",")), strict=False))
        return {}


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
        if there is None:
            raise TwofoldError(f"device {kind!r} is not available: no accelerator found on this host; use --device cpu")
        raise TwofoldError(
            f"device {kind!r} is not available: the accelerator of this host is {there.type}; use cpu or {there.type}"
        )
    index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    count = torch.accelerator.device_count()
    if index >= count:
        raise TwofoldError(f"local rank {index} has no {there.type} device: this host has {count}; start {count} ranks")
    return Device(kind=there.type, index=index)


def num_accelerators() -> int:
    """How many accelerators this host has."""
    return torch.accelerator.device_count()


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
