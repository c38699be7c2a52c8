"""The command that predicts a saved plan: `simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from plans.errors import TwofoldError
from twofold.cli import run_command

if TYPE_CHECKING:
    from plans.plan import Plan
    from plans.program import Program
    from plans.timeline import Timeline

__all__ = ["PlanFile", "load_scheduled", "schedule_argument", "simulate"]

PlanFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json")]


def schedule_argument(given: str) -> str:
    """The name of a schedule, or the text of the file (.csv, .txt) that holds one.

    Raises:
        TwofoldError: a file that cannot be read or holds no schedule.
    """
    from plans.schedules import Schedule, ScheduleError

    if not given.endswith((".csv", ".txt")):
        if Path(given).exists():
            raise TwofoldError(f"--schedule {given}: a file with a schedule is named *.csv or *.txt")
        return given
    try:
        text = Path(given).read_text(encoding="utf-8")
        if not text.strip():
            raise ScheduleError("the file is empty; write a row of actions such as 0F0,0F1,0B0 for every pipeline rank")
        Schedule.from_text(text)
    except OSError as error:
        raise TwofoldError(f"--schedule {given}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TwofoldError(f"--schedule {given}: the file is no text") from None
    except ScheduleError as error:
        raise TwofoldError(f"--schedule {given}: {error}") from None
    return text


def simulate(
    plan: PlanFile,
    machine: str,
    schedule: str | None = None,
    trace: str | None = None,
    rank_traces: str | None = None,
    report: str | None = None,
    measured: str | None = None,
    steps: int = 3,
    recost: bool = False,
    model: str | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    stack: str | None = None,
    json: bool = False,
) -> int:
    """Predict a plan on a machine: step time with its interval, bubble, critical path, exposed communication, memory.

    Args:
        plan: plan file.
        machine: shipped machine or machine file.
        schedule: of the pipeline instead of the plan's: a name, or a file (.csv, .txt) with a row of actions such as
            0F0,0F1,0B0 for every pipeline rank.
        trace: write the timeline there, to open in https://ui.perfetto.dev.
        rank_traces: write a trace per rank into this folder, as torch's profiler does, for tools that compare ranks.
        report: write an HTML report there.
        measured: a run of the plan to lay beside it: a trace file that holds one (the demo's, or of
            reports.write_trace), or a folder with a trace per rank, of torch's profiler too.
        steps: back to back; the last is reported.
        recost: the file states a transformer's degrees, which are forecast anew: .degrees.json as `twofold plan` writes
            it beside a plan, DTensor placements (.json), torchtitan's settings (.toml), or a text with Megatron-LM's
            flags and --world-size.
        model: recost: name or config.json, where the file does not say or for another one.
        global_batch: recost: sequences of a step, instead of the file's.
        seq: recost: tokens of a sequence, instead of the file's.
        stack: recost: the software that runs it (see `twofold predict --help`); that of the file, or twofold.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    def stated() -> tuple[Any, bool]:
        from twofold.reprice import recost as again

        if unused := [name for name, value in given.items() if value is not None]:
            raise TwofoldError(f"--{unused[0].replace('_', '-')} is not for --recost, which forecasts degrees")
        say = Console(json=json)
        return again(plan, machine, model=model, global_batch=global_batch, seq=seq, stack=stack, say=say)

    given = {"schedule": schedule, "trace": trace, "rank_traces": rank_traces, "report": report, "measured": measured}

    def work() -> tuple[Any, bool]:
        from costmodels import Machine
        from plans.files import check_writable
        from plans.lower import lower

        for file in (trace, report, None if rank_traces is None else f"{rank_traces}/rank0_trace.json.gz"):
            if file is not None:
                check_writable(file)
        if asked := [n for n, v in (("model", model), ("global-batch", global_batch), ("seq", seq)) if v is not None]:
            raise TwofoldError(f"--{asked[0]} needs --recost; a plan file is for its own model and batch")
        from reports import (
            Report,
            comparison_table,
            composition_table,
            memory_table,
            timeline_table,
            write_rank_traces,
            write_report,
            write_trace,
        )
        from reports.time_tables import critical_path_table
        from reports.units import format_bytes, format_seconds
        from simulator import composition, critical_path, memory_peak
        from simulator import simulate as predict

        loaded, target = load_scheduled(plan, schedule, steps), Machine.load(machine)
        program = lower(loaded)
        timeline = predict(program, target, num_steps=steps)
        limit = loaded.memory_limit_bytes
        if limit is not None and timeline.peak_bytes > limit:
            raise TwofoldError(
                f"{plan} needs {timeline.peak_bytes:,} bytes per rank, its memory limit is {limit:,}; plan again "
                "with one that fits, or raise memory_limit_bytes in the file"
            )
        run = None if measured is None else _run(measured, program)
        path = critical_path(timeline, program, host_async=target.host_async)
        fullest = max(timeline.memory, key=lambda each: (each.peak_bytes, -each.rank)).rank
        say = Console(json=json)
        interval = ""
        if timeline.low_s is not None and timeline.high_s is not None:
            interval = f" (90 % interval {format_seconds(timeline.low_s)} to {format_seconds(timeline.high_s)})"
        peak = format_bytes(timeline.peak_bytes)
        say.say(f"predicted step {format_seconds(timeline.step_interval_s)}{interval}, peak memory of a rank {peak}")
        if timeline.step_s > timeline.step_interval_s:
            spans = format_seconds(timeline.step_s)
            say.say(f"a step itself spans {spans}: ranks begin it while others work on the one before")
        say.say(composition_table(timeline, program).text())
        say.say(critical_path_table(path).text())
        say.say(memory_table(timeline, program).text())
        if run is not None:
            say.say(timeline_table([timeline, run]).text())
            say.say(composition_table(run, program).text())
            say.say(comparison_table(timeline, run).text())
        if trace is not None:
            say.say(f"saved {write_trace(trace, [timeline], program=program)}")
        if rank_traces is not None:
            written_ranks = write_rank_traces(rank_traces, timeline, backend=target.library, program=program)
            say.say(f"saved {len(written_ranks)} in {rank_traces}")
        if report is not None:
            written = write_report(
                report, Report(title=f"{loaded.graph.name} on {target.name}", plan=loaded, program=program,
                predicted=timeline, measured=run, memory_limit_bytes=limit or target.room_bytes,
                command=f"twofold simulate {plan} --machine {machine}",
            ))  # fmt: skip
            say.say(f"saved {written}")
        return {
            "step_s": timeline.step_interval_s,
            "step_span_s": timeline.step_s,
            "step_low_s": timeline.low_s,
            "step_high_s": timeline.high_s,
            "peak_bytes": timeline.peak_bytes,
            "bubble_fraction": timeline.bubble_fraction,
            "exposed_comm_s": timeline.exposed_comm_s,
            "critical_path_s": {kind: part / 1e12 for kind, part in path.by_kind_ps.items()},
            "critical_rank": path.rank,
            "ranks": [
                {
                    "rank": part.rank,
                    "compute_s": part.compute_ps / 1e12,
                    "exposed_comm_s": {call: exposed / 1e12 for call, exposed in part.exposed_ps.items()},
                    "host_s": part.host_ps / 1e12,
                    "bubble_s": part.bubble_ps / 1e12,
                    "straggler_wait_s": {str(last): waited / 1e12 for last, waited in part.straggler_ps.items()},
                    "peak_bytes": peak.peak_bytes,
                    "peak_bytes_by_role": dict(peak.by_role),
                }
                for part, peak in zip(composition(timeline, program), timeline.memory, strict=True)
            ],
            "peak_bytes_by_action": memory_peak(program, timeline, fullest).by_action,
            "fullest_rank": fullest,
            **({} if run is None else {"measured_step_s": run.step_interval_s, "measured_kind": run.kind}),
        }, True

    return run_command(stated if recost else work, json)


