"""Pipelines against the closed forms of the literature, exactly: integer times, nothing approximate."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.schedules import Schedule, make_schedule, peak_in_flight, schedule_names
from plans.timeline import Timeline
from simulator import composition, run_program
from tests.plans.schedules.test_schedules import any_times, chunks_of, schedules, spans_of, work_of_step
from tests.support.handmade import pipeline, written_price

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
        program, written_price, slowdown=lambda rank, step, size: factor if rank == num_ranks - 1 else None
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


# ------------------------------------------------------------------------- every schedule, in rational arithmetic

UNIT = 840  # picoseconds per unit of time: fractions down to 1/8 stay whole


def played(schedule: Schedule, times: dict[str, Fraction], host_async: bool = True, **rest) -> Timeline:
    whole = {letter: int(UNIT * time) for letter, time in (times | {"B": times["I"] + times["W"]}).items()}
    program = pipeline(schedule.order, schedule.placement, whole, **rest)
    return run_program(program, written_price, host_async=host_async)


def idle_between(timeline: Timeline) -> Fraction:
    """The longest time that a rank idles between its first and its last action, in units."""
    longest = 0
    for rank in range(timeline.num_ranks):
        rows = (timeline.rank == rank) & (timeline.stream == 1)
        start, end = timeline.start_ps[rows], timeline.end_ps[rows]
        longest = max(longest, int(end.max() - start.min() - (end - start).sum()))
    return Fraction(longest, UNIT)


@settings(max_examples=40, deadline=None)
@given(schedule=schedules(), times=any_times, host_async=st.booleans())
def test_every_action_of_every_schedule_is_where_exact_fractions_put_it(schedule, times, host_async):
    timeline = played(schedule, times, host_async)
    found = [[(0, 0)] * 0 for _ in range(timeline.num_ranks)]
    for span in timeline.spans():
        if span.stream == "compute":
            found[span.rank].append((Fraction(span.start_ps, UNIT), Fraction(span.end_ps, UNIT)))
    assert found == spans_of(schedule, times)
    busy = work_of_step(schedule, times)
    for part in composition(timeline):
        assert part.compute_ps == UNIT * busy and part.step_ps == part.compute_ps + part.bubble_ps


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(), kept=st.integers(0, 6))
def test_peaks_of_every_schedule(schedule, kept):
    """In sixths of one micro-batch's activation on one chunk; what is kept for W counts from the forward on."""
    timeline = played(schedule, dict.fromkeys("FIW", Fraction(1)), size=6, kept_for_weights=kept)
    expected = peak_in_flight(schedule, kept_for_weights=Fraction(kept, 6))
    assert [Fraction(peak.peak_bytes, 6) for peak in timeline.memory] == list(expected)


EQUAL = dict.fromkeys("FIW", Fraction(1))
LATE = Fraction(5, 2)
UNEQUAL = {"F": Fraction(3), "I": Fraction(4), "W": LATE}
WHOLE_UNEQUAL = 3 + 4 + LATE

# name, times -> idle time on p ranks, peak of rank i in activations of one chunk, least m
CLOSED_FORMS = [
    ("gpipe", UNEQUAL, lambda p: (p - 1) * WHOLE_UNEQUAL, lambda p, i, m: m, lambda p: 1),
    ("1f1b", UNEQUAL, lambda p: (p - 1) * WHOLE_UNEQUAL, lambda p, i, m: min(p - i, m), lambda p: 1),
    # times of a chunk: those of a stage over v
    ("interleaved_1f1b", UNEQUAL, lambda p: (p - 1) * WHOLE_UNEQUAL, lambda p, i, m: min(2 * m, 3 * p - 1 - 2 * i),
     lambda p: p),
    ("looped_bfs", UNEQUAL, lambda p: (p - 1) * WHOLE_UNEQUAL, lambda p, i, m: 2 * m, lambda p: p),
    ("zb_h1", UNEQUAL, lambda p: (p - 1) * (3 + 4 - LATE), lambda p, i, m: p, lambda p: p),
    ("zb_h2", UNEQUAL, lambda p: (p - 1) * (3 + 4 - 2 * LATE), lambda p, i, m: 2 * p - 1, lambda p: 2 * p - 1),
    ("zb_v", EQUAL, lambda p: 0, lambda p, i, m: 2 * p, lambda p: 2 * p - 1),
    ("v_half", EQUAL, lambda p: 3 if p == 2 else 3 * p - (4 if p % 2 else 5), None, lambda p: p),
    ("v_min", EQUAL, lambda p: 4 * p - 5, None, lambda p: p),
    ("dualpipe_v", EQUAL, lambda p: p - 1, lambda p, i, m: 2 * p + 1, lambda p: 2 * p),
    ("interleaved_zb", UNEQUAL, lambda p: (p - 1) * (3 + 4 - LATE), lambda p, i, m: 2 * p, lambda p: p),
]  # fmt: skip

