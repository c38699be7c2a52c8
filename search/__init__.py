"""The double recursive search: over devices (meshes), over the graph (exact elimination), ranked by simulation.

* `space`: meshes of a stage's ranks and strategies of an operator.
* `additive`: cost tables of a stage, priced from the instructions that lowering would write.
* `eliminate`: the exact minimum of a sum of tables.
* `pricing`: seconds of one instruction.
* `stages`: stage boundaries. `planset`: the answer and its explanation. `search`: all of it together.
* `pinned`: strategies given by the user, and what they suggest for the operators around them.
* `uniform`: a plan stated in data-, tensor- and pipeline-parallel degrees.
"""

from search.planset import Alternative, PlanSet, Rejected
from search.search import search
from search.uniform import uniform_plan

__all__ = ["Alternative", "PlanSet", "Rejected", "search", "uniform_plan"]
