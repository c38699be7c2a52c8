"""Prices of many random cases against another computation of them: one by one, by an integral, by arithmetic."""

import itertools
import math
import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from costmodels import Machine, step_interval
from costmodels.fit.kernels import predicted_s
from costmodels.fit.matrix import _Products
from costmodels.fit.points import Point
from costmodels.fit.transfer_calibration import _form_rate
from costmodels.interval import TOGETHER
from costmodels.machine.machine import Interval
from costmodels.price.compute import Compute
from costmodels.price.instruction import price_compute
from costmodels.price.tiled import Tiled

NINETY = norm.ppf(0.95)


def drawn_compute(draw, *, tiled):
    """A device whose every figure matters."""
    model = Tiled(
        start_s=draw.uniform(0, 1e-6), unaligned_start_s=draw.uniform(0, 2e-6), tile_s=draw.uniform(0, 1e-6),
        step_s=draw.uniform(0, 1e-7), hidden_s=draw.uniform(0, 3e-7), core_Bps=draw.uniform(1e11, 3e11),
        core_store_Bps=draw.uniform(2e10, 8e10), split_s=draw.uniform(0, 5e-6), quantisation=draw.random(),
        arithmetic_cost={"8": 2.0, "4": 3.0, "2": 5.0, "2 nt": 7.0}, memory_cost={"8": 1.3, "4": 1.7, "2": 2.1},
    )  # fmt: skip
    return Compute(
        matrix_flops_per_s={"float32": 5e13, "tf32": 4e14, "bfloat16": 9e14}, vector_flops_per_s={"float32": 5e13},
        memory_Bps=3e12, memory_efficiency=draw.uniform(0.7, 1), matrix_efficiency=draw.uniform(0.6, 1),
        clock_MHz=1800.0, clock_drop=draw.uniform(0, 0.3), sustained_clock=draw.uniform(0.8, 1), num_cores=132,
        tiled=model if tiled else None, half_rows=draw.uniform(0, 60), half_depth=draw.uniform(0, 300),
        sharpness=draw.uniform(1, 6), form_cost={"nn": 1.1, "tn": 1.3}, kernel_s=draw.uniform(1e-6, 3e-6),
    )  # fmt: skip


@pytest.mark.parametrize("tiled", [False, True])
def test_products_fitted_at_once_take_what_each_of_them_takes(tiled):
    draw = random.Random(3)
    for _ in range(6):
        compute = drawn_compute(draw, tiled=tiled)
        if not tiled:
            compute = msgspec.structs.replace(compute, clock_drop=0.0)  # which the smooth form does not have
        points = [
            Point(
                kind="matrix", call="mm", shape=tuple(round(2 ** draw.uniform(3, 13)) for _ in range(3)), seconds=1.0,
                dtype=draw.choice(("float32", "tf32", "bfloat16")), form=draw.choice(("nt", "nn", "tn", "")),
                batch=draw.choice((1, 5)), clock_MHz=draw.choice((0.0, 1500.0)),
            )
            for _ in range(40)
        ]  # fmt: skip
        found = _Products(points, compute, tiled=tiled, kernel_s=None).seconds(compute)
        assert found == pytest.approx([predicted_s(point, compute, at_clock=True) for point in points], rel=1e-9)


def test_an_interval_is_that_of_correlated_parts_and_its_edges_of_the_slower_of_device_and_host():
    draw, plain = random.Random(4), Machine.load("h200-x8")
    names = ("matrix", "attention", "memory", "collective", "transfer", "dispatch")
    for _ in range(40):
        spreads = {name: draw.uniform(0.02, 0.4) for name in names}
        machine = msgspec.structs.replace(plain, spreads=spreads, interval=Interval(low=0.9, high=1.2))
        step_s, host_share = draw.uniform(0.1, 3), draw.uniform(0.05, 4)
        seconds = {name: draw.uniform(0, 1.2) * step_s for name in names}
        part = np.array([NINETY * spreads[name] * min(1.0, seconds[name] / step_s) for name in names])
        pairs = [[1.0 if one == two else TOGETHER.get(frozenset({one, two}), 0.0) for two in names] for one in names]
        square = part @ np.array(pairs) @ part
        low, high = step_interval(machine, step_s, seconds)
        assert math.log(low / step_s) == pytest.approx(-math.hypot(math.log(0.9), math.sqrt(square)), rel=1e-4)
        assert math.log(high / step_s) == pytest.approx(math.hypot(math.log(1.2), math.sqrt(square)), rel=1e-4)
        del seconds["dispatch"]  # all of the device's work, beside which the host is
        square = part[:-1] @ np.array(pairs)[:-1, :-1] @ part[:-1]
        host = norm(min(0.0, math.log(host_share)), spreads["dispatch"])
        found = step_interval(machine, step_s, seconds, host_share=host_share)
        for edge, rest, share in zip(found, (0.9, 1.2), (0.05, 0.95), strict=True):
            device = norm(min(0.0, -math.log(host_share)), math.hypot(math.log(rest), math.sqrt(square)) / NINETY)
            at = brentq(lambda at, one=device, share=share, two=host: one.cdf(at) * two.cdf(at) - share, -9, 9)
            assert math.log(edge / step_s) == pytest.approx(at, abs=2e-3)


@pytest.mark.parametrize("call", ["add.forward", "adamw.update"])
def test_the_energy_of_what_waits_for_memory_is_its_power_times_its_time_behind_the_start(call):
    machine = Machine.load("h200-x8")
    power = machine.compute.power
    elements = [2**at for at in range(12, 30)]
    drawn_W = power.update_W if call == "adamw.update" else power.memory_W
    found = [price_compute(machine, call, ((size,),), "float32", 12 * size) for size in elements]
    for before, after in itertools.pairwise(found):
        more = drawn_W * (after.work_ps - before.work_ps)
        assert after.energy_pJ - before.energy_pJ == pytest.approx(more, rel=1e-6, abs=drawn_W)
    assert all(0 <= each.energy_pJ < drawn_W * each.work_ps for each in found)


@pytest.mark.parametrize("memory_Bps", [1e9, 1e16])
def test_the_rate_of_the_best_product_is_that_of_its_bytes_or_of_its_operations(memory_Bps):
    m, n, k = 512, 768, 1280
    compute = Compute(
        matrix_flops_per_s={"bfloat16": 1e14}, vector_flops_per_s={"float32": 1e13}, memory_Bps=memory_Bps,
        sharpness=64.0, step_clock_MHz=900.0, clock_MHz=1800.0,
    )  # fmt: skip
    device = SimpleNamespace(compute=compute, best_product=SimpleNamespace(shape=(m, n, k), dtype="bfloat16"))
    operations, size = 2 * m * n * k, 2 * (m * n + n * k + m * k)
    assert _form_rate(device) == pytest.approx(min(1e14, operations / (size / memory_Bps)), rel=1e-6)
