"""Values that follow from shapes alone, such as a causal mask made of positions.

A library may make its mask by a long way: positions counted, compared, indexed for every sample. None of it depends on
an input's or a parameter's values, so it is computed here once, and a mask of attention is told by what it hides:
nothing, or all that comes later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

__all__ = ["hides_later", "shape_only", "state_masks"]

_MOST_ELEMENTS = 2**29


def shape_only(graph: fx.Graph) -> frozenset[fx.Node]:
    """The calls that read no input, parameter or buffer, and draw no random numbers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        if not random and not node.target._schema.is_mutable and all(each in found for each in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def state_masks(graph: fx.Graph) -> None:
    """Let attentions whose mask follows from shapes say in words what it hides, in place."""
    known = shape_only(graph)
    attention = torch.ops.aten.scaled_dot_product_attention.default
    told: dict[fx.Node, bool | None] = {}
    for node in graph.find_nodes(op="call_function", target=attention):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if mask not in known:
            continue
        if mask not in told:
            found = _value_of(mask)
            told[mask] = None if found is None else hides_later(found)
        if (later := told[mask]) is None:
            continue
        if len(node.args) > 3:
            node.update_arg(3, None)
        else:
            node.update_kwarg("attn_mask", None)
        if later and len(node.args) > 5:
            node.update_arg(5, True)
        elif later:
            node.update_kwarg("is_causal", True)


def _value_of(node: fx.Node) -> torch.Tensor | None:
    """The value of a call of `shape_only`, on the CPU; None where it would be large."""
    waiting, needed = [node], {node: 1}  # node -> how many still read it
    while waiting:
        each = waiting.pop()
        shape = getattr(each.meta.get("val"), "shape", ())
        if torch.Size(shape).numel() > _MOST_ELEMENTS:
            return None
        waiting += [before for before in each.all_input_nodes if before not in needed]
        for before in each.all_input_nodes:
            needed[before] = needed.get(before, 0) + 1
    made: dict[fx.Node, Any] = {}
    for each in [each for each in node.graph.nodes if each in needed]:
        held = fx.map_arg((each.args, each.kwargs), lambda read: made[read])
        args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), held)
        made[each] = each.target(*args, **kwargs)
        for before in each.all_input_nodes:
            needed[before] -= 1
            if not needed[before]:
                del made[before]
    found = made[node]
    return found if isinstance(found, torch.Tensor) else None


def hides_later(mask: torch.Tensor) -> bool | None:
    """Whether a mask [.., queries, keys] hides all later keys (True) or nothing (False); None: something else.

    Args:
        mask: true where a key takes part, or numbers that are added to the scores.

    >>> hides_later(torch.ones(2, 1, 3, 3).tril().bool()), hides_later(torch.zeros(3, 3)), hides_later(torch.eye(3))
    (True, False, None)
    """
    takes_part = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (takes_part | (mask <= torch.finfo(mask.dtype).min)).all():
        return None
    if takes_part.all():
        return False
    rows, keys = takes_part.shape[-2:]
    return True if rows == keys and (takes_part == torch.ones(rows, keys).tril().bool()).all() else None
