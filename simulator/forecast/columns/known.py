"""Events of a pipeline that are known before its evaluation: those of hosts, which never block, and step starts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simulator.forecast.clock_map import NEVER, MaxPlus, Times
from simulator.forecast.columns.costs import Columns, Expand, PipelineCosts
from simulator.forecast.columns.structure import (
    ACTION,
    CHANNEL,
    CHANNELS,
    COEFFICIENTS,
    FINAL,
    TRANSFER,
    Structure,
)

__all__ = ["Closing", "Known"]

Ints = npt.NDArray[np.int64]


class Known:
    """The constants of the events of a structure; arrays are (rows, events or ranks; batch).

    Attributes:
        classes: of each row, into the arrays of `columns`.
        start: of the step on each rank.
        begun: "stream", "host" and the channels after the opening block.
        first_stream: when the first action finds the stream.
        dispatch, receive, posts, waits: of each row: host time of its body, of the receive of its tensor, of the
            receives posted just before its body, of the WAITs for sends just behind it.
        wait: host time of one WAIT for a send, of each rank.
        body_host: when the host begins to issue the body of each row.
        fixed, own, posted: what events wait for at least: a constant; the host of their own rank (of the sender);
            the host of the receiver when it has posted.
    """

    def __init__(self, structure: Structure, costs: PipelineCosts, expand: Expand, start_ps: Times) -> None:
        schedule = structure.schedule
        num_ranks, table = schedule.num_ranks, schedule.table
        self._structure = structure
        self.columns = columns = Columns(costs, schedule, expand)
        self.classes = structure.variant * schedule.num_stages + table.stage
        self.first_row, self.last_row = table.rank_start[:-1], table.rank_start[1:] - 1
        self.has_rows = self.last_row >= self.first_row
        self.start = expand(start_ps, num_ranks)
        self.begun = {
            clock: self.start + _constant(costs.begin, clock, "start", 0, expand, num_ranks)
            for clock in ("stream", "host", *CHANNELS[: len(structure.channel_of_row)])
        }
        self.dispatch = columns.dispatch[self.classes]
        receives = structure.transfer_of_row > 0
        self.receive = np.where(receives[:, None], columns.receive[self.classes], 0)
        self.posts, self.begun_host = self.receive, self.begun["host"]
        if structure.posts_ahead:  # before the body of a row the receive of the next one is issued
            self.posts = np.zeros_like(self.receive)
            self.posts[:-1] = self.receive[1:]
            self.posts[self.last_row[self.has_rows]] = 0
            first_receive = np.zeros((num_ranks, expand.count), dtype=np.int64)
            first_receive[self.has_rows] = self.receive[self.first_row[self.has_rows]]
            self.begun_host = self.begun["host"] + first_receive
        self.wait = expand(costs.wait_dispatch_ps, num_ranks)
        self.waits = structure.releases[:, None] * self.wait[structure.rank]
        self.issues = bool(self.dispatch.any() or self.posts.any() or self.waits.any())
        self.first_stream = self.begun["stream"]
        self.body_host = self._host_at_bodies()
        shape = (structure.num_events, expand.count)
        self.fixed = np.full(shape, NEVER, dtype=np.int64)
        self.own = np.full(shape, NEVER, dtype=np.int64)
        self.posted = np.full(shape, NEVER, dtype=np.int64)
        self._fill()

    def _host_at_bodies(self) -> Ints:
        rank = self._structure.rank
        if not self.issues:
            return self.begun_host[rank]
        behind = self.dispatch + self.waits
        issued = np.cumsum(self.posts + behind, axis=0)
        offset = np.zeros_like(self.begun_host)
        later = np.flatnonzero(self.has_rows & (self.first_row > 0))
        offset[later] = issued[self.first_row[later] - 1]
        return issued - behind + (self.begun_host - offset)[rank]

    def _fill(self) -> None:
        structure, columns = self._structure, self.columns
        self.fixed[0] = 0
        for kind, clock in self._clocks():
            events = np.flatnonzero(structure.kind == kind)
            if not len(events):
                continue
            rows = structure.row[events]
            self.fixed[events] = self._fixed_terms(clock, rows)
            self.own[events] = self.body_host[rows] + columns.from_host[clock][self.classes[rows]]
            if kind == TRANSFER:
                transfer = columns.transfer[self.classes[rows]]
                early, self.posted[events] = self._posts(structure.receiver[events])
                self.fixed[events] = np.maximum(self.fixed[events], early) + transfer
                self.own[events] += transfer
                self.posted[events] += transfer

    def _clocks(self) -> list[tuple[int, str]]:
        """(kind of event, its clock)."""
        channels = [(CHANNEL + number, CHANNELS[number]) for number in range(len(self._structure.channel_of_row))]
        return [(ACTION, "stream"), *channels, (FINAL, "final"), (TRANSFER, "sent")]

    def _fixed_terms(self, clock: str, rows: Ints) -> Ints:
        """(rows, batch) the part of a clock's wait that depends neither on a host nor on an event of this step."""
        columns, classes, rank = self.columns, self.classes[rows], self._structure.rank[rows]
        num_classes = len(columns.dispatch)
        if columns.starting.any():
            fixed = np.maximum(columns.from_start[clock][classes] + self.start[rank], NEVER)
        else:
            fixed = np.full((len(rows), self.start.shape[1]), NEVER, dtype=np.int64)

        def coefficient(before: str, which: Ints) -> Ints:
            number = COEFFICIENTS.index((clock, before))
            found = columns.table[number * num_classes + classes[which]]
            return found - columns.transfer[classes[which]] if clock == "sent" else found

        first = np.flatnonzero(rows == self.first_row[rank])
        if len(first):
            on_stream = self.first_stream[rank[first]] + coefficient("stream", first)
            fixed[first] = np.maximum(fixed[first], on_stream)
        for number in range(len(self._structure.channel_of_row)):
            untouched = np.flatnonzero(self._no_channel_before(number)[rows])
            name = CHANNELS[number]
            on_channel = self.begun[name][rank[untouched]] + coefficient(name, untouched)
            fixed[untouched] = np.maximum(fixed[untouched], on_channel)
        return fixed

    def _no_channel_before(self, number: int) -> npt.NDArray[np.bool_]:
        """Whether nothing earlier on its rank moved a channel, for each row."""
        moves = self._structure.channel_of_row[number] > 0
        total: Ints = np.cumsum(moves) - moves
        return np.asarray(total == total[self.first_row[self._structure.rank]])

    def _posts(self, receivers: Ints) -> tuple[Ints, Ints]:
        """The times at which receives are posted: the fixed part, and the host; (receivers, batch) each."""
        rank, ahead = self._structure.rank[receivers], int(self._structure.posts_ahead)
        place = receivers - self.first_row[rank]
        fixed = np.full((len(receivers), self.start.shape[1]), NEVER, dtype=np.int64)
        early = np.flatnonzero(place <= ahead)
        fixed[early] = self.begun["stream"][rank[early]]
        host = self.body_host[receivers - ahead]
        opening = np.flatnonzero(place < ahead)
        fixed[opening] = np.maximum(fixed[opening], self.begun_host[rank[opening]])
        host[opening] = NEVER
        return fixed, host


def _constant(own: MaxPlus | None, after: str, before: str, default: int, expand: Expand, size: int) -> Ints:
    if own is None or after not in own.rows:
        return expand(default, size)
    return expand(own.row(after).get(before, NEVER), size)


class Closing:
    """The effect of the closing block."""

    def __init__(self, costs: PipelineCosts, expand: Expand, num_ranks: int) -> None:
        self._rows = {
            (after, before): _constant(costs.end, after, before, 0 if after == before else NEVER, expand, num_ranks)
            for after in ("stream", "host")
            for before in ("stream", "host", *CHANNELS, "start")
        }

    def ends(self, stream: Ints, host: Ints, channels: Sequence[Ints], start: Ints, waits: Ints) -> Ints:
        """(ranks, batch) the end of the step without sends and without the communication of the last backwards.

        Args:
            stream, host, channels, start: times after the last action.
            waits: host time of the WAITs for sends that are left.
        """
        before = {"stream": stream, "host": host, "start": start} | dict(zip(CHANNELS, channels, strict=False))
        end = np.maximum.reduce([times + self._rows["stream", clock] for clock, times in before.items()])
        return np.maximum(end, host + self._rows["host", "host"] + waits)
