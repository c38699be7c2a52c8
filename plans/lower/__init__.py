"""Lowering: a plan becomes the program of one training step.

* `emit`: instructions, values, redistribution steps and lazy waits.
* `choose`: the steps of redistributions: those that the plan stores, those of least bytes, or those of a price.
* `chunk`: one stage's forward and backward.
* `optimizer`: weight gathers, gradient reductions, updates.
* `slices`: a body written out for the slices of a micro-batch, communication of one during compute of the others.
* `liveness`: where each value is freed.
* `lower`: everything put in the order of the schedule.
"""

from plans.lower.lower import lower, lower_by, schedule_of
from plans.lower.redistribution_policy import Choice

__all__ = ["Choice", "lower", "lower_by", "schedule_of"]
