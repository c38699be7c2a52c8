"""Recorded communication from traces of torch's profiler, Chakra execution traces, and text output of NCCL.

Every format becomes `SeenCall`s. A collective ends on all of its ranks at about the same time, but ranks that arrive
early wait inside it. Its duration is therefore the shortest time of any rank; the rest of the longest time is waiting.
Concurrent kernels slow a collective, so the share of its time with other kernels is kept too.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from interop.execution_trace import is_execution_trace, read_execution_traces
from interop.nccl_texts import calls_of_logs, calls_of_table, is_log
from interop.profiler_trace import RankTrace, collective_of, is_rank, load_trace
from interop.seen_calls import ITEM_BYTES, SeenCall, SeenCalls, is_count
from plans.errors import TwofoldError
from plans.reading import read_text

__all__ = ["read_links"]

_PS_PER_S = 1e12


def read_links(paths: Sequence[str | os.PathLike[str]]) -> SeenCalls:
    """The communication of the traces of one run (a file for each rank, or a folder with them), of a table of
    nccl-tests, or of logs of NCCL.

    Raises:
        TwofoldError: no files, files of no such format, or without communication whose size is known.
    """
    files = [file for path in paths for file in _files(Path(path))]
    if not files:
        raise TwofoldError("no traces to read; name files, or a folder with a trace for each rank")
    if any(".json" in file.suffixes for file in files):
        found = _of_json(files)
    else:
        texts = [read_text(file, "the trace") for file in files]
        if all(map(is_log, texts)):
            found = calls_of_logs(texts)
        elif len(files) > 1:
            raise TwofoldError(f"{files[0]}: several files are traces (.json) or logs of NCCL; name one table")
        else:
            found = calls_of_table(texts[0], files[0])
    if not found.calls:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in found.skipped.items())
        raise TwofoldError(f"{files[0]}: no communication of a known size{': ' if reasons else ''}{reasons}")
    return found


def _files(path: Path) -> list[Path]:
    """A file, or of a folder the traces, else the logs."""
    if not path.is_dir():
        return [path]
    inside = sorted(file for file in path.iterdir() if file.is_file())
    return [file for file in inside if ".json" in file.suffixes] or inside


def _of_json(files: Sequence[Path]) -> SeenCalls:
    if is_execution_trace(read_text(files[0], "the trace")):
        traces, assumed = read_execution_traces(files)
        return _of_traces(traces, "Chakra execution trace", "", assumed)
    return _of_traces([load_trace(file) for file in files], "trace", " of torch's profiler")


def _of_traces(traces: Sequence[RankTrace], what: str, by: str, assumed: Sequence[str] = ()) -> SeenCalls:
    """Calls of all ranks: the n-th of a kind in a group is the same one on each of its ranks.

    Args:
        traces: of the ranks.
        what, by: the traces are, in words.
        assumed: facts that they lack.
    """
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        if trace.rank in by_rank:
            raise TwofoldError(f"{by_rank[trace.rank].path} and {trace.path} both belong to rank {trace.rank}")
        by_rank[trace.rank] = trace
    lengths: dict[tuple[str, int, int, tuple[int, ...]], dict[int, list[tuple[float, float]]]] = {}
    skipped, untimed = dict[str, int](), set[tuple[str, int, int, tuple[int, ...]]]()
    for rank, trace in by_rank.items():
        others = _Busy(trace)
        for event, facts in _communication(trace):
            try:
                key = _kind_of(rank, trace, facts)
            except _Unknown as unknown:
                skipped[str(unknown)] = skipped.get(str(unknown), 0) + 1
                continue
            if "untimed" in event:
                untimed.add(key)
            seconds = (event["end_ps"] - event["start_ps"]) / _PS_PER_S
            lengths.setdefault(key, {}).setdefault(rank, []).append((seconds, others.share(event)))
    calls = []
    for key, of_rank in lengths.items():
        call, size_bytes, item_bytes, ranks = key
        count = min(map(len, of_rank.values()))
        if unpaired := sum(len(each) - count for each in of_rank.values()):
            reason = f"{call} of {size_bytes:,} bytes that only some of its ranks recorded"
            skipped[reason] = skipped.get(reason, 0) + unpaired
        calls += [
            SeenCall(
                call=call, size_bytes=size_bytes, item_bytes=item_bytes, ranks=ranks,
                seconds=None if key in untimed else min(own)[0],
                waited_s=max(own)[0] - min(own)[0], beside=min(own)[1], num_unseen=len(ranks) - len(of_rank),
            )
            for own in zip(*(each[:count] for each in of_rank.values()), strict=True)
        ]  # fmt: skip
    source = f"{len(traces)} {what}{'s' if len(traces) > 1 else ''}{by}"
    return SeenCalls(calls=calls, source=source, skipped=skipped, assumed=assumed)


class _Busy:
    """Intervals in which more than one kernel of a rank runs."""

    def __init__(self, trace: RankTrace) -> None:
        kernels = [event for event in trace.events if event.get("cat") == "kernel"]
        self._origin = trace.begin_ps  # of 1970 in some versions: more picoseconds than 64 bits hold
        edges = np.array([event[name] - self._origin for name in ("start_ps", "end_ps") for event in kernels], float)
        order = np.argsort(edges, kind="stable")
        running = np.cumsum(np.where(order < len(kernels), 1, -1))
        self._edges = edges[order]
        self._several = np.append(0.0, np.cumsum(np.diff(self._edges) * (running[:-1] > 1)))

    def share(self, event: Mapping[str, Any]) -> float:
        """The share of the time of a kernel in which others run."""
        start, end = event["start_ps"] - self._origin, event["end_ps"] - self._origin
        if event.get("cat") != "kernel" or end <= start:
            return 0.0
        before, after = np.interp([start, end], self._edges, self._several)
        return float(min(1.0, (after - before) / (end - start)))


class _Unknown(Exception):
    """The facts that a trace does not contain about a communication."""


def _communication(trace: RankTrace) -> Iterator[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Communication by start, each with the known facts: kernels, or gloo's operations."""
    issued = {
        str(event["args"]["External id"]): event["args"]
        for event in trace.events if "Collective name" in event["args"] and "External id" in event["args"]
    }  # fmt: skip
    for event in sorted(trace.events, key=lambda each: each["start_ps"]):
        args, name = event["args"], event["name"]
        if event.get("cat") == "kernel" and name.lower().startswith(("nccl", "hccl", "hcom")):
            yield event, args if "Collective name" in args else issued.get(str(args.get("External id")), {})
        elif name.startswith("gloo:"):
            yield event, _of_gloo(name, args)


