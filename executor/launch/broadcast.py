"""Rank 0 tells the other ranks something as bytes (a plan, say), without pickle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from executor.device import Device
from plans.errors import TwofoldError

__all__ = ["told_by_rank_0"]


def told_by_rank_0(make: Callable[[], bytes], device: Device) -> bytes:
    """What `make` returns on rank 0, on every rank of the default process group.

    Bad input that `make` refuses (TwofoldError) is raised on every rank, with the same words. Another error of rank 0
    is raised there only; the other ranks wait for it to end the job.
    """
    told, failure = b"", None
    if dist.get_rank() == 0:
        try:
            told = b"+" + make()
        except TwofoldError as error:
            told, failure = b"-" + str(error).encode(), error
    length = torch.tensor([len(told)], dtype=torch.int64, device=device.torch_device)
    dist.broadcast(length, 0)
    data = torch.zeros(int(length), dtype=torch.uint8, device=device.torch_device)
    if told:
        data.copy_(torch.frombuffer(bytearray(told), dtype=torch.uint8))
    dist.broadcast(data, 0)
    if failure is not None:
        raise failure
    text = data.cpu().numpy().tobytes()
    if text[:1] == b"-":
        raise TwofoldError(text[1:].decode())
    return text[1:]
