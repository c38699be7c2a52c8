"""The path of an Ascend NPU on stand-ins: names, control flow and files. Nothing here was run on Ascend."""

import time
from dataclasses import dataclass

import pytest
import torch

from costmodels.catalogue import load_device
from costmodels.points import Point, PointLog, load_points
from executor.calibrate.bench import Job
from executor.calibrate.meeting import Meeting
from executor.calibrate.session import Session
from executor.calibrate.timing import Timer
from executor.device import Device
from executor.launch import launch
from plans.errors import TwofoldError
from twofold.accelerators import base_device, fit_points


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
    session = Session(timer, Meeting(device), PointLog(tmp_path / "points.jsonl"), minutes=1.0, say=lambda line: None)
    monkeypatch.setattr(session, "_rates", lambda: (1e12, 1e11))
    x = torch.ones(8, 8)
    point = Point(kind="matrix", call="mm", shape=(8, 8, 8), form="nn", dtype="bfloat16", seconds=0.0)
    session._alone([Job(point=point, make=lambda bench: [lambda: x @ x])], 1e30)
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


HCCL = """
import torch, torch.distributed as dist
from costmodels.points import Point
from executor.calibrate.communication import make_call, timed_together
from executor.calibrate.meeting import Meeting
from executor.calibrate.timing import Timer
from executor.device import pick_device

def gloo(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("hccl", gloo, devices=["cpu"])
dist.init_process_group("hccl")
assert dist.get_backend() == "hccl"
device = pick_device("cpu")
meeting = Meeting(device, 30.0)
for call in ("all_reduce", "all_gather"):
    point = Point(kind="collective", call=call, size_bytes=4096, ranks=2, active_ranks=2, seconds=0.0)
    run = make_call(point, meeting, device.torch_device)
    sample, skew_s = timed_together(Timer(device, repeats=2, window_s=1e-3), meeting, run)
    assert sample.seconds > 0 and skew_s >= 0
    print(call, flush=True)
"""


@pytest.mark.ranks
def test_collectives_are_timed_under_the_name_hccl(tmp_path):
    script, said = tmp_path / "hccl.py", []
    script.write_text(HCCL)
    launch(
        script, num_ranks=2, log_dir=tmp_path / "log", timeout_s=100, stream_rank=0,
        on_line=lambda rank, line: said.append(line),
    )  # fmt: skip
    assert said == ["all_reduce", "all_gather"]
