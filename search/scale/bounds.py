"""Lower bounds on the forecast of a configuration, from closed forms.

A pipeline rank cannot begin before the first micro-batch has come through the chunks before its own, must do all its
work one after the other, and its last backward must still go back through those chunks. With equal chunks this is the
bubble of the literature, (p - 1)(F + B) for 1F1B and 1/v of it for v chunks per rank (Narayanan et al. 2021, arXiv
2104.04473, section 2.2); with unequal ones and any placement it remains a bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plans.schedules import Schedule
from search.scale.costs import Table

__all__ = ["mesh_bound_s", "physics_bound_s", "step_bounds_s"]

Floats = NDArray[np.float64]


def step_bounds_s(
    table: Table,
    schedule: Schedule,
    layers: Sequence[Sequence[int]],
    *,
    split: bool,
    transfers_s: Sequence[float] = (),
    trailing_s: Floats | None = None,
) -> Floats:
    """A bound for each of several spreads of the layers.

    Args:
        table: of what the pieces cost.
        schedule: of the pipeline.
        layers: per spread the blocks of every chunk.
        split: whether the schedule splits the backward.
        transfers_s: from pipeline rank i to the next, the last entry from the last to the first; nothing by default.
        trailing_s: per spread and chunk what reductions take beyond the end of the chunk's last action.

    Returns:
        Seconds per spread.
    """
    blocks = np.asarray(layers, dtype=np.float64)
    chunks, count = blocks.shape[1], schedule.num_micro_batches
    pieces = np.zeros((*blocks.shape, 3))
    pieces[:, 0, 0] = 1
    pieces[:, :, 1] = blocks
    pieces[:, -1, 2] = 1
    has = blocks > 0
    first_forward = np.where(has, 1, 2)  # which piece an action meets first
    first_forward[:, 0] = 0
    first_backward = np.where(has, 1, 0)
    first_backward[:, -1] = 2

    def seconds(name: str) -> Floats:
        order = first_forward if name.startswith("F") else first_backward
        return np.asarray(pieces @ table.work[name] + table.first_gather[name][order])

    first, forward, inputs = seconds("F.first"), seconds("F"), seconds("I")
    closing, closing_last = seconds("closing"), seconds("closing.last")
    update = pieces @ table.update
    hops = np.zeros(chunks)
    placement = np.asarray(schedule.placement)
    if len(transfers_s) > 1:
        for chunk in range(1, chunks):
            here, there = int(placement[chunk - 1]), int(placement[chunk])
            if here != there:
                hops[chunk] = transfers_s[here] if (here + 1) % schedule.num_ranks == there else transfers_s[there]
    back = inputs if split else closing
    travelled = np.cumsum(hops)
    head = np.cumsum(first, axis=1) - first + travelled
    tail = np.cumsum(back, axis=1) - back + travelled
    busy = first + (count - 1) * forward + count * inputs + (count - 1) * closing + closing_last
    through = first + (count - 1) * forward + count * inputs  # what must be over before the last gradient goes back
    host = pieces @ (
        table.host["F.first"] + (count - 1) * table.host["F"] + count * table.host["I"]
        + (count - 1) * table.host["closing"] + table.host["closing.last"] + table.update_host
    )  # fmt: skip
    first_rank = int(placement[0])
    update_first = update[:, placement == first_rank].sum(axis=1)
    best = np.zeros(len(blocks))
    for rank in range(schedule.num_ranks):
        own = placement == rank
        stage = int(np.flatnonzero(own)[0])
        begun = head[:, stage]
        ended = begun + busy[:, own].sum(axis=1)
        late = trailing_s[:, own].min(axis=1) if trailing_s is not None else 0.0
        best = np.maximum(best, ended + late + update[:, own].sum(axis=1))
        if split:
            ended = begun + through[:, own].sum(axis=1)
            best = np.maximum(best, ended + tail[:, stage] + closing_last[:, 0] + update_first)
        else:
            best = np.maximum(best, ended + tail[:, stage] + update_first)
        best = np.maximum(best, host[:, own].sum(axis=1))
    return best


def mesh_bound_s(forward_s: float, backward_s: float, num_layers: int, pp: int, count: int, *, looped: bool) -> float:
    """A bound for any spread of the layers, from what a block takes.

    One chunk per rank: rank r ends no earlier than s_0 + ... + s_(r-1) + m s_r, s its seconds per micro-batch. The
    largest of these is smallest, V, where all are equal: V = T / (1 - (1 - 1/m)^p) with T the sum of all s. Several
    chunks per rank, or a split backward: m T / p.
    """
    total = num_layers * (forward_s + backward_s)
    if looped or pp == 1:
        return total * count / pp
    return total / (1.0 - (1.0 - 1.0 / count) ** pp)


def physics_bound_s(
    flops: float, peak_flops_per_s: float, moved_bytes: float, peak_Bps: float, num_devices: int
) -> float:
    """What no plan can beat: all arithmetic at the peak, or all necessary memory traffic at the peak.

    >>> physics_bound_s(4e15, 1e15, 1e12, 1e12, 2)
    2.0
    """
    return max(flops / peak_flops_per_s, moved_bytes / peak_Bps) / num_devices
