"""Lower bounds on the forecast of a configuration, from closed forms.

A pipeline rank cannot begin before the first micro-batch has passed the chunks before it. It must do all of its work,
one action after the other, and its last backward must pass these chunks again. With equal chunks this is the known
bubble, (p - 1)(F + B) for 1F1B and 1/v of it for v chunks per rank (Narayanan et al. 2021, arXiv 2104.04473, section
2.2). With unequal chunks and any placement it is a bound.

A chunk that keeps at most k micro-batches begins its i-th forward only after i - k of them have come back. A round trip
takes R, so the last micro-batch comes back no earlier than ceil(m / k) R after the first began. This is the cost of the
time on links in the steady state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plans.schedules import Schedule
from plans.schedules.variants import VARIANTS, variant_of_rows
from search.devices.costs import WAYS, Table, piece_counts
from search.devices.critical_paths import CriticalPaths

__all__ = ["LayerSplits", "ScheduleSpace"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FIRST, _FORWARD, _CLOSING, _LAST, _INPUTS, _JOINED = range(len(WAYS))


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSplits:
    """Spreads of a space, each with a number of blocks of every chunk that recompute; the others keep everything.

    Args:
        spread: (row) its number.
        recomputed: (row) blocks, the first ones of every chunk; as many as the largest chunk has: all.
        pieces: (row, chunk, piece) how many; blocks that keep everything are further pieces, where there may be any.
        order: (row, chunk, way) which piece an action meets first.
        whole, chosen: where they are a part of others: those, and which of them.
    """

    spread: Ints
    recomputed: Ints
    pieces: Floats
    order: Ints
    whole: LayerSplits | None = None
    chosen: Ints | None = None

    def __len__(self) -> int:
        return len(self.spread)

    def take(self, chosen: Ints) -> LayerSplits:
        """The rows at the chosen indices."""
        return LayerSplits(
            spread=self.spread[chosen], recomputed=self.recomputed[chosen], pieces=self.pieces[chosen],
            order=self.order[chosen], whole=self.whole or self,
            chosen=chosen if self.chosen is None else self.chosen[chosen],
        )  # fmt: skip

    @cached_property
    def has(self) -> NDArray[np.bool_]:
        """(piece, row, chunk) whether the chunk has at least one such piece."""
        return np.ascontiguousarray((self.pieces > 0).transpose(2, 0, 1))

    @property
    def kept(self) -> Ints:
        """(row, chunk) number of blocks that keep all their activations."""
        blocks = np.asarray(self.pieces[:, :, 1:].sum(axis=2) - self.pieces[:, :, 2], dtype=np.int64)
        return np.asarray(np.maximum(blocks - self.recomputed[:, None], 0))


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleSpace:
    """A schedule and several spreads of the layers over its chunks, ready to be priced.

    Args:
        schedule: schedule of the pipeline.
        layers: per spread the blocks of every chunk.
        num_dense: how many of the first blocks have a plain MLP where the others have experts.

    Attributes:
        pieces: (spread, chunk, piece) how many.
        order: (spread, chunk, way) which piece an action meets first.
        placement, owners: pipeline rank of each chunk; (chunk, rank) 1 where they belong together.
        begins: per rank its first chunk.
        rounds, rest: per chunk how often it is filled after the first time, and the micro-batches beyond.
        split: whether the schedule splits the backward.
        joined: per chunk how many backwards are whole nevertheless.
        ends_joined: per chunk whether the last of them is.
    """

    schedule: Schedule
    layers: Sequence[tuple[int, ...]]
    num_dense: int = 0

    pieces: Floats = field(init=False)
    order: Ints = field(init=False)
    placement: Ints = field(init=False)
    owners: Floats = field(init=False)
    begins: Ints = field(init=False)
    rounds: Ints = field(init=False)
    rest: Ints = field(init=False)
    split: bool = field(init=False)
    joined: Ints = field(init=False)
    ends_joined: NDArray[np.bool_] = field(init=False)
    _one_each: bool = field(init=False)
    _known: dict[str, LayerSplits] = field(init=False, default_factory=dict)
    _hops: dict[tuple[float, ...], Floats] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        schedule = self.schedule
        pieces = piece_counts(self.layers, self.num_dense).astype(np.float64)
        blocks, dense = pieces[:, :, 1], pieces[:, :, 3] if self.num_dense else np.zeros(pieces.shape[:2])
        forward = np.where(dense > 0, 3, np.where(blocks > 0, 1, 2))  # which piece an action meets first
        forward[:, 0] = 0
        backward = np.where(blocks > 0, 1, np.where(dense > 0, 3, 0))
        backward[:, -1] = 2
        order = np.stack([forward if way.startswith("F") else backward for way in WAYS], axis=2)
        placement = np.asarray(schedule.placement)
        owners = (placement[:, None] == np.arange(schedule.num_ranks)).astype(np.float64)
        table = schedule.table
        opened = np.where(table.kind == 0, 1, np.where(table.kind == 3, 0, -1))
        by_stage = np.argsort(table.stage, kind="stable")  # of one rank each, so in the order of that rank
        starts = np.searchsorted(table.stage[by_stage], np.arange(schedule.num_stages))
        total = np.concatenate([[0], np.cumsum(opened[by_stage])])
        alive = np.maximum.reduceat(total[1:], starts) - total[starts]
        rounds, rest = np.divmod(schedule.num_micro_batches - 1, alive)
        split, whole = bool((table.kind >= 2).any()), table.kind == 1
        variant = variant_of_rows(schedule)
        chunks = np.arange(schedule.num_stages)
        for name, value in {
            "_one_each": schedule.placement == tuple(range(schedule.num_ranks)),
            "pieces": pieces, "order": order, "placement": placement, "owners": owners,
            "begins": owners.argmax(axis=0), "rounds": rounds + 1, "rest": rest,
            "split": split, "joined": split * np.bincount(table.stage[whole], minlength=schedule.num_stages),
            "ends_joined": split & np.isin(chunks, table.stage[variant == VARIANTS.index("B.last")]),
        }.items():  # fmt: skip
            object.__setattr__(self, name, value)

    @cached_property
    def paths(self) -> CriticalPaths:
        """The longest paths found so far; empty at first."""
        return CriticalPaths(self.schedule, split=self.split)

    @cached_property
    def all(self) -> LayerSplits:
        """All spreads, with either every block recomputing or none."""
        every = np.full(len(self.layers), self.most)
        return LayerSplits(spread=np.arange(len(self.layers)), recomputed=every, pieces=self.pieces, order=self.order)

    @cached_property
    def most(self) -> int:
        """The blocks of the largest chunk of any spread."""
        return max(max(layers) for layers in self.layers)

    def some(self, name: str, counts: Callable[[int], Sequence[int | None]]) -> LayerSplits:
        """All spreads with all numbers of blocks that recompute, `counts` of the largest chunk's; kept by a name."""
        if name not in self._known:
            numbers = [
                (number, max(layers) if some is None else some)
                for number, layers in enumerate(self.layers) for some in counts(max(layers))
            ]  # fmt: skip
            spread, recomputed = np.array(numbers, dtype=np.int64).reshape(-1, 2).T
            plain = self.pieces[spread]
            dense = plain[:, :, 3] if self.num_dense else np.zeros(plain.shape[:2])
            kept = np.maximum(plain[:, :, 1] + dense - recomputed[:, None], 0)
            full_memory_blocks = np.minimum(kept, plain[:, :, 1])
            further = [full_memory_blocks, kept - full_memory_blocks] if self.num_dense else [full_memory_blocks]
            pieces = np.concatenate([plain, np.stack(further, axis=2)], axis=2)
            pieces[:, :, 1] -= full_memory_blocks
            if self.num_dense:
                pieces[:, :, 3] -= kept - full_memory_blocks
            order, width = self.order[spread].copy(), plain.shape[2]
            for way, name in enumerate(WAYS):
                if not name.startswith("F"):  # a backward meets the last blocks first
                    own = order[:, :, way]
                    own[(own == 1) & (full_memory_blocks > 0)] = width
                    own[(own == 3) & (kept > full_memory_blocks)] = width + 1
            self._known[name] = LayerSplits(spread=spread, recomputed=recomputed, pieces=pieces, order=order)
        return self._known[name]

    def choice(self, rows: LayerSplits, number: int) -> tuple[tuple[int, ...], int | None]:
        """The layers of a row, and how many blocks of a chunk recompute, None for all."""
        layers, some = self.layers[int(rows.spread[number])], int(rows.recomputed[number])
        return layers, None if some >= max(layers) else some

    def learn(self, table: Table, transfers_s: Sequence[float], *, together: bool = True) -> None:
        """Find the longest paths of all spreads with these times; arguments as of `bounds_s`."""
        self.paths.learn(self.pieces @ table.work, self.hops_s(transfers_s), only_first=not together)

    def hops_s(self, transfers_s: Sequence[float]) -> Floats:
        """Per chunk the time on the link from the chunk before it."""
        key = tuple(transfers_s)
        if key not in self._hops:
            self._hops[key] = self._on_links(key)
        return self._hops[key]

    def _on_links(self, transfers_s: Sequence[float]) -> Floats:
        placement, num_ranks = self.placement, self.schedule.num_ranks
        hops = np.zeros(len(placement))
        if num_ranks > 1:
            for chunk in range(1, len(placement)):
                here, there = int(placement[chunk - 1]), int(placement[chunk])
                if here != there:
                    hops[chunk] = transfers_s[here if (here + 1) % num_ranks == there else there]
        return hops

    def _by_rank(self, times: Floats) -> Floats:
        """(row, rank) sums over the chunks of each rank."""
        return times if self._one_each else times @ self.owners

    def bounds_s(
        self,
        table: Table,
        transfers_s: Sequence[float],
        trailing_s: Floats | None = None,
        *,
        together: bool = True,
        rows: LayerSplits | None = None,
    ) -> Floats:
        """A bound for each spread, or each of `rows`.

        Args:
            table: of what the pieces cost.
            transfers_s: from pipeline rank i to the next, the last entry from the last to the first.
            trailing_s: per spread and chunk what reductions take beyond the end of the chunk's last action.
            together: all ranks begin a step together; else the time of each counts from its own beginning, and only
                that of the rank of the first chunk is sure to be 0.
            rows: all spreads by default.
        """
        count, rows = self.schedule.num_micro_batches, rows or self.all
        times = rows.pieces @ table.work
        passing = times.copy()  # a rank is busy with gathers, too, but may be so before its tensor arrives
        if table.gathers:
            there = rows.pieces.any(axis=2, keepdims=True)  # a chunk of nothing gathers nothing
            added = there * table.first_gather[rows.order, np.arange(len(WAYS))]
            times += added
            passing += np.minimum(added, 0.0)
        passing[..., _FIRST] = np.minimum(passing[..., _FIRST], passing[..., _FORWARD])
        gathered = np.maximum(times[..., _FIRST] - passing[..., _FIRST], 0.0)
        forward, inputs = times[..., _FORWARD], times[..., _INPUTS]
        first = np.minimum(times[..., _FIRST], forward)  # later chunks of a rank may hide the gathers of a step's begin
        first[:, self.begins] = times[:, self.begins, _FIRST]
        closing, last, joined = times[..., _CLOSING], times[..., _LAST], times[..., _JOINED]
        last = np.where(self.ends_joined, np.minimum(last, closing), last)  # reductions begin before weight gradients
        there_s, back = passing[..., _FORWARD], passing[..., _INPUTS if self.split else _CLOSING]
        hops = self.hops_s(transfers_s)
        travelled = np.cumsum(hops)
        head = np.cumsum(passing[..., _FIRST], axis=1) - passing[..., _FIRST] + travelled
        tail = np.cumsum(back, axis=1) - back + travelled
        update = self._by_rank(rows.pieces @ table.update)
        update_first = update[:, self.placement[0]]
        through = first + (count - 1) * forward + count * inputs
        busy = through + (count - 1) * closing + last + self.joined * joined
        begun = np.maximum(head - gathered, 0.0)[:, self.begins]
        ended = begun + self._by_rank(busy)
        best = ended + update
        if not together:
            best = best - begun
        if trailing_s is not None:
            best = best + np.stack(
                [trailing_s[:, self.placement == rank].min(axis=1) for rank in range(self.schedule.num_ranks)], axis=1
            )
        result = best.max(axis=1)
        if self.split:
            ended, after = begun + self._by_rank(through), last[:, 0] + update_first
        else:
            after = update_first
        result = np.maximum(result, (ended + tail[:, self.begins]).max(axis=1) + after)
        # there and back: the rest of the model's way from every chunk
        way = there_s + back
        around = way.sum(axis=1, keepdims=True) - np.cumsum(way, axis=1) + way + 2 * (travelled[-1] - travelled)
        cycle = head + self.rest * np.minimum(passing[..., _FIRST], there_s) + self.rounds * around + tail
        result = np.maximum(result, cycle.max(axis=1) + after)
        if len(self.paths):
            on_paths = self.paths.lengths_s(passing, hops) + update[:, self.paths.ends]
            if not together:
                on_paths = on_paths[:, self.paths.ends == self.placement[0]]
            result = np.maximum(result, on_paths.max(axis=1, initial=0.0))
        host = self._by_rank(rows.pieces @ table.host(count))
        if not together:
            host = host[:, [int(self.placement[0])]]
        return np.asarray(np.maximum(result, host.max(axis=1)))
