"""Replaces in-place calls by calls that return new values, so that no value of a graph changes.

A write into a part (`x[:, 0] = y`, `copy_`, `mul_` of a slice) makes a new value of the whole, in which what was
written takes the place of that part. Later reads of the memory, through any view, read the new value. The last write
to a parameter or buffer is a call of `twofold::assign`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_map_only

from plans.errors import TwofoldError

__all__ = ["called_as", "copied", "line_of", "on_meta", "without_in_place"]

_LIBRARY = torch.library.Library("twofold", "FRAGMENT")
_LIBRARY.define("assign(Tensor state, Tensor value) -> Tensor")

aten = torch.ops.aten


@torch.library.impl(_LIBRARY, "assign", "CompositeExplicitAutograd")
def _assign(state: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return value.clone()


fx.node.has_side_effect(torch.ops.twofold.assign.default)  # or it would be removed where nothing reads its result

_RESHAPES = {
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints, aten.unflatten.int,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.view_as.default,
    aten.reshape_as.default, aten.alias.default, aten.contiguous.default, aten.to.dtype, aten.to.dtype_layout,
    aten.to.other, aten.type_as.default, aten.dropout.default,  # which gives its input where it drops nothing
}  # fmt: skip
_FUNCTIONAL = {"normal": "normal_functional"}
"""In-place calls whose other form has another name."""

_OWN_INVERSE = {aten.transpose.int, aten.t.default, aten.mT.default, aten.numpy_T.default}


def without_in_place(exported: ExportedProgram) -> None:
    """Replace in-place calls by calls that return new values. The graph itself is modified in place.

    Raises:
        TwofoldError: a call that has no other form, or that writes through a view of an unusual kind.
    """
    graph, memories = exported.graph, _memories(exported)
    for node in [node for node in graph.nodes if _copies_itself(node)]:
        graph.erase_node(node)
    before = list(graph.nodes)
    for node in before:
        if (changed := _changed_by(node)) is not None:
            _replace(graph, node, changed, memories)
            continue
        _read_what_is_now(graph, node, memories)
    for node in reversed(before):
        if node in memories and memories[node].writes and node.op == "call_function" and not node.users:
            graph.erase_node(node)
    _keep_last_assignments(
        graph, {memory.now[memory.root][1] for memory in memories.values() if memory.root in memory.now}
    )


def called_as(graph: fx.Graph, like: fx.Node, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
    """A call with other arguments, inserted where another call is, and its value."""
    kwargs = kwargs or {}
    made = graph.call_function(target, args, kwargs)
    read = tree_map_only(fx.Node, lambda node: node.meta["val"], (args, kwargs))
    with torch.device("meta"):
        on_meta = tree_map_only(torch.Tensor, lambda value: torch.empty_like(value, device="meta"), read)
        on_meta = tree_map_only(torch.device, lambda _: torch.device("meta"), on_meta)
        made.meta = like.meta | {"val": target(*on_meta[0], **on_meta[1])}
    return made


def line_of(node: fx.Node) -> str:
    """The line of the forward that makes a call."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return " | ".join(lines[-2:]) or "in forward"


def on_meta(nodes: Sequence[fx.Node]) -> list[torch.Tensor]:
    """Values like those of some calls, on the meta device."""
    return [torch.empty_like(node.meta["val"], device="meta") for node in nodes]


def copied(graph: fx.Graph, like: fx.Node, traced: fx.Graph, read: Sequence[fx.Node]) -> list[fx.Node]:
    """Copy the calls of a traced graph into another graph, at its insertion point; returns the results.

    Args:
        graph: the graph to insert the calls into.
        like: the call that they replace.
        traced: the graph from `make_fx`.
        read: the values of the placeholders of `traced`.
    """
    placed = dict(zip(traced.find_nodes(op="placeholder"), read, strict=True))
    for node in traced.nodes:
        if node.op == "output":
            return [placed[result] for result in node.all_input_nodes]
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: placed[one])
            placed[node] = graph.call_function(node.target, args, kwargs)
            placed[node].meta = like.meta | {"val": node.meta["val"]}
    raise AssertionError("a graph has an output")


