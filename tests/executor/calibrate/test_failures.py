"""What a calibration does when the machine misbehaves; devices and clocks are stand-ins, ranks are real."""

import itertools
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from costmodels.fit.points import Point, PointLog, load_points
from costmodels.machine.catalogue import load_device
from costmodels.price.executor_kernels import fit_rules
from executor.calibrate.cpu import cpu_sections, environment
from executor.calibrate.operands import Job
from executor.calibrate.rank_sync import HUNG_EXIT_CODE, RankSync
from executor.calibrate.resume import resume
from executor.calibrate.sections import AloneSection
from executor.calibrate.session import Session, SessionOptions
from executor.calibrate.shared_cores import summary
from executor.calibrate.timing import Timer
from executor.device import Device, pick_device
from plans.errors import TwofoldError
from tests.support.on_ranks import run_on_ranks
from twofold.calibration.calibrate import calibrate
from twofold.cli import main


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallDevice(Device):
    """A CPU that says it has little memory."""

    free_bytes: int = 2**20

    def memory_bytes(self) -> tuple[int, int]:
        return self.free_bytes, 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class LostDevice(Device):
    """A CPU that stops answering once something on it has failed."""

    def synchronize(self) -> None:
        if (Path.cwd() / "lost").exists():
            raise RuntimeError("device-side error: the bus is gone")


def small_session(device, folder, said, *, minutes=1.0, clock_s=time.monotonic):
    timer, log = Timer(device, repeats=1, window_s=1e-4), PointLog(folder / "points.jsonl")
    options = SessionOptions(minutes=minutes, quick=True)
    return Session(timer, RankSync(device), log, options, say=said.append, clock_s=clock_s)


def take(session, jobs, budget_s=1e30):
    AloneSection(name="matrix", share=1.0, jobs=lambda session: jobs).take(session, budget_s)


def job(shape, needs_bytes=0, make=None):
    point = Point(kind="matrix", call="mm", shape=shape, form="nn", seconds=0.0)
    return Job(point=point, make=make or (lambda pool: [lambda: torch.ones(2).sum()]), tier=0, needs_bytes=needs_bytes)


def test_a_grid_that_does_not_fit_into_memory_shrinks_with_a_message(tmp_path):
    said: list[str] = []
    session = small_session(SmallDevice(kind="cpu"), tmp_path, said)
    take(session, [job((1, 1, 1)), job((2, 2, 2), needs_bytes=2**20), job((3, 3, 3), needs_bytes=2**30)])
    assert {point.shape for point in session.log} == {(1, 1, 1)}
    assert str(session.skipped) == "2 too large for its memory"


