"""Calibrates this machine and writes its machine file.

On a CPU, micro-benchmarks and then probe programs run in one launch. Accelerators are measured by `executor.calibrate`
(`twofold.calibration.accelerators`).
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels import Machine, price
from executor.launch.nodes import ONE_NODE, Nodes, refusing
from executor.launch.run_plan import RunResult, read_result
from executor.launch.temporary import temporary_folder
from plans.errors import TwofoldError
from plans.files import check_writable
from plans.lower import lower
from plans.plan import Plan, save_plan
from plans.program import Kind
from plans.timeline import PS_PER_S
from simulator import simulate
from twofold.calibration.accelerators import CalibrationRequest, calibrate_accelerators, ignore, residual_lines
from twofold.calibration.probe_plans import probe_plans

if TYPE_CHECKING:
    from costmodels.fit.device import DeviceFit

__all__ = ["CalibrationResult", "ProbeOutcome", "calibrate", "calibrate_cpu", "write_report"]

CPU_RANKS = 8
PROBE_STEPS = 24
MORE_PROBE_STEPS = 48
QUICK_S = 8.0
"""Minutes of micro-benchmarks on a CPU; the probe programs take about twice as long."""

MINUTES = 2.0
"""Default minutes for micro-benchmarks on a CPU."""

SPARE_S = 240.0
"""Time beyond that: starting the ranks, probe programs, a busy machine."""

RESULTS_S = 30.0
"""How long rank 0 waits for the results of the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """The predicted time of a probe program, before the overall factor, and its measured time."""

    name: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibrated machine, the quality of its fit, and the probe programs behind its interval.

    For accelerators it has the fit instead of probes. `points` is the file of measured points, or None if it was
    temporary.
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
    timeout_s: float | None = None,
    nodes: Nodes = ONE_NODE,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrationResult | None:
    """Measure this machine, fit its model and write the machine file.

    Args:
        num_ranks: devices to measure together, of all nodes. By default, on each node all accelerators, or 8 gloo ranks
            on a CPU.
        device: "auto", "cpu", "cuda" or "npu".
        name: name of the machine; by default "this-cpu", or the catalogue's device and the number of ranks.
        out: path of the machine file, replaced only on success; None writes no file.
        points: file of JSON lines to which points are appended; points that it already has are not measured again
            (probe programs are). By default next to `out`; on a CPU without `out` it is temporary.
        base: for accelerators: device of the catalogue that supplies peaks and links that are not measured.
        minutes: measuring time; under 5 by default.
        quick: measure only the most informative points, in under a minute.
        log_dir: folder for the output of the ranks; None uses a temporary folder.
        timeout_s: time limit of the launch; by default the measuring time and some minutes.
        nodes: machines to measure; call it on each with the same arguments except `node_rank`. Node 0 keeps the points
            and writes the machine file; the nodes need no common folder.
        on_progress: called with lines of progress.

    Returns:
        The calibration; None on nodes other than 0, and on ranks other than 0 under torchrun.

    Raises:
        TwofoldError: fewer than 2 ranks on a CPU, a missing or unknown device, no measuring time, files that cannot be
            written (all before anything is measured); `RankFailed` when a rank fails.

    >>> calibrate(8, device="cpu", out="machine.json", quick=True)  # doctest: +SKIP
    """
    from executor.device import num_accelerators, pick_device

    with refusing(nodes):
        if minutes is not None and not 0 < minutes < math.inf:
            raise TwofoldError(f"--minutes must be positive, not {minutes:g}; omit it for the usual time")
        if nodes.node_rank:
            out = points = None
        for file in (out, points):
            if file is not None:
                check_writable(file, replaces=file is out)
        own = pick_device(device)
        if base is not None and not own.is_async:
            raise TwofoldError("base is for accelerators; the peaks of a CPU are measured")
        beside = Path(out).with_suffix(".points.jsonl") if out is not None else None
        if own.is_async and beside is None:
            beside = Path("calibration.points.jsonl")
        kept = Path(points) if points is not None else beside
        usual_ranks = num_accelerators() if own.is_async else CPU_RANKS
    request = CalibrationRequest(
        num_ranks=usual_ranks * nodes.num_nodes if num_ranks is None else num_ranks, points=kept, name=name, out=out,
        minutes=minutes, quick=quick, log_dir=log_dir, timeout_s=timeout_s, nodes=nodes, say=on_progress or ignore,
    )  # fmt: skip
    if "WORLD_SIZE" in os.environ:
        request = replace(request, num_ranks=int(os.environ["WORLD_SIZE"]))
    with _with_hint_to_resume(kept):
        if not own.is_async:
            return calibrate_cpu(request)
        assert kept is not None
        if not nodes.node_rank:
            with refusing(nodes):
                _check_points(kept, {"device": own.kind})
        result = calibrate_accelerators(request, kept, own, base=base)
    if result is None:
        return None
    return CalibrationResult(
        machine=result.machine, residuals=residual_lines(result.fit), points=result.points, fit=result.fit
    )  # fmt: skip


