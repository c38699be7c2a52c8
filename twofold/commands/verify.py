"""`twofold verify`: run a plan and compare it with single-process training and with its prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from twofold.commands.options import LaunchOptions, NodeOptions, Output, PlanFile

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Verify"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Run a plan and compare it with single-process training, its planned communication and its prediction.

    Args:
        plan: plan file.
        model: package.module:function or file.py:function that the plan was made for.
        machine: machine to predict with; without it there is no prediction.
    """

    plan: PlanFile
    model: str
    machine: str | None = None
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    place: NodeOptions = field(default_factory=NodeOptions)
    output: Output = field(default_factory=Output)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Run and compare; passes if loss, weights, communication and memory are correct."""
        from costmodels import Machine
        from executor.data.sources import usual_data
        from executor.launch.launch import check_port
        from executor.launch.nodes import refusing
        from executor.launch.run_plan import run
        from executor.reference.verification import verify
        from plans.figures import figures_of, figures_text
        from plans.plan import load_plan
        from reports import verification_table
        from simulator import simulate

        launch = self.launch
        with refusing(self.place.stated):
            check_port(self.place.port)
            plan, source = load_plan(self.plan), self.machine or launch.emulate
            plan = msgspec.structs.replace(
                plan, execution=launch.execution or plan.execution, fused=plan.fused and launch.fused
            )
            predicted = None
            if source is not None:
                with console.doing(f"simulating {plan.num_ranks} ranks"):
                    execution = "eager" if launch.emulate else plan.execution
                    predicted = simulate(msgspec.structs.replace(plan, execution=execution), Machine.load(source))
        with console.doing(f"running {launch.steps} steps on {plan.num_ranks} ranks, then in one process"):
            how: dict[str, Any] = {
                "model": self.model, "steps": launch.steps, "data": launch.data or usual_data(plan.graph),
                "seed": launch.seed, "out": launch.out, "log_dir": launch.log_dir, "emulate": launch.emulate,
                "dilate": launch.dilate, "nodes": self.place.stated, "timeout_s": launch.timeout,
                "profile_steps": launch.profile, "print_every": max(1, launch.steps // 10),
                "on_line": lambda rank, line: console.print(line),
            }  # fmt: skip
            if self.place.node:
                run(plan, **how)
                console.print("the run has ended; node 0 compares it with one process")
                return {"node": self.place.node}, True
            result = verify(plan, predicted=predicted, **how)
        measured = result.run.figures
        figures = {"measured": measured}
        if predicted is not None:
            figures["predicted"] = figures_of(predicted)
            console.print(f"predicted: {figures_text(figures['predicted'])}")
        console.print(f"{result.run.timeline.kind}: {figures_text(measured)}")
        if remark := launch.ran(result.run.execution, result.run.fallback):
            console.print(remark)
        console.print(verification_table(result.checks()).text())
        return result.to_json() | figures, result.passed
