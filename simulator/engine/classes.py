"""Classes of ranks that do the same thing at the same time: the coarsest equitable partition of a program.

Ranks, meetings (an instance of a collective, a pair of ranks of a transfer) and links are divided into classes such
that equal ranks take part in equal meetings, equal meetings join equal ranks over equal links, and equal links carry as
many meetings of each class, with the same shares. It is found by color refinement: everything begins with the color of
what is known to differ, and in each round its new color is a hash of its own and of the sum of its neighbours', until
the number of colors stays (Weisfeiler and Leman, 1968; Paige and Tarjan, "Three partition refinement algorithms", SIAM
Journal on Computing 16, 1987). Colors are 64 bits wide and rounds are array operations: among a million items two
different ones get one color by chance with a probability below 1e-7.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.program import Instruction, Kind
from simulator.engine.exchange import Loads

__all__ = ["Classes", "Pattern", "classes_of"]

_Ints = npt.NDArray[np.int64]
_Colors = npt.NDArray[np.uint64]


class Pattern:
    """Communication of the same ranks, of any size: collectives of one call along the same axes, or one SEND or RECV.

    Args:
        instruction: the first of the pattern.
        members: of each meeting its ranks, shape (meetings, members).

    Attributes:
        work_ps: of each meeting, for `instruction`.
        loads: on links, for `instruction`: others have shares that are as much smaller or larger on all links.
        class_of: of each meeting the number of its class; set by `classes_of`.
    """

    def __init__(self, instruction: Instruction, members: _Ints) -> None:
        self.instruction = instruction
        self.members = members
        self.work_ps = np.zeros(len(members), dtype=np.int64)
        self.loads = Loads.none()
        self.class_of: _Colors = np.zeros(len(members), dtype=np.uint64)

    @classmethod
    def of_transfer(cls, instruction: Instruction) -> Pattern:
        """The pattern of a SEND or RECV: a meeting for each pair of ranks, also of a rank with itself."""
        return cls(instruction, instruction.pieces.by_pair[0])

    @property
    def is_transfer(self) -> bool:
        """Whether a meeting is a pair of ranks, in which the first sends."""
        return self.instruction.kind is not Kind.COLLECTIVE

    def number(self, members: Sequence[int]) -> int:
        """The number of the meeting of `members`."""
        return int(np.flatnonzero((self.members == np.array(members)).all(axis=1))[0])

    def meetings_on(self, link: int, like: int) -> list[tuple[int, ...]]:
        """The members of all meetings on a link that are of the class of the meeting `like`."""
        there = self.loads.meeting[self.loads.link == link]
        return [tuple(self.members[each].tolist()) for each in there if self.class_of[each] == self.class_of[like]]

    @property
    def key(self) -> object:
        """The key by which meetings are divided: patterns with equal keys are divided in the same way."""
        same_work = not len(self.work_ps) or bool((self.work_ps == self.work_ps[0]).all())
        shares = self.loads.amount // max(1, np.gcd.reduce(self.loads.amount, initial=0))
        columns = (self.members, self.loads.meeting, self.loads.link, shares)
        return (
            self.is_transfer,
            self.members.shape,
            *map(np.ndarray.tobytes, columns),
            b"" if same_work else self.work_ps.tobytes(),
        )


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Classes of ranks and links.

    Args:
        ranks: ascending.
        class_of: of each its class; they are numbered by their first ranks.
        link_color: link number -> color of its class.
    """

    ranks: _Ints
    class_of: _Ints
    link_color: dict[int, int]

    @property
    def first(self) -> list[int]:
        """The first rank of each class."""
        _, first = np.unique(self.class_of, return_index=True)
        found: list[int] = self.ranks[first].tolist()
        return found


def classes_of(ranks: Sequence[int], kinds: Sequence[int], patterns: Iterable[Pattern]) -> Classes:
    """The classes of ranks, and in the patterns those of their meetings.

    Args:
        ranks: of the program, ascending.
        kinds: of each rank a number; ranks of different numbers are known to differ.
        patterns: of all communication.
    """
    distinct: dict[object, list[Pattern]] = {}
    for pattern in patterns:
        distinct.setdefault(pattern.key, []).append(pattern)
    all_ranks = np.array(ranks, dtype=np.int64)
    graph = _Graph(all_ranks, [same[0] for same in distinct.values()])
    rank, meeting, link = graph.colors(np.array(kinds, dtype=np.int64))
    for same, own in zip(distinct.values(), graph.of_patterns(meeting), strict=True):
        for pattern in same:
            pattern.class_of = own
    _, first, number = np.unique(rank, return_index=True, return_inverse=True)
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    links = dict(zip(graph.links.tolist(), link.tolist(), strict=True))
    return Classes(ranks=all_ranks, class_of=place[number], link_color=links)


