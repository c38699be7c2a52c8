"""NVIDIA GPUs: ranks communicate over NCCL, and launches are recorded in CUDA graphs. Run on H100 and H200.

Kernels are those of torch, called by `executor.kernels`, and a few written in Triton (`kernels.chips`).
"""

from __future__ import annotations

import contextlib
import subprocess
from typing import Any

import torch

from executor.kinds.kind import DeviceKind

__all__ = ["Cuda"]


class Cuda(DeviceKind):
    """A GPU with CUDA."""

    name = "cuda"
    backend = "nccl"
    graph = "CUDAGraph"
    head_start_cycles = (
        6000  # 3 us; on H200 2000 are too few, more change nothing: benchmarks.devices.hidden_reductions
    )

    def prepare(self) -> None:
        """Compute in the dtypes of the plan: torch would round the operands of float32 convolutions to TF32."""
        torch.backends.cudnn.allow_tf32 = False

    def versions(self) -> dict[str, str]:
        """Version of NCCL."""
        return {"nccl": ".".join(str(part) for part in self.module.nccl.version())}

    def multiplies_float8(self, index: int) -> bool:
        """From compute capability 8.9 on."""
        return bool(self.module.get_device_capability(index) >= (8, 9))

    def sensors(self, index: int) -> dict[str, float]:
        """temperature_C, power_W and clock_MHz, as far as NVML reports them."""
        module = self.module
        readings = {
            "temperature_C": (module.temperature, 1.0),
            "power_W": (module.power_draw, 1e-3),
            "clock_MHz": (module.clock_rate, 1.0),
        }
        found = {}
        for name, (read, scale) in readings.items():
            with contextlib.suppress(Exception):  # no NVML on this host, or a driver that does not tell
                found[name] = float(read(index)) * scale
        return found

    def limits(self, index: int) -> dict[str, str]:
        """The driver's version, power_limit_W, max_clock_MHz and so on; empty where `nvidia-smi` does not tell."""
        asked = {
            "driver": "driver_version", "power_limit_W": "power.limit", "max_clock_MHz": "clocks.max.sm",
            "memory_clock_MHz": "clocks.max.memory", "persistence": "persistence_mode", "ecc": "ecc.mode.current",
        }  # fmt: skip
        command = ["nvidia-smi", f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            process = subprocess.run([*command, "-i", str(index)], capture_output=True, text=True, timeout=20)
            if process.returncode == 0:
                return dict(zip(asked, map(str.strip, process.stdout.strip().split(",")), strict=False))
        return {}

    def spin(self, cycles: int) -> bool:
        """Keep the current stream busy, where torch has a kernel for it."""
        sleep = getattr(self.module, "_sleep", None)
        if sleep is None:
            return False
        sleep(cycles)
        return True

    def external_event(self) -> Any:
        """An external event of CUDA."""
        return self.module.Event(enable_timing=True, external=True)

    def release_workspaces(self) -> None:
        """Free the workspaces of matrix products."""
        torch._C._cuda_clearCublasWorkspaces()
