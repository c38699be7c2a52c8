"""Operators that a model writes in parts, as the one operator that they are.

A module may spell out a norm as a square, a mean and a product, or turn queries and keys by products of their halves.
The executor has one kernel for each, layouts split one operator instead of many, and a graph so written looks like that
of the same model by name. `whole_operators` finds them by their computation; names of modules do not matter.

A module may also make in one product what is split apart afterwards, such as queries, keys and values. `apart` gives
each a separate product, with parts of the module's weights, as models by name have them.

* `rewrite`: rules applied to a graph. `norms`, `activations`, `rotations`, `heads`: operators in parts.
* `fused`, `views`, `sums`, `labels`: what `apart` takes apart and puts in order.
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
