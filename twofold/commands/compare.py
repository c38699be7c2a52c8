"""`twofold compare`: predict several plans on one machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from plans.errors import TwofoldError
from twofold.commands.options import MachineOption, Output
from twofold.commands.plan_file import open_plan
from twofold.commands.values import HtmlFile, Steps

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from reports.comparison import Compared
    from twofold.console import Console

__all__ = ["Compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """Predict 2 to 6 plans on one machine and compare them.

    Args:
        plans: plan files, or files of degrees (.degrees.json); the others are compared with the first.
        steps: number of consecutive steps to simulate; the last one is reported.
        report: write a page with figures, critical paths and all timelines on one axis to this HTML file.
    """

    plans: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json ...")]
    target: MachineOption
    steps: Steps = 3
    report: HtmlFile | None = None
    output: Output = field(default_factory=Output)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Simulate every plan and show them in a table."""
        from costmodels import Machine
        from plans.figures import figures_of
        from reports.comparison import MOST_PLANS, comparison_page, plans_table

        if not 2 <= len(self.plans) <= MOST_PLANS:
            raise TwofoldError(f"compare takes 2 to {MOST_PLANS} plan files, not {len(self.plans)}")
        machine = Machine.load(self.target.machine)
        plans = [open_plan(path, machine, None, console) for path in self.plans]
        predicted = [
            self._predicted(path, plan, machine, console) for path, plan in zip(self.plans, plans, strict=True)
        ]
        console.print(plans_table(predicted).text())
        if len({(plan.graph.name, plan.graph.batch_size) for plan in plans}) > 1:
            console.print("The plans train different models or batches: their steps are not the same work.")
        if self.report is not None:
            with console.doing("writing the report"):
                report = comparison_page(predicted, machine=machine.name, command=console.command).write(self.report)
            console.print(f"saved {report}")
        return {"plans": [{"plan": path, **figures_of(compared.timeline)} for path, compared in
                          zip(self.plans, predicted, strict=True)]}, True  # fmt: skip

    def _predicted(self, path: str, plan: Plan, machine: Machine, console: Console) -> Compared:
        from costmodels import executing
        from plans.lower import lower
        from reports.comparison import Compared
        from simulator import critical_path, simulate

        program, machine = lower(plan), executing(machine, plan.execution)
        with console.doing(f"simulating {path}"):
            timeline = simulate(program, machine, num_steps=self.steps)
            critical = critical_path(timeline, program, host_async=machine.host_async)
        alone = sum(Path(other).name == Path(path).name for other in self.plans) == 1
        return Compared(name=Path(path).name if alone else path, timeline=timeline, program=program, path=critical,
                        limit_bytes=plan.memory_limit_bytes)  # fmt: skip
