"""Computes concatenated batches one by one: two views of an image, chosen and rejected answers.

`net(torch.cat([a, b])).chunk(2)` is `net(a), net(b)` where `net` computes each sample separately. The calls after the
concatenation are written once for every part, until a chunk takes a part or a mean over the samples joins them. Whether
samples are computed separately is checked afterwards, as for any other call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from executor.capture.calls.functional import called_as

__all__ = ["split_concatenated"]

aten = torch.ops.aten

_TAKEN = {aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default, aten.split.sizes}
_MEANS = {
    aten.mean.default,
    aten.mean.dim,
    aten.mse_loss.default,
    aten.l1_loss.default,
    aten.cross_entropy_loss.default,
}
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_NUM_SETTINGS = {aten.mse_loss.default: 2, aten.l1_loss.default: 2, aten.cross_entropy_loss.default: 2}
"""Losses, which are means over the samples where they have no more arguments than these."""

_OF_ALL = ("batch_norm", "instance_norm")
"""Calls whose result depends on the other samples."""


class _CannotSplitError(Exception):
    """A call needs all concatenated samples at once."""


def split_concatenated(graph: fx.Graph, grown: Mapping[str, int]) -> None:
    """Where possible, repeat the calls after concatenations along the batch for every part, in place.

    Args:
        graph: of an exported module.
        grown: call -> the dim of its result that is the batch.
    """
    joined = [node for node in graph.nodes if _joins_batches(node, grown)]
    if not joined:
        return
    before = set(graph.nodes)
    splitter = _Splitter(graph, grown, joined)
    try:
        splitter.run()
    except (_CannotSplitError, RuntimeError, TypeError):
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        return
    splitter.replace()


def _joins_batches(node: fx.Node, grown: Mapping[str, int]) -> bool:
    if node.target is not aten.cat.default or grown.get(node.name) != 0:
        return False
    parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    assert isinstance(parts, list | tuple) and isinstance(dim, int)
    return dim % node.meta["val"].dim() == 0 and len(parts) > 1 and all(
        isinstance(part, fx.Node) and grown.get(part.name) == 0 for part in parts
    )  # fmt: skip


class _Splitter:
    """The calls after concatenations, repeated for every part.

    Args:
        graph: that they are written into.
        grown: call -> the dim of its result that is the batch.
        joined: the concatenations.
    """

    def __init__(self, graph: fx.Graph, grown: Mapping[str, int], joined: Collection[fx.Node]) -> None:
        self.graph, self.grown, self.joined = graph, grown, joined
        self.parts: dict[fx.Node, Sequence[fx.Node]] = {}
        self.instead: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        """Write the calls.

        Raises:
            _CannotSplitError: a call needs all samples at once, or no chunk splits a result.
        """
        for node in list(self.graph.nodes):
            if node in self.joined:
                self.parts[node] = [self.instead.get(part, part) for part in node.args[0]]
                continue
            read = [each for each in node.all_input_nodes if each in self.parts]
            if not read:
                continue
            if node.op == "output" or len({tuple(self._sizes(each)) for each in read}) > 1:
                raise _CannotSplitError
            with self.graph.inserting_before(node):
                self._write(node, read)

    def replace(self) -> None:
        """Replace the calls that read parts or means by the calls written for them."""
        for node, own in self.instead.items():
            node.replace_all_uses_with(own)
        for node in reversed(list(self.graph.nodes)):
            if (node in self.parts or node in self.instead) and not node.users:
                self.graph.erase_node(node)

    def _sizes(self, node: fx.Node) -> list[float]:
        """The share of each part."""
        sizes = [_size(part) for part in self.parts[node]]
        return [size / sum(sizes) for size in sizes]

    def _write(self, node: fx.Node, read: Sequence[fx.Node]) -> None:
        if node.target in _TAKEN and _along_batch(node, 2):
            sizes = [made.shape[0] for made in node.meta["val"]]
            if sizes != [_size(part) for part in self.parts[read[0]]]:
                raise _CannotSplitError
            for user in list(node.users):
                self.instead[user] = self.parts[read[0]][int(str(user.args[1]))]
            self.parts[node] = self.parts[read[0]]
        elif node.target is aten.slice.Tensor and _along_batch(node, 1):
            self.instead[node] = self._slice(node, self.parts[read[0]])
        elif node.target in _MEANS | _SUMS and _over_batch(node):
            self.instead[node] = self._reduced(node, self._sizes(read[0]))
        elif node not in self.instead:
            self.parts[node] = self._each(node)

    def _slice(self, node: fx.Node, parts: Sequence[fx.Node]) -> fx.Node:
        total = sum(map(_size, parts))
        start, stop, step = slice(*node.args[2:]).indices(total)
        before = 0
        for part in parts:
            if (before, before + _size(part), 1) == (start, stop, step):
                return part
            before += _size(part)
        raise _CannotSplitError

    def _reduced(self, node: fx.Node, shares: Sequence[float]) -> fx.Node:
        """The mean (the sum) over all samples, from those over each part's."""
        if node.target in _NUM_SETTINGS and (len(node.args) > _NUM_SETTINGS[node.target] or node.kwargs):
            raise _CannotSplitError
        own = self._each(node, of_samples=False)
        if node.target not in _SUMS:
            own = [called_as(self.graph, node, aten.mul.Tensor, (each, share))
                   for each, share in zip(own, shares, strict=True)]  # fmt: skip
        total = own[0]
        for each in own[1:]:
            total = called_as(self.graph, node, aten.add.Tensor, (total, each))
        return total

    def _each(self, node: fx.Node, *, of_samples: bool = True) -> list[fx.Node]:
        """The call for every part."""
        if _draws(node) or any(name in str(node.target) for name in _OF_ALL):
            raise _CannotSplitError
        first = next(each for each in node.all_input_nodes if each in self.parts)
        shares, made, begin, place = self._sizes(first), [], 0.0, self.grown.get(node.name, 0)
        for index, share in enumerate(shares):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._part(index, begin, share, node))
            if of_samples and node.target is not operator.getitem:
                args = _resized(args, node.meta["val"], share, place)
            made.append(called_as(self.graph, node, node.target, args, kwargs))
            begin += share
            if of_samples and not _is_share(made[-1].meta["val"], node.meta["val"], share, place):
                raise _CannotSplitError
        return made

    def _part(self, index: int, begin: float, share: float, node: fx.Node) -> Callable[[fx.Node], fx.Node]:
        whole = max((_size(each) for each in node.all_input_nodes if each in self.parts), default=0)

        def part(read: fx.Node) -> fx.Node:
            if read in self.parts:
                return self.parts[read][index]
            if self.grown.get(read.name) != 0 or _size(read) != whole:
                return self.instead.get(read, read)
            start, size = round(begin * whole), round(share * whole)
            return called_as(self.graph, node, aten.slice.Tensor, (read, 0, start, start + size))

        return part