class _Graph:
    """Meetings with their ranks and links, as incidences in columns."""

    def __init__(self, ranks: _Ints, patterns: Sequence[Pattern]) -> None:
        sizes = [len(pattern.members) for pattern in patterns]
        self._bounds = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        bases = self._bounds[:-1].tolist()
        width = [pattern.members.shape[1] for pattern in patterns]
        meeting = [np.repeat(np.arange(size) + base, n) for base, size, n in zip(bases, sizes, width, strict=True)]
        places = [
            np.tile(np.arange(2), len(pattern.members))
            if pattern.is_transfer
            else np.zeros_like(pattern.members).ravel()
            for pattern in patterns
        ]
        members = _joined([pattern.members.ravel() for pattern in patterns])
        at = np.searchsorted(ranks, members)
        known = at < len(ranks)
        known[known] = ranks[at[known]] == members[known]
        self._num_ranks = len(ranks)
        self._rank = np.where(known, at, self._num_ranks)  # what is no rank of the program is one more
        self._place = _joined(places)
        self._of_rank = _Sums(self._rank, self._num_ranks + 1)
        self._meeting = _joined(meeting)
        self._of_members = _Sums(self._meeting, int(self._bounds[-1]))
        self.links, self._link = np.unique(_joined([pattern.loads.link for pattern in patterns]), return_inverse=True)
        self._carried = _joined([pattern.loads.meeting + base for pattern, base in zip(patterns, bases, strict=True)])
        self._amount = _joined([pattern.loads.amount for pattern in patterns])
        self._of_link = _Sums(self._link, len(self.links))
        self._of_carried = _Sums(self._carried, int(self._bounds[-1]))
        self._work = _joined([pattern.work_ps for pattern in patterns])
        self._pattern = np.repeat(np.arange(len(patterns)), sizes)

    def colors(self, kinds: _Ints) -> tuple[_Colors, _Colors, _Colors]:
        """The colors of ranks, meetings and links."""
        rank = _mixed(np.append(kinds, -1))
        meeting = _mixed(_mixed(self._pattern) + _mixed(self._work))
        link = np.zeros(len(self.links), dtype=np.uint64)
        share, place = _mixed(self._amount), _mixed(self._place)
        known = -1
        while True:
            met = self._of_members(_mixed(rank[self._rank] + place))
            crossed = self._of_carried(_mixed(link[self._link] + share))
            meeting = _mixed(meeting + _mixed(met) + crossed)
            rank = _mixed(rank + self._of_rank(_mixed(meeting[self._meeting] + place)))
            link = _mixed(link + self._of_link(_mixed(meeting[self._carried] + share)))
            now = sum(len(np.unique(each)) for each in (rank[: self._num_ranks], meeting, link))
            if now == known:
                return rank[: self._num_ranks], meeting, link
            known = now

    def of_patterns(self, meeting: _Colors) -> Iterator[_Colors]:
        """The part of each pattern."""
        for first, stop in zip(self._bounds[:-1], self._bounds[1:], strict=True):
            yield meeting[first:stop]


class _Sums:
    """Sums of values over a fixed number of items each."""

    def __init__(self, number: _Ints, size: int) -> None:
        self._order = None if (np.diff(number) >= 0).all() else np.argsort(number, kind="stable")
        self._present, self._first = np.unique(
            number if self._order is None else number[self._order], return_index=True
        )  # fmt: skip
        self._size = size

    def __call__(self, values: _Colors) -> _Colors:
        found = np.zeros(self._size, dtype=np.uint64)
        if len(values):
            in_order = values if self._order is None else values[self._order]
            found[self._present] = np.add.reduceat(in_order, self._first)
        return found


def _joined(columns: Sequence[_Ints]) -> _Ints:
    return np.concatenate([np.zeros(0, dtype=np.int64), *columns])


def _mixed(values: npt.NDArray[np.integer]) -> _Colors:
    """A hash of 64 bits (the finalizer of splitmix64: Steele, Lea and Flood, OOPSLA 2014)."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: _Colors = x ^ (x >> np.uint64(31))
    return found
