"""Input buffers of a rank at fixed addresses, filled while the device still works on the step before.

A batch goes from the data to pinned memory of the host, from there on a separate stream to the device, and at the
start of its step into the buffers that the step reads. Two pinned buffers take turns, so that the host may write one
while the device still copies the other. On a CPU there is one copy, into the buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.device import Device

__all__ = ["Feeds"]


@dataclass(slots=True, eq=False)
class _Input:
    """The buffers of one input: two of the host, one that is copied to, and the one that steps read."""

    pinned: tuple[Tensor, Tensor]
    arriving: Tensor
    read: Tensor


class Feeds:
    """Brings batches to the device.

    Args:
        device: where steps read them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.stream()
        self._inputs: dict[str, _Input] = {}
        self._copied: list[Any] = [None, None]  # when a pinned buffer may be written again
        self._taken: Any = None  # when what arrived last was taken by its step
        self._turn = 0

    def fill(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy a batch into the buffers that steps read; the current stream waits for it, the host does not.

        Args:
            batch: name of an input -> tensor with the rows of all micro-batches; of one shape in all steps.

        Returns:
            name -> buffer on the device, the same in all steps.
        """
        device = self._device
        for name, rows in batch.items():
            if name not in self._inputs or self._inputs[name].read.shape != rows.shape:
                self._inputs[name] = self._made(rows)
        used = {name: self._inputs[name] for name in batch}
        if self._stream is None:
            for name, each in used.items():
                each.read.copy_(batch[name])
            return {name: each.read for name, each in used.items()}
        self._turn = 1 - self._turn
        device.reached(self._copied[self._turn])
        from_host = {name: each for name, each in used.items() if batch[name].device.type == "cpu"}
        for name, each in from_host.items():
            each.pinned[self._turn].copy_(batch[name])
        with device.on(self._stream):
            device.wait_for(self._taken)
            for each in from_host.values():
                each.arriving.copy_(each.pinned[self._turn], non_blocking=True)
            arrived = self._copied[self._turn] = device.point()
        device.wait_for(arrived)
        for name, each in used.items():
            if name not in from_host:
                device.reads(batch[name])
            each.read.copy_(each.arriving if name in from_host else batch[name])
        self._taken = device.point()
        return {name: each.read for name, each in used.items()}

    def _made(self, rows: Tensor) -> _Input:
        shape, device = tuple(rows.shape), self._device
        read = torch.empty(shape, dtype=rows.dtype, device=device.torch_device)
        if self._stream is None:
            return _Input(pinned=(read, read), arriving=read, read=read)
        device.synchronize()  # nobody still copies into what these buffers replace
        pinned = device.host_buffer(shape, rows.dtype), device.host_buffer(shape, rows.dtype)
        return _Input(pinned=pinned, arriving=torch.empty_like(read), read=read)
