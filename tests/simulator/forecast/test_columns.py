"""Pipelines evaluated fast against the SimPy engine, to the picosecond."""

import random
from dataclasses import replace

import pytest

from plans.schedules import make_schedule, schedule_names
from simulator import run_program
from simulator.forecast.columns import pipeline_times
from tests.support.handmade import written_price
from tests.support.pipeline_programs import CHOOSE, Drawn, random_pipeline, random_schedule, rank_ends


@pytest.mark.parametrize("name", [*schedule_names(), "custom"])
def test_equals_the_engine(name):
    for seed in range(12):
        draw = random.Random(f"{name}{seed}")
        schedule = random_schedule(draw, name)
        times = Drawn(draw, with_channel=seed % 3 > 0)
        program, costs = random_pipeline(schedule, times)
        timeline = run_program(program, written_price, num_steps=2, with_memory=False)
        first = pipeline_times(schedule, costs)
        assert first.end_ps.tolist() == rank_ends(timeline, schedule.num_ranks, 0), seed
        second = pipeline_times(schedule, costs, start_ps=first.end_ps)
        assert second.end_ps.tolist() == rank_ends(timeline, schedule.num_ranks, 1), seed


@pytest.mark.parametrize("name", schedule_names())
def test_repetition_is_exact(name):
    """A schedule of another name is no family: all of its micro-batches are evaluated."""
    repeated = 0
    for seed in range(5):
        draw = random.Random(f"{name}{seed}")
        num_ranks = draw.randint(1, 5)
        virtual = draw.randint(1, 3) if name in CHOOSE else None
        schedule = make_schedule(name, num_ranks, num_ranks * draw.randint(12, 30), virtual=virtual)
        dispatch = draw.choice([(0,), (0, 1, 4), (5, 9)])  # some hosts are slower than what they issue
        times = Drawn(draw, with_channel=seed % 3 > 0, dispatch=dispatch)
        _, costs = random_pipeline(schedule, times)
        custom = replace(schedule, name="custom")
        fast = pipeline_times(schedule, costs)
        whole = pipeline_times(custom, costs)
        assert int(whole.evaluated) == schedule.num_micro_batches
        assert fast.end_ps.tolist() == whole.end_ps.tolist(), seed
        assert fast.busy_ps.tolist() == whole.busy_ps.tolist(), seed
        repeated += int(fast.evaluated) < schedule.num_micro_batches
    assert repeated > 2