def test_a_device_that_disappears_ends_the_run_and_keeps_the_points(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def lose(pool):
        (tmp_path / "lost").touch()
        raise RuntimeError("device-side error")

    session = small_session(LostDevice(kind="cpu"), tmp_path, [])
    take(session, [job((1, 1, 1))])
    with pytest.raises(
        TwofoldError, match=r"rank 0 stopped working in matrix mm .*: device-side error; 1 points are kept"
    ):
        take(session, [job((2, 2, 2), make=lose)])
    assert [point.shape for point in load_points(tmp_path / "points.jsonl")[0]] == [(1, 1, 1)]


def test_a_kernel_that_fails_on_a_sound_device_is_left_out_and_named(tmp_path):
    def fail(pool):
        raise RuntimeError("no such kernel")

    said: list[str] = []
    session = small_session(Device(kind="cpu"), tmp_path, said)
    take(session, [job((1, 1, 1), make=fail), job((2, 2, 2))])
    assert [point.shape for point in session.log] == [(2, 2, 2)]
    assert session.failures == ["matrix mm (1, 1, 1): no such kernel"]


@pytest.mark.parametrize("tick_ns", [-(10**6), 0])
def test_a_clock_that_stops_or_goes_backwards_is_refused(tick_ns):
    readings = itertools.count(10**15, tick_ns)
    timer = Timer(Device(kind="cpu"), repeats=2, window_s=1e-6, clock_ns=lambda: next(readings))
    with pytest.raises(TwofoldError, match=r"clock of .* jumps"):
        timer.device_time([lambda: None])
    with pytest.raises(TwofoldError, match="host's clock jumps"):
        timer.host_time(lambda: None, burst=1)


def test_a_clock_that_leaps_ahead_once_flags_the_point_and_spares_the_median():
    state = {"now": 10**15, "reads": 0}

    def clock_ns():  # one repeat of five takes an hour more
        state["reads"] += 1
        state["now"] += 1000 + (3600 * 10**9 if state["reads"] == 11 else 0)
        return state["now"]

    sample = Timer(Device(kind="cpu"), repeats=5, window_s=1e-9, clock_ns=clock_ns).device_time([lambda: None])
    assert sample.flag == "unsteady"
    assert sample.seconds == pytest.approx(1e-6)
    assert sample.high_s > 3000


def test_ranks_of_a_cpu_refuse_a_clock_that_goes_backwards():
    with pytest.raises(TwofoldError, match="clock jumps: a call took -1 s"):
        summary([1.0, -1.0, 2.0])


def test_points_of_another_device_are_not_added_to(tmp_path):
    log = PointLog(tmp_path / "points.jsonl")
    resume(log, {"device_name": "NVIDIA H200", "date": "2026-01-01"})
    resume(log, {"device_name": "NVIDIA H200", "date": "2026-01-02"})  # another day goes on
    with pytest.raises(TwofoldError, match="device_name is 'NVIDIA H200', but here it is 'NVIDIA A100'"):
        resume(PointLog(log.path), {"device_name": "NVIDIA A100"})


def test_time_that_is_up_leaves_points_out_and_the_next_run_takes_them(tmp_path):
    said: list[str] = []
    device, ticks = Device(kind="cpu"), itertools.count()
    first = small_session(device, tmp_path, said, clock_s=lambda: float(next(ticks)))
    jobs = [job((size, 1, 1)) for size in range(1, 5)]
    take(first, jobs, 4.5)
    taken = len(list(first.log))
    assert 0 < taken < len(jobs)
    assert str(first.skipped) == f"{len(jobs) - taken} for lack of time"
    second = small_session(device, tmp_path, said)
    second.known = second.share_points()
    take(second, jobs)
    points, _ = load_points(tmp_path / "points.jsonl")
    assert sorted(point.shape for point in points) == [(size, 1, 1) for size in range(1, 5)]


def hang(rank, folder):
    import torch.distributed as dist

    with (folder / f"stderr.{rank}").open("w") as file:
        os.dup2(file.fileno(), 2)
    sync = RankSync(pick_device("cpu"), timeout_s=60.0)
    with sync.watch("all_reduce of 4 bytes in groups of 2", timeout_s=60.0):
        sync.barrier()
    if dist.get_rank() == 1:
        time.sleep(60.0)
    with sync.watch("all_gather of 8 bytes in groups of 2", timeout_s=1.5):
        sync.barrier()


@pytest.mark.ranks
def test_a_collective_that_hangs_ends_its_rank_and_names_the_missing_one(tmp_path):
    start = time.monotonic()
    with pytest.raises(ProcessExitedException) as caught:
        run_on_ranks(hang, 2, tmp_path)
    assert time.monotonic() - start < 50  # not the 60 s that the other rank sleeps
    said = (tmp_path / "stderr.0").read_text()
    assert "all_gather of 8 bytes in groups of 2 did not end within 1.5 s" in said
    assert "missing: rank 1, which is at 'all_reduce of 4 bytes in groups of 2'; waiting in it: rank 0" in said
    assert (caught.value.error_index, caught.value.exit_code) == (0, HUNG_EXIT_CODE)


def test_the_old_machine_file_stays_when_a_calibration_fails(tmp_path, monkeypatch):
    from twofold.calibration import calibrate as calibration

    old = tmp_path / "machine.json"
    old.write_text(json.dumps({"version": 1}))

    def fail(*args, **more):
        raise TwofoldError("rank 1 failed")

    monkeypatch.setattr("executor.launch.launch.launch", fail)
    with pytest.raises(TwofoldError, match="rank 1 failed"):
        calibration.calibrate(2, device="cpu", out=old, quick=True)
    assert json.loads(old.read_text()) == {"version": 1}


def test_points_that_are_too_few_to_fit_leave_the_old_machine_file_alone(tmp_path):
    from costmodels.machine.catalogue import load_device
    from twofold.calibration.accelerators import fit_points

    old = tmp_path / "machine.json"
    old.write_text('{"version": 1}')
    log = PointLog(tmp_path / "points.jsonl")
    log.begin({"device": "cuda"})
    log.add(Point(kind="matrix", call="mm", shape=(8, 8, 8), form="nn", dtype="bfloat16", seconds=1e-5))
    with pytest.raises(TwofoldError):
        fit_points(log.path, load_device("h200"), 1, out=old)
    assert old.read_text() == '{"version": 1}'


def test_a_line_cut_off_by_a_kill_is_dropped_and_measured_again(tmp_path):
    log = PointLog(tmp_path / "points.jsonl")
    point = Point(kind="memory", call="relu", size_bytes=8, seconds=1.0)
    log.add(point)
    with log.path.open("ab") as file:
        file.write(msgspec.json.encode(point)[:20])
    assert list(PointLog(log.path)) == [point]


def test_points_can_be_requested_by_name(tmp_path):
    from costmodels.fit.points import save_points
    from executor.calibrate.requested_points import requested_points

    matrix = Point(kind="matrix", call="mm", shape=(8, 16, 24), form="tn", dtype="bfloat16", held_out=True, seconds=0.0)
    attention = Point(
        kind="attention", call="sdpa_backward", shape=(1, 4, 2, 128, 128, 64), dtype="bfloat16",
        options={"causal": 1}, seconds=0.0,
    )  # fmt: skip
    save_points(tmp_path / "wanted.jsonl", [matrix, attention], {})
    jobs = requested_points(tmp_path / "wanted.jsonl")
    assert [job.point.key for job in jobs] == [matrix.key, attention.key]
    assert [job.point.held_out for job in jobs] == [True, False]
    save_points(tmp_path / "other.jsonl", [Point(kind="collective", call="all_reduce", seconds=0.0)], {})
    with pytest.raises(TwofoldError, match="requests collective all_reduce"):
        requested_points(tmp_path / "other.jsonl")


def test_a_cpu_measured_for_no_file_leaves_no_points_behind(tmp_path, monkeypatch):
    from twofold.calibration import calibrate as calibration

    requests = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibration, "calibrate_cpu", requests.append)
    calibration.calibrate(2, device="cpu")
    calibration.calibrate(2, device="cpu", out=tmp_path / "m.json")
    assert [request.points for request in requests] == [None, tmp_path / "m.points.jsonl"]


