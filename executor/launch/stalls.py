"""Detects ranks that hang, and names the rank, the place in its program, and the ranks that wait for it.

A training rank records its position (`executor.train.heartbeat`). A rank that does not advance for 10 s, or for three
steps if they are longer, hangs itself or waits for one that does: a rank in a communication waits for members of the
group that are elsewhere. One of these may be outside of its steps: it writes to a disk, evaluates, or has an error to
report, and has more time. On Linux, a process that was stopped by a signal is detected immediately in /proc.
"""

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor.launch.rank_failures import RankFailed, RunFailed, name_ranks, where_ranks_are
from executor.launch.rank_logs import JobFolder
from plans.errors import TwofoldError

__all__ = ["StallWatch"]

LOOK_EVERY_S = 0.5
STOPPED_S = 5.0  # a debugger, or somebody who moves a process, may stop it for a moment
STALLED_S = 10.0
STALLED_STEPS = 3
WARM_STEPS = 3  # kernels are compiled and launches recorded in the first steps
WARM_S = 50.0  # also for reading data; below the 60 s after which a rank that waits gives up, and would be named
_NUMBERS = struct.Struct("3q")


@dataclass(slots=True)
class _Seen:
    """The last observation of one rank: position, step (from 1), activity (0: no step, 1: reads data, 2: trains).

    Where it does no step, `step` is the last one."""

    numbers: tuple[int, int, int] = (0, 0, 0)
    moved_s: float = 0.0
    step_began_s: float = 0.0
    longest_step_s: float = 0.0


