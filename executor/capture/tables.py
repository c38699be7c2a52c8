"""What the values of a module's buffers say that its calls do not: tables of which one half is enough."""

from __future__ import annotations

import torch
from torch import nn

from executor.train.initial import initial_parameter
from plans.errors import TwofoldError
from plans.model.graph import Graph

__all__ = ["doubled_tables"]

_MOST_ELEMENTS = 2**26


def doubled_tables(module: nn.Module, graph: Graph) -> frozenset[str]:
    """The constants [length, features] whose rows have two equal halves, as far as their values are known.

    They are known of buffers that hold values, and of those that `no_init_parameters` recorded.
    """
    found, buffers = set(), {name for name, _ in module.named_buffers()}
    for tensor in graph.constants:
        if tensor.name not in buffers or len(tensor.shape) != 2 or tensor.shape[1] % 2 or not tensor.differentiable:
            continue
        if tensor.num_elements > _MOST_ELEMENTS:
            continue
        try:
            value = initial_parameter(module, tensor.name)
        except TwofoldError:  # without a value, and nothing says how it is made
            continue
        first, second = value.chunk(2, -1)
        if torch.equal(first, second):
            found.add(tensor.name)
    return frozenset(found)
