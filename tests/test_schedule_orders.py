"""The order of every named schedule, held by a digest over a grid of ranks, micro-batches and chunks.

A digest changes with a single action. Change one only together with the reason why the order is another one.
"""

import hashlib

import pytest

from plans.schedules import ScheduleError, make_schedule, schedule_names

DIGESTS = {
    "1f1b": "10d42759f41b9006",
    "dualpipe_v": "036a451cec53a248",
    "gpipe": "e1244e190a3382a1",
    "interleaved_1f1b": "551629f8d811c1bf",
    "interleaved_zb": "f0a00e3e0282cb42",
    "looped_bfs": "06a17ce860a2fe92",
    "v_half": "b204f2c559b52d01",
    "v_min": "fea4d166f22ce6ab",
    "zb_h1": "1cbb0d68314952f0",
    "zb_h2": "d44739d27ed5a53c",
    "zb_v": "2ce52d6ecfc5303e",
}
RANKS = (1, 2, 3, 4, 5, 8)
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 17, 24, 33)
CHUNKS = (None, 1, 2, 3)


def digest(name: str) -> str:
    """Of the schedules of `name`, or of what it says where it refuses."""
    total = hashlib.sha256()
    for num_ranks in RANKS:
        for num_micro_batches in MICRO_BATCHES:
            for virtual in CHUNKS:
                try:
                    text = make_schedule(name, num_ranks, num_micro_batches, virtual=virtual).to_text()
                except ScheduleError as error:
                    text = str(error)
                total.update(f"{num_ranks} {num_micro_batches} {virtual}\n{text}\n".encode())
    return total.hexdigest()[:16]


def test_every_schedule_has_a_digest() -> None:
    assert tuple(DIGESTS) == schedule_names()


@pytest.mark.parametrize("name", DIGESTS)
def test_order_is_as_written_down(name: str) -> None:
    assert digest(name) == DIGESTS[name]
