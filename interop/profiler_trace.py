"""Traces of torch's profiler, a file per rank, as one timeline.

The format is that of Kineto: device events ("kernel", "gpu_memcpy", "gpu_memset") on streams, launches of the same
correlation on the host ("cuda_runtime"), steps as annotations "ProfilerStep#n". A device event belongs to the step in
which it was launched. A kernel's name (NCCL, HCCL) shows whether it communicates, and with which collective.
A trace without device events is one of a CPU run: its outermost operators compute, those of c10d communicate.

Such a trace has no instruction ids: spans carry the kernel's name instead, and no part. Files that `write_rank_traces`
wrote come back as the timeline that they were made of, memory aside.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeGuard

from plans.errors import TwofoldError
from plans.reading import read_json
from plans.timeline import STREAMS, Span, Timeline

__all__ = ["RankTrace", "collective_of", "is_rank", "kernel_call", "load_trace", "read_rank_traces"]

_COLLECTIVES = (
    ("allreduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("alltoall", "all_to_all"),
    ("send", "transfer"),
    ("recv", "transfer"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
)
_COMPUTE = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("matmul", re.compile(r"gemm|cutlass|nvjet|cublas|xmma|gemv|matmul|::(addmm|mm|bmm|linear)\b", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset|::copy_", re.IGNORECASE)),
)
_COMMUNICATES = re.compile(r"^(nccl|hccl|hcom|c10d::|gloo:|nccl:|record_param_comms)", re.IGNORECASE)
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_PS_PER_US = 10**6
MOST_US = 10**17
"""Times beyond it are after the year 5000."""

_MOST_RANKS = 2**20


def kernel_call(name: str) -> tuple[str, str]:
    """The stream that a kernel or operator of this name runs on, and its kind.

    >>> kernel_call("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    ('comm', 'all_reduce')
    >>> kernel_call("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64")
    ('compute', 'matmul')
    >>> kernel_call("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>>")
    ('compute', 'kernel')
    """
    if _COMMUNICATES.match(name):
        return "comm", collective_of(name) or "communication"
    return "compute", next((call for call, words in _COMPUTE if words.search(name)), "kernel")


def collective_of(name: str) -> str | None:
    """The collective in a name of NCCL, gloo or torch; None if there is none.

    >>> collective_of("_allgather_base"), collective_of("barrier")
    ('all_gather', None)
    """
    plain = name.lower().replace("_", "")
    return next((call for word, call in _COLLECTIVES if word in plain), None)


def read_rank_traces(paths: Sequence[str | os.PathLike[str]], *, align: str = "clock") -> Timeline:
    """One timeline of the trace files of all ranks (.json or .json.gz).

    Args:
        paths: a file per rank, in any order; the rank is in the file (distributedInfo) or in its name ("rank3").
        align: "clock": the ranks' clocks agree, as on one host. "step": every rank's first step is taken to begin at
            the same time, where they do not.

    Raises:
        TwofoldError: no files, a file that is missing, truncated or no trace, two files of one rank, a rank without a
            file, ranks with unequal steps, nothing to show.
    """
    if align not in ("clock", "step"):
        raise TwofoldError(f"align must be 'clock' or 'step', not {align!r}")
    if not paths:
        raise TwofoldError("no trace files to read; torch's profiler writes one per rank")
    ranks: dict[int, RankTrace] = {}
    for path in paths:
        trace = load_trace(Path(path))
        if trace.rank in ranks:
            raise TwofoldError(f"{ranks[trace.rank].path} and {trace.path} both belong to rank {trace.rank}")
        ranks[trace.rank] = trace
    if missing := sorted(set(range(max(ranks) + 1)) - set(ranks)):
        raise TwofoldError(f"no trace file of rank {missing[0]}; there are files of the ranks {sorted(ranks)}")
    own = [ranks[rank].own for rank in sorted(ranks)]
    if all(own):
        return _written_by_twofold([ranks[rank] for rank in sorted(ranks)])
    counts = {rank: len(trace.steps) for rank, trace in ranks.items()}
    if len(set(counts.values())) > 1:
        raise TwofoldError(f"the ranks have unequal numbers of steps: {counts}; record the same steps on all of them")
    first = {rank: trace.steps[0][0] if trace.steps else trace.begin_ps for rank, trace in ranks.items()}
    earliest = min(first.values())
    spans: list[Span] = []
    for rank in sorted(ranks):
        origin = first[rank] if align == "step" else earliest
        spans += (
            replace(span, start_ps=span.start_ps - origin, end_ps=span.end_ps - origin) for span in _spans(ranks[rank])
        )
    if not spans:
        raise TwofoldError(f"{ranks[0].path}: no kernels or operators inside its steps")
    timeline = Timeline.from_spans(
        spans, kind="measured", num_ranks=len(ranks), meta={"source": "torch profiler", "align": align}
    )
    return timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One file: its complete events with times in picoseconds, and its steps as (start, end).

    Args:
        path: path of the file.
        rank: that it is of.
        events: each with `start_ps` and `end_ps`.
        steps: (start, end) of each.
        own: what `write_rank_traces` adds.
        meta: other data of the file.
        groups: name of a process group -> its ranks.
    """

    path: Path
    rank: int
    events: list[dict[str, Any]]
    steps: tuple[tuple[int, int], ...]
    own: Mapping[str, Any] | None
    meta: Mapping[str, Any]
    groups: Mapping[str, tuple[int, ...]]

    @property
    def begin_ps(self) -> int:
        """The start of the first event in picoseconds."""
        return min((event["start_ps"] for event in self.events), default=0)

    def step_at(self, time_ps: int) -> int | None:
        """The number of the step at a time, from 0; all is one step where none is marked."""
        if not self.steps:
            return 0
        at = bisect_right(self.steps, time_ps, key=lambda step: step[0]) - 1
        return at if at >= 0 and time_ps <= self.steps[at][1] else None


def load_trace(path: Path) -> RankTrace:
    """One trace file.

    Raises:
        TwofoldError: a file that is missing, truncated, not a trace, or without its rank.
    """
    try:
        # times are microseconds since 1970 in some versions: more digits than a float has
        document = read_json(path, "the trace file", float_hook=Decimal)
        events = [_timed(event, document) for event in document["traceEvents"] if event.get("ph") == "X"]
    except TwofoldError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError):
        raise TwofoldError(f"{path}: not a trace of torch's profiler (JSON with traceEvents)") from None
    distributed = document.get("distributedInfo") or {}
    named = re.search(r"rank[-_]?(\d+)", path.name)
    found = distributed.get("rank") if isinstance(distributed, dict) else distributed
    if found is None and named is None:
        raise TwofoldError(f"{path}: neither the file (distributedInfo.rank) nor its name gives the rank")
    found = int(named[1]) if found is None else found  # type: ignore[index]
    if not is_rank(found):
        raise TwofoldError(f"{path}: distributedInfo.rank is {str(found)[:40]!r}, not a rank; write it again")
    steps = {}
    for event in events:
        match = _STEP.fullmatch(str(event.get("name")))
        if match and event.get("cat") == "user_annotation":
            steps[int(match[1])] = (event["start_ps"], event["end_ps"])
    other = document.get("otherData") or {}
    return RankTrace(
        path=path,
        rank=found,
        events=events,
        steps=tuple(sorted(steps.values())),
        own=other.get("twofold_rank_trace"),
        groups=_groups(distributed),
        meta={name: value for name, value in other.items() if name not in ("twofold_rank_trace", "kind", "note")},
    )


