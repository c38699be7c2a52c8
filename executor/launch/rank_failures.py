"""The cause of a failed launch, among everything that its ranks report.

When one rank fails, the others fail too: their connections break, or they are ended. The evidence in `error.json` and
`end.json` (see `executor.launch.worker_main`) is therefore ordered by its strength first and by time second.
"""

import enum
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.launch.rank_logs import JobFolder, tail
from plans.errors import TwofoldError

NUM_LOG_LINES = 15
NUM_RANKS_LISTED = 16
MAX_STORY_CHARS = 20_000
STACK_WAIT_S = 0.3
_NOT_JOINED = re.compile(r"DistStoreError: wait timeout after (\d+)ms, keys: /default_pg/\S*/(\d+)$")


class RunFailed(TwofoldError):
    """The job started and failed; the input may be correct, so the exit code of the command line is 1.

    `is_consequence` says that the cause is perhaps an end elsewhere.
    """

    exit_code = 1
    is_consequence = False


class RankFailed(RunFailed):
    """One rank failed first, and the job was ended because of it; `rank` is its number."""

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class RankRefused(RankFailed):
    """The first failure was an error of twofold's own on a rank, such as bad input; it has that error's words."""

    def __init__(self, message: str, *, rank: int, exit_code: int) -> None:
        super().__init__(message, rank=rank)
        self.exit_code = exit_code


class RunTimedOut(RunFailed):
    """The job was still running when its timeout expired."""


class Weight(enum.IntEnum):
    """Likelihood that a rank's end caused the end of the others: lower values are more likely."""

    OWN_ERROR = 0
    PERHAPS_A_CONSEQUENCE = 1
    TOLD_TO_END = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The failure of one rank; `time_ns` is on the host's monotonic clock."""

    rank: int
    weight: Weight
    time_ns: float
    headline: str
    story: str = ""
    lost_peer: bool = False
    refusal: str = ""
    exit_code: int = 2

    def error(self, job: JobFolder) -> RankFailed:
        """The exception that reports this failure."""
        if self.refusal:
            report = f"{self.refusal} (rank {self.rank}; its log: {job.stderr(self.rank)})"
            return RankRefused(report, rank=self.rank, exit_code=self.exit_code)
        text = f"rank {self.rank} {self.headline}"
        if self.lost_peer:
            text += _ended_before(job)
        text += f"; its log: {job.stderr(self.rank)}"
        if self.story:
            story = self.story.rstrip("\n")
            text += "\n" + (story if len(story) <= MAX_STORY_CHARS else "[...]" + story[-MAX_STORY_CHARS:])
        error = RankFailed(text, rank=self.rank)
        error.is_consequence = self.weight is not Weight.OWN_ERROR
        return error


def first_failure(job: JobFolder, ranks: Sequence[int], exit_codes: Mapping[int, int] | None = None) -> Failure | None:
    """The most likely cause among the failures known so far; None if there is none.

    `exit_codes` are those that torchrun saw, once it has ended: they detect a rank whose guard was itself killed and
    could not write a report.
    """
    found = [failure for rank in ranks if (failure := _read_failure(job, rank) or _lost_guard(job, rank)) is not None]
    for rank, code in (exit_codes or {}).items():
        if code != 0 and job.read(rank, "end.json") is None and job.read(rank, "error.json") is None:
            weight = Weight.TOLD_TO_END if code == -signal.SIGTERM else Weight.OWN_ERROR
            story = "\n".join(tail(job.stderr(rank), num_lines=NUM_LOG_LINES)) if code > 0 else ""  # of its guard
            found.append(
                Failure(rank=rank, weight=weight, time_ns=float("inf"), headline=_how_it_ended(code), story=story)
            )
    return min(found, key=lambda failure: (failure.weight, failure.time_ns), default=None)


def _read_failure(job: JobFolder, rank: int) -> Failure | None:
    if (error := job.read(rank, "error.json")) is not None:
        code, what, story = error["code"], error["error"], error["traceback"]
        if (waited := _NOT_JOINED.search(what)) and not _has_ended(job, late := int(waited[2])):
            where = where_ranks_are(job, [late])[0]
            headline = f"did not join the others within {int(waited[1]) / 1000:g} s{where}"
            return Failure(rank=late, weight=Weight.OWN_ERROR, time_ns=error["time_ns"], headline=headline)
        if error["lost_peer"]:
            headline = "lost its connection to another rank, and no rank here reported an error of its own"
        elif story:
            headline = f"failed: {what}"
        else:
            headline = _how_it_ended(code) + (f": {what}" if what else "")
        return Failure(
            rank=rank,
            weight=Weight.PERHAPS_A_CONSEQUENCE if error["lost_peer"] else Weight.OWN_ERROR,
            time_ns=error["time_ns"],
            headline=headline,
            story=story,
            lost_peer=error["lost_peer"],
            refusal=error.get("refusal", ""),
            exit_code=error["code"],
        )
    end = job.read(rank, "end.json")
    if end is None or end["code"] == 0:
        return None
    weight, headline = Weight.OWN_ERROR, _how_it_ended(end["code"])
    if end["code"] == -signal.SIGABRT:
        weight = Weight.PERHAPS_A_CONSEQUENCE  # what NCCL's watchdog and std::terminate do after a lost connection
    if end["told_to_end"]:
        weight, headline = Weight.TOLD_TO_END, "was terminated by SIGTERM"
    # The rank could say nothing itself; faulthandler may have written its stack before it died.
    story = "\n".join(tail(job.stderr(rank), num_lines=NUM_LOG_LINES)) if end["code"] < 0 else ""
    return Failure(rank=rank, weight=weight, time_ns=end["time_ns"], headline=headline, story=story)


