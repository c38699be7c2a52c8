"""Where a step's time goes."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from plans.lower import lower
from plans.program import Kind, Scope
from plans.timeline import Span, Timeline
from simulator import composition, run_program
from simulator.timeline.messages import messages_of_step
from simulator.timeline.stretches import joined
from tests.simulator.engine.test_longest_path import random_scripts
from tests.support.handmade import Script, program_of, written_price
from tests.support.random_plans import random_plan


def span(stream: str, start: int, end: int, id_: str, call: str) -> Span:
    return Span(rank=0, stream=stream, start_ps=start, end_ps=end, step=0, id=id_, call=call, part="F")


def test_each_picosecond_counts_once_for_the_first_that_is_true():
    spans = [
        span("host", 0, 3, "r", "all_reduce"),
        span("comm", 5, 30, "r", "all_reduce"),  # issued at 3: two more for its other members
        span("compute", 10, 20, "a", "linear.forward"),
        span("comm", 28, 45, "t", "transfer"),
        span("compute", 40, 50, "b", "linear.forward"),
        span("host", 48, 56, "c", "linear.forward"),
        span("compute", 56, 60, "c", "linear.forward"),  # waits for its host
        span("host", 58, 65, "u", "all_reduce"),  # and so does the end
        span("host", 65, 70, "u", "wait"),
    ]
    timeline = Timeline.from_spans(spans, kind="measured", num_ranks=1)
    (one,) = composition(timeline)
    assert one.compute_ps == 24
    assert one.exposed_ps == {"all_reduce": 5 + 10}
    assert one.host_wait_ps == 3 + 6 + 5
    assert one.bubble_ps == 2 + 10 + 5  # the wait for another stage is bubble, the transfer included
    assert one.step_ps == 70
    assert one.exposed_s == pytest.approx(15e-12)
    assert (timeline.exposed_comm_s, timeline.host_wait_s) == pytest.approx((15e-12, 14e-12))
    assert timeline.bubble_fraction == pytest.approx(17 / 70)


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
    host = sum(part.host_wait_ps for part in parts) / program.num_ranks
    assert host == pytest.approx(timeline.host_wait_s * 1e12, rel=1e-12, abs=1e-6)
    if length:
        idle = sum(part.bubble_ps for part in parts) / (length * program.num_ranks)
        assert idle == pytest.approx(timeline.bubble_fraction, rel=1e-12, abs=1e-12)


def test_what_a_host_makes_its_device_wait_is_no_bubble():
    """A pipeline of one rank has no bubble, however slow its host is."""
    script = Script(0)
    for number in range(5):
        script.compute(f"n{number}", 10, dispatch=30)
    timeline = run_program(program_of([script]), written_price, num_steps=3)
    assert timeline.bubble_fraction == 0
    assert timeline.host_wait_s == pytest.approx(5 * 30e-12 - 4 * 10e-12)  # 30 10 .. 20 10 .. 20 10 ..


def test_a_receiver_that_is_ready_waits_for_its_sender():
    """A host that is ahead costs nothing: the wait for the other stage is bubble."""
    scripts = [Script(0), Script(1)]
    scripts[0].compute("a", 100, dispatch=5)
    scripts[0].send("x", [(0, 1)], (5, 20), "t")
    scripts[1].recv("x", [(0, 1)], (5, 20))
    scripts[1].compute("b", 40, dispatch=5)
    timeline = run_program(program_of(scripts), written_price)
    sender, receiver = composition(timeline)
    # the step begins with the hosts, 5 before the first compute can
    assert (sender.compute_ps, dict(sender.exposed_ps), sender.host_wait_ps, sender.bubble_ps) == (
        100, {}, 5, 60
    )  # fmt: skip
    assert (receiver.compute_ps, dict(receiver.exposed_ps), receiver.host_wait_ps, receiver.bubble_ps) == (
        40, {}, 5, 120
    )  # fmt: skip


def test_waiting_for_a_straggler_is_bubble_and_the_collective_is_exposed():
    scripts = [Script(0), Script(1)]
    for script, work in zip(scripts, (10, 100), strict=True):
        script.compute("a", work)
        script.collective("reduce", (0, 1), (0, 30))
    fast, slow = composition(run_program(program_of(scripts), written_price))
    assert (fast.compute_ps, dict(fast.exposed_ps), fast.bubble_ps) == (10, {"all_reduce": 30}, 90)
    assert (slow.compute_ps, dict(slow.exposed_ps), slow.bubble_ps) == (100, {"all_reduce": 30}, 0)


def test_the_program_says_what_the_stream_waits_for():
    """A collective under way beside a wait for another stage is not exposed; the one that a WAIT names is."""
    scripts = [Script(0), Script(1)]
    scripts[0].compute("a", 100)
    scripts[0].send("x", [(0, 1)], (0, 20), "t")
    scripts[0].collective("sum", (0,), (0, 10), "s")
    scripts[0].wait("s")
    scripts[1].collective("behind", (1,), (0, 90), "b")
    scripts[1].recv("x", [(0, 1)], (0, 20))
    scripts[1].collective("needed", (1,), (0, 7), "n")
    scripts[1].wait("n")
    scripts[1].compute("b", 40)
    scripts[1].wait("b")
    timeline = run_program(program_of(scripts), written_price)
    sender, receiver = composition(timeline)
    assert (sender.compute_ps, dict(sender.exposed_ps), sender.bubble_ps) == (100, {"all_reduce": 10}, 57)
    assert (receiver.compute_ps, dict(receiver.exposed_ps), receiver.bubble_ps) == (40, {"all_reduce": 7}, 120)
    assert timeline.exposed_comm_s == pytest.approx(8.5e-12)
    without = composition(replace(timeline, program=None))[1]  # then all that is under way counts
    assert (dict(without.exposed_ps), without.bubble_ps) == ({"all_reduce": 97}, 30)


@pytest.mark.parametrize("seed", range(8))
def test_messages_of_a_step_are_its_collectives_outside_micro_batches_as_often_as_it_runs_them(seed):
    for group in lower(random_plan(seed)).groups:
        expected = Counter(
            each.name for _, each in group.walk()
            if each.kind is Kind.COLLECTIVE and {group.values[name].scope for name in each.outputs} - {Scope.MICRO}
        )  # fmt: skip
        assert {each.instruction.name: each.count for each in messages_of_step(group)} == expected


@pytest.mark.parametrize("near", [0, 2])
def test_stretches_cover_what_their_spans_cover(near: int) -> None:
    """Against every unit of time by itself: covered by a span, or in a gap of at most `near`."""
    draw = random.Random(near)
    for _ in range(30):
        spans = sorted((start, start + draw.randint(1, 6)) for start in (draw.randint(0, 40) for _ in range(6)))
        covered = {at for start, end in spans for at in range(start, end)}
        first, last = min(covered), max(covered)
        gaps = [at for at in range(first, last) if at not in covered]
        for at in gaps:
            before = max(other for other in covered if other < at)
            after = min(other for other in covered if other > at)
            if after - before - 1 <= near:
                covered.add(at)
        found = joined(*np.array(spans).T, near)
        assert {at for start, end in found for at in range(start, end)} == covered
        assert all(end + near < start for (_, end), (start, _) in pairwise(found))
