"""The order of every named schedule, held by a digest over a grid of ranks, micro-batches and chunks.

A digest changes with a single action. Change one only together with the reason why the order is another one.
"""

import hashlib

import pytest

from plans.schedules import ScheduleError, make_schedule, schedule_names

DIGESTS = {
    "1f1b": "c56f557a09c9d301",
    "dualpipe_v": "e20e25f62b01d6c3",
    "gpipe": "6714667358e7d23d",
    "interleaved_1f1b": "b01eaae2db35e3e3",
    "interleaved_zb": "40e1b108b4b45f36",
    "looped_bfs": "19c18d27191c1d49",
    "v_half": "4cf3088f2bebe04d",
    "v_min": "19236320feba6693",
    "zb_h1": "78dd4db25d41520c",
    "zb_h2": "a8106baea204e413",
    "zb_v": "37896be7361d05b3",
}
RANKS = (1, 2, 3, 4, 5, 8)
MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 11, 12, 16, 17, 24, 33)
CHUNKS = (None, 1, 2, 3)


def digest(name: str) -> str:
    """Digest of all schedules of `name`, and of where it refuses to make one."""
    total = hashlib.sha256()
    for num_ranks in RANKS:
        for num_micro_batches in MICRO_BATCHES:
            for virtual in CHUNKS:
                try:
                    text = make_schedule(name, num_ranks, num_micro_batches, virtual=virtual).to_text()
                except ScheduleError:
                    text = "refused"
                total.update(f"{num_ranks} {num_micro_batches} {virtual}\n{text}\n".encode())
    return total.hexdigest()[:16]


def test_every_schedule_has_a_digest() -> None:
    assert tuple(DIGESTS) == schedule_names()


@pytest.mark.parametrize("name", DIGESTS)
def test_order_is_as_written_down(name: str) -> None:
    assert digest(name) == DIGESTS[name]
