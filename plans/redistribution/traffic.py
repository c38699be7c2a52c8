"""How many bytes a step brings to each rank.

Collectives are counted as their bandwidth-optimal (ring or pairwise) forms: with n members and chunks of c bytes an
all-gather, reduce-scatter or all-to-all brings (n - 1) c to each member, an all-reduce twice that (reduce-scatter and
all-gather of chunks; Thakur, Rabenseifner and Gropp 2005). Chunks of uneven dims are padded to the largest chunk.
A transfer brings exactly what a rank lacks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from plans.redistribution.pieces import pieces
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
        received = dict.fromkeys(step.after.mesh.rank_list, 0)
        for piece in pieces(step.before, step.after, shape):
            if not piece.is_local:
                received[piece.dst_rank] += piece.num_elements * itemsize
        return received
    return dict.fromkeys(step.after.mesh.rank_list, _collective_elements(step, shape) * itemsize)


def max_received_bytes(step: Step, shape: Sequence[int], itemsize: int = 4) -> int:
    """The bytes of the rank that receives most."""
    if step.kind is StepKind.TRANSFER:
        return max(received_bytes(step, shape, itemsize).values())
    return _collective_elements(step, shape) * itemsize


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
