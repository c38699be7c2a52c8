"""Strategies on modules: `shard(net.layer1, ...)` sets the split of one operator in semi-automatic mode."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from executor.fitting import check_fit
from executor.stages import covers
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.plan import Strategy
from plans.user_strategy import GivenStrategy, given_strategy

__all__ = ["given_strategies", "shard", "sharded_modules"]

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MARK = "_twofold_strategy"


def shard(op_or_module: ModuleT, in_strategy: object, out_strategy: object = None) -> ModuleT:
    """Set the strategy of a module's operator. Returns the module.

    `AutoParallel(net, parallel_mode="semi_auto")` keeps these strategies, and the search chooses the others.

    Args:
        op_or_module: a module that is one operator, such as nn.Linear, nn.ReLU, or an operator of `twofold.ops`.
        in_strategy: one entry per operand: a tuple with the number of parts per dim, or a layout. A linear layer has
            the operands x [.., k], weight [n, k] and bias [n]; operands that are left out follow. All entries have the
            same form, and layouts the same mesh.
        out_strategy: the layout of the output, as one entry in the same form. A matrix product whose contracted dim is
            split can all-reduce its output, or reduce-scatter it over the rows.

    Raises:
        TwofoldError: not a module, an invalid form (see `plans.user_strategy`), a wrong number of dims, parts that do
            not divide a parameter, or an output layout that the operator does not support. The shapes of inputs are
            checked when the network is planned.

    >>> layer = shard(nn.Linear(8, 8), ((4, 1), (2, 1)))
    """
    if not isinstance(op_or_module, nn.Module):
        raise TwofoldError(
            f"shard takes a torch.nn.Module or an operator of twofold.ops such as MatMul(), not {op_or_module!r}"
        )
    given = given_strategy(in_strategy, out_strategy)
    check_fit(op_or_module, given)
    setattr(op_or_module, _MARK, given)
    return op_or_module


def sharded_modules(module: nn.Module) -> dict[str, GivenStrategy]:
    """module path -> the strategy given to `shard`."""
    return {
        path: getattr(part, _MARK)
        for path, part in module.named_modules(remove_duplicate=False)
        if hasattr(part, _MARK)
    }


def given_strategies(graph: Graph, module: nn.Module, num_ranks: int) -> dict[str, Strategy]:
    """operator -> strategy, for the operators of `graph`, captured from `module`, inside sharded modules.

    Args:
        graph: graph of what is computed at a time (a micro-batch, or a slice of one).
        module: whose parts are marked.
        num_ranks: number of ranks of a pipeline stage.

    Raises:
        TwofoldError: a module with several operators or none, or a strategy that does not fit its operator.

    >>> from executor.capture.capture import capture
    >>> from executor.train.losscell import MAELoss, WithLossCell
    >>> net = nn.Sequential(nn.Linear(4, 4), shard(nn.ReLU(), ((2, 2),)), nn.Linear(4, 1))
    >>> cell = WithLossCell(net, MAELoss())
    >>> list(given_strategies(capture(cell, ((8, 4), (8, 1))), cell, 4))
    ['_backbone.1.relu']
    """
    found: dict[str, Strategy] = {}
    for path, given in sharded_modules(module).items():
        inside = [operator for operator in graph.operators if covers(path, operator.module)]
        what = f"{type(module.get_submodule(path)).__name__} {path!r}, sharded as {given},"
        if len({(operator.kind, operator.module) for operator in inside}) > 1:
            names = ", ".join(f"{operator.name} ({operator.kind})" for operator in inside)
            raise TwofoldError(f"{what} has several operators: {names}; shard the modules of single operators")
        if not inside:
            names = ", ".join(dict.fromkeys(operator.module for operator in graph.operators if operator.module))
            raise TwofoldError(f"{what} has no operator in the graph; modules with operators are {names}")
        found |= {operator.name: given.strategy(operator, graph, num_ranks) for operator in inside}
    return found
