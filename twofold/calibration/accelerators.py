"""Calibrates the accelerators of this host: measures them, fits a device of the catalogue, and writes a machine file.

Started directly, it launches one process per device. Under torchrun, on one or several hosts, it is one of these
processes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from costmodels import Machine
from costmodels.machine.catalogue import Device, device_names, load_device
from executor.launch.nodes import ONE_NODE, Nodes, refusing
from executor.launch.temporary import temporary_folder
from plans.errors import TwofoldError
from plans.plan import save_plan
from twofold.calibration.probe_plans import dispatch_plans, rule_plans

if TYPE_CHECKING:
    from costmodels.fit.device import DeviceFit
    from executor.device import Device as ExecutorDevice
    from executor.launch.launch import Follow

__all__ = [
    "AcceleratorCalibration",
    "CalibrationRequest",
    "base_device",
    "calibrate_accelerators",
    "fit_points",
    "residual_lines",
]

SPARE_S = 90.0
"""Time beyond the budget: starting the processes, the first kernels, a slow point."""

MINUTES = 5.0
QUICK_MINUTES = 1.0


def ignore(line: str) -> None:
    """Print no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What to calibrate, and where the results go.

    Args:
        num_ranks: number of devices (gloo ranks on a CPU) to measure together, one process each.
        points: file of JSON lines to which points are appended; points that it already has are not measured again. None
            uses a temporary file.
        name: name of the machine; by default the catalogue's device and the number of ranks.
        out: path of the machine file, replaced only on success; None writes no file.
        minutes: measuring time; None uses the default.
        quick: measure only the most informative points.
        log_dir: folder for the output of the ranks; None uses a temporary folder.
        timeout_s: time limit of the launch; None uses the measuring time and some minutes.
        nodes: machines of the ranks. Node 0 keeps the points and fits them.
        say: called with a line of progress now and then.
    """

    num_ranks: int
    points: Path | None = None
    name: str | None = None
    out: str | os.PathLike[str] | None = None
    minutes: float | None = None
    quick: bool = False
    log_dir: str | os.PathLike[str] | None = None
    timeout_s: float | None = None
    nodes: Nodes = ONE_NODE
    say: Callable[[str], None] = ignore

    def followed(self, worded: Callable[[str], str] = str) -> Follow | None:
        """Follows the progress of rank 0 and reports it as text; None on nodes other than 0."""
        from executor.launch.launch import Follow

        return None if self.nodes.node_rank else Follow(lambda rank, line: self.say(worded(line)), rank=0)

    def met_by(self, device: str) -> Nodes:
        """The nodes as the launcher takes them: all must measure the same."""
        budget = "the usual" if self.minutes is None else f"{self.minutes:g}"
        return replace(self.nodes, facts={"device": device, "minutes": budget, "quick": str(self.quick)})


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorCalibration:
    """A calibrated machine, the quality of its fit, and the file of measured points."""

    machine: Machine
    fit: DeviceFit
    points: Path


def calibrate_accelerators(
    request: CalibrationRequest, points: Path, device: ExecutorDevice, *, base: str | None = None
) -> AcceleratorCalibration | None:
    """Measure the accelerators of this host, or of several nodes, and fit a machine to them.

    Args:
        request: what to measure.
        points: its file of points; not used on nodes other than 0.
        device: one of the devices; its driver name selects the entry of the catalogue.
        base: device of the catalogue that supplies peaks and links that are not measured.

    Returns:
        The calibration; None on other nodes, and on other ranks under torchrun.

    Raises:
        TwofoldError: no device, or one that is not in the catalogue (before anything is measured), too few points to
            fit; `executor.launch.launch.RankFailed` when a rank fails. Measured points are kept.
    """
    with refusing(request.nodes):
        if request.num_ranks < 1:
            raise TwofoldError(f"cannot measure {request.num_ranks} devices; give at least 1")
        origin = base_device(device.name, device.memory_bytes()[1], base)
    with temporary_folder() as temporary:
        folder = Path(temporary)
        points = folder / "points.jsonl" if request.nodes.node_rank else points
        arguments = _rank_arguments(request, points, device.kind, folder)
        if "RANK" in os.environ:
            from executor.calibrate.main import main

            if main(arguments):
                raise TwofoldError("the measurements failed; see above")
            if os.environ["RANK"] != "0":
                return None
        else:
            from executor.launch.launch import launch

            budget_s = 60.0 * (request.minutes or (QUICK_MINUTES if request.quick else MINUTES)) + SPARE_S
            launch(
                "executor.calibrate.main:main", num_ranks=request.num_ranks, args=arguments,
                log_dir=request.log_dir or folder / "log_output", timeout_s=request.timeout_s or budget_s,
                follow=request.followed(), nodes=request.met_by(device.kind),
            )  # fmt: skip
            if request.nodes.node_rank:
                return None
    return fit_points(points, origin, request.num_ranks, name=request.name, out=request.out)


def _rank_arguments(request: CalibrationRequest, points: Path, kind: str, folder: Path) -> list[str]:
    """Arguments of every rank; the plans that it times are written to files in `folder`."""
    arguments = [str(points), "--device", kind]
    arguments += ["--minutes", f"{request.minutes:g}"] if request.minutes else []
    arguments += ["--quick"] if request.quick else []
    for flag, plans in (("--plans", dispatch_plans(request.num_ranks)), ("--rule-plans", rule_plans())):
        files = [save_plan(plan, folder / f"{name}.json") for name, plan in plans.items()]
        arguments += [flag, *map(str, files)]
    return arguments


def fit_points(
    points: str | os.PathLike[str],
    base: Device,
    num_ranks: int,
    *,
    name: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> AcceleratorCalibration:
    """The machine of `num_ranks` devices fitted to a file of points.

    Raises:
        TwofoldError: a file that cannot be read, too few points to fit.
    """
    from costmodels.fit.device import fit_device
    from costmodels.fit.points import load_points

    measured, environment = load_points(points)
    fit = fit_device(measured, environment, base)
    machine = Machine.of_device(fit.device, num_ranks)
    if name is not None:
        machine = msgspec.structs.replace(machine, name=name)
    if out is not None:
        machine.save(out)
    return AcceleratorCalibration(machine=machine, fit=fit, points=Path(points))


def base_device(device_name: str, memory_bytes: int, stated: str | None = None) -> Device:
    """The device of the catalogue with this driver name; of several variants the one with the closest memory size.

    Drivers name PCIe and NVL cards as such, but no other variants.

    Raises:
        TwofoldError: there is none.

    >>> base_device("NVIDIA H100 80GB HBM3", 85_000_000_000).name
    'h100-sxm'
    >>> base_device("NVIDIA H100 PCIe", 85_000_000_000).name
    'h100-pcie'
    >>> base_device("Ascend910B2", 65_000_000_000).name
    'ascend-910b2'
    """
    if stated is not None:
        return load_device(stated)
    words = {word for word in re.split(r"[^a-z0-9]+", device_name.lower()) if word}
    fitting = [name for name in device_names() if name.split("-")[0] in words or name.replace("-", "") in words]
    if not fitting:
        raise TwofoldError(
            f"device {device_name!r} is not in the catalogue ({', '.join(device_names())}); name the one whose "
            "peaks and links to start from with --base"
        )
    cards = {"pcie", "nvl"}
    fitting = [name for name in fitting if cards & set(name.split("-")) == cards & words] or fitting
    return min(map(load_device, fitting), key=lambda device: abs(device.memory_bytes - memory_bytes))


def residual_lines(fit: DeviceFit) -> tuple[str, ...]:
    """The residuals of fitted and of held-out points, one line per section."""
    fitted, held_out = (f"fitted {entry}" for entry in fit.residuals), (f"held out {entry}" for entry in fit.held_out)
    return (*fitted, *held_out)
