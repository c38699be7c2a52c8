"""A plan with what the simulator says of it."""

from __future__ import annotations

import msgspec

from costmodels import Machine
from plans.plan import Plan, Prediction
from simulator import simulate

__all__ = ["predicted"]


def predicted(plan: Plan, machine: Machine) -> Plan:
    """The same plan with its simulated step time, interval and peak memory on `machine`."""
    timeline = simulate(plan, machine)
    prediction = Prediction(
        machine=machine.name, step_s=timeline.step_interval_s, peak_bytes=timeline.peak_bytes,
        low_s=timeline.low_s, high_s=timeline.high_s,
    )  # fmt: skip
    return msgspec.structs.replace(plan, prediction=prediction)
