"""Mixtures of kernels that tell how a chip slows under load, measured on a CPU."""

from dataclasses import dataclass

import pytest
import torch

from executor.calibrate.attention import split_job
from executor.calibrate.load import MIXTURES, load_points
from executor.calibrate.operands import OperandPool
from executor.calibrate.timing import Timer
from executor.device import Device


def test_every_mixture_is_measured_window_by_window_with_the_shares_of_its_kernels():
    points = list(load_points(Timer(Device(kind="cpu"), repeats=1, window_s=1e-4, busy_s=0.0), seconds=0.01))
    names = list(dict.fromkeys(point.options["mixture"] for point in points))
    assert names == [", ".join(f"{kind} {percent}" for kind, percent in each.items()) for each in MIXTURES]
    for point in points:
        shares = {name: value for name, value in point.figures.items() if name.endswith("_share")}
        assert sum(shares.values()) == pytest.approx(1.0)
        assert [kind.removesuffix("_share") for kind in shares] == [
            part.split()[0] for part in str(point.options["mixture"]).split(", ")
        ]
    product = next(point for point in points if point.options["mixture"] == "matrix 100")
    assert product.figures["matrix_flops"] == 2 * 256**3


def test_percentages_of_mixtures_are_of_the_whole():
    assert all(sum(mixture.values()) == 100 for mixture in MIXTURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowing(Device):
    """A CPU whose clock falls with every reading, and whose power cannot be read at first."""

    readings: list[int]

    def sensors(self) -> dict[str, float]:
        self.readings.append(len(self.readings))
        known = {"power_W": 500.0} if len(self.readings) > 3 else {}
        return {"clock_MHz": 2000.0 - 10 * len(self.readings)} | known


def test_sensors_are_read_while_the_device_works_and_its_later_half_counts():
    device = Slowing(kind="cpu", readings=[])

    def run() -> None:
        while len(device.readings) < 9:
            torch.ones(100).sum()

    sensed = Timer(device, busy_s=0.0).sensors_during(run)
    assert sensed["power_W"] == 500.0
    assert sensed["clock_MHz"] <= 2000.0 - 10 * 5


@pytest.mark.parametrize("part", ["forward", "backward"])
def test_attention_of_the_last_rows_of_a_sequence_is_measured(part):
    job = split_job(part, (1, 4, 2, 64, 128, 16))
    calls = job.make(OperandPool(device=Device(kind="cpu"), block_bytes=2**20))
    made = calls[0]()
    assert [tuple(each.shape) for each in made[: 1 if part == "forward" else 3]] == (
        [(1, 4, 64, 16)] if part == "forward" else [(1, 4, 64, 16), (1, 2, 128, 16), (1, 2, 128, 16)]
    )
