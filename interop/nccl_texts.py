"""Text output of NCCL and its tests: tables of nccl-tests, and logs of a run.

A log has no times. With NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=INIT,COLL it contains the communicator and rank of a
process; the calls of several logs (NCCL_DEBUG_FILE=nccl.%h.%p.log) are then combined, and groups are known.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interop.profiler_trace import collective_of
from interop.seen_calls import ITEM_BYTES, SeenCall, SeenCalls, is_count
from plans.errors import TwofoldError

__all__ = ["calls_of_logs", "calls_of_table", "is_log"]

_NCCL_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Bytes of an element by ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64,
bfloat16, and both float8."""

_WHO = r"^(\S+:\d+):\d+ \[(\d+)\] NCCL INFO .*?"
"""Host and process, and the device of a line."""

_RANK = "[0-9]{1,6}"
_CALLED = re.compile(
    _WHO
    + rf"(\w+): opCount (\w+) (.*?) count ([0-9]{{1,15}}) datatype ([0-9]{{1,3}}) op \d+ root ({_RANK}) comm (\w+) "
    rf"\[nranks=({_RANK})\]",
    re.MULTILINE,
)
_JOINED = re.compile(
    _WHO + rf"comm (0x\w+) rank ({_RANK}) nranks ({_RANK}) .*?"
    r"(?:parent (0x\w+) (?:splitCount (\d+) )?color (-?\d+) key -?\d+ ?)?(?:commId (0x\w+) )?- Init",
    re.MULTILINE | re.IGNORECASE,
)
_TESTED = re.compile(r"(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv|reduce)(?:_perf)?")

Key = tuple[str, str, str]
"""Host and process, device, address of a communicator."""


def is_log(text: str) -> bool:
    """Whether calls of NCCL are logged in it."""
    return "NCCL INFO" in text and "opCount" in text


def calls_of_table(text: str, path: Path) -> SeenCalls:
    """A table of nccl-tests: size, count, type, redop, root, and the time out of place in microseconds."""
    started = re.search(r"Collective test starting: (\w+)", text)
    named = _TESTED.search(started[1] if started else path.name)
    num_ranks = len(re.findall(r"^#\s+Rank\s+\d+\s", text, re.MULTILINE))
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+[a-z]\w*\s", line)]
    if not rows or num_ranks < 2:
        raise TwofoldError(
            f"{path}: not a trace of torch's profiler (.json), a table of nccl-tests with its lines of ranks, or a "
            f"log of NCCL (NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL)"
        )
    call = collective_of(named[1]) if named else None
    if call is None:
        raise TwofoldError(
            f"{path}: it does not say which test ran; name the file after the test, such as all_reduce_perf.txt"
        )
    ranks = (0, 1) if call == "transfer" else tuple(range(num_ranks))
    calls, skipped = [], dict[str, int]()
    for row in rows:
        try:
            size_bytes, item_bytes, seconds = int(row[0]), ITEM_BYTES[row[2]], float(row[5]) * 1e-6
            if not (is_count(size_bytes) and 0 < seconds < math.inf):
                raise ValueError
            calls.append(SeenCall(
                call=call, size_bytes=size_bytes, item_bytes=item_bytes, ranks=ranks, seconds=seconds,
            ))  # fmt: skip
        except (KeyError, ValueError, IndexError):
            skipped[f"the row of {row[1]} elements of {row[2]}"] = 1
    return SeenCalls(
        calls=[call for call in calls if call.size_bytes], source=f"a table of nccl-tests ({call})", skipped=skipped,
        assumed=["the ranks of the test are the first of the machine, node by node"],
    )  # fmt: skip


@dataclass(slots=True)
class _Communicator:
    """A communicator as one of its ranks sees it.

    Args:
        identity: the same for all of its ranks; its own if the log lacks it.
        size: how many ranks it has.
        rank: which of them this is; None if the log lacks it.
        calls: name, count, dtype and root of each.
    """

    identity: tuple[str, ...]
    size: int
    rank: int | None = None
    calls: list[tuple[str, int, int, int]] = field(default_factory=list)


