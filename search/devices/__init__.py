"""The search of large models on large clusters (part of floor 4): degrees instead of single operators.

* `problem`: what is asked, and what is fixed. `space`: every configuration that sizes allow.
* `costs`, `bounds`, `footing`: what pieces cost; lower bounds on time; memory of many spreads of the layers at once.
* `branch`: branch and bound, best first. `solve`: all of it as one call. `answer`: what it returns.
* `explain`: neighbours of the best; what would have to give where nothing fits. `baselines`: what one would do without.
* `statement`, `megatron`, `torchtitan`, `placements`: configurations as files, also in other programs' words.
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
