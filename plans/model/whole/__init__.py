"""Recognition of operators that a model writes in parts.

A module may compute a norm as a square, a mean and a product, or rotary positions as products of halves.
`whole_operators` replaces the parts by one operator: the executor has one kernel for it, layouts split one operator,
and the graph is that of the same model by name. Patterns are found by their computation, not by names of modules.

A module may also compute queries, keys and values in one product and split the result. `apart` makes a product for
each, with parts of the module's weights, as models by name have them.

* `rewrite`: applies rules to a graph. `norms`, `activations`, `rotations`, `heads`: rules of `whole_operators`.
* `fused`, `views`, `sums`, `labels`: rules of `apart`.
"""

from collections.abc import Collection

from plans.model.graph import Graph
from plans.model.whole.activations import ACTIVATION_RULES
from plans.model.whole.fused import FUSED_RULES, KERNEL_RULES
from plans.model.whole.heads import HEAD_RULES
from plans.model.whole.labels import with_later_labels
from plans.model.whole.norms import NORM_RULES
from plans.model.whole.rewrite import rewritten
from plans.model.whole.rotations import PART_RULES, ROTATION_RULES
from plans.model.whole.sums import SUM_RULES
from plans.model.whole.views import CUT_RULES, ROW_RULES

__all__ = ["apart", "whole_operators"]


def whole_operators(graph: Graph, doubled: Collection[str] = ()) -> Graph:
    """The graph with norms, activations, rotary positions, attention and losses as one operator each.

    It computes the same function; in half precision a merged operator rounds once where its parts rounded each.
    `doubled` are constants whose last dim has two equal halves: tables of cosines and sines.
    """
    return rewritten(graph, (*NORM_RULES, *ACTIVATION_RULES, *ROTATION_RULES, *HEAD_RULES), doubled)


def apart(graph: Graph) -> Graph:
    """The graph with a product for each thing that one product makes, as `Graph.parts` of its weights.

    Labels that the model shifts itself are fed one place later. It computes the same function; sums of three are taken
    in the order of models by name.
    """
    order = (*KERNEL_RULES, *ROW_RULES, *ROTATION_RULES, *CUT_RULES, *PART_RULES, *FUSED_RULES, *SUM_RULES, *HEAD_RULES)
    return with_later_labels(rewritten(graph, order))