def _has_ended(job: JobFolder, rank: int) -> bool:
    """Whether a rank ended on its own, not because torchrun ends all ranks after a failure."""
    end = job.read(rank, "end.json")
    return job.read(rank, "error.json") is not None or (end is not None and not end["told_to_end"])


def _lost_guard(job: JobFolder, rank: int) -> Failure | None:
    """The failure of a rank whose guard disappeared without a report: it was killed, and the rank with it."""
    pids = job.read(rank, "pids.json")
    if pids is None or is_running(pids["guard"]) or job.read(rank, "end.json") is not None:
        return None
    headline = f"was killed with its guard, process {pids['guard']} (by hand, or by the system when memory ran out)"
    return Failure(rank=rank, weight=Weight.OWN_ERROR, time_ns=time.monotonic_ns(), headline=headline)


def is_running(pid: int) -> bool:
    """Whether a process of this user is still running; a zombie (ended, not yet waited for) is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's: ours has gone, but then its number is taken and there is no telling
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return Path("/proc/self").exists() is False  # without /proc (not Linux) it counts as running until waited for


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    if -code == signal.SIGKILL:
        return "was killed by SIGKILL (by hand, or by the system when memory ran out)"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was killed by signal {-code}"
    return f"was killed by {number.name} ({signal.strsignal(number)})"


def _ended_before(job: JobFolder) -> str:
    """The ranks that exited with code 0 while others still communicated with them: a common cause of a lost peer."""
    left = []
    for folder in job.path.glob("rank.*"):
        rank = int(folder.name.removeprefix("rank."))
        if (end := job.read(rank, "end.json")) is not None and end["code"] == 0:
            left.append(rank)
    return f"; {name_ranks(left)} had already ended with exit code 0" if left else ""


def name_ranks(ranks: Sequence[int]) -> str:
    """A list for a message.

    >>> name_ranks([4]), name_ranks([0, 2])
    ('rank 4', 'ranks 0, 2')
    """
    listed = sorted(ranks)[:NUM_RANKS_LISTED]
    more = f" and {len(ranks) - len(listed)} more" if len(ranks) > len(listed) else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, listed)) + more


def timed_out(job: JobFolder, ranks: Sequence[int], timeout_s: float) -> RunTimedOut:
    """The error of a job that timed out: which ranks still run, their last output and their position.

    Asks every rank that still runs to write its Python stack to its stderr (SIGUSR1; `executor.launch.worker_main`
    registers faulthandler for it), which works inside a collective too.
    """
    ended = {rank: end["code"] for rank in ranks if (end := job.read(rank, "end.json")) is not None}
    running = [rank for rank in ranks if rank not in ended]
    if running:
        text = f"the run did not end within {timeout_s:g} s: {name_ranks(running)} still running"
    else:
        text = f"the run did not end within {timeout_s:g} s: its ranks did, torchrun did not"
    for code in sorted(set(ended.values())):
        text += f"; {name_ranks([rank for rank in ended if ended[rank] == code])} {_how_it_ended(code)}"
    asked = running[:NUM_RANKS_LISTED]
    last_lines = {rank: job.last_line(rank) for rank in asked}
    where = dict(zip(asked, where_ranks_are(job, asked), strict=True))
    for rank in asked:
        if job.read(rank, "pids.json") is None:
            text += f"\n  rank {rank} had not started"
            continue
        last = f"last line: {last_lines[rank]}" if last_lines[rank] else "it printed nothing"
        text += f"\n  rank {rank}{where[rank]}; {last} ({job.rank(rank)})"
    return RunTimedOut(text)


def where_ranks_are(job: JobFolder, ranks: Sequence[int]) -> list[str]:
    """`" is in f (file.py line 3)"` for every rank, or an empty text if it does not answer."""
    return list(_where(job, ranks))


def _where(job: JobFolder, ranks: Sequence[int]) -> Iterator[str]:
    sizes = {}
    for rank in ranks:
        pids = job.read(rank, "pids.json")
        try:
            sizes[rank] = job.stderr(rank).stat().st_size
            if pids is not None:
                os.kill(pids["rank"], signal.SIGUSR1)
        except OSError:
            continue
    time.sleep(STACK_WAIT_S)
    for rank in ranks:
        frames: list[tuple[str, str, str]] = []
        if rank in sizes:
            with job.stderr(rank).open("rb") as file:
                file.seek(sizes[rank])
                frames = re.findall(r'File "(.*)", line (\d+) in (.*)', file.read().decode(errors="replace"))
        if not frames:
            yield ""
            continue
        path, line, _ = next((frame for frame in frames if "site-packages" not in frame[0]), frames[0])
        yield f" is in {frames[0][2]} ({path} line {line})"
