"""Degrees that `benchmarks.simulator.one_world` draws train as one device does, on pretend ranks with small models.

Those of every fifth that have few instructions are tests;
`python -m tests.simulator.forecast.test_one_world_ranks` trains all 50.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random

import msgspec
import pytest

from benchmarks.simulator.one_world import Case, draw_case
from tests.plans.test_uniform import GPT, LLAMA, check_training, planned

NUM_CASES = 50
TESTED = (0, 5, 20, 25, 30, 35, 40)


@lru_cache(maxsize=1)
def _cases() -> list[Case]:
    draw, found = Random(5), list[Case]()
    while len(found) < NUM_CASES:
        case = draw_case(draw)
        if case is not None:
            found.append(case)
    return found


@pytest.mark.parametrize("number", TESTED)
def test_drawn_degrees_train_as_one_device_does(number: int) -> None:
    degrees = _cases()[number].degrees
    assert degrees.layers is not None
    config = replace((LLAMA, GPT)[number % 2], num_layers=len(degrees.layers), seq=32)
    optimizer = msgspec.structs.replace(
        degrees.optimizer, kind="sgd", settings={"lr": 0.1}, threshold_bytes=1, master_dtype=None, gradient_dtype=None
    )
    names = ("dp", "tp", "pp", "cp", "micro_batch", "schedule", "virtual", "sequence_parallel", "recompute")
    options = {name: getattr(degrees, name) for name in names}
    batch = degrees.dp * degrees.micro_batch * 2 * degrees.pp  # as few micro-batches as every schedule can have
    plan = planned(config, batch=batch, **options | {"optimizer": optimizer})
    check_training(plan, config)


if __name__ == "__main__":
    for each in range(NUM_CASES):
        test_drawn_degrees_train_as_one_device_does(each)
    print(f"{NUM_CASES} of {NUM_CASES} train as one device does")
