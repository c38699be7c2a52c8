"""Copies trained weights back into the module that they belong to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from executor.device import Device
from executor.weights.initial import initial_parameter

__all__ = ["take_back"]


@torch.no_grad()
def take_back(module: nn.Module, weights: Mapping[str, Any] | None, device: Device) -> None:
    """Give a module its trained weights, on every rank of the default process group; every rank must call it.

    Tensors without data are replaced by ones on the CPU; those that were not trained get their initial values.
    Parameters keep their dtypes: of weights in half precision the rounded masters.

    Args:
        module: as the plan was made for.
        weights: name -> full array, on rank 0; the others have None.
        device: for the communication.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> take_back(layer, {"weight": torch.ones(1, 2).numpy()}, Device(kind="cpu"))
    >>> layer.weight.tolist()
    [[1.0, 1.0]]
    """
    shared = dist.is_initialized() and dist.get_world_size() > 1
    names: list[Any] = [None if weights is None else sorted(weights)]
    if shared:
        dist.broadcast_object_list(names, 0, device=device.torch_device)
    _give_memory(module, names[0])
    held = dict([*module.named_parameters(), *module.named_buffers()])
    for name in names[0]:
        whole = held[name]
        sent = torch.as_tensor(weights[name]) if weights is not None else torch.empty(whole.shape)
        sent = sent.to(device.torch_device, whole.dtype)
        if shared:
            dist.broadcast(sent, 0)
        whole.copy_(sent)


def _give_memory(module: nn.Module, trained: Collection[str]) -> None:
    """Replace tensors without data; tied ones stay tied.

    Objects that a capture has seen cannot be swapped (`torch.utils.swap_tensors`): it keeps weak references to them.
    """
    made: dict[int, torch.Tensor] = {}
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if tensor.is_meta:
            value = (
                torch.empty(tensor.shape, dtype=tensor.dtype) if name in trained else initial_parameter(module, name)
            )
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            for leaf, found in held.items():
                if id(found) in made:
                    held[leaf] = made[id(found)]  # type: ignore[assignment]
