"""Slices and pairs in the search over degrees: tried where communication is exposed, kept where they are faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodels import Machine, executing
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import TransformerConfig
from plans.optimizer import Optimizer
from search.devices import Pins, Problem, solve
from search.devices.confirm import plan_of
from search.devices.critical import critical_path_s
from search.devices.turns import turns
from simulator import WhatIf, simulate
from simulator.forecast import forecast
from simulator.forecast.predict import step_forecast
from simulator.forecast.turns import program_of
from simulator.stacks import stack_named

CONFIG = TransformerConfig(
    name="wide", num_layers=4, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000, seq=2048,
    dtype="bfloat16",
)  # fmt: skip


def problem(devices: int = 4, batch: int = 8, bandwidth: float = 0.3, **pins: object) -> Problem:
    """On replayed steps, with links that are slower than they are, of chips that have one clock in all steps."""
    machine = WhatIf(bandwidth=bandwidth).machine(executing(Machine.load("h100-sxm-x8"), "graph"))
    return Problem(config=CONFIG, machine=machine, num_devices=devices, global_batch=batch, pins=Pins(**pins))


TENSOR = {"tp": 4, "micro_batch": 4, "recompute": "none"}


def test_slices_are_chosen_where_tensor_parallel_messages_are_exposed() -> None:
    asked = problem(**TENSOR)
    found = solve(asked)
    plain = solve(problem(**TENSOR, interleave=1))
    assert found.best.degrees.interleave == 2
    assert plain.best.degrees.interleave == 1
    assert found.best.forecast.step_s < plain.best.forecast.step_s
    assert found.num_proven == 0
    assert plain.num_proven == 1
    assert "has no slices or pairs" in found.summary()
    timeline = simulate(
        lower(plan_of(asked, found.best)), asked.machine, num_steps=2, with_memory=False, fold_ranks=False
    )
    assert found.best.forecast.step_s == timeline.step_interval_s


def test_the_choice_is_the_faster_of_the_two_by_brute_force() -> None:
    """Every configuration of a small space, with and without slices."""
    space = {"pp": 1, "cp": 1, "recompute": "none", "zero": 1}
    asked = problem(**space)
    best = solve(asked).best.forecast.step_s
    least = float("inf")
    for tp in (1, 2, 4):
        for size in (1, 2, 4, 8):
            for split in (False, True) if tp > 1 else (False,):
                for slices in (1, 2):
                    values = {**space, "tp": tp, "dp": 4 // tp, "micro_batch": size, "sequence_parallel": split}
                    if 8 % (4 // tp * size) or size % slices:
                        continue
                    degrees = asked.degrees({**values, "interleave": slices})
                    seen = forecast(CONFIG, degrees, asked.machine)
                    if seen.peak_bytes <= asked.limit_bytes:
                        least = min(least, seen.step_s)
    assert best == least


def test_slices_are_left_where_nothing_is_exposed_or_hosts_take_longer() -> None:
    alone = problem(devices=1, batch=4)
    assert not turns(alone, solve(alone).plans).candidates
    machine = WhatIf(dispatch=30.0).machine(Machine.load("h200-x8"))  # twice the calls, and the host sets the pace
    slow = Problem(config=CONFIG, machine=machine, num_devices=4, global_batch=8, pins=Pins(**TENSOR))
    found = solve(slow)
    assert found.best.degrees.interleave == 1
    tried = [each for each in found.rejected if "2 slices" in each.what]
    assert tried
    assert all(each.reason == "too little gain in a step with few blocks and micro-batches" for each in tried)


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize("turned", [{"interleave": 2}, {"schedule": "dualpipe_v", "overlap_pairs": True}])
def test_a_step_with_slices_or_pairs_has_at_least_the_operations_counted_without(turned, level) -> None:
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level)
    degrees = Degrees(
        dp=2, tp=2, pp=2, micro_batch=2, global_batch=32, optimizer=optimizer, recompute="selective", **turned
    )
    plain = replace(degrees, interleave=1, overlap_pairs=False)
    counted = step_forecast(CONFIG, plain, Machine.load("h200-x8")).num_operations
    program, usual = program_of(CONFIG, degrees), program_of(CONFIG, plain)
    written, without = (
        sum(len(block.body.instructions) for group in each.groups for block in group.blocks)
        for each in (program, usual)
    )  # fmt: skip
    assert 0.9 * without < counted <= without
    assert counted <= written


def test_long_steps_are_not_lowered_to_find_that_they_are_too_long() -> None:
    wide = Problem(
        config=replace(CONFIG, num_layers=64), machine=Machine.load("h100-sxm-x64"), num_devices=64, global_batch=2048,
        pins=Pins(tp=4, pp=8, cp=1, micro_batch=2, recompute="none", zero=1, schedule="dualpipe_v"),
    )  # fmt: skip
    tried = [each for each in solve(wide).rejected if "forecast only where slices or pairs are pinned" in each.reason]
    assert {each.reason.split(" instructions")[0] for each in tried} == {"its step of more than 100,000"}


def test_pinned_slices_and_pairs_are_what_is_returned() -> None:
    found = solve(problem(**TENSOR, interleave=4))
    assert {each.degrees.interleave for each in found.plans} == {4}
    pairs = solve(problem(pp=2, tp=2, micro_batch=1, overlap_pairs=True, recompute="none"))
    assert {(each.degrees.schedule, each.degrees.overlap_pairs) for each in pairs.plans} == {("dualpipe_v", True)}
    with pytest.raises(TwofoldError, match=r"no configuration supports the given slices or pairs: .* use dualpipe_v"):
        solve(problem(pp=2, tp=2, schedule="1f1b", overlap_pairs=True))
    with pytest.raises(TwofoldError, match="interleave 3 does not divide the micro-batch of 4"):
        problem(**TENSOR, interleave=3)
    with pytest.raises(TwofoldError, match="only twofold supports slices and pairs; omit them for megatron"):
        Problem(
            config=CONFIG, machine=Machine.load("h200-x8"), num_devices=4, global_batch=8, pins=Pins(interleave=2),
            stack=stack_named("megatron"),
        )  # fmt: skip


def test_the_critical_path_of_slices_adds_up_to_the_step() -> None:
    asked = problem(**TENSOR, interleave=2)
    best = solve(asked).best
    spent = critical_path_s(asked, best)
    assert sum(spent.values()) == pytest.approx(best.forecast.step_s, rel=1e-9)
    assert spent["backward compute"] > spent["forward compute"] > 0
    assert isinstance(best.degrees, Degrees)
