"""Broadcasts bytes, such as a plan, from rank 0 to all ranks, without pickle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from executor.device import Device
from plans.errors import TwofoldError

__all__ = ["broadcast_from_rank_0"]


def broadcast_from_rank_0(make: Callable[[], bytes], device: Device) -> bytes:
    """Call `make` on rank 0 and return its result on every rank of the default process group.

    Raises:
        TwofoldError: `make` refused its input; every rank raises it with the same text. Any other exception of `make`
            is raised on rank 0 only, and ends the job there while the other ranks wait.
    """
    message, failure = b"", None
    if dist.get_rank() == 0:
        try:
            message = b"+" + make()
        except TwofoldError as error:
            message, failure = b"-" + str(error).encode(), error
    length = torch.tensor([len(message)], dtype=torch.int64, device=device.torch_device)
    dist.broadcast(length, 0)
    data = torch.zeros(int(length), dtype=torch.uint8, device=device.torch_device)
    if message:
        data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(data, 0)
    if failure is not None:
        raise failure
    text = data.cpu().numpy().tobytes()
    if text[:1] == b"-":
        raise TwofoldError(text[1:].decode())
    return text[1:]
