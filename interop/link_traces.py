"""Communication as others recorded it: traces of torch's profiler, tables of nccl-tests, logs of NCCL.

Every format becomes `SeenCall`s. A collective is over for all of its ranks at about the same time, but a rank that
comes early waits inside it; so what it takes is the shortest time of any of its ranks, and the rest of the longest is
waiting. What ran beside it on that rank slows it, so the share of its time with other kernels is kept too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from interop.profiler_trace import RankTrace, collective_of, load_trace
from plans.errors import TwofoldError
from plans.reading import read_text

__all__ = ["SeenCall", "SeenCalls", "read_links"]

_PS_PER_S = 1e12

_ITEM_BYTES = {
    "float": 4, "double": 8, "half": 2, "long": 8, "int": 4, "short": 2, "byte": 1, "char": 1, "bool": 1,
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4,
    "int16": 2, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Bytes of an element by its dtype in the words of torch and of nccl-tests."""

_NCCL_BYTES = (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1)
"""Bytes of an element by ncclDataType_t: int8, uint8, int32, uint32, int64, uint64, float16, float32, float64,
bfloat16, and both float8."""

_LOGGED = re.compile(
    r"NCCL INFO (?:\[\d+\] )?(\w+): opCount (\w+) .*?count (\d+) datatype (\d+) .*?comm (\w+) \[nranks=(\d+)\]"
)
_TESTED = re.compile(r"(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv|reduce)(?:_perf)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """One communication of a group of ranks.

    Args:
        call: such as "all_reduce"; "transfer" of (sender, receiver).
        size_bytes: of the larger of a member's input and output.
        item_bytes: of an element.
        ranks: that take part.
        seconds: that it took the rank that came last; None where no time is recorded.
        waited_s: how much longer it took the rank that came first.
        beside: share of that time in which other kernels ran on that rank.
        num_unseen: ranks without a trace, so that `seconds` may hold waiting.
    """

    call: str
    size_bytes: int
    item_bytes: int
    ranks: tuple[int, ...]
    seconds: float | None = None
    waited_s: float = 0.0
    beside: float = 0.0
    num_unseen: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCalls:
    """What files say.

    Args:
        calls: in order of their first occurrence.
        source: what the files are, in words.
        skipped: reason -> communications that were left out.
        assumed: what the files do not say.
    """

    calls: Sequence[SeenCall]
    source: str
    skipped: Mapping[str, int] = field(default_factory=dict)
    assumed: Sequence[str] = ()


def read_links(paths: Sequence[str | os.PathLike[str]]) -> SeenCalls:
    """The communication of trace files of one run (a file for each rank, or a folder with them), of a table of
    nccl-tests, or of a log of NCCL.

    Raises:
        TwofoldError: no files, files of no such format, or without communication whose size is known.
    """
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise TwofoldError("no traces to read; name files, or a folder with a trace for each rank")
    if any(".json" in file.suffixes for file in files):
        found = _of_traces([load_trace(file) for file in files])
    elif len(files) > 1:
        raise TwofoldError(f"{files[0]}: several files are traces of one run (.json); name one table or one log")
    else:
        text = read_text(files[0], "the trace")
        found = _of_log(text) if "NCCL INFO" in text and "opCount" in text else _of_table(text, files[0])
    if not found.calls:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in found.skipped.items())
        raise TwofoldError(f"{files[0]}: no communication of a known size{': ' if reasons else ''}{reasons}")
    return found


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if ".json" in file.suffixes) if path.is_dir() else [path]


# ----------------------------------------------------------------- traces of torch's profiler


def _of_traces(traces: Sequence[RankTrace]) -> SeenCalls:
    """Calls of all ranks: the n-th of a kind in a group is the same one on each of its ranks."""
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        if trace.rank in by_rank:
            raise TwofoldError(f"{by_rank[trace.rank].path} and {trace.path} are both of rank {trace.rank}")
        by_rank[trace.rank] = trace
    lengths: dict[tuple[str, int, int, tuple[int, ...]], dict[int, list[tuple[float, float]]]] = {}
    skipped: dict[str, int] = {}
    for rank, trace in by_rank.items():
        others = _Busy(trace)
        for event, facts in _communication(trace):
            try:
                key = _kind_of(rank, trace, facts)
            except _Unknown as unknown:
                skipped[str(unknown)] = skipped.get(str(unknown), 0) + 1
                continue
            seconds = (event["end_ps"] - event["start_ps"]) / _PS_PER_S
            lengths.setdefault(key, {}).setdefault(rank, []).append((seconds, others.share(event)))
    calls = []
    for (call, size_bytes, item_bytes, ranks), of_rank in lengths.items():
        count = min(map(len, of_rank.values()))
        if unpaired := sum(len(each) - count for each in of_rank.values()):
            reason = f"{call} of {size_bytes:,} bytes that only some of its ranks recorded"
            skipped[reason] = skipped.get(reason, 0) + unpaired
        calls += [
            SeenCall(
                call=call, size_bytes=size_bytes, item_bytes=item_bytes, ranks=ranks, seconds=min(own)[0],
                waited_s=max(own)[0] - min(own)[0], beside=min(own)[1], num_unseen=len(ranks) - len(of_rank),
            )
            for own in zip(*(each[:count] for each in of_rank.values()), strict=True)
        ]  # fmt: skip
    source = f"{len(traces)} trace{'s' if len(traces) > 1 else ''} of torch's profiler"
    return SeenCalls(calls=calls, source=source, skipped=skipped)


class _Busy:
    """When the kernels of a rank run."""

    def __init__(self, trace: RankTrace) -> None:
        kernels = [event for event in trace.events if event.get("cat") == "kernel"]
        self._ends = [np.sort([event[name] for event in kernels]) for name in ("start_ps", "end_ps")]
        self._sums = [np.append(0, np.cumsum(each)) for each in self._ends]

    def share(self, event: Mapping[str, Any]) -> float:
        """The share of the time of a kernel in which others run."""
        start, end = event["start_ps"], event["end_ps"]
        if event.get("cat") != "kernel" or end <= start:
            return 0.0
        others = self._spent(end) - self._spent(start) - (end - start)
        return min(1.0, others / (end - start))

    def _spent(self, time_ps: int) -> int:
        """Picoseconds of all kernels until a time."""
        begun, ended = (np.searchsorted(each, time_ps) for each in self._ends)
        return int((begun - ended) * time_ps - self._sums[0][begun] + self._sums[1][ended])


class _Unknown(Exception):
    """What a trace does not say of a communication."""


def _communication(trace: RankTrace) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Communication by start, each with what is known of it: kernels, or what gloo did."""
    issued = {
        event["args"]["External id"]: event["args"]
        for event in trace.events if "Collective name" in event.get("args", {}) and "External id" in event["args"]
    }  # fmt: skip
    for event in sorted(trace.events, key=lambda each: each["start_ps"]):
        args, name = event.get("args", {}), str(event.get("name", ""))
        if event.get("cat") == "kernel" and name.lower().startswith(("nccl", "hccl", "hcom")):
            yield event, args if "Collective name" in args else issued.get(args.get("External id"), {})
        elif name.startswith("gloo:"):
            yield event, _of_gloo(name, args)


def _of_gloo(name: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Dims and types of the tensors of a call, in the words of NCCL's kernels."""
    dims, types = args.get("Input Dims") or [], args.get("Input type") or []
    if not dims or not types or not all(isinstance(each, list) for each in dims):
        return {}
    count = sum(_product(each) for each in dims)
    return {"Collective name": name.removeprefix("gloo:"), "In msg nelems": count, "dtype": types[0]}


def _product(sizes: Sequence[int]) -> int:
    count = 1
    for size in sizes:
        count *= int(size)
    return count


def _kind_of(rank: int, trace: RankTrace, facts: Mapping[str, Any]) -> tuple[str, int, int, tuple[int, ...]]:
    """(call, bytes, bytes of an element, ranks).

    Raises:
        _Unknown: the trace does not say it.
    """
    if "Collective name" not in facts:
        raise _Unknown("kernels without the size of their message (record with a recent torch)")
    name = str(facts["Collective name"])
    call = collective_of(name)
    if call is None:
        raise _Unknown(f"{name}, which is no collective with a price")
    item_bytes = _ITEM_BYTES.get(str(facts.get("dtype", "")).lower())
    if item_bytes is None:
        raise _Unknown(f"{call} of dtype {facts.get('dtype')!r}")
    ranks = _ranks(trace, facts)
    if call == "transfer":
        ends = (rank, facts.get("Dst Rank")) if "send" in name.lower() else (facts.get("Src Rank"), rank)
        if not all(isinstance(end, int) and end >= 0 for end in ends) or ends[0] == ends[1]:
            raise _Unknown("transfers without the rank at their other end")
        ranks = (int(ends[0]), int(ends[1]))  # type: ignore[arg-type]
    if len(ranks) < 2:
        raise _Unknown(f"{call} of a single rank")
    count = max(int(facts.get("In msg nelems", 0)), int(facts.get("Out msg nelems", 0)))
    if call == "all_gather" and "Out msg nelems" not in facts:
        count *= len(ranks)
    if not count:
        raise _Unknown(f"{call} of no bytes")
    return call, count * item_bytes, item_bytes, ranks


def _ranks(trace: RankTrace, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The group: by its name, as a list, as a start with a stride, or the only one that there is."""
    named = trace.groups.get(str(facts.get("Process Group Name")))
    if named:
        return named
    listed = facts.get("Process Group Ranks")
    if isinstance(listed, str) and "..." not in listed:
        listed = [int(each) for each in re.findall(r"\d+", listed)]
    if isinstance(listed, list) and listed:
        return tuple(listed)
    size, start, stride = (facts.get(name) for name in ("Group size", "Global rank start", "Global rank stride"))
    if isinstance(size, int) and isinstance(start, int) and isinstance(stride, int) and start >= 0 and stride > 0:
        return tuple(range(start, start + size * stride, stride))
    if len(trace.groups) == 1:
        return next(iter(trace.groups.values()))
    raise _Unknown("communication without the ranks of its group")


# -------------------------------------------------------------------------------- NCCL's texts


def _of_table(text: str, path: Path) -> SeenCalls:
    """A table of nccl-tests: size, count, type, redop, root, and the time out of place in microseconds."""
    started = re.search(r"Collective test starting: (\w+)", text)
    named = _TESTED.search(started[1] if started else path.name)
    num_ranks = len(re.findall(r"^#\s+Rank\s+\d+\s", text, re.MULTILINE))
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+[a-z]\w*\s", line)]
    if not rows or num_ranks < 2:
        raise TwofoldError(
            f"{path}: no trace of torch's profiler (.json), no table of nccl-tests with its lines of ranks, and no log "
            "of NCCL (NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=COLL)"
        )
    call = collective_of(named[1]) if named else None
    if call is None:
        raise TwofoldError(f"{path}: it does not say which test ran; name the file after it, as all_reduce_perf.txt")
    ranks = (0, 1) if call == "transfer" else tuple(range(num_ranks))
    calls, skipped = [], dict[str, int]()
    for row in rows:
        try:
            calls.append(SeenCall(
                call=call, size_bytes=int(row[0]), item_bytes=_ITEM_BYTES[row[2]], ranks=ranks,
                seconds=float(row[5]) * 1e-6,
            ))  # fmt: skip
        except (KeyError, ValueError, IndexError):
            skipped[f"the row of {row[1]} elements of {row[2]}"] = 1
    return SeenCalls(
        calls=[each for each in calls if each.size_bytes], source=f"a table of nccl-tests ({call})", skipped=skipped,
        assumed=["the ranks of the test are the first of the machine, node by node"],
    )  # fmt: skip


def _of_log(text: str) -> SeenCalls:
    """A log of NCCL: calls without times; each rank logs its own, so those of one communicator count once."""
    seen: set[tuple[str, str, str]] = set()
    calls, skipped = [], dict[str, int]()
    for name, number, count, dtype, communicator, num_ranks in _LOGGED.findall(text):
        call, members = collective_of(name), int(num_ranks)
        if call is None or call == "transfer" or members < 2 or int(dtype) >= len(_NCCL_BYTES):
            reason = f"{name} of {members} ranks"
            skipped[reason] = skipped.get(reason, 0) + 1
        elif (communicator, name, number) not in seen:
            seen.add((communicator, name, number))
            item_bytes = _NCCL_BYTES[int(dtype)]
            whole = members if call in ("all_gather", "reduce_scatter", "all_to_all") else 1
            calls.append(SeenCall(
                call=call, size_bytes=int(count) * item_bytes * whole, item_bytes=item_bytes,
                ranks=tuple(range(members)),
            ))  # fmt: skip
    return SeenCalls(
        calls=calls, source="a log of NCCL, which has no times", skipped=skipped,
        assumed=["every communicator joins the first ranks of the machine, and each rank logs one of its own"],
    )  # fmt: skip
