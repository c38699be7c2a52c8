"""The path of an Ascend NPU on stand-ins: names, control flow and files. Nothing here was run on Ascend."""

import time
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from costmodels import Machine, executing
from costmodels.fit.device import fit_device
from costmodels.fit.points import Point, PointLog, load_points, save_points
from costmodels.machine.catalogue import load_device
from executor.calibrate.chosen import split_at_markers
from executor.calibrate.communication import make_call, recorded_jobs, recorded_together, timed_together
from executor.calibrate.instructions import _summary
from executor.calibrate.operands import Job
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.replay import replay_points
from executor.calibrate.requested_points import requested_points
from executor.calibrate.rules import rule_jobs
from executor.calibrate.sections import AloneSection, CallLimits
from executor.calibrate.session import Session, SessionOptions
from executor.calibrate.timing import Timer, sampled
from executor.device import Device, pick_device
from plans.errors import TwofoldError
from plans.plan import save_plan
from tests.support.on_ranks import run_on_ranks
from twofold.calibration.accelerators import base_device, fit_points
from twofold.calibration.probe_plans import rule_plans


@dataclass(frozen=True, slots=True, kw_only=True)
class StandIn(Device):
    """An NPU to all who ask, made of the CPU."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def name(self) -> str:
        return "Ascend910B2"

    def synchronize(self) -> None:
        pass

    def mark(self) -> int:
        return time.perf_counter_ns()

    def between_ns(self, first: int, second: int) -> int:
        return second - first

    def stream(self) -> None:
        return None

    def memory_bytes(self) -> tuple[int, int]:
        return 2**36, 2**36

    def memory_reserved(self) -> int:
        return 0

    def memory_allocated(self) -> int:
        return 0

    def release_memory(self) -> None:
        pass

    @property
    def cache_bytes(self) -> int:
        return 2**20

    @property
    def num_processors(self) -> int:
        return 24


def test_an_npu_is_measured_without_recording_launches_or_reading_clocks(tmp_path, monkeypatch):
    device = StandIn(kind="npu")
    assert (device.backend, device.is_async, device.sensors()) == ("hccl", True, {})
    timer = Timer(device, repeats=2, window_s=1e-4, busy_s=0.0)
    options = SessionOptions(minutes=1.0, sections=["matrix"])
    session = Session(timer, RankSync(device), PointLog(tmp_path / "points.jsonl"), options, say=lambda line: None)
    limits = CallLimits(free_bytes=2**30, flops_per_s=1e12, bytes_per_s=1e11)
    monkeypatch.setattr(CallLimits, "of", lambda session: limits)
    x = torch.ones(8, 8)
    point = Point(kind="matrix", call="mm", shape=(8, 8, 8), form="nn", dtype="bfloat16", seconds=0.0)
    jobs = [Job(point=point, make=lambda pool: [lambda: x @ x])]
    session.run([AloneSection(name="matrix", share=1.0, jobs=lambda session: jobs)])
    (taken,) = load_points(tmp_path / "points.jsonl")[0]
    assert taken.seconds > 0
    assert (taken.figures["recorded"], taken.clock_MHz) == (0.0, 0.0)


def test_an_npu_starts_from_its_entry_of_the_catalogue(tmp_path):
    base = base_device("Ascend910B2", 64 * 2**30)
    assert (base.name, base.device) == ("ascend-910b2", "npu")
    log = PointLog(tmp_path / "points.jsonl")
    log.begin({"device": "npu", "device_name": "Ascend910B2", "date": "2026-01-01"})
    for power in range(16, 26):
        size = 2**power
        log.add(
            Point(
                kind="memory", call="copy", shape=(size // 4,), size_bytes=size, dtype="bfloat16",
                seconds=5e-6 + size / 1e12,
            )
        )  # fmt: skip
    found = fit_points(log.path, base, 8, name="mine", out=tmp_path / "mine.json")
    assert found.machine.name == "mine"
    compute = found.machine.compute
    assert compute.memory_Bps * compute.memory_efficiency == pytest.approx(1e12, rel=0.1)
    assert found.fit.device.collectives == base.collectives  # nothing of it was measured


def test_a_device_that_nobody_knows_is_refused_before_anything_is_measured():
    with pytest.raises(TwofoldError, match=r"'Ascend310' is not in the catalogue .*ascend-910b1.* --base"):
        base_device("Ascend310", 2**34)
    assert base_device("Ascend310", 2**34, "ascend-910b4") == load_device("ascend-910b4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorder(StandIn):
    """A stand-in that records launches: a recording issues its calls once and a replay again."""

    def capture(self, run):
        run()
        return SimpleNamespace(replay=run)

    def spin(self, cycles: int) -> bool:
        return False


@pytest.mark.parametrize(("each_s", "repeats"), [(2e-4, 5), (1e-6, 9)])
def test_a_device_is_kept_busy_before_every_repeat_and_short_calls_are_repeated_more(monkeypatch, each_s, repeats):
    device, now, marks = Recorder(kind="npu"), [0.0], []
    monkeypatch.setattr(Recorder, "mark", lambda self: marks.append(now[0]) or round(now[0] * 1e9))
    timer, busy = Timer(device, window_s=2e-3, busy_s=0.012), []
    monkeypatch.setattr(timer, "keep_busy", lambda seconds=None: busy.append(seconds))

    def call():
        now[0] += each_s

    sample = timer.device_time([call])
    assert (sample.seconds, sample.repeats, sample.recorded) == (pytest.approx(each_s, rel=1e-3), repeats, True)
    assert busy == [None, *[pytest.approx(0.004)] * (repeats - 1)]


def test_replays_of_several_lengths_separate_launch_and_node_costs(monkeypatch):
    """A stand-in whose replay takes 6 us and 1.5 us for each node."""
    now = [0.0]

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Replaying(Recorder):
        can_record = True

        def mark(self) -> int:
            return round(now[0] * 1e9)

        def capture(self, run):
            nodes = [constant for constant in run.__defaults__ if isinstance(constant, int)]

            def replay():
                now[0] += 6e-6 + 1.5e-6 * nodes[0]

            return SimpleNamespace(replay=replay, release=lambda: None)

    points = list(replay_points(Timer(Replaying(kind="npu"), busy_s=0.0)))
    assert [point.shape for point in points] == [(1,), (8,), (64,), (512,), (4096,)]
    replay = fit_device(points, {"date": "2026-11-23"}, load_device("ascend-910b2")).device.replay
    assert (replay.launch_s, replay.node_s) == (pytest.approx(6e-6, rel=1e-3), pytest.approx(1.5e-6, rel=1e-3))
    machine = Machine.of_device(fit_device(points, {"date": "2026-11-23"}, load_device("h200")).device, 2)
    assert executing(machine, "graph").dispatch_s["matrix"] == pytest.approx(1.5e-6, rel=1e-3)


def test_a_clock_that_moves_between_repeats_flags_the_point():
    assert sampled([1.0, 1.0], 1, clocks=[1500.0, 0.0, 1560.0]).flag == ""
    moved = sampled([1.0, 1.0], 1, clocks=[1500.0, 1800.0, 1510.0])
    assert (moved.flag, moved.clock_MHz) == ("clock", 1510.0)


def test_recorded_messages_are_all_transfers_and_small_collectives_of_one_group():
    jobs = recorded_jobs((2, 4), 4, 2**24)
    assert all(job.point.options["recorded"] == 1 for job in jobs)
    assert len({job.point.key for job in jobs}) == len(jobs)
    transfers = [job.point for job in jobs if job.point.kind == "transfer"]
    assert {point.options["pattern"] for point in transfers} == {"one_way", "both_ways", "ping_pong"}
    assert max(point.size_bytes for point in transfers) == 2**30
    for pattern in ("one_way", "ping_pong"):
        held = {point.size_bytes for point in transfers if point.held_out and point.options["pattern"] == pattern}
        assert len(held) == 15
        assert not held & {2**power for power in range(10, 31)}
    collectives = [job.point for job in jobs if job.point.kind == "collective"]
    assert max(point.size_bytes for point in collectives) <= 2**24
    assert all(point.active_ranks == point.ranks for point in collectives)


def test_kernels_of_a_trace_are_those_between_pairs_of_markers():
    def kernel(ts, name, cat="kernel"):
        return {"cat": cat, "ts": ts, "dur": 2.0, "name": name, "args": {"grid": [ts, 1, 1]}}

    names = [
        "warm",
        "spin_kernel(long)",
        "gemm",
        "reduce",
        "spin_kernel(long)",
        "warm",
        "spin_kernel(long)",
        "spin_kernel(long)",
    ]
    events = [kernel(ts, name) for ts, name in enumerate(names)]
    events.append(kernel(2, "cudaLaunchKernel", cat="cuda_runtime"))
    found = list(split_at_markers(reversed(events)))
    assert [[each["name"] for each in part] for part in found] == [["gemm", "reduce"], []]
    assert (found[0][0]["seconds"], found[0][0]["grid"]) == (2e-6, [2, 1, 1])


def time_under_the_name_hccl(rank, folder):
    import torch.distributed as dist

    def gloo(store, rank, size, timeout):
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("hccl", gloo, devices=["cpu"])
    dist.init_process_group("hccl")
    assert dist.get_backend() == "hccl"
    device = pick_device("cpu")
    sync = RankSync(device, 30.0)
    kinds = {"kind": "collective", "size_bytes": 4096, "ranks": 2, "active_ranks": 2, "seconds": 0.0}
    for call in ("all_reduce", "all_gather"):
        run = make_call(Point(call=call, **kinds), sync, device.torch_device)
        sample, skew_s = timed_together(Timer(device, repeats=2, window_s=1e-3), sync, run)
        assert sample.seconds > 0 and skew_s >= 0
    for pattern in ("one_way", "ping_pong"):
        said = kinds | {"kind": "transfer", "call": "transfer", "options": {"pattern": pattern, "groups": 1}}
        run = make_call(Point(**said), sync, "cpu")
        sample, _ = timed_together(Timer(device, repeats=2, window_s=1e-3), sync, run)
        assert sample.seconds > 0
        assert recorded_together(Timer(device, repeats=2), sync, run) is None
    dist.destroy_process_group()
    (folder / f"{rank}.done").touch()


@pytest.mark.ranks
def test_collectives_are_timed_under_the_name_hccl(tmp_path):
    run_on_ranks(time_under_the_name_hccl, 2, tmp_path, joined=False)
    assert len(list(tmp_path.glob("*.done"))) == 2


def test_driver_limits_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Device(kind="cuda").limits() == Device(kind="cpu").limits() == {}
    program = tmp_path / "nvidia-smi"
    answer = "580.1, 700.00, 1980, 2619, Enabled, Enabled"
    program.write_text(f'#!/bin/sh\n[ "$3" = -i ] && [ "$4" = 1 ] && echo "{answer}"\n')
    program.chmod(0o755)
    limits = Device(kind="cuda", index=1).limits()
    assert (limits["driver"], limits["power_limit_W"], limits["max_clock_MHz"]) == ("580.1", "700.00", "1980")
    assert Device(kind="cuda", index=0).limits() == {}


def test_host_times_of_an_instruction_are_means_without_single_interrupts():
    seconds = [1e-5] * 90 + [3e-5] * 9 + [1.0]
    told = _summary(seconds)
    assert told["seconds"] == pytest.approx((90 * 1e-5 + 9 * 3e-5) / 99)
    assert (told["figures"]["median_s"], told["high_s"]) == (1e-5, 3e-5)
    assert _summary(seconds, adds_up=False)["seconds"] == 1e-5


def test_requested_points_become_jobs_in_order(tmp_path):
    path = tmp_path / "wanted.jsonl"
    points = [
        Point(kind="matrix", call="mm", shape=(8, 16, 24), form="tn", dtype="bfloat16", held_out=True, seconds=0.0),
        Point(kind="attention", call="sdpa_backward", shape=(1, 4, 2, 64, 64, 16), options={"causal": 1}, seconds=0.0),
    ]
    save_points(path, points, {})
    first, second = requested_points(path)
    assert (first.point.shape, first.point.form, first.point.held_out, first.tier) == ((8, 16, 24), "tn", True, 0)
    assert (second.point.call, second.point.options, second.tier) == ("sdpa_backward", {"causal": 1}, 1)
    save_points(path, [Point(kind="memory", call="add", shape=(4,), seconds=0.0)], {})
    with pytest.raises(TwofoldError, match=r"requests memory add \(4,\)"):
        requested_points(path)


def test_rules_are_measured_at_two_sizes_at_least(tmp_path):
    files = [save_plan(plan, tmp_path / f"{name}.json") for name, plan in rule_plans().items()]
    sizes = defaultdict(set)
    for job in rule_jobs(files):
        sizes[job.point.call].add(job.point.size_bytes)
    for call in ("rms_norm.grad0", "layer_norm.grad1", "rope.forward", "gelu.grad0", "adamw.update", "flat_pack"):
        assert len(sizes[call]) >= 2, call
    assert {job.point.call for job in rule_jobs(files, calls=["adamw.update"])} == {"adamw.update"}
    with pytest.raises(TwofoldError, match=r"call of these plans 'adamw' is not known; known are .*adamw\.update"):
        rule_jobs(files, calls=["adamw.update", "adamw"])
