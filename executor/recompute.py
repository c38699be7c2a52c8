"""Recompute: modules whose outputs are freed after the forward and computed again in the backward.

`recompute(net.relu1)` is MindSpore's `net.relu1.recompute()`; torch modules get no new methods.
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from executor.stages import covers
from plans.errors import TwofoldError
from plans.model.graph import Graph

__all__ = ["marked_operators", "recompute"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MARK = "_twofold_recompute"


def recompute(module: ModuleT) -> ModuleT:
    """Mark a module: everything in it is computed again in the backward. Returns the module.

    Whether that saves memory is for the simulator to say: the output of a lone relu is what the next linear keeps
    anyway, so marking relus alone saves nothing.

    >>> marked = recompute(nn.ReLU())
    """
    if not isinstance(module, nn.Module):
        raise TwofoldError(f"recompute marks a torch.nn.Module, not {module!r}")
    setattr(module, _MARK, True)
    return module


def marked_operators(graph: Graph, module: nn.Module) -> tuple[str, ...]:
    """The operators of `graph`, captured from `module`, inside marked modules; never the loss itself.

    >>> from executor.capture.capture import capture
    >>> from executor.train.losscell import MAELoss, WithLossCell
    >>> net = nn.Sequential(nn.Linear(4, 4), recompute(nn.ReLU()), nn.Linear(4, 1))
    >>> cell = WithLossCell(net, MAELoss())
    >>> marked_operators(capture(cell, ((8, 4), (8, 1))), cell)
    ('_backbone.1.relu',)
    """
    marked = [path for path, part in module.named_modules(remove_duplicate=False) if getattr(part, _MARK, False)]
    return tuple(
        operator.name
        for operator in graph.operators
        if graph.loss not in operator.outputs and any(covers(path, operator.module) for path in marked)
    )
