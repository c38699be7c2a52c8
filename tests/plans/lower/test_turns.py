"""Slices and pairs, which take turns on a rank: as degrees, as plans that train, and as forecasts."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from costmodels import Machine
from plans.degrees import Degrees, check, describe
from plans.degrees.file import degrees_to_json, values_from_json
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.lower import lower
from plans.lower.lower import schedule_of
from plans.model.transformer import TransformerConfig, sizes_of, transformer
from plans.optimizer import Optimizer
from plans.program import GroupProgram, Scope
from simulator import simulate
from simulator.estimate import estimate
from simulator.forecast import forecast
from simulator.forecast.predict import step_forecast
from simulator.forecast.program import bodies_of_program
from tests.plans.test_uniform import GPT, LLAMA, SGD, check_training

CONFIG = TransformerConfig(
    name="small", num_layers=4, hidden=1024, num_heads=16, num_kv_heads=8, ffn=2816, vocab=8000, seq=512,
    dtype="bfloat16",
)  # fmt: skip
ADAMW = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=1)

TURNS = {
    "slices, tp 2": {"tp": 2, "micro_batch": 2, "global_batch": 4, "interleave": 2},
    "slices, tp 2 dp 2 pp 2": {
        "tp": 2, "dp": 2, "pp": 2, "micro_batch": 2, "global_batch": 8, "interleave": 2, "sequence_parallel": True,
    },
    "three slices, cp 2": {"cp": 2, "micro_batch": 3, "global_batch": 6, "interleave": 3},
    "pairs, pp 2": {"pp": 2, "schedule": "dualpipe_v", "global_batch": 6, "overlap_pairs": True},
    "pairs, pp 2 tp 2": {"pp": 2, "tp": 2, "schedule": "dualpipe_v", "global_batch": 6, "overlap_pairs": True},
    "slices and pairs": {
        "pp": 2, "tp": 2, "schedule": "dualpipe_v", "micro_batch": 2, "global_batch": 12, "overlap_pairs": True,
        "interleave": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "machine"),
    [*((name, "h200-x8") for name in TURNS), ("slices, tp 2 dp 2 pp 2", "torus-4x4x4"), ("pairs, pp 2", "torus-4x4x4")],
)
def test_a_forecast_equals_the_engine_with_every_rank(name: str, machine: str) -> None:
    degrees, own = Degrees(optimizer=ADAMW, **TURNS[name]), Machine.load(machine)
    program = lower(plan_of(degrees, transformer(CONFIG, batch_size=degrees.global_batch)))
    timeline = simulate(program, own, num_steps=2, with_memory=False, fold_ranks=False)
    found = forecast(CONFIG, degrees, own)
    assert found.step_s == timeline.step_interval_s
    assert (found.low_s, found.high_s) == (timeline.low_s, timeline.high_s)
    assert found.exposed_comm_s == pytest.approx(timeline.exposed_comm_s, rel=1e-12)
    assert found.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=1e-12)
    assert sum(found.memory.values()) == found.peak_bytes
    assert len(found.rank_s) == degrees.pp


@pytest.mark.parametrize("name", TURNS)
def test_the_peak_is_that_of_the_program_step_by_step(name: str) -> None:
    degrees = Degrees(optimizer=ADAMW, **TURNS[name])
    program = lower(plan_of(degrees, transformer(CONFIG, batch_size=degrees.global_batch)))
    assert forecast(CONFIG, degrees, Machine.load("h200-x8")).peak_bytes == max(map(_peak_bytes, program.groups))


def _peak_bytes(group: GroupProgram) -> int:
    """Every value from its first mention to its release, one instruction after the other."""

    def key(name: str, micro_batch: int) -> tuple[str, int]:
        return name, micro_batch if group.values[name].scope in (Scope.MICRO, Scope.BODY) else -1

    kept = sum(value.size_bytes for value in group.values.values() if value.scope is Scope.KEPT)
    alive: dict[tuple[str, int], set[str]] = {}  # memory -> the values that share it
    held = most = 0
    for block, line in group.walk():
        micro_batch = line.attrs.get("micro_batch", block.micro_batch)
        for name in (*line.outputs, *line.frees):
            base = name
            while group.values[base].shares is not None:
                base = str(group.values[base].shares)
            if group.values[base].scope is Scope.KEPT or group.values[name].scope is Scope.KEPT:
                continue
            memory = alive.setdefault(key(base, micro_batch), set())
            size = group.values[base].size_bytes
            if name in line.outputs:
                held += 0 if memory else size
                memory.add(name)
                most = max(most, held)
            if name in line.frees:
                memory.remove(name)
                held -= 0 if memory else size
    return kept + most


@pytest.mark.parametrize("name", TURNS)
def test_plans_of_degrees_that_take_turns_train_as_one_device_does(name: str) -> None:
    config = replace((GPT, LLAMA)["pairs" in name], num_layers=4)
    degrees = Degrees(optimizer=SGD, **TURNS[name])
    check_training(plan_of(degrees, transformer(config, batch_size=degrees.global_batch)), config)


def test_slices_and_pairs_are_printed_and_saved() -> None:
    degrees = Degrees(**TURNS["slices and pairs"])
    assert "2 slices, overlapped pairs" in describe(degrees)
    values = values_from_json(degrees_to_json(degrees), "file.json")
    assert Degrees.of(values, global_batch=12) == degrees
    plan = plan_of(degrees, transformer(CONFIG, batch_size=12))
    assert (plan.interleave, plan.overlap_pairs) == (2, True)


def test_unsupported_slices_and_pairs_are_refused_in_one_sentence() -> None:
    with pytest.raises(TwofoldError, match=r"^interleave 2 does not divide the micro-batch of 3: 3 % 2 != 0$"):
        Degrees(micro_batch=3, global_batch=3, interleave=2)
    alone = Degrees(pp=2, global_batch=8, overlap_pairs=True)
    with pytest.raises(TwofoldError, match=r"schedule '1f1b' of pp 2 and 8 micro-batches runs no forward .* use"):
        check(alone, sizes_of(CONFIG))


def test_bodies_and_estimates_refuse_turns() -> None:
    machine = Machine.load("h200-x8")
    for name, said in (("slices, tp 2", "interleaved slices"), ("pairs, pp 2 tp 2", "the two actions of pairs")):
        degrees = Degrees(optimizer=ADAMW, **TURNS[name])
        plan = plan_of(degrees, transformer(CONFIG, batch_size=degrees.global_batch))
        with pytest.raises(TwofoldError, match=f"{said} alternate, .* simulate the plan"):
            bodies_of_program(lower(plan), schedule_of(plan), machine)
        with pytest.raises(TwofoldError, match="do not support slices or pairs"):
            step_forecast(CONFIG, degrees, machine)
        with pytest.raises(TwofoldError, match="slices and pairs can only be forecast"):
            estimate(CONFIG, degrees, machine)
        other = msgspec.structs.replace(plan, interleave=1, overlap_pairs=False)
        bodies_of_program(lower(other), schedule_of(other), machine)
