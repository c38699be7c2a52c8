"""Redistribution on eight real gloo ranks, with the executor's collectives and transfers."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from executor.launch import launch


@pytest.mark.ranks
def test_thirty_redistributions_on_gloo_ranks(tmp_path: Path) -> None:
    result = launch("tests.redistribution_ranks_main", num_ranks=8, args=["30"], log_dir=tmp_path, timeout_s=180)
    said = [result.job.stdout(rank).read_text() for rank in range(8)]
    assert len(set(said)) == 1
    assert said[0].startswith("right: 30")
    for kind in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice", "transfer"):
        assert kind in said[0]
