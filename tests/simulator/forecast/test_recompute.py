"""Some blocks of every chunk recompute, the others keep everything: forecasts against the engine, and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from costmodels import Machine
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.optimizer import Optimizer
from search import uniform_plan
from simulator import simulate
from simulator.forecast import forecast, forecast_grid

CONFIG = TransformerConfig(
    num_layers=8, hidden=2048, num_heads=16, num_kv_heads=8, ffn=8192, vocab=32_000, seq=2048, dtype="bfloat16"
)


def machine(slower: float = 1.0) -> Machine:
    found = Machine.load("a100-80gb-x4")
    links = [msgspec.structs.replace(link, bandwidth_Bps=link.bandwidth_Bps / slower) for link in found.links]
    return msgspec.structs.replace(found, links=tuple(links))


def optimizer(level: int = 0) -> Optimizer:
    return Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level, bucket_bytes=0)


@pytest.mark.parametrize(
    ("degrees", "level", "mode", "count", "slower"),
    [
        ({"dp": 4}, 0, "full", 3, 1),
        ({"dp": 4}, 0, "full", 4, 30),  # the reduction of gradients is what takes the time
        ({"dp": 2, "tp": 2, "sequence_parallel": True}, 1, "selective_op", 5, 1),
        ({"dp": 2, "tp": 2, "sequence_parallel": True}, 1, "memory_bound", 5, 1),
        ({"pp": 4}, 0, "full", 1, 1),
        ({"pp": 2, "tp": 2, "schedule": "zb_h1"}, 0, "full", 2, 1),
        ({"pp": 2, "dp": 2, "schedule": "interleaved_1f1b", "virtual": 2}, 2, "full", 1, 1),
        ({"dp": 4}, 3, "selective", 6, 1),
    ],
)  # fmt: skip
def test_two_kinds_of_blocks_are_forecast_as_the_engine_runs_them(
    degrees: dict[str, Any], level: int, mode: str, count: int, slower: float
) -> None:
    given = {"micro_batch": 1, "optimizer": optimizer(level), "recompute": mode, "recompute_layers": count, **degrees}
    chunks = degrees.get("pp", 1) * degrees.get("virtual", 1)
    asked = machine(slower)
    plan = uniform_plan(
        transformer(CONFIG, batch_size=8), asked, layers_per_stage=[8 // chunks] * chunks, **given
    )  # fmt: skip
    expected = simulate(lower(plan), asked, num_steps=1)
    stated = Degrees(global_batch=8, **given)
    found = forecast(CONFIG, stated, asked)
    assert found.step_s == pytest.approx(expected.step_s, rel=0.02 if slower == 1 else 0.06)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.04 if level < 3 else 0.07)
    together = forecast_grid(CONFIG, [stated, stated], asked)[1]
    assert (together.step_s, together.peak_bytes) == (pytest.approx(found.step_s, rel=1e-9), found.peak_bytes)


def test_more_blocks_that_recompute_take_longer_and_keep_less() -> None:
    rows = [
        forecast(CONFIG, Degrees(dp=4, global_batch=8, optimizer=optimizer(), **more), machine())
        for more in (
            {}, *({"recompute": "full", "recompute_layers": count} for count in (1, 4, 7)), {"recompute": "full"}
        )
    ]  # fmt: skip
    assert sorted(row.step_s for row in rows) == [row.step_s for row in rows]
    assert sorted((row.memory["activation"] for row in rows), reverse=True) == [
        row.memory["activation"] for row in rows
    ]  # fmt: skip


def test_all_blocks_of_a_chunk_are_as_no_number_at_all() -> None:
    every, stated = (
        forecast(
            CONFIG, Degrees(pp=2, global_batch=4, recompute="full", recompute_layers=count, optimizer=optimizer()),
            machine(),
        )
        for count in (None, 4)
    )  # fmt: skip
    assert (every.step_s, every.peak_bytes) == (stated.step_s, stated.peak_bytes)


def test_blocks_without_experts_come_first() -> None:
    experts = Experts(num_experts=4, top_k=2, ffn=1024, num_dense_layers=2)
    config = replace(CONFIG, num_layers=4, experts=experts)
    plan = uniform_plan(transformer(config, batch_size=4), machine(), recompute="full", recompute_layers=3)
    layers = {int(name.split(".")[1]) for name in plan.recompute}
    assert layers == {0, 1, 2}
    rows = [
        forecast(config, Degrees(global_batch=4, recompute="full", recompute_layers=count), machine()).peak_bytes
        for count in (1, 2, 3)
    ]
    assert rows[0] > rows[1] > rows[2]


def test_the_plan_recomputes_the_first_blocks_of_every_chunk() -> None:
    plan = uniform_plan(
        transformer(CONFIG, batch_size=4), machine(), pp=2, virtual=2, schedule="interleaved_1f1b", micro_batch=1,
        recompute="full", recompute_layers=1, layers_per_stage=(2, 2, 2, 2),
    )  # fmt: skip
    assert {int(name.split(".")[1]) for name in plan.recompute} == {0, 2, 4, 6}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recompute": "full", "recompute_layers": 0}, "at least 1"),
        ({"recompute": "full", "recompute_layers": True}, "at least 1"),
        ({"recompute_layers": 2}, "recompute is none"),
    ],
)
def test_meaningless_numbers_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        Degrees(**values)
    with pytest.raises(TwofoldError, match=message):
        uniform_plan(transformer(CONFIG, batch_size=1), machine(), **values)
