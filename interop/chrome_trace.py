"""Trace files in the Chrome format that Perfetto, torch's and Meta's trace tools read.

`write_trace` puts several timelines side by side in one file: a process per timeline and rank, a track per stream, live
memory as a counter, arrows for transfers. `write_rank_traces` writes one file per rank as torch's profiler does, for
tools that analyse across ranks (HolisticTraceAnalysis). `read_trace` reads back what `write_trace` wrote; traces per
rank, torch's own included, are read by `interop.profiler_trace`.

Format: "Trace Event Format" (Google, 2016): complete events (ph X) with ts and dur in microseconds. Viewers count whole
nanoseconds and need slices on a track not to overlap, so both ends are rounded to nanoseconds, and overlapping spans of
a stream go to further tracks ("lanes"). Where rounding loses something, args hold the exact picoseconds.
"""

from __future__ import annotations

import gzip
import heapq
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.model.graph import itemsize
from plans.program import Kind, Program
from plans.reading import read_json
from plans.timeline import STREAMS, MemoryPeak, Span, Timeline
from simulator.timeline.causes import Causes
from simulator.timeline.labels import groups_of

__all__ = ["MAX_SPANS", "TRACE_VERSION", "read_trace", "write_rank_traces", "write_trace"]

TRACE_VERSION = 2
MAX_SPANS = 200_000
"""Number of slices that viewers of this format handle well: they give up at about a million; 200,000 are 20 MB, 2 MB
packed."""

_PROCESS = 1_000_000
_TRACK = {"host": 1, "compute": 1001, "comm": 2001}
_STREAM_NUMBER = {"compute": 7, "comm": 20}  # as torch numbers CUDA streams: compute is 7
_STEP_TRACK = 1000
_NCCL = {
    "all_gather": "AllGather",
    "all_gather_flat": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "reduce_scatter_flat": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "transfer": "SendRecv",
}


