"""Candidates and results of the search over degrees as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plans.degrees import Degrees
from plans.degrees.file import degrees_to_json
from plans.figures import figures_of
from search.candidate import Candidate
from search.devices.problem import Problem
from search.result import SearchResult

__all__ = ["candidate_json", "degrees_json", "result_json"]


def result_json(result: SearchResult[Candidate], top_k: int = 5) -> dict[str, Any]:
    """The problem, the best configurations, the costs of the neighbours, and the certificate."""
    problem = result.problem
    return {
        "model": problem.config.name,
        "machine": problem.machine.name,
        "devices": problem.num_devices,
        "global_batch": problem.global_batch,
        "seq": problem.config.seq,
        "pins": problem.pins.given,
        "best": candidate_json(problem, result.best),
        "plans": [candidate_json(problem, candidate) for candidate in result.plans[:top_k]],
        "pareto": [candidate_json(problem, candidate) for candidate in result.pareto],
        "alternatives": [
            {
                "change": entry.change,
                "extra_s": entry.extra_s,
                "reason": entry.reason,
                "best": None if entry.candidate is None else candidate_json(problem, entry.candidate),
            }
            for entry in result.alternatives
        ],
        **result.to_json(),
    }


def degrees_json(degrees: Degrees) -> dict[str, Any]:
    """Degrees as JSON values."""
    return {**degrees_to_json(degrees), "micro_batches": degrees.num_micro_batches}


def candidate_json(problem: Problem, candidate: Candidate) -> Mapping[str, Any]:
    """A configuration and its forecast as JSON values."""
    forecast = candidate.forecast
    return {
        **degrees_json(candidate.degrees),
        **figures_of(forecast), "step_low_s": forecast.low_s, "step_high_s": forecast.high_s,
        "memory_bytes": dict(forecast.memory), "mfu": problem.mfu(forecast.step_s),
    }  # fmt: skip
