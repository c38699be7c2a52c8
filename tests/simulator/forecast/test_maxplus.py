"""Maps of clocks against the engine, and what the evaluator of pipelines refuses."""

import random

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.schedules import Schedule, make_schedule
from simulator import run_program
from simulator.forecast.columns import MaxPlus, PipelineCosts, pipeline_times
from tests.support.handmade import Script, program_of, written_price


def random_block(draw, script, own, number, host_async):
    """A few instructions, as lines of a script and as a map."""
    for at in range(draw.randint(1, 5)):
        dispatch, work = draw.choice((0, 2, 7)), draw.choice((0, 5, 20))
        if draw.random() < 0.6:
            script.compute(f"c{number}.{at}", work, dispatch)
            own = own.compute(dispatch, work)
        else:
            token = f"t{number}.{at}"
            script.collective(token, (0,), (dispatch, work), token=token, channel="x")
            own = own.issue(token, dispatch, work, "x")
            if draw.random() < 0.5:
                script.compute(f"beside{number}.{at}", 9, 1)
                own = own.compute(1, 9)
            script.wait(token, (1,))
            own = own.wait(token, 1)
    return own


def end_of(own):
    """The latest of all clocks, begun at 0."""
    return max(max(row.values()) for row in own.rows.values())


@pytest.mark.parametrize("host_async", [True, False])
def test_sequences_end_as_in_the_engine(host_async):
    clocks = ("stream", "host", "x") if host_async else ("host", "x")
    for seed in range(60):
        draw, script = random.Random(seed), Script(0)
        joined = MaxPlus.identity(clocks)
        for number in range(3):
            block = random_block(draw, script, MaxPlus.identity(clocks), number, host_async)
            joined = joined.then(block)
        timeline = run_program(program_of([script]), written_price, host_async=host_async, with_memory=False)
        assert end_of(joined) == timeline.step_end_ps[-1], seed


def test_repeating_is_joining():
    draw = random.Random(5)
    block = random_block(draw, Script(0), MaxPlus.identity(("stream", "host", "x")), 0, True)
    joined = MaxPlus.identity(block.rows)
    for count in range(6):
        repeated = block.repeat(count)
        assert {clock: dict(row) for clock, row in repeated.rows.items()} == joined.rows
        joined = joined.then(block)
    each = block.repeat(np.arange(6))
    for count in range(6):
        for clock, row in block.repeat(count).rows.items():
            assert {before: int(np.broadcast_to(times, 6)[count]) for before, times in each.rows[clock].items()} == {
                before: row.get(before, each.rows[clock][before][count]) for before in each.rows[clock]
            }


def costs(**rest):
    action = MaxPlus.identity().wait_for("arrival").compute(0, 10)
    return PipelineCosts(maps={"F": action, "B": action}, **rest)


def test_what_is_refused():
    schedule = make_schedule("1f1b", 2, 4)
    with pytest.raises(TwofoldError, match="unknown action 'X'"):
        PipelineCosts(maps={"X": MaxPlus.identity()})
    with pytest.raises(TwofoldError, match="negative times"):
        costs(transfer_ps={"F": np.array([-1, 0])})
    with pytest.raises(TwofoldError, match="must be"):
        pipeline_times(schedule, costs(transfer_ps={"F": np.zeros((3, 5), dtype=np.int64)}))
    with pytest.raises(TwofoldError, match="map is missing"):
        pipeline_times(make_schedule("zb_h1", 2, 4), costs())
    with pytest.raises(TwofoldError, match="at least 1"):
        pipeline_times(schedule, costs(), num_micro_batches=0)
    custom = Schedule.from_text("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1,1B1", name="mine")
    with pytest.raises(TwofoldError, match="cannot be taken for 3"):
        pipeline_times(custom, costs(), num_micro_batches=3)
    stuck = Schedule.from_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", name="stuck")
    with pytest.raises(TwofoldError, match="stuck"):
        pipeline_times(stuck, costs())
