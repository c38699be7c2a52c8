"""The kinds of devices, one file each: the parts that differ between them.

`KINDS` maps the name of a kind to its implementation. To add a kind, add a file with a subclass of `DeviceKind` and a
line here. All other code uses an `executor.device.Device`.

    >>> KINDS["npu"].backend
    'hccl'
"""

from collections.abc import Mapping

from executor.kinds.cpu import Cpu
from executor.kinds.cuda import Cuda
from executor.kinds.kind import DeviceKind
from executor.kinds.npu import Npu

__all__ = ["KINDS", "DeviceKind"]

KINDS: Mapping[str, DeviceKind] = {"cpu": Cpu(), "cuda": Cuda(), "npu": Npu()}