@dataclass(slots=True, eq=False)
class _Memory:
    """Values that share memory, by the names of the calls that created the memory and its views.

    Args:
        root: the call that made it.
        state: the placeholder, if it is a parameter's or a buffer's.
        views: the base of each view.
        same: the changed and returned tensor of each in-place call.
        writes: how many there were so far.
        now: name -> (writes before, its value then).
    """

    root: fx.Node
    state: fx.Node | None
    views: dict[fx.Node, fx.Node] = field(default_factory=dict)
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    writes: int = 0
    now: dict[fx.Node, tuple[int, fx.Node]] = field(default_factory=dict)

    def read(self, graph: fx.Graph, name: fx.Node) -> fx.Node:
        """The current value of a name; a view is recomputed where necessary."""
        name = self.same.get(name, name)
        written, value = self.now.get(name, (0, name))
        if written < self.writes:
            view_of = self.views[name]
            source = self.read(graph, view_of)
            args = _mapped(name.args, lambda each: source if each is view_of else each)
            value = called_as(graph, name, name.target, args, name.kwargs)
            self.now[name] = (self.writes, value)
        return value

    def write(self, graph: fx.Graph, name: fx.Node, value: fx.Node) -> None:
        """Record `value` as the current value of a name, and update the values that it is a view of."""
        name = at = self.same.get(name, name)
        whole = value
        while at in self.views:
            source = self.views[at]
            if self.state is None or at.target is not aten.detach.default:  # state has no gradient here anyway
                whole = _with_part(graph, at, self.read(graph, source), whole)
            at = self.same.get(source, source)
        self.writes += 1
        self.now[name] = (self.writes, value)
        if self.state is not None:
            whole = called_as(graph, whole, torch.ops.twofold.assign.default, (self.state, whole))
        self.now[at] = (self.writes, whole)


def _memories(exported: ExportedProgram) -> dict[fx.Node, _Memory]:
    """Every call that makes tensors -> the memory that they are in."""
    stateful = (InputKind.PARAMETER, InputKind.BUFFER)
    state = {spec.arg.name for spec in exported.graph_signature.input_specs if spec.kind in stateful}
    of_storage: dict[int, _Memory] = {}
    found: dict[fx.Node, _Memory] = {}
    for node in exported.graph.nodes:
        made = node.meta.get("val")
        made = made[0] if isinstance(made, tuple | list) and made else made
        if not isinstance(made, torch.Tensor):
            continue
        try:
            key = made.untyped_storage()._cdata
        except NotImplementedError:
            raise TwofoldError(
                f"{node.target} ({line_of(node)}) runs under torch.func; use torch.autograd.grad instead"
            ) from None
        memory = of_storage.get(key)
        source = next(
            (input_node for input_node in node.all_input_nodes if memory and found.get(input_node) is memory), None
        )
        if source is None and isinstance(node.meta["val"], tuple | list):
            continue  # several results, each in a separate memory
        if memory is None or source is None:
            is_state = node.op == "placeholder" and node.name in state
            memory = of_storage[key] = _Memory(root=node, state=node if is_state else None)
        elif _changed_by(node) is not None:
            memory.same[node] = memory.same.get(source, source)
        else:
            memory.views[node] = source
        found[node] = memory
    return found


