"""The engine on programs small enough to time by hand."""

import math
from collections import deque

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.program import Kind, Scope, Value
from plans.timeline import Timeline
from simulator import run_program
from simulator.engine.walk import Channel
from tests.support.handmade import Price, Script, program_of, written_price


def spans(timeline: Timeline, rank: int, stream: str) -> list[tuple[str, int, int]]:
    return [
        (span.id.split("/")[1] if span.call != "wait" else "wait", span.start_ps, span.end_ps)
        for span in timeline.spans()
        if (span.rank, span.stream) == (rank, stream)
    ]


def test_compute_runs_behind_its_host():
    script = Script(0)
    for name, dispatch, work in [("a", 5, 20), ("b", 5, 1), ("c", 40, 2)]:
        script.compute(name, work, dispatch)
    timeline = run_program(program_of([script]), written_price, host_async=True)
    assert spans(timeline, 0, "host") == [("a", 0, 5), ("b", 5, 10), ("c", 10, 50)]
    assert spans(timeline, 0, "compute") == [("a", 5, 25), ("b", 25, 26), ("c", 50, 52)]


def test_a_host_that_computes_has_one_span_for_dispatch_and_work():
    script = Script(0)
    script.compute("a", 20, 5)
    script.compute("b", 1, 5)
    timeline = run_program(program_of([script]), written_price, host_async=False)
    assert spans(timeline, 0, "host") == []
    assert spans(timeline, 0, "compute") == [("a", 0, 25), ("b", 25, 31)]


def collective_of_two(host_async: bool, token: str | None) -> Timeline:
    scripts = [Script(0), Script(1)]
    for script, before in zip(scripts, (10, 30), strict=True):
        script.compute("before", before)
        script.collective("reduce", (0, 1), (2, 100, 7), token)
        script.compute("beside", 50)
        if token:
            script.wait(token)
        script.compute("after", 1)
    return run_program(program_of(scripts), written_price, host_async=host_async)


def test_a_collective_starts_with_its_last_member_and_hides_behind_compute():
    timeline = collective_of_two(host_async=True, token="t")
    # the last member has issued at 2 and computed at 30; 7 of processor time and 100 on the links follow
    assert spans(timeline, 0, "comm") == spans(timeline, 1, "comm") == [("reduce", 30, 137)]
    assert spans(timeline, 0, "compute") == [("before", 0, 10), ("beside", 10, 60), ("after", 137, 138)]
    assert spans(timeline, 1, "compute") == [("before", 0, 30), ("beside", 30, 80), ("after", 137, 138)]
    assert spans(timeline, 0, "host") == [("reduce", 0, 2)]  # the host never waits


def test_a_wait_blocks_the_host_that_computes():
    timeline = collective_of_two(host_async=False, token="t")
    assert spans(timeline, 0, "comm") == [("reduce", 32, 139)]
    assert spans(timeline, 0, "host") == [("reduce", 10, 12), ("wait", 62, 139)]
    assert spans(timeline, 0, "compute") == [("before", 0, 10), ("beside", 12, 62), ("after", 139, 140)]


@pytest.mark.parametrize("host_async", [True, False])
def test_a_blocking_collective_holds_up_what_follows(host_async):
    timeline = collective_of_two(host_async, token=None)
    begin = 30 if host_async else 32
    assert spans(timeline, 0, "comm") == [("reduce", begin, begin + 107)]
    assert spans(timeline, 0, "compute")[1:] == [
        ("beside", begin + 107, begin + 157),
        ("after", begin + 157, begin + 158),
    ]


def test_one_channel_keeps_its_order_and_two_do_not_disturb_each_other():
    def ends(channels):
        scripts = [Script(0), Script(1)]
        for script in scripts:
            for number, channel in enumerate(channels):
                script.collective(f"c{number}", (0, 1), (0, 10), f"t{number}", channel)
        return [end for _, _, end in spans(run_program(program_of(scripts), written_price), 0, "comm")]

    assert ends("aab") == [10, 10, 20]
    assert ends("abc") == [10, 10, 10]


def test_a_transfer_takes_the_slower_side_and_every_pair_runs_at_once():
    scripts = [Script(0), Script(1), Script(2)]
    pairs = [(0, 1), (0, 2)]
    scripts[0].send("x", pairs, (0, 10), "sent")
    scripts[1].compute("late", 5)
    for script in scripts[1:]:
        script.recv("x", pairs, (0, 12))
    timeline = run_program(program_of(scripts), written_price)
    assert spans(timeline, 1, "comm") == [("x", 5, 17)]
    assert spans(timeline, 2, "comm") == [("x", 0, 12)]
    assert spans(timeline, 0, "comm") == [("x", 0, 17)]


def test_a_rank_without_a_piece_skips_the_transfer():
    scripts = [Script(0), Script(1), Script(2)]
    scripts[0].send("x", [(0, 1)], (3, 10))
    scripts[2].send("x", [(0, 1)], (3, 10), "none")
    scripts[2].wait("none")
    scripts[1].recv("x", [(0, 1)], (3, 10))
    timeline = run_program(program_of(scripts), written_price)
    assert not np.any(timeline.rank == 2)


def test_a_hand_over_to_oneself_takes_no_time():
    script = Script(0)
    script.send("x", [(0, 0)], (0, 10))
    script.compute("a", 4)
    script.recv("x", [(0, 0)], (0, 10))
    script.compute("b", 4)
    assert spans(run_program(program_of([script]), written_price), 0, "compute") == [("a", 0, 4), ("b", 4, 8)]


