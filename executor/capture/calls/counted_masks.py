"""`x[mask]` while a module is exported: rows whose number depends on values get a number that nothing else has.

`x[mask]`, `x[mask] = rows`, `torch.masked_select` and the places of a mask are calls of a library of their own; the
number of their rows is a prime. `executor.capture.calls.masked_rows` writes them for all rows afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from executor.capture.calls.control_flow import places_from_shapes, recorded
from plans.errors import TwofoldError

__all__ = ["PLACES", "PUT", "READ", "rows_of_masks_counted"]

_LIBRARY = torch.library.Library("twofold", "FRAGMENT")
_LIBRARY.define("masked_rows(Tensor x, Tensor mask, int count) -> Tensor")
_LIBRARY.define("put_masked_rows(Tensor x, Tensor mask, Tensor rows) -> Tensor")
_LIBRARY.define("masked_places(Tensor mask, int count) -> Tensor")

READ, PUT, PLACES = (f"twofold.{name}.default" for name in ("masked_rows", "put_masked_rows", "masked_places"))
"""Names of the calls that read rows, write rows, and give their places."""

_PRIMES = tuple(number for number in range(10007, 10700) if all(number % factor for factor in range(2, 104)))
_MOST_MASKS = len(_PRIMES) // 2
"""Masks of a forward. Half of the primes are for each of two exports, whose batches differ by a factor of 2: a
number of the graph that was made of a prime differs, and is refused.
"""


@torch.library.impl(_LIBRARY, "masked_rows", "CompositeExplicitAutograd")
def _shape_of_rows(x: Tensor, mask: Tensor, count: int) -> Tensor:
    return x.new_empty((count, *x.shape[mask.dim() :]))


@torch.library.impl(_LIBRARY, "put_masked_rows", "CompositeExplicitAutograd")
def _shape_of_put(x: Tensor, mask: Tensor, rows: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.impl(_LIBRARY, "masked_places", "CompositeExplicitAutograd")
def _shape_of_places(mask: Tensor, count: int) -> Tensor:
    return mask.new_empty((count, 1), dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The part of x that `x[before, mask, after]` reads or writes.

    Args:
        whole: a view of x with the dims of the mask first.
        mask: selects rows of `whole`.
        count: the prime that stands for the number of these rows.
        dim: of the rows in `x[before, mask, after]`.
    """

    whole: Tensor
    mask: Tensor
    count: int
    dim: int


def _is_basic(part: Any) -> bool:
    return part is None or part is Ellipsis or isinstance(part, slice)


class _Counts:
    """The number of rows of every mask of a forward, a prime; equal masks have the same.

    Args:
        half: of the primes.
        fixed: the number of rows of every mask instead.
    """

    def __init__(self, half: int, fixed: int | None) -> None:
        self._half, self._fixed = half, fixed
        self._counts: dict[Any, int] = {}
        self._get = Tensor.__getitem__

    def of(self, mask: Tensor) -> int | None:
        """The number for a mask that depends on values; None for other tensors."""
        node = recorded(mask) if mask.dtype == torch.bool and mask.dim() else None
        if node is None:
            return None
        if self._fixed is not None:
            return self._fixed
        key = (_written_out(node, {}), _num_changes(node.graph))
        if key not in self._counts:
            if len(self._counts) == _MOST_MASKS:
                raise TwofoldError(f"the forward selects rows by more than {_MOST_MASKS} masks")
            self._counts[key] = _PRIMES[2 * len(self._counts) + self._half]
        return self._counts[key]

    def chosen(self, x: Tensor, index: Any) -> _Chosen | None:
        """The mask and the view that it selects from; None for an index with more than one mask, slices and None.

        Integers may follow a mask that comes first.
        """
        parts = tuple(index) if isinstance(index, tuple | list) else (index,)
        at = next((at for at, part in enumerate(parts) if isinstance(part, Tensor)), None)
        if at is None or (count := self.of(mask := parts[at])) is None:
            return None
        before, after = parts[:at], parts[at + 1 :]
        if not all(map(_is_basic, before)) or not all(
            _is_basic(part) or (not before and type(part) is int) for part in after
        ):
            return None
        if Ellipsis in before:
            taken = mask.dim() + sum(part is not None and part is not Ellipsis for part in (*before, *after))
            place = before.index(Ellipsis)
            before = (*before[:place], *[slice(None)] * (x.dim() - taken), *before[place + 1 :])
        part = self._get(x, (*before, *[slice(None)] * mask.dim(), *after))
        dims = list(range(part.dim()))
        first = dims[len(before) : len(before) + mask.dim()]
        whole = part.permute(first + [dim for dim in dims if dim not in first]) if before else part
        return _Chosen(whole, mask, count, len(before)) if whole.shape[: mask.dim()] == mask.shape else None


