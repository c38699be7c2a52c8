"""A program in virtual time (floor 3).

`simulate` predicts a plan on a machine, maybe with a `WhatIf`; `outcome` adds what checkpoints and failures cost;
`check_program` refuses before that what cannot be carried out. `run_program` is the reference engine, with SimPy under
it, for any prices: hosts, compute and communication streams, shared cores, devices and links. `memory_timeline`,
`memory_peak` and `peak_of_order` follow the memory, `composition` says what a step consists of, `critical_path` what
determines its end. Inside, time is integer picoseconds, so that engines and closed forms agree exactly. It imports
`plans` and `costmodels` only.
"""

from simulator.analysis import Composition, composition
from simulator.check import check_program
from simulator.critical_path import CriticalPath, critical_path
from simulator.engine import run_program
from simulator.goodput import Checkpoints, Failures, Goodput, goodput
from simulator.jobs import Job, simulate_jobs
from simulator.link_change import LinkChange
from simulator.memory import memory_timeline, peak_of_order
from simulator.peak import LiveValue, Peak, memory_peak
from simulator.predict import Outcome, outcome, outcome_of, simulate
from simulator.whatif import WhatIf

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
