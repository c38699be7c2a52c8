"""A* over layouts on one mesh (Hart, Nilsson and Raphael 1968), for least bytes and for prices of any form.

The bound on the rest of a path is the part of its target region that the worst rank still lacks: in bytes, or in the
least seconds that the price's `floor_s` states for that number of bytes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from plans.redistribution.fastest import EXACT_AXES
from plans.redistribution.greedy import by_gathering, by_moving, by_transfer
from plans.redistribution.price import StepPrice
from plans.redistribution.space import Move, Space, State
from plans.redistribution.step import StepKind

__all__ = ["AStar"]

_Cost = tuple[float, int, int, int]
"""(bytes or seconds, communicating steps, transfers, slices)"""

_BEFORE_TRANSFER = frozenset(StepKind) - {StepKind.SLICE, StepKind.TRANSFER}
"""A transfer fetches from fewer replicas after a slice, and two transfers fetch more than one: neither can win."""

_MAX_EXPANDED = 300
"""On more than 3 axes: states expanded before the search settles for the best sequence found."""


class AStar:
    """A* over the states of a space; the price may be any callable, or None for least bytes.

    Args:
        space: of the tensor.
        start, goal: different states; the goal's partial axes are among the start's.
        itemsize: bytes per element.
        price: seconds of a step; None counts the bytes received.
        even: whether all layouts on the way must cut every dim evenly.
    """

    def __init__(
        self, space: Space, start: State, goal: State, itemsize: int, price: StepPrice | None, even: bool
    ) -> None:
        self.space, self.start, self.goal = space, start, goal
        self.itemsize, self.price, self.even = itemsize, price, even
        self._floor_s: Callable[[int], float] | None = getattr(price, "floor_s", None)
        self.best: dict[State, _Cost] = {start: (0, 0, 0, 0)}
        self.came: dict[State, Move] = {}
        space.drop_spare_dims(start, goal)
        self.landings = self._landings()

    def run(self) -> list[Move]:
        """The moves of the cheapest path from the start to the goal."""
        self._enter_known_sequences()
        best, space = self.best, self.space
        count = itertools.count()
        queue = [((known[0] + self._bound(state), *known[1:]), next(count), state) for state, known in best.items()]
        heapq.heapify(queue)
        closed: set[State] = set()
        while queue:
            _, _, state = heapq.heappop(queue)
            if state in closed:
                continue
            if state == self.goal or (len(closed) >= _MAX_EXPANDED and len(space.axes) > 3):
                break
            closed.add(state)
            for move in self._moves(state):
                if move.after in closed or (self.even and not space.is_even(move.after)):
                    continue
                left = self._left_if_worth(move)
                if left is None:
                    continue
                now = _add(best[state], move, self._cost(move))
                if move.after not in best or now < best[move.after]:
                    best[move.after] = now
                    self.came[move.after] = move
                    heapq.heappush(queue, ((now[0] + left, *now[1:]), next(count), move.after))
        return self._path()

    def _landings(self) -> list[State]:
        """The states that transfers lead to."""
        space, start, goal, price = self.space, self.start, self.goal, self.price
        landings = [goal] if price is None else [goal, *(move.before for move in space.closing(goal))]
        is_open = price is None and not self.even and start[1] != goal[1]
        if is_open and len(space.axes) <= EXACT_AXES and space.may_be_uneven():
            landings = list(space.states(goal[1], start[1]))
        return [landing for landing in landings if space.is_even(landing)] if self.even else landings

    def _enter_known_sequences(self) -> None:
        """Enter the greedy sequences, which bound the search and are available when it stops early."""
        if self.price is None and len(self.space.axes) <= 3 and self.start[1] == self.goal[1]:
            return
        for sequence in (by_gathering, by_moving, by_transfer):
            for move in sequence(self.space, self.start, self.goal):
                now = _add(self.best[move.before], move, self._cost(move))
                if move.after not in self.best or now < self.best[move.after]:
                    self.best[move.after] = now
                    self.came[move.after] = move

    def _moves(self, state: State) -> Iterator[Move]:
        """Transfers first, then the other steps."""
        if state not in self.came or self.came[state].kind in _BEFORE_TRANSFER:
            yield from _transfers(state, self.landings)
        yield from self.space.moves(state, self.goal)

    def _left_if_worth(self, move: Move) -> float | None:
        """The bound on what is left after a move; None where the move cannot beat the best sequence known."""
        if self.goal not in self.best:
            return self._bound(move.after)
        paid, limit = self.best[move.before][0], self.best[self.goal][0]
        # there may be many transfers: leave out what is cheap to leave out
        if move.kind is StepKind.TRANSFER and paid + self._bound(move.after) > limit:
            return None
        least = self._least(move)
        if paid + least > limit:
            return None
        left = self._bound(move.after)
        return None if paid + least + left > limit else left

    def _bound(self, state: State) -> float:
        """A lower bound on the cost of any sequence from a state to the goal."""
        if self.price is None:
            return self.space.lacking(state) * self.itemsize
        return 0.0 if self._floor_s is None else self._floor_s(self.space.lacking(state) * self.itemsize)

    def _least(self, move: Move) -> float:
        """A lower bound on the cost of a move."""
        if self.price is None:
            return self.space.received(move) * self.itemsize
        return 0.0 if self._floor_s is None else self._floor_s(self.space.received(move) * self.itemsize)

    def _cost(self, move: Move) -> float:
        if self.price is None:
            return self._least(move)
        return self.price(self.space.step(move), self.space.shape, self.itemsize)

    def _path(self) -> list[Move]:
        path: list[Move] = []
        state = self.goal
        while state != self.start:
            path.append(self.came[state])
            state = self.came[state].before
        return path[::-1]


def _add(paid: _Cost, move: Move, cost: float) -> _Cost:
    is_slice, is_transfer = move.kind is StepKind.SLICE, move.kind is StepKind.TRANSFER
    return (paid[0] + cost, paid[1] + (not is_slice), paid[2] + is_transfer, paid[3] + is_slice)


def _transfers(state: State, landings: list[State]) -> Iterator[Move]:
    for landing in landings:
        if landing[1] == state[1] and landing != state:
            yield Move(StepKind.TRANSFER, (), None, None, state, landing)
