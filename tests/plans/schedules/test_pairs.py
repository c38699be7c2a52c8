"""Pairs of DualPipe-V at once: the same training, and the communication of one beside the compute of the other."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from costmodels.machine.machine import Link
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, plan_from_json, plan_to_json
from plans.program import Kind
from plans.schedules import Schedule, ScheduleError, make_schedule, schedule_names, validate
from plans.schedules.pairs import overlapped_pairs
from simulator import check_program, simulate
from tests.plans.schedules.test_torch import torch_rows
from tests.plans.test_uniform import GPT, LLAMA, check_training, planned
from tests.support.small_machine import small_machine

FOUR = dataclasses.replace(LLAMA, num_layers=4)
ZERO_3 = Optimizer(settings={"lr": 0.1}, parallel_level=3, threshold_bytes=1)


def paired(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, overlap_pairs=True)


def labels(plan: Plan, group: int = 0) -> list[str]:
    return [block.label for block in lower(plan).groups[group].blocks]


# --- which actions are pairs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_the_pairs_are_those_of_torch(num_ranks: int) -> None:
    for num_micro_batches in (2 * num_ranks, 2 * num_ranks + 2, 5 * num_ranks + 1):
        rows, _ = torch_rows("DualPipeV", num_ranks, num_micro_batches, 2)
        schedule = make_schedule("dualpipe_v", num_ranks, num_micro_batches)
        for row, order, pairs in zip(rows, schedule.order, overlapped_pairs(schedule), strict=True):
            theirs = [
                tuple(str(part) for part in action.sub_actions) for action in row if action and action.sub_actions
            ]
            assert [(str(order[place]), str(order[place + 1])) for place in sorted(pairs)] == theirs
            assert theirs


def test_text_keeps_the_pairs() -> None:
    for name in schedule_names():
        schedule = make_schedule(name, 3, 6, virtual=2 if name.startswith(("interleaved", "looped")) else None)
        assert overlapped_pairs(Schedule.from_text(schedule.to_text())) == overlapped_pairs(schedule)
    assert not any(overlapped_pairs(make_schedule("zb_v", 3, 6)))


def test_pairs_that_would_wait_for_each_other_are_refused() -> None:
    # 0F2 waits as one of a pair for 2B1, that for 3B1, and on rank 1 this comes after 1F2, which waits for 0F2.
    schedule = Schedule.from_text(
        "0F0,2F0,2B0,0B0,0F1,2F1,0F2,2B1,2F2,2B2,0B1,0B2\n1F0,3F0,3B0,1B0,1F1,3F1,1F2,3B1,1B1,3F2,3B2,1B2"
    )
    validate(schedule)
    with pytest.raises(ScheduleError, match="wait for each other at 0F2, 1F2; run it without overlap_pairs"):
        overlapped_pairs(schedule)


# --- training --------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "pp 1 tp 2": {"pp": 1, "tp": 2, "virtual": 2},
    "pp 2 tp 2": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "pp 2 tp 2, recompute": {"pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "selective"},
    "pp 2 dp 2, level 3": {"pp": 2, "dp": 2, "zero": 3, "optimizer": ZERO_3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_pairs_train_as_one_device_does(name: str) -> None:
    options: dict[str, Any] = {"schedule": "dualpipe_v", "virtual": 2, "micro_batch": 1} | OPTIONS[name]
    plan = paired(planned(FOUR, batch=8 if "dp" not in options else 16, **options))
    assert lower(plan) != lower(msgspec.structs.replace(plan, overlap_pairs=False))
    check_program(lower(plan))
    check_training(plan, FOUR)


def test_a_weight_that_both_gather_is_there_once() -> None:
    """At level 3 stages 0 and 3, on rank 0, both gather the tied table; only the backward of stage 0 does without."""
    config = dataclasses.replace(GPT, num_layers=4, tied=True)
    options = {"schedule": "dualpipe_v", "virtual": 2, "micro_batch": 1, "zero": 3, "optimizer": ZERO_3}
    plan = paired(planned(config, batch=16, pp=2, dp=2, **options))
    pairs = [(first, second) for first, second in pairwise(labels(plan)) if first[1] == "F" and second[1] == "B"]
    assert {f"{first[:2]} {second[:2]}" for first, second in pairs} == {"0F 3B", "3F 0B"}
    cut = {label[:2] for label, count in Counter(labels(plan)).items() if count > 1}
    assert cut == {"3F", "0B"}
    check_training(plan, config)


# --- time ------------------------------------------------------------------------------------------------------------

SINGLE = dataclasses.replace(FOUR, hidden=256, ffn=1024, seq=64, dtype="float32")


def step_s(plan: Plan) -> tuple[float, float]:
    """Of the engine: one after the other, and at once."""
    machine = small_machine(16)
    return simulate(lower(plan), machine).step_s, simulate(lower(paired(plan)), machine).step_s


def test_communication_of_one_overlaps_compute_of_the_other() -> None:
    plan = paired(planned(SINGLE, batch=8, schedule="dualpipe_v", virtual=2, micro_batch=1, tp=4))
    lines = [(block.label, line) for block, line in lower(plan).groups[0].walk() if block.label in ("0F2", "1B1")]
    beside = 0
    for at, (label, line) in enumerate(lines):
        if line.kind is not Kind.COLLECTIVE or line.part != "C":
            continue
        behind = lines[at + 1 :]
        waited = next(place for place, (_, each) in enumerate(behind) if each.waits == line.token)
        beside += any(other != label and each.flops for other, each in behind[:waited])
    issued = [label for label, line in lines if line.kind is Kind.COLLECTIVE]
    assert set(issued) == {"0F2", "1B1"}
    assert beside >= 2 * min(issued.count(label) for label in ("0F2", "1B1")) - 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_steps_are_shorter_with_pairs(sequence_parallel: bool) -> None:
    """On one group of ranks the pipeline's order plays no part: a third of all exposed communication hides, or more."""
    degrees = {"tp": 4, "sequence_parallel": sequence_parallel}
    plan = planned(SINGLE, batch=8, schedule="dualpipe_v", virtual=2, micro_batch=1, **degrees)
    one_by_one, at_once = step_s(plan)
    at_no_cost = simulate(
        plan, small_machine(16, links=(Link(name="all", ranks=64, latency_s=0.0, bandwidth_Bps=1e18),))
    ).step_s
    assert at_no_cost < at_once < one_by_one
    assert one_by_one - at_once > (one_by_one - at_no_cost) / 3


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_without_collectives_pairs_take_as_long_as_one_after_the_other(num_ranks: int) -> None:
    plan = planned(SINGLE, batch=8, schedule="dualpipe_v", virtual=2, micro_batch=1, pp=num_ranks)
    one_by_one, at_once = step_s(plan)
    assert at_once == one_by_one


def test_folded_ranks_take_as_long() -> None:
    plan = paired(planned(SINGLE, batch=8, schedule="dualpipe_v", virtual=2, micro_batch=1, tp=4))
    machine = small_machine(16)
    assert simulate(lower(plan), machine, fold_ranks=True).step_s == simulate(lower(plan), machine).step_s


def test_a_plan_file_keeps_the_choice() -> None:
    plan = paired(planned(SINGLE, batch=8, schedule="dualpipe_v", virtual=2, micro_batch=1))
    assert plan_from_json(plan_to_json(plan)) == plan
