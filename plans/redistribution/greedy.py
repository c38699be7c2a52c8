"""Greedy sequences of steps, similar to those of DTensor and MindSpore, over the states of a `Space`.

A search over many axes starts from them, so its result is never worse.
"""

from __future__ import annotations

from plans.redistribution.space import Move, Space, State, put
from plans.redistribution.step import StepKind

__all__ = ["by_gathering", "by_moving", "by_moving_each", "by_transfer"]


def by_gathering(space: Space, start: State, goal: State) -> list[Move]:
    """Sum, gather every dim that is split wrongly, then slice: what DTensor does where axes change their order."""
    moves = _sums(start, goal)
    state = moves[-1].after if moves else start
    for dim in range(len(goal[0])):
        state = _gather_wrong(moves, state, goal, dim)
    for dim, (own, wanted) in enumerate(zip(state[0], goal[0], strict=True)):
        if own != wanted:
            after = (put(state[0], dim, wanted), state[1])
            moves.append(Move(StepKind.SLICE, wanted[len(own) :], dim, None, state, after))
            state = after
    return moves


def by_moving(space: Space, start: State, goal: State, one_by_one: bool = False) -> list[Move]:
    """Slice where the axis is free, all-to-all where another dim ends with it, else gather: as MindSpore tries.

    MindSpore infers on dims cut into factors with one axis each; here a dim gives its axes away from the last one on.
    With `one_by_one` each axis is gathered on its own.
    """
    moves = _sums(start, goal)
    state = moves[-1].after if moves else start
    while state != goal:
        move = _slice(space, state, goal) or _move(state, goal)
        if move is not None:
            moves.append(move)
            state = move.after
            continue
        dim = next(at for at, own in enumerate(state[0]) if _common(own, goal[0][at]) < len(own))
        if one_by_one:
            own = state[0][dim]
            after = (put(state[0], dim, own[:-1]), state[1])
            moves.append(Move(StepKind.ALL_GATHER, own[-1:], dim, None, state, after))
            state = after
        else:
            state = _gather_wrong(moves, state, goal, dim)
    return moves


def by_moving_each(space: Space, start: State, goal: State) -> list[Move]:
    """As `by_moving`, gathering one axis at a time: prime factors, and links inside and between nodes, are separate."""
    return by_moving(space, start, goal, one_by_one=True)


def by_transfer(space: Space, start: State, goal: State) -> list[Move]:
    """Reduce the partial sums, then transfer everything in one step."""
    moves = _sums(start, goal)
    state = moves[-1].after if moves else start
    return moves if state == goal else [*moves, Move(StepKind.TRANSFER, (), None, None, state, goal)]


def _sums(state: State, goal: State) -> list[Move]:
    due = tuple(axis for axis in state[1] if axis not in goal[1])
    return [Move(StepKind.ALL_REDUCE, due, None, None, state, (state[0], goal[1]))] if due else []


def _common(own: tuple[str, ...], wanted: tuple[str, ...]) -> int:
    same = 0
    while same < min(len(own), len(wanted)) and own[same] == wanted[same]:
        same += 1
    return same


def _gather_wrong(moves: list[Move], state: State, goal: State, dim: int) -> State:
    own, same = state[0][dim], _common(state[0][dim], goal[0][dim])
    if same == len(own):
        return state
    after = (put(state[0], dim, own[:same]), state[1])
    moves.append(Move(StepKind.ALL_GATHER, own[same:], dim, None, state, after))
    return after


def _slice(space: Space, state: State, goal: State) -> Move | None:
    used = {axis for axes in state[0] for axis in axes} | set(state[1])
    for dim, (own, wanted) in enumerate(zip(state[0], goal[0], strict=True)):
        same = _common(own, wanted)
        if same == len(own) < len(wanted) and wanted[same] not in used:
            after = (put(state[0], dim, own + wanted[same : same + 1]), state[1])
            return Move(StepKind.SLICE, wanted[same : same + 1], dim, None, state, after)
    return None


def _move(state: State, goal: State) -> Move | None:
    for to_dim, (own, wanted) in enumerate(zip(state[0], goal[0], strict=True)):
        same = _common(own, wanted)
        if same == len(own) < len(wanted):
            axes = wanted[same : same + 1]
            for dim, other in enumerate(state[0]):
                if dim != to_dim and other[-1:] == axes:
                    after = (put(put(state[0], dim, other[:-1]), to_dim, own + axes), state[1])
                    return Move(StepKind.ALL_TO_ALL, axes, dim, to_dim, state, after)
    return None