def load_scheduled(path: str, schedule: str | None, steps: int) -> Plan:
    """The plan of a file, with another schedule where one is given."""
    import msgspec

    from plans.lower import schedule_of
    from plans.plan import load_plan

    if steps < 1:
        raise TwofoldError(f"--steps {steps}: it is at least 1")
    loaded = load_plan(path)
    if schedule is None:
        return loaded
    text = schedule_argument(schedule)
    try:
        changed = msgspec.structs.replace(loaded, schedule=text)
        schedule_of(changed)  # whether it is for these stages and micro-batches
    except TwofoldError as error:
        raise TwofoldError(f"--schedule {schedule}: {error}") from None
    return changed


def _run(path: str, program: Program) -> Timeline:
    """The run in a trace file of ours, or in a folder with a trace per rank.

    Raises:
        TwofoldError: no such file, no run in it, a run on another number of ranks.
    """
    from reports import read_rank_traces, read_trace

    if Path(path).is_dir():
        found = read_rank_traces(sorted(each for each in Path(path).iterdir() if ".json" in each.suffixes))
    else:
        runs = [each for each in read_trace(path) if each.kind != "predicted"]
        if not runs:
            raise TwofoldError(f"{path} holds predictions only; give the trace of a run")
        found = runs[-1]
    if found.num_ranks != program.num_ranks:
        raise TwofoldError(f"the run in {path} has {found.num_ranks} ranks, the plan {program.num_ranks}")
    return found