class StallWatch:
    """Looks at the ranks of a job from time to time.

    Args:
        job: whose folder has the heartbeats.
        ranks: ranks of this machine.
        agent_pid: of torchrun's process.
    """

    def __init__(self, job: JobFolder, ranks: Sequence[int], agent_pid: int) -> None:
        self._job, self._ranks, self._agent_pid = job, ranks, agent_pid
        self._seen = {rank: _Seen() for rank in ranks}
        self._programs: dict[int, dict[str, Any]] = {}
        self._stopped_s: dict[int, float] = {}
        self._looked_s = 0.0

    def look(self) -> TwofoldError | None:
        """The error of a rank, guard or agent that has stopped; None while all is well."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return None
        late = now_s - self._looked_s > STOPPED_S and self._looked_s > 0
        self._looked_s = now_s
        if late:  # this process was stopped itself, perhaps with the ranks: begin to watch again
            self._stopped_s.clear()
            for seen in self._seen.values():
                seen.moved_s = now_s
        for rank in self._ranks:
            self._read(rank, now_s)
        return self._stopped(now_s) or self._stalled(now_s)

    def _read(self, rank: int, now_s: float) -> None:
        seen = self._seen[rank]
        try:
            numbers = _NUMBERS.unpack((self._job.rank(rank) / "heartbeat").read_bytes())
        except (FileNotFoundError, struct.error):
            return  # not there yet
        if numbers == seen.numbers:
            return
        if numbers[1] != seen.numbers[1]:
            if seen.numbers[1] > WARM_STEPS:
                seen.longest_step_s = max(seen.longest_step_s, now_s - seen.step_began_s)
            seen.step_began_s = now_s
        seen.numbers, seen.moved_s = numbers, now_s

    def _stopped(self, now_s: float) -> TwofoldError | None:
        """A process in the state "stopped", which a signal puts it into."""
        found: dict[int, tuple[str, int | None]] = {self._agent_pid: ("torchrun's process", None)}
        for rank in self._ranks:
            if (pids := self._job.read(rank, "pids.json")) is not None:
                found |= {pids["guard"]: ("guard of rank", rank), pids["rank"]: ("rank", rank)}
        for pid, (name, at_rank) in found.items():
            if not _is_stopped(pid):
                self._stopped_s.pop(pid, None)
            elif now_s - self._stopped_s.setdefault(pid, now_s) >= STOPPED_S:
                what = f"process {pid} was stopped by a signal (SIGSTOP)"
                if at_rank is None:
                    return RunFailed(f"{name} has stopped: {what}; its log: {self._job.path}")
                others = [rank for rank in self._ranks if rank != at_rank and self._waits(rank)]
                text = f"{name} {at_rank} stopped{self._at(at_rank)}: {what}{_who_wait(others)}"
                return RankFailed(text, rank=at_rank)
        return None

    def _stalled(self, now_s: float) -> TwofoldError | None:
        in_step = [rank for rank in self._ranks if self._seen[rank].numbers[2]]
        still = [rank for rank in in_step if now_s - self._seen[rank].moved_s > self._limit_s(rank)]
        if not still:
            return None
        rank = self._cause(still, in_step)
        since_s = now_s - self._seen[rank].moved_s
        if self._seen[rank].numbers[2] != 2 and since_s <= WARM_S:
            return None
        if elsewhere := [peer for peer in self._peers(rank) if peer not in self._seen]:
            if since_s <= WARM_S:  # the other node names its rank before, unless that reads data
                return None
            text = f"rank {rank} has waited {since_s:.0f} s{self._at(rank)} for {name_ranks(elsewhere)} on other nodes"
            error = RankFailed(text, rank=elsewhere[0])
            error.is_consequence = True
            return error
        others = [each for each in in_step if each != rank and self._waits(each)]
        where = where_ranks_are(self._job, [rank])[0]
        text = f"rank {rank} stopped{self._at(rank)}, {since_s:.0f} s ago{where}{_who_wait(others)}"
        return RankFailed(f"{text}; its log: {self._job.stderr(rank)}", rank=rank)

    def _limit_s(self, rank: int) -> float:
        _, step, activity = self._seen[rank].numbers
        longest_s = max(seen.longest_step_s for seen in self._seen.values())
        least_s = WARM_S if step <= WARM_STEPS or activity == 1 else STALLED_S
        return max(least_s, STALLED_STEPS * max(longest_s, self._program(rank).get("step_s") or 0.0))

    def _cause(self, still: Sequence[int], in_step: Sequence[int]) -> int:
        """The rank that the others wait for, directly or not; the earliest in its program where all wait."""
        rank, passed = min(still, key=lambda each: self._seen[each].moved_s), set[int]()
        while rank not in passed:
            passed.add(rank)
            ahead = [peer for peer in self._peers(rank) if peer in in_step and self._place(peer) != self._place(rank)]
            if not ahead:
                return next((peer for peer in self._peers(rank) if self._is_outside(peer)), rank)
            rank = min(ahead, key=lambda each: (self._waits(each), *reversed(self._seen[each].numbers[:2])))
        return min(passed, key=lambda each: tuple(reversed(self._seen[each].numbers[:2])))

    def _is_outside(self, rank: int) -> bool:
        """Whether a rank of this machine is in none of its steps."""
        return rank in self._seen and not self._seen[rank].numbers[2]

    def _place(self, rank: int) -> tuple[int, str]:
        """Step and instruction."""
        position, step, activity = self._seen[rank].numbers
        entries = self._program(rank).get("instructions", ())
        return step, entries[position][0] if activity == 2 and position < len(entries) else ""

    def _peers(self, rank: int) -> Sequence[int]:
        position, _, activity = self._seen[rank].numbers
        entries = self._program(rank).get("instructions", ())
        peers: Sequence[int] = entries[position][2] if activity == 2 and position < len(entries) else ()
        return peers

    def _waits(self, rank: int) -> bool:
        return bool(self._peers(rank))

    def _at(self, rank: int) -> str:
        position, step, activity = self._seen[rank].numbers
        entries = self._program(rank).get("instructions", ())
        if activity == 0 and step:
            return f" after step {step}"
        if activity == 0 or position >= len(entries):
            return ""
        if activity == 1:
            return f" where it reads the data of step {step}"
        return f" at {entries[position][0]} ({entries[position][1]}) of step {step}"

    def _program(self, rank: int) -> dict[str, Any]:
        if rank not in self._programs:
            if (found := self._job.read(rank, "heartbeat.json")) is None:
                return {}
            self._programs[rank] = found
        return self._programs[rank]


def _who_wait(ranks: Sequence[int]) -> str:
    return f"; {name_ranks(ranks)} wait{'s' if len(ranks) == 1 else ''} for it" if ranks else ""


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False
