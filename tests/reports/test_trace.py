"""Trace files: what is in them, that tracks do not overlap, that they can be read back."""

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import Machine
from interop.chrome_trace import read_trace, write_rank_traces, write_trace
from interop.profiler_trace import read_rank_traces
from plans.errors import TwofoldError
from plans.timeline import Span, Timeline
from simulator import run_program, simulate
from tests.support.handmade import Script, program_of, written_price
from tests.support.reports_example import US, measured, predicted, small_program


def load(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()))


def slices(events: list[dict]) -> dict[tuple[int, int], list[dict]]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def nanoseconds(event: dict) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


def assert_no_overlap(events: list[dict]) -> None:
    for track in slices(events).values():
        ends = sorted(nanoseconds(event) for event in track)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def same(a: Timeline, b: Timeline) -> None:
    key = repr
    assert sorted(a.spans(), key=key) == sorted(b.spans(), key=key)
    for name in ("kind", "num_ranks", "step_start_ps", "step_end_ps", "memory", "low_s", "high_s"):
        assert getattr(a, name) == getattr(b, name)
    assert dict(a.meta) == dict(b.meta)
    assert a.memory_curve.keys() == b.memory_curve.keys()
    for rank, (times, sizes) in a.memory_curve.items():
        np.testing.assert_array_equal(times, b.memory_curve[rank][0])
        np.testing.assert_array_equal(sizes, b.memory_curve[rank][1])


def test_two_timelines_come_back_as_they_were(tmp_path):
    timelines = [predicted(2), measured(3)]
    path = write_trace(tmp_path / "trace.json.gz", timelines, program=small_program())
    for before, after in zip(timelines, read_trace(path), strict=True):
        same(before, after)


def test_equal_input_gives_equal_bytes(tmp_path):
    first = write_trace(tmp_path / "a.gz", [predicted()]).read_bytes()
    assert first == write_trace(tmp_path / "b.gz", [predicted()]).read_bytes()


def test_every_rank_of_every_timeline_is_a_process_with_named_tracks(tmp_path):
    document = load(write_trace(tmp_path / "trace.json.gz", [predicted(), measured(2)]))
    processes = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "process_name"}
    assert processes == {f"{kind} · rank {rank}" for kind in ("predicted", "measured") for rank in range(8)}
    named = {(event["pid"], event["tid"]) for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert set(slices(document["traceEvents"])) <= named
    assert document["distributedInfo"] == {"backend": "", "rank": 0, "world_size": 8}


def test_slices_carry_the_instruction_and_microseconds(tmp_path):
    timeline = predicted()
    events = load(write_trace(tmp_path / "trace.json.gz", [timeline]))["traceEvents"]
    found = {
        (event["args"]["instruction"], event["pid"] % 1_000_000, event["args"]["part"], round(event["dur"], 6))
        for event in events
        if event["ph"] == "X" and event["cat"] == "kernel"
    }
    wanted = {
        (span.id, span.rank, span.part, round((span.end_ps - span.start_ps) / 1e6, 6))
        for span in timeline.spans()
        if span.stream != "host"
    }
    assert found == wanted


def test_slices_on_a_track_do_not_overlap(tmp_path):
    assert_no_overlap(load(write_trace(tmp_path / "trace.json.gz", [predicted(2), measured(2)]))["traceEvents"])


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 5000)), min_size=1, max_size=30))
def test_overlapping_spans_get_lanes_of_their_own_and_come_back(tmp_path_factory, times):
    spans = [
        Span(rank=0, stream="comm", start_ps=start, end_ps=start + length, step=0, id=f"0F0/{n}", call="c", part="C")
        for n, (start, length) in enumerate(times)
    ]
    timeline = Timeline.from_spans(spans, kind="predicted", num_ranks=1)
    path = write_trace(tmp_path_factory.mktemp("trace") / "trace.json.gz", [timeline])
    events = load(path)["traceEvents"]
    assert_no_overlap(events)
    same(timeline, read_trace(path)[0])
    at_once = max(sum(s <= at < e for s, e in ((s.start_ps, s.end_ps) for s in spans)) for at, _ in times)
    lanes = {event["tid"] for event in events if event["ph"] == "X" and event["cat"] == "kernel"}
    assert at_once == len(lanes)


def test_live_memory_is_a_counter_of_its_rank(tmp_path):
    timeline = predicted()
    events = load(write_trace(tmp_path / "trace.json.gz", [timeline]))["traceEvents"]
    for peak in timeline.memory:
        counted = [
            event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 1_000_000 + peak.rank
        ]
        assert max(counted) == peak.peak_bytes


def test_arrows_lead_from_each_send_to_what_it_brings(tmp_path):
    program = small_program()
    events = load(write_trace(tmp_path / "trace.json.gz", [predicted()], program=program))["traceEvents"]
    arrows = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = (event["pid"] % 1_000_000, event["ts"])
    pairs = [(ends["s"][0], ends["f"][0]) for ends in arrows.values()]
    # 4 micro-batches, both directions, every rank of a stage to its counterpart
    assert sorted(pairs) == sorted([(r, r + 4) for r in range(4)] * 4 + [(r + 4, r) for r in range(4)] * 4)
    assert all(ends["s"][1] <= ends["f"][1] for ends in arrows.values())
    tracks = slices(events)
    for event in events:
        if event["ph"] in "sf":
            assert any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in tracks[event["pid"], event["tid"]])


