"""What runs inside a tree with switches: `python -m benchmarks.mutants.loop REQUEST.json RESULTS.jsonl`.

pytest collects all tests once. In forks of that process every file of tests runs without a change, which gives the time
of every test and the changes that it reaches; then every change is switched on in a fork of its own, where the tests
that reach it run, the cheapest files first, until one fails. A change that acts while its module is imported is tried
in a fork of a process that has imported only third-party packages.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

IMPORTED_ONCE = (
    "torch.distributed", "torch.distributed.run", "torch._dynamo", "scipy.sparse", "scipy.optimize", "pandas",
    "matplotlib.pyplot", "jinja2", "tyro", "simpy",
)  # fmt: skip
_TEST_S = 90.0  # processor time of a test; those that take longer are not used
_FILE_S = 300.0  # of a file of tests
_LONGER = 5.0  # how many times as long a test may take with a change, and five seconds more
_MEMORY_BYTES = 12 << 30  # a change may ask for any size


class TooSlow(Exception):
    """A test takes more processor time than it may."""


class Loop:
    """Runs tests in forks of the process that collected them.

    Args:
        request: "mutants", numbers of changes; "imported", those that act on import; "folder" for what tests write;
            "budget_s", the processor time of the tests that are run for one change.
        results: file to which a line of JSON is added for every test and every change.
        fresh: for each job that shares the work, what runs the tests of changes that act on import.
    """

    def __init__(self, request: dict[str, Any], results: Path, fresh: Sequence[Fresh]) -> None:
        self.request, self.results, self.fresh = request, results, fresh
        self.folder, self.job = "", 0
        self.failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_file: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
        done = {line["measured"] for line in _lines(self.results) if "measured" in line}
        self._share([by_file[file] for file in sorted(by_file.keys() - done)], self._measure_file)
        passing = {line["test"]: line for line in _lines(self.results) if line.get("status") == "passed"}
        items = {item.nodeid: item for item in session.items if item.nodeid in passing}
        tried = {line["mutant"] for line in _lines(self.results) if "mutant" in line}
        left = [mutant for mutant in self.request["mutants"] if mutant["number"] not in tried]
        self._share(left, partial(self._try_mutant, passing, items))
        return True

    def _share(self, work: Sequence[Any], do: Callable[[Any], None]) -> None:
        """Do all the work, shared among forks of this process: each takes the next part when it has done one."""
        to_read, to_write = os.pipe()
        pids = list[int]()
        for job in range(len(self.fresh)):
            pid = os.fork()
            if pid == 0:
                os.close(to_write)
                self._take(to_read, job, work, do)
            pids.append(pid)
        os.close(to_read)
        try:
            with os.fdopen(to_write, "wb") as queue, contextlib.suppress(BrokenPipeError):
                for number in range(len(work)):
                    queue.write(number.to_bytes(4))
            for pid in pids:
                os.waitpid(pid, 0)
        except SystemExit:
            for pid in pids:
                os.kill(pid, signal.SIGTERM)
            raise

    def _take(self, queue: int, job: int, work: Sequence[Any], do: Callable[[Any], None]) -> NoReturn:
        try:
            self.folder, self.job = os.path.join(self.request["folder"], str(job)), job
            os.makedirs(self.folder, exist_ok=True)
            while number := os.read(queue, 4):
                do(work[int.from_bytes(number)])
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _measure_file(self, items: Sequence[pytest.Item]) -> None:
        with contextlib.suppress(TimeoutError):
            _forked(self.folder, partial(self._measure, items), _FILE_S, 900)
        self._add({"measured": items[0].nodeid.partition("::")[0]})

    def _try_mutant(
        self, passing: Mapping[str, dict[str, Any]], items: Mapping[str, pytest.Item], mutant: dict[str, Any]
    ) -> None:
        number = mutant["number"]
        chosen, left = _chosen(number, mutant["path"], list(passing.values()), self.request["budget_s"])
        limits_s = {name: 5 + _LONGER * passing[name]["cpu_s"] for name in chosen}
        out = self.results.with_name(f"killer{self.job}")
        out.write_text("")
        begin_s = time.monotonic()
        try:
            if not chosen:
                status = 0
            elif number in self.request["imported"]:
                words = {"number": number, "limits_s": limits_s, "out": str(out)}
                status = self.fresh[self.job].run(folder=self.folder, **words)
            else:
                work = partial(self._try, number, {items[name]: limits_s[name] for name in chosen}, out)
                status = _forked(self.folder, work, *_most_s(limits_s))
            outcome = "killed" if status else "survived"
        except TimeoutError:
            outcome = "too slow"
        self._add({
            "mutant": number, "outcome": outcome, "by": out.read_text(), "tests": len(chosen), "left": left,
            "wall_s": round(time.monotonic() - begin_s, 2),
        })  # fmt: skip

    def _add(self, line: dict[str, Any]) -> None:
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _measure(self, items: Sequence[pytest.Item]) -> int:
        import mutant_switch  # type: ignore[import-not-found]

        touched = Path(tempfile.gettempdir()) / "touched"
        os.environ["TWOFOLD_TOUCHED"] = str(touched)
        mutant_switch.recording = True
        for item, after in zip(items, [*items[1:], None], strict=True):
            touched.write_text("")
            mutant_switch.seen.clear()
            begin_s, self.failed = _cpu_s(), False
            with _limited(_TEST_S) as late:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            numbers = sorted({int(word) for word in touched.read_text().split()})
            cpu_s = _cpu_s() - begin_s
            status = "slow" if late or cpu_s > _TEST_S else "failed" if self.failed else "passed"
            self._add({"test": item.nodeid, "cpu_s": cpu_s, "status": status, "touched": numbers})
        return 0

    def _try(self, number: int, limits_s: Mapping[pytest.Item, float], out: Path) -> int:
        import mutant_switch

        items = [*limits_s]

        os.environ["TWOFOLD_MUTANT"] = str(number)
        mutant_switch.active.add(number)
        self.failed = False
        for item, after in zip(items, [*items[1:], None], strict=True):
            with _limited(limits_s[item]) as late:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.failed or late:
                out.write_text(item.nodeid)
                return 1
        return 0


class Killer:
    """Writes the name of the first test that fails, or of the file that cannot be collected.

    Args:
        out: file to write.
        limits_s: processor time of every test.
    """

    def __init__(self, out: Path, limits_s: Mapping[str, float]) -> None:
        self.out, self.limits_s = out, limits_s

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool, bool]:
        with _limited(self.limits_s[item.nodeid]):
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.out.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.out.write_text(report.nodeid)


def _chosen(number: int, path: str, tests: Sequence[dict[str, Any]], budget_s: float) -> tuple[list[str], int]:
    """The tests to run for a change, and how many that reach it are left out because they take too long.

    Tests in a file of the same name come first, then those that are short and reach few changes: they look at little
    else.
    """
    stem = Path(path).stem
    reach = [test for test in tests if number in test["touched"]]
    spent_s, kept = 0.0, list[str]()
    for test in sorted(reach, key=partial(_place, stem)):
        if spent_s + test["cpu_s"] <= budget_s:
            spent_s += test["cpu_s"]
            kept.append(test["test"])
    first = {name.partition("::")[0]: at for at, name in reversed([*enumerate(kept)])}
    kept.sort(key=lambda name: first[name.partition("::")[0]])  # a file's tests together: they share fixtures
    return kept, len(reach) - len(kept)


def _place(stem: str, test: Mapping[str, Any]) -> tuple[bool, float]:
    return stem not in test["test"].partition("::")[0], len(test["touched"]) * (0.05 + test["cpu_s"])


def _most_s(limits_s: Mapping[str, float]) -> tuple[float, float]:
    """The most processor time and wall time that all tests of a change may take together.

    One may take its whole limit; the others take what they take without a change, about.
    """
    usual_s = sum((limit_s - 5) / _LONGER for limit_s in limits_s.values())
    cpu_s = 20 + max(limits_s.values()) + 2 * usual_s
    return cpu_s, 60 + 3 * cpu_s


def _forked(folder: str, work: Callable[[], int], cpu_s: float, wall_s: float) -> int:
    """The exit status of work done in a fork.

    Raises:
        TimeoutError: it was ended because it took too long.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            scratch = tempfile.mkdtemp(dir=folder)
            os.environ["TMPDIR"] = tempfile.tempdir = scratch
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 2))
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
            status = work()
        except BaseException:
            status = 3
        finally:
            os._exit(status)
    end_s = time.monotonic() + wall_s
    try:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > end_s:
                raise TimeoutError
            time.sleep(0.01)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
        _end_left(folder)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        raise TimeoutError
    return status


