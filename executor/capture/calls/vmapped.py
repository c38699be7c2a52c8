"""Calls of `torch.vmap`, written for all of its slices at once.

`torch.export` records the calls of a function under vmap for one slice, between calls that begin and end the map.
torch's batching rules then give the calls for complete tensors, which take their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._functorch.predispatch import _remove_batch_dim
from torch._functorch.vmap import vmap_impl
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx

from executor.capture.calls.functional import copied, line_of, on_meta
from executor.capture.calls.straight import NO_GRADIENT
from plans.errors import TwofoldError

__all__ = ["vmap_in_one_piece", "write_vmapped"]

_BEGIN, _END = "_vmap_increment_nesting", "_vmap_decrement_nesting"


@contextlib.contextmanager
def vmap_in_one_piece() -> Iterator[None]:
    """Within this context vmap runs without chunks, and stacks its results along dim 0 before they move to `out_dims`:
    torch.export records this, but not chunks and other dims."""

    def whole(
        func: Any, in_dims: Any, out_dims: Any, randomness: str, chunk_size: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        return vmap_impl(func, in_dims, out_dims, randomness, None, *args, **kwargs)

    def first(stacked: Tensor, level: int, size: int, out_dim: int) -> Tensor:
        if torch._C._functorch.maybe_get_bdim(stacked) > 0:
            stacked = stacked.unsqueeze(0).squeeze(0)  # which moves the slices to dim 0
        made: Tensor = _remove_batch_dim(stacked, level, size, 0)
        return made.movedim(0, out_dim) if out_dim else made

    with (
        mock.patch("torch._functorch.apis.vmap_impl", whole),
        mock.patch("torch._functorch.vmap._remove_batch_dim", first),
    ):
        yield


def write_vmapped(exported: ExportedProgram) -> None:
    """Replace the calls under vmap by calls for all slices, in place.

    Raises:
        TwofoldError: a call that vmap cannot batch, that draws random numbers, or that changes a tensor from outside.
    """
    graph = exported.graph
    for inner in list(_maps(graph)):
        _write(graph, inner)
    for node in list(graph.nodes):
        if _name(node) == "lazy_load_decompositions":
            graph.erase_node(node)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", ""))


def _maps(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """The calls of each outermost map, with those that begin and end it."""
    depth, inner = 0, []
    for node in graph.nodes:
        depth += _name(node) == _BEGIN
        if depth:
            inner.append(node)
        depth -= _name(node) == _END
        if inner and not depth:
            yield inner
            inner = []


def _write(graph: fx.Graph, inner: list[fx.Node]) -> None:
    own = set(inner)
    for node in inner:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise TwofoldError(
                f"{node.target} ({line_of(node)}) draws random numbers under torch.vmap; draw them before it"
            )
    outside = list({read: None for each in inner for read in each.all_input_nodes if read not in own})
    results = [each for each in inner if any(user not in own for user in each.users)]
    current = inner[0]

    def run(*values: Tensor) -> list[Tensor]:
        nonlocal current
        known: dict[fx.Node, Any] = dict(zip(outside, values, strict=True))
        for current in (each for each in inner if each.op == "call_function"):
            args, kwargs = fx.map_arg((current.args, current.kwargs), lambda read: known[read])
            made = current.target(*args, **kwargs)  # type: ignore[operator]
            without = NO_GRADIENT in current.meta and isinstance(made, Tensor)
            known[current] = made.detach() if without else made
        return [known[each] for each in results]

    levels, given = torch._C._functorch.maybe_current_level(), on_meta(outside)
    try:
        with torch.device("meta"):
            traced = make_fx(run)(*given)
    except Exception as error:  # whatever torch raises
        while torch._C._functorch.maybe_current_level() != levels:
            torch._C._functorch.pop_dynamic_layer_stack()
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        raise TwofoldError(
            f"{current.target} ({line_of(current)}) under torch.vmap cannot be written for all slices at once "
            f"({reason}); write it without vmap"
        ) from error
    if changed := [node for node, tensor in zip(outside, given, strict=True) if tensor._version]:
        raise TwofoldError(f"{changed[0].name} is changed in place under torch.vmap; change it after the map")
    traced.graph.eliminate_dead_code()
    with graph.inserting_before(inner[0]):
        written = copied(graph, results[0], traced.graph, outside)
    for node, instead in zip(results, written, strict=True):
        node.replace_all_uses_with(instead)
    for node in reversed(inner):
        graph.erase_node(node)
