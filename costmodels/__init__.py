"""Seconds and bytes of every instruction on a machine (floor 2).

Machine files, the models that turn shapes into time and memory, and the fitting of those models to measurements.
Every number says where it comes from: measured, interpolated, assumed or cited.

It imports `plans` only.
"""

from costmodels.machine import Machine, shipped_machines
from costmodels.price import Cost, price

__all__ = ["Cost", "Machine", "price", "shipped_machines"]
