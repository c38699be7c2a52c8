"""Redistribution on eight real gloo ranks, with the executor's collectives and transfers."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from executor.launch.launch import launch


@pytest.mark.ranks
def test_even_and_uneven_redistributions_on_gloo_ranks(tmp_path: Path) -> None:
    result = launch("tests.redistribution_ranks_main", num_ranks=8, args=["30", "30"], log_dir=tmp_path, timeout_s=180)
    said = [result.job.stdout(rank).read_text() for rank in range(8)]
    assert len(set(said)) == 1
    even, uneven = said[0].splitlines()
    assert even.startswith("right: 30 even") and uneven.startswith("right: 30 uneven")
    for kind in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice", "transfer"):
        assert kind in even and kind in uneven