@contextlib.contextmanager
def rows_of_masks_counted(module: nn.Module, batch_size: int, fixed: int | None = None) -> Iterator[None]:
    """Within this context `x[mask]`, `x[mask] = rows`, `torch.masked_select` and the places of a mask [n], which
    `nonzero` and `where` find, have as many rows as a prime, or a fixed number of them."""
    counts = _Counts(batch_size.bit_length() % 2, fixed)
    get, put, select = Tensor.__getitem__, Tensor.__setitem__, torch.masked_select
    nonzero, where = torch.nonzero, torch.where

    def read(x: Tensor, index: Any) -> Tensor:
        chosen = counts.chosen(x, index)
        if chosen is None:
            return get(x, index)
        if name := next((name for name, buffer in module.named_buffers() if buffer is chosen.mask), None):
            raise TwofoldError(
                f"the buffer {name!r} selects rows, whose number depends on its values; keep their places instead, as "
                f"self.register_buffer({name + '_places'!r}, mask.nonzero().squeeze(-1))"
            )
        places = places_from_shapes(chosen.mask) if chosen.dim else None
        if places is not None:
            rows: Tensor = get(chosen.whole.flatten(0, chosen.mask.dim() - 1), torch.tensor(places))
        else:
            rows = torch.ops.twofold.masked_rows(chosen.whole, chosen.mask, chosen.count)
        return rows.movedim(0, chosen.dim) if chosen.dim else rows

    def write(x: Tensor, index: Any, value: Any) -> None:
        chosen = counts.chosen(x, index)
        if chosen is None or not isinstance(value, Tensor) or chosen.count not in value.shape:
            return put(x, index, value)
        if fixed is not None and not _reads_rows(value):  # another dim is as long
            return put(x, index, value)
        whole, shape = chosen.whole, list(chosen.whole.shape[chosen.mask.dim() :])
        rows = value.expand(*shape[: chosen.dim], chosen.count, *shape[chosen.dim :])
        rows = rows.movedim(chosen.dim, 0) if chosen.dim else rows
        whole.copy_(torch.ops.twofold.put_masked_rows(whole, chosen.mask, rows))

    def selected(x: Tensor, mask: Tensor, **settings: Any) -> Tensor:
        if settings:
            return select(x, mask, **settings)
        shape = torch.broadcast_shapes(x.shape, mask.shape)
        return read(x.expand(shape), mask if mask.shape == shape else mask.expand(shape))

    def found(mask: Tensor, as_tuple: bool = False) -> Any:
        count = counts.of(mask) if mask.dim() == 1 else None
        if count is None:
            return nonzero(mask, as_tuple=True) if as_tuple else nonzero(mask)
        made = torch.ops.twofold.masked_places(mask, count)
        return tuple(made.unbind(1)) if as_tuple else made

    def one_or_other(condition: Tensor, *both: Any, **named: Any) -> Any:
        return where(condition, *both, **named) if both or named else found(condition, True)

    with (
        mock.patch.object(Tensor, "__getitem__", read),
        mock.patch.object(Tensor, "__setitem__", write),
        mock.patch.object(torch, "masked_select", selected),
        mock.patch.object(Tensor, "masked_select", selected),
        mock.patch.object(torch, "nonzero", found),
        mock.patch.object(Tensor, "nonzero", found),
        mock.patch.object(torch, "where", one_or_other),
    ):
        yield


def _reads_rows(value: Tensor) -> bool:
    """Whether a recorded value is made of rows of a mask."""
    waiting, seen = [recorded(value)], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if str(node.target) in (READ, PLACES):
            return True
        seen.add(node)
        waiting += node.all_input_nodes
    return False


def _written_out(node: Any, known: dict[fx.Node, Any]) -> Any:
    """A recorded value as nested tuples of the calls that make it, equal for equal expressions."""
    if isinstance(node, tuple | list):
        return tuple(_written_out(each, known) for each in node)
    if isinstance(node, dict):
        return tuple((key, _written_out(each, known)) for key, each in sorted(node.items()))
    if not isinstance(node, fx.Node):
        return str(node)
    if node not in known:
        parts = (node.args, node.kwargs) if node.op == "call_function" else ()
        made = (str(node.target), _written_out(parts, known)) if parts else node.name
        known[node] = hash(made)
    return known[node]


def _num_changes(graph: fx.Graph) -> int:
    """How many calls of a graph change a tensor in place."""
    return sum(
        isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in graph.nodes
    )
