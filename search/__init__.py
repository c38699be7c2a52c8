"""The double recursive search: over devices (meshes), over the graph (exact elimination), ranked by simulation.

* `space`: meshes of a stage's ranks and strategies of an operator. `stage`: one stage on all of its meshes.
* `additive`: cost tables of a stage. `operator_costs`: seconds of one operator, from the instructions lowering would
  write. `cost_keys`: which of them are equal. `tensor_costs`, `handed`: what is handed on. `moves`: between layouts.
* `eliminate`: the exact minimum of a sum of tables. `refine`: with few redistributions priced. `pricing`: seconds.
* `shapes`: stages, widths, micro-batches. `shape_costs`, `ranking`: which are worth a simulation. `stages`: balanced
  boundaries. `plan_search`: plans simulated and ranked.
* `result`: what a search returns. `physics`: what nothing can beat. `request`: what is refused.
  `search`: all of it together.
* `pinned`: strategies given by the user, and the strategies that they imply for neighbouring operators.
* `uniform`: a plan stated in data-, tensor- and pipeline-parallel degrees.
"""

from search.result import Alternative, NothingFits, Rejected, SearchResult
from search.search import search
from search.uniform import uniform_plan

__all__ = ["Alternative", "NothingFits", "Rejected", "SearchResult", "search", "uniform_plan"]
