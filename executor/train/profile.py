"""A trace of some steps by torch's profiler, one file per rank."""

from __future__ import annotations

import os

import torch.profiler

from executor.device import Device

__all__ = ["Profile"]


class Profile:
    """torch's profiler, from `start` to `stop`.

    Args:
        path: path of the trace (Chrome's JSON, which Perfetto opens).
        device: whose kernels it sees too.
    """

    def __init__(self, path: str | os.PathLike[str], device: Device) -> None:
        self._path, self._device = os.fspath(path), device
        self._profiler: torch.profiler.profile | None = None

    def start(self) -> None:
        """Begin with an idle device."""
        self._device.synchronize()
        self._profiler = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self._profiler.start()

    def stop(self) -> None:
        """Wait for the device and write the trace; nothing where it was not started."""
        if self._profiler is not None:
            self._device.synchronize()
            self._profiler.stop()
            self._profiler.export_chrome_trace(self._path)
            self._profiler = None
