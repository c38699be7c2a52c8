"""The device of a rank: its streams, clocks, memory, recordings and kernels.

The rest of this package uses a `Device`. It has the common part of all accelerators; `executor.kinds` has one file for
the differences of each kind.

    >>> device = pick_device("cpu")
    >>> device.backend, device.is_async
    ('gloo', False)
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from executor.kernels import Rule, rule_of
from executor.kinds import KINDS, DeviceKind
from executor.kinds.cpu import usable_cores
from plans.errors import TwofoldError

__all__ = ["Device", "Mark", "Recording", "environment", "now_ns", "num_accelerators", "pick_device"]

Mark = Any
"""A point on a device's own time line: nanoseconds on a CPU, a recorded event on an accelerator."""

now_ns = time.perf_counter_ns
"""The host's clock. On Linux it is CLOCK_MONOTONIC, which all processes of a host share."""


class Recording:
    """Work that was recorded and is launched as one; it owns the memory of its tensors until it is released."""

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
    def own(self) -> DeviceKind:
        """The implementation for its kind of device."""
        return KINDS[self.kind]

    @property
    def backend(self) -> str:
        """The name of the communication backend."""
        return self.own.backend

    def rule_of(self, call: str) -> Rule:
        """The kernel of a COMPUTE instruction's call: of its kind, or else of torch.

        Raises:
            TwofoldError: an unknown call.
        """
        return self.own.rules().get(call) or rule_of(call)

    @property
    def is_async(self) -> bool:
        """Whether work runs behind the host, on streams."""
        return self.kind != "cpu"

    @property
    def multiplies_float8(self) -> bool:
        """Whether it has products of float8 numbers."""
        return self.own.multiplies_float8(self.index)

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it, for `tensor.to(...)`."""
        return torch.device(self.kind, self.index) if self.is_async else torch.device("cpu")

    @property
    def name(self) -> str:
        """The product name of the device, for records."""
        return self.own.product(self.index)

    def use(self) -> None:
        """Make it this process's device; on a CPU share the cores evenly among the ranks of this host."""
        if self.is_async:
            self.own.prepare()
            torch.accelerator.set_device_index(self.index)
        else:
            ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            torch.set_num_threads(max(1, usable_cores() // ranks_here))

    def synchronize(self) -> None:
        """Wait until everything issued so far has run."""
        if self.is_async:
            torch.accelerator.synchronize()

    @property
    def has_streams(self) -> bool:
        """Whether several streams of work can run next to each other."""
        return self.is_async

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
        return bool(self.own.graph)

    def capture(self, run: Callable[[], object], pool: Any = None) -> Recording | None:
        """Record `run` as one launch whose replay has no host time between kernels; None if the device cannot record.

        `run` is recorded, not executed. The current stream must not be the default one. With the `pool` of another
        recording both use one memory. What other threads do meanwhile is not recorded.

        Raises torch's exception if `run` does something that cannot be recorded.
        """
        if not self.can_record:
            return None
        graph = getattr(self.own.module, self.own.graph)()
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
        """A mark for use inside `capture`: every replay sets it again.

        Raises:
            TwofoldError: this kind of device has none.
        """
        event = self.own.external_event()
        event.record()
        return event

    # -- feeding -------------------------------------------------------------------------------------------------------

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device can copy from asynchronously; pinned if there is a device."""
        return torch.empty(shape, dtype=dtype, pin_memory=self.is_async)

    def current_stream(self) -> torch.Stream | None:
        """The stream that work is issued on now, or None on a CPU."""
        return torch.accelerator.current_stream() if self.is_async else None

    def set_stream(self, stream: torch.Stream | None) -> None:
        """Make `stream` the current one; None changes nothing."""
        if stream is not None:
            torch.accelerator.set_stream(stream)

    @contextlib.contextmanager
    def on(self, stream: torch.Stream | None) -> Iterator[None]:
        """Make `stream` the current one inside the `with`; None changes nothing."""
        before = self.current_stream() if stream is not None else None
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

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
        """The current stream reads a tensor of another: its memory is not used again before that is done."""
        if self.is_async:
            tensor.record_stream(torch.accelerator.current_stream())

    def reached(self, mark: Mark) -> None:
        """Let the host wait until a mark or a point is reached."""
        if self.is_async and mark is not None:
            mark.synchronize()

    # -- what it is ----------------------------------------------------------------------------------------------------

    def spin(self, cycles: int) -> bool:
        """Keep the current stream busy for `cycles` cycles of its clock; False where that cannot be done."""
        return self.own.spin(cycles)

    def head_start(self) -> None:
        """Delay the current stream by the time that a kernel on another stream takes to begin."""
        self.own.spin(self.own.head_start_cycles)

    def memory_bytes(self) -> tuple[int, int]:
        """Bytes of free memory and of all memory: of the device, or of this host on a CPU."""
        return self.own.memory_bytes(self.index)

    def memory_reserved(self) -> int:
        """Bytes that torch's allocator took from the device; 0 on a CPU."""
        return torch.accelerator.memory_reserved(self.index) if self.is_async else 0

    def release_memory(self) -> None:
        """Release memory that the allocator holds but no tensor uses, and the workspaces of matrix products."""
        self.own.release_workspaces()
        if self.is_async:
            torch.accelerator.empty_cache()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the last-level cache; assumed 32 MiB on a CPU and 192 MiB where the driver does not report it."""
        return self.own.cache_bytes(self.index)

    @property
    def num_processors(self) -> int:
        """Multiprocessors (or cores of an NPU) that one kernel can fill; usable cores on a CPU."""
        return self.own.num_processors(self.index)

    def sensors(self) -> dict[str, float]:
        """temperature_C, power_W and clock_MHz, as far as the driver reports them."""
        return self.own.sensors(self.index)

    def limits(self) -> dict[str, str]:
        """The driver's version and limits (power_limit_W, max_clock_MHz, ..), if available."""
        return self.own.limits(self.index)


def pick_device(kind: str = "auto", local_rank: int | None = None) -> Device:
    """The device of this rank.

    Args:
        kind: "cpu", "cuda", "npu", or "auto" for an accelerator where there is one.
        local_rank: which of the host's accelerators; LOCAL_RANK by default.

    Raises:
        TwofoldError: an unknown kind, a device that is not there, more ranks on the host than accelerators.
    """
    if kind not in (*KINDS, "auto"):
        raise TwofoldError(f"device {kind!r} is not known; known: auto, {', '.join(KINDS)}")
    if kind == "cpu":
        return Device(kind="cpu")
    if kind != "auto":
        KINDS[kind].load(required=True)
    elif torch.accelerator.current_accelerator() is None:
        for device_kind in KINDS.values():
            device_kind.load(required=False)
    there = torch.accelerator.current_accelerator(check_available=True)
    if there is None and kind == "auto":
        return Device(kind="cpu")
    if there is None or there.type not in KINDS or kind not in ("auto", there.type):
        if there is None:
            raise TwofoldError(f"device {kind!r} is not available: no accelerator found on this host; use cpu")
        raise TwofoldError(
            f"device {kind!r} is not available: the accelerator of this host is {there.type}; use cpu or {there.type}"
        )
    index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    count = torch.accelerator.device_count()
    if index >= count:
        raise TwofoldError(f"local rank {index} has no {there.type} device: this host has {count}; start {count} ranks")
    return Device(kind=there.type, index=index)


def num_accelerators() -> int:
    """Number of accelerators of this host."""
    return torch.accelerator.device_count()


def environment(device: Device) -> dict[str, str]:
    """Versions and names that belong next to every measurement."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": str(np.__version__),
        "platform": platform.platform(),
        "cores": str(usable_cores()),
        "device": device.kind,
        "device_name": device.name,
        "backend": device.backend,
        **device.own.versions(),
    }