def test_two_ranks_exchange_on_one_channel():
    scripts = [Script(0), Script(1)]
    for script in scripts:
        script.recv("x", [(0, 1), (1, 0)], (0, 10), "got")
        script.send("x", [(0, 1), (1, 0)], (0, 10), "sent")
        script.wait("got")
        script.wait("sent")
    assert run_program(program_of(scripts), written_price).step_end_ps == (10,)


@pytest.mark.parametrize("host_async", [True, False])
def test_a_step_ends_when_all_that_was_issued_is_over(host_async):
    scripts = [Script(0), Script(1)]
    scripts[0].send("x", [(0, 1)], (0, 10), "sent")
    scripts[0].compute("a", 1)
    scripts[1].recv("x", [(0, 1)], (0, 10))
    timeline = run_program(program_of(scripts), written_price, host_async=host_async, num_steps=2)
    assert [start for name, start, _ in spans(timeline, 0, "compute")] == [0, 10]


def test_a_kept_token_is_waited_for_in_the_next_step():
    scripts = [Script(0), Script(1)]
    for script in scripts:
        script.values["kept"] = Value(name="kept", shape=(), scope=Scope.KEPT, role="token")
        script.wait("kept")  # nothing to wait for in the first step
        script.compute("a", 5)
        script.add(
            "c", Kind.COLLECTIVE, "all_reduce", (0, 50), mesh=Layout((2,), ("axis",)), axes=("axis",), token="kept"
        )
    timeline = run_program(program_of(scripts), written_price, num_steps=2)
    assert [start for _, start, _ in spans(timeline, 0, "compute")] == [0, 55]


def test_an_instruction_of_no_length_and_no_dispatch_changes_nothing():
    def ends(with_extra):
        scripts = [Script(0), Script(1)]
        for script in scripts:
            script.compute("a", 10 + script.rank, 3)
            if with_extra:
                script.compute("extra", 0)
            script.collective("reduce", (0, 1), (1, 10), "t")
            script.compute("b", 5, 1)
            script.wait("t")
        timeline = run_program(program_of(scripts), written_price)
        return sorted(
            (span.rank, span.id, span.start_ps, span.end_ps) for span in timeline.spans() if "extra" not in span.id
        )

    assert ends(True) == ends(False)


def test_every_instruction_is_done_once_in_every_step():
    timeline = collective_of_two(host_async=True, token="t")
    done = [(span.rank, span.id) for span in timeline.spans() if span.stream != "host"]
    names = ["0F0/before", "0F0/beside", "0F0/after"], ["1F0/before", "1F0/beside", "1F0/after"]
    assert sorted(done) == sorted(
        [(rank, name) for rank in (0, 1) for name in names[rank]] + [(rank, "meet/reduce") for rank in (0, 1)]
    )


def test_slowdown_acts_on_dispatch_and_compute_of_a_rank_and_step():
    script = Script(0)
    script.compute("a", 10, 2)
    script.compute("b", 20, 2)
    timeline = run_program(
        program_of([script]), written_price, num_steps=2,
        slowdown=lambda rank, step, size: np.array([3.0, 0.5]) if step else None,
    )  # fmt: skip
    assert spans(timeline, 0, "compute") == [("a", 2, 12), ("b", 12, 32), ("a", 38, 68), ("b", 68, 78)]


@pytest.mark.parametrize("price", [(-1, 0), (0, -1), (0, 0, -1), (0, math.nan), (0, 1.5), (0, True)])
def test_bad_prices_are_refused(price):
    script = Script(0)
    script.add("a", Kind.SEND if len(price) > 2 else Kind.COMPUTE, "transfer", price)
    with pytest.raises(TwofoldError, match="picoseconds"):
        run_program(program_of([script]), written_price)


def test_numpy_integers_are_prices():
    script = Script(0)
    script.compute("a", 3)
    timeline = run_program(program_of([script]), lambda *_: Price(np.int64(1), np.int32(3), 0))
    assert timeline.step_end_ps == (4,)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"cores_per_node": 2, "host_async": True}, "cores_per_node"),
        ({"cores_per_node": 0, "host_async": False}, "cores_per_node"),
        ({"overlap": lambda *_: (1.0, 1.0), "host_async": False}, "overlap"),
        ({"slowdown": lambda *_: -1.0}, "slowdown"),
        ({"slowdown": lambda *_: math.nan}, "slowdown"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    script = Script(0)
    script.compute("a", 3)
    with pytest.raises(TwofoldError, match=message):
        run_program(program_of([script]), written_price, **settings)


def test_times_too_long_for_the_timeline_are_refused():
    script = Script(0)
    script.compute("a", 2**62)
    with pytest.raises(TwofoldError, match="check the machine"):
        run_program(program_of([script]), written_price)


def test_a_program_without_instructions_takes_no_time():
    assert run_program(program_of([Script(0)]), written_price).step_s == 0.0


def test_transfers_of_a_channel_take_the_longer_work_and_processor_time_of_their_sides_one_after_the_other():
    """Issued at 10 and 30: 30 + 7 + 5 = 42. The second waits for the first, and takes 4 + 3."""
    channel = Channel(deque())
    first = channel.post(True, 10, 7, 2)
    second = channel.post(True, 12, 1, 3)
    assert channel.post(False, 30, 6, 5) is first and first.end == 42
    assert channel.post(False, 31, 4, 0) is second and second.end == 42 + 4 + 3
    assert (channel.starts, channel.ends) == ([30, 42], [42, 49])
