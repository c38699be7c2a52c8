"""Parameters as a group of ranks holds them, and buckets of parameters that are communicated together.

Each parameter is sharded on its own: its local weight is flattened, padded with zeros to a multiple of the number of
shards, and split evenly. A bucket is a matrix with one row per member of the collective, which contains the shards of
its parameters next to each other. One collective over the flattened matrix therefore serves all of them, and weights,
states and updates do not depend on buckets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property

from plans.layout import Layout, TensorLayout
from plans.model.graph import Tensor, itemsize
from plans.optimizer import Optimizer

__all__ = ["Bucket", "LocalParameter", "filled", "padded_shard", "shard_axes"]


def padded_shard(num_elements: int, num_shards: int) -> int:
    """Elements of one shard of a flattened tensor that is padded with zeros to a multiple of the number of shards."""
    return -(-num_elements // num_shards)


def shard_axes(home: TensorLayout, partial: tuple[str, ...]) -> tuple[str, ...]:
    """All axes along which ranks hold the same weight, those in `partial` first; () if there are none."""
    same = tuple(axis for axis in home.replicated if axis not in partial and home.mesh.size((axis,)) > 1)
    axes = (*partial, *same)
    return axes if home.mesh.size(axes) > 1 else ()


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots: cached properties need a place
class LocalParameter:
    """A parameter on the ranks of one group.

    Args:
        tensor: tensor of the graph.
        home: the layout of its weight.
        summed: the axes along which its accumulated gradient is a partial sum.
        optimizer: how it is sharded, reduced and updated.
    """

    tensor: Tensor
    home: TensorLayout
    summed: tuple[str, ...]
    optimizer: Optimizer

    @property
    def name(self) -> str:
        """Name of the tensor, and of the value that operators read."""
        return self.tensor.name

    @property
    def mesh(self) -> Layout:
        """The mesh that its axes belong to."""
        return self.home.mesh

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local weight."""
        return self.home.local_shape(self.tensor.shape)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes over which it is sharded, those of its gradient's partial sums first; () for none."""
        if self.optimizer.parallel_level < 1 or self.tensor.size_bytes < self.optimizer.threshold_bytes:
            return ()
        return shard_axes(self.home, self.summed)

    @cached_property
    def same(self) -> tuple[str, ...]:
        """The axes over which it is sharded and every rank has the same gradient."""
        return tuple(axis for axis in self.axes if axis not in self.summed)

    @cached_property
    def shard_size(self) -> int:
        """Elements of a shard; of the full local weight if it is not sharded."""
        return padded_shard(math.prod(self.shape), self.mesh.size(self.axes))

    @cached_property
    def repeated(self) -> tuple[str, ...]:
        """The axes along which ranks end up with the same gradient."""
        return tuple(axis for axis in self.home.replicated if axis not in self.axes)

    @cached_property
    def gathered_per_use(self) -> bool:
        """Whether its weight is gathered for each use."""
        return self.optimizer.parallel_level == 3 and bool(self.axes)

    @cached_property
    def reduced_per_micro_batch(self) -> bool:
        """Whether its gradient is reduced after each backward, into shards that are accumulated."""
        return self.optimizer.reduced_per_micro_batch and bool(self.axes)

    @cached_property
    def needs_reduction(self) -> bool:
        """Whether the gradient must be communicated between the backward and the update."""
        return self.mesh.size(self.summed) > 1 or (self.optimizer.parallel_level >= 2 and bool(self.axes))


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Parameters of equal mesh, axes and dtype that are gathered or reduced together."""

    parameters: tuple[LocalParameter, ...]

    @cached_property
    def name(self) -> str:
        """Its first parameter and the number of others."""
        more = f"+{len(self.parameters) - 1}" if len(self.parameters) > 1 else ""
        return f"{self.first.name}{more}"

    @property
    def first(self) -> LocalParameter:
        """The first parameter, which has all common properties."""
        return self.parameters[0]

    @property
    def is_single(self) -> bool:
        """Whether it holds one parameter only."""
        return len(self.parameters) == 1

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters."""
        return tuple(parameter.name for parameter in self.parameters)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of one shard of each parameter; of the full local weight if they are not sharded."""
        return tuple(parameter.shard_size for parameter in self.parameters)


def filled(
    parameters: Iterable[LocalParameter],
    key_of: Callable[[LocalParameter], Hashable],
    dtype_of: Callable[[LocalParameter], str],
    limit_bytes: int,
    block_of: Callable[[LocalParameter], str] | None = None,
) -> list[Bucket]:
    """Parameters grouped into buckets in their order; a bucket holds parameters of equal key.

    A bucket is closed when the full local tensors in it reach `limit_bytes` (0: one parameter per bucket), or, given
    `block_of`, when it holds all parameters of a block.
    """
    result: list[Bucket] = []
    open_: dict[Hashable, list[LocalParameter]] = {}
    sizes: dict[Hashable, int] = {}
    for parameter in parameters:
        if not limit_bytes:
            result.append(Bucket(parameters=(parameter,)))
            continue
        key = (key_of(parameter), block_of(parameter) if block_of else "")
        held = open_.setdefault(key, [])
        held.append(parameter)
        sizes[key] = sizes.get(key, 0) + math.prod(parameter.shape) * itemsize(dtype_of(parameter))
        if block_of is None and sizes[key] >= limit_bytes:
            sizes.pop(key)
            result.append(Bucket(parameters=tuple(open_.pop(key))))
    return result + [Bucket(parameters=tuple(held)) for held in open_.values()]
