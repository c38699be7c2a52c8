"""Checks that all ranks start from the same initial values and data if each rank created these itself.

Values of a module built inside `no_init_parameters` depend only on the seed and the tensor's name. Values that a script
or a model function draws itself may differ between processes. Without a common seed, the ranks' parts would belong to
different tensors, and only the loss would show it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.device import Device
from plans.errors import TwofoldError

__all__ = ["check_same_batch", "check_same_start"]


def check_same_start(module: nn.Module, device: Device) -> None:
    """Compare the values that `module` holds on all ranks of the default process group; every rank must call it.

    Tensors on the meta device are skipped: they hold no values yet. The others are hashed, which takes about a second
    per GB.

    Raises:
        TwofoldError: ranks hold different values, or different tensors; every rank raises the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    names = [name for name, tensor in named if not tensor.is_meta]
    mine = [_digest("\0".join(names).encode()), *(_of_tensor(tensor) for _, tensor in named if not tensor.is_meta)]
    lengths = _gathered([len(mine), mine[0]], device)
    if len({tuple(length) for length in lengths}) > 1:
        odd = next(rank for rank, length in enumerate(lengths) if length != lengths[0])
        raise TwofoldError(
            f"{type(module).__name__} holds values of other tensors on rank {odd} than on rank 0; all ranks must build "
            f"the same module"
        )
    found = _gathered(mine, device)
    for at, name in enumerate(names, start=1):
        odd_ranks = [rank for rank, each in enumerate(found) if each[at] != found[0][at]]
        if odd_ranks:
            raise TwofoldError(
                f"{name!r} of {type(module).__name__} has other initial values on rank {odd_ranks[0]} than on rank 0: "
                f"call set_seed(...) before the network is built, or build it inside of no_init_parameters()"
            )


def check_same_batch(batch: Mapping[str, Any], device: Device) -> None:
    """Compare a batch of all ranks of the default process group; every rank must call it.

    Raises:
        TwofoldError: ranks got different batches; every rank raises the same.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    found = _gathered([_of_tensor(torch.as_tensor(array)) for array in batch.values()], device)
    for at, name in enumerate(batch):
        odd_ranks = [rank for rank, each in enumerate(found) if each[at] != found[0][at]]
        if odd_ranks:
            raise TwofoldError(
                f"input {name!r}: the data give rank {odd_ranks[0]} another first batch than rank 0; every rank calls "
                "the function of the data, so seed its generator"
            )


def _gathered(numbers: list[int], device: Device) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=device.torch_device)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [tensor.tolist() for tensor in found]


def _of_tensor(tensor: torch.Tensor) -> int:
    plain = tensor.detach().to("cpu").contiguous().reshape(-1)
    return _digest(plain.view(torch.uint8).numpy().data if plain.numel() else b"")


def _digest(data: bytes | memoryview) -> int:
    """63 bits of a hash."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
