"""The order in which a backward completes the gradients of parameters."""

from __future__ import annotations

from collections.abc import Sequence

from plans.model.graph import Graph, Operator

__all__ = ["completed_parameters"]


def completed_parameters(micro: Graph, operators: Sequence[Operator]) -> list[tuple[str, str]]:
    """(parameter, operator whose gradient makes the parameter's gradient whole), in the order of the backward."""
    found: dict[str, str] = {}
    for operator in reversed(operators):
        spec, trained = micro.spec(operator), micro.trained_inputs(operator)
        weights = [index for index in trained if micro.tensors[operator.inputs[index]].kind == "parameter"]
        for group in spec.gradient_groups(weights):
            for name in (operator.inputs[index] for index in group):
                found.pop(name, None)
                found[name] = operator.name
    return list(found.items())
