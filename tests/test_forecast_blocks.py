"""A rank that is lowered with few of its blocks does what it does when all of them are lowered."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from costmodels import Machine
from plans.degrees import Degrees
from plans.lower.symbolic.wide import is_wide
from plans.model.transformer import transformer_config
from plans.program import Instruction
from simulator.forecast import forecast, pipeline_rank, symbolic
from simulator.forecast.held import RankMemory
from simulator.forecast.predict import step_forecast

MACHINE = Machine.load("h100-sxm-x1024")
CONFIG = replace(transformer_config("llama-3-8b"), num_layers=48)


def lowered(degrees: Degrees) -> list[tuple[symbolic.LoweredRank, object, list[tuple[int, dict[str, int]]]]]:
    """For each rank how it is lowered, its bodies, and its peak."""
    step = step_forecast(CONFIG, degrees, MACHINE)
    kinds = [frozenset({("B", False), ("B", True)})]
    found: list[tuple[symbolic.LoweredRank, object, list[tuple[int, dict[str, int]]]]] = []
    for stages in step.stages_of:
        rank = symbolic.lowered_rank(step.costs, [step.chunks[stage] for stage in stages], kinds * len(stages))
        bodies = symbolic.bodies_of_rank(step.costs, rank)
        memory = RankMemory(rank, step.costs.pieces, step.costs.sizes.arrival_bytes)
        found.append(
            (rank, (bodies.begin, dict(bodies.actions), bodies.end), [memory.peak(step.schedule, stages)])
        )  # fmt: skip
    return found


@pytest.mark.parametrize("threshold_bytes", [0, 64 * 1024])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(("tp", "virtual", "bucket_mib"), [(4, 1, 25), (2, 2, 25), (1, 1, 0), (4, 2, 100)])
def test_few_blocks_represent_all(
    monkeypatch: pytest.MonkeyPatch, level: int, threshold_bytes: int, tp: int, virtual: int, bucket_mib: int
) -> None:
    degrees = Degrees(
        dp=8, tp=tp, pp=2, micro_batch=1, global_batch=64, sequence_parallel=tp > 1, virtual=virtual,
        schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
    )  # fmt: skip
    optimizer = msgspec.structs.replace(
        degrees.optimizer, parallel_level=level, threshold_bytes=threshold_bytes, bucket_bytes=bucket_mib * 2**20
    )
    degrees = replace(degrees, optimizer=optimizer)
    few = lowered(degrees)
    monkeypatch.setattr(symbolic, "_period", lambda *args: (10**6, 1))
    every = lowered(degrees)
    for (rank, bodies, peak), (whole, all_bodies, whole_peak) in zip(few, every, strict=True):
        assert rank.repeats and not whole.repeats
        assert bodies == all_bodies
        assert peak == whole_peak


def test_a_bucket_of_all_norms_is_wide() -> None:
    degrees = Degrees(dp=8, tp=4, pp=1, micro_batch=1, global_batch=64, sequence_parallel=True)
    ((rank, _, _),) = lowered(degrees)
    items = [item for _, item in rank.symbolic.bodies[0, "B.last"]]
    (packing,) = (item for item in items if isinstance(item, Instruction) and is_wide(item))
    assert len(packing.attrs["sizes"]) == 2 * 48 + 1


def test_forecasts_do_not_depend_on_how_many_ranks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps() -> list[float]:
        asked = [Degrees(dp=4, pp=2, micro_batch=size, global_batch=16) for size in (1, 2, 1)]
        return [forecast(transformer_config("gpt3-125m", tied=False), each, MACHINE).step_s for each in asked]

    expected = steps()
    for name, value in {"_MOST": 1, "_RANKS": {}, "_LOWERED": {}}.items():
        monkeypatch.setattr(pipeline_rank, name, value)
    assert steps() == expected and expected[0] == expected[2] != expected[1]
    assert len(pipeline_rank._RANKS) == len(pipeline_rank._LOWERED) == 1
