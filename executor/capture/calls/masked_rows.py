"""Rows that a mask selects, `x[mask]`, captured as all rows with the mask.

The number of rows depends on the values of the mask. While a module is exported, `x[mask]` therefore has a number of
rows that nothing else has, a prime. Afterwards the calls are written for all rows; those outside of the mask are 1 (0
of whole numbers), so that no value is infinite. A mean or a sum over the rows counts those of the mask:
`x[mask].mean()` becomes `where(mask, x, 0).sum() / mask.sum()`. Numbers that contain the prime, as in
`losses.sum() / losses.numel()`, become the number of rows in the mask. `x[:, mask]` is the same of a permuted `x`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from executor.capture.calls.counted_masks import PLACES, PUT, READ
from executor.capture.calls.functional import called_as, line_of
from executor.capture.calls.row_counts import AT_NONE
from plans.errors import TwofoldError

__all__ = ["check_masks", "write_masked_rows"]

aten = torch.ops.aten
_OF_ROWS = "rows of"
"""Key in the `meta` of a call that may combine rows: their mask."""
_ALIKE = (
    "view", "reshape", "permute", "transpose", "t", "movedim", "unsqueeze", "squeeze", "select", "expand", "to",
    "detach", "clone", "contiguous", "getitem", "linear", "embedding",
)  # fmt: skip
"""Calls that treat rows alike, as pointwise ones do; a dim that they work along has no rows in the result."""
_SAME_PLACES = ("squeeze", "view", "reshape", "flatten", "select", "unbind", "getitem")
"""Calls that give the places [count, 1] in another shape."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a mask.

    Args:
        mask: the call that makes it, flattened.
        count: the prime that stands for the number of its rows.
        total: how many rows there are, in the mask or not.
    """

    mask: fx.Node
    count: int
    total: int


def write_masked_rows(exported: ExportedProgram) -> None:
    """Write calls on the rows of masks for all rows, in place.

    Raises:
        TwofoldError: a call that cannot be written so; with its line and what to write instead.
    """
    graph = exported.graph
    if any(str(node.target) in (READ, PLACES) for node in graph.nodes):
        _Writer(graph).write()


def check_masks(graph: fx.Graph, grown: Mapping[str, int]) -> None:
    """Refuse calls that may combine the rows of a mask without the batch: the batch is checked as any other is.

    Args:
        graph: exported, with its masked rows written.
        grown: call -> the dim of its result that is the batch.
    """
    for node in graph.nodes:
        if _OF_ROWS in node.meta and node.meta[_OF_ROWS].name not in grown:
            raise _refused(node)


class _Writer:
    """Calls on the rows of masks, written for all rows.

    Args:
        graph: exported; modified in place.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.now: dict[fx.Node, fx.Node] = {}  # calls -> the calls that take their place
        self.rows: dict[fx.Node, _Rows] = {}  # calls that have rows -> theirs
        self.counts: dict[fx.Node, tuple[_Rows, ...]] = {}  # calls that follow from rows -> those
        self.num: dict[int, fx.Node] = {}  # prime -> the number of rows in the mask
        self.dims: dict[fx.Node, int] = {}  # calls for all rows -> the dim of the rows
        self.places: dict[fx.Node, fx.Node] = {}  # places of rows -> their mask

    def write(self) -> None:
        """Replace all of them."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                node.args = self._renamed(node.args)
            elif node.op == "call_function":
                with self.graph.inserting_before(node):
                    self._call(node)
        for node in reversed(list(self.now)):
            if self.now[node] is not node:
                self.graph.erase_node(node)

    def _call(self, node: fx.Node) -> None:
        called = str(node.target)
        if node.target is aten._assert_tensor_metadata.default:
            self.graph.erase_node(node)
        elif called == PLACES:
            self.now[node] = self._placed(node)
        elif called == READ:
            self.now[node] = self._entered(node, *node.args)
        elif called == PUT:
            self.now[node] = self._put(node, *node.args)
        elif (at := self._at_places(node)) is not None:
            self.now[node] = at
        else:
            self._follow(node)

    def _at_places(self, node: fx.Node) -> fx.Node | None:
        """A call that reads or writes at the places of rows, along dim 0; None if it does something else."""
        given: Any = node.args
        if node.target in (aten.index.Tensor, aten.index_put.default) and len(given[1]) == 1:
            index = given[1][0]
        elif node.target in (aten.index_select.default, aten.index_add.default) and given[1] == 0 and not node.kwargs:
            index = given[2]
        else:
            return None
        mask = self.places.get(index)
        whole = given[0]
        if mask is None or whole in self.rows or whole.meta["val"].shape[0] != mask.meta["val"].shape[0]:
            return None
        if node.target in (aten.index.Tensor, aten.index_select.default):
            return self._entered(node, whole, mask, self.rows[index].count)
        if node.target is aten.index_put.default:
            return self._put(node, whole, mask, given[2]) if len(given) == 3 else None
        source = given[3]
        self.counts[node] = self.counts[source]
        rows, added = self.rows[source], self.now[source]
        kept = self._where(node, rows, added, 0)
        return called_as(self.graph, node, aten.add.Tensor, (self.now.get(whole, whole), kept))

    def _follow(self, node: fx.Node) -> None:
        """A call that may read rows, or what was made of rows."""
        above = tuple(dict.fromkeys(each for read in node.all_input_nodes for each in self.counts.get(read, ())))
        if not above:
            node.args, node.kwargs = self._renamed((node.args, node.kwargs))
            return
        own = {each for read in node.all_input_nodes if (each := self.rows.get(read)) is not None}
        if len(own) > 1 and len({each.count for each in own}) > 1:
            raise _refused(node)
        rows = next(iter(own), None)
        self.counts[node] = above
        if rows is not None and not _has(node.meta["val"], rows.count):
            self.now[node] = self._reduced(node, rows)
        elif rows is not None:
            self.now[node] = self._for_all(node, rows)
            self.rows[node] = rows
            name = getattr(node.target, "__name__", "").split(".")[0]
            if name in _SAME_PLACES and (mask := self.places.get(node.all_input_nodes[0])) is not None:
                self.places[node] = mask
        else:
            self.now[node] = self._of_numbers(node, above)

    def _renamed(self, given: Any) -> Any:
        """Arguments with the calls that took the place of others."""
        return fx.map_arg(given, lambda each: self.now.get(each, each))

    def _entered(self, node: fx.Node, *given: Any) -> fx.Node:
        """All rows of a tensor, with 1 or 0 outside of the mask."""
        mask = self._within(node, given[1])
        whole, count = self._renamed((given[0], given[2]))
        shape, lead = whole.meta["val"].shape, mask.meta["val"].dim()
        total = math.prod(shape[:lead])
        flat = self._reshaped(node, mask, [total])
        rows = _Rows(flat, count, total)
        all_rows = self._reshaped(node, whole, [total, *shape[lead:]])
        self.dims[all_rows] = 0
        self.rows[node] = rows
        self.counts[node] = (*(each for read in given[:2] for each in self.counts.get(read, ())), rows)
        found = self._where(node, rows, all_rows, 1 if all_rows.meta["val"].is_floating_point() else 0)
        self.dims[found] = 0
        return found

    def _within(self, node: fx.Node, mask: Any) -> fx.Node:
        """A mask; one of rows of another mask is False outside of that."""
        own = self.rows.get(mask)
        found: fx.Node = self._renamed(mask) if own is None else self._where(node, own, self.now[mask], 0)
        return found

    def _placed(self, node: fx.Node) -> fx.Node:
        """The places of all rows."""
        given: Any = node.args
        mask, count = self._within(node, given[0]), given[1]
        self.places[node] = mask
        self.rows[node] = rows = _Rows(mask, count, mask.meta["val"].numel())
        self.counts[node] = (rows,)
        every = called_as(self.graph, node, aten.arange.default, (rows.total,), {"device": mask.meta["val"].device})
        found = self._reshaped(node, every, [rows.total, 1])
        self.dims[found] = 0
        return found

    def _put(self, node: fx.Node, *read: Any) -> fx.Node:
        """A tensor with rows in place of those of the mask."""
        known = self.rows.get(read[2])
        whole, mask, rows = self._renamed(read)
        if known is None or known.total != mask.meta["val"].numel():
            raise _refused(node)
        self.counts[node] = tuple(dict.fromkeys((*self.counts.get(read[0], ()), *self.counts[read[2]])))
        if read[0] in self.rows:
            self.rows[node] = self.rows[read[0]]
        given = self._reshaped(node, rows, list(whole.meta["val"].shape))
        if given.meta["val"].dtype != whole.meta["val"].dtype:
            given = called_as(self.graph, node, aten.to.dtype, (given, whole.meta["val"].dtype))
        rank = whole.meta["val"].dim()
        wide = self._reshaped(node, mask, [*mask.meta["val"].shape, *[1] * (rank - mask.meta["val"].dim())])
        found = called_as(self.graph, node, aten.where.self, (wide, given, whole))
        self.dims[found] = 0  # if they are rows of another mask
        return found

    def _for_all(self, node: fx.Node, rows: _Rows) -> fx.Node:
        """A call that treats its rows alike, for all of them."""
        if node.target is aten.batch_norm.default and node.args[5]:  # of all rows, in training
            raise _refused(node)
        args, kwargs = pytree.tree_map_only(
            int,
            lambda size: _resized(size, rows),
            self._renamed((node.args, node.kwargs)),
            is_leaf=lambda each: isinstance(each, bool),
        )
        try:
            made = called_as(self.graph, node, node.target, args, kwargs)
        except (RuntimeError, ValueError, IndexError) as error:
            raise _refused(node) from error
        if isinstance(node.meta["val"], Tensor):
            self.dims[made] = self._dim(node, node.meta["val"], rows)
        if not self._is_alike(node):
            made.meta[_OF_ROWS] = rows.mask
        return made

    def _is_alike(self, node: fx.Node) -> bool:
        """Whether a call treats its rows alike for sure."""
        name = getattr(node.target, "__name__", "").split(".")[0]
        reads_at_rows = name in ("index", "index_select") and node.args[0] not in self.rows
        return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name in _ALIKE or reads_at_rows

    def _dim(self, node: fx.Node, value: Tensor, rows: _Rows) -> int:
        """The dim of the rows in a value of the export."""
        dims = [dim for dim, size in enumerate(value.shape) if size % rows.count == 0]
        if len(dims) != 1:
            raise _refused(node)
        return dims[0]

    def _reduced(self, node: fx.Node, rows: _Rows) -> fx.Node:
        """A mean or a sum over the rows, or a loss of them."""
        assert isinstance(node.target, torch._ops.OpOverload)
        called = str(node.target).split(".")[1]
        names = [argument.name for argument in node.target._schema.arguments]
        args, kwargs = self._renamed((node.args, node.kwargs))
        given = dict(zip(names, args, strict=False)) | kwargs
        if called in ("mean", "sum"):
            dims = given.get("dim")
            over = dims if isinstance(dims, list | tuple) else [dims] if isinstance(dims, int) else []
            return self._over(node, rows, given["self"], called == "mean", over, bool(given.get("keepdim", False)))
        if "reduction" not in given and "reduction" not in names:
            raise _refused(node)
        reduction = given.get("reduction", 1)
        labels = given.get("target")
        if "ignore_index" in names and not labels.meta["val"].is_floating_point():
            ignored = given.get("ignore_index", -100)
            return self._again(node, given | {"target": self._where(node, rows, labels, ignored)})
        exported = dict(zip(names, node.args, strict=False)) | node.kwargs
        each = self._again(node, exported | {"reduction": 0})
        dim = self._dim(node, each.meta["val"], rows)
        self.graph.erase_node(each)
        losses = self._again(node, given | {"reduction": 0})
        self.dims[losses] = dim
        return self._over(node, rows, losses, reduction == 1, [], False)

    def _again(self, node: fx.Node, given: dict[str, Any]) -> fx.Node:
        """The same call with other arguments, in the order of its schema."""
        assert isinstance(node.target, torch._ops.OpOverload)
        args = [given.get(each.name, each.default_value) for each in node.target._schema.arguments]
        return called_as(self.graph, node, node.target, tuple(args))

    def _over(
        self, node: fx.Node, rows: _Rows, all_rows: fx.Node, is_mean: bool, dims: Sequence[int], keepdim: bool
    ) -> fx.Node:  # fmt: skip
        """The mean or sum of the rows in the mask, over all dims unless some are given."""
        value = all_rows.meta["val"]
        kept = self._where(node, rows, all_rows, 0)
        over = [dim % value.dim() for dim in dims] or list(range(value.dim()))
        settings = {"dtype": node.meta["val"].dtype}
        made = called_as(self.graph, node, aten.sum.dim_IntList, (kept, over, keepdim), settings)
        if not is_mean:
            return made
        return self._divided(node, made, rows, math.prod(value.shape[dim] for dim in over) // rows.total)

    def _divided(self, node: fx.Node, made: fx.Node, rows: _Rows, times: int) -> fx.Node:
        number = self._number(node, rows)
        if number.meta["val"].dtype != made.meta["val"].dtype:
            number = called_as(self.graph, node, aten.to.dtype, (number, made.meta["val"].dtype))
        if (least := node.meta.get(AT_NONE)) is not None:
            number = called_as(self.graph, node, aten.clamp.default, (number, least / times))
        made = called_as(self.graph, node, aten.div.Tensor, (made, number))
        return called_as(self.graph, node, aten.div.Tensor, (made, times)) if times != 1 else made

    def _number(self, node: fx.Node, rows: _Rows) -> fx.Node:
        """How many rows are in the mask."""
        if rows.count not in self.num:
            self.num[rows.count] = called_as(self.graph, node, aten.sum.default, (rows.mask,))
        return self.num[rows.count]

    def _of_numbers(self, node: fx.Node, above: Sequence[_Rows]) -> fx.Node:
        """A call on what was made of rows; numbers that contain the number of rows are replaced."""
        args, kwargs = self._renamed((node.args, node.kwargs))
        for rows in above:
            for at, given in enumerate(args):
                if not isinstance(given, int | float) or isinstance(given, bool) or not given:
                    continue
                over, under = given / rows.count, given * rows.count
                if (
                    isinstance(given, int)
                    and given % rows.count == 0
                    and node.target in (aten.div.Tensor, aten.div.Scalar)
                ):
                    return self._divided(node, args[0], rows, int(over))
                if abs(under - round(under)) < 1e-9 * under and node.target is aten.mul.Tensor and at == 1:
                    made = self._divided(node, args[0], rows, 1)
                    return called_as(self.graph, node, aten.mul.Tensor, (made, round(under)))
        return called_as(self.graph, node, node.target, args, kwargs)

    def _where(self, node: fx.Node, rows: _Rows, all_rows: fx.Node, other: float) -> fx.Node:
        """The values in the mask, and a number outside of it."""
        value = all_rows.meta["val"]
        at = self.dims.get(all_rows)
        if at is None or value.shape[at] != rows.total:
            raise _refused(node)
        shape = [1] * value.dim()
        shape[at] = rows.total
        mask = self._reshaped(node, rows.mask, shape)
        filler = called_as(
            self.graph, node, aten.full.default, ([], other), {"dtype": value.dtype, "device": value.device}
        )
        return called_as(self.graph, node, aten.where.self, (mask, all_rows, filler))

    def _reshaped(self, node: fx.Node, x: fx.Node, shape: list[int]) -> fx.Node:
        same = list(x.meta["val"].shape) == shape
        return x if same else called_as(self.graph, node, aten.reshape.default, (x, shape))


def _refused(node: fx.Node) -> TwofoldError:
    return TwofoldError(
        f"{node.target} ({line_of(node)}) reads rows that a mask selects, whose number depends on values; of such "
        f"rows a forward may compute each by itself, their mean or sum, and a loss. Compute all rows, and write "
        f"(losses * mask).sum() / mask.sum()"
    )


def _has(value: Any, count: int) -> bool:
    """Whether a value, or one of several, has the rows of a mask."""
    several = value if isinstance(value, tuple | list) else (value,)
    return any(size % count == 0 for each in several if isinstance(each, Tensor) for size in each.shape)


def _resized(size: Any, rows: _Rows) -> Any:
    """A size with all rows in place of those of the mask."""
    if isinstance(size, bool) or not size or size % rows.count:
        return size
    return size // rows.count * rows.total
