"""The bytes that each rank receives in a step.

Collectives are counted as their bandwidth-optimal (ring or pairwise) forms: with n members and chunks of c bytes an
all-gather, reduce-scatter or all-to-all brings (n - 1) c to each member, an all-reduce twice that (reduce-scatter and
all-gather of chunks; Thakur, Rabenseifner and Gropp 2005). Chunks of uneven dims are padded to the largest chunk.
A transfer brings exactly what a rank lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from plans.layout import TensorLayout
from plans.redistribution.cuts import Indices, cut, overlap
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
        lacks = _lacking(step.before, step.after, shape) * itemsize
        return dict(zip(step.after.mesh.rank_list, lacks.tolist(), strict=True))
    return dict.fromkeys(step.after.mesh.rank_list, _collective_elements(step, shape) * itemsize)


def max_received_bytes(step: Step, shape: Sequence[int], itemsize: int = 4) -> int:
    """The bytes of the rank that receives the most."""
    if step.kind is StepKind.TRANSFER:
        return int(_lacking(step.before, step.after, shape).max()) * itemsize
    return _collective_elements(step, shape) * itemsize


def _lacking(before: TensorLayout, after: TensorLayout, shape: Sequence[int]) -> Indices:
    """The elements that every rank of `after` does not hold under `before`; the senders do not matter."""
    wanted: Indices | int = 1
    held: Indices | int = 1
    if before.mesh == after.mesh and (not after.partial or before.partial == after.partial):
        for size, old, new in zip(shape, before.dims, after.dims, strict=True):
            low, high = cut(after.mesh, new, size)
            wanted = wanted * (high - low)
            held = held * overlap(after.mesh, old, new, size)
        return np.asarray(wanted - held) + np.zeros(after.mesh.num_ranks, dtype=np.int64)
    position = {rank: at for at, rank in enumerate(before.mesh.rank_list)}
    pairs = [(at, position[rank]) for at, rank in enumerate(after.mesh.rank_list) if rank in position]
    here, there = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    for size, old, new in zip(shape, before.dims, after.dims, strict=True):
        low, high = cut(after.mesh, new, size)
        old_low, old_high = cut(before.mesh, old, size)
        wanted = wanted * (high - low)
        held = held * np.maximum(np.minimum(high[here], old_high[there]) - np.maximum(low[here], old_low[there]), 0)
    lacks = np.asarray(wanted) + np.zeros(after.mesh.num_ranks, dtype=np.int64)
    ranks = after.mesh.rank_list
    same_term = [
        before.mesh.index(ranks[at], before.partial) == after.mesh.index(ranks[at], after.partial) for at, _ in pairs
    ]
    lacks[here] -= np.where(same_term, held, 0)
    return lacks


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
