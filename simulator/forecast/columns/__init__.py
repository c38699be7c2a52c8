"""Fast evaluation of pipelines: a schedule is a graph of events, evaluated level by level for batches of
configurations.

Without contention the result equals the event engine to the picosecond.
"""

from simulator.forecast.clock_map import NEVER, MaxPlus, Times, latest
from simulator.forecast.columns.costs import PipelineCosts
from simulator.forecast.columns.times import ActionTimes, PipelineTimes, action_times, pipeline_times

__all__ = [
    "NEVER", "ActionTimes", "MaxPlus", "PipelineCosts", "PipelineTimes", "Times", "action_times", "latest",
    "pipeline_times",
]  # fmt: skip
