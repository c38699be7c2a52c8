"""The search over degrees for the graph of a module: its plans are plans of that graph.

A plan of degrees splits products that the module has combined, such as one product for queries, keys and values. Data
parallelism needs no such split, so small modules are also tried as they are.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.model.transformer import recognise
from plans.plan import Plan, Prediction
from search.attach_prediction import predicted
from search.candidate import Candidate
from search.devices.confirm import plan_of
from search.devices.problem import Problem
from search.devices.solve import solve
from search.result import SearchResult
from search.uniform import uniform_plan

__all__ = ["plans_of_graph"]


def plans_of_graph(
    graph: Graph, *, top_k: int = 1, time_limit_s: float | None = None, **asked: Any
) -> SearchResult[Plan]:
    """The best plans of a graph that is a transformer, each with its forecast.

    Args:
        graph: graph of the full batch.
        top_k: plans to return; the first is proven.
        time_limit_s: see `solve`.
        asked: all else that a `Problem` has.

    Raises:
        TwofoldError: a graph that is not recognised, and what `Problem` and `solve` refuse.
    """
    found = recognise(graph)
    problem = Problem(config=found.config, recognised=found, global_batch=graph.batch_size, **asked)
    answer = solve(problem, time_limit_s=time_limit_s)
    plans = [_predicted(problem, answer.best)]
    for candidate in answer.plans[1:top_k]:
        try:
            plans.append(_predicted(problem, candidate))
        except TwofoldError:  # a forecast of what has no plan
            continue
    values: dict[str, Any] = {field.name: getattr(answer, field.name) for field in fields(answer)}
    step_s = answer.best.forecast.step_s
    if (whole := _data_parallel(problem, graph, step_s)) is not None:
        plans = [whole, *plans][:top_k]
        values |= {"num_proven": 0, "lower_bound_s": min(answer.lower_bound_s, _step_s(whole))}
        values["relaxed_bound_s"] = min(answer.relaxed_bound_s, values["lower_bound_s"])
    return SearchResult(**values | {"plans": tuple(plans)})


def _data_parallel(problem: Problem, graph: Graph, step_s: float) -> Plan | None:
    """The module as it is on every device, if that is possible, fits and takes less than a step."""
    count, given = problem.num_devices, problem.pins.given
    assert problem.optimizer is not None
    kept_bytes = problem.optimizer.bytes_of(graph.parameters)
    if set(given) - {"zero"} or graph.batch_size % count or kept_bytes > problem.limit_bytes:
        return None
    plan = uniform_plan(
        graph, problem.machine, dp=count, zero=given.get("zero"), optimizer=problem.optimizer, fused=problem.fused
    )
    found = predicted(plan, problem.machine, problem.limit_bytes)
    assert found.prediction is not None
    fits = found.prediction.peak_bytes <= problem.limit_bytes
    return found if fits and _step_s(found) < step_s else None


def _step_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_s


def _predicted(problem: Problem, candidate: Candidate) -> Plan:
    seen = candidate.forecast
    prediction = Prediction(
        machine=problem.machine.name, step_s=seen.step_s, peak_bytes=seen.peak_bytes,
        exposed_comm_s=seen.exposed_comm_s, bubble_fraction=seen.bubble_fraction, low_s=seen.low_s, high_s=seen.high_s,
    )  # fmt: skip
    return msgspec.structs.replace(plan_of(problem, candidate), prediction=prediction)
