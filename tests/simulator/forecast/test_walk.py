"""Steps simulated in time order, one rank for all equal ones."""

import pytest

from simulator.forecast.body import ARRIVE, COMPUTE, ISSUE, SEND, WAIT, Op
from simulator.forecast.run import Run
from simulator.forecast.walk import POST, Line, TransferQueue, Transmission, simulate_steps


def computes(*works_ps):
    return Line(COMPUTE, run=Run([Op(COMPUTE, 0, work_ps, "memory") for work_ps in works_ps]))


def test_a_transfer_that_begins_as_a_run_ends():
    """Both ranks compute for the same time, but a run adds its operations up first and so ends 2e-15 later."""
    gather_ps, works_ps = 0.23308445025757263, (3.0, 8.7)
    assert (gather_ps + works_ps[0]) + works_ps[1] < gather_ps + (works_ps[0] + works_ps[1])
    gather = Transmission("all_gather", gather_ps)
    begin = [Line(ISSUE, 0, gather_ps, token="t", channel="dp", transmission=gather), Line(WAIT, token="t")]
    queue = TransferQueue(Transmission("transfer", 5.0))
    receives = ([*begin, Line(POST), computes(*works_ps), Line(ARRIVE)], queue, None)
    sends = ([*begin, *map(computes, works_ps), Line(SEND)], None, queue)
    (ranks,) = simulate_steps([[receives], [sends]], lambda *_: (1.0, 1.0))
    assert [rank.end_ps for rank in ranks] == pytest.approx([gather_ps + sum(works_ps) + 5.0] * 2)
    assert [rank.compute_ps for rank in ranks] == pytest.approx([sum(works_ps)] * 2)