def write_trace(
    path: str | os.PathLike[str],
    timelines: Sequence[Timeline],
    *,
    program: Program | None = None,
    max_spans: int = MAX_SPANS,
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write timelines side by side as gzipped JSON atomically; open it at https://ui.perfetto.dev.

    Args:
        path: the file, by custom `trace.json.gz`.
        timelines: e.g. the prediction and the run of one program.
        program: gives the arrows from senders to receivers; without it there are none.
        max_spans: about how many spans are written in all. Of a larger timeline only the last steps are kept, and of a
            larger step only some ranks, one of each group first; `otherData` in the file lists omissions.
        meta: goes into `otherData`, e.g. machine, versions, command.

    Raises:
        TwofoldError: no timeline.
        OSError: the file cannot be written.
    """
    if not timelines:
        raise TwofoldError(f"no timeline to write to {os.fspath(path)!r}")
    kept = [_limit(timeline, max(1, max_spans // len(timelines))) for timeline in timelines]
    header = [_header(each, before, note) for (each, note), before in zip(kept, timelines, strict=True)]
    document = {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "", "rank": 0, "world_size": max(timeline.num_ranks for timeline in timelines)},
        "displayTimeUnit": "ms",
        "otherData": {"twofold_trace": TRACE_VERSION, **(meta or {}), "timelines": header},
    }
    events = (event for number, (each, _) in enumerate(kept) for event in _events(number, each, program))
    return write_atomically(path, _packed(document, events))


def write_rank_traces(
    folder: str | os.PathLike[str],
    timeline: Timeline,
    *,
    backend: str = "nccl",
    program: Program | None = None,
    max_spans: int = MAX_SPANS,
) -> list[Path]:
    """One file per rank that was simulated or measured, `rank<r>_trace.json.gz`, in the shape of torch's profiler.

    Analysis tools know communication by its kernel's name, so here communication is called by NCCL's names whatever
    carried it out (`args` keep the instruction), compute and communication are "kernel" events on CUDA-like streams,
    each with a launch of no length where its host span or, without one, the kernel itself begins, and an empty step
    closes the file, since tools drop the last one. With 0.5.0 of HolisticTraceAnalysis its breakdowns, overlap,
    stragglers and critical path work on these files; it cuts times to whole microseconds.

    Args:
        folder: where the files go.
        timeline: to write.
        backend: of the communication, as torch calls it.
        program: that a predicted timeline is of: then communication begins where its rank came to it, as the kernels
            of a device do, which wait inside for the others (tools find stragglers by that). Without it, where the last
            member came. `args` hold the exact times in both cases.
        max_spans: as for `write_trace`.

    Raises:
        OSError: the folder cannot be written to.
    """
    timeline, note = _limit(timeline, max_spans)
    shown = timeline if program is None else _from_arrival(timeline, program)
    own = {
        "kind": timeline.kind, "origin_ps": _origin(shown),
        "step_start_ps": list(timeline.step_start_ps), "step_end_ps": list(timeline.step_end_ps),
        "low_s": timeline.low_s, "high_s": timeline.high_s,
    }  # fmt: skip
    paths, facts = [], _collectives(program)
    for rank in timeline.represents:
        document = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": backend, "rank": rank, "world_size": timeline.num_ranks},
            "displayTimeUnit": "ms",
            "otherData": {"kind": timeline.kind, "note": note, "twofold_rank_trace": own, **timeline.meta},
        }
        events = chain(_rank_events(rank, shown, rank, exact=timeline, facts=facts), _launches(rank, shown))
        paths.append(write_atomically(Path(folder) / f"rank{rank}_trace.json.gz", _packed(document, events)))
    return paths


def read_trace(path: str | os.PathLike[str]) -> list[Timeline]:
    """The timelines of a file that `write_trace` wrote; where it left out steps the kept ones count from 0.

    Raises:
        TwofoldError: no such file, truncated, not JSON, or not written by `write_trace`.
    """
    shown = os.fspath(path)
    try:
        document = read_json(path, "the trace file")
        other = document["otherData"]
        if other["twofold_trace"] != TRACE_VERSION:
            raise TwofoldError(f"{shown}: trace version {other['twofold_trace']}, this twofold reads {TRACE_VERSION}")
        headers, events = other["timelines"], document["traceEvents"]
        return [_timeline(header, events, number) for number, header in enumerate(headers)]
    except TwofoldError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, StopIteration):
        raise TwofoldError(
            f"{shown}: not a trace that twofold wrote (such a file has otherData.twofold_trace)"
        ) from None


# ------------------------------------------------------------------------ what is kept


def _limit(timeline: Timeline, max_spans: int) -> tuple[Timeline, str]:
    """The last steps that fit, at least one, and of that one the ranks that fit; and a text about what was left out."""
    if len(timeline.rank) <= max_spans:
        return timeline, ""
    last = timeline.num_steps - 1
    per_step = np.bincount(timeline.step, minlength=timeline.num_steps)
    first = last
    while first > 0 and per_step[first - 1 :].sum() <= max_spans:
        first -= 1
    rows = timeline.step >= first
    notes = [f"steps {first} to {last} of {timeline.num_steps}"] if first else []
    if rows.sum() > max_spans:
        per_rank = np.bincount(timeline.rank[rows], minlength=timeline.num_ranks)
        groups = [ranks for _, ranks in groups_of(timeline)]
        turns = sorted((place, number, rank) for number, ranks in enumerate(groups) for place, rank in enumerate(ranks))
        chosen: list[int] = []
        total = 0
        for _, _, rank in turns:
            if chosen and total + per_rank[rank] > max_spans:
                break
            chosen.append(rank)
            total += int(per_rank[rank])
        rows &= np.isin(timeline.rank, chosen)
        notes.append(f"{len(chosen)} of {timeline.num_ranks} ranks")
    kept = replace(
        timeline,
        rank=timeline.rank[rows], stream=timeline.stream[rows], step=timeline.step[rows] - first,
        name_index=timeline.name_index[rows], start_ps=timeline.start_ps[rows], end_ps=timeline.end_ps[rows],
        step_start_ps=timeline.step_start_ps[first:], step_end_ps=timeline.step_end_ps[first:],
    )  # fmt: skip
    return kept, f"only {' and '.join(notes)} are written ({len(timeline.rank):,} spans in all)"


def _header(timeline: Timeline, before: Timeline, note: str) -> dict[str, Any]:
    return {
        "kind": timeline.kind,
        "num_ranks": timeline.num_ranks,
        "num_steps_before": before.num_steps,
        "note": note,
        "origin_ps": _origin(timeline),
        "step_start_ps": list(timeline.step_start_ps),
        "step_end_ps": list(timeline.step_end_ps),
        "low_s": timeline.low_s,
        "high_s": timeline.high_s,
        "memory": [
            {"rank": peak.rank, "peak_bytes": peak.peak_bytes, "by_role": dict(peak.by_role)}
            for peak in timeline.memory
        ],
        "meta": dict(timeline.meta),
    }


# --------------------------------------------------------------------------- writing


def _packed(document: Mapping[str, Any], events: Iterator[dict[str, Any]]) -> bytes:
    """Gzipped JSON with the events last, one a line; equal input gives equal bytes."""
    head = json.dumps(document, default=str)[:-1]
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in events)
    return gzip.compress(f'{head}, "traceEvents": [\n{lines}\n]}}\n'.encode(), compresslevel=6, mtime=0)


def _events(number: int, timeline: Timeline, program: Program | None) -> Iterator[dict[str, Any]]:
    """All events of one timeline of a common file."""
    ranks = sorted({int(rank) for rank in np.unique(timeline.rank)} | set(timeline.memory_curve))
    places: dict[int, tuple[int, int]] = {}
    stages_of = {rank: stages for stages, members in groups_of(timeline) for rank in members}
    for rank in ranks:
        pid = (number + 1) * _PROCESS + rank
        stages = stages_of.get(rank, ())
        yield _named("process_name", pid, 0, name=f"{timeline.kind} · rank {rank}")
        yield _named("process_sort_index", pid, 0, sort_index=pid)
        if stages:
            yield _named("process_labels", pid, 0, labels=f"stage {', '.join(map(str, stages))}")
        yield from _rank_events(rank, timeline, pid, places=places)
    if program is not None:
        yield from _arrows(number, timeline, program, places)


def _named(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _rank_events(
    rank: int,
    timeline: Timeline,
    pid: int,
    *,
    places: dict[int, tuple[int, int]] | None = None,
    exact: Timeline | None = None,
    facts: Mapping[tuple[int, str], Mapping[str, Any]] | None = None,
) -> Iterator[dict[str, Any]]:
    """Steps, spans and memory of one rank; `places` collects row -> (process, track) for the arrows.

    With `exact` communication has the names of kernels, and args hold the times of that timeline and its `facts`.
    """
    rows = np.flatnonzero(timeline.rank == rank)
    origin = _origin(timeline)
    tracks = _lanes(timeline, rows)
    yield _named("thread_name", pid, _STEP_TRACK, name="steps")
    yield _named("thread_sort_index", pid, _STEP_TRACK, sort_index=0)
    for tid in sorted(set(tracks.values())):
        stream = next(name for name in reversed(_TRACK) if tid >= _TRACK[name])
        lane = tid - _TRACK[stream]
        yield _named("thread_name", pid, tid, name=stream + (f" ({lane + 1})" if lane else ""))
        yield _named("thread_sort_index", pid, tid, sort_index=tid)
    for step, (start, end) in _own_steps(timeline, rows).items():
        yield _step(step, pid, start, end, origin)
    for row in rows:
        id_, call, part = timeline.names[timeline.name_index[row]]
        stream, tid = STREAMS[timeline.stream[row]], tracks[int(row)]
        start, end = int(timeline.start_ps[row]), int(timeline.end_ps[row])
        name = id_.partition("/")[2] or id_
        args: dict[str, Any] = {"instruction": id_, "call": call, "part": part, "step": int(timeline.step[row])}
        if stream != "host":
            args["stream"] = _STREAM_NUMBER[stream] + tid - _TRACK[stream]
            args["correlation"] = int(row) + 1
        if exact is not None and stream == "comm":
            name = f"ncclKernel_{_NCCL.get(call, call)}"
            args |= (facts or {}).get((rank, id_), {})
        truly = start if exact is None else int(exact.start_ps[row])
        if truly != start or (start - origin) % 1000 or (end - origin) % 1000:
            args["ps"] = [truly, end]
        yield {
            "ph": "X", "cat": "cpu_op" if stream == "host" else "kernel", "name": name, "pid": pid, "tid": tid,
            **_times(start, end, origin), "args": args,
        }  # fmt: skip
        if places is not None:
            places[int(row)] = (pid, tid)
    if rank in timeline.memory_curve:
        for time, size in zip(*timeline.memory_curve[rank], strict=True):
            event = {"ph": "C", "name": "live memory", "pid": pid, "tid": 0, "args": {"bytes": int(size)}}
            event["ts"] = _times(int(time), int(time), origin)["ts"]
            yield event if (int(time) - origin) % 1000 == 0 else event | {"id_ps": int(time)}


def _collectives(program: Program | None) -> dict[tuple[int, str], dict[str, Any]]:
    """For (rank, id) of every collective, the arguments that torch's profiler writes: its name, sizes and group."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for group in program.groups if program is not None else ():
        for block, instruction in group.walk():
            if instruction.kind is not Kind.COLLECTIVE:
                continue
            mesh = instruction.mesh or group.mesh
            for ranks in mesh.groups(instruction.axes):
                count = instruction.message_bytes // itemsize(instruction.dtype)
                parts = {"all_gather": (count // len(ranks), count), "reduce_scatter": (count, count // len(ranks))}
                own, made = parts.get(instruction.call.removesuffix("_flat"), (count, count))
                facts = {
                    "Collective name": _NCCL.get(instruction.call, instruction.call).lower(), "In msg nelems": own,
                    "Out msg nelems": made, "dtype": instruction.dtype, "Group size": len(ranks),
                    "Process Group Ranks": str(list(ranks)),
                }  # fmt: skip
                found |= {(rank, f"{block.label}/{instruction.name}"): facts for rank in ranks}
    return found


def _from_arrival(timeline: Timeline, program: Program) -> Timeline:
    """The timeline with communication starting when the rank itself arrived."""
    if timeline.kind != "predicted":
        return timeline
    arrivals = Causes(program, timeline).arrivals()
    starts = timeline.start_ps.copy()
    for row in np.flatnonzero(timeline.stream == STREAMS.index("comm")):
        key = (int(timeline.rank[row]), int(timeline.step[row]), timeline.names[timeline.name_index[row]][0])
        starts[row] = min(starts[row], arrivals.get(key, starts[row]))
    return replace(timeline, start_ps=starts)


def _own_steps(timeline: Timeline, rows: np.ndarray) -> dict[int, tuple[int, int]]:
    """step -> first start and last end on one rank, ended by the next step where a message is still under way."""
    of_step = {int(step): rows[timeline.step[rows] == step] for step in np.unique(timeline.step[rows])}
    starts = {step: int(timeline.start_ps[own].min()) for step, own in of_step.items()}
    ends = {step: int(timeline.end_ps[own].max()) for step, own in of_step.items()}
    return {step: (start, min(ends[step], starts.get(step + 1, ends[step]))) for step, start in starts.items()}


def _step(number: int, pid: int, start: int, end: int, origin: int) -> dict[str, Any]:
    """The event of a step, named as torch's profiler names it."""
    place = {"pid": pid, "tid": _STEP_TRACK, **_times(start, end, origin)}
    return {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", **place}


def _launches(rank: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The host launch by which analysis tools assign a kernel to its step: it has the same correlation."""
    origin = _origin(timeline)
    rows = np.flatnonzero(timeline.rank == rank)
    on_host = timeline.stream[rows] == STREAMS.index("host")
    issued = {
        (int(timeline.step[row]), int(timeline.name_index[row])): int(timeline.start_ps[row]) for row in rows[on_host]
    }
    for row in rows[~on_host]:
        start = int(timeline.start_ps[row])
        start = min(start, issued.get((int(timeline.step[row]), int(timeline.name_index[row])), start))
        yield {
            "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": rank, "tid": _STEP_TRACK - 1,
            **_times(start, start, origin), "args": {"correlation": int(row) + 1},
        }  # fmt: skip
    if timeline.step_end_ps:
        end = timeline.step_end_ps[-1]
        yield _step(timeline.num_steps, rank, end, end + 1000, origin)


def _origin(timeline: Timeline) -> int:
    """Time 0 of a file: the first one known, which may be a batch that is loaded before the first step begins."""
    curves = [times for times, _ in timeline.memory_curve.values()]
    firsts = [int(times.min()) for times in (timeline.start_ps, *curves) if len(times)]
    return min((*firsts, *timeline.step_start_ps[:1]), default=0)


def _times(start_ps: int, end_ps: int, origin_ps: int) -> dict[str, float]:
    """ts and dur in microseconds, both ends on whole nanoseconds."""
    start, end = (round((time - origin_ps) / 1000) for time in (start_ps, end_ps))
    return {"ts": start / 1000, "dur": (end - start) / 1000}


def _lanes(timeline: Timeline, rows: np.ndarray) -> dict[int, int]:
    """row -> track: on each stream the first lane that is free when the span starts."""
    tracks: dict[int, int] = {}
    for number, stream in enumerate(STREAMS):
        mine = rows[timeline.stream[rows] == number]
        mine = mine[np.lexsort((timeline.end_ps[mine], timeline.start_ps[mine]))]
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        for row in mine:
            start, end = int(timeline.start_ps[row]), int(timeline.end_ps[row])
            while busy and busy[0][0] <= start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            lane = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (end, lane))
            tracks[int(row)] = _TRACK[stream] + lane
    return tracks


def _arrows(
    number: int, timeline: Timeline, program: Program, places: Mapping[int, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """An arrow from every send to its receive: the k-th SEND and the k-th RECV on a channel, by their pieces."""
    row_of: dict[tuple[int, int, str], int] = {}
    for row in np.flatnonzero(timeline.stream == STREAMS.index("comm")):
        key = (int(timeline.rank[row]), int(timeline.step[row]), timeline.names[timeline.name_index[row]][0])
        row_of[key] = int(row)
    origin = _origin(timeline)
    arrow = number * 10**9
    for send, receive, pairs in _transfers(program):
        for step in range(timeline.num_steps):
            for source, target in pairs:
                ends = row_of.get((source, step, send)), row_of.get((target, step, receive))
                if ends[0] is None or ends[1] is None or ends[0] not in places or ends[1] not in places:
                    continue
                arrow += 1
                common = {"cat": "transfer", "name": "transfer", "id": arrow}
                start = _times(int(timeline.start_ps[ends[0]]), 0, origin)["ts"]
                end = max(_times(int(timeline.end_ps[ends[1]]), 0, origin)["ts"] - 0.001, start)
                yield {"ph": "s", **common, "pid": places[ends[0]][0], "tid": places[ends[0]][1], "ts": start}
                yield {"ph": "f", "bp": "e", **common, "pid": places[ends[1]][0], "tid": places[ends[1]][1], "ts": end}


def _transfers(program: Program) -> Iterator[tuple[str, str, list[tuple[int, int]]]]:
    """(id of the SEND, id of its RECV, pairs of ranks) of every transfer between ranks."""
    ends: dict[tuple[str, Kind], list[tuple[str, Any]]] = {}
    for group in program.groups:
        for block, instruction in group.walk():
            if instruction.kind in (Kind.SEND, Kind.RECV):
                key = (instruction.channel, instruction.kind)
                ends.setdefault(key, []).append((f"{block.label}/{instruction.name}", instruction))
    for (channel, kind), sends in ends.items():
        if kind is Kind.SEND:
            for (send, instruction), (receive, _) in zip(sends, ends.get((channel, Kind.RECV), []), strict=False):
                yield send, receive, sorted(instruction.pieces.pairs)


# --------------------------------------------------------------------------- reading


def _columns(points: Sequence[tuple[int, int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    array = np.array(points, dtype=np.int64).reshape(-1, 2)
    return array[:, 0].copy(), array[:, 1].copy()


def _timeline(header: Mapping[str, Any], events: Sequence[Mapping[str, Any]], number: int) -> Timeline:
    origin = header["origin_ps"]
    found: list[Span] = []
    curve: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        if event["pid"] // _PROCESS != number + 1:
            continue
        rank = event["pid"] % _PROCESS
        if event["ph"] == "X" and event["cat"] != "user_annotation":
            args = event["args"]
            start = round(event["ts"] * 1000) * 1000 + origin
            end = start + round(event["dur"] * 1000) * 1000
            start, end = args.get("ps", (start, end))
            stream = next(name for name in reversed(_TRACK) if event["tid"] >= _TRACK[name])
            span = Span(
                rank=rank, stream=stream, start_ps=start, end_ps=end, step=args["step"], id=args["instruction"],
                call=args["call"], part=args["part"],
            )  # fmt: skip
            found.append(span)
        elif event["ph"] == "C":
            time_ps = event.get("id_ps", round(event["ts"] * 1000) * 1000 + origin)
            curve.setdefault(rank, []).append((time_ps, event["args"]["bytes"]))
    timeline = Timeline.from_spans(
        found,
        kind=header["kind"], num_ranks=header["num_ranks"], low_s=header["low_s"], high_s=header["high_s"],
        memory=tuple(MemoryPeak(**peak) for peak in header["memory"]), meta=header["meta"],
        memory_curve={rank: _columns(points) for rank, points in curve.items()},
    )  # fmt: skip
    return replace(timeline, step_start_ps=tuple(header["step_start_ps"]), step_end_ps=tuple(header["step_end_ps"]))
