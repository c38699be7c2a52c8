"""What the search returns: ranked configurations, how far from the best they may be, and why others were not taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plans.degrees.file import degrees_to_json
from plans.errors import TwofoldError
from search.devices.candidate import Found, Refused
from search.devices.explain import Neighbour
from search.devices.problem import Problem

__all__ = ["Answer", "NothingFits", "degrees_json"]


class NothingFits(TwofoldError):
    """No configuration of the space fits; the message names the smallest relaxation that would."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Configurations that fit, the fastest first.

    Args:
        problem: what was asked.
        found: ranked.
        bound_s: no configuration of the searched space is forecast faster; equal to the best where the search ended.
        relaxed_s: the optimistic relaxation of the whole space: no contention, the optimizer's communication wholly
            hidden, the bubble in closed form.
        physics_s: all arithmetic of the model at the peak rate of all devices, or all its memory traffic at theirs.
        complete: whether the search ended by itself; else at the time limit or an interrupt.
        search_s: how long it took.
        num_proven: so many of `found`, from the first on, are proven to be the fastest of the space, in this order;
            the others are what was forecast on the way.
        num_forecasts: configurations forecast whole.
        num_opened: nodes opened.
        refused: what was not taken, with the reason.
        neighbours: one degree of the best changed at a time.
        method: "search" or the name of a baseline.
    """

    problem: Problem
    found: Sequence[Found]
    bound_s: float
    relaxed_s: float
    physics_s: float
    complete: bool
    search_s: float
    num_forecasts: int
    num_opened: int
    num_proven: int = 0
    refused: Sequence[Refused] = ()
    neighbours: Sequence[Neighbour] = ()
    method: str = "search"

    @property
    def best(self) -> Found:
        """The fastest."""
        return self.found[0]

    @property
    def gap(self) -> float:
        """By what share the best may exceed the fastest of the space; 0 where it is proven to be that."""
        return self.best.forecast.step_s / self.bound_s - 1.0 if self.bound_s else float("inf")

    @property
    def gap_to_relaxation(self) -> float:
        """By what share the best exceeds the optimistic relaxation."""
        return self.best.forecast.step_s / self.relaxed_s - 1.0

    @property
    def gap_to_physics(self) -> float:
        """By what share the best exceeds the physical bound."""
        return self.best.forecast.step_s / self.physics_s - 1.0

    @property
    def pareto(self) -> list[Found]:
        """Of all that were forecast and fit, those that none beats in both time and memory."""
        best: list[Found] = []
        for each in self.found:
            if not best or each.forecast.peak_bytes < best[-1].forecast.peak_bytes:
                best.append(each)
        return best

    def summary(self) -> str:
        """What the certificate says, in words."""
        if self.method != "search":
            return (
                f"{self.method}: {self.gap_to_physics:.1%} above the physical bound ({self.physics_s:.4g} s); "
                f"{self.num_forecasts} forecasts, {self.search_s:.2f} s"
            )
        said = (
            "proven the fastest of the space under this forecast" if self.complete and self.num_proven < 2 else
            f"the first {self.num_proven} proven the fastest of the space under this forecast" if self.complete else
            f"at most {self.gap:.1%} above the fastest of the space"
        )  # fmt: skip
        return (
            f"{said}; {self.gap_to_relaxation:.1%} above the optimistic relaxation ({self.relaxed_s:.4g} s), "
            f"{self.gap_to_physics:.1%} above the physical bound ({self.physics_s:.4g} s); "
            f"{self.num_forecasts} forecasts, {self.num_opened} nodes, {self.search_s:.2f} s"
        )

    def to_json(self, top_k: int = 5) -> dict[str, Any]:
        """Plain values."""
        return {
            "method": self.method,
            "model": self.problem.config.name,
            "machine": self.problem.machine.name,
            "devices": self.problem.num_devices,
            "global_batch": self.problem.global_batch,
            "seq": self.problem.config.seq,
            "pins": self.problem.pins.given,
            "best": found_json(self.best),
            "plans": [found_json(each) for each in self.found[:top_k]],
            "pareto": [found_json(each) for each in self.pareto],
            "bound_s": self.bound_s,
            "lower_bound_s": self.relaxed_s,
            "physics_bound_s": self.physics_s,
            "gap": self.gap,
            "gap_to_relaxation": self.gap_to_relaxation,
            "gap_to_physics": self.gap_to_physics,
            "complete": self.complete,
            "num_proven": self.num_proven,
            "neighbours": [
                {
                    "change": each.change,
                    "extra_s": each.extra_s,
                    "reason": each.reason,
                    "best": None if each.found is None else found_json(each.found),
                }
                for each in self.neighbours
            ],
            "refused": [
                {"what": each.what, "reason": each.reason, "excess_bytes": each.excess_bytes}
                for each in self.refused[:200]
            ],
            "search_s": self.search_s,
            "forecasts": self.num_forecasts,
            "nodes": self.num_opened,
        }


def degrees_json(degrees: Any) -> dict[str, Any]:
    """Degrees as plain values."""
    return {**degrees_to_json(degrees), "micro_batches": degrees.num_micro_batches}


def found_json(found: Found) -> Mapping[str, Any]:
    """A configuration and its forecast as plain values."""
    seen = found.forecast
    return {
        **degrees_json(found.degrees),
        "step_s": seen.step_s, "step_low_s": seen.low_s, "step_high_s": seen.high_s, "peak_bytes": seen.peak_bytes,
        "memory_bytes": dict(seen.memory), "bubble_fraction": seen.bubble_fraction,
        "exposed_comm_s": seen.exposed_comm_s,
    }  # fmt: skip
