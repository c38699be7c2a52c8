"""The values of a rank before the first step: its parts of weights, master weights and constants, and zero states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.device import Device
from executor.kernels.context import torch_dtype
from executor.kernels.movement import flat_part
from executor.kernels.step_check import initial_held
from plans.errors import TwofoldError
from plans.layout import TensorLayout
from plans.program import GroupProgram

__all__ = ["initial_values"]


def initial_values(
    group: GroupProgram, rank: int, device: Device, whole: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Names of kept values with their tensors, one after the other.

    Args:
        group: group of the rank.
        rank: this one.
        device: where the tensors live.
        whole: name of a parameter or constant -> array of its full shape; only values that the rank keeps are looked
            up.

    Raises:
        TwofoldError: a parameter that is missing or has another shape.
    """
    where = device.torch_device

    def part(name: str, layout: TensorLayout, shape: tuple[int, ...], value: str, missing: str) -> Tensor:
        if name not in whole:
            raise TwofoldError(missing)
        array = whole[name]
        if tuple(array.shape) != tuple(shape):
            raise TwofoldError(f"the initial value of {name!r} has the shape {tuple(array.shape)}, the plan {shape}")
        region = tuple(slice(*ends) for ends in layout.region(rank, shape))
        return torch.as_tensor(np.array(array[region])).to(where, torch_dtype(group.values[value].dtype))

    for parameter in group.parameters:
        missing = f"no initial value is given for the parameter {parameter.name!r}"
        own = part(parameter.name, parameter.layout, parameter.shape, parameter.kept, missing)
        if parameter.shard is not None:
            own = flat_part(
                own, group.values[parameter.kept].shape[0], parameter.layout.mesh.index(rank, parameter.shard_axes)
            )
        yield parameter.kept, own
        if parameter.master is not None:
            yield parameter.weight, own.to(torch_dtype(group.values[parameter.weight].dtype))
        for name in parameter.states:
            state = group.values[name]
            yield name, torch.zeros(state.shape, dtype=torch_dtype(state.dtype), device=where)
    if (kept := group.step_check) is not None:
        yield kept.held, initial_held(kept.check, where)
        if kept.norms is not None:
            yield kept.norms, torch.full(group.values[kept.norms].shape, torch.nan, device=where)
    for constant in group.constants:
        missing = f"no value is given for {constant.name!r}, a buffer or frozen parameter; run the plan with its model"
        yield constant.value, part(constant.name, constant.layout, constant.shape, constant.value, missing)
