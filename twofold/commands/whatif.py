"""`twofold whatif`: predict a plan with and without changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from twofold.commands.changes import ChangeOptions, FailureOptions, JobOptions, Row, changes_of, read_devices
from twofold.commands.options import FileOutput, MachineFactors, MachineOption, PlanFile
from twofold.commands.plan_file import open_plan
from twofold.commands.values import HtmlFile, Steps, SvgFile

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from simulator import Job, Outcome
    from simulator.study.scenarios import Scenarios
    from simulator.study.stragglers import Ranks
    from twofold.commands.changes import Changes
    from twofold.console import Console

__all__ = ["WhatIfCommand"]

_MOST_BLOCKS, _MOST_DRAWN = 1_000, 100_000
"""Largest layers times micro-batches, and times ranks, for which a report of degrees shows the pipeline."""

_BY = 0.2
"""Default of --by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """Sensitivity and report.

    Args:
        sensitivity: decrease and increase every quantity, and sort by effect.
        by: relative change of each quantity; 0.2 by default.
        picture: write the sensitivity to this SVG file.
        report: write the tables, the sensitivity, and the step with the (first) change to this HTML file.
    """

    sensitivity: bool = False
    by: float | None = None
    picture: SvgFile | None = None
    report: HtmlFile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfCommand:
    """Predict a plan with and without changes to its machine. One option may have several values.

    Every change has a separate row, and one row combines them all. A plan file is simulated. A file of degrees is
    forecast, in seconds at any number of devices, unless a change needs the event engine or --simulate is given.

    Args:
        plan: plan file, or a file of degrees (.degrees.json).
        schedule: schedule to use instead of the plan's: a name, or a file (.csv, .txt).
        steps: number of steps to simulate; the last one is reported.
        simulate: for a file of degrees: make its plan and simulate every instruction.
    """

    plan: PlanFile
    target: MachineOption
    schedule: str | None = None
    steps: Steps = 3
    simulate: bool = False
    factors: MachineFactors = field(default_factory=MachineFactors)
    ranks: ChangeOptions = field(default_factory=ChangeOptions)
    jobs: JobOptions = field(default_factory=JobOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    study: StudyOptions = field(default_factory=StudyOptions)
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Predict the plan unchanged and with every change."""
        from costmodels import Machine
        from reports import what_if_table

        self._check()
        machine = Machine.load(self.target.machine)
        subject = self._configured(machine, console) or self._simulated(machine, console)
        changes = changes_of(self.factors, self.ranks, self.failures, self.jobs.beside, subject.ranks)
        with console.doing(subject.doing):
            base = subject.outcome(Row.unchanged())
            rows = [(row.title, subject.outcome(row)) for row in changes.rows]
        shown: list[Any] = [what_if_table(base, rows)]
        console.print(shown[0].text())
        result: dict[str, Any] = {
            "predicted_by": "forecast" if subject.scenarios is None else "simulation",
            "base": _json(base, base), "changed": [{"what_if": title, **_json(row, base)} for title, row in rows],
        }  # fmt: skip
        if self.study.sensitivity or self.study.picture is not None:
            result["sensitivity"] = self._sensitivity(changes, subject, shown, console)
        if self.study.report is not None:
            with console.doing("writing the report"):
                self._report(subject, changes.first, shown, console)
        return result, True

    def _check(self) -> None:
        """Refuse options without effect, before simulating."""
        study, failures, ranks = self.study, self.failures, self.ranks
        for option, is_idle, needed in (
            ("--checkpoint-async", failures.checkpoint_async and not failures.checkpoint_every, "--checkpoint-every"),
            ("--seed", ranks.seed is not None and not ranks.jitter, "--jitter"),
            ("--by", study.by is not None and not (study.sensitivity or study.picture), "--sensitivity or --picture"),
        ):
            if is_idle:
                raise TwofoldError(f"{option} changes nothing without {needed}")
        if study.by is not None and not 0 < study.by < 1:
            raise TwofoldError(f"--by must be above 0 and below 1, not {study.by:g}")

    def _configured(self, machine: Machine, console: Console) -> _Subject | None:
        """The degrees of a file, if forecasts can answer the question; None otherwise."""
        from costmodels import executing
        from interop.plan_file import read_degrees, states_degrees
        from simulator.study.configured import Configured
        from simulator.study.stragglers import Ranks

        needs_engine = self.simulate or self.schedule or self.jobs.beside or self.jobs.on
        if needs_engine or not machine.host_async or not states_degrees(self.plan):
            return None
        config, degrees, notes = read_degrees(self.plan, machine)
        blocks = degrees.num_micro_batches * config.num_layers
        is_small = blocks <= _MOST_BLOCKS and blocks * degrees.num_ranks <= _MOST_DRAWN
        if self.study.report is not None and is_small:
            return None
        ranks = Ranks.of(degrees)
        subject = Configured(config=config, degrees=degrees, machine=executing(machine, "graph"))
        changes = changes_of(self.factors, self.ranks, self.failures, (), ranks)
        if any(subject.engine_only(row.what_if) for row in changes.rows):
            return None
        for note in notes:
            console.print(note)
        console.print(
            f"forecasts of {degrees.num_ranks:,} ranks, as in `predict`; --simulate simulates every instruction"
        )
        return _Subject(
            name=config.name, machine=subject.machine, ranks=ranks, outcome=lambda row: subject.outcome(row.what_if),
            doing=f"forecasting {degrees.num_ranks} ranks",
        )  # fmt: skip

    def _simulated(self, machine: Machine, console: Console) -> _Subject:
        """Load the plan for simulation."""
        from costmodels import executing
        from plans.lower import lower
        from simulator.study.scenarios import Scenarios
        from simulator.study.stragglers import Ranks

        plan = open_plan(self.plan, machine, self.schedule, console)
        machine, on = executing(machine, plan.execution), self.jobs.on
        with console.doing(f"lowering {plan.num_ranks} ranks"):
            program = lower(plan)
        scenarios = Scenarios(
            program=program, machine=machine, devices=None if on is None else read_devices(on, f"--on {on}"),
            others=[_job(text, machine, console) for text in self.jobs.beside], num_steps=self.steps,
        )  # fmt: skip
        return _Subject(
            name=plan.graph.name, machine=machine, plan=plan, scenarios=scenarios,
            ranks=Ranks(count=plan.num_ranks, stages=[stage.mesh.rank_list for stage in plan.stages]),
            outcome=lambda row: scenarios.outcome(row.what_if, alone=not row.beside),
            doing=f"simulating {plan.num_ranks} ranks",
        )  # fmt: skip

    def _sensitivity(
        self, changes: Changes, subject: _Subject, shown: list[Any], console: Console
    ) -> list[dict[str, Any]]:
        """Vary every quantity, show the effects, and append their picture and table to `shown`."""
        from reports import sensitivity_table, tornado_picture
        from simulator.study.sensitivity import sensitivity

        around = changes.around
        with console.doing("varying every quantity"):
            effects = sensitivity(
                lambda what_if: subject.outcome(replace(around, what_if=what_if)), subject.machine, around.what_if,
                by=self.study.by or _BY,
            )  # fmt: skip
        where = "" if around.what_if.is_none else f", with {around.what_if}"
        picture = tornado_picture(effects, title=f"What the step time of {subject.name} depends on{where}")
        shown += [picture, sensitivity_table(effects)]
        console.print(shown[-1].text())
        if self.study.picture is not None:
            console.print(f"saved {picture.save(self.study.picture)}")
        return [
            {
                "knob": effect.knob,
                "by": effect.by,
                "base_s": effect.base_s,
                "low_s": effect.low_s,
                "high_s": effect.high_s,
                "swing_s": effect.swing_s,
            }
            for effect in effects
        ]

    def _report(self, subject: _Subject, row: Row, shown: list[Any], console: Console) -> None:
        from reports import Report, step_page

        scenarios = subject.scenarios
        report = Report(
            title=f"What if: {subject.name} on {subject.machine.name}", plan=subject.plan, what_if=shown,
            command=console.command, notes=["All times are forecasts; the pipeline of so large a plan is not drawn."],
        )  # fmt: skip
        if scenarios is not None:
            report = replace(
                report, program=scenarios.program, predicted=scenarios.timeline(row.what_if, alone=not row.beside),
                notes=[f"The pictures and the tables below them show: {row.title}."],
            )  # fmt: skip
        console.print(f"saved {step_page(report).write(self.study.report or '')}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The plan or the degrees that are predicted.

    Args:
        name: name of the model.
        machine: its machine.
        ranks: number of ranks.
        outcome: computes the outcome of a row.
        doing: progress message.
        plan, scenarios: only for simulations.
    """

    name: str
    machine: Machine
    ranks: Ranks
    outcome: Callable[[Row], Outcome]
    doing: str
    plan: Plan | None = None
    scenarios: Scenarios | None = None


def _job(text: str, machine: Machine, console: Console) -> Job:
    """Parse another job: PLAN.json=DEVICES."""
    from plans.lower import lower
    from simulator import Job

    path, _, devices = text.rpartition("=")
    if not path:
        raise TwofoldError(f"cannot read --beside {text}; write --beside other.json=4-7")
    return Job(program=lower(open_plan(path, machine, None, console)), ranks=read_devices(devices, f"--beside {text}"))


def _json(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    from plans.figures import figures_of

    return {
        **figures_of(outcome),
        "host_wait_s": outcome.host_wait_s,
        "change": outcome.step_s / base.step_s - 1 if base.step_s else 0.0,
        "goodput": outcome.goodput.fraction,
        "effective_step_s": outcome.goodput.effective_step_s,
        "checkpoint_s": outcome.goodput.checkpoint_s,
        "best_checkpoint_every": outcome.goodput.best_every_steps,
    }
