"""Calibrate the accelerators of this host: measure, fit the catalogue's device that they are, write a machine file.

Started by hand it launches one process per device; under torchrun (one machine or several) it is one of them.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from costmodels import Machine
from costmodels.machine.catalogue import Device, device_names, load_device
from plans.errors import TwofoldError
from plans.plan import save_plan
from twofold.probe_plans import dispatch_plans, rule_plans

if TYPE_CHECKING:
    from costmodels.fit.device import DeviceFit

__all__ = ["AcceleratorCalibration", "base_device", "calibrate_accelerators", "fit_points"]

SPARE_S = 90.0
"""Beyond the budget: starting the processes, the first kernels, a point that takes long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorCalibration:
    """A calibrated machine, how well its forms explain the points, and where those are."""

    machine: Machine
    fit: DeviceFit
    points: Path


def calibrate_accelerators(
    num_ranks: int,
    *,
    kind: str,
    device_name: str,
    memory_bytes: int,
    points: str | os.PathLike[str],
    name: str | None = None,
    out: str | os.PathLike[str] | None = None,
    base: str | None = None,
    minutes: float | None = None,
    quick: bool = False,
    log_dir: str | os.PathLike[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> AcceleratorCalibration | None:
    """Measure `num_ranks` accelerators and fit the machine that they are.

    Args:
        num_ranks: devices to measure together, one process each.
        kind: "cuda" or "npu" ("cpu" runs the same measurements for tests; there is nothing to fit them to).
        device_name: what the driver calls the device; it finds the entry of the catalogue.
        memory_bytes: of a device.
        points: file of JSON lines that points are appended to; what it holds already is not measured again.
        name: of the machine; that of the catalogue's device and the number of ranks when None.
        out: path of the machine file, replaced only when all went well; none is written when None.
        base: device of the catalogue whose peaks and links are taken where nothing is measured.
        minutes: of measuring; under 5 when None.
        quick: only what tells most, in under a minute.
        log_dir: where the ranks' output goes; a temporary folder when None.
        on_progress: called with a line now and then.

    Returns:
        What was found; None on the other ranks under torchrun.

    Raises:
        TwofoldError: a device that is not in the catalogue (before anything is measured), too few points to fit;
            `executor.launch.launch.RankFailed` when a rank fails. The points that were measured are kept.
    """
    origin = base_device(device_name, memory_bytes, base)
    options = [str(points), "--device", kind]
    options += ["--minutes", f"{minutes:g}"] if minutes else []
    options += ["--quick"] if quick else []
    with tempfile.TemporaryDirectory(prefix="twofold-") as temporary:
        folder = Path(temporary)
        plans = [save_plan(plan, folder / f"{name}.json") for name, plan in dispatch_plans(num_ranks).items()]
        alone = [save_plan(plan, folder / f"{name}.json") for name, plan in rule_plans().items()]
        options += ["--plans", *map(str, plans), "--rule-plans", *map(str, alone)]
        if "RANK" in os.environ:
            from executor.calibrate.main import main

            if main(options):
                raise TwofoldError("the measurements did not end well; see above")
            if os.environ["RANK"] != "0":
                return None
        else:
            from executor.launch.launch import Follow, launch

            budget_s = 60.0 * (minutes or (1.0 if quick else 5.0)) + SPARE_S
            say = on_progress or (lambda line: None)
            launch(
                "executor.calibrate.main", num_ranks=num_ranks, args=options, log_dir=log_dir or folder / "log_output",
                follow=Follow(lambda rank, line: say(line), rank=0), timeout_s=budget_s,
            )  # fmt: skip
    return fit_points(points, origin, num_ranks, name=name, out=out)


def fit_points(
    points: str | os.PathLike[str],
    base: Device,
    num_ranks: int,
    *,
    name: str | None = None,
    out: str | os.PathLike[str] | None = None,
) -> AcceleratorCalibration:
    """The machine of `num_ranks` devices that a file of points was measured on.

    Raises:
        TwofoldError: a file that cannot be read, too few points to fit.
    """
    from costmodels.fit.device import fit_device
    from costmodels.fit.points import load_points

    found, environment = load_points(points)
    fit = fit_device(found, environment, base)
    machine = fit.device.machine(num_ranks)
    if name is not None:
        machine = msgspec.structs.replace(machine, name=name)
    if out is not None:
        machine.save(out)
    return AcceleratorCalibration(machine=machine, fit=fit, points=Path(points))


def base_device(device_name: str, memory_bytes: int, stated: str | None = None) -> Device:
    """The device of the catalogue that a driver's name means; of several variants the one nearest in memory.

    Raises:
        TwofoldError: there is none.

    >>> base_device("NVIDIA H100 80GB HBM3", 85_000_000_000).name
    'h100-sxm'
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
    return min(map(load_device, fitting), key=lambda device: abs(device.memory_bytes - memory_bytes))


def spoken(fit: DeviceFit) -> Sequence[str]:
    """Lines that say how well the forms explain the points, and those held out."""
    lines = [f"fitted {line}" for line in map(str, fit.residuals)]
    return [*lines, *(f"held out {line}" for line in map(str, fit.held_out))]
