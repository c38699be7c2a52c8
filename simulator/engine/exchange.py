"""Communication between ranks: who meets whom, when it starts and when it is over.

A **meeting** is one instance of a collective, or one pair of ranks of a transfer. Every member comes to it with its
`Communication`; it begins when the last member has arrived. A member arrives when it has posted and its previous
communication on that channel (and direction) is over. So long as nothing is shared, the end is known as soon as the
last member posts, and no event is needed; shared cores, devices or links take one event per phase.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import simpy

from plans.program import Instruction
from simulator.engine.fluid import Claims, Cores, Fabric
from simulator.engine.matching import Links

__all__ = ["Communication", "Exchange", "Meeting", "Over", "Wires"]


class Over(simpy.Event):
    """An event that happens after a delay, known once the communication's end is."""

    def after(self, delay_ps: int) -> None:
        """Happen `delay_ps` from now."""
        self._ok = True
        self._value = None
        self.env.schedule(self, delay=delay_ps)


class Communication:
    """One rank's part in a communication that is under way."""

    __slots__ = (
        "arrived", "cpu_ps", "done", "end", "event", "held_by", "holds", "instruction", "links", "meetings", "pending",
        "position", "posted", "rank", "start", "step", "work_ps",
    )  # fmt: skip

    def __init__(
        self, rank: int, step: int, position: int, instruction: Instruction, links: Links, work_ps: int, cpu_ps: int
    ) -> None:
        self.rank = rank
        self.step = step
        self.position = position
        self.instruction = instruction
        self.links = links
        self.work_ps = work_ps
        self.cpu_ps = cpu_ps
        self.posted = self.arrived = self.start = -1  # not yet
        self.end = 0
        self.pending = 0
        self.done = False
        self.event: Over | None = None
        self.held_by: Communication | None = None
        self.holds: Communication | None = None
        self.meetings: list[Meeting] = []  # none where a pair of ranks meets alone


class Meeting:
    """An instance of a collective or of one pair of a transfer; `present` have arrived."""

    __slots__ = ("claims", "cpu_left", "is_local", "members", "missing", "present", "start", "work_ps")

    def __init__(self, members: tuple[int, ...], missing: int) -> None:
        self.members = members
        self.missing = missing
        self.present: list[Communication] = []
        self.start = self.work_ps = self.cpu_left = 0
        self.claims: Claims = ()
        self.is_local = False


