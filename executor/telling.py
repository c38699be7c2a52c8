"""Rank 0 tells the other ranks something as bytes (a plan, say), without pickle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from executor.device import Device

__all__ = ["told_by_rank_0"]


def told_by_rank_0(make: Callable[[], bytes], device: Device) -> bytes:
    """What `make` returns on rank 0, on every rank of the default process group.

    An error of `make` is raised on rank 0; the other ranks leave with exit code 1, so that the one error is the cause.
    """
    told, failure = b"", None
    if dist.get_rank() == 0:
        try:
            told = make()
        except Exception as error:
            failure = error
    length = torch.tensor([-1 if failure else len(told)], dtype=torch.int64, device=device.torch_device)
    dist.broadcast(length, 0)
    if failure is not None:
        raise failure
    if int(length) < 0:
        raise SystemExit(1)  # rank 0 says why
    data = torch.zeros(int(length), dtype=torch.uint8, device=device.torch_device)
    if told:
        data.copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
    dist.broadcast(data, 0)
    return data.cpu().numpy().tobytes()
