"""Redistribution on pretend ranks: every rank's part is a numpy array, all in one process.

It does literally what a step says, chunk by chunk and padded where parts are uneven, and looks at nothing but the
parts. So it shows what a sequence of steps does to values without any process group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from plans.layout import TensorLayout
from plans.redistribution.pieces import pieces
from plans.redistribution.step import Step, StepKind

__all__ = ["Parts", "apply_step", "apply_steps", "split"]

Parts = Mapping[int, npt.NDArray[np.float64]]
"""What each rank holds."""


def split(layout: TensorLayout, terms: Sequence[npt.NDArray[np.float64]]) -> dict[int, npt.NDArray[np.float64]]:
    """Cut a tensor: `terms` are its partial terms in index order, just one array if the layout has no partial axes.

    >>> from plans.layout import Layout
    >>> split(Layout((2,), ("dp",))("dp"), [np.arange(4.0)])[1]
    array([2., 3.])
    """
    parts = {}
    for rank in layout.mesh.rank_list:
        term = terms[layout.mesh.index(rank, layout.partial)]
        parts[rank] = term[_slices(layout.region(rank, term.shape))].copy()
    return parts


def apply_steps(steps: Sequence[Step], parts: Parts, shape: Sequence[int]) -> Parts:
    """Apply the steps one after the other."""
    for step in steps:
        parts = apply_step(step, parts, shape)
    return parts


def apply_step(step: Step, parts: Parts, shape: Sequence[int]) -> Parts:
    """What every rank holds after `step`, for a tensor of the global `shape`.

    >>> from plans.layout import Layout
    >>> mesh = Layout((2,), ("dp",))
    >>> step = Step(kind=StepKind.ALL_GATHER, axes=("dp",), dim=0, before=mesh("dp"), after=mesh("None"))
    >>> apply_step(step, {0: np.zeros(1), 1: np.ones(1)}, (2,))[0]
    array([0., 1.])
    """
    if step.kind is StepKind.TRANSFER:
        return _transfer(step, parts, shape)
    mesh = step.before.mesh
    sizes = [mesh.size((axis,)) for axis in step.axes]
    done: dict[int, npt.NDArray[np.float64]] = {}
    for group in mesh.groups(step.axes):
        for member, rank in enumerate(group):
            mine = parts[rank]
            if step.kind is StepKind.ALL_REDUCE:
                done[rank] = sum((parts[each] for each in group), np.zeros_like(mine))
                continue
            assert step.dim is not None
            if step.kind is StepKind.SLICE:
                done[rank] = _chunk(mine, step.dim, sizes, member)
            elif step.kind is StepKind.REDUCE_SCATTER:
                total = sum((parts[each] for each in group), np.zeros_like(mine))
                done[rank] = _chunk(total, step.dim, sizes, member)
            else:
                chunks = [parts[each] for each in group]
                if step.kind is StepKind.ALL_TO_ALL:
                    assert step.to_dim is not None
                    chunks = [_chunk(chunk, step.to_dim, sizes, member) for chunk in chunks]
                done[rank] = _join(chunks, step.dim, step.before.local_shape(shape)[step.dim])
    return done


def _join(chunks: list[npt.NDArray[np.float64]], dim: int, padded: int) -> npt.NDArray[np.float64]:
    """Join chunks that travel padded to equal size and are trimmed on arrival."""
    widths = [chunk.shape[dim] for chunk in chunks]
    sent = []
    for chunk in chunks:
        pad = [(0, padded - chunk.shape[dim] if at == dim else 0) for at in range(chunk.ndim)]
        sent.append(np.pad(chunk, pad, constant_values=np.nan))
    arrived = [np.take(chunk, range(width), axis=dim) for chunk, width in zip(sent, widths, strict=True)]
    return np.concatenate(arrived, axis=dim)


def _chunk(part: npt.NDArray[np.float64], dim: int, sizes: Sequence[int], member: int) -> npt.NDArray[np.float64]:
    """The chunk of a group's member, cut by one axis after the other."""
    for size, digit in zip(sizes, np.unravel_index(member, sizes), strict=True):
        width = -(-part.shape[dim] // size)
        start = min(int(digit) * width, part.shape[dim])
        part = np.take(part, range(start, min(start + width, part.shape[dim])), axis=dim)
    return part.copy()


def _transfer(step: Step, parts: Parts, shape: Sequence[int]) -> Parts:
    done = {rank: np.full(step.after.part_shape(rank, shape), np.nan) for rank in step.after.mesh.rank_list}
    for piece in pieces(step.before, step.after, shape):
        there = step.before.region(piece.src_rank, shape)
        here = step.after.region(piece.dst_rank, shape)
        value = parts[piece.src_rank][_slices(piece.region, there)]
        done[piece.dst_rank][_slices(piece.region, here)] = value
    return done


def _slices(region: Sequence[tuple[int, int]], origin: Sequence[tuple[int, int]] | None = None) -> tuple[slice, ...]:
    starts = [0] * len(region) if origin is None else [start for start, _ in origin]
    return tuple(slice(low - start, high - start) for (low, high), start in zip(region, starts, strict=True))
