"""The search against loops over its space that share nothing with it (`benchmarks.search.spaces`)."""

from __future__ import annotations

import pytest

from benchmarks.search.spaces import compared, even_splits, every_configuration
from costmodels import Machine
from plans.model.transformer import TransformerConfig
from search.devices import Pins, Problem

SMALL = TransformerConfig(name="small", num_layers=3, hidden=256, num_heads=4, ffn=1024, vocab=1024, seq=512)


@pytest.mark.parametrize(("seed", "most"), [(1, 150), (2, 150), (48, 200), (108, 400)])
def test_no_configuration_of_a_random_space_is_faster(seed: int, most: int) -> None:
    """In the third one 2 of 3 members of a group in a node are faster than all 3, with as many ways out; in the last
    one the best step is 2 % shorter when it is simulated in time order."""
    found = compared(seed, most)
    assert found["configurations"] >= 20 and not found["beaten"], found


def test_the_loops_are_the_space_counted_by_hand() -> None:
    assert even_splits(5, 2) == [(3, 2), (2, 3)] and even_splits(4, 2) == [(2, 2)]
    pins = Pins(pp=1, cp=1, sequence_parallel=False)
    asked = Problem(
        config=SMALL, machine=Machine.load("h100-sxm-x8"), num_devices=2, global_batch=2, pins=pins
    )  # fmt: skip
    found = list(every_configuration(asked))
    modes = 1 + 4 * 3  # none, and four modes of 1, 2 or all of 3 blocks
    assert len(found) == modes * (4 + 2)  # dp 2: one sequence and four levels; tp 2: one or two sequences, no level
