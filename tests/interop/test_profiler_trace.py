"""Traces per rank: what we write comes back, and what torch's profiler writes is read."""

import gzip
import json
from dataclasses import replace

import pytest

from interop.chrome_trace import write_rank_traces
from interop.profiler_trace import kernel_call, read_rank_traces
from plans.errors import TwofoldError
from simulator import composition, critical_path
from tests import DATA
from tests.reports.test_trace import same
from tests.support.reports_example import measured, predicted, small_program


@pytest.mark.parametrize("timeline", [predicted(2), measured(3)], ids=["predicted", "measured"])
def test_written_data_round_trips(timeline, tmp_path):
    back = read_rank_traces(list(reversed(write_rank_traces(tmp_path, timeline))))
    same(replace(timeline, memory=(), memory_curve={}), back)
    assert critical_path(back, small_program()) == critical_path(timeline, small_program())


def us(name: str, cat: str, start: float, dur: float, **args) -> dict:
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": 1, "ts": start, "dur": dur, "args": args}


def kineto(path, rank: int, base_us: float, *, compress: bool = True, late_us: float = 0.0):
    """Two steps of a rank as Kineto writes them: launches on the host, a product and an all-reduce on the device."""
    events = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
    for step in range(2):
        begin = base_us + late_us + 1000 * step
        events += [
            us(f"ProfilerStep#{step + 5}", "user_annotation", begin, 900),
            us("aten::mm", "cpu_op", begin + 5, 20),
            us("cudaLaunchKernel", "cuda_runtime", begin + 10, 8.5, correlation=10 * step + 1),
            us("ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "kernel", begin + 200, 300.125, stream=20,
               correlation=10 * step + 2),
            us("cudaLaunchKernel", "cuda_runtime", begin + 30, 4, correlation=10 * step + 2),
            us("sm90_xmma_gemm_f32f32", "kernel", begin + 100, 150, stream=7, correlation=10 * step + 1),
            us("Memcpy HtoD", "gpu_memcpy", begin + 950, 100, stream=7, correlation=10 * step + 1),  # ends in the next
        ]  # fmt: skip
    document = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank}, "traceEvents": events}
    content = json.dumps(document).encode()
    path.write_bytes(gzip.compress(content) if compress else content)
    return path


def test_a_profilers_trace_becomes_a_timeline(tmp_path):
    paths = [kineto(tmp_path / f"rank{rank}.json", rank, 0.0, compress=rank == 0) for rank in range(2)]
    timeline = read_rank_traces(paths)
    assert (timeline.kind, timeline.num_ranks, timeline.num_steps) == ("measured", 2, 2)
    first = [(s.stream, s.call, s.start_ps, s.end_ps) for s in timeline.spans() if s.rank == 0 and s.step == 0]
    assert sorted(first) == sorted(
        [
            ("comm", "all_reduce", 200_000_000, 500_125_000),
            ("compute", "matmul", 100_000_000, 250_000_000),
            ("compute", "copy", 950_000_000, 1_050_000_000),
            ("host", "launch", 10_000_000, 18_500_000),
            ("host", "launch", 30_000_000, 34_000_000),
        ]
    )
    (one, _) = composition(timeline)
    assert dict(one.exposed_ps) == {"all_reduce": 250_125_000}


def test_times_since_1970_keep_their_digits(tmp_path):
    path = kineto(tmp_path / "rank0.json", 0, 0.0)
    document = json.loads(gzip.decompress(path.read_bytes()))
    text = json.dumps(document)
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            text = text.replace(f'"ts": {event["ts"]},', f'"ts": 17636390600{event["ts"]:013.7f},', 1)
    (tmp_path / "late").mkdir()
    late = tmp_path / "late" / "rank0.json"
    late.write_text(text)
    assert list(read_rank_traces([late]).spans()) == list(read_rank_traces([path]).spans())


def test_clocks_that_disagree_are_aligned_by_the_first_step(tmp_path):
    paths = [kineto(tmp_path / f"rank{rank}.json", rank, 0.0, late_us=5e6 * rank) for rank in range(2)]
    apart, together = (read_rank_traces(paths, align=how) for how in ("clock", "step"))
    assert apart.step_end_ps[0] > 5e12 > together.step_end_ps[0]


def test_a_trace_of_a_cpu_run(tmp_path):
    events = [
        us("aten::linear", "cpu_op", 0, 100),
        us("aten::addmm", "cpu_op", 10, 80),
        us("c10d::allreduce_", "cpu_op", 110, 40),
    ]
    path = tmp_path / "trace_rank_0.json"
    path.write_text(json.dumps({"traceEvents": events}))
    spans = [(span.stream, span.call, span.id) for span in read_rank_traces([path]).spans()]
    assert spans == [("compute", "matmul", "aten::linear"), ("comm", "all_reduce", "c10d::allreduce_")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", ("comm", "reduce_scatter")),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", ("comm", "all_gather")),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", ("comm", "transfer")),
        ("ncclDevKernel_Broadcast_RING_LL", ("comm", "broadcast")),
        ("hcom_allReduce_", ("comm", "all_reduce")),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", ("compute", "attention")),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", ("compute", "matmul")),
    ],
)
def test_kernels_are_known_by_their_names(name, expected):
    assert kernel_call(name) == expected


def test_a_trace_that_torch_wrote():
    """Recorded with torch 2.13.0 on CPU: two steps of mm and relu_ between annotations, without arguments."""
    timeline = read_rank_traces([DATA / "rank0_torch_2.13_cpu.json"])
    spans = [(span.step, span.stream, span.call, span.id) for span in timeline.spans()]
    calls = (("matmul", "aten::mm"), ("kernel", "aten::relu_"))
    assert spans == [(step, "compute", call, name) for step in (0, 1) for call, name in calls]
    assert timeline.step_s < 1.0 and min(timeline.start_ps) >= 0


def broken(tmp_path, content: bytes):
    path = tmp_path / "rank0.json.gz"
    path.write_bytes(content)
    return [path]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: [], "no trace files"),
        (lambda folder: [folder / "none.json"], "cannot read"),
        (lambda folder: broken(folder, gzip.compress(b"x" * 1000)[:-12]), "truncated"),
        (lambda folder: broken(folder, b"no trace"), "not a complete JSON"),
        (lambda folder: broken(folder, b"[1]"), "not a trace"),
        (lambda folder: broken(folder, b'{"traceEvents": []}'), "no kernels"),
        (lambda folder: [kineto(folder / "a.json", 1, 0.0)], "no trace file of rank 0"),
        (lambda folder: [kineto(folder / f"{n}.json", 0, 0.0) for n in "ab"], "both belong to rank 0"),
    ],
)
def test_unreadable_files_are_reported(make, message, tmp_path):
    with pytest.raises(TwofoldError, match=message):
        read_rank_traces(make(tmp_path))
