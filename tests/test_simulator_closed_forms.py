"""Pipelines against the closed forms of the literature, exactly: integer times, nothing approximate."""

from fractions import Fraction

import pytest
from handmade import pipeline, written_price

from plans.schedules import make_schedule
from plans.timeline import Timeline
from simulator import composition, run_program

SIZES = [(2, 2), (2, 5), (3, 3), (4, 8), (5, 7), (8, 24)]
WORK = {"F": 7, "B": 19, "I": 12, "W": 7}
WHOLE = WORK["F"] + WORK["B"]


def step_of(name: str, num_ranks: int, num_micro: int, work: dict[str, int], virtual: int = 1, **settings) -> Timeline:
    schedule = make_schedule(name, num_ranks, num_micro, virtual=virtual)
    return run_program(pipeline(schedule.order, schedule.placement, work), written_price, **settings)


def length_ps(timeline: Timeline) -> int:
    return timeline.step_end_ps[-1] - timeline.step_start_ps[-1]


@pytest.mark.parametrize("host_async", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_micro"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_step_and_bubble_of_gpipe_and_1f1b(name, num_ranks, num_micro, host_async):
    timeline = step_of(name, num_ranks, num_micro, WORK, host_async=host_async)
    assert length_ps(timeline) == (num_micro + num_ranks - 1) * WHOLE
    assert timeline.bubble_fraction == pytest.approx(
        float(Fraction(num_ranks - 1, num_micro + num_ranks - 1)), rel=1e-12
    )
    assert [entry.bubble_ps for entry in composition(timeline)] == [(num_ranks - 1) * WHOLE] * num_ranks


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_later_steps_are_as_long_and_follow_at_once(name):
    timeline = step_of(name, 4, 8, WORK, num_steps=3)
    ends = timeline.step_end_ps
    assert [ends[0], ends[1] - ends[0], ends[2] - ends[1]] == [(8 + 3) * WHOLE] * 3
    assert length_ps(timeline) == (8 + 3) * WHOLE
    assert timeline.step_interval_s == pytest.approx((8 + 3) * WHOLE / 1e12, rel=1e-12)


@pytest.mark.parametrize(("num_ranks", "num_micro", "virtual"), [(2, 4, 2), (4, 8, 2), (3, 6, 3), (4, 16, 4)])
def test_interleaved_1f1b_divides_the_bubble_by_the_chunks(num_ranks, num_micro, virtual):
    work = {"F": 6 * 4, "B": 13 * 4}
    timeline = step_of("interleaved-1f1b", num_ranks, num_micro, work, virtual)
    per_chunk = work["F"] + work["B"]
    assert length_ps(timeline) == num_micro * virtual * per_chunk + (num_ranks - 1) * per_chunk


@pytest.mark.parametrize(("num_ranks", "num_micro"), [(2, 6), (4, 12), (6, 18)])
def test_zb_h1_hides_a_third_of_the_bubble(num_ranks, num_micro):
    work = {"F": 10, "B": 20, "I": 10, "W": 10}
    timeline = step_of("zb-h1", num_ranks, num_micro, work)
    assert length_ps(timeline) == num_micro * 30 + (num_ranks - 1) * (10 + 10 - 10)


@pytest.mark.parametrize(("num_ranks", "num_micro"), SIZES)
def test_activations_kept_by_gpipe_and_1f1b(num_ranks, num_micro):
    def kept(name):
        return [peak.peak_bytes // 4 for peak in step_of(name, num_ranks, num_micro, WORK).memory]

    assert kept("gpipe") == [num_micro] * num_ranks
    assert kept("1f1b") == [min(num_micro, num_ranks - stage) for stage in range(num_ranks)]


def test_bubble_falls_with_micro_batches():
    bubbles = [step_of("1f1b", 4, num_micro, WORK).bubble_fraction for num_micro in range(4, 12)]
    assert bubbles == sorted(bubbles, reverse=True)
    assert len(set(bubbles)) == len(bubbles)


def test_a_slower_stage_adds_its_delay_per_micro_batch():
    num_ranks, num_micro, factor = 4, 8, 2.0
    schedule = make_schedule("1f1b", num_ranks, num_micro)
    program = pipeline(schedule.order, schedule.placement, WORK)
    slow = run_program(
        program, written_price, stretch=lambda rank, step, size: factor if rank == num_ranks - 1 else None
    )
    # the last stage has no slack: all of it is on the longest path, once
    assert length_ps(slow) == (num_micro + num_ranks - 1) * WHOLE + num_micro * WHOLE


def test_transfers_of_no_length_and_no_dispatch_change_nothing():
    schedule = make_schedule("1f1b", 3, 5)
    bare = run_program(pipeline(schedule.order, schedule.placement, WORK), written_price)
    priced = run_program(pipeline(schedule.order, schedule.placement, WORK, transfer=(0, 0, 0)), written_price)
    assert bare.end_ps.tolist() == priced.end_ps.tolist()


@pytest.mark.parametrize("hop", [1, 3, 11])
def test_transfers_lengthen_the_ramp_of_a_single_micro_batch(hop):
    schedule = make_schedule("gpipe", 4, 1)
    timeline = run_program(pipeline(schedule.order, schedule.placement, WORK, transfer=(0, hop)), written_price)
    assert length_ps(timeline) == 4 * WHOLE + 2 * 3 * hop
