"""`twofold simulate`: predict a plan step by step: its time, critical path, bubble and memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from plans.errors import TwofoldError
from twofold.commands.options import FileOutput, MachineOption, PlanFile, given
from twofold.commands.plan_file import open_plan
from twofold.commands.values import AtLeast1, HtmlFile, Steps, TraceFile, flag

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from plans.program import Program
    from plans.timeline import Timeline
    from simulator import CriticalPath
    from twofold.console import Console

__all__ = ["Simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecostOptions:
    """With --recost: changes to the settings of the file.

    Args:
        model: name or config.json, if the file has none or to replace it.
        global_batch: sequences per step; by default as in the file.
        seq: tokens per sequence; by default as in the file.
        stack: software that runs the step (see `twofold predict --help-all`); by default as in the file, or twofold.
    """

    model: str | None = None
    global_batch: AtLeast1 | None = None
    seq: AtLeast1 | None = None
    stack: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationFiles:
    """Other files.

    Args:
        schedule: schedule to use instead of the plan's: a name, or a file (.csv, .txt) with a row of actions such as
            0F0,0F1,0B0 for every pipeline rank.
        trace: write the timeline to this file, for https://ui.perfetto.dev.
        rank_traces: write one trace per rank to this folder, in the format of torch's profiler.
        report: write an HTML report to this file.
        measured: run of the plan to compare with: a trace file (of the demo or interop.chrome_trace), or a folder
            with one trace per rank, also of torch's profiler.
    """

    schedule: str | None = None
    trace: TraceFile | None = None
    rank_traces: str | None = None
    report: HtmlFile | None = None
    measured: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulate:
    """Predict a plan on a machine: step time with its interval, bubble, critical path, exposed communication, memory.

    Args:
        plan: plan file, or a file of degrees (.degrees.json).
        steps: number of consecutive steps to simulate; the last one is reported.
        execution: graph (a step is one launch, if the device supports it) or eager; by default that of the plan.
        fused: fuse runs of memory-bound instructions into single kernels; on by default.
        fold: simulate equal ranks once, which is faster and gives the same result; on by default.
        recost: forecast the degrees of a file: .degrees.json of `twofold plan`, DTensor placements (.json),
            torchtitan's settings (.toml), or a text with Megatron-LM's flags and --world-size.
    """

    plan: PlanFile
    target: MachineOption
    steps: Steps = 3
    execution: str | None = None
    fused: bool = True
    fold: bool = True
    recost: bool = False
    files: SimulationFiles = field(default_factory=SimulationFiles)
    recosting: RecostOptions = field(default_factory=RecostOptions)
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Simulate, or forecast again with --recost."""
        from costmodels import Machine, executing

        if self.recost:
            if unused := [name for name in given(self.files) if name != "report"]:
                raise TwofoldError(f"{flag(unused[0])} is not for --recost, which forecasts degrees")
            self._check_files()
            return _recost(self, Machine.load(self.target.machine), console), True
        asked = list(given(self.recosting))
        self._check_files()
        if asked:
            raise TwofoldError(f"{flag(asked[0])} needs --recost; a plan file fixes its model, batch and software")
        machine = Machine.load(self.target.machine)
        plan = open_plan(self.plan, machine, self.files.schedule, console)
        execution = self.execution or plan.execution
        plan = msgspec.structs.replace(plan, fused=plan.fused and self.fused, execution=execution)
        return self._simulate(plan, executing(machine, execution), console), True

    def _check_files(self) -> None:
        from plans.files import check_writable

        if self.files.rank_traces is not None:
            check_writable(f"{self.files.rank_traces}/rank0_trace.json.gz")

    def _simulate(self, plan: Plan, machine: Machine, console: Console) -> dict[str, Any]:
        from plans.lower import lower
        from simulator import critical_path, simulate

        program = lower(plan)
        with console.doing(f"simulating {program.num_ranks} ranks"):
            timeline = simulate(program, machine, num_steps=self.steps, fold_ranks=None if self.fold else False)
        limit = plan.memory_limit_bytes
        if limit is not None and timeline.peak_bytes > limit:
            raise TwofoldError(
                f"{self.plan} needs {timeline.peak_bytes:,} bytes per rank, its memory limit is {limit:,}; "
                f"make a plan that fits, or raise memory_limit_bytes in the file"
            )
        measured = None if self.files.measured is None else _measured(self.files.measured, program)
        with console.doing("finding the critical path"):
            path = critical_path(timeline, program, host_async=machine.host_async)
        _show(timeline, path, measured, program, console)
        with console.doing("writing files"):
            self._write(plan, program, machine, timeline, measured, console)
        result = _json(timeline, path, program)
        if measured is not None:
            result |= {"measured_step_s": measured.step_interval_s, "measured_kind": measured.kind}
        return result

    def _write(
        self, plan: Plan, program: Program, machine: Machine, timeline: Timeline, measured: Timeline | None,
        console: Console,
    ) -> None:  # fmt: skip
        from interop.chrome_trace import write_rank_traces, write_trace
        from reports import Report, step_page

        files = self.files
        if files.trace is not None:
            console.print(f"saved {write_trace(files.trace, [timeline], program=program)}")
        if files.rank_traces is not None:
            traces = write_rank_traces(files.rank_traces, timeline, backend=machine.library, program=program)
            console.print(f"saved {len(traces)} in {files.rank_traces}")
        if files.report is not None:
            page = step_page(Report(
                title=f"{plan.graph.name} on {machine.name}", plan=plan, program=program,
                predicted=timeline, measured=measured, memory_limit_bytes=plan.memory_limit_bytes or machine.room_bytes,
                command=console.command,
            ))  # fmt: skip
            console.print(f"saved {page.write(files.report)}")


