"""One configuration says the same as symbolic bodies, as a lowered program and in the event engine.

`python -m benchmarks.one_world` compares thousands; here a few of each kind stand for them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from random import Random

from benchmarks.one_world import Score, check, draw_case

SEEDS = (1, 2, 3)
"""Between them: all levels, tied tables, experts, heads of keys that several ranks share."""


@pytest.mark.parametrize("seed", SEEDS)
def test_forecast_program_and_engine_agree(seed: int) -> None:
    draw, score = Random(seed), Score()
    while score.cases < 5:
        case = draw_case(draw, num_ranks=8)
        if case is not None:
            check(case, score)
    assert score.differ == []
    assert score.bodies_equal == score.memory_equal == score.time_equal == score.cases
    assert max(map(abs, score.errors)) <= 0.04
