"""Runs programs in virtual time (floor 3).

`simulate` predicts a plan on a machine, optionally with a `WhatIf`; `outcome` adds the cost of checkpoints and
failures. `check_program` refuses programs that cannot run. `run_program` is the reference engine, built on SimPy, for
any prices: hosts, compute and communication streams, shared cores, devices and links. `memory_timeline`, `memory_peak`
and `peak_of_order` track memory, `composition` computes the parts of a step, and `critical_path` the chain of
instructions that determines its end. Internally, time is an integer number of picoseconds, so that engines and closed
forms agree exactly. The package imports `plans` and `costmodels` only.
"""

from simulator.engine.check import check_program
from simulator.engine.link_change import LinkChange
from simulator.engine.run import run_program
from simulator.predict import Outcome, outcome, outcome_of, simulate
from simulator.study.goodput import Checkpoints, Failures, Goodput, goodput
from simulator.study.jobs import Job, simulate_jobs
from simulator.study.whatif import WhatIf
from simulator.timeline.analysis import Composition, composition
from simulator.timeline.critical_path import CriticalPath, critical_path
from simulator.timeline.memory import memory_timeline, peak_of_order
from simulator.timeline.peak import LiveValue, Peak, memory_peak

__all__ = [
    "Checkpoints",
    "Composition",
    "CriticalPath",
    "Failures",
    "Goodput",
    "Job",
    "LinkChange",
    "LiveValue",
    "Outcome",
    "Peak",
    "WhatIf",
    "check_program",
    "composition",
    "critical_path",
    "goodput",
    "memory_peak",
    "memory_timeline",
    "outcome",
    "outcome_of",
    "peak_of_order",
    "run_program",
    "simulate",
    "simulate_jobs",
]
