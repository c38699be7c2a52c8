"""Redistribution on eight real gloo ranks, with the executor's collectives and transfers."""

import json
from pathlib import Path

import pytest

from tests.plans.redistribution.on_ranks import work
from tests.support.on_ranks import run_on_ranks


@pytest.mark.ranks
def test_even_and_uneven_redistributions_on_gloo_ranks(tmp_path: Path) -> None:
    run_on_ranks(work, 8, tmp_path)
    (said,) = {(tmp_path / f"{rank}.json").read_text() for rank in range(8)}
    for kinds in json.loads(said).values():
        assert set(kinds) >= {"all_gather", "all_reduce", "all_to_all", "reduce_scatter", "slice", "transfer"}
