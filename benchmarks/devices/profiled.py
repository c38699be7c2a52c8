"""The kernels that a device ran, as torch's profiler saw them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from executor.device import Device

__all__ = ["Kernel", "kernels_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel: its name, stream and grid, the seconds at which it began on the profiler's clock, and its length."""

    name: str
    stream: int
    grid: tuple[int, ...]
    start_s: float
    seconds: float

    @property
    def communicates(self) -> bool:
        """Whether it is one of NCCL's."""
        return "nccl" in self.name.lower()


def kernels_of(device: Device, run: Callable[[], object]) -> list[Kernel]:
    """The kernels of `run`, in the order in which they began."""
    device.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        device.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    kernels = [
        Kernel(
            name=event["name"], stream=int(event["args"].get("stream", 0)), grid=tuple(event["args"].get("grid", ())),
            start_s=event["ts"] / 1e6, seconds=event["dur"] / 1e6,
        )
        for event in events
        if event.get("cat") == "kernel"
    ]  # fmt: skip
    return sorted(kernels, key=lambda kernel: kernel.start_s)
