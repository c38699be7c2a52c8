"""`twofold whatif`: a plan with changes beside the same plan without."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from twofold.commands.changes import ChangeOptions, FailureOptions, JobOptions, changes_of, read_devices
from twofold.commands.options import MachineFactors, MachineOption, Output, PlanFile
from twofold.commands.plan_file import check_steps, open_plan

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from simulator import Job, Outcome, WhatIf
    from simulator.study.scenarios import Scenarios
    from twofold.commands.changes import Changes
    from twofold.console import Console

__all__ = ["WhatIfCommand"]

_BY = 0.2
"""The share by which `--sensitivity` turns knobs, unless --by is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions:
    """What depends on what.

    Args:
        sensitivity: turn every knob down and up, and sort them by effect.
        by: by which share they are turned; 0.2 by default.
        picture: write the sensitivity as an SVG picture there.
        report: write an HTML report there: the tables, the sensitivity, and the step with the (first) change.
    """

    sensitivity: bool = False
    by: float | None = None
    picture: str | None = None
    report: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfCommand:
    """Predict a plan with changes to its machine, beside the prediction without; one knob may have several values.

    Args:
        plan: plan file, or a file of degrees (.degrees.json), of which the plan is made.
        schedule: of the pipeline instead of the plan's: a name, or a file (.csv, .txt).
        steps: to simulate; the last is reported.
    """

    plan: PlanFile
    target: MachineOption
    schedule: str | None = None
    steps: int = 3
    factors: MachineFactors = field(default_factory=MachineFactors)
    ranks: ChangeOptions = field(default_factory=ChangeOptions)
    jobs: JobOptions = field(default_factory=JobOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    study: StudyOptions = field(default_factory=StudyOptions)
    output: Output = field(default_factory=Output)

    def run(self, say: Console) -> tuple[dict[str, Any], bool]:
        """Simulate the plan as it is and with every change."""
        from costmodels import Machine, executing
        from plans.lower import lower
        from reports import what_if_table
        from simulator import WhatIf
        from simulator.study.scenarios import Scenarios

        self._check()
        machine = Machine.load(self.target.machine)
        plan = open_plan(self.plan, machine, self.schedule, say)
        machine = executing(machine, plan.execution)
        changes = changes_of(self.factors, self.ranks, self.failures, plan)
        on = self.jobs.on
        scenarios = Scenarios(
            program=lower(plan), machine=machine, devices=None if on is None else read_devices(on, f"--on {on}"),
            others=[_job(text, machine, say) for text in self.jobs.beside], num_steps=self.steps,
        )  # fmt: skip
        with say.doing(f"simulating {plan.num_ranks} ranks"):
            base = scenarios.outcome(WhatIf(), alone=True)
            shared = self._shared(changes, scenarios)
            changed = self._changed(changes, scenarios)
        common = self._common(changes)
        shown: list[Any] = [what_if_table(base, [*shared.items(), *changed.items()], common)]
        say.say(shown[0].text(width=160))
        result: dict[str, Any] = {
            "base": _json(base, base),
            "common": common,
            "shared": [{"what_if": title, **_json(each, base)} for title, each in shared.items()],
            "changed": [{"what_if": title, **_json(each, base)} for title, each in changed.items()],
        }
        if self.study.sensitivity or self.study.picture is not None:
            result["sensitivity"] = self._sensitivity(changes, scenarios, plan, shown, say)
        if self.study.report is not None:
            titles = [*changes.varied, *changed, str(changes.first)]
            with say.doing("writing the report"):
                self._report(plan, scenarios, titles[0], changes, shown, say)
        return result, True

    def _check(self) -> None:
        """Refuse what changes nothing or cannot be written, before anything is simulated."""
        from plans.files import check_writable

        study, failures, ranks = self.study, self.failures, self.ranks
        for option, is_idle, needed in (
            ("--checkpoint-async", failures.checkpoint_async and not failures.checkpoint_every, "--checkpoint-every"),
            ("--seed", ranks.seed is not None and not ranks.jitter, "--jitter"),
            ("--by", study.by is not None and not (study.sensitivity or study.picture), "--sensitivity or --picture"),
        ):
            if is_idle:
                raise TwofoldError(f"{option} changes nothing without {needed}")
        for file in (study.picture, study.report):
            if file is not None:
                check_writable(file)
        if study.by is not None and not 0 < study.by < 1:
            raise TwofoldError(f"--by {study.by:g}: knobs are turned by a share above 0 and below 1")
        check_steps(self.steps)

    def _together(self) -> list[str]:
        """The jobs beside, in words."""
        jobs = ", ".join(f"beside {text.replace('=', ' on ')}" for text in self.jobs.beside)
        return [jobs] if jobs else []

    def _shared(self, changes: Changes, scenarios: Scenarios) -> Mapping[str, Outcome]:
        """Where one knob is varied: what all rows have in common, with that knob as it is."""
        words = ([] if changes.shared.is_none else [str(changes.shared)]) + self._together()
        return {", ".join(words): scenarios.outcome(changes.shared)} if changes.shared_stands_alone and words else {}

    def _changed(self, changes: Changes, scenarios: Scenarios) -> Mapping[str, Outcome]:
        if changes.varied:
            return {title: scenarios.outcome(what_if) for title, what_if in changes.varied.items()}
        title = [] if changes.first.is_none else [str(changes.first)]
        title += self._together()
        return {", ".join(title): scenarios.outcome(changes.first)} if title else {}

    def _common(self, changes: Changes) -> str:
        """What all rows have in common, as a sentence."""
        words = [] if changes.shared.is_none else [str(changes.shared)]
        words += [*self._together(), *changes.also]
        return f"Every change with {', '.join(words)}." if changes.varied and words else ""

    def _sensitivity(
        self, changes: Changes, scenarios: Scenarios, plan: Plan, shown: list[Any], say: Console
    ) -> list[dict[str, Any]]:
        """Turn every knob, show the effects, and append their picture and table to `shown`."""
        from reports import sensitivity_table, tornado_picture
        from simulator.study.sensitivity import sensitivity

        around: WhatIf = changes.around
        with say.doing("turning every knob"):
            effects = sensitivity(
                scenarios.program, scenarios.machine, around, by=self.study.by or _BY, num_steps=self.steps,
                evaluate=scenarios.outcome,
            )  # fmt: skip
        where = "" if around.is_none else f", with {around}"
        picture = tornado_picture(effects, title=f"What a step of {plan.graph.name} depends on{where}")
        shown += [picture, sensitivity_table(effects)]
        say.say(shown[-1].text())
        if self.study.picture is not None:
            say.say(f"saved {picture.save(self.study.picture)}")
        return [
            {"knob": each.knob, "by": each.by, "base_s": each.base_s, "low_s": each.low_s, "high_s": each.high_s,
             "swing_s": each.swing_s}
            for each in effects
        ]  # fmt: skip

    def _report(
        self, plan: Plan, scenarios: Scenarios, title: str, changes: Changes, shown: list[Any], say: Console
    ) -> None:
        from reports import Report, write_report

        report = write_report(self.study.report or "", Report(
            title=f"What if: {plan.graph.name} on {scenarios.machine.name}", plan=plan,
            program=scenarios.program, predicted=scenarios.timeline(changes.first), what_if=shown,
            notes=[f"The pictures and the tables below them show: {title}."],
            command=f"twofold whatif {self.plan} --machine {self.target.machine} ...",
        ))  # fmt: skip
        say.say(f"saved {report}")


def _job(text: str, machine: Machine, say: Console) -> Job:
    """Another job: PLAN.json=DEVICES."""
    from plans.lower import lower
    from simulator import Job

    path, _, devices = text.rpartition("=")
    if not path:
        raise TwofoldError(f"cannot read --beside {text}; it looks like --beside other.json=4-7")
    return Job(program=lower(open_plan(path, machine, None, say)), ranks=read_devices(devices, f"--beside {text}"))


def _json(outcome: Outcome, base: Outcome) -> dict[str, Any]:
    from reports.figures import figures_of

    return {
        **figures_of(outcome),
        "host_wait_s": outcome.host_wait_s,
        "change": outcome.step_s / base.step_s - 1 if base.step_s else 0.0,
        "goodput": outcome.goodput.fraction,
        "effective_step_s": outcome.goodput.effective_step_s,
        "checkpoint_s": outcome.goodput.checkpoint_s,
        "best_checkpoint_every": outcome.goodput.best_every_steps,
    }
