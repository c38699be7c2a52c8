"""Values that depend on shapes only, such as a causal mask computed from positions.

A library may compute its mask in many steps: positions are counted, compared and indexed for every sample. If none of
this depends on values of inputs or parameters, it is computed once at capture. An attention mask is then recognised by
what it hides: nothing, or all later tokens. Any other such value becomes one operator with the calls that compute it.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

__all__ = ["calls_of", "fix_sizes", "hides_later", "run_on_cpu", "shape_only", "state_masks", "value_of"]

_ONE_SAMPLE = "twofold_one_sample"
"""Key in the `meta` of calls of `shape_only`: positional and named arguments for a batch of one sample."""

aten = torch.ops.aten
_ONLY_LIKE = {
    aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.full_like.default: None, aten.new_zeros.default: 0,
    aten.empty_like.default: 0, aten.new_empty.default: 0,
    aten.new_ones.default: 1, aten.new_full.default: None,
}  # fmt: skip
"""Calls that read the shape of a tensor alone -> the value that they fill with; None: an argument contains it."""

_MOST_ELEMENTS = 2**29

_ROWS = 256
"""Rows of a mask that are compared at once."""


def shape_only(graph: fx.Graph, held: Collection[fx.Node] = ()) -> frozenset[fx.Node]:
    """The calls that read no input, parameter or buffer except those in `held`, and draw no random numbers; and `held`
    itself."""
    found = set(held)
    for node in graph.nodes:
        if node.op != "call_function" or not all(input_node in found for input_node in node.all_input_nodes):
            continue
        if isinstance(node.target, torch._ops.OpOverload):
            random = torch.Tag.nondeterministic_seeded in node.target.tags
            if not random and not node.target._schema.is_mutable:
                found.add(node)
        elif node.target is operator.getitem:
            found.add(node)
    return frozenset(found)


def fix_sizes(graph: fx.Graph, double: fx.Graph, batch_size: int) -> None:
    """Remove the inputs of values that follow from fixed sizes, and note every call's arguments for a batch of one. In
    place.

    Args:
        graph: exported for a batch of `batch_size`.
        double: the same for twice as many; it shows which sizes follow the batch.
    """
    pairs = list(zip(graph.nodes, double.nodes, strict=False))
    if len(graph.nodes) != len(double.nodes) or any(one.name != other.name for one, other in pairs):
        return
    for one, other in pairs:
        if one.target in _ONLY_LIKE and one.meta["val"].shape == other.meta["val"].shape:
            for node in (one, other):
                _fill(node)
    known = shape_only(graph)
    for one, other in pairs:
        if one in known:
            flat, structure = pytree.tree_flatten((one.args, one.kwargs))
            larger, _ = pytree.tree_flatten((other.args, other.kwargs))
            small = [_for_one(*each, batch_size) for each in zip(flat, larger, strict=True)]
            one.meta[_ONE_SAMPLE] = pytree.tree_unflatten(small, structure)
            small = [there if isinstance(there, fx.Node) else here for here, there in zip(small, larger, strict=True)]
            other.meta[_ONE_SAMPLE] = pytree.tree_unflatten(small, structure)


def _fill(node: fx.Node) -> None:
    """Give a call that fills a tensor like another one an explicit size and dtype."""
    value: Any = _ONLY_LIKE[node.target]  # type: ignore[index]
    made = node.meta["val"]
    if value is None:
        place = 1 if node.target is aten.full_like.default else 2
        value = node.args[place] if len(node.args) > place else node.kwargs["fill_value"]
    node.target, node.args = aten.full.default, (list(made.shape), value)
    node.kwargs = {"dtype": made.dtype, "device": torch.device("cpu")}


def _for_one(size: Any, double: Any, batch_size: int) -> Any:
    """An argument for one sample, extrapolated from those for a batch and for twice as many samples."""
    if isinstance(size, bool) or not isinstance(size, int) or not isinstance(double, int) or size == double:
        return size
    return size - (double - size) * (batch_size - 1) // batch_size


def calls_of(node: fx.Node) -> tuple[list[fx.Node], dict[fx.Node, Any]]:
    """The calls that compute a value of `shape_only`, in order, with their arguments for a batch of one sample."""
    needed, waiting = {node}, [node]
    while waiting:
        new = [input_node for input_node in waiting.pop().all_input_nodes if input_node not in needed]
        needed.update(new)
        waiting += new
    calls = [each for each in node.graph.nodes if each in needed]
    return calls, {call: call.meta.get(_ONE_SAMPLE, (call.args, call.kwargs)) for call in calls}


def state_masks(graph: fx.Graph, hiding: dict[str, bool | None]) -> None:
    """Mark attentions whose mask follows from shapes as causal or unmasked, in place.

    Args:
        graph: of an export.
        hiding: mask -> whether it hides what comes later, as `hides_later` returns it. What is missing is added, so
            that the export for twice the batch, which has the same masks, computes none.
    """
    known = shape_only(graph)
    attention = torch.ops.aten.scaled_dot_product_attention.default
    for node in graph.find_nodes(op="call_function", target=attention):
        mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
        if mask not in known:
            continue
        if mask.name not in hiding:
            found = value_of(mask)
            hiding[mask.name] = None if found is None else hides_later(found)
        if (later := hiding[mask.name]) is None:
            continue
        if len(node.args) > 3:
            node.update_arg(3, None)
        else:
            node.update_kwarg("attn_mask", None)
        if later and len(node.args) > 5:
            node.update_arg(5, True)
        elif later:
            node.update_kwarg("is_causal", True)


def value_of(
    node: fx.Node, held: Mapping[fx.Node, torch.Tensor] = MappingProxyType({}), most_elements: int = _MOST_ELEMENTS
) -> torch.Tensor | None:
    """The value of a call of `shape_only`, on the CPU; None where it would be large.

    Args:
        node: of the call.
        held: the values that were said to be held.
        most_elements: of anything that is computed on the way.
    """
    waiting, needed = [node], {node: 1}  # node -> how many still read it
    while waiting:
        each = waiting.pop()
        shape = getattr(each.meta.get("val"), "shape", ())
        if each not in held and torch.Size(shape).numel() > most_elements:
            return None
        waiting += [before for before in each.all_input_nodes if before not in needed]
        for before in each.all_input_nodes:
            needed[before] = needed.get(before, 0) + 1
    made: dict[fx.Node, Any] = {}
    for each in [each for each in node.graph.nodes if each in needed]:
        if each in held:
            made[each] = held[each]
            continue
        made[each] = run_on_cpu(each, made)
        for before in each.all_input_nodes:
            needed[before] -= 1
            if not needed[before]:
                del made[before]
    found = made[node]
    return found if isinstance(found, torch.Tensor) else None


def run_on_cpu(call: fx.Node, made: Mapping[fx.Node, Any]) -> Any:
    """The result of a recorded call on the CPU, from the results of the calls that it reads."""
    read = fx.map_arg((call.args, call.kwargs), lambda each: made[each])
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), read)
    return call.target(*args, **kwargs)  # type: ignore[operator]


def hides_later(mask: torch.Tensor) -> bool | None:
    """Whether a mask [.., queries, keys] hides all later keys (True) or nothing (False); None: something else.

    Args:
        mask: true where a key takes part, or numbers that are added to the scores.

    >>> hides_later(torch.ones(2, 1, 3, 3).tril().bool()), hides_later(torch.zeros(3, 3)), hides_later(torch.eye(3))
    (True, False, None)
    """
    repeated = [stride == 0 for stride in mask.stride()[:-2]]
    mask = mask[tuple(slice(0, 1) if each else slice(None) for each in repeated)]
    takes_part = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not (takes_part | (mask <= torch.finfo(mask.dtype).min)).all():
        return None
    if takes_part.all():
        return False
    rows, keys = takes_part.shape[-2:]
    return True if rows == keys and _is_lower_triangle(takes_part) else None


def _is_lower_triangle(takes_part: torch.Tensor) -> bool:
    """Whether a square mask [.., queries, keys] of booleans hides all later keys and nothing else: by groups of rows,
    so that no second mask of its size is made.
    """
    size = takes_part.shape[-1]
    for start in range(0, size, _ROWS):
        end = min(start + _ROWS, size)
        rows = takes_part[..., start:end, :]
        now = rows[..., start:end]
        if not rows[..., :start].all() or rows[..., end:].any() or (now != torch.ones_like(now).tril()).any():
            return False
    return True
