"""Calibrate this machine; a machine file comes out.

On a CPU micro-benchmarks and then probe programs run in one launch; accelerators are measured by `executor.calibrate`
(`twofold.calibrate_gpu`).
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels import Machine, price
from executor.launch.run_plan import RunResult, read_result
from plans.errors import TwofoldError
from plans.files import check_writable
from plans.lower import lower
from plans.plan import save_plan
from plans.program import Kind
from plans.timeline import PS_PER_S
from simulator import simulate
from twofold.probe_plans import probe_plans

if TYPE_CHECKING:
    from costmodels.fit.device import DeviceFit

__all__ = ["CalibrationResult", "ProbeOutcome", "calibrate", "calibrate_cpu", "write_report"]

PROBE_STEPS = 24
MORE_PROBE_STEPS = 48
QUICK_S = 8.0
"""Of the micro-benchmarks of a CPU; the probe programs take about twice as long."""

MINUTES = 2.0
"""A CPU's share for micro-benchmarks unless it is to be quick or another is stated."""

SPARE_S = 240.0
"""Beyond that: starting the ranks, probe programs, a busy machine."""

RESULTS_S = 30.0
"""How long rank 0 waits for what the other ranks write at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """A probe program: what was predicted before the overall factor, and what was measured."""

    name: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibrated machine, how well its forms explain the micro-benchmarks, and the probes behind its interval.

    Of accelerators it has no probes, but the fit, for the calibration report. `points` is the file of what was
    measured, None where that was temporary.
    """

    machine: Machine
    residuals: tuple[str, ...]
    probes: tuple[ProbeOutcome, ...] = ()
    points: Path | None = None
    fit: DeviceFit | None = None


