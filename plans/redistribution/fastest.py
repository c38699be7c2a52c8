"""The sequence of least time on a mesh of few axes, over the arrays of `table`; on up to three axes it is exact.

Steps other than transfers form a graph of a few hundred states whose costs depend on little: the kind, the axes and the
bytes of a rank's part before and after. Each distinct one is priced once, and shortest paths from the start and to the
goal are found by relaxing all steps at once (Bellman 1958). A transfer may lead from any state to any other, so there
are very many; those are left out whose least conceivable time, between the shortest paths on both sides, is not below
the best sequence known, and of the rest the most promising is priced first. By rule a sequence has one transfer at
most, and one that moves nothing between ranks is none: a slice does that. On four and five axes all sequences without
a transfer are looked at as well, but only some transfers to the goal or from the start.
"""

from __future__ import annotations

import copy
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from plans.layout import DimAxes, Layout, TensorLayout
from plans.redistribution.load import load
from plans.redistribution.overlaps import leaves_domain, overlaps
from plans.redistribution.price import LocalPrice, Seconds
from plans.redistribution.space import Move, Space, State
from plans.redistribution.step import StepKind
from plans.redistribution.table import KINDS, Array, code, num_layouts, sequences, step_table

__all__ = ["EXACT_AXES", "fastest", "fastest_s", "is_small"]

EXACT_AXES = 3
"""Axes of more than one rank up to which transfers between any two states are looked at."""

_MAX_AXES, _MAX_LAYOUTS = 5, 20_000
_MAX_TRANSFERS = 32
"""On more axes: transfers that are priced."""

_STEP_S = 1e-15
"""Added to every step, so that of equals the shorter sequence wins and nothing goes round in circles."""

_NAMES = ("0", "1", "2", "3", "4")


def is_small(space: Space, start: State, goal: State) -> bool:
    """Whether the space has few enough states to search all of them."""
    if len(space.axes) <= EXACT_AXES:
        return True
    dims = _worth_splitting(space, start, goal)
    return len(space.axes) <= _MAX_AXES and num_layouts(len(space.axes), len(dims)) <= _MAX_LAYOUTS


def fastest(
    space: Space, start: State, goal: State, itemsize: int, price: LocalPrice, even: bool
) -> tuple[list[Move], float]:
    """The moves of least time from `start` to `goal`, and their seconds.

    Args:
        space: of the tensor; `is_small`.
        start, goal: different states; the goal's partial axes are among the start's.
        itemsize: bytes per element.
        price: seconds of a step.
        even: whether all layouts on the way must cut every dim evenly.
    """
    dims = _worth_splitting(space, start, goal)
    measured = _measured(space.mesh, space.shape, dims, start[1], goal[1], itemsize, price, even)
    search = copy.copy(measured)
    return search.run(start, goal), search.best


def fastest_s(space: Space, start: State, goal: State, itemsize: int, price: LocalPrice, even: bool) -> float:
    """The seconds of the moves that `fastest` returns."""
    dims = _worth_splitting(space, start, goal)
    measured = _measured(space.mesh, space.shape, dims, start[1], goal[1], itemsize, price, even)
    return copy.copy(measured).least_s(start, goal)


@lru_cache(maxsize=256)
def _measured(
    mesh: Layout, shape: tuple[int, ...], dims: tuple[int, ...], before: DimAxes, after: DimAxes, itemsize: int,
    price: LocalPrice, even: bool,
) -> _Fastest:  # fmt: skip
    return _Fastest(mesh, shape, dims, before, after, itemsize, price, even)


