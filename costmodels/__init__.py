"""Time and memory of every instruction on a machine (floor 2).

`machine` reads and writes machine files and makes machines from the catalogue. `price` turns an instruction into
picoseconds. `fit` makes a machine file from measured points. `interval` computes the interval of a step from the
uncertainty of its instructions, and `widths` has its figures.

Every number has a status and a source: measured, interpolated, assumed or cited. The package imports `plans` only.
"""

from costmodels.fit.cpu import Calibration, fit_cpu_machine
from costmodels.fit.points import Point, load_points, save_points
from costmodels.fit.probe import ProbeFit, fit_probe, with_probe
from costmodels.interval import price_interval, step_interval
from costmodels.machine.machine import Machine, shipped_machines
from costmodels.price.group import Group, axes_group, mesh_group, ranks_group
from costmodels.price.instruction import (
    Cost,
    overlap_class,
    price,
    price_collective,
    price_compute,
    price_exchange,
    price_step,
    price_transfer,
    price_wait,
)
from costmodels.price.replay import executing

__all__ = [
    "Calibration",
    "Cost",
    "Group",
    "Machine",
    "Point",
    "ProbeFit",
    "axes_group",
    "executing",
    "fit_cpu_machine",
    "fit_probe",
    "load_points",
    "mesh_group",
    "overlap_class",
    "price",
    "price_collective",
    "price_compute",
    "price_exchange",
    "price_interval",
    "price_step",
    "price_transfer",
    "price_wait",
    "ranks_group",
    "save_points",
    "shipped_machines",
    "step_interval",
    "with_probe",
]
