"""The result of one rank as a value and as a file, and the spans of all ranks as one timeline.

Times are nanoseconds of the monotonic clock of rank 0's host; ranks on other hosts convert theirs
(`executor.train.clocks`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from executor.npz import write_npz
from executor.step.code import Code, RecordedStep
from plans.errors import TwofoldError
from plans.program import Kind
from plans.reading import json_of, read_arrays
from plans.timeline import STREAMS, MemoryPeak, Timeline

__all__ = ["RankResult", "SpanColumns", "merged_timeline", "spans_of"]

PS_PER_NS = 1000

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanColumns:
    """The spans of the recorded steps of one rank, in columns.

    Args:
        names: the distinct (id, call, part) triples that `name_index` points into.
        step: number of the recorded step, from 0.
        stream: index into `plans.timeline.STREAMS`.
        start_ns, end_ns: on the clock of rank 0's host.
        step_start_ns, step_end_ns: of each recorded step on this rank.
    """

    names: tuple[tuple[str, str, str], ...]
    step: Ints
    stream: Ints
    name_index: Ints
    start_ns: Ints
    end_ns: Ints
    step_start_ns: Ints
    step_end_ns: Ints

    def earlier(self, by_ns: int) -> SpanColumns:
        """The same spans, so much earlier."""
        times = ("start_ns", "end_ns", "step_start_ns", "step_end_ns")
        return replace(self, **{name: getattr(self, name) - by_ns for name in times})


def spans_of(codes: Sequence[Code], steps: Sequence[RecordedStep]) -> SpanColumns:
    """The spans of recorded steps.

    COMPUTE is a span of the compute stream; where the device works behind the host, its dispatch is one of the host as
    well. Issuing and waiting are spans of the host. Communication is a span of the comm stream: from its issue to the
    end of the WAIT for it (or of the blocking instruction), which is all that can be observed from outside, or exact if
    the step provides it.
    """
    names: dict[tuple[str, str, str], int] = {}
    of_code = [
        names.setdefault((code.id, code.instruction.call, code.instruction.part), len(names)) for code in codes
    ]  # the two ends of a transfer inside a group have one id
    at_id = {code.id: at for code, at in zip(codes, of_code, strict=True)}
    compute, host, comm = (STREAMS.index(stream) for stream in ("compute", "host", "comm"))
    rows: list[tuple[int, int, int, int, int]] = []
    for number, step in enumerate(steps):
        issued: dict[int, tuple[int, int]] = {}
        for position, (code, at, (start, end)) in enumerate(zip(codes, of_code, step.host_ns, strict=True)):
            kind = code.instruction.kind
            if kind is Kind.COMPUTE and step.device_ns is None:
                rows.append((number, compute, at, start, end))
                continue
            rows.append((number, host, at, start, end))
            if kind is Kind.COMPUTE:
                assert step.device_ns is not None
                rows.append((number, compute, at, *step.device_ns[position]))
            elif step.comm_ns is None:
                start, end = (start, end) if step.device_ns is None else step.device_ns[position]
                if kind is not Kind.WAIT and code.token is None:
                    rows.append((number, comm, at, start, end))
                elif kind is not Kind.WAIT:
                    assert code.token is not None
                    issued[code.token] = (at, start)
                elif code.token in issued:
                    issuer, begun = issued.pop(code.token)
                    rows.append((number, comm, issuer, begun, end))
        rows += [(number, comm, at_id[code_id], start, end) for code_id, start, end in step.comm_ns or ()]
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    table = table[table[:, 4] > table[:, 3]]  # a WAIT for what is over, a transfer in which this rank has no part
    return SpanColumns(
        names=tuple(names), step=table[:, 0], stream=table[:, 1], name_index=table[:, 2],
        start_ns=table[:, 3], end_ns=table[:, 4],
        step_start_ns=np.array([step.start_ns for step in steps], dtype=np.int64),
        step_end_ns=np.array([step.end_ns for step in steps], dtype=np.int64),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class RankResult:
    """One rank's result.

    Args:
        rank: this one.
        num_ranks: number of ranks of the run.
        kind: "measured" or "emulated".
        losses: the mean loss of every step; the same on all ranks.
        step_start_ns, step_end_ns: of every step on this rank; no barrier is between steps.
        cpu_s: processor seconds of this process (all its threads) per step, without the first quarter of the steps.
        peak: the most bytes that values take, from the program, whose values were checked against the real tensors.
        device_peak_bytes: the most bytes that torch's allocator gave out on an accelerator, 0 on a CPU.
        device_reserved_bytes: device memory after the last step, 0 on a CPU.
        spans: of the recorded steps, the last ones.
        differences: planned against executed communication of this rank in words, empty when equal; None: not counted.
        num_communications: how many collectives and messages this rank executed in the counted step.
        dilate: by how much emulated time is stretched; 1 for measured.
        num_late: emulated instructions whose real work outlasted the modelled time.
        environment: versions and device.
        plan_digest: of the plan that was run (`plans.plan.plan_digest`), "" where none was given.
        weights: the whole final parameters, on rank 0 only.
        execution: how steps ran at the end: "graph" (replayed) or "eager".
        fallback: reason why they ran eagerly although the plan has "graph" and the device supports it; "" otherwise.
        spans_from: "replay" (events inside it) or "eager": the kind of steps whose spans were recorded.
    """

    rank: int
    num_ranks: int
    kind: str
    losses: npt.NDArray[np.float64]
    step_start_ns: Ints
    step_end_ns: Ints
    cpu_s: float
    peak: MemoryPeak
    device_peak_bytes: int
    spans: SpanColumns
    differences: tuple[str, ...] | None = None
    num_communications: int = 0
    dilate: float = 1.0
    num_late: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    plan_digest: str = ""
    weights: Mapping[str, npt.NDArray[Any]] | None = None
    device_reserved_bytes: int = 0
    execution: str = "eager"
    fallback: str = ""
    spans_from: str = "eager"

    @property
    def step_s(self) -> npt.NDArray[np.float64]:
        """Seconds of every step on this rank, as emulated time where it is emulated."""
        return (self.step_end_ns - self.step_start_ns) / 1e9 / self.dilate

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything but the weights to an .npz file atomically."""
        facts = {
            "rank": self.rank, "num_ranks": self.num_ranks, "kind": self.kind, "cpu_s": self.cpu_s,
            "peak_bytes": self.peak.peak_bytes,
            "by_role": dict(self.peak.by_role), "device_peak_bytes": self.device_peak_bytes, "names": self.spans.names,
            "differences": self.differences, "num_communications": self.num_communications, "dilate": self.dilate,
            "num_late": self.num_late, "environment": dict(self.environment), "plan_digest": self.plan_digest,
            "device_reserved_bytes": self.device_reserved_bytes, "execution": self.execution,
            "fallback": self.fallback, "spans_from": self.spans_from,
        }  # fmt: skip
        columns = {f"spans_{name}": getattr(self.spans, name) for name in _COLUMNS}
        arrays = {"losses": self.losses, "step_start_ns": self.step_start_ns, "step_end_ns": self.step_end_ns}
        return write_npz(path, {"facts": np.array(json.dumps(facts)), **arrays, **columns})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RankResult:
        """Read what `save` wrote.

        Raises:
            TwofoldError: no such file, or not such a file.
        """
        file = read_arrays(path, "the result of a rank")
        try:
            facts = json_of(str(file["facts"]).encode(), os.fspath(path))
            arrays: dict[str, Any] = {name: file[name] for name in ("losses", "step_start_ns", "step_end_ns")}
            columns = {name: file[f"spans_{name}"] for name in _COLUMNS}
        except KeyError as error:
            raise TwofoldError(f"{os.fspath(path)!r} is not the result of a rank ({error}); run again") from None
        names = tuple((code_id, call, part) for code_id, call, part in facts.pop("names"))
        peak = MemoryPeak(rank=facts["rank"], peak_bytes=facts.pop("peak_bytes"), by_role=facts.pop("by_role"))
        differences = facts.pop("differences")
        return cls(
            **facts,
            **arrays,
            peak=peak,
            differences=None if differences is None else tuple(differences),
            spans=SpanColumns(names=names, **columns),
        )


