"""The search over degrees for the graph of a module: its plans are plans of that graph."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import msgspec

from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.model.transformer import recognise
from plans.plan import Plan, Prediction
from search.candidate import Candidate
from search.devices.confirm import plan_of
from search.devices.problem import Problem
from search.devices.solve import solve
from search.result import SearchResult

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
    return SearchResult(**values | {"plans": tuple(plans)})


def _predicted(problem: Problem, candidate: Candidate) -> Plan:
    seen = candidate.forecast
    prediction = Prediction(
        machine=problem.machine.name, step_s=seen.step_s, peak_bytes=seen.peak_bytes,
        exposed_comm_s=seen.exposed_comm_s, bubble_fraction=seen.bubble_fraction, low_s=seen.low_s, high_s=seen.high_s,
    )  # fmt: skip
    return msgspec.structs.replace(plan_of(problem, candidate), prediction=prediction)