def calibrate(
    num_ranks: int | None = None,
    *,
    device: str = "auto",
    name: str | None = None,
    out: str | os.PathLike[str] | None = None,
    points: str | os.PathLike[str] | None = None,
    base: str | None = None,
    minutes: float | None = None,
    quick: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrationResult | None:
    """Measure this machine, fit its model and write the machine file.

    Args:
        num_ranks: devices to measure together; on a CPU the gloo ranks that plans for it will use (8 when None), else
            the accelerators of this host.
        device: "auto", "cpu", "cuda" or "npu".
        name: of the machine; "this-cpu", or that of the catalogue's device and their number, when None.
        out: path of the machine file, which is replaced only when all went well; none is written when None.
        points: file of JSON lines that points are appended to as they are measured; what is there already is not
            measured again (probe programs are). Beside `out` when None; of a CPU without `out` it is temporary.
        base: accelerators: device of the catalogue whose peaks and links are taken where nothing is measured.
        minutes: of measuring; under 5 when None.
        quick: only what tells most, in under a minute.
        log_dir: where the ranks' output goes; a temporary folder when None.
        on_progress: called with a line now and then.

    Returns:
        What was found; None on ranks other than 0 under torchrun.

    Raises:
        TwofoldError: fewer than 2 ranks on a CPU, a device that is not there or not in the catalogue, no time, files
            that cannot be written (all before anything is measured); `RankFailed` when a rank fails.
    """
    from executor.device import num_accelerators, pick_device

    if minutes is not None and not 0 < minutes < math.inf:
        raise TwofoldError(f"{minutes:g} minutes are no time to measure in; give more than 0, or none for the usual")
    for file in (out, points):
        if file is not None:
            check_writable(file)
    found = pick_device(device)
    beside = Path(out).with_suffix(".points.jsonl") if out is not None else Path("calibration.points.jsonl")
    if not found.is_async:
        if base is not None:
            raise TwofoldError("base is for accelerators; a CPU's peaks are measured")
        seconds = QUICK_S if quick else 60.0 * (MINUTES if minutes is None else minutes)
        kept = points or (None if out is None else beside)
        with _saying_how_to_go_on(kept):
            return calibrate_cpu(
                8 if num_ranks is None else num_ranks, name=name or "this-cpu", out=out, points=kept,
                measure_s=seconds, thorough=not quick, log_dir=log_dir, on_progress=on_progress,
            )  # fmt: skip
    from twofold.calibrate_gpu import calibrate_accelerators, spoken

    _check_points(Path(points or beside), {"device": found.kind})
    ranks = int(os.environ.get("WORLD_SIZE", num_ranks or num_accelerators()))
    with _saying_how_to_go_on(points or beside):
        result = calibrate_accelerators(
            ranks, kind=found.kind, device_name=found.name, memory_bytes=found.memory_bytes()[1],
            points=points or beside, name=name, out=out, base=base, minutes=minutes, quick=quick, log_dir=log_dir,
            on_progress=on_progress,
        )  # fmt: skip
    if result is None:
        return None
    said = tuple(spoken(result.fit))
    return CalibrationResult(machine=result.machine, residuals=said, points=result.points, fit=result.fit)


def calibrate_cpu(
    num_ranks: int = 8,
    *,
    name: str = "this-cpu",
    out: str | os.PathLike[str] | None = None,
    points: str | os.PathLike[str] | None = None,
    measure_s: float = QUICK_S,
    thorough: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrationResult | None:
    """`calibrate` for the CPU, also where this host has accelerators.

    Args:
        num_ranks: gloo ranks that share this host; under torchrun it is the number of ranks there.
        name: of the machine.
        out: path of the machine file; none is written when None.
        points: file of JSON lines, appended to; a temporary one when None. Under torchrun on several hosts it must be
            in a folder that all of them see.
        measure_s: about how long the micro-benchmarks may take; probe programs follow.
        thorough: more shapes and sizes, longer probe programs.
        log_dir: where the ranks' output goes; a temporary folder when None.
        on_progress: called with a line now and then.

    Raises:
        TwofoldError: fewer than 2 ranks, points of another machine; `RankFailed` when a rank
            fails, `RunTimedOut` when time is up. What was measured is kept.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", num_ranks))
    if num_ranks < 2:
        raise TwofoldError(f"{num_ranks} rank has nobody to talk to; calibrate with at least 2")
    from executor.calibrate.cpu import environment
    from executor.launch.job import Job, Task, save_job
    from executor.launch.launch import Follow, launch

    say = on_progress or (lambda line: None)
    plans = probe_plans(num_ranks, Machine.load("h200-x8"))
    with tempfile.TemporaryDirectory(prefix="twofold-") as temporary:
        joined = "RANK" in os.environ
        folder = Path(f"{points}.ranks") if joined and points is not None else Path(temporary)
        log = folder / "points.jsonl" if points is None else Path(points).absolute()
        _check_points(log, environment() | {"device": "cpu"})
        tasks = []
        for number, plan in enumerate(plans):
            place = folder / f"probe{number}"
            save_plan(plan, place / "plan.json")
            steps = MORE_PROBE_STEPS if thorough else PROBE_STEPS
            tasks.append(Task(plan=str(place / "plan.json"), out=str(place), steps=steps, count=False))
        job = Job(tasks=tuple(tasks), measure=str(log), measure_s=measure_s, thorough=thorough, device="cpu")
        path = save_job(job, folder / "job.json")
        if joined:
            from executor.launch.job_main import main

            main([str(path)])
            if os.environ["RANK"] != "0":
                return None
            _wait_for([folder / f"probe{n}" / f"rank.{r}.npz" for n in range(len(plans)) for r in range(num_ranks)])
        else:
            say(f"starting {num_ranks} ranks")  # on a busy computer that takes longer than the first points
            launch(
                "executor.launch.job_main", num_ranks=num_ranks, args=[str(path)],
                log_dir=log_dir or folder / "log_output",
                timeout_s=measure_s + SPARE_S,
                follow=Follow(lambda rank, line: say(_in_words(line, len(plans))), rank=0),
            )  # fmt: skip
        runs = [read_result(plan, folder / f"probe{number}", folder, 0.0) for number, plan in enumerate(plans)]
        if joined:
            shutil.rmtree(folder)
        result = _fit_cpu(log, runs, name)
    if out is not None:
        result.machine.save(out)
    return replace(result, points=None if points is None else log)


def write_report(result: CalibrationResult, path: str | os.PathLike[str]) -> Path:
    """Write the calibration report, HTML.

    Raises:
        TwofoldError: a CPU's points were temporary.
    """
    if result.fit is not None:
        from reports.calibration import write_calibration_report

        return write_calibration_report(path, result.fit)
    if result.points is None:
        raise TwofoldError("the points were not kept; name a file of points to have them reported")
    from costmodels.fit.points import load_points
    from reports.calibration_cpu import write_cpu_calibration_report

    points, _ = load_points(result.points)
    return write_cpu_calibration_report(path, result.machine, points, result.residuals, result.probes)


@contextlib.contextmanager
def _saying_how_to_go_on(points: str | os.PathLike[str] | None) -> Iterator[None]:
    """An interrupt passes through with a word on the points that are on disk, where they are kept."""
    try:
        yield
    except KeyboardInterrupt:
        if points is None:
            raise
        from costmodels.fit.points import PointLog

        said = (
            f"{len(PointLog(points).points)} points are kept in {os.fspath(points)!r}: the same command goes on there"
        )
        raise KeyboardInterrupt(said) from None


def _check_points(path: Path, environment: Mapping[str, str]) -> None:
    """Refuse points that cannot be gone on with here, before any rank is started."""
    from costmodels.fit.points import PointLog
    from executor.calibrate.resume import check_same

    if path.suffix != ".jsonl":
        raise TwofoldError(f"the points go to a file of JSON lines, such as points.jsonl, not {path.name!r}")
    if os.environ.get("RANK", "0") == "0":  # it alone keeps points
        check_same(PointLog(path), environment)


def _in_words(line: str, num_probes: int) -> str:
    """A rank's line of progress for the user: how far the probe programs are instead of where their files lie."""
    done = re.fullmatch(r"task done: .*probe(\d+)", line)
    return line if done is None else f"ran probe program {int(done[1]) + 1} of {num_probes}"


def _wait_for(files: Sequence[Path]) -> None:
    """Until all are there: other ranks may still be writing them."""
    start = time.monotonic()
    while missing := [file for file in files if not file.exists()]:
        if time.monotonic() - start > RESULTS_S:
            raise TwofoldError(f"{str(missing[0])!r} did not come within {RESULTS_S:g} s; run the same command again")
        time.sleep(0.05)


def _fit_cpu(points: Path, runs: Sequence[RunResult], name: str) -> CalibrationResult:
    """The machine that micro-benchmarks and probe programs make."""
    from costmodels.fit.cpu import fit_cpu_machine
    from costmodels.fit.points import load_points
    from costmodels.fit.probe import fit_probe, fit_processor, with_probe, with_processor

    fitted = fit_cpu_machine(*load_points(points), name=name)
    today = datetime.date.today().isoformat()
    processor = fit_processor([row for result in runs for row in _processor_rows(result, fitted.machine)])
    machine = with_processor(fitted.machine, processor, date=today)
    outcomes = [
        ProbeOutcome(
            name=result.plan.graph.name, predicted_s=simulate(result.plan, machine).step_interval_s,
            measured_s=result.step_s,
        )
        for result in runs
    ]  # fmt: skip
    fit = fit_probe([probe.predicted_s for probe in outcomes], [probe.measured_s for probe in outcomes])
    said = (
        f"processor time of probe programs: computing x {processor.compute:.2f}, communication x "
        f"{processor.communication:.2f} of the micro-benchmarks, median misfit {processor.spread:.0%}"
    )
    return CalibrationResult(
        machine=with_probe(machine, fit, date=today), residuals=(*map(str, fitted.residuals), said),
        probes=tuple(outcomes),
    )  # fmt: skip


def _processor_rows(result: RunResult, machine: Machine) -> list[tuple[float, float, float]]:
    """Per rank: predicted processor seconds of computing and of communication, and the measured ones."""
    rows = []
    for group in lower(result.plan).groups:
        compute = communication = 0
        for _, instruction in group.walk():
            cost = price(instruction, group, machine, result.plan.num_ranks)
            if instruction.kind is Kind.COMPUTE:
                compute += cost.dispatch_ps + cost.work_ps
            elif instruction.kind is Kind.WAIT:
                compute += cost.dispatch_ps
            else:
                communication += cost.dispatch_ps + cost.cpu_ps
        rows += [(compute / PS_PER_S, communication / PS_PER_S, result.cpu_s[rank]) for rank in group.ranks]
    return rows
