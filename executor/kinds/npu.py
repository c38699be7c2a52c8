"""Ascend NPUs: ranks communicate over HCCL, and launches are recorded in NPU graphs. **Not run on Ascend.**

torch-npu registers the device; its fused kernels are in `executor.kernels.npu`. docs/ascend.md describes how both were
checked without a device, and the commands to run them on one.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping

from executor.kernels import Rule
from executor.kinds.kind import DeviceKind
from plans.errors import TwofoldError

__all__ = ["Npu"]


class Npu(DeviceKind):
    """An Ascend NPU."""

    name = "npu"
    backend = "hccl"
    graph = "NPUGraph"
    can_assert = False  # torch-npu would ask the host

    def load(self, *, required: bool) -> None:
        """Import torch-npu, which registers the device."""
        if importlib.util.find_spec("torch_npu") is None:
            if required:
                raise TwofoldError(
                    "device 'npu' needs torch-npu in the version of your torch: pip install twofold[npu]"
                )
            return
        try:
            importlib.import_module("torch_npu")
        except ImportError as error:
            if required:
                raise TwofoldError(
                    f"torch-npu does not load ({error}); is the Ascend toolkit (CANN) installed?"
                ) from None

    def prepare(self) -> None:
        """Keep tensors in the order of their dims: its own layouts would change views of buffers."""
        importlib.import_module("torch_npu").npu.config.allow_internal_format = False

    def rules(self) -> Mapping[str, Rule]:
        """The fused kernels of torch-npu, which must be loaded."""
        from executor.kernels.npu import NPU_RULES

        return NPU_RULES

    def versions(self) -> dict[str, str]:
        """Version of torch-npu."""
        return {"torch_npu": str(importlib.import_module("torch_npu").__version__)}

    def num_processors(self, index: int) -> int:
        """The number of Cube cores, which compute matrix products."""
        return int(getattr(self.module.get_device_properties(index), "cube_core_num", 0) or 1)
