"""Stage boundaries: where to cut a chain of operators so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence

from plans.errors import TwofoldError

__all__ = ["balanced_cuts"]


def balanced_cuts(costs: Sequence[float], num_stages: int) -> list[tuple[int, int]]:
    """Half-open ranges of operators per stage that minimise the largest sum of `costs`; every stage gets at least one.

    A dynamic programme over (operators placed, stages used); ties put operators into earlier stages.

    Raises:
        TwofoldError: fewer operators than stages.

    >>> balanced_cuts([1, 1, 1, 3], 2)
    [(0, 3), (3, 4)]
    """
    count = len(costs)
    if num_stages > count:
        raise TwofoldError(f"{num_stages} stages need {num_stages} operators, there are {count}; use fewer stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[list[float]] = [[float("inf")] * (count + 1) for _ in range(num_stages + 1)]
    cut: list[list[int]] = [[0] * (count + 1) for _ in range(num_stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, num_stages + 1):
        for end in range(stage, count + 1):
            for start in range(end - 1, stage - 2, -1):
                if sums[end] - sums[start] >= best[stage][end]:
                    break  # and longer stages are no faster
                slowest = max(best[stage - 1][start], sums[end] - sums[start])
                if slowest < best[stage][end]:
                    best[stage][end], cut[stage][end] = slowest, start
    ranges, end = [], count
    for stage in range(num_stages, 0, -1):
        start = cut[stage][end]
        ranges.append((start, end))
        end = start
    return ranges[::-1]
