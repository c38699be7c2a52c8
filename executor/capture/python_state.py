"""Numbers that a forward counts in Python attributes (`self.steps += 1`): a plan keeps their values of the capture."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping

from torch import fx, nn

from plans.errors import TwofoldError

__all__ = ["Numbers", "check_numbers", "numbers_of", "set_numbers"]

Numbers = Mapping[tuple[str, str], int | float]
"""(path of a submodule, its attribute) -> value."""


def numbers_of(module: nn.Module) -> Numbers:
    """The numbers among the attributes of a module and its submodules."""
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def set_numbers(module: nn.Module, numbers: Numbers) -> None:
    """Set attributes of a module and its submodules."""
    for (path, name), value in numbers.items():
        setattr(module.get_submodule(path), name, value)


def check_numbers(module: nn.Module, counted: Numbers, graph: fx.Graph, later: Callable[[], fx.Graph]) -> None:
    """Refuse a forward whose next step differs because of numbers that it counts.

    Args:
        module: that is captured.
        counted: the numbers that its forward changed, after it.
        graph: its export.
        later: exports it again, starting from `counted`.

    Raises:
        TwofoldError: the exports differ.

    Warns:
        UserWarning: they do not, but a later step might.
    """
    if not counted:
        return
    names = ", ".join(".".join(("self", *path.split("."), name)).replace("..", ".") for path, name in counted)
    way_out = "register_buffer(name, torch.zeros(())) makes it a value that every step updates"
    if _written(graph) != _written(later()):
        raise TwofoldError(f"the forward counts in {names}, and its next step computes something else; {way_out}")
    warnings.warn(
        f"the forward counts in {names}; if a later step depends on it, the plan does not: {way_out}", stacklevel=2
    )


def _written(graph: fx.Graph) -> list[tuple[str, str, str]]:
    return [(str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes]
