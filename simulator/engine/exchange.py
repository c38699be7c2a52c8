"""Communication between ranks: its members, its start and its end.

A **rendezvous** is one instance of a collective, or one pair of ranks of a transfer. Every member posts its
`Communication`; it begins when the last member has arrived. A member arrives when it has posted and its previous
communication on that channel (and direction) has ended. If nothing is shared, the end is known as soon as the last
member posts, and no event is needed; shared cores, devices or links take one event per phase.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from costmodels.price.sharing import Claims
from plans.program import Instruction
from simulator.engine.fluid import Clock, Cores, Fabric
from simulator.engine.matching import Peers

__all__ = ["Communication", "Exchange", "Loads", "Rendezvous", "Shared", "Wires"]


class Communication:
    """One rank's part in a communication that is under way.

    Attributes:
        posted, arrived, start: when it was issued, came to its meetings, and began; -1 before that.
        end: its end; -1 until it is known.
        latest: the latest end of its meetings so far.
        waiter: what waits for its end, if anything does.
        follower: the next communication on its channel, which waits for this one.
        leader: the one before it on its channel, while this one waits for it.
        pending: meetings that are not over.
    """

    __slots__ = (
        "arrived", "cpu_ps", "end", "follower", "instruction", "latest", "leader", "meetings", "peers", "pending",
        "position", "posted", "rank", "start", "step", "waiter", "work_ps",
    )  # fmt: skip

    def __init__(
        self, rank: int, step: int, position: int, instruction: Instruction, peers: Peers, work_ps: int, cpu_ps: int
    ) -> None:
        self.rank = rank
        self.step = step
        self.position = position
        self.instruction = instruction
        self.peers = peers
        self.work_ps = work_ps
        self.cpu_ps = cpu_ps
        self.posted = self.arrived = self.start = self.end = -1
        self.latest = self.pending = 0
        self.waiter: Any = None
        self.leader: Communication | None = None
        self.follower: Communication | None = None
        self.meetings: list[Rendezvous] = []


class Rendezvous:
    """An instance of a collective or of one pair of a transfer; `present` have arrived."""

    __slots__ = ("claims", "cpu_left", "is_local", "members", "missing", "present", "start", "work_ps")

    def __init__(self, members: tuple[int, ...], missing: int, is_local: bool) -> None:
        self.members = members
        self.missing = missing
        self.present: list[Communication] = []
        self.start = self.work_ps = self.cpu_left = 0
        self.claims: Claims = ()
        self.is_local = is_local


class Loads(NamedTuple):
    """The claims of many meetings on links, in columns.

    Attributes:
        meeting: number of the meeting.
        link: number of the link (`Wires.link_number`).
        amount: a number in proportion to the share of the link that the meeting claims.
    """

    meeting: npt.NDArray[np.int64]
    link: npt.NDArray[np.int64]
    amount: npt.NDArray[np.int64]

    @classmethod
    def none(cls) -> Loads:
        """No claims."""
        return cls(*np.zeros((3, 0), dtype=np.int64))


class Wires(Protocol):
    """The effect of links on a meeting: `simulator.engine.network.Network`, or `Ports` alone."""

    def work_ps(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> int:
        """The time of a meeting alone, over the links that it uses."""

    def claims(self, instruction: Instruction, members: tuple[int, ...], work_ps: int) -> Claims:
        """The links that it shares with others."""

    def works_ps(self, instruction: Instruction, members: npt.NDArray[np.int64], work_ps: int) -> npt.NDArray[np.int64]:
        """`work_ps` of meetings whose members are the rows of `members`."""

    def loads(self, instruction: Instruction, members: npt.NDArray[np.int64], work_ps: npt.NDArray[np.int64]) -> Loads:
        """The claims of meetings whose members are the rows of `members`, and which take `work_ps` alone."""

    def link_number(self, link: Hashable) -> int:
        """The index of a link in `Loads`."""


class Shared:
    """The links that ranks share, and their clock.

    Args:
        env: the environment, in picoseconds.
        cores: of the node of each rank, where cores are shared.
        fabric: devices and links, where they are shared.
        all_on_fabric: whether all communication is worked off there, not only what shares links.
        wires: the links, where they are shared or changed.
    """

    def __init__(
        self,
        env: Clock,
        *,
        cores: Mapping[int, Cores] | None = None,
        fabric: Fabric | None = None,
        all_on_fabric: bool = False,
        wires: Wires | None = None,
    ) -> None:
        self._env = env
        self._cores = cores
        self._fabric = fabric
        self._all_on_fabric = all_on_fabric
        self._wires = wires

    def run(self) -> None:
        """Advance the clock until no events are left."""
        self._env.run()

    def later(self, time_ps: int, then: Callable[[], None]) -> None:
        """Call `then` after a delay, through a separate event."""
        self._env.timeout(max(0, time_ps - int(self._env.now))).callbacks.append(lambda _: then())

    def begin(self, meeting: Rendezvous, ended: Callable[[Rendezvous, int], None]) -> int | None:
        """The end of a meeting whose members have all arrived; None where `ended` will be called with it."""
        present = meeting.present
        if self._wires is not None:
            instruction = present[0].instruction
            meeting.work_ps = self._wires.work_ps(instruction, meeting.members, meeting.work_ps)
            meeting.claims = self._wires.claims(instruction, meeting.members, meeting.work_ps)
        cpu = [_cpu_share(communication, meeting) for communication in present]
        if self._cores is not None and any(cpu):
            self._at(meeting.start, partial(self._work_off_cpu, meeting, cpu, ended))
            return None
        begun = meeting.start + max(cpu)
        if self._on_fabric(meeting):
            self._at(begun, partial(self._work_off, meeting, ended))
            return None
        return begun + meeting.work_ps

    def _on_fabric(self, meeting: Rendezvous) -> bool:
        if self._fabric is None or meeting.work_ps == 0:
            return False
        return self._all_on_fabric or bool(meeting.claims)

    def _work_off_cpu(self, meeting: Rendezvous, cpu: Sequence[int], ended: Callable[[Rendezvous, int], None]) -> None:
        assert self._cores is not None

        def done() -> None:
            meeting.cpu_left -= 1
            if meeting.cpu_left == 0:
                if self._on_fabric(meeting):
                    self._work_off(meeting, ended)
                else:
                    ended(meeting, int(self._env.now) + meeting.work_ps)

        meeting.cpu_left = sum(1 for work_ps in cpu if work_ps)
        for communication, work_ps in zip(meeting.present, cpu, strict=True):
            if work_ps:
                self._cores[communication.rank].add(work_ps, done)

    def _work_off(self, meeting: Rendezvous, ended: Callable[[Rendezvous, int], None]) -> None:
        assert self._fabric is not None
        self._fabric.communicate(
            tuple(dict.fromkeys(meeting.members)), meeting.present[0].instruction, meeting.work_ps,
            lambda: ended(meeting, int(self._env.now)), meeting.claims,
        )  # fmt: skip

    def _at(self, time_ps: int, then: Callable[[], None]) -> None:
        if time_ps == int(self._env.now):
            then()
        else:
            self.later(time_ps, then)


class Exchange:
    """All communication of a program's ranks.

    Args:
        finished: called with each communication when its end is known.
        wake: called with a communication whose end is known and that has a waiter.
        shared: what ranks share; None: nothing, the end of a meeting is known when the last member arrives.
    """

    def __init__(
        self,
        finished: Callable[[Communication], None],
        wake: Callable[[Communication], None],
        shared: Shared | None = None,
    ) -> None:
        self._finished = finished
        self._wake = wake
        self._shared = shared
        self._tails: dict[int, Communication] = {}
        self._meetings: dict[tuple[int, int], Rendezvous] = {}
        self._arrivals: dict[tuple[int, bool], int] = {}

    def post(self, issued: Communication, posted: int) -> None:
        """A rank issues its part at the time `posted` (now or later)."""
        issued.posted = posted
        stream = issued.peers.stream
        tail = self._tails.get(stream)
        self._tails[stream] = issued
        if tail is None:
            self._arrive(issued, posted)
        elif tail.end >= 0:
            self._arrive(issued, posted if posted > tail.end else tail.end)
        else:
            issued.leader, tail.follower = tail, issued

    def _arrive(self, arrived: Communication, at: int) -> None:
        """A rank arrives at its meetings. Meetings that end now let further ranks arrive, without recursion."""
        arriving = [(arrived, at)]
        while arriving:
            arrived, at = arriving.pop()
            arrived.arrived = arrived.latest = at
            begun = self._join(arrived, at)
            if arrived.pending == 0:
                self._over(arrived, arriving)
            for meeting in begun:
                meeting.work_ps = max([communication.work_ps for communication in meeting.present])
                if meeting.is_local:
                    self._end(meeting, meeting.start, arriving)
                elif self._shared is not None:
                    if (end := self._shared.begin(meeting, self._ended)) is not None:
                        self._end(meeting, end, arriving)
                else:
                    cpu = max([_cpu_share(communication, meeting) for communication in meeting.present])
                    self._end(meeting, meeting.start + cpu + meeting.work_ps, arriving)

    def _join(self, arrived: Communication, at: int) -> list[Rendezvous]:
        """Join all meetings of a communication; returns those that are complete."""
        complete = []
        peers = arrived.peers
        for key, members in zip(peers.keys, peers.members, strict=True):
            count = arrived.step
            if peers.is_transfer:  # the k-th SEND of a pair meets its k-th RECV
                side = key, peers.is_send
                count = self._arrivals.get(side, 0)
                self._arrivals[side] = count + 1
            meeting = self._meetings.get((key, count))
            if meeting is None:
                is_local = peers.is_transfer and members[0] == members[-1]
                missing = 2 if peers.is_transfer else len(members)
                meeting = self._meetings[key, count] = Rendezvous(members, missing, is_local)
            meeting.missing -= 1
            if at > meeting.start:
                meeting.start = at
            if not (meeting.is_local and peers.is_send):  # what a rank sends to itself does not wait to be received
                meeting.present.append(arrived)
                arrived.meetings.append(meeting)
                arrived.pending += 1
            if meeting.missing == 0:
                del self._meetings[key, count]
                complete.append(meeting)
        return complete

    def _ended(self, meeting: Rendezvous, end: int) -> None:
        arriving: list[tuple[Communication, int]] = []
        self._end(meeting, end, arriving)
        for follower, at in arriving:
            self._arrive(follower, at)

    def _end(self, meeting: Rendezvous, end: int, arriving: list[tuple[Communication, int]]) -> None:
        for communication in meeting.present:
            if communication.start < 0 or communication.start > meeting.start:
                communication.start = meeting.start
            if end > communication.latest:
                communication.latest = end
            communication.pending -= 1
            if communication.pending == 0:
                self._over(communication, arriving)

    def _over(self, over: Communication, arriving: list[tuple[Communication, int]]) -> None:
        over.end = over.latest
        if over.start < 0:
            over.start = over.arrived
        over.leader = None
        over.meetings.clear()
        self._finished(over)
        if over.waiter is not None:
            self._wake(over)
        if (follower := over.follower) is not None:
            arriving.append((follower, max(follower.posted, over.end)))
            over.follower = None


def _cpu_share(part: Communication, meeting: Rendezvous) -> int:
    """The processor time of a rank for one pair of a transfer: it is spent once and spread over its pairs."""
    if part.cpu_ps == 0:
        return 0
    partners = [members for members in part.peers.members if not part.peers.is_transfer or members[0] != members[-1]]
    if len(partners) == 1:
        return part.cpu_ps
    share, rest = divmod(part.cpu_ps, len(partners))
    return share + (rest if partners[0] == meeting.members else 0)