_COLUMNS = ("step", "stream", "name_index", "start_ns", "end_ns", "step_start_ns", "step_end_ns")


def merged_timeline(results: Sequence[RankResult], **meta: Any) -> Timeline:
    """The recorded steps of all ranks as one timeline; emulated times are shrunk back by `dilate`.

    A step begins with the first compute or collective of any rank and ends when the last rank is done.

    Raises:
        TwofoldError: no ranks, or ranks that recorded different numbers of steps.
    """
    if not results or len({len(result.spans.step_start_ns) for result in results}) != 1:
        raise TwofoldError(f"a timeline needs ranks that recorded equally many steps, got {len(results)} ranks")
    first, names = results[0], dict[tuple[str, str, str], int]()
    columns: list[list[npt.NDArray[Any]]] = []
    for result in results:
        renumber = np.array([names.setdefault(name, len(names)) for name in result.spans.names], dtype=np.int32)
        spans = result.spans
        ranks = np.full(len(spans.step), result.rank)
        columns.append([ranks, spans.stream, spans.step, renumber[spans.name_index], spans.start_ns, spans.end_ns])
    rank, stream, step, index, start, end = (np.concatenate(column) for column in zip(*columns, strict=True))
    starts = np.max([result.spans.step_end_ns for result in results], axis=0)
    ends = starts.copy()
    # as in the simulator: a rank that is done early only issues and waits for the next step's messages at first
    issues = np.array([call == "transfer" for _, call, _ in names], dtype=bool)[index] | (
        stream == STREAMS.index("host")
    )
    np.minimum.at(starts, step[~issues], start[~issues])
    origin = int(min(start, default=0))

    def to_ps(times: Ints) -> Ints:
        return np.rint((times - origin) * (PS_PER_NS / first.dilate)).astype(np.int64)

    return Timeline(
        kind=first.kind, num_ranks=first.num_ranks, names=tuple(names), rank=rank.astype(np.int32),
        stream=stream.astype(np.int8), step=step.astype(np.int32), name_index=index.astype(np.int32),
        start_ps=to_ps(start), end_ps=to_ps(end),
        step_start_ps=tuple(to_ps(starts).tolist()), step_end_ps=tuple(to_ps(ends).tolist()),
        memory=tuple(result.peak for result in results), meta={**first.environment, **meta},
    )  # fmt: skip