def _changed_by(node: fx.Node) -> fx.Node | None:
    """The argument that a call changes: its first one, or `out`."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    changed = node.kwargs.get("out", node.args[0] if node.args else None)
    return changed if isinstance(changed, fx.Node) else None


def _copies_itself(node: fx.Node) -> bool:
    """Whether a tensor is set to its own value, as by `self.mask = self.mask.to(device)` on that device."""
    if node.target is not aten.copy_.default or node.users:
        return False
    own, other = (argument.meta["val"] for argument in node.all_input_nodes[:2])
    places = [
        (each.untyped_storage()._cdata, each.storage_offset(), each.shape, each.stride()) for each in (own, other)
    ]
    return places[0] == places[1]


def _read_what_is_now(graph: fx.Graph, node: fx.Node, memories: dict[fx.Node, _Memory]) -> None:
    """Make a call read the values that its arguments have when it runs."""
    own = memories.get(node)
    base = own.views.get(node) if own is not None else None  # a view is recomputed where it is read
    changed = [each for each in node.all_input_nodes if each is not base and each in memories and memories[each].writes]
    with graph.inserting_before(node):
        values = {operand: memories[operand].read(graph, operand) for operand in changed}
    node.args, node.kwargs = _mapped((node.args, node.kwargs), lambda each: values.get(each, each))


def _replace(graph: fx.Graph, node: fx.Node, changed: fx.Node, memories: dict[fx.Node, _Memory]) -> None:
    """Write the value of an in-place call as a new value."""

    def now(each: fx.Node) -> fx.Node:
        return memories[each].read(graph, each) if each in memories else each

    with graph.inserting_before(node):
        args, kwargs = _mapped((node.args, node.kwargs), now)
        value, old = _new_value(graph, node, args, kwargs), changed.meta["val"]
        if value.meta["val"].dtype != old.dtype:
            value = called_as(graph, node, aten.to.dtype, (value, old.dtype))
        memories[changed].write(graph, node, value)


def _keep_last_assignments(graph: fx.Graph, last: Collection[fx.Node]) -> None:
    for node in graph.find_nodes(op="call_function", target=torch.ops.twofold.assign.default):
        if node not in last:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)


def _new_value(graph: fx.Graph, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
    """The tensor that an in-place call writes."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    if "out" in kwargs:
        rest = {name: each for name, each in kwargs.items() if name != "out"}
        return called_as(graph, node, _without_out(target, node), args, rest)
    old = args[0].meta["val"]
    if target in (aten.copy_.default, aten.fill_.Tensor):
        given = args[1]
        if given.meta["val"].shape != old.shape:
            given = called_as(graph, node, aten.expand.default, (given, list(old.shape)))
        return given
    if target in (aten.zero_.default, aten.fill_.Scalar):
        return called_as(graph, node, aten.full_like.default, (args[0], args[1] if len(args) > 1 else 0))
    if target is aten.bernoulli_.float:  # full samples or channels are dropped: stochastic depth
        kept = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        settings = {"dtype": old.dtype, "device": old.device}
        ones = called_as(graph, node, aten.full.default, (list(old.shape), 1), settings)
        dropped = called_as(graph, node, aten.dropout.default, (ones, 1 - kept, True))
        return called_as(graph, node, aten.mul.Tensor, (dropped, kept))
    if target is aten.fill_diagonal_.default and len(args) == 2 and old.dim() == 2:
        settings = {"dtype": torch.bool, "device": old.device}
        diagonal = called_as(graph, node, aten.eye.m, tuple(old.shape), settings)
        return called_as(graph, node, aten.masked_fill.Scalar, (args[0], diagonal, args[1]))
    name = target._schema.name.removeprefix("aten::").removesuffix("_")
    overload = getattr(getattr(aten, _FUNCTIONAL.get(name, name), None), target._overloadname, None)
    if overload is None or overload._schema.is_mutable:
        raise _only_in_place(node)
    return called_as(graph, node, overload, args, kwargs)


def _without_out(target: torch._ops.OpOverload, node: fx.Node) -> torch._ops.OpOverload:
    """The form of a call with an argument `out` that makes a new value."""
    wanted = [(each.name, str(each.type)) for each in target._schema.arguments if each.name != "out"]
    packet = target.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if [(each.name, str(each.type)) for each in overload._schema.arguments] == wanted:
            return overload
    raise _only_in_place(node)


def _only_in_place(node: fx.Node) -> TwofoldError:
    return TwofoldError(
        f"{node.target} ({line_of(node)}) changes a tensor in place and has no form that makes a new value; make a new "
        f"tensor instead"
    )


def _with_part(graph: fx.Graph, view: fx.Node, source: fx.Node, part: fx.Node) -> fx.Node:
    """`source` with `part` where a view of it was taken."""
    whole, target = source.meta["val"], view.target
    where: Any = view.args[1:]
    if target in _RESHAPES:
        if part.meta["val"].shape == whole.shape:
            return part
        return called_as(graph, view, aten.reshape.default, (part, list(whole.shape)))
    if target in _OWN_INVERSE:
        return called_as(graph, view, target, (part, *where))
    if target is aten.permute.default:
        dims = [dim % whole.dim() for dim in where[0]]
        return called_as(graph, view, target, (part, [dims.index(dim) for dim in range(len(dims))]))
    if target is aten.select.int:
        return called_as(graph, view, aten.select_scatter.default, (source, part, *where))
    if target is aten.slice.Tensor or target is aten.narrow.default:
        if part.meta["val"].shape == whole.shape:
            return part
        if target is aten.narrow.default:
            dim, start, length = where
            where = (dim, start, start + length)
        return called_as(graph, view, aten.slice_scatter.default, (source, part, *where))
    raise TwofoldError(
        f"{target} ({line_of(view)}) is written through in place, which works for slices, selections, reshapes and "
        f"transposes alone; make a new tensor instead"
    )


def _mapped(arguments: Any, to: Callable[[fx.Node], fx.Node]) -> Any:
    return fx.map_arg(arguments, to)
