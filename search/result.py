"""The result of a search: ranked plans, the gap to the optimum, and reasons why others were rejected.

Both searches return a `SearchResult`: the one over operators ranks plans, the one over degrees ranks candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from plans.errors import TwofoldError
from plans.plan import Plan
from plans.redistribution import Step, redistribute
from plans.shown import Shown
from plans.units import Bytes, Seconds, Share
from search.candidate import Candidate, describe

__all__ = ["Alternative", "AlternativesTo", "NothingFits", "Rejected", "SearchResult", "pareto_front"]

PlanT = TypeVar("PlanT", Plan, Candidate)
T = TypeVar("T")

_NEAREST = 3
"""Alternatives that `SearchResult.explain` shows of one subject."""

_LISTED = 200
"""Rejected parts of the space in the JSON."""


def pareto_front(found: Sequence[T], of: Callable[[T], tuple[float, float]]) -> list[T]:
    """The Pareto front of two quantities that should be small, sorted by the first.

    >>> pareto_front([(3, 1), (2, 2), (2, 3), (4, 1)], lambda each: each)
    [(2, 2), (3, 1)]
    """
    front: list[T] = []
    for each in sorted(found, key=of):
        if not front or of(each)[1] < of(front[-1])[1]:
            front.append(each)
    return front


class NothingFits(TwofoldError):
    """Nothing in the searched space fits the memory; the message names the smallest relaxation that would."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A change of the best plan and its cost.

    Args:
        subject: what is changed: an operator, or "degrees".
        change: the other choice, in words.
        extra_s: seconds that a step takes longer; None where the change cannot be made or does not fit.
        chosen: whether this is the best plan's own choice.
        reason: why it lost.
        candidate: the best configuration with this change, where it was forecast.
    """

    subject: str
    change: str
    extra_s: float | None
    chosen: bool = False
    reason: str = ""
    candidate: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A part of the searched space that was not taken, and the reason.

    Args:
        what: the part.
        reason: why.
        count: how many configurations it has; 0 where they were not counted.
        excess_bytes: by how much the leanest of them exceeds the memory.
    """

    what: str
    reason: str
    count: int = 0
    excess_bytes: int | None = None


