"""Operators that a model writes in parts, as the one operator that they are.

A module may spell out a norm as a square, a mean and a product, or turn queries and keys by products of their halves.
The executor has one kernel for each, layouts split one operator instead of many, and a graph so written looks like that
of the same model by name. `whole_operators` finds them by what is computed; names of modules do not matter.

* `rewrite`: rules applied to a graph. `norms`, `rotations`, `heads`: the rules.
"""

from plans.model.graph import Graph
from plans.model.whole.heads import HEAD_RULES
from plans.model.whole.norms import NORM_RULES
from plans.model.whole.rewrite import rewritten
from plans.model.whole.rotations import ROTATION_RULES

__all__ = ["whole_operators"]


def whole_operators(graph: Graph) -> Graph:
    """The graph with norms, rotary positions, attention and losses as one operator each.

    It computes the same function; in half precision a merged operator rounds once where its parts rounded each.
    """
    return rewritten(graph, (*NORM_RULES, *ROTATION_RULES, *HEAD_RULES))
