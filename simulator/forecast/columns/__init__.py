"""Pipelines at speed: a schedule as a graph of events, evaluated level by level for whole batches of configurations.

Equal to the event engine to the picosecond where nothing is contended.
"""

from simulator.forecast.clock_map import NEVER, MaxPlus, Times, latest
from simulator.forecast.columns.costs import PipelineCosts
from simulator.forecast.columns.times import ActionTimes, PipelineTimes, action_times, pipeline_times

__all__ = [
    "NEVER", "ActionTimes", "MaxPlus", "PipelineCosts", "PipelineTimes", "Times", "action_times", "latest",
    "pipeline_times",
]  # fmt: skip