NAMES = [name for name, *_ in CLOSED_FORMS]


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize(("name", "times", "idle", "peak", "least"), CLOSED_FORMS, ids=NAMES)
def test_the_engine_has_the_closed_forms(name, times, idle, peak, least, p):
    for rounds in (0, 1, 3):
        num_micro = least(p) + rounds * p
        if name.startswith("interleaved"):
            num_micro -= num_micro % p
        timeline = played(make_schedule(name, p, num_micro, virtual=chunks_of(name)), times, size=1, kept_for_weights=1)
        assert idle_between(timeline) == idle(p)
        if peak is not None:
            assert [each.peak_bytes for each in timeline.memory] == [peak(p, i, num_micro) for i in range(p)]
    if name in ("v_half", "v_min"):
        largest = max(each.peak_bytes for each in timeline.memory)
        assert largest == 2 * ((p + 2) // 2 if name == "v_half" else (p + 4) // 3)


def test_every_schedule_has_a_closed_form_here():
    assert sorted(NAMES) == sorted(schedule_names())


@settings(max_examples=40, deadline=None)
@given(p=st.integers(2, 5), extra=st.integers(0, 6), f=st.integers(1, 9), b=st.integers(1, 9), kept=st.integers(0, 5))
def test_zero_bubble_memory_per_rank(p, extra, f, b, kept):
    """Rank i from 0: (p - i) M_B + i M_W of ZB-H1 and (2p - 2i - 1) M_B + 2i M_W of ZB-H2, here M_B 5 and M_W kept."""
    times = {"F": Fraction(f), "I": Fraction(b), "W": Fraction(min(f, b))}
    for name, least, held in (
        ("zb_h1", p, lambda i: (p - i) * 5 + i * kept),
        ("zb_h2", 2 * p - 1, lambda i: (2 * p - 2 * i - 1) * 5 + 2 * i * kept),
    ):
        timeline = played(make_schedule(name, p, least + extra), times, size=5, kept_for_weights=kept)
        assert [each.peak_bytes for each in timeline.memory] == [held(i) for i in range(p)]


@pytest.mark.parametrize("p", [2, 4, 8])
def test_rates_that_the_zero_bubble_readme_gives(p):
    """T_F = T_I = T_W: B = (p - 1) / (m + p - 1) of 1F1B; the bubble time of ZB-H1 is a third of 1F1B's, exactly."""
    num_micro = 3 * p
    whole = played(make_schedule("1f1b", p, num_micro), EQUAL)
    split = played(make_schedule("zb_h1", p, num_micro), EQUAL)
    assert Fraction(idle_between(whole), Fraction(length_ps(whole), UNIT)) == Fraction(p - 1, num_micro + p - 1)
    assert 3 * idle_between(split) == idle_between(whole)


def test_the_published_case_of_eight_stages_and_24_micro_batches():
    """7/31 = 0.226; the table of the zero-bubble paper says 0.243 and 0.235 with transfers and unequal stages."""
    timeline = played(make_schedule("1f1b", 8, 24), EQUAL)
    assert idle_between(timeline) / Fraction(length_ps(timeline), UNIT) == Fraction(7, 31)
