"""Clocks of hosts are brought together: ranks with shifted clocks find by how much."""

import numpy as np
import pytest

from executor.device import pick_device
from executor.train import clocks
from tests.support.on_ranks import run_on_ranks

AHEAD_NS = (0, 0, 7_000_000_000, -3_000_000_000)  # ranks 0 and 1 share a host
TAKEN_NS = 5_000_000


def measure(rank, folder):
    own = clocks.now_ns
    clocks.now_ns = lambda: own() + AHEAD_NS[rank]
    clocks.host_id = lambda: str(AHEAD_NS[rank])
    np.save(folder / f"{rank}.npy", clocks.ahead_ns(pick_device("cpu")))


@pytest.mark.ranks
def test_ranks_on_other_hosts_find_how_far_their_clocks_are_ahead(tmp_path):
    run_on_ranks(measure, 4, tmp_path)
    found = [int(np.load(tmp_path / f"{rank}.npy")) for rank in range(4)]
    assert found[:2] == [0, 0]
    assert all(abs(one - true) < TAKEN_NS for one, true in zip(found, AHEAD_NS, strict=True))


def test_processes_of_a_host_agree_on_it():
    assert clocks.host_id() == clocks.host_id() != ""