def _draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers, which are numbered in the order of the forward."""
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    if node.target is aten.dropout.default:
        return bool(node.args[1] and node.args[2])
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return int((value[0] if isinstance(value, tuple | list) else value).shape[0])


def _along_batch(node: fx.Node, place: int) -> bool:
    dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
    value = node.all_input_nodes[0].meta["val"]
    return dim % value.dim() == 0


def _over_batch(node: fx.Node) -> bool:
    if node.target not in (aten.mean.dim, aten.sum.dim_IntList):
        return True
    dims: Any = node.args[1]
    rank = node.all_input_nodes[0].meta["val"].dim()
    return not dims or 0 in [dim % rank for dim in dims]


def _resized(args: Any, value: Any, share: float, place: int) -> Any:
    """The arguments with sizes of the result replaced by those of a part; its dim `place` is the batch."""
    if not isinstance(value, torch.Tensor) or not value.dim():
        return args

    def resized(sizes: Any) -> Any:
        if not isinstance(sizes, list | tuple) or len(sizes) != value.dim() or sizes[place] != value.shape[place]:
            return sizes
        return [*sizes[:place], round(sizes[place] * share), *sizes[place + 1 :]]

    return tuple(map(resized, args))


def _is_share(part: Any, whole: Any, share: float, place: int) -> bool:
    if isinstance(part, tuple | list):
        return all(_is_share(one, other, share, place) for one, other in zip(part, whole, strict=True))
    if not isinstance(part, torch.Tensor) or not isinstance(whole, torch.Tensor):
        return bool(part == whole)
    expected = [round(size * share) if at == place else size for at, size in enumerate(whole.shape)]
    return part.dim() > place and list(part.shape) == expected
