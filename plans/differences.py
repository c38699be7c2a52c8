"""Compares what two plans compute, whatever devices they distribute it over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from plans.optimizer import Optimizer
from plans.plan import Plan
from plans.step_check import StepCheck

__all__ = ["changed_values", "plan_differences"]

_SHARDING = ("parallel_level", "threshold_bytes", "bucket_bytes", "prefetch", "reduce_every")


def plan_differences(before: Plan, after: Plan) -> dict[str, tuple[Any, Any]]:
    """The values that make two plans compute different losses (beyond rounding), by path: (before, after).

    Degrees, devices, schedules and sharding may differ.

    >>> from plans.layout import Layout
    >>> from plans.model.mlp import mlp_graph
    >>> from plans.plan import Stage
    >>> graph = mlp_graph([8, 4], 16)
    >>> stages = (Stage(mesh=Layout((2,), ("dp",)), operators=tuple(graph.by_name)),)
    >>> plans = [Plan(graph=graph, stages=stages, optimizer=Optimizer(settings={"lr": lr})) for lr in (0.1, 0.2)]
    >>> plan_differences(*plans)
    {'optimizer.settings.lr': (0.1, 0.2)}
    """
    return changed_values(_computation(before), _computation(after))


def changed_values(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values that differ between two nested mappings, by path; a missing value counts as None.

    >>> changed_values({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": None})
    {'a.b': (1, 3)}
    >>> changed_values({"groups": [{"scale": 1}]}, {"groups": [{"scale": 2}]})
    {'groups[0].scale': (1, 2)}
    """
    first, second = dict(_leaves("", before)), dict(_leaves("", after))
    pairs = {path: (first.get(path), second.get(path)) for path in first | second}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}


def _computation(plan: Plan) -> dict[str, Any]:
    graph, check, defaults = plan.graph, plan.step_check or StepCheck(), Optimizer()
    optimizer = msgspec.structs.replace(plan.optimizer, **{name: getattr(defaults, name) for name in _SHARDING})
    return msgspec.to_builtins({
        "batch_size": graph.batch_size,
        "optimizer": optimizer,
        "loss_scale": check.loss_scale,
        "spike": check.spike,
        # statistics of a normalisation are taken over each micro-batch
        "num_micro_batches": plan.num_micro_batches if graph.updated else None,
        "tensors": graph.tensors,
        "operators": {each.name: msgspec.structs.replace(each, module="") for each in graph.operators},
        "loss": graph.loss,
        "later": graph.later,
    })  # fmt: skip


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for number, each in enumerate(value):
            yield from _leaves(f"{path}[{number}]", each)
        return
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, each in value.items():
        yield from _leaves(f"{path}.{name}" if path else str(name), each)
