"""What a search returns: ranked plans, and why they stand where they stand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from plans.layout import TensorLayout
from plans.plan import Plan, Strategy
from plans.redistribution import Step, redistribute

__all__ = ["Alternative", "Later", "PlanSet", "Rejected", "describe"]


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


class Later(Sequence[Alternative]):
    """Alternatives that are worked out when they are first asked for."""

    def __init__(self, work: Callable[[], Sequence[Alternative]]) -> None:
        self._work, self._found = work, None  # type: tuple[Callable[[], Sequence[Alternative]], Sequence[Alternative] | None]

    @property
    def found(self) -> Sequence[Alternative]:
        """All of them."""
        if self._found is None:
            self._found = self._work()
        return self._found

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.found[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSet:
    """Plans that fit, the fastest simulated one first.

    Args:
        plans: each with its prediction.
        lower_bound_s: the optimistic relaxation: no plan of the searched space is simulated faster. Every operator of
            the slowest stage on its own by the strategy of least compute, without communication, waiting or updates.
        physics_bound_s: all arithmetic of the model at the peak rate, or its parameters through memory once.
        complete: whether the search ended by itself; else at the time limit or an interrupt.
        search_s: how long the search took.
        num_candidates: plans simulated.
        num_combinations: strategy combinations covered by the exact search.
        alternatives: per operator of the best plan.
        rejected: what was not taken, and why.
    """

    plans: Sequence[Plan]
    lower_bound_s: float
    physics_bound_s: float = 0.0
    complete: bool = True
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

    @property
    def gap_to_physics(self) -> float:
        """How far the best plan is above the physical bound."""
        assert self.best.prediction is not None
        return self.best.prediction.step_s / self.physics_bound_s - 1.0 if self.physics_bound_s else float("inf")

    def summary(self) -> str:
        """What the certificate says, in words."""
        ended = "" if self.complete else "stopped before its end, the best so far; "
        return (
            f"{ended}{_above(self.gap)} the optimistic relaxation ({self.lower_bound_s:.4g} s), "
            f"{_above(self.gap_to_physics)} the physical bound ({self.physics_bound_s:.4g} s); "
            f"{self.num_candidates} plans simulated, {self.search_s:.2f} s"
        )

    def to_json(self) -> dict[str, Any]:
        """The certificate as plain values."""
        return {
            "lower_bound_s": self.lower_bound_s,
            "physics_bound_s": self.physics_bound_s,
            "gap": self.gap,
            "gap_to_physics": self.gap_to_physics,
            "complete": self.complete,
            "search_s": self.search_s,
            "simulated": self.num_candidates,
        }

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
            f"{self.num_combinations:,} combinations of strategies searched exactly; {self.summary()}",
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


def _above(gap: float) -> str:
    return f"{gap:.1%} above" if gap < 10 else f"{gap + 1:.3g} times"


def _named(steps: Sequence[Step]) -> str:
    return ", ".join(f"{step.kind} over {'.'.join(step.axes)}" if step.axes else str(step.kind) for step in steps)


def describe(strategy: Strategy) -> str:
    """A strategy in one line.

    >>> describe(Strategy(dims={"b0": ("d0",), "n": ("d1",)}))
    'b0 over d0, n over d1'
    """
    parts = [f"{dim} over {'.'.join(axes)}" for dim, axes in strategy.dims.items() if axes]
    text = ", ".join(parts) or "replicated"
    if strategy.mesh is not None:
        text += f" of {strategy.mesh!r}"
    if strategy.out is not None:
        text += (
            f", handed on as {TensorLayout(mesh=strategy.mesh, dims=strategy.out)}"
            if strategy.mesh
            else (f", handed on as {strategy.out}")
        )
    return text
