"""Calibrate this machine; a machine file comes out.

On a CPU micro-benchmarks and then probe programs run in one launch; accelerators are measured by `executor.calibrate`
(`twofold.accelerators`).
"""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels import Machine, price
from plans.errors import TwofoldError
from plans.lower import lower
from plans.plan import save_plan
from plans.program import Kind
from plans.timeline import PS_PER_S
from simulator import simulate
from twofold.probes import probe_plans
from twofold.running import RunResult, read_result

if TYPE_CHECKING:
    from costmodels.fit_device import DeviceFit

__all__ = ["CalibrationResult", "ProbeOutcome", "calibrate", "calibrate_cpu"]

PROBE_STEPS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOutcome:
    """A probe program: what was predicted before the overall factor, and what was measured."""

    name: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibrated machine, how well its forms explain the micro-benchmarks, and the probes behind its interval.

    Of accelerators it has no probes, but the file of points and the fit, for the calibration report.
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
        points: accelerators: file of JSON lines that points are appended to as they are measured; what is there already
            is not measured again. Beside `out` when None.
        base: accelerators: device of the catalogue whose peaks and links are taken where nothing is measured.
        minutes: accelerators: of measuring, under 5 when None.
        quick: accelerators: only what tells most, in under a minute.
        log_dir: where the ranks' output goes; a temporary folder when None.
        on_progress: called with a line now and then.

    Returns:
        What was found; None on ranks other than 0 under torchrun.

    Raises:
        TwofoldError: fewer than 2 ranks on a CPU, a device that is not there or not in the catalogue;
            `executor.launch.RankFailed` when a rank fails.
    """
    from executor.device import num_accelerators, pick_device

    found = pick_device(device)
    if not found.is_async:
        if points or base or minutes or quick:
            raise TwofoldError("points, base, minutes and quick are for accelerators; a CPU takes under a minute")
        return calibrate_cpu(
            8 if num_ranks is None else num_ranks, name=name or "this-cpu", out=out, log_dir=log_dir,
            on_progress=on_progress,
        )  # fmt: skip
    from twofold.accelerators import calibrate_accelerators, spoken

    ranks = int(os.environ.get("WORLD_SIZE", num_ranks or num_accelerators()))
    beside = Path(out).with_suffix(".points.jsonl") if out is not None else Path("calibration.points.jsonl")
    result = calibrate_accelerators(
        ranks, kind=found.kind, device_name=found.name, memory_bytes=found.memory_bytes()[1], points=points or beside,
        name=name, out=out, base=base, minutes=minutes, quick=quick, log_dir=log_dir, on_progress=on_progress,
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
    log_dir: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> CalibrationResult:
    """`calibrate` for the CPU, also where this host has accelerators.

    Raises:
        TwofoldError: fewer than 2 ranks; `executor.launch.RankFailed` when a rank fails.
    """
    if num_ranks < 2:
        raise TwofoldError(f"{num_ranks} rank has nobody to talk to; calibrate with at least 2")
    from costmodels.cpu import fit_cpu_machine
    from costmodels.points import load_points
    from costmodels.probe import fit_probe, fit_processor, with_probe, with_processor
    from executor.job import Job, Task, save_job
    from executor.launch import launch

    say = on_progress or (lambda line: None)
    with tempfile.TemporaryDirectory(prefix="twofold-") as temporary:
        folder = Path(temporary)
        plans = probe_plans(num_ranks, Machine.load("h200-x8"))
        tasks = []
        for number, plan in enumerate(plans):
            place = folder / f"probe{number}"
            save_plan(plan, place / "plan.json")
            tasks.append(Task(plan=str(place / "plan.json"), out=str(place), steps=PROBE_STEPS, count=False))
        job = Job(tasks=tuple(tasks), measure=str(folder / "points.json"), device="cpu")
        path = save_job(job, folder / "job.json")
        launch(
            "executor.job_main", num_ranks=num_ranks, args=[str(path)], log_dir=log_dir or folder / "log_output",
            stream_rank=0,
            on_line=lambda rank, line: say(line.replace(str(folder), "").replace("task done: /", "ran ")),
        )  # fmt: skip
        points, environment = load_points(folder / "points.json")
        fitted = fit_cpu_machine(points, environment, name=name)
        runs = [read_result(plan, folder / f"probe{number}", folder, 0.0) for number, plan in enumerate(plans)]
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
        machine = with_probe(machine, fit, date=today)
    if out is not None:
        machine.save(out)
    said = (
        f"processor time of probe programs: computing x {processor.compute:.2f}, communication x "
        f"{processor.communication:.2f} of the micro-benchmarks, median misfit {processor.spread:.0%}"
    )
    return CalibrationResult(machine=machine, residuals=(*map(str, fitted.residuals), said), probes=tuple(outcomes))


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
