"""What a search returns: ranked plans, and why they stand where they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plans.plan import Plan
from plans.redistribution import Step, redistribute

__all__ = ["Alternative", "PlanSet", "Rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another strategy of one operator, and what the best plan that uses it costs more (additive cost, seconds)."""

    operator: str
    strategy: str
    extra_s: float
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that was not taken, and the reason."""

    what: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSet:
    """Plans that fit, the fastest simulated one first.

    Args:
        plans: each with its prediction.
        lower_bound_s: no plan of the searched space can be faster (its compute alone, without any communication).
        search_s: how long the search took.
        num_candidates: plans simulated.
        num_combinations: strategy combinations covered by the exact search.
        alternatives: per operator of the best plan.
        rejected: what was not taken, and why.
    """

    plans: Sequence[Plan]
    lower_bound_s: float
    search_s: float
    num_candidates: int
    num_combinations: int
    alternatives: Sequence[Alternative] = ()
    rejected: Sequence[Rejected] = field(default_factory=tuple)

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]

    @property
    def gap(self) -> float:
        """How far the best plan may be from the optimum: step time over lower bound, less 1."""
        assert self.best.prediction is not None
        return self.best.prediction.step_s / self.lower_bound_s - 1.0 if self.lower_bound_s else float("inf")

    def table(self) -> str:
        """One line per plan: rank, predicted step time, peak memory, meshes."""
        lines = [f"{'':>2} {'step':>10} {'peak':>10}  stages"]
        for number, plan in enumerate(self.plans, 1):
            assert plan.prediction is not None
            stages = "; ".join(
                f"ranks {stage.mesh.rank_list[0]}-{stage.mesh.rank_list[-1]} as "
                f"{' x '.join(map(str, stage.mesh.device_matrix))}"
                for stage in plan.stages
            )
            peak = plan.prediction.peak_bytes / 2**20
            lines.append(f"{number:>2} {plan.prediction.step_s * 1e3:>7.2f} ms {peak:>6.1f} MiB  {stages}")
        return "\n".join(lines)

    def explain(self) -> str:
        """Per operator the chosen strategy and the nearest alternatives with what they would cost more.

        Then the redistributions that the machine's price does by other steps than those of least bytes.
        """
        lines = [
            f"{self.num_combinations:,} combinations of strategies searched exactly, {self.num_candidates} plans "
            f"simulated, {self.search_s:.2f} s; gap to the lower bound at most {self.gap:.0%}",
        ]
        for operator in dict.fromkeys(entry.operator for entry in self.alternatives):
            mine = [entry for entry in self.alternatives if entry.operator == operator]
            chosen = next((entry.strategy for entry in mine if entry.chosen), "?")
            lines.append(f"{operator}: {chosen}")
            others = sorted((entry for entry in mine if not entry.chosen), key=lambda entry: entry.extra_s)
            lines += [f"    {entry.strategy}: {entry.extra_s * 1e3:+.3f} ms" for entry in others[:3]]
        for stored in self.best.redistributions:
            source, target, shape, itemsize = stored.key
            plain = redistribute(source, target, shape, itemsize=itemsize, even=True)
            lines.append(
                f"{source} to {target} of {' x '.join(map(str, shape))}: {_named(stored.sequence)}, "
                f"faster here, instead of {_named(plain)}, which moves least bytes"
            )
        lines += [f"not taken: {entry.what}: {entry.reason}" for entry in self.rejected]
        return "\n".join(lines)


def _named(steps: Sequence[Step]) -> str:
    return ", ".join(f"{step.kind} over {'.'.join(step.axes)}" if step.axes else str(step.kind) for step in steps)
