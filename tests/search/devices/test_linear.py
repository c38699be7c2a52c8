"""The quick bounds of a frame against those that are made term by term."""

from __future__ import annotations

import random

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.schedules import chunks_per_rank, make_schedule, schedule_names
from search.devices.bounds import ScheduleSpace
from search.devices.costs import WAYS, Table
from search.devices.linear import Linear, Terms
from search.devices.space import layer_choices


def _early_table(num_pieces: int, split: bool, draw: np.random.Generator) -> Table:
    """First and last actions as all others; nothing beside the stream."""
    work = draw.random((num_pieces, len(WAYS)))
    work[:, WAYS.index("F.first")] = work[:, WAYS.index("F")]
    work[:, WAYS.index("closing.last")] = work[:, WAYS.index("closing")]
    work[:, WAYS.index("I")] *= split
    zero, nothing = np.zeros_like(work), np.zeros(num_pieces)
    return Table(work=work, first_gather=zero, dispatch=zero, update=nothing, update_dispatch=nothing)


@pytest.mark.parametrize("name", schedule_names())
def test_they_are_the_bounds_of_all_terms(name):
    draw, numbers = random.Random(name), np.random.default_rng(5)
    compared = 0
    while compared < 8:
        pp, chunks = draw.choice((1, 2, 4, 8)), chunks_per_rank(name) or draw.choice((2, 3))
        try:
            schedule = make_schedule(name, pp, draw.choice((1, 4, 8, 24)), virtual=chunks)
        except TwofoldError:
            continue
        dense = draw.choice((0, 2))
        frame = ScheduleSpace(schedule=schedule, layers=layer_choices(32, schedule.num_stages, 4), num_dense=dense)
        transfers = tuple((numbers.random(pp) * draw.choice((0.0, 0.1, 1.0))).tolist())
        for together in (True, False):
            quick = Linear([Terms(frame, together=together)])
            table = _early_table(frame.pieces.shape[2], frame.split, numbers)
            expected = frame.bounds_s(table, transfers, together=together)
            np.testing.assert_allclose(quick.bounds_s(table, transfers), expected, rtol=1e-12)
            compared += 1
