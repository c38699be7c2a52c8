"""Changed files and command lines for every reader and command.

    python -m benchmarks.reliability.fuzz --count 10000 --seed 1

`--readers` leaves out the commands, of which one takes as long as a hundred files.

Every case takes a good file or command line (`fuzz_inputs`), changes some of its bytes or one value, and hands it to a
reader or a command, in this process; commands do everything but start ranks. It is found bad if an exception other than
a refusal comes out, if it takes more than 5 s of processor time or a minute, fills more than 1 GB, or prints a number
that is not finite. A case follows from the seed and its number: `--only NUMBER` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept import keep
from benchmarks.reliability.fuzz_inputs import BadOutput, Kind, kinds, nothing_starts
from plans.errors import TwofoldError

__all__ = ["Finding", "fuzz"]

LIMIT_S = 5.0
LIMIT_BYTES = 1 << 30
MOST_BYTES = 3 << 30  # a case that asks for more gets a MemoryError
_PART = 4000  # cases of one task
READ_AS_OFTEN = 4
"""Cases of a reader for one of a command, which takes fifty times as long."""

VALUES: tuple[Any, ...] = (
    0, -1, 1, 3, 2**31, 2**63 - 1, 2**63, 10**30, 0.0, -0.0, 0.5, 1e-308, 1e308, -1e300, "", "x", "8k", "nan", "-1",
    "\u0663", "\x1b[31mred", "a\0b", "x" * 10_000, None, True, [], {}, [[]], [0], {"a": 1},
)  # fmt: skip
WORDS = (
    "0", "-1", "1", "2", "3", "8", "1e9", "10" * 20, "nan", "inf", "-inf", "", " ", "x", "\u0662", "a\0b", "\x1b[2J",
    "none", "full", "1f1b", "interleaved", "zb_v", "--json", "--machine", "--tp", "--batch", "h100-sxm-x8", "1,2,3",
    "h100-sxm-x1000000000000", "/dev/null", "/", "../..", "4.5", "true", "llama-3-8b", "selective", "=", "--", "-h",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A case that was not refused as it should be: its number, kind, what came out, and the input."""

    number: int
    kind: str
    what: str
    content: bytes


class _TooSlow(BaseException):
    """The time of a case is over."""