@pytest.mark.parametrize("minutes", [-1.0, 0.0, float("nan"), float("inf")])
def test_no_time_to_measure_in_is_refused(minutes, tmp_path):
    with pytest.raises(TwofoldError, match="--minutes must be positive"):
        calibrate(device="cpu", quick=True, minutes=minutes, out=tmp_path / "machine.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["file/report.html", "folder.html", "/proc/none/report.html"])
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(where, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "folder.html").mkdir()
    machine = tmp_path / "machine.json"
    machine.write_text('{"version": 1}')
    assert (
        main(["calibrate", "--quick", "--device", "cpu", "--out", str(machine), "--report", str(tmp_path / where)]) == 2
    )
    assert "cannot be written" in capsys.readouterr().err
    assert machine.read_text() == '{"version": 1}'
    with pytest.raises(TwofoldError, match="cannot be written"):
        calibrate(device="cpu", quick=True, out=tmp_path / where)


def test_a_rule_without_points_is_unchanged():
    compute = load_device("h200").compute
    known = compute.rules["rms_norm.forward"]
    point = Point(
        kind="dispatch", call="rms_norm.forward", stack="twofold", options={"class": "memory"}, seconds=3e-5
    )  # fmt: skip
    found = fit_rules([point], compute).rules["rms_norm.forward"]
    assert (found.dispatch_s, found.kernels, found.passes) == (3e-5, known.kernels, known.passes)


@pytest.mark.parametrize(("name", "wrong"), [("seconds", -1e-3), ("seconds", 0.0), ("cpu_s", -1e-3)])
def test_a_time_that_nothing_takes_is_refused_with_its_line(name, wrong, tmp_path, capsys):
    points, machine = tmp_path / "points.jsonl", tmp_path / "machine.json"
    machine.write_text('{"version": 1}')
    log = PointLog(points)
    log.add(Point(kind="allocation", call="context", seconds=0.0))  # takes none
    log.add(Point(kind="memory", call="relu", size_bytes=8, seconds=1.0))
    log.add(Point(**{"kind": "memory", "call": "relu", "size_bytes": 16, "seconds": 1.0, name: wrong}))
    arguments = ["calibrate", "--quick", "--device", "cpu", "--out", str(machine), "--points", str(points)]
    assert main(arguments) == 2
    assert f"{points}, line 3: memory relu says" in capsys.readouterr().err
    assert machine.read_text() == '{"version": 1}'


@pytest.mark.parametrize("name", ["machine", "processor", "cores"])
def test_points_of_another_computer_are_refused_also_when_a_later_run_was_here(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("executor.calibrate.cpu.processor_name", lambda: "this one")
    points, machine = tmp_path / "points.jsonl", tmp_path / "machine.json"
    machine.write_text('{"version": 1}')
    log, here = PointLog(points), environment()
    log.begin(here | {name: "another"})
    log.add(Point(kind="memory", call="relu", size_bytes=8, seconds=1.0))
    log.begin(here)
    kept = points.read_bytes()
    arguments = ["calibrate", "--quick", "--device", "cpu", "--out", str(machine), "--points", str(points)]
    assert main(arguments) == 2
    assert f"where {name} is 'another'" in capsys.readouterr().err
    assert (machine.read_text(), points.read_bytes()) == ('{"version": 1}', kept)


def test_an_interrupted_calibration_reports_kept_points_and_how_to_resume(tmp_path, monkeypatch, capsys):
    points = tmp_path / "machine.points.jsonl"

    def interrupt(*args, **more):
        PointLog(points).add(Point(kind="memory", call="relu", size_bytes=8, seconds=1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr("executor.launch.launch.launch", interrupt)
    assert main(["calibrate", "--quick", "--device", "cpu", "--out", str(tmp_path / "machine.json")]) == 130
    said = capsys.readouterr().err
    assert f"1 points are kept in {str(points)!r}; run the same command again to resume" in said


def test_a_point_is_on_disk_before_the_next_one_is_taken(tmp_path, monkeypatch):
    session, seen = small_session(Device(kind="cpu"), tmp_path, []), []

    def timed(call, budget_s):
        seen.append(len(PointLog(tmp_path / "points.jsonl").points))
        return {"seconds": 1e-6}

    monkeypatch.setattr("executor.calibrate.cpu.timed_alone", timed)
    session.run(cpu_sections(()))
    assert seen == list(range(len(seen)))
    assert len(load_points(tmp_path / "points.jsonl")[0]) == len(seen) > 10
