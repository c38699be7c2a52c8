"""What the calibration benchmark does beside the fits: which points count, clocks of chips held at their power."""

import math

import msgspec
import pytest

from benchmarks.accuracy.calibration import CLOCK_POWER, STATIC_W, clock_exponents, points_of, with_power_limit
from costmodels.fit.points import Point, save_points
from costmodels.machine.catalogue import load_device


def held_at_limit(exponent: float, copies_follow: bool) -> list[Point]:
    """A chip at 700 W: products draw A f^exponent, copies 500 W at 2000 MHz, 100 of it static and 100 the memory's."""

    def copy_W(clock: float) -> float:
        return 200 + 300 * (clock / 2000) ** exponent if copies_follow else 500.0

    product_W = 600 / 1500**exponent
    low, high = 1500.0, 2000.0
    for _ in range(60):  # the clock at which 60 % products and 40 % copies draw 700 W
        clock = (low + high) / 2
        drawn_W = 0.6 * (STATIC_W + product_W * clock**exponent) + 0.4 * copy_W(clock)
        low, high = (clock, high) if drawn_W < 700 else (low, clock)
    elements = 2**20
    copied_s = 2 * 2 * elements * 36e-12 / 100  # at 36 pJ a byte: 100 W
    made = []
    for window in range(10):
        common = {"kind": "clock", "dtype": "bfloat16", "power_W": 700.0}
        for duty, at in ((100, 1500.0), (60, clock)):
            made.append(Point(call="sustained", shape=(8192, 8192, 8192), options={"duty": duty, "window": window},
                              clock_MHz=at, seconds=1.5 / at, **common))  # fmt: skip
        made.append(Point(call="sustained_memory", shape=(elements,), options={"window": window}, clock_MHz=2000.0,
                          seconds=copied_s, **{**common, "power_W": 500.0}))  # fmt: skip
    return made


@pytest.mark.parametrize("exponent", [2.0, 2.5, 3.0])
def test_bounds_of_the_exponent_are_reached_where_their_assumption_holds(exponent):
    assert clock_exponents(held_at_limit(exponent, False))[0] == pytest.approx(exponent, rel=1e-6)
    assert clock_exponents(held_at_limit(exponent, True))[1] == pytest.approx(exponent, rel=1e-3)
    low, high = clock_exponents(held_at_limit(exponent, True))
    assert low < exponent < high * (1 + 1e-3)


def test_without_loads_there_is_no_exponent():
    assert clock_exponents([point for point in held_at_limit(2.0, False) if point.call != "sustained_memory"]) is None


def test_a_lower_power_limit_lowers_the_clock_and_widens_its_classes():
    device = load_device("h100-sxm-96gb")
    got = with_power_limit(device, (2.0, 3.0), "2026-11-21")
    assert got.compute.sustained_clock == pytest.approx((400 / 600) ** (1 / CLOCK_POWER), abs=1e-4)
    unsure = math.log((400 / 600) ** (1 / 3) / (400 / 600) ** (1 / 2)) / 4
    assert got.spreads["matrix"] == pytest.approx(math.hypot(device.spreads["matrix"], unsure), abs=2e-4)
    assert got.spreads["memory"] == device.spreads["memory"]
    says = got.provenance["compute.sustained_clock"]
    assert says.status == "assumed" and "2.0 to 3.0" in says.source


def test_kernels_measured_in_a_better_way_count_once(tmp_path):
    old = Point(kind="memory", call="relu", size_bytes=1024, seconds=1.0)
    rule = Point(kind="rule", call="relu.forward", size_bytes=1024, seconds=1.0)
    new = [msgspec.structs.replace(point, seconds=2.0) for point in (old, rule)]
    third = msgspec.structs.replace(old, seconds=3.0)
    save_points(tmp_path / "chip-third-x1.jsonl", new, {"taken": "2026-11-21T19:00+00:00"})
    save_points(tmp_path / "chip-third-x2.jsonl", [third], {"taken": "2026-11-21T20:00+00:00", "torch": "2.11"})
    save_points(tmp_path / "chip-x4.jsonl", [old, rule], {"torch": "2.10"})
    points, environment = points_of(sorted(tmp_path.iterdir()))
    assert [point.seconds for point in points if point.kind == "memory"] == [2.0, 3.0]
    assert [point.seconds for point in points if point.kind == "rule"] == [1.0, 2.0]  # the latest last
    assert environment["torch"] == "2.11"