def fuzz(
    count: int, seed: int, *, begin: int = 0, only: int | None = None, commands: bool = True
) -> Iterator[Finding | None]:
    """Run cases, and give what each of them found.

    Args:
        count: of cases, of all kinds in turn.
        seed: seed of the changes.
        begin: number of the first case.
        only: the one case to run.
        commands: whether inputs are given to commands, too, and not only to their readers.
    """
    with tempfile.TemporaryDirectory(prefix="twofold-fuzz-") as name:
        folder = Path(name)
        every = kinds(folder)
        files = [kind for kind in every if not kind.commands]
        known = [*files * READ_AS_OFTEN, *(kind for kind in every if kind.commands)] if commands else files
        (work := folder / "work").mkdir()
        for number in range(begin, begin + count) if only is None else [only]:
            draw, kind = random.Random(f"{seed} {number}"), known[number % len(known)]
            content = changed(kind, draw)
            path = folder / f"changed{kind.suffix}"
            path.write_bytes(content)
            with nothing_starts(work), _limited_memory():
                what = _outcome(kind, path)
            yield None if what is None else Finding(number=number, kind=kind.name, what=what, content=content)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """This process may fill `MOST_BYTES` more than it has now."""
    status = Path("/proc/self/status").read_text()
    data_bytes = 1024 * int(re.search(r"^VmData:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def changed(kind: Kind, draw: random.Random) -> bytes:
    """A good input with some of its bytes, words or values changed."""
    if kind.suffix == ".txt":
        words = kind.content.split(b" ")
        for _ in range(draw.randint(1, 3)):
            at, word = draw.randrange(1, len(words) + 1), draw.choice(WORDS).encode()
            words[at : at + draw.randint(0, 1)] = [word]
        return b" ".join(words)
    if kind.suffix == ".json" and draw.random() < 0.7:
        return _with_value(kind.content, draw)
    if kind.suffix in (".toml", ".csv", ".jsonl", ".log", ".sh") and draw.random() < 0.7:
        numbers = [*re.finditer(rb"-?\d+(\.\d+)?(e-?\d+)?", kind.content)]
        at = draw.choice(numbers)
        value = draw.choice(VALUES)
        text = (value if isinstance(value, str) else json.dumps(value)).encode()
        return kind.content[: at.start()] + text + kind.content[at.end() :]
    return _with_bytes(bytearray(kind.content), draw)


def _with_value(content: bytes, draw: random.Random) -> bytes:
    document = json.loads(content)
    for _ in range(draw.randint(1, 2)):
        holder: Any = document
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw.choice(keys)
            inner = holder[key]
            if isinstance(inner, dict | list) and inner and draw.random() < 0.9:
                holder = inner
                continue
            if draw.random() < 0.1:
                del holder[key]
            elif isinstance(inner, int | float) and draw.random() < 0.3:
                holder[key] = inner * draw.choice((-1, 10, 1000, 10**9, 0.5))
            else:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
            break
    return json.dumps(document).encode()


def _with_bytes(content: bytearray, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content) + 1)
        piece = content[at : at + draw.randint(1, 40)]
        match draw.randrange(5):
            case 0 if at < len(content):
                content[at] ^= 1 << draw.randrange(8)
            case 1:
                del content[at : at + len(piece)]
            case 2:
                content[at:at] = piece * draw.choice((1, 2, 50))
            case 3:
                content[at:at] = draw.choice((b"\xff", b"\0", b"[" * 5000, b'"', b"}", b"9" * 400, b"-", b"\n", b","))
            case _ if draw.random() < 0.2:
                del content[at:]
    return bytes(content)


def _outcome(kind: Kind, path: Path) -> str | None:
    """What is bad about a case; None where nothing is."""

    runs = [True]

    def over(*_: object) -> None:
        if runs.pop() if runs else False:  # once, and not while the case is put away
            raise _TooSlow

    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limits = (signal.SIGPROF, signal.ITIMER_PROF, LIMIT_S), (signal.SIGALRM, signal.ITIMER_REAL, 12 * LIMIT_S)
    before = [signal.signal(number, over) for number, _, _ in limits]
    for _, timer, limit_s in limits:
        signal.setitimer(timer, limit_s)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            kind.read(path)
    except TwofoldError as error:
        return "a refusal of several lines" if "\n" in str(error).strip() else None
    except _TooSlow:
        return f"more than {LIMIT_S:g} s"
    except BadOutput as error:
        return str(error)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        own = [each for each in traceback.extract_tb(error.__traceback__) if "site-packages" not in each.filename]
        where = own[-1] if own else place
        return f"{type(error).__name__}: {str(error)[:120]} ({Path(where.filename).name} line {where.lineno})"
    finally:
        runs.clear()
        for (number, timer, _), earlier in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, earlier)
    filled = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) * 1024
    return f"{filled / 1e9:.1f} GB of memory" if filled > LIMIT_BYTES else None


def _part(begin: int, count: int, seed: int, commands: bool) -> tuple[list[Finding], int]:
    """The findings of some cases, and the most memory of this process, in bytes."""
    found = [each for each in fuzz(count, seed, begin=begin, commands=commands) if each is not None]
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the one case to run; its input is printed")
    parser.add_argument("--readers", action="store_true", help="only read files, run no command")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases")
    parser.add_argument("--out", type=Path, help="JSON file that keeps the figures so far")
    options = parser.parse_args()
    if options.only is not None:
        (found,) = fuzz(1, options.seed, only=options.only, commands=not options.readers)
        print("right" if found is None else f"{found.kind}: {found.what}", flush=True)
        sys.stdout.buffer.write(b"" if found is None else found.content[:2000] + b"\n")
        return int(found is not None)
    begin_s, places, done, most_bytes = time.monotonic(), Counter[str](), 0, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        parts = {
            pool.submit(_part, begin, min(_PART, options.count - begin), options.seed, not options.readers): begin
            for begin in range(0, options.count, _PART)
        }
        for part in as_completed(parts):
            found, used_bytes = part.result()
            done, most_bytes = done + min(_PART, options.count - parts[part]), max(most_bytes, used_bytes)
            for each in found:
                place = re.sub(r"\d{3,}", "N", f"{each.kind}: {each.what}")
                if not places[place]:
                    print(f"{each.number:6} {each.kind}: {each.what}", flush=True)
                places[place] += 1
            if options.out is not None:
                figures = {"cases": done, "bad": places.total(), "places": dict(places), "most_bytes": most_bytes}
                keep(options.out, "fuzz", figures | {"wall_s": round(time.monotonic() - begin_s)})
    spent_s = time.monotonic() - begin_s
    print(f"{done} cases in {spent_s:.0f} s: {places.total()} bad, at {len(places)} places")
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(_main())
