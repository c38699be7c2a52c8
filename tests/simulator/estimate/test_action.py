"""Bodies measured beside communication, against long walks of the same lines one after the other."""

import random

import pytest

from simulator.estimate.action import Body, Sequenced, measure
from simulator.lines import COLLECTIVE, COMPUTE, WAIT, Line

RATES = {"matrix": (0.8, 0.7), "memory": (0.6, 0.9)}


def rates(compute: str, kernel_ps: float, collective: str, message_ps: float) -> tuple[float, float]:
    return RATES[compute]


def drawn(draw: random.Random) -> tuple[list[Line], list[Line], list[Line], list[Line]]:
    """A body, a gather before it, its wait, and a reduction after it that nothing waits for."""
    body = [
        Line(COMPUTE, draw.randint(1, 5), draw.randint(0, 400), draw.choice(("matrix", "memory"))) for _ in range(12)
    ]
    if draw.random() < 0.5:
        body.insert(6, Line(COLLECTIVE, 2, draw.randint(50, 500), "all_reduce", "tp", 0))
        body.append(Line(WAIT, 1, 0, token=0))
    gather = [Line(COLLECTIVE, 3, draw.randint(10, 1000), "all_gather", "dp", 1)]
    wait = [Line(WAIT, 1, 0, token=1)]
    reduce = [Line(COLLECTIVE, 3, draw.randint(10, 1000), "reduce_scatter", "dp", 2)]
    return body, gather, wait, reduce


@pytest.mark.parametrize("seed", range(40))
def test_a_steady_body_takes_what_one_more_takes_in_a_long_row(seed: int) -> None:
    body, gather, wait, reduce = drawn(random.Random(seed))
    own = Body(body, rates)
    for before, after in (([], reduce), (gather, wait), (gather, [*wait, *reduce])):
        found = own.clock_map(before, after, steady=True)
        lines = [*before, *body, *after]
        four, three = measure(4 * lines, rates), measure(3 * lines, rates)
        assert found.work_ps == pytest.approx(four.work_ps - three.work_ps, abs=2)
        assert found.compute_ps == pytest.approx(four.compute_ps - three.compute_ps, abs=2)
        assert found.tail_ps == pytest.approx(four.tail_ps, abs=4)
        assert found.cold_start_ps == measure(lines, rates).cold_start_ps
        assert found.dispatch_ps == sum(line.dispatch_ps for line in lines)


@pytest.mark.parametrize("seed", range(10))
def test_the_earlier_context_of_a_body_does_not_matter(seed: int) -> None:
    body, gather, wait, reduce = drawn(random.Random(seed))
    used = Body(body, rates)
    for steady in (False, True):
        for before, after in ((gather, wait), ([], reduce), ([], []), (gather, [*wait, *reduce]), ([], reduce)):
            assert used.clock_map(before, after, steady=steady) == Body(body, rates).clock_map(
                before, after, steady=steady
            )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("pairs", [None, rates])
def test_the_time_of_the_stream_alone_equals_that_of_the_map(seed: int, pairs: object) -> None:
    body, gather, wait, reduce = drawn(random.Random(seed))
    for steady in (False, True):
        for before, after in (([], []), (gather, wait), ([], reduce), (gather, [*wait, *reduce])):
            found = Sequenced(tuple(before), tuple(body), tuple(after), steady).stream_ps(pairs)  # type: ignore[arg-type]
            assert found == Body(body, pairs).clock_map(before, after, steady=steady).work_ps  # type: ignore[arg-type]


def test_a_slow_channel_falls_behind_with_every_repetition() -> None:
    body = [Line(COMPUTE, 1, 100, "matrix")]
    slow = [Line(COLLECTIVE, 1, 1000, "all_reduce", "dp", 2)]
    found = Body(body).clock_map((), slow, steady=True)
    assert found.work_ps == 100
    assert found.drift_per_repeat_ps == 900
