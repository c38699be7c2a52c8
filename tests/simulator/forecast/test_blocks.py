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
from simulator.forecast.held import ChunksMemory
from simulator.forecast.predict import step_forecast
from simulator.forecast.rank_memory import RankMemory

MACHINE = Machine.load("h100-sxm-x1024")
CONFIG = replace(transformer_config("llama-3-8b"), num_layers=48)


def lowered(degrees: Degrees) -> list[tuple[symbolic.LoweredChunks, object, list[tuple[int, dict[str, int]]]]]:
    """For each rank how it is lowered, its bodies, and its peak."""
    step = step_forecast(CONFIG, degrees, MACHINE)
    kinds = [frozenset({("B", False), ("B", True)})]
    found: list[tuple[symbolic.LoweredChunks, object, list[tuple[int, dict[str, int]]]]] = []
    for stages in step.stages_of:
        chunks, arrival_bytes = [step.chunks[stage] for stage in stages], step.costs.sizes.arrival_bytes
        rank = symbolic.lowered_chunks(step.costs, chunks, kinds * len(stages))
        bodies = symbolic.bodies_of_rank([symbolic.priced_chunks(step.costs, chunks, rank)])
        memory = RankMemory([(ChunksMemory(rank, step.costs.pieces, arrival_bytes), len(chunks))], arrival_bytes)
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


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("dp", "kind", "bucket_mib"), [(8, "adamw", 25), (1, "adamw", 25), (1, "sgd", 25), (4, "adamw", 0)]
)
def test_chunks_lowered_apart_are_those_lowered_together(
    monkeypatch: pytest.MonkeyPatch, level: int, dp: int, kind: str, bucket_mib: int
) -> None:
    degrees = Degrees(
        dp=dp, tp=2, pp=2, micro_batch=1, global_batch=64, sequence_parallel=True, virtual=4,
        schedule="interleaved_zb",
    )  # fmt: skip
    optimizer = msgspec.structs.replace(
        degrees.optimizer, kind=kind, parallel_level=level, threshold_bytes=64 * 1024, bucket_bytes=bucket_mib * 2**20,
    )  # fmt: skip

    def ranks() -> tuple[list[object], int]:
        for name in ("_RANKS", "_CHUNKS", "_LOWERED"):
            monkeypatch.setattr(pipeline_rank, name, {})
        config = transformer_config("gpt3-1.3b", tied=False)
        step = step_forecast(config, replace(degrees, optimizer=optimizer), MACHINE)
        bodies = [rank.undisturbed for rank in step.ranks]
        return [step.peaks, *((own.begin, own.actions, own.end) for own in bodies)], len(pipeline_rank._LOWERED)

    apart, num_chunks = ranks()
    monkeypatch.setattr(pipeline_rank, "chunks_together", lambda costs, chunks: [slice(0, len(chunks))])
    together, num_ranks = ranks()
    assert apart == together
    assert (num_chunks, num_ranks) == (3, 2)  # the first, those between and the last


def test_a_tied_table_is_lowered_with_all_who_read_it() -> None:
    config = transformer_config("gpt3-125m", tied=True)
    v_shaped = Degrees(dp=2, pp=2, micro_batch=1, global_batch=16, schedule="zb_v")
    step = step_forecast(config, v_shaped, MACHINE)
    first, second = ([step.chunks[stage] for stage in stages] for stages in step.stages_of)
    assert symbolic.chunks_together(step.costs, first) == [slice(0, 2)]
    assert symbolic.chunks_together(step.costs, second) == [slice(0, 1), slice(1, 2)]


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
    for name, value in {"_MOST": 1, "_RANKS": {}, "_CHUNKS": {}, "_LOWERED": {}}.items():
        monkeypatch.setattr(pipeline_rank, name, value)
    assert steps() == expected and expected[0] == expected[2] != expected[1]
    assert len(pipeline_rank._RANKS) == len(pipeline_rank._CHUNKS) == len(pipeline_rank._LOWERED) == 1