def test_a_large_timeline_keeps_the_last_steps_with_a_note(tmp_path):
    timeline = measured(4)
    per_step = len(timeline.rank) // 4
    path = write_trace(tmp_path / "trace.json.gz", [timeline], max_spans=2 * per_step + 1)
    (kept,) = read_trace(path)
    assert kept.step_end_ps == timeline.step_end_ps[2:]
    assert len(kept.rank) == 2 * per_step
    assert "only steps 2 to 3 of 4" in load(path)["otherData"]["timelines"][0]["note"]


def test_of_a_large_step_whole_ranks_are_kept_one_of_each_group_first(tmp_path):
    timeline = predicted()
    of_rank = {rank: int((timeline.rank == rank).sum()) for rank in range(8)}
    path = write_trace(tmp_path / "trace.json.gz", [timeline], max_spans=of_rank[0] + of_rank[4])
    assert set(read_trace(path)[0].rank) == {0, 4}
    assert "2 of 8 ranks" in load(path)["otherData"]["timelines"][0]["note"]


def test_rank_files_have_what_torch_and_hta_look_for(tmp_path):
    timeline = measured(2)
    paths = write_rank_traces(tmp_path, timeline, backend="gloo")
    assert [path.name for path in paths] == [f"rank{rank}_trace.json.gz" for rank in range(8)]
    document = load(paths[5])
    assert document["distributedInfo"] == {"backend": "gloo", "rank": 5, "world_size": 8}
    events = document["traceEvents"]
    assert_no_overlap(events)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    launches = {event["args"]["correlation"] for event in events if event.get("cat") == "cuda_runtime"}
    assert {event["args"]["correlation"] for event in kernels} == launches
    assert len(launches) == len(kernels)
    communicates = [event["name"].startswith("nccl") for event in kernels]
    assert communicates == [event["args"]["part"] == "C" and event["args"]["stream"] >= 20 for event in kernels]
    steps = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    assert steps == {"ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"}  # the last one closes the file


def test_in_rank_files_communication_begins_where_its_rank_came_to_it(tmp_path):
    scripts = [Script(0), Script(1)]
    for script, work in zip(scripts, (5 * US, 8 * US), strict=True):
        script.compute("a", work)
        script.collective("sum", (0, 1), (0, 2 * US))
    program = program_of(scripts)
    timeline = run_program(program, written_price, num_steps=2)
    paths = write_rank_traces(tmp_path, timeline, program=program)
    kernels = [
        [(event["ts"], event["dur"]) for event in load(path)["traceEvents"] if event["name"] == "ncclKernel_AllReduce"]
        for path in paths
    ]
    assert kernels == [[(5, 5), (15, 5)], [(8, 2), (18, 2)]]
    assert list(read_rank_traces(paths).spans()) == list(timeline.spans())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no gzip", "not a complete JSON"),
        (gzip.compress(b"{}"), "not a trace"),
        (gzip.compress(b'{"otherData": {"twofold_trace": 99}}'), "version 99"),
        (gzip.compress(b"[1, 2]"), "not a trace"),
        (gzip.compress(b"x" * 1000)[:-12], "truncated"),
    ],
    ids=["plain", "empty", "version", "list", "cut"],  # gzip's bytes hold the time: names of their own for every worker
)
def test_files_of_others_and_broken_ones_are_refused(tmp_path, content, said):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(content)
    with pytest.raises(TwofoldError, match=said):
        read_trace(path)


def test_a_missing_file_and_no_timeline_are_refused(tmp_path):
    with pytest.raises(TwofoldError, match="cannot read"):
        read_trace(tmp_path / "none.json.gz")
    with pytest.raises(TwofoldError, match="no timeline"):
        write_trace(tmp_path / "trace.json.gz", [])


def test_a_failing_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_trace(tmp_path / "trace.json.gz", [replace(predicted(), memory_curve={})])
    assert list(tmp_path.iterdir()) == []


def test_no_time_in_a_file_is_negative(tmp_path):
    """A step begins with the first thing that a host issues; viewers of traces start at 0."""
    timeline = simulate(small_program(), Machine.load("h200-x8"))
    assert int(timeline.start_ps.min()) == timeline.step_start_ps[0]
    files = [write_trace(tmp_path / "trace.json.gz", [timeline]), *write_rank_traces(tmp_path / "ranks", timeline)]
    for file in files:
        times = [event["ts"] for event in load(file)["traceEvents"] if "ts" in event]
        assert min(times) >= 0
    assert min(event["ts"] for event in load(files[0])["traceEvents"] if event["ph"] == "X") == 0
    same(read_trace(files[0])[0], timeline)
