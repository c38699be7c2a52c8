"""Seconds and bytes of every instruction on a machine (floor 2).

`machine` is the machine file, `price` turns an instruction into picoseconds, `traffic` knows the algorithms of the
communication libraries. `points` are raw measurements; `fit` and `cpu` make a machine of them, `probe` sets its overall
factor and interval from programs that were run and simulated. Shipped machines are in `machines/`.

Every number says where it comes from: measured, interpolated, assumed or cited.

It imports `plans` only.
"""

from costmodels.cpu import Calibration, fit_cpu_machine
from costmodels.machine import Machine, shipped_machines
from costmodels.points import Point, load_points, save_points
from costmodels.price import Cost, price, price_step, price_transfer
from costmodels.probe import ProbeFit, fit_probe, with_probe

__all__ = [
    "Calibration",
    "Cost",
    "Machine",
    "Point",
    "ProbeFit",
    "fit_cpu_machine",
    "fit_probe",
    "load_points",
    "price",
    "price_step",
    "price_transfer",
    "save_points",
    "shipped_machines",
    "with_probe",
]
