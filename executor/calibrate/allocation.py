"""How torch's allocator rounds and keeps memory, and the memory outside of it: context, workspaces, communicators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from costmodels.fit.points import Point
from executor.calibrate.rank_sync import RankSync
from executor.device import Device

__all__ = ["allocation_points", "communicator_points"]

_KIB, _MIB = 2**10, 2**20
_SIZES = (
    1, 512, 513, 4 * _KIB, 100_000, _MIB - 512, _MIB, _MIB + 512, 2 * _MIB, 10 * _MIB - 512, 10 * _MIB, 19 * _MIB,
    20 * _MIB, 21 * _MIB, 33 * _MIB, 100 * _MIB + 1, 1024 * _MIB,
)  # fmt: skip


def allocation_points(device: Device) -> Iterator[Point]:
    """One allocation of each size after everything was returned; a pattern like a training step; workspaces."""
    if not device.is_async:
        return  # torch does not count memory on a CPU
    free, total = device.memory_bytes()
    yield _point("context", 0, 0, 0, total - free - device.memory_reserved())
    for size in _SIZES:
        if size > device.memory_bytes()[0] // 4:
            continue
        device.release_memory()
        allocated, reserved = device.memory_allocated(), device.memory_reserved()
        tensor = torch.empty(size, dtype=torch.uint8, device=device.torch_device)
        yield _point("rounding", size, device.memory_allocated() - allocated, device.memory_reserved() - reserved)
        del tensor
    yield from _pattern(device)
    yield from _workspaces(device)


def _pattern(device: Device) -> Iterator[Point]:
    """Activations of 8 blocks kept while temporaries of other sizes come and go, freed in the opposite order."""
    device.release_memory()
    allocated, reserved = device.memory_allocated(), device.memory_reserved()
    device.reset_peak_memory()
    place, kept = device.torch_device, []
    for _ in range(2):
        for block in range(8):
            sizes = [mebibytes * _MIB + 512 * block for mebibytes in (16, 16, 43, 43, 16)]
            kept += [torch.empty(size, dtype=torch.uint8, device=place) for size in sizes]
            torch.empty(86 * _MIB, dtype=torch.uint8, device=place)
        while kept:
            kept.pop()
            torch.empty(22 * _MIB, dtype=torch.uint8, device=place)
    peak = device.max_memory_allocated() - allocated
    yield _point("pattern", peak, peak, device.memory_reserved() - reserved)
    device.release_memory()


def _workspaces(device: Device) -> Iterator[Point]:
    """The memory that a first matrix product on a fresh stream keeps."""
    device.release_memory()
    stream = device.stream()
    assert stream is not None
    free = device.memory_bytes()[0]
    allocated, reserved = device.memory_allocated(), device.memory_reserved()
    with stream:
        a = torch.zeros(256, 256, device=device.torch_device, dtype=torch.bfloat16)
        b = torch.mm(a, a)
    device.synchronize()
    operand_bytes = a.nbytes + b.nbytes
    grown = device.memory_reserved() - reserved
    outside = free - device.memory_bytes()[0] - grown
    yield _point("workspace", operand_bytes, device.memory_allocated() - allocated - operand_bytes, grown, outside)


def communicator_points(device: Device, sync: RankSync) -> Iterator[Point]:
    """Memory outside the allocator that a communicator takes: a new group's first collective, then first transfer."""
    if not device.is_async or sync.size == 1:
        return
    for size in (2, sync.size):
        groups = [dist.new_group(list(range(i, i + size))) for i in range(0, sync.size, size)]
        group = groups[sync.rank // size]
        token = torch.zeros(2**20, device=device.torch_device)
        for call in ("all_reduce", "transfer"):
            device.synchronize()
            sync.barrier()
            free, reserved = device.memory_bytes()[0], device.memory_reserved()
            if call == "all_reduce":
                dist.all_reduce(token, group=group)
            elif sync.rank < 2:
                work: Any = (dist.isend if sync.rank == 0 else dist.irecv)(token, 1 - sync.rank, group=group)
                work.wait()
            device.synchronize()
            sync.barrier()
            grown = device.memory_reserved() - reserved
            outside = free - device.memory_bytes()[0] - grown
            yield _point("communicator", token.nbytes, 0, grown, outside, ranks=size, options={"call": call})
        dist.destroy_process_group(group)


def _point(call: str, size_bytes: int, allocated: int, reserved: int, outside: int = 0, **more: Any) -> Point:
    figures = {"allocated_bytes": float(allocated), "reserved_bytes": float(reserved), "outside_bytes": float(outside)}
    return Point(
        kind="allocation", call=call, size_bytes=size_bytes, dtype="uint8", figures=figures, seconds=0.0, **more
    )