def calls_of_logs(texts: Sequence[str]) -> SeenCalls:
    """The calls of logs of one run, each once; those of communicators that no line introduces stand once a rank.

    Raises:
        TwofoldError: two lines give different ranks for one process.
    """
    known: dict[Key, _Communicator] = {}
    for text in texts:
        _read(text, known)
    _name_the_largest(known)
    place = _places(known)
    groups = _groups(known, place)
    calls, assumed = list[SeenCall](), dict[str, None]()
    skipped, done = Counter[str](), Counter[tuple[str, ...]]()
    for key, communicator in known.items():
        group, number = groups.get(communicator.identity), 0
        if group is None:
            why = (
                "each rank logs one of its own"
                if communicator.rank is None
                else "some of their ranks have no log or no commId"
            )
            assumed[f"where logs do not say it, communicators join the first ranks of the machine: {why}"] = None
        for name, count, dtype, peer in communicator.calls:
            ranks = group or tuple(range(communicator.size))
            if group is not None and name in ("Send", "Recv"):
                ranks = place[key[:2]], group[peer]
            call = None if group is None and name in ("Send", "Recv") else _call(name, count, dtype, ranks)
            if call is None:
                skipped[f"{name} of {communicator.size} ranks"] += 1
            elif name == "Send":
                calls.append(call)
            elif name != "Recv":  # its sender logs the same
                number += 1
                if number > done[communicator.identity]:
                    calls.append(call)
        if communicator.rank is not None:
            done[communicator.identity] = max(done[communicator.identity], number)
    source = (
        "a log of NCCL, which has no times" if len(texts) == 1 else f"{len(texts)} logs of NCCL, which have no times"
    )
    return SeenCalls(calls=calls, source=source, skipped=skipped, assumed=list(assumed))


def _read(text: str, known: dict[Key, _Communicator]) -> None:
    """Add the communicators and calls of a log to those that are known."""
    for who, device, address, rank, size, parent, split, colour, unique in _JOINED.findall(text):
        _check_rank(who, rank, size)
        above = known.get((who, device, parent))
        identity = (unique,) if unique else (*above.identity, split, colour) if above else (who, device, address)
        own = known.setdefault((who, device, address), _Communicator(identity, int(size), int(rank)))
        if own.rank != int(rank):
            raise TwofoldError(
                f"{who} is rank {own.rank} and rank {rank} of one communicator; give the logs of one run"
            )
    repeated = set()
    for who, device, name, number, buffers, count, dtype, root, address, size in _CALLED.findall(text):
        _check_rank(who, root, size)
        if number != "0":  # on a single node it stays 0 from NCCL 2.27 on (NVIDIA/nccl pull request 2021)
            line = (who, device, name, number, buffers, count, address)
            if line in repeated:
                continue
            repeated.add(line)
        own = known.setdefault((who, device, address), _Communicator((who, device, address), int(size)))
        own.calls.append((name, int(count), int(dtype), int(root)))


def _check_rank(who: str, rank: str, size: str) -> None:
    if int(rank) >= int(size):
        raise TwofoldError(f"{who} names rank {rank} of a communicator of {size} ranks; this is not a log of NCCL")


def _name_the_largest(known: Mapping[Key, _Communicator]) -> None:
    """Older versions print no commId: the n-th communicator of all ranks is then the same one in every process."""
    largest = max((communicator.size for communicator in known.values() if communicator.rank is not None), default=0)
    counts: dict[tuple[str, str], int] = {}
    for key, communicator in known.items():
        if communicator.identity == key and communicator.rank is not None and communicator.size == largest:
            number = counts[key[:2]] = counts.get(key[:2], 0) + 1
            communicator.identity = ("all", str(number))


def _places(known: Mapping[Key, _Communicator]) -> dict[tuple[str, str], int]:
    """(Process, device) -> its rank in the communicator of most ranks, if all of those have a log."""
    largest = max((communicator.size for communicator in known.values() if communicator.rank is not None), default=0)
    found: dict[tuple[str, ...], dict[tuple[str, str], int]] = {}
    for (who, device, _), communicator in known.items():
        if communicator.size == largest and communicator.rank is not None:
            found.setdefault(communicator.identity, {})[who, device] = communicator.rank
    return next((places for places in found.values() if len(places) == largest), {})


def _groups(
    known: Mapping[Key, _Communicator], place: Mapping[tuple[str, str], int]
) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Communicator -> its global ranks, for communicators whose ranks all have a log."""
    members: dict[tuple[str, ...], dict[int, int]] = {}
    sizes: dict[tuple[str, ...], int] = {}
    for (who, device, _), communicator in known.items():
        if communicator.rank is not None and (who, device) in place:
            members.setdefault(communicator.identity, {})[communicator.rank] = place[who, device]
            sizes[communicator.identity] = communicator.size
    return {
        identity: tuple(ranks[number] for number in range(sizes[identity]))
        for identity, ranks in members.items() if len(ranks) == sizes[identity]
    }  # fmt: skip


def _call(name: str, count: int, dtype: int, ranks: tuple[int, ...]) -> SeenCall | None:
    """A call of these ranks; None where it has no price."""
    call = collective_of(name)
    if call is None or len(ranks) < 2 or dtype >= len(_NCCL_BYTES):
        return None
    size = _NCCL_BYTES[dtype]
    whole = len(ranks) if call in ("all_gather", "reduce_scatter", "all_to_all") else 1
    return SeenCall(call=call, size_bytes=count * size * whole, item_bytes=size, ranks=ranks)
