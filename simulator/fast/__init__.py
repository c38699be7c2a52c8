"""The fast evaluator: what the reference engine says without contention, from columns instead of events.

* `MaxPlus`: what a sequence of instructions does to the clocks of a rank; sequences are joined and repeated.
* `pipeline_times`: whole batches of pipelines, from the maps of their actions.
* `action_times`: every action of one pipeline.

All of it is integer picoseconds and equal to `simulator.run_program`, not close. It imports `plans` only.
"""

from simulator.fast.costs import PipelineCosts
from simulator.fast.maxplus import NEVER, MaxPlus
from simulator.fast.pipeline import ActionTimes, PipelineTimes, action_times, pipeline_times

__all__ = [
    "NEVER", "ActionTimes", "MaxPlus", "PipelineCosts", "PipelineTimes", "action_times", "pipeline_times",
]  # fmt: skip