def is_rank(found: Any) -> TypeGuard[int]:
    """Whether what a file holds is the number of a rank."""
    return isinstance(found, int) and not isinstance(found, bool) and 0 <= found < _MOST_RANKS


def _groups(distributed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name of a process group -> its ranks; a group without a list is that of all ranks (torch's pg_config_info)."""
    listed = distributed.get("pg_config")
    found = {}
    for each in listed if isinstance(listed, list) else ():
        if not isinstance(each, dict) or "pg_name" not in each:
            continue
        size = each.get("group_size", each.get("pg_size", distributed.get("world_size")))
        ranks = each.get("ranks") or (range(size) if is_rank(size) else ())
        if isinstance(ranks, list | range) and ranks and all(map(is_rank, ranks)):
            found[str(each["pg_name"])] = tuple(ranks)
    return found


def _timed(event: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """An event with its times in picoseconds and a dict of its arguments.

    Raises:
        ValueError: times that no run has.
    """
    base, start, length = int(document.get("baseTimeNanoseconds", 0)), event["ts"], event.get("dur", 0)
    if not (abs(start) <= MOST_US and 0 <= length <= MOST_US):
        raise ValueError(f"an event at {start} us of {length} us")
    start_ps = base * 1000 + round(start * _PS_PER_US)
    args = event.get("args")
    return {
        **event, "name": str(event.get("name", "")), "args": args if isinstance(args, dict) else {},
        "start_ps": start_ps, "end_ps": start_ps + round(length * _PS_PER_US),
    }  # fmt: skip


def _spans(trace: RankTrace) -> Iterator[Span]:
    launched = {
        str(event["args"]["correlation"]): event["start_ps"]
        for event in trace.events
        if event.get("cat") in ("cuda_runtime", "cuda_driver", "privateuse1_runtime") and "correlation" in event["args"]
    }
    on_device = [event for event in trace.events if event.get("cat") in _DEVICE]
    shown = [(event, *kernel_call(event["name"])) for event in on_device or _outermost(trace.events)]
    shown += [
        (event, "host", "launch")
        for event in trace.events
        if on_device and event.get("cat") in ("cuda_runtime", "cuda_driver") and event["end_ps"] > event["start_ps"]
    ]
    for event, stream, call in shown:
        step = trace.step_at(launched.get(str(event["args"].get("correlation")), event["start_ps"]))
        if step is not None:
            yield Span(
                rank=trace.rank, stream=stream, start_ps=event["start_ps"], end_ps=event["end_ps"], step=step,
                id=event["name"], call=call, part="",
            )  # fmt: skip


def _outermost(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators that no other operator of their thread called."""
    found, until = [], dict[Any, int]()
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(operators, key=lambda event: (event["start_ps"], -event["end_ps"])):
        thread = (event.get("pid"), event.get("tid"))
        if event["start_ps"] >= until.get(thread, -1):
            found.append(event)
            until[thread] = event["end_ps"]
    return found


def _written_by_twofold(traces: Sequence[RankTrace]) -> Timeline:
    """The timeline that `write_rank_traces` wrote: every event carries its instruction."""
    own = traces[0].own
    assert own is not None
    origin = int(own["origin_ps"])
    spans = []
    for trace in traces:
        for event in trace.events:
            args = event.get("args", {})
            if "instruction" not in args:
                continue
            start, end = args.get("ps", (event["start_ps"] + origin, event["end_ps"] + origin))
            stream = "host" if event["cat"] == "cpu_op" else STREAMS[2 if _COMMUNICATES.match(event["name"]) else 1]
            spans.append(
                Span(
                    rank=trace.rank, stream=stream, start_ps=start, end_ps=end, step=args["step"],
                    id=args["instruction"], call=args["call"], part=args["part"],
                )
            )  # fmt: skip
    timeline = Timeline.from_spans(
        spans, kind=own["kind"], num_ranks=len(traces), low_s=_seconds(own["low_s"]), high_s=_seconds(own["high_s"]),
        meta=traces[0].meta,
    )  # fmt: skip
    return replace(
        timeline, step_start_ps=tuple(map(int, own["step_start_ps"])), step_end_ps=tuple(map(int, own["step_end_ps"]))
    )


def _seconds(value: Decimal | int | None) -> float | None:
    return None if value is None else float(value)
