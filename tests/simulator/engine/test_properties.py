"""What must hold of every program without contention."""

import random
from collections import Counter
from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.price.instruction import price
from plans.lower import lower
from plans.program import Instruction, Kind, Program
from plans.schedules import make_schedule, schedule_names
from simulator import WhatIf, run_program
from tests.plans.schedules.test_schedules import chunks_of
from tests.simulator.engine.test_longest_path import random_scripts
from tests.support.handmade import Price, Script, pipeline, program_of, written_price
from tests.support.random_plans import random_plan
from tests.support.small_machine import small_machine

seeds = st.integers(0, 10**6)
few = settings(max_examples=60, deadline=None)


def end(program: Program, price=written_price, *, num_steps: int = 2, host_async: bool = True) -> int:
    return run_program(program, price, num_steps=num_steps, host_async=host_async, with_memory=False).step_end_ps[-1]


def scaled(factor: int):
    """All prices of a program times a whole number."""

    def price(instruction: Instruction, group: object) -> Price:
        return Price(*(factor * part for part in instruction.attrs.get("price", ())))

    return price


@few
@given(seeds, st.integers(2, 1000), st.booleans())
def test_scaling_all_times_scales_the_result(seed, factor, host_async):
    program = program_of(random_scripts(seed))
    one = run_program(program, written_price, num_steps=2, host_async=host_async, with_memory=False)
    many = run_program(program, scaled(factor), num_steps=2, host_async=host_async, with_memory=False)
    # a transfer's processor time is divided among its pairs, so only whole parts scale
    if all(
        instruction.attrs["price"][2:] in ((), (0,)) or instruction.kind is Kind.COLLECTIVE
        for group in program.groups
        for _, instruction in group.walk()
    ):
        assert np.array_equal(many.start_ps, factor * one.start_ps)
        assert np.array_equal(many.end_ps, factor * one.end_ps)
    assert abs(many.step_end_ps[-1] - factor * one.step_end_ps[-1]) <= factor * len(one.rank)


@few
@given(seeds, st.data())
def test_a_slower_instruction_or_rank_never_helps(seed, data):
    program = program_of(random_scripts(seed))
    host_async = data.draw(st.booleans())
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    more = data.draw(st.integers(0, 50))
    kind = data.draw(st.sampled_from([Kind.COMPUTE, Kind.COLLECTIVE, Kind.SEND]))

    def slower(instruction: Instruction, group) -> Price:
        price = written_price(instruction, group)
        if instruction.kind is not kind or rank not in group.ranks:
            return price
        return replace(price, dispatch_ps=price.dispatch_ps + more, work_ps=price.work_ps + more)

    assert end(program, slower, host_async=host_async) >= end(program, host_async=host_async)


@few
@given(seeds, st.booleans())
def test_an_instruction_without_work_and_dispatch_changes_nothing(seed, host_async):
    draw = random.Random(seed)
    scripts, wider = random_scripts(seed), random_scripts(seed)
    for script in wider:
        extra = Script(script.rank)
        for number in range(draw.randint(1, 4)):
            extra.compute(f"nothing{number}", 0, 0)
        for block in extra.blocks:
            script.blocks.insert(draw.randint(0, len(script.blocks)), block)
    before, after = (
        run_program(program_of(each), written_price, num_steps=2, host_async=host_async, with_memory=False)
        for each in (scripts, wider)
    )
    assert before.step_end_ps == after.step_end_ps
    kept = [span for span in after.spans() if "nothing" not in span.id]
    assert kept == list(before.spans())


@few
@given(seeds, st.integers(1, 3), st.booleans())
def test_every_instructions_work_is_done_once(seed, num_steps, host_async):
    program = program_of(random_scripts(seed))
    timeline = run_program(program, written_price, num_steps=num_steps, host_async=host_async, with_memory=False)
    expected: Counter[tuple] = Counter()
    for group in program.groups:
        (rank,) = group.ranks
        for block, instruction in group.walk():
            price, id_ = written_price(instruction, group), f"{block.label}/{instruction.name}"
            for step in range(num_steps):
                if instruction.kind is Kind.COMPUTE:
                    work = price.work_ps if host_async else price.work_ps + price.dispatch_ps
                    expected[rank, step, id_, "compute", work] += 1
                elif instruction.kind is Kind.COLLECTIVE:
                    expected[rank, step, id_, "comm", None] += 1
    found = Counter(
        (span.rank, span.step, span.id, span.stream, span.end_ps - span.start_ps if span.stream == "compute" else None)
        for span in timeline.spans()
        if span.stream == "compute" or (span.stream == "comm" and span.call == "all_reduce")
    )
    assert found == expected
    # a collective takes what its most expensive member says, from the arrival of the last one
    longest: dict[str, int] = {}
    for group in program.groups:
        for block, instruction in group.walk():
            if instruction.kind is Kind.COLLECTIVE:
                id_, price = f"{block.label}/{instruction.name}", written_price(instruction, group)
                longest.setdefault(id_, 0)
    for id_ in longest:
        prices = [
            written_price(instruction, group)
            for group in program.groups
            for block, instruction in group.walk()
            if f"{block.label}/{instruction.name}" == id_
        ]
        wanted = max(price.work_ps for price in prices) + max(price.cpu_ps for price in prices)
        spans = [span for span in timeline.spans() if span.id == id_ and span.stream == "comm"]
        assert {span.end_ps - span.start_ps for span in spans} == {wanted}
        for step in range(num_steps):
            assert len({(span.start_ps, span.end_ps) for span in spans if span.step == step}) == 1


