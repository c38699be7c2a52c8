"""The interface of a kind of device; the defaults are those of an unknown accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from executor.kernels import Rule
from plans.errors import TwofoldError

__all__ = ["DeviceKind"]


class DeviceKind:
    """A kind of device. Methods that take an `index` are about one device of this host.

    Attributes:
        name: as torch names it, for example "cuda".
        backend: the communication backend.
        graph: the class of torch's device module that records launches, with the methods of `torch.cuda.CUDAGraph`; ""
            for none.
        can_assert: whether a kernel of the device can end the run (`torch._assert_async`).
        head_start_cycles: cycles by which compute is delayed so that communication on another stream begins first; 0
            for none.
    """

    name: ClassVar[str]
    backend: ClassVar[str]
    graph: ClassVar[str] = ""
    can_assert: ClassVar[bool] = True
    head_start_cycles: ClassVar[int] = 0

    def load(self, *, required: bool) -> None:
        """Import the module that registers the device with torch.

        Args:
            required: the user asked for this kind; otherwise missing devices are left out.

        Raises:
            TwofoldError: it is required and cannot be imported.
        """

    def prepare(self) -> None:
        """Set up a process before it uses such a device."""

    def rules(self) -> Mapping[str, Rule]:
        """Call of a COMPUTE instruction -> kernel of this kind of device, instead of that of `executor.kernels`."""
        return {}

    def versions(self) -> dict[str, str]:
        """Versions of its libraries, for records."""
        return {}

    @property
    def module(self) -> Any:
        """torch's module of the device, such as `torch.cuda`."""
        return torch.get_device_module(self.name)

    def multiplies_float8(self, index: int) -> bool:
        """Whether `torch._scaled_mm` multiplies float8 numbers on it."""
        return False

    # -- what a device is ----------------------------------------------------------------------------------------------

    def product(self, index: int) -> str:
        """The product name."""
        return str(self.module.get_device_name(index))

    def memory_bytes(self, index: int) -> tuple[int, int]:
        """Bytes of free memory and of all memory."""
        free, total = self.module.mem_get_info(index)
        return int(free), int(total)

    def cache_bytes(self, index: int) -> int:
        """Bytes of the last-level cache; assumed 192 MiB where the driver does not report it."""
        return int(getattr(self.module.get_device_properties(index), "L2_cache_size", 0) or 192 * 2**20)

    def num_processors(self, index: int) -> int:
        """Processors that one kernel can fill."""
        return int(getattr(self.module.get_device_properties(index), "multi_processor_count", 0) or 1)

    def sensors(self, index: int) -> dict[str, float]:
        """temperature_C, power_W and clock_MHz, as far as the driver reports them."""
        return {}

    def limits(self, index: int) -> dict[str, str]:
        """The driver's version and limits, if available."""
        return {}

    # -- what it can do ------------------------------------------------------------------------------------------------

    def spin(self, cycles: int) -> bool:
        """Keep the current stream busy for `cycles` cycles; False where that cannot be done."""
        return False

    def external_event(self) -> Any:
        """An event that every replay of a recording sets again.

        Raises:
            TwofoldError: this kind has none.
        """
        raise TwofoldError(f"a recording on {self.name} cannot contain timing events")

    def release_workspaces(self) -> None:
        """Free memory that libraries hold outside torch's allocator."""