def _of_gloo(name: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Dims and types of the tensors of a call, in the words of NCCL's kernels."""
    facts = {**args, "Collective name": name.removeprefix("gloo:")}
    dims, types = args.get("Input Dims"), args.get("Input type")
    if not dims or not types or not isinstance(dims, list) or not isinstance(types, list):
        return facts
    if not all(isinstance(dim, list) and all(map(is_count, dim)) for dim in dims):
        return facts
    return {**facts, "In msg nelems": sum(map(math.prod, dims)), "dtype": types[0]}


def _kind_of(rank: int, trace: RankTrace, facts: Mapping[str, Any]) -> tuple[str, int, int, tuple[int, ...]]:
    """(call, bytes, bytes of an element, ranks).

    Raises:
        _Unknown: the trace lacks it.
    """
    if "Collective name" not in facts:
        raise _Unknown("kernels without the size of their message (record with a recent torch)")
    name = str(facts["Collective name"])
    call = collective_of(name)
    if call is None:
        raise _Unknown(f"{name}, which is not a supported collective")
    if "dtype" not in facts:
        raise _Unknown(f"{call} without the type of its elements (record gloo with record_shapes=True)")
    item_bytes = ITEM_BYTES.get(str(facts["dtype"]).lower().removeprefix("c10::"))
    if item_bytes is None:
        raise _Unknown(f"{call} of dtype {str(facts['dtype'])[:40]!r}")
    ranks = _ranks(trace, facts)
    if call == "transfer":
        ends = (rank, facts.get("Dst Rank")) if "send" in name.lower() else (facts.get("Src Rank"), rank)
        if not all(map(is_rank, ends)) or ends[0] == ends[1]:
            raise _Unknown("transfers without the rank at their other end")
        ranks = (int(ends[0]), int(ends[1]))  # type: ignore[arg-type]
    if len(ranks) < 2:
        raise _Unknown(f"{call} of a single rank")
    counts = [facts.get("In msg nelems", 0), facts.get("Out msg nelems", 0)]
    if not all(map(is_count, counts)):
        raise _Unknown(f"{call} of {' and '.join(str(count)[:40] for count in counts)} elements")
    count = max(counts)
    if call == "all_gather" and "Out msg nelems" not in facts:
        count *= len(ranks)
    if not count:
        raise _Unknown(f"{call} of no bytes")
    return call, count * item_bytes, item_bytes, ranks


def _ranks(trace: RankTrace, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks of a group, from its name, from a list, from a start with a stride, or from the only group of the
    trace.
    """
    named = trace.groups.get(str(facts.get("Process Group Name")))
    if named and all(map(is_rank, named)):
        return named
    listed = facts.get("Process Group Ranks")
    if isinstance(listed, str) and "..." not in listed:
        listed = [int(each) for each in re.findall(r"\d+", listed)]
    if isinstance(listed, list) and listed and all(map(is_rank, listed)) and len(set(listed)) == len(listed):
        return tuple(listed)
    size, start, stride = (facts.get(name) for name in ("Group size", "Global rank start", "Global rank stride"))
    if is_rank(size) and is_rank(start) and is_rank(stride) and stride and is_rank(start + (size - 1) * stride):
        return tuple(range(start, start + size * stride, stride))
    if len(set(trace.groups.values())) == 1:
        return next(iter(trace.groups.values()))
    raise _Unknown("communication without the ranks of its group")
