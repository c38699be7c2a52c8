"""Reasons for a configuration: the costs of its operators in several layouts, and its critical path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plans.degrees import Degrees
from search.candidate import Candidate
from search.devices.critical import critical_path_s
from search.devices.operators import OperatorCost, operator_costs
from search.devices.problem import Problem
from search.result import SearchResult

__all__ = ["Reasons", "explained", "reasons_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasons:
    """The reasons for a configuration.

    Args:
        operators: costs of the operators of a block, in its layout and in others.
        critical_s: kind of work -> seconds of the critical path.
    """

    operators: Sequence[OperatorCost]
    critical_s: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The reasons as JSON values."""
        return {
            "critical_path_s": dict(self.critical_s),
            "operators": [
                {
                    "operator": operator.operator,
                    "layout": operator.layout,
                    "compute_s": operator.compute_s,
                    "redistribution_s": operator.redistribution_s,
                    "exposed_s": operator.exposed_s,
                    "flops": operator.flops,
                    "moved_bytes": operator.moved_bytes,
                    "chosen": operator.chosen,
                }
                for operator in self.operators
            ],
        }


def reasons_for(problem: Problem, candidate: Candidate, beside: Iterable[Degrees] = ()) -> Reasons:
    """The costs of its operators, also in the layouts of configurations next to it, and its critical path."""
    return Reasons(
        operators=operator_costs(problem, candidate.degrees, beside), critical_s=critical_path_s(problem, candidate)
    )


def explained(found: SearchResult[Candidate]) -> Reasons:
    """The reasons of the best of a search, with the layouts of its neighbours."""
    beside = [alternative.candidate.degrees for alternative in found.alternatives if alternative.candidate is not None]
    return reasons_for(found.problem, found.best, beside + [plan.degrees for plan in found.plans[1:]])
