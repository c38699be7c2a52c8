"""A program in virtual time (floor 3).

`simulate` predicts a plan on a machine. `run_program` is the reference engine, with SimPy under it, for any prices:
hosts, compute and communication streams, shared cores, devices and links. `memory_timeline` and `peak_of_order` follow
the memory, `composition` says what a step consists of. Inside, time is integer picoseconds, so that engines and closed
forms agree exactly. It imports `plans` and `costmodels` only.
"""

from simulator.analysis import Composition, composition
from simulator.engine import run_program
from simulator.memory import memory_timeline, peak_of_order
from simulator.predict import simulate

__all__ = ["Composition", "composition", "memory_timeline", "peak_of_order", "run_program", "simulate"]