def _show(
    timeline: Timeline, path: CriticalPath, measured: Timeline | None, program: Program, console: Console
) -> None:
    from plans.figures import figures_of, figures_text
    from plans.units import Seconds
    from reports import comparison_table, composition_table, memory_table, timeline_table
    from reports.time_tables import critical_path_table

    console.print(f"predicted: {figures_text(figures_of(timeline), low_s=timeline.low_s, high_s=timeline.high_s)}")
    if timeline.step_s > timeline.step_interval_s:
        span = Seconds(timeline.step_s)
        console.print(f"From its first to its last instruction a step takes {span}: consecutive steps overlap.")
    tables = [composition_table(timeline, program), critical_path_table(path), memory_table(timeline, program)]
    if measured is not None:
        tables += [timeline_table([timeline, measured]), composition_table(measured, program)]
        tables.append(comparison_table(timeline, measured))
    for table in tables:
        console.print(f"\n{table.text()}")


def _json(timeline: Timeline, path: CriticalPath, program: Program) -> dict[str, Any]:
    """A simulation as JSON values."""
    from plans.figures import figures_of
    from plans.timeline import PS_PER_S
    from simulator import composition, memory_peak

    fullest = max(timeline.memory, key=lambda peak: (peak.peak_bytes, -peak.rank)).rank
    ranks = [
        {
            "rank": part.rank,
            "compute_s": part.compute_ps / PS_PER_S,
            "exposed_comm_s": {call: exposed / PS_PER_S for call, exposed in part.exposed_ps.items()},
            "host_wait_s": part.host_wait_ps / PS_PER_S,
            "bubble_s": part.bubble_ps / PS_PER_S,
            "straggler_wait_s": {str(last): waited / PS_PER_S for last, waited in part.straggler_ps.items()},
            "peak_bytes": peak.peak_bytes,
            "peak_bytes_by_role": dict(peak.by_role),
        }
        for part, peak in zip(composition(timeline, program), timeline.memory, strict=True)
    ]
    return {
        **figures_of(timeline),
        "host_wait_s": timeline.host_wait_s,
        "step_span_s": timeline.step_s,
        "step_low_s": timeline.low_s,
        "step_high_s": timeline.high_s,
        "critical_path_s": {kind: part / PS_PER_S for kind, part in path.by_kind_ps.items()},
        "critical_rank": path.rank,
        "ranks": ranks,
        "peak_bytes_by_action": memory_peak(program, timeline, fullest).by_action,
        "fullest_rank": fullest,
    }


def _measured(path: str, program: Program) -> Timeline:
    """The run in a trace file of twofold, or in a folder with a trace per rank.

    Raises:
        TwofoldError: no such file, no run in it, a run on another number of ranks.
    """
    from interop.chrome_trace import read_trace
    from interop.profiler_trace import read_rank_traces

    if Path(path).is_dir():
        run = read_rank_traces(sorted(file for file in Path(path).iterdir() if ".json" in file.suffixes))
    else:
        runs = [timeline for timeline in read_trace(path) if timeline.kind != "predicted"]
        if not runs:
            raise TwofoldError(f"{path} holds predictions only; give the trace of a run")
        run = runs[-1]
    if run.num_ranks != program.num_ranks:
        raise TwofoldError(f"the run in {path} has {run.num_ranks} ranks, the plan {program.num_ranks}")
    return replace(run, program=program)


def _recost(asked: Simulate, machine: Machine, console: Console) -> dict[str, Any]:
    """Forecast the degrees of a file, or of the file of degrees that belongs to a plan file.

    Raises:
        TwofoldError: a file without degrees, or more ranks than the machine has devices.
    """
    from interop.plan_file import configuration
    from interop.statement import read_statement
    from plans.model.transformer import transformer_config
    from simulator.stacks import stack_named
    from twofold.commands.execution import executed
    from twofold.commands.forecasts import show_forecast

    path, options = asked.plan, asked.recosting
    beside = Path(f"{path.removesuffix('.json')}.degrees.json")
    statement = read_statement(beside if path.endswith(".json") and beside.is_file() else path)
    config, degrees = configuration(
        statement, path, model=options.model, global_batch=options.global_batch, seq=options.seq
    )
    if options.model is not None and transformer_config(options.model).num_layers != config.num_layers:
        console.print(f"{config.num_layers} layers as in {path}, instead of those of {options.model}")
    for each in statement.assumed:
        console.print(f"assumed: {each}")
    if statement.unread:
        console.print(f"ignored: {', '.join(statement.unread)}")
    stack = stack_named(options.stack or statement.stack or "twofold")
    degrees = replace(degrees, fused=asked.fused and machine.fuses)
    return show_forecast(config, degrees, executed(machine, stack, asked.execution), stack, console, asked.files.report)
