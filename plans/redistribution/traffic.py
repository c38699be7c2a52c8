"""How many bytes a step brings to each rank.

Collectives are counted as their bandwidth-optimal (ring or pairwise) forms: with n members and chunks of c bytes an
all-gather, reduce-scatter or all-to-all brings (n - 1) c to each member, an all-reduce twice that (reduce-scatter and
all-gather of chunks; Thakur, Rabenseifner and Gropp 2005). Chunks of uneven dims are padded to the largest chunk.
A transfer brings exactly what a rank lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.layout import TensorLayout

from plans.redistribution.step import Step, StepKind

__all__ = ["max_received_bytes", "received_bytes"]


def received_bytes(step: Step, shape: Sequence[int], itemsize: int = 4) -> dict[int, int]:
    """The bytes that each rank of `step.after.mesh` receives, for a tensor of the global `shape`.

    >>> from plans.layout import Layout
    >>> mesh = Layout((2,), ("dp",))
    >>> step = Step(kind=StepKind.ALL_GATHER, axes=("dp",), dim=0, before=mesh("dp"), after=mesh("None"))
    >>> received_bytes(step, (4,), 4)
    {0: 8, 1: 8}
    """
    if step.kind is StepKind.TRANSFER:
        return {rank: lacks * itemsize for rank, lacks in _lacking(step.before, step.after, tuple(shape)).items()}
    return dict.fromkeys(step.after.mesh.rank_list, _collective_elements(step, shape) * itemsize)


def max_received_bytes(step: Step, shape: Sequence[int], itemsize: int = 4) -> int:
    """The bytes of the rank that receives most."""
    if step.kind is StepKind.TRANSFER:
        return max(_lacking(step.before, step.after, tuple(shape)).values()) * itemsize
    return _collective_elements(step, shape) * itemsize


@lru_cache(maxsize=4096)
def _lacking(before: TensorLayout, after: TensorLayout, shape: tuple[int, ...]) -> dict[int, int]:
    """The elements that every rank of `after` does not hold under `before`; no need to know who sends them."""
    held = {rank: at for at, rank in enumerate(before.mesh.rank_list)}
    pairs = [(at, held[rank]) for at, rank in enumerate(after.mesh.rank_list) if rank in held]
    here, there = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    low, high = cuts(after, shape)
    old_low, old_high = cuts(before, shape)
    lacks = np.prod(high - low, axis=0)
    common = np.minimum(high[:, here], old_high[:, there]) - np.maximum(low[:, here], old_low[:, there])
    same_term = np.ones(len(pairs), dtype=bool)
    if before.partial:
        same_term[:] = [
            before.mesh.index(before.mesh.rank_list[old], before.partial)
            == after.mesh.index(after.mesh.rank_list[new], after.partial)
            for new, old in pairs
        ]
    lacks[here] -= np.where(same_term, np.prod(np.maximum(common, 0), axis=0), 0)
    return dict(zip(after.mesh.rank_list, lacks.tolist(), strict=True))


def cuts(layout: TensorLayout, shape: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and stops of all regions as arrays [dim, position of the rank in the mesh]."""
    sizes = [layout.mesh.size((axis,)) for axis in layout.mesh.alias_name]
    coordinates = dict(zip(layout.mesh.alias_name, np.indices(sizes).reshape(len(sizes), -1), strict=True))
    start = np.zeros((len(shape), layout.mesh.num_ranks), dtype=np.int64)
    length = np.repeat(np.array(shape, dtype=np.int64)[:, None], layout.mesh.num_ranks, axis=1)
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            part = -(-length[dim] // layout.mesh.size((axis,)))
            offset = np.minimum(coordinates[axis] * part, length[dim])
            start[dim] += offset
            length[dim] = np.minimum(part, length[dim] - offset)
    return start, start + length


def _collective_elements(step: Step, shape: Sequence[int]) -> int:
    members = step.before.mesh.size(step.axes)
    if step.kind is StepKind.SLICE:
        return 0
    if step.kind is StepKind.ALL_GATHER:
        return (members - 1) * math.prod(step.before.local_shape(shape))
    if step.kind is StepKind.REDUCE_SCATTER:
        return (members - 1) * math.prod(step.after.local_shape(shape))
    if step.kind is StepKind.ALL_REDUCE:
        return 2 * (members - 1) * -(-math.prod(step.before.local_shape(shape)) // members)
    chunk = list(step.before.local_shape(shape))
    assert step.to_dim is not None
    chunk[step.to_dim] = step.after.local_shape(shape)[step.to_dim]
    return (members - 1) * math.prod(chunk)