@few
@given(
    st.sampled_from(["gpipe", "1f1b", "zb_h1", "zb_h2"]), st.integers(2, 6), st.integers(1, 8), st.integers(1, 30),
    st.integers(1, 30),
)  # fmt: skip
def test_the_bubble_falls_with_micro_batches(name, num_ranks, more, forward, backward):
    """At times of B and W with which the schedules have their closed forms: a whole backward as B, or I = W = F."""
    fractions = []
    for count in (num_ranks * 2, num_ranks * 2 + more, num_ranks * 2 + 2 * more):
        schedule = make_schedule(name, num_ranks, count)
        work = {"F": forward, "B": backward, "I": forward, "W": forward}
        program = pipeline(schedule.order, schedule.placement, work)
        timeline = run_program(program, written_price, with_memory=False)
        fractions.append(timeline.bubble_fraction)
    # without a bubble (ZB-H2) only rounding is left to compare
    assert fractions[0] > fractions[1] > fractions[2] or max(fractions) < 1e-12


@few
@given(st.integers(2, 5), st.integers(2, 10), st.integers(0, 4), st.integers(0, 40), st.integers(1, 20))
def test_one_slower_stage_never_helps(num_ranks, num_micro_batches, stage, more, work):
    schedule = make_schedule("1f1b", num_ranks, num_micro_batches)
    program = pipeline(schedule.order, schedule.placement, {"F": work, "B": 2 * work}, transfer=(0, 3))
    slow = stage % num_ranks

    def price(instruction: Instruction, group) -> Price:
        own = written_price(instruction, group)
        is_slow = slow in group.ranks and instruction.kind is Kind.COMPUTE
        return replace(own, work_ps=own.work_ps + more) if is_slow else own

    longer, before = end(program, price, num_steps=1), end(program, num_steps=1)
    assert before <= longer <= before + 2 * more * (num_micro_batches + num_ranks)
    # the slow stage itself has at least this to do
    assert longer >= num_micro_batches * (3 * work + 2 * more)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.05, 20), st.floats(0.05, 20), st.integers(0, 200), st.sampled_from(["bandwidth", "latency"]))
def test_time_falls_or_stays_when_links_are_faster(first, second, seed, knob):
    """Of plans drawn at random, on a machine that shares no links: more bandwidth or less latency never costs time."""
    low, high = sorted((first, second), reverse=knob == "latency")
    rates = dict.fromkeys(("float32", "float64", "bfloat16"), 1e12)
    compute = msgspec.structs.replace(small_machine().compute, matrix_flops_per_s=rates, vector_flops_per_s=rates)
    dispatch_s = dict.fromkeys(small_machine().dispatch_s, (seed % 5) * 1e-7)
    machine = small_machine(64, latency_s=1e-7, compute=compute, dispatch_s=dispatch_s)
    program = lower(random_plan(seed))

    def length(factor: float) -> int:
        changed = WhatIf(**{knob: factor}).machine(machine)
        return end(program, lambda line, group: price(line, group, changed, program.num_ranks))

    assert length(high) <= length(low)


@few
@given(st.sampled_from(schedule_names()), st.integers(2, 4), st.integers(0, 3), st.integers(1, 30), st.integers(0, 40))
def test_a_slower_stage_never_helps_any_schedule(name, num_ranks, slow, work, more):
    schedule = make_schedule(name, num_ranks, 2 * num_ranks, virtual=chunks_of(name))
    program = pipeline(schedule.order, schedule.placement, {"F": work, "B": 2 * work, "I": work, "W": work})
    on = slow % schedule.num_ranks

    def price_of(line: Instruction, group) -> Price:
        own = written_price(line, group)
        is_slow = on in group.ranks and line.kind is Kind.COMPUTE
        return replace(own, work_ps=own.work_ps + more) if is_slow else own

    assert end(program, price_of, num_steps=1) >= end(program, num_steps=1)