def calibrate_cpu(request: CalibrationRequest) -> CalibrationResult | None:
    """Calibrate the CPU, even if this host has accelerators.

    Args:
        request: what to measure. Probe programs run in addition to its minutes.

    Returns:
        The calibration; None on nodes other than 0, and on ranks other than 0 under torchrun.

    Raises:
        TwofoldError: fewer than 2 ranks, points of another machine; `RankFailed` when a rank
            fails, `RunTimedOut` when time is up. Measured points are kept.
    """
    from executor.calibrate.cpu import environment

    points = request.points
    with temporary_folder() as temporary:
        is_joined = "RANK" in os.environ
        here = os.environ.get("GROUP_RANK", "0")
        folder = Path(f"{points}.node{here}") if is_joined and points is not None else Path(temporary)
        log = folder / "points.jsonl" if points is None else points.absolute()
        with refusing(request.nodes):
            if request.num_ranks < 2:
                raise TwofoldError(f"calibration needs at least 2 ranks, not {request.num_ranks}")
            plans = probe_plans(request.num_ranks, Machine.load("h200-x8"))
            _check_points(log, environment() | {"device": "cpu"})
        probes = [folder / f"probe{number}" for number in range(len(plans))]
        _measure_and_probe(request, log, dict(zip(probes, plans, strict=True)), folder)
        if request.nodes.node_rank or (is_joined and os.environ["LOCAL_RANK"] != "0"):
            return None
        if is_joined:
            _wait_for([probe / f"rank.{rank}.npz" for probe in probes for rank in range(request.num_ranks)])
        runs = [read_result(plan, probe, folder, 0.0) for plan, probe in zip(plans, probes, strict=True)]
        if is_joined:
            shutil.rmtree(folder)
            if os.environ["RANK"] != "0":
                return None
        result = _fit_cpu(log, runs, request.name or "this-cpu")
    if request.out is not None:
        result.machine.save(request.out)
    return replace(result, points=None if points is None else log)


def _measure_and_probe(request: CalibrationRequest, log: Path, probes: Mapping[Path, Plan], folder: Path) -> None:
    """Run the micro-benchmarks (into `log`) and the probe programs (into their folders) in one launch."""
    from executor.launch.job import Job, Task, save_job

    steps = PROBE_STEPS if request.quick else MORE_PROBE_STEPS
    measure_s = QUICK_S if request.quick else 60.0 * (MINUTES if request.minutes is None else request.minutes)
    with refusing(request.nodes):
        tasks = [
            Task(plan=str(save_plan(plan, probe / "plan.json")), out=str(probe), steps=steps, count=False)
            for probe, plan in probes.items()
        ]
        job = Job(tasks=tuple(tasks), measure=str(log), measure_s=measure_s, thorough=not request.quick, device="cpu")
        path = save_job(job, folder / "job.json")
    if "RANK" in os.environ:
        from executor.launch.job_main import main

        main([str(path)])
        return
    from executor.launch.launch import launch

    request.say(f"starting {request.num_ranks} ranks")  # on a busy computer that takes longer than the first points
    launch(
        "executor.launch.job_main:main", num_ranks=request.num_ranks, args=[str(path)],
        log_dir=request.log_dir or folder / "log_output", timeout_s=request.timeout_s or measure_s + SPARE_S,
        follow=request.followed(lambda line: _in_words(line, len(probes))), nodes=request.met_by("cpu"),
    )  # fmt: skip


def write_report(result: CalibrationResult, path: str | os.PathLike[str]) -> Path:
    """Write the calibration report, HTML.

    Raises:
        TwofoldError: the points of a CPU were temporary.
    """
    from costmodels.fit.points import load_points
    from reports.calibration import CalibrationReport, calibration_page

    if result.fit is not None:
        return calibration_page(CalibrationReport.of_device(result.fit)).write(path)
    if result.points is None:
        raise TwofoldError("the points were not kept; name a file of points to get a report")
    points, _ = load_points(result.points)
    report = CalibrationReport(
        machine=result.machine, points=points, residuals=result.residuals, probes=result.probes
    )  # fmt: skip
    return calibration_page(report).write(path)


@contextlib.contextmanager
def _with_hint_to_resume(points: str | os.PathLike[str] | None) -> Iterator[None]:
    """Re-raise an interrupt with a message about the points on disk."""
    try:
        yield
    except KeyboardInterrupt:
        if points is None:
            raise
        from costmodels.fit.points import PointLog

        count, path = len(PointLog(points).points), os.fspath(points)
        raise KeyboardInterrupt(f"{count} points are kept in {path!r}; run the same command again to resume") from None


def _check_points(path: Path, environment: Mapping[str, str]) -> None:
    """Refuse points that cannot be continued here, before any rank is started."""
    from costmodels.fit.points import PointLog
    from executor.calibrate.resume import check_same

    if path.suffix != ".jsonl":
        raise TwofoldError(f"the points go to a file of JSON lines, such as points.jsonl, not {path.name!r}")
    if os.environ.get("RANK", "0") == "0":  # it alone keeps points
        check_same(PointLog(path), environment)


def _in_words(line: str, num_probes: int) -> str:
    """A rank's progress line for the user: number of the probe program instead of file names."""
    done = re.fullmatch(r"task done: .*probe(\d+)", line)
    return line if done is None else f"ran probe program {int(done[1]) + 1} of {num_probes}"


def _wait_for(files: Sequence[Path]) -> None:
    """Wait until all files exist: other ranks may still be writing them."""
    start = time.monotonic()
    while missing := [file for file in files if not file.exists()]:
        if time.monotonic() - start > RESULTS_S:
            raise TwofoldError(f"{str(missing[0])!r} is missing after {RESULTS_S:g} s; run the same command again")
        time.sleep(0.05)


def _fit_cpu(points: Path, runs: Sequence[RunResult], name: str) -> CalibrationResult:
    """Fit a machine to micro-benchmarks and probe programs."""
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
    processor_line = (
        f"processor time of probe programs: computing x {processor.compute:.2f}, communication x "
        f"{processor.communication:.2f} of the micro-benchmarks, median misfit {processor.spread:.0%}"
    )
    return CalibrationResult(
        machine=with_probe(machine, fit, date=today), residuals=(*map(str, fitted.residuals), processor_line),
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
