"""Properties of the values of a module's buffers: masks, whole numbers, tables with equal halves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from executor.weights.initial import initial_parameter
from plans.errors import TwofoldError
from plans.model.graph import Graph

__all__ = ["MOST_ELEMENTS", "doubled_tables", "known_masks", "known_numbers"]

MOST_ELEMENTS = 2**26
"""Larger buffers are not looked at."""


def doubled_tables(module: nn.Module, graph: Graph) -> frozenset[str]:
    """The constants [length, features] whose rows have two equal halves, as far as their values are known."""
    found, buffers = set(), {name for name, _ in module.named_buffers()}
    for tensor in graph.constants:
        if tensor.name not in buffers or len(tensor.shape) != 2 or tensor.shape[1] % 2 or not tensor.differentiable:
            continue
        value = _known_value(module, tensor.name)
        if value is not None and torch.equal(*value.chunk(2, -1)):
            found.add(tensor.name)
    return frozenset(found)


def known_masks(module: nn.Module) -> dict[str, Tensor]:
    """The values of buffers that could be masks [.., length, length], as far as they are known."""
    found = {}
    for name, buffer in module.named_buffers():
        if buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2]:
            value = _known_value(module, name)
            if value is not None:
                found[name] = value
    return found


def known_numbers(module: nn.Module) -> dict[str, Tensor]:
    """The values of buffers of whole numbers, such as positions, and of single numbers that no state dict holds, as far
    as they are known."""
    saved = module.state_dict(keep_vars=True).keys()
    values = {
        name: _known_value(module, name)
        for name, buffer in module.named_buffers()
        if (buffer.dtype == torch.int64 if buffer.dim() else buffer.is_floating_point() and name not in saved)
    }
    return {name: value for name, value in values.items() if value is not None}


def _known_value(module: nn.Module, name: str) -> Tensor | None:
    """The value of a buffer, if it has one or `no_init_parameters` recorded its initialisation."""
    if module.get_buffer(name).numel() > MOST_ELEMENTS:
        return None
    try:
        return initial_parameter(module, name)
    except TwofoldError:
        return None