class Wires(Protocol):
    """What a meeting's links do to it: `simulator.engine.network.Network`, or `Ports` alone."""

    def work_ps(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> int:
        """Its work alone, over the links that it takes."""

    def claims(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> Claims:
        """What it shares with others."""


class Exchange:
    """All communication of a program's ranks.

    Args:
        env: the environment, in picoseconds.
        finished: called with each communication when its end is known.
        cores: of the node of each rank, where cores are shared.
        fabric: devices and links, where they are shared.
        all_on_fabric: whether everything is worked off there, not only what shares links.
        wires: the links, where they are shared or changed.
    """

    def __init__(
        self,
        env: simpy.Environment,
        finished: Callable[[Communication], None],
        cores: Mapping[int, Cores] | None,
        fabric: Fabric | None,
        *,
        all_on_fabric: bool,
        wires: Wires | None,
    ) -> None:
        self._env = env
        self._finished = finished
        self._cores = cores
        self._fabric = fabric
        self._all_on_fabric = all_on_fabric
        self._wires = wires
        self._tails: dict[int, Communication] = {}
        self._meetings: dict[tuple[int, int], Meeting] = {}
        self._come: dict[int, int] = {}
        self._is_alone = cores is None and fabric is None and wires is None
        self._pairs: dict[int, deque[Communication]] = {}

    def post(self, own: Communication, posted: int) -> None:
        """A rank issues its part at the time `posted` (now or later)."""
        own.posted = posted
        stream = own.links.stream
        tail = self._tails.get(stream)
        self._tails[stream] = own
        if tail is None:
            self._arrive(own, posted)
        elif tail.done:
            self._arrive(own, max(posted, tail.end))
        else:
            own.held_by, tail.holds = tail, own

    def _arrive(self, own: Communication, at: int) -> None:
        """`own` arrives at all its meetings; what this ends lets others arrive, without recursion."""
        arriving = [(own, at)]
        while arriving:
            own, at = arriving.pop()
            own.arrived = own.end = at
            links = own.links
            if links.is_plain and self._is_alone:
                self._arrive_alone(own, links, arriving)
                continue
            begun: list[Meeting] = []
            for key, members in zip(links.keys, links.members, strict=True):
                count = own.step
                if links.is_transfer:  # the k-th SEND of a pair meets its k-th RECV
                    side = 2 * key + links.is_send
                    count = self._come.get(side, 0)
                    self._come[side] = count + 1
                meeting = self._meetings.get((key, count))
                if meeting is None:
                    meeting = self._meetings[key, count] = Meeting(members, len(members))
                    meeting.is_local = links.is_transfer and members[0] == members[1]
                meeting.missing -= 1
                meeting.start = max(meeting.start, at)
                if not (meeting.is_local and links.is_send):  # a rank's hand-over to itself does not wait to be fetched
                    meeting.present.append(own)
                    own.meetings.append(meeting)
                    own.pending += 1
                if meeting.missing == 0:
                    del self._meetings[key, count]
                    begun.append(meeting)
            if own.pending == 0:
                self._over(own, arriving)
            for meeting in begun:
                if (end := self._begin(meeting)) is not None:
                    self._end(meeting, end, arriving)

    def _arrive_alone(self, own: Communication, links: Links, arriving: list[tuple[Communication, int]]) -> None:
        """A pair of ranks with nothing shared: its end is known as soon as the second has come."""
        key = links.keys[0]
        pairs = self._pairs.get(key)
        if pairs is None:
            pairs = self._pairs[key] = deque()
        if not pairs or pairs[0].links.is_send is links.is_send:
            pairs.append(own)
            return
        other = pairs.popleft()
        own.start = other.start = start = max(own.arrived, other.arrived)
        own.end = other.end = start + max(own.cpu_ps, other.cpu_ps) + max(own.work_ps, other.work_ps)
        self._over(other, arriving)
        self._over(own, arriving)

    def _begin(self, meeting: Meeting) -> int | None:
        """The end of a meeting whose members have all arrived, or None where it has to be worked off first."""
        present = meeting.present
        if meeting.is_local:
            return meeting.start
        meeting.work_ps = max(own.work_ps for own in present)
        if self._wires is not None:
            instruction = present[0].instruction
            meeting.work_ps = self._wires.work_ps(instruction, meeting.members, meeting.work_ps)
            meeting.claims = self._wires.claims(instruction, meeting.members, meeting.work_ps)
        cpu = [self._cpu_share(own, meeting) for own in present]
        if self._cores is not None and any(cpu):
            self._at(meeting.start, partial(self._work_off_cpu, meeting, cpu))
            return None
        begun = meeting.start + max(cpu)
        if self._on_fabric(meeting):
            self._at(begun, partial(self._work_off, meeting))
            return None
        return begun + meeting.work_ps

    @staticmethod
    def _cpu_share(own: Communication, meeting: Meeting) -> int:
        """A rank's processor time is spent once, spread over its pairs of a transfer."""
        if own.cpu_ps == 0:
            return 0
        partners = [members for members in own.links.members if not own.links.is_transfer or members[0] != members[1]]
        if len(partners) == 1:
            return own.cpu_ps
        share, rest = divmod(own.cpu_ps, len(partners))
        return share + (rest if partners[0] == meeting.members else 0)

    def _on_fabric(self, meeting: Meeting) -> bool:
        if self._fabric is None or meeting.work_ps == 0:
            return False
        return self._all_on_fabric or bool(meeting.claims)

    def _work_off_cpu(self, meeting: Meeting, cpu: Sequence[int]) -> None:
        assert self._cores is not None
        meeting.cpu_left = sum(1 for own in cpu if own)
        for own, work_ps in zip(meeting.present, cpu, strict=True):
            if work_ps:
                self._cores[own.rank].add(work_ps, partial(self._cpu_done, meeting))

    def _cpu_done(self, meeting: Meeting) -> None:
        meeting.cpu_left -= 1
        if meeting.cpu_left == 0:
            if self._on_fabric(meeting):
                self._work_off(meeting)
            else:
                self._end_at(meeting, int(self._env.now) + meeting.work_ps)

    def _work_off(self, meeting: Meeting) -> None:
        assert self._fabric is not None
        self._fabric.communicate(
            meeting.members, meeting.present[0].instruction, meeting.work_ps,
            lambda: self._end_at(meeting, int(self._env.now)), meeting.claims,
        )  # fmt: skip

    def _end_at(self, meeting: Meeting, end: int) -> None:
        arriving: list[tuple[Communication, int]] = []
        self._end(meeting, end, arriving)
        for own, at in arriving:
            self._arrive(own, at)

    def _end(self, meeting: Meeting, end: int, arriving: list[tuple[Communication, int]]) -> None:
        for own in meeting.present:
            own.start = meeting.start if own.start < 0 else min(own.start, meeting.start)
            own.end = max(own.end, end)
            own.pending -= 1
            if own.pending == 0:
                self._over(own, arriving)

    def _over(self, own: Communication, arriving: list[tuple[Communication, int]]) -> None:
        own.done = True
        own.start = own.arrived if own.start < 0 else own.start
        own.held_by = None
        if own.meetings:
            own.meetings.clear()
        self._finished(own)
        if own.event is not None:
            own.event.after(own.end - int(self._env.now))
        if own.holds is not None:
            arriving.append((own.holds, max(own.holds.posted, own.end)))
            own.holds = None

    def _at(self, time_ps: int, then: Callable[[], None]) -> None:
        delay = time_ps - int(self._env.now)
        if delay == 0:
            then()
        else:
            self._env.timeout(delay).callbacks.append(lambda _: then())