class _Fastest:
    """The seconds of all steps between layouts of one tensor; what was found from a start or to a goal is kept."""

    def __init__(
        self, mesh: Layout, shape: tuple[int, ...], dims: tuple[int, ...], before: DimAxes, after: DimAxes,
        itemsize: int, price: LocalPrice, even: bool,
    ) -> None:  # fmt: skip
        self.space = space = Space(mesh, TensorLayout(mesh=mesh, dims=((),) * len(shape)), shape)
        self.itemsize, self.price, self.dims = itemsize, price, dims
        self.axes = space.axes
        self.sequences = sequences(len(self.axes))
        self.number = {tuple(self.axes[axis] for axis in order): at for at, order in enumerate(self.sequences)}
        self.table = step_table(len(self.axes), len(self.dims), self._bits(before), self._bits(after))
        self.paid_from: dict[int, Seconds] = {}
        self.left_to: dict[int, Seconds] = {}
        self.sizes = tuple(space.sizes[axis] for axis in self.axes)
        every = range(1 << len(self.axes))
        self.chosen_axes = [frozenset(axis for at, axis in enumerate(self.axes) if bits >> at & 1) for bits in every]
        self.num_ranks = math.prod(self.sizes)
        self._least_transfer_s = float(self._floors(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64), False)[0])
        self._measure(even)

    def _choose(self, start: State, goal: State) -> tuple[int, int] | None:
        """Shortest paths without transfers, from the start and to the goal; then the transfer that makes it faster."""
        self.start, self.goal = self._index(start), self._index(goal)
        if self.start not in self.paid_from:
            self.paid_from[self.start] = self._relax()
        if self.goal not in self.left_to:
            self.left_to[self.goal] = self._relax_back()
        self.paid, self.left = self.paid_from[self.start], self.left_to[self.goal]
        return self._transfer()

    def least_s(self, start: State, goal: State) -> float:
        """The least time from `start` to `goal` in seconds."""
        self._choose(start, goal)
        return self.best

    def run(self, start: State, goal: State) -> list[Move]:
        """The moves of least time from `start` to `goal`."""
        if (transfer := self._choose(start, goal)) is None:
            return self._to(self.goal)
        before, after = (self._state(index) for index in transfer)
        fetch = Move(StepKind.TRANSFER, (), None, None, before, after)
        return [*self._to(transfer[0]), fetch, *self._from(transfer[1])]

    # ------------------------------------------------------------------ states

    def _bits(self, axes: DimAxes) -> int:
        return sum(1 << self.axes.index(axis) for axis in axes)

    def _index(self, state: State) -> int:
        return self.table.index[
            code(len(self.axes), tuple(self.number[state[0][dim]] for dim in self.dims), self._bits(state[1]))
        ]

    def _state(self, index: int) -> State:
        dims: list[DimAxes] = [()] * len(self.space.shape)
        for dim, number in zip(self.dims, self.table.ids[index].tolist(), strict=True):
            dims[dim] = self._names(number)
        bits = int(self.table.partial[index])
        return tuple(dims), tuple(axis for at, axis in enumerate(self.axes) if bits >> at & 1)

    def _names(self, number: int) -> DimAxes:
        return tuple(self.axes[axis] for axis in self.sequences[number])

    def _measure(self, even: bool) -> None:
        """Local sizes of all states and seconds of all steps."""
        table, space = self.table, self.space
        parts = np.array(
            [[space.part(self._names(number), dim) for number in range(len(self.sequences))] for dim in self.dims],
            dtype=np.int64,
        ).reshape(len(self.dims), len(self.sequences))
        columns = range(len(self.dims))
        sizes = np.array(self.sizes, dtype=np.int64)
        shares = np.array([np.prod(sizes[list(order)], dtype=np.int64) for order in self.sequences])
        whole = np.array([space.shape[dim] for dim in self.dims], dtype=np.int64)
        is_even = whole[:, None] % shares[None, :] == 0
        rest = math.prod(size for dim, size in enumerate(space.shape) if dim not in self.dims)
        local = np.full(len(table.ids), rest, dtype=np.int64)
        allowed = np.ones(len(table.ids), dtype=bool)
        for column in columns:
            local *= parts[column, table.ids[:, column]]
            allowed &= is_even[column, table.ids[:, column]]
        all_even = bool(allowed.all())
        self.allowed = allowed if even else np.ones(len(table.ids), dtype=bool)
        # what moves between ranks is measured on `units`, elements are units x rest / scale: where all is even, every
        # dim has as many units as there are ranks, so that what is found serves other shapes too
        self.local, self.same_units = local, even or all_even
        if self.same_units:
            total, cells = math.prod(space.shape), self.num_ranks ** len(self.dims)
            common = math.gcd(total, cells)  # reduced, so that products of large tensors fit 64 bits
            self.units, self.rest, self.scale = (self.num_ranks,) * len(self.dims), total // common, cells // common
            by_used = [total // int(np.prod([s for at, s in enumerate(sizes) if bits >> at & 1] or [1]))
                       for bits in range(1 << len(self.axes))]  # fmt: skip
            classes, class_of = table.classes, table.class_of
            prices = [
                self._price(kind, bits, by_used[one] + by_used[two] if kind == 0 else max(by_used[one], by_used[two]))
                for kind, bits, one, two in classes.tolist()
            ]
        else:
            self.units, self.rest, self.scale = tuple(whole.tolist()), rest, 1
            masks = np.array([sum(1 << axis for axis in order) for order in self.sequences], dtype=np.int64)
            before, after = local[table.source], local[table.target]
            touched = np.where(table.kind == 0, before + after, np.maximum(before, after))
            values, number = np.unique(touched, return_inverse=True)
            width = 1 << len(self.axes)
            what, every = table.kind * width + masks[table.moved], width * len(KINDS)
            found, class_of = np.unique(number.reshape(-1) * every + what, return_inverse=True)
            class_of = class_of.reshape(-1)
            prices = [
                self._price(key % every // width, key % width, int(values[key // every])) for key in found.tolist()
            ]
        self.cost = np.array(prices, dtype=np.float64)[class_of] + _STEP_S if len(table.kind) else np.zeros(0)
        if even and not all_even:
            self.cost[~(allowed[table.source] & allowed[table.target])] = np.inf

    def _price(self, kind: int, bits: int, elements: int) -> float:
        size = self.itemsize
        return self.price.local_s(KINDS[kind], self.space.mesh, self.chosen_axes[bits], elements * size, size)

    # ----------------------------------------------------------- shortest paths

    def _relax(self) -> Seconds:
        table, paid = self.table, np.full(len(self.table.ids), np.inf)
        paid[self.start] = 0.0
        while len(table.source):
            least = np.minimum.reduceat(paid[table.source] + self.cost, table.starts)
            better = least < paid[table.reached]
            if not better.any():
                break
            paid[table.reached[better]] = least[better]
        return paid

    def _relax_back(self) -> Seconds:
        table, left = self.table, np.full(len(self.table.ids), np.inf)
        left[self.goal] = 0.0
        order = table.leaving
        cost, goals = self.cost[order], table.target[order]
        while len(order):
            least = np.minimum.reduceat(left[goals] + cost, table.leaving_starts)
            better = least < left[table.left]
            if not better.any():
                break
            left[table.left[better]] = least[better]
        return left

    def _transfer(self) -> tuple[int, int] | None:
        """The transfer (between two states) that makes the fastest sequence together with the paths on both sides.

        None where the best sequence does without. Transfers to the goal and from the start come first: they are mostly
        among the best, and rule out the others.
        """
        self.best = float(self.paid[self.goal])
        self.chosen: tuple[int, int] | None = None
        least_s = self._least_transfer_s
        sources = np.flatnonzero(self.allowed & (self.paid + least_s < self.best))
        targets = np.flatnonzero(self.allowed & (self.left + least_s < self.best))
        if len(self.axes) > EXACT_AXES:
            self._consider_some(sources, targets)
        elif len(sources) and len(targets):
            self._consider(sources, np.array([self.goal]))
            self._consider(np.array([self.start]), targets)
            self._consider(sources, targets)
        return self.chosen

    def _consider_some(self, sources: Array, targets: Array) -> None:
        """On many axes: the most promising transfers to the goal, or from the start; first that of the sums."""
        table, paid, left = self.table, self.paid, self.left
        summed = int(self._index((self._state(self.start)[0], self._state(self.goal)[1])))
        one = np.concatenate([[summed], sources, np.full_like(targets, self.start)])
        two = np.concatenate([[self.goal], np.full_like(sources, self.goal), targets])
        fits = (table.partial[one] == table.partial[two]) & (one != two)
        one, two = one[fits], two[fits]
        around = paid[one] + left[two]
        grown = np.maximum(self.local[two] - self.local[one], 0)
        bounds = around + self._floors(grown, np.ones_like(grown), False)
        order = np.concatenate([[0], 1 + np.argsort(bounds[1:], kind="stable")[: _MAX_TRANSFERS - 1]])
        for at in order[: len(one)].tolist():
            if bounds[at] >= self.best:
                continue
            moved_s = self._transfer_s(int(one[at]), int(two[at]))
            now = float(around[at]) + moved_s + _STEP_S
            if now < self.best:
                self.best, self.chosen = now, (int(one[at]), int(two[at]))

    def _consider(self, sources: Array, targets: Array) -> None:
        """Look for something better among the transfers from one of `sources` to one of `targets`."""
        table, paid, left = self.table, self.paid, self.left
        around = paid[sources][:, None] + left[targets][None, :]
        pairs = (around + self._least_transfer_s < self.best) & (sources[:, None] != targets[None, :])
        pairs &= table.partial[sources][:, None] == table.partial[targets][None, :]
        rows, columns = np.nonzero(pairs)
        one, two, around = sources[rows], targets[columns], around[rows, columns]
        if self.same_units:  # weaker, but for less: a rank lacks at least what its new part is larger than its old one
            grown = np.maximum(self.local[two] - self.local[one], 0)
            near = around + self._floors(grown, np.ones_like(grown), False) < self.best
            one, two, around = one[near], two[near], around[near]
        if not len(one):
            return
        lacking, peers = self._lacking(one, two)
        bounds = np.where(lacking > 0, around + self._floors(lacking, peers, False), np.inf)
        if (domains := self.price.domains(self.space.mesh.rank_list)) is not None:
            far = np.flatnonzero(bounds < self.best)
            far = far[self._leaves_domain(one[far], two[far], domains)]
            bounds[far] = around[far] + self._floors(lacking[far], peers[far], True)
        order = np.flatnonzero(bounds < self.best)
        for at in order[np.argsort(bounds[order], kind="stable")].tolist():
            if bounds[at] >= self.best:
                break
            now = float(around[at]) + self._transfer_s(int(one[at]), int(two[at])) + _STEP_S
            if now < self.best:
                self.best, self.chosen = now, (int(one[at]), int(two[at]))

    def _lacking(self, one: Array, two: Array) -> tuple[Array, Array]:
        """The most elements that a rank lacks, and the most peers that a rank fetches from, per pair of states."""
        lacking, peers = np.empty(len(one), dtype=np.int64), np.empty(len(one), dtype=np.int64)
        parts = [overlaps(self.sizes, unit) for unit in self.units]
        step = max(1, 2**19 // self.num_ranks)
        for low in range(0, len(one), step):
            here, there = one[low : low + step], two[low : low + step]
            held: Array | int = 1
            wanted: Array | int = 1
            boxes: Array | int = 1
            for column, (common, count) in enumerate(parts):
                mine, theirs = self.table.ids[here, column], self.table.ids[there, column]
                held = held * common[mine, theirs]
                wanted = wanted * common[theirs, theirs]
                boxes = boxes * count[mine, theirs]
            lacking[low : low + step] = np.max(np.asarray(wanted - held), axis=1)
            peers[low : low + step] = np.max(np.asarray(boxes) - (np.asarray(held) > 0), axis=1)
        return lacking // self.scale * self.rest, peers

    def _floors(self, lacking: Array, peers: Array, leaves_domain: bool) -> Seconds:
        most = self.num_ranks - 1
        return self.price.transfer_floors_s(lacking * self.itemsize, np.maximum(peers, 1), most, leaves_domain)

    def _leaves_domain(self, one: Array, two: Array, domains: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Whether some rank needs data that no rank of its domain holds, as far as a single dim shows it.

        That is all of it where every domain is a part of the mesh with axes of its own, as dims are cut by different
        axes; otherwise it may be missed, and the bound is only weaker.
        """
        found = np.zeros(len(one), dtype=bool)
        for column, unit in enumerate(self.units):
            found |= leaves_domain(self.sizes, unit, domains)[self.table.ids[one, column], self.table.ids[two, column]]
        return found

    def _transfer_s(self, source: int, target: int) -> float:
        """Seconds of the transfer between two states, from the load of its busiest rank."""
        mesh = Layout(self.sizes, _NAMES[: len(self.sizes)])
        layouts = [self._plain(mesh, state) for state in (source, target)]
        busiest = load(layouts[0], layouts[1], self.units)
        size = busiest.num_elements // self.scale * self.rest * self.itemsize
        return self.price.transfer_s(busiest.num_peers, size, busiest.pairs, self.space.mesh.rank_list)

    def _plain(self, mesh: Layout, index: int) -> TensorLayout:
        """A state on a mesh that has no more than the sizes of the axes, so that other meshes find what was found."""
        bits = int(self.table.partial[index])
        dims = tuple(
            tuple(_NAMES[axis] for axis in self.sequences[number]) for number in self.table.ids[index].tolist()
        )
        return TensorLayout(
            mesh=mesh, dims=dims, partial=tuple(name for at, name in enumerate(mesh.alias_name) if bits >> at & 1)
        )

    # ---------------------------------------------------------------- the answer

    def _to(self, index: int) -> list[Move]:
        """The steps of the shortest path from the start to a state."""
        table, moves = self.table, []
        while index != self.start:
            at = int(np.searchsorted(table.reached, index))
            low, high = int(table.starts[at]), int(table.starts[at + 1]) if at + 1 < len(table.starts) else None
            step = low + int(np.argmin(self.paid[table.source[low:high]] + self.cost[low:high]))
            moves.append(self._move(step))
            index = int(table.source[step])
        return moves[::-1]

    def _from(self, index: int) -> list[Move]:
        """The steps of the shortest path from a state to the goal."""
        table, moves = self.table, []
        while index != self.goal:
            at = int(np.searchsorted(table.left, index))
            low = int(table.leaving_starts[at])
            high = int(table.leaving_starts[at + 1]) if at + 1 < len(table.leaving_starts) else None
            steps = table.leaving[low:high]
            step = int(steps[np.argmin(self.left[table.target[steps]] + self.cost[steps])])
            moves.append(self._move(step))
            index = int(table.target[step])
        return moves

    def _move(self, at: int) -> Move:
        table = self.table
        axes = self._names(int(table.moved[at]))
        before, after = self._state(int(table.source[at])), self._state(int(table.target[at]))
        dim, to_dim = int(table.dim[at]), int(table.to_dim[at])
        return Move(
            KINDS[int(table.kind[at])], axes, None if dim < 0 else self.dims[dim],
            None if to_dim < 0 else self.dims[to_dim], before, after,
        )  # fmt: skip


def _worth_splitting(space: Space, start: State, goal: State) -> tuple[int, ...]:
    """The dims that start or goal split, and as many of the others as can be useful.

    Dims that neither splits and that all axes together cut evenly are alike, and no more of them than there are axes
    are ever split at a time; so further ones, and dims of size 1, need not be looked at. On many axes one must do.
    """
    whole, most = math.prod(space.sizes[axis] for axis in space.axes), len(space.axes)
    spare = [dim for dim, axes in enumerate(zip(start[0], goal[0], strict=True)) if axes == ((), ())]
    alike = [dim for dim in spare if space.shape[dim] % whole == 0]
    left_out = {*alike[most if most <= EXACT_AXES else 1 :], *(dim for dim in spare if space.shape[dim] == 1)}
    return tuple(dim for dim in range(len(space.shape)) if dim not in left_out)
