"""The order in which a backward completes the gradients of parameters, and whether products accumulate into them."""

from __future__ import annotations

from collections.abc import Sequence

from plans.model.graph import Graph, Operator, itemsize

__all__ = ["adds_alike", "completed_parameters"]


def adds_alike(accumulated: str, made: str, *, is_only: bool) -> bool:
    """Whether a product that adds to its result gives the same as a product followed by a sum.

    In half precision it would be rounded once where those round twice (as training with torch does), so there it only
    writes the only gradient of a step.

    Args:
        accumulated: dtype in which gradients are accumulated.
        made: dtype in which they are made.
        is_only: whether a step has no other gradient of the parameter.

    >>> adds_alike("float32", "float32", is_only=False), adds_alike("bfloat16", "bfloat16", is_only=False)
    (True, False)
    """
    return accumulated == made and (is_only or itemsize(made) >= 4)


def completed_parameters(micro: Graph, operators: Sequence[Operator]) -> list[tuple[str, str]]:
    """(parameter, operator whose gradient completes the gradient of the parameter), in the order of the backward."""
    found: dict[str, str] = {}
    for operator in reversed(operators):
        spec, trained = micro.spec(operator), micro.trained_inputs(operator)
        weights = [index for index in trained if micro.tensors[operator.inputs[index]].kind == "parameter"]
        for group in spec.gradient_groups(weights):
            for name in (operator.inputs[index] for index in group):
                found.pop(name, None)
                found[name] = operator.name
    return list(found.items())
