"""The folder of a launched job: the output of every rank and how it ended.

The files are `log_output/1/rank.N/stdout` and `.../stderr`, as with MindSpore's msrun. `1` is the number of the job and
never changes: a new run replaces the logs of the previous one, either all of them or, if another run still writes
there, none.
"""

import codecs
import contextlib
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError
from plans.reading import read_json

JOB = "1"
TAIL_BYTES = 8192
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFolder:
    """Paths below `log_dir` as the user wrote it.

    >>> JobFolder(log_dir=Path("log_output")).stdout(3).as_posix()
    'log_output/1/rank.3/stdout'
    """

    log_dir: Path

    @property
    def path(self) -> Path:
        """The folder of the job."""
        return self.log_dir / JOB

    def rank(self, rank: int) -> Path:
        """The folder of one rank."""
        return self.path / f"rank.{rank}"

    def stdout(self, rank: int) -> Path:
        """The file with the rank's stdout."""
        return self.rank(rank) / "stdout"

    def stderr(self, rank: int) -> Path:
        """Everything that the rank wrote to stderr: prints, warnings, traceback."""
        return self.rank(rank) / "stderr"

    def read(self, rank: int, name: str) -> dict[str, Any] | None:
        """One of the small JSON files of `executor.launch.worker_main`, or None while it is not there."""
        path = self.rank(rank) / name
        return read_json(path, "the report of a rank", dict[str, Any]) if path.exists() else None

    def last_line(self, rank: int) -> str:
        """The last line of the rank's stdout that is not empty, else of its stderr, else an empty text."""
        for path in (self.stdout(rank), self.stderr(rank)):
            if lines := tail(path, num_lines=1):
                return lines[0]
        return ""


@contextlib.contextmanager
def fresh_folders(job: JobFolder, ranks: Collection[int], *, keep_others: bool) -> Iterator[None]:
    """Create empty logs for `ranks` in place of those of an earlier run, and lock them within this context.

    With `keep_others` the folders of other ranks stay (another machine may be writing them into a shared folder).
    Raises TwofoldError if the folder cannot be written, or if another run is still writing there.
    """
    with contextlib.ExitStack() as locks:
        try:
            _replace(job, ranks, keep_others, locks)
        except OSError as error:
            problem = f"cannot write logs to {job.path}: {error.strerror or error}; choose another log directory"
            raise TwofoldError(problem) from None
        yield


def _replace(job: JobFolder, ranks: Collection[int], keep_others: bool, locks: contextlib.ExitStack) -> None:
    job.path.mkdir(parents=True, exist_ok=True)
    old = [path for path in job.path.glob("rank.*") if path.is_dir()]
    if keep_others:
        old = [path for path in old if path in {job.rank(rank) for rank in ranks}]
    for path in old:
        _lock(path, job, locks)
    staging = Path(tempfile.mkdtemp(prefix=".replacing-", dir=job.path))
    try:
        for rank in ranks:
            folder = staging / f"rank.{rank}"
            folder.mkdir()
            (folder / "stdout").touch()
            (folder / "stderr").touch()
            _lock(folder, job, locks)
        (staging / "old").mkdir()
        # All old ones leave before a new one arrives: logs of two runs never stand side by side.
        for path in old:
            path.rename(staging / "old" / path.name)
        for rank in ranks:
            (staging / f"rank.{rank}").rename(job.rank(rank))
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _lock(folder: Path, job: JobFolder, locks: contextlib.ExitStack) -> None:
    """Hold the folder until `locks` closes or this process dies."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    locks.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        problem = f"another run is still writing its logs to {job.path}; wait for it or choose another log directory"
        raise TwofoldError(problem) from None
    except OSError:
        pass  # a network file system without locks: two runs at once are then the user's own care


def tail(path: Path, *, num_lines: int) -> list[str]:
    """The last lines of a log that are not empty, at most `num_lines`, none if there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]


class LineReader:
    """Reads a growing log: `lines()` yields the complete lines so far, `lines(last=True)` everything to the end.

    One call of `lines()` reads a bounded piece, so that a rank that prints without end does not hold its reader.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """Yield every line once, without its line end."""
        while chunk := self._file.read(CHUNK_BYTES):
            *lines, self._rest = (self._rest + self._decoder.decode(chunk)).split("\n")
            for line in lines:
                yield line.removesuffix("\r")
            if not last:
                return
        if last and self._rest:
            rest, self._rest = self._rest, ""
            yield rest

    def close(self) -> None:
        """Close the file."""
        self._file.close()
