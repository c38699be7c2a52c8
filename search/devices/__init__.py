"""The search of large models on large clusters (part of floor 4): degrees instead of single operators.

* `problem`: the question and its pins. `space`: every configuration that the sizes allow.
* `stage_config`, `costs`: what the pieces of a model cost. `bounds`, `linear`: lower bounds on the step.
* `critical_paths`: longest paths of schedules. `least_memory`: what many schedules need at least.
* `peak_memory`: peak bytes of many layer splits at once. `schedule_space`, `axis_orders`: schedules and orders of axes.
* `branch`, `nodes`, `estimates`, `seeds`: branch and bound. `descent`: a quick search. `solve`: all as one call.
* `explain`: alternatives to the best; what would have to change where nothing fits. `baselines`: rules of thumb.
* `reasons`: what operators cost in several layouts (`operators`), and the critical path (`critical`).
* `result_json`: results as JSON values. `confirm`: the best in the event engine. `of_graph`: plans of a graph.
"""

from search.candidate import Candidate, describe
from search.devices.baselines import BASELINES, baseline
from search.devices.problem import Pins, Problem
from search.devices.solve import solve
from search.result import Alternative, NothingFits, Rejected, SearchResult

__all__ = [
    "BASELINES",
    "Alternative",
    "Candidate",
    "NothingFits",
    "Pins",
    "Problem",
    "Rejected",
    "SearchResult",
    "baseline",
    "describe",
    "solve",
]
