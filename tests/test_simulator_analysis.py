"""Where a step's time goes."""

import pytest
from handmade import Script, program_of, written_price
from test_simulator_longest_path import random_scripts

from plans.timeline import Span, Timeline
from simulator import composition, run_program


def span(stream: str, start: int, end: int, call: str) -> Span:
    return Span(
        rank=0, stream=stream, start_ps=start, end_ps=end, step=0, id=f"{call}{start}{stream}", call=call, part="F"
    )


def test_each_picosecond_counts_once_for_the_first_that_is_true():
    spans = [
        span("compute", 10, 20, "linear.forward"),
        span("compute", 40, 50, "linear.forward"),
        span("comm", 5, 30, "all_reduce"),
        span("comm", 28, 45, "transfer"),
        span("host", 0, 8, "linear.forward"),
        span("host", 50, 55, "all_reduce"),
        span("host", 55, 60, "wait"),
    ]
    (one,) = composition(Timeline.from_spans(spans, kind="measured", num_ranks=1))
    assert one.compute_ps == 20
    assert one.exposed_ps == {"all_reduce": 5 + 10, "transfer": 10}
    assert one.host_ps == 5 + 5
    assert one.bubble_ps == 5
    assert one.step_ps == 60
    assert one.exposed_s == pytest.approx(25e-12)


@pytest.mark.parametrize("settings", [{}, {"host_async": False}, {"host_async": False, "cores_per_node": 2}])
@pytest.mark.parametrize("seed", range(15))
def test_parts_add_up_and_agree_with_the_timeline(seed, settings):
    program = program_of(random_scripts(seed))
    timeline = run_program(program, written_price, **settings)
    parts = composition(timeline)
    length = timeline.step_end_ps[-1] - timeline.step_start_ps[-1]
    assert [part.step_ps for part in parts] == [length] * program.num_ranks
    exposed = sum(part.exposed_s for part in parts) / program.num_ranks
    assert exposed == pytest.approx(timeline.exposed_comm_s, rel=1e-12, abs=1e-18)
    if length:
        idle = 1 - sum(part.compute_ps for part in parts) / (length * program.num_ranks)
        assert idle == pytest.approx(timeline.bubble_fraction, rel=1e-12, abs=1e-12)


def test_waiting_for_a_straggler_is_bubble_and_the_collective_is_exposed():
    scripts = [Script(0), Script(1)]
    for script, work in zip(scripts, (10, 100), strict=True):
        script.compute("a", work)
        script.collective("reduce", (0, 1), (0, 30))
    fast, slow = composition(run_program(program_of(scripts), written_price))
    assert (fast.compute_ps, dict(fast.exposed_ps), fast.bubble_ps) == (10, {"all_reduce": 30}, 90)
    assert (slow.compute_ps, dict(slow.exposed_ps), slow.bubble_ps) == (100, {"all_reduce": 30}, 0)