class AlternativesTo(Generic[PlanT]):
    """Alternatives to a plan, worked out when they are first read.

    A search makes it; the plan is the first one after all have been ordered.
    """

    def __init__(self, work_out: Callable[[PlanT], Sequence[Alternative]]) -> None:
        self._work_out: Callable[[PlanT], Sequence[Alternative]] = work_out
        self._known: tuple[PlanT, Sequence[Alternative]] | None = None

    def __call__(self, plan: PlanT) -> Sequence[Alternative]:
        if self._known is None or self._known[0] is not plan:
            self._known = plan, self._work_out(plan)
        return self._known[1]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SearchResult(Shown, Generic[PlanT]):
    """Plans that fit, the fastest first.

    Three bounds stand below the best: the proven one is the highest, the physical one the lowest.

    Args:
        plans: each with its predicted step.
        lower_bound_s: no plan of the searched space is predicted faster; the best's own step where that is proven.
        relaxed_bound_s: the optimistic relaxation of the full space, without contention or waiting.
        physics_bound_s: all arithmetic at the peak rate, or all parameters through memory once (`search.physics`).
        search_s: how long the search took.
        complete: whether it ended without a time limit or an interrupt: all shapes and strategies that it looks at were
            looked at. It proves nothing about the step; `gap` says what is proven.
        num_proven: how many of `plans`, from the first on, are proven to be the fastest of the space in this order.
        num_equal: how many of `plans`, from the first on, are equally fast as far as a forecast can tell. They are
            ordered by simplicity and memory that is left (`search.devices.preference`).
        strategies_gap: by what share the additive cost of the best plan's strategies may exceed the least one of its
            stages; 0 where that is proven to be the least, None where there was no time to search them. Of searches
            over operators.
        margin: largest relative excess of estimates over forecasts that the proof assumes.
        contention_margin: the same of steps without contention over forecasts; 0 where the proof does not need it.
        clock_share: the least ratio of a step at its own clock to the same step at the clock at which all plans were
            compared, as the bounds assume (`search.own_clock`); None where clocks do not differ.
        num_evaluated: plans simulated, or configurations forecast.
        num_combinations: combinations of strategies that the exact search covers.
        num_nodes: nodes that branch and bound opened.
        alternatives_to: makes the `alternatives` to a plan; None if they were not asked for.
        rejected: what was not taken, and why.
        method: "search", or the name of a baseline.
        problem: the `search.devices.Problem` that was solved; None for a search over operators.
    """

    plans: Sequence[PlanT]
    lower_bound_s: float
    relaxed_bound_s: float
    physics_bound_s: float
    search_s: float
    complete: bool = True
    num_proven: int = 0
    num_equal: int = 1
    strategies_gap: float | None = 0.0
    margin: float = 0.0
    contention_margin: float = 0.0
    clock_share: float | None = None
    num_evaluated: int = 0
    num_combinations: int = 0
    num_nodes: int = 0
    alternatives_to: Callable[[PlanT], Sequence[Alternative]] | None = None
    rejected: Sequence[Rejected] = ()
    method: str = "search"
    problem: Any = None

    def __repr__(self) -> str:
        count = len(self.plans)
        best = f"the best {_predicted(self.best)[0] * 1e3:.4g} ms" if count else "none fits"
        return f"<SearchResult: {count} plan{'s' * (count != 1)}, {best}, gap {Share(self.gap)}>"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A row for every plan: its configuration, step and peak."""
        return [
            {
                "plan": describe(plan.degrees) if isinstance(plan, Candidate) else repr(plan),
                "step_s": _predicted(plan)[0], "peak_bytes": _predicted(plan)[1],
            }
            for plan in self.plans
        ]  # fmt: skip

    def reordered(self, plans: Sequence[PlanT]) -> SearchResult[PlanT]:
        """The same result with its plans in another order; those before the first that moved remain proven."""
        pairs: list[tuple[PlanT, PlanT]] = list(zip(plans, self.plans, strict=True))
        moved: list[int] = [place for place, (own, old) in enumerate(pairs) if not _is_same(own, old)]
        return replace(self, plans=plans, num_proven=min([self.num_proven, *moved]))

    @property
    def best(self) -> PlanT:
        """The first plan: the fastest, or the simplest of those that are equally fast."""
        return self.plans[0]

    @property
    def alternatives(self) -> Sequence[Alternative]:
        """Changes of the best plan, and their costs."""
        return () if self.alternatives_to is None else self.alternatives_to(self.best)

    @property
    def gap(self) -> float:
        """The relative amount by which the best plan may exceed the fastest plan of the space; 0 if it is proven."""
        return self._above(self.lower_bound_s)

    @property
    def gap_to_relaxation(self) -> float:
        """The relative excess of the best plan over the optimistic relaxation."""
        return self._above(self.relaxed_bound_s)

    @property
    def gap_to_physics(self) -> float:
        """The relative excess of the best plan over the physical bound."""
        return self._above(self.physics_bound_s)

    @property
    def pareto(self) -> list[PlanT]:
        """The Pareto front of `plans` in time and memory."""
        return pareto_front(self.plans, _predicted)

    def _above(self, bound_s: float) -> float:
        return _predicted(self.best)[0] / bound_s - 1.0 if bound_s else float("inf")

    def summary(self) -> str:
        """How close the best plan is to the fastest of the search space, in sentences."""
        sentences = [] if self.complete else ["Stopped early: this is the best plan so far."]
        is_beyond = isinstance(self.best, Candidate) and self.best.degrees.takes_turns
        space = "the search space" + (" (which has no slices or pairs)" if is_beyond else "")
        assumed = self._assumed()
        holds = f" This holds if {' and '.join(assumed)}." if assumed else ""
        if self.num_proven > 1:
            sentences.append(
                f"Proven: the first {self.num_proven} plans have the shortest forecasts of {space}.{holds}"
            )
        elif self.num_proven:
            sentences.append(f"Proven: the first plan has the shortest forecast of {space}.{holds}")
        elif is_beyond or not self.complete or self.lower_bound_s > self.relaxed_bound_s:
            most = "less than 0.1 % longer than" if self.gap < 5e-4 else f"at most {_longer_than(self.gap)}"
            sentences.append(f"Its forecast is {most} the shortest of {space}.{holds}")
        if self.complete and self.problem is None and isinstance(self.best, Plan) and self.strategies_gap is not None:
            lowest = "the lowest of all strategies" if self.strategies_gap < 5e-4 else (
                f"at most {Share(self.strategies_gap)} above the lowest"
            )  # fmt: skip
            sentences.append(f"Its additive cost is {lowest} for its stages.")
        relaxed = f"the optimistic relaxation ({Seconds(self.relaxed_bound_s)})" if self.method == "search" else ""
        bounds = [f"{_longer_than(self.gap_to_relaxation)} {relaxed}"] if relaxed else []
        bounds.append(f"{_longer_than(self.gap_to_physics)} the physical bound ({Seconds(self.physics_bound_s)})")
        sentences.append(f"{'Its step' if relaxed else f'Method {self.method}: its step'} is {' and '.join(bounds)}.")
        counts = f"{self.num_evaluated} plans evaluated" + (f", {self.num_nodes} nodes" if self.num_nodes else "")
        return f"{' '.join(sentences)} {counts}, {Seconds(self.search_s)}."

    def _assumed(self) -> list[str]:
        """The assumptions of the bounds."""
        assumed = [f"no estimate exceeds its forecast by more than {Share(self.margin)}"] if self.margin else []
        if self.contention_margin:
            assumed.append(
                f"no plan is more than {Share(self.contention_margin)} faster with network contention than without"
            )
        if self.clock_share is not None:
            assumed.append("no other plan speeds up more at its own clock than the plans that were tried")
        return [f"{', '.join(assumed[:-1])},", assumed[-1]] if len(assumed) > 2 else assumed

    def table(self) -> str:
        """One line per plan: rank, predicted step, peak memory, configuration."""
        lines = [f"{'':>2} {'step':>10} {'peak memory':>11}  configuration"]
        for number, plan in enumerate(self.plans, 1):
            step_s, peak_bytes = _predicted(plan)
            lines.append(f"{number:>2} {Seconds(step_s)!s:>10} {Bytes(peak_bytes)!s:>11}  {_configuration(plan)}")
        return "\n".join(lines)

    def explain(self) -> str:
        """The extent of the search, the nearest alternatives with their costs, and the rejected plans.

        Redistributions that the machine does faster by other steps than those of least bytes are listed too.
        """
        covered = f"{self.num_combinations:,} combinations of strategies searched exactly. "
        lines = [(covered if self.num_combinations else "") + self.summary()]
        for subject in dict.fromkeys(entry.subject for entry in self.alternatives):
            entries = [entry for entry in self.alternatives if entry.subject == subject]
            chosen = next((entry.change for entry in entries if entry.chosen), _configuration(self.best))
            lines.append(f"{subject}: {chosen}")
            others = [(entry.extra_s, entry) for entry in entries if not entry.chosen and entry.extra_s is not None]
            lines += [
                f"    {entry.change}: {extra_s * 1e3:+.3f} ms"
                for extra_s, entry in sorted(others, key=lambda each: each[0])[:_NEAREST]
            ]
        if isinstance(self.best, Plan):
            lines += _stored_redistributions(self.best)
        lines += [f"not taken: {entry.what}: {entry.reason}" for entry in self.rejected[:_LISTED]]
        return "\n".join(lines)

    def to_json(self) -> Mapping[str, Any]:
        """The certificate as JSON values."""
        return {
            "method": self.method,
            "lower_bound_s": self.lower_bound_s,
            "relaxed_bound_s": self.relaxed_bound_s,
            "physics_bound_s": self.physics_bound_s,
            "gap": self.gap,
            "gap_to_relaxation": self.gap_to_relaxation,
            "gap_to_physics": self.gap_to_physics,
            "complete": self.complete,
            "num_proven": self.num_proven,
            "num_equal": self.num_equal,
            "strategies_gap": self.strategies_gap,
            "margin": self.margin,
            "contention_margin": self.contention_margin,
            "clock_share": self.clock_share,
            "evaluated": self.num_evaluated,
            "nodes": self.num_nodes,
            "search_s": self.search_s,
            "rejected": [
                {"what": entry.what, "reason": entry.reason, "excess_bytes": entry.excess_bytes}
                for entry in self.rejected[:_LISTED]
            ],
        }


def _is_same(one: Plan | Candidate, other: Plan | Candidate) -> bool:
    if isinstance(one, Candidate) and isinstance(other, Candidate):
        return one.degrees == other.degrees
    return one is other


def _predicted(plan: Plan | Candidate) -> tuple[float, int]:
    """Seconds of a step and peak bytes of a rank."""
    prediction = plan.prediction if isinstance(plan, Plan) else plan.forecast
    assert prediction is not None
    return prediction.step_s, prediction.peak_bytes


def _configuration(plan: Plan | Candidate) -> str:
    """A plan in one line."""
    if isinstance(plan, Candidate):
        return describe(plan.degrees)
    meshes = [stage.mesh for stage in plan.stages]
    return "; ".join(
        f"ranks {mesh.rank_list[0]}-{mesh.rank_list[-1]} as {' x '.join(map(str, mesh.device_matrix))}"
        for mesh in meshes
    )


def _stored_redistributions(plan: Plan) -> list[str]:
    lines = []
    for stored in plan.redistributions:
        source, target, shape, itemsize = stored.key
        plain = redistribute(source, target, shape, itemsize=itemsize, even=True)
        lines.append(
            f"{source} to {target} of {' x '.join(map(str, shape))}: {_steps(stored.sequence)}, "
            f"faster here, instead of {_steps(plain)}, which moves least bytes"
        )
    return lines


def _longer_than(gap: float) -> str:
    if gap < 10:
        return f"{Share(gap)} longer than"
    times = f"{gap + 1:.3g}" if gap < 999 else f"{gap + 1:,.0f}"
    return f"{times} times as long as"


def _steps(steps: Sequence[Step]) -> str:
    return ", ".join(f"{step.kind} over {'.'.join(step.axes)}" if step.axes else str(step.kind) for step in steps)