def _end_left(folder: str) -> None:
    """End the processes that tests left, and remove what they wrote."""
    import shutil

    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(process.name) != os.getpid() and f"TMPDIR={folder}/".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
    for scratch in Path(folder).iterdir():
        shutil.rmtree(scratch, ignore_errors=True)


class Fresh:
    """A process that has imported third-party packages only, and runs tests in forks of itself."""

    def __init__(self) -> None:
        to_read, to_write = os.pipe()
        from_read, from_write = os.pipe()
        if os.fork() == 0:
            os.close(to_write)
            os.close(from_read)
            with os.fdopen(to_read) as requests, os.fdopen(from_write, "w") as answers:
                for line in requests:
                    answers.write(f"{_run_fresh(json.loads(line))}\n")
                    answers.flush()
            os._exit(0)
        os.close(to_read)
        os.close(from_write)
        self._requests, self._answers = os.fdopen(to_write, "w"), os.fdopen(from_read)

    def run(self, **words: Any) -> int:
        """The exit status of tests with a change.

        Raises:
            TimeoutError: they were ended because they took too long.
        """
        self._requests.write(json.dumps(words) + "\n")
        self._requests.flush()
        status = int(self._answers.readline())
        if status < 0:
            raise TimeoutError
        return status


def _run_fresh(words: dict[str, Any]) -> int:
    def work() -> int:
        os.environ["TWOFOLD_MUTANT"] = str(words["number"])
        arguments = ["-q", "-x", "-p", "no:cacheprovider", *words["limits_s"]]
        return int(int(pytest.main(arguments, plugins=[Killer(Path(words["out"]), words["limits_s"])])) not in (0, 5))

    try:
        cpu_s, wall_s = _most_s(words["limits_s"])
        return _forked(words["folder"], work, 30 + cpu_s, 30 + wall_s)
    except TimeoutError:
        return -1


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[list[float]]:
    """End what takes longer; the list that is given is empty until then. pytest takes the exception for a failure."""
    late: list[float] = []

    def over(*_: object) -> None:
        late.append(cpu_s)
        raise TooSlow

    signal.signal(signal.SIGPROF, over)
    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_PROF, cpu_s, 1.0)
    signal.setitimer(signal.ITIMER_REAL, 30 + 10 * cpu_s, 1.0)  # tests that wait
    try:
        yield late
    except TooSlow:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(each.ru_utime + each.ru_stime for each in used)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _main(request: str, results: str) -> int:
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was forked is ended on the way out
    asked = json.loads(Path(request).read_text())
    fresh = [Fresh() for _ in range(asked["jobs"])]
    arguments = ["-q", "-p", "no:cacheprovider", *asked["tests"]]
    return int(pytest.main(arguments, plugins=[Loop(asked, Path(results), fresh)]))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
