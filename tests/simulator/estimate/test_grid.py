"""Predictions in batches against those made one by one."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from costmodels import Machine
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import transformer_config
from plans.optimizer import Optimizer
from plans.schedules import make_schedule, schedule_names
from simulator.estimate import estimate, estimate_grid
from simulator.estimate.action import ClockMap
from simulator.estimate.batch import action_columns, peak_bytes, pipeline_ends_ps
from simulator.estimate.grid import Grid
from simulator.estimate.memory import peak_activations
from simulator.estimate.pipeline import Runtime, pipeline_end_ps
from simulator.stacks import stack_named

MODEL = transformer_config("llama-3-8b", num_layers=16)
VIRTUAL = {
    name: 2 if name in ("interleaved_1f1b", "interleaved_zb", "looped_bfs") else None for name in schedule_names()
}


def degrees(draw: random.Random) -> Degrees:
    while True:
        name = draw.choice(schedule_names())
        tp, pp = draw.choice((1, 2, 4)), draw.choice((1, 2, 4))
        optimizer = Optimizer(
            kind="adamw", parallel_level=draw.randrange(4), reduce_every=draw.choice(("step", "micro_batch"))
        )
        try:
            each = Degrees(
                dp=64 // tp // pp, tp=tp, pp=pp, micro_batch=draw.choice((1, 2)), global_batch=256, schedule=name,
                virtual=VIRTUAL[name] or 1, recompute=draw.choice(("none", "selective", "full")), optimizer=optimizer,
                sequence_parallel=draw.random() < 0.5,
            )  # fmt: skip
            assert each.pipeline
        except TwofoldError:
            continue
        return each


@pytest.mark.parametrize("stack", ["twofold", "torch", "megatron"])
def test_a_grid_is_its_configurations_one_by_one(stack):
    draw, machine = random.Random(stack), Machine.load("h100-sxm-x64")
    grid = [degrees(draw) for _ in range(40)]
    found = estimate_grid(MODEL, grid, machine, stack=stack_named(stack))
    for each, own in zip(grid, found, strict=True):
        alone = estimate(MODEL, each, machine, stack=stack_named(stack))
        assert own.memory == alone.memory
        assert own.peak_bytes == alone.peak_bytes
        for name in ("step_s", "low_s", "high_s", "bubble_fraction", "exposed_comm_s"):
            assert getattr(own, name) == getattr(alone, name), (each, name)
        assert own.rank_s == alone.rank_s


def random_clock_map(draw: random.Random) -> ClockMap:
    work, trailing = draw.randint(1, 40), draw.choice((0, 0, 30))
    return ClockMap(
        work_ps=work, cold_start_ps=draw.randint(0, 60), dispatch_ps=draw.choice((0, 5, 50)), tail_ps=trailing,
        prefetch_ps=draw.choice((0, 0, draw.randint(0, work))),
        channel_busy_ps=draw.choice((0, draw.randint(0, work + trailing))),
    )  # fmt: skip


@pytest.mark.parametrize("stack", ["twofold", "megatron"])
def test_a_grid_that_is_kept_tells_optimizers_apart_that_come_and_go(stack):
    """Each is freed before the next one is made, so that they may have one address."""
    config, machine, own = (
        transformer_config("gpt2", num_layers=2),
        Machine.load("a100-40gb-x8"),
        stack_named(stack),
    )
    grid = Grid(config, machine, own)
    for level in (0, 1, 2, 3, 1, 0):
        degrees = {
            "dp": 8,
            "global_batch": 8,
            "layers": (2,),
            "optimizer": Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level),
        }
        (found,) = grid.forecasts([Degrees(**degrees)])
        assert found.step_s == estimate(config, Degrees(**degrees), machine, stack=own).step_s
        del degrees, found


def test_an_estimate_does_not_depend_on_the_one_before():
    """Kernels of a whole backward and of one in two parts have different shares of their classes."""
    machine, optimizer = Machine.load("h200-x8"), Optimizer(kind="adamw", settings={"lr": 1e-4})
    whole, split = (
        Degrees(pp=4, global_batch=8, optimizer=optimizer, schedule=name) for name in ("1f1b", "zb_h1")
    )  # fmt: skip
    first, second = (replace(transformer_config("gpt2", num_layers=4), name=name) for name in ("first", "second"))
    alone = estimate(first, whole, machine).step_s
    estimate(second, split, machine)
    assert estimate(second, whole, machine).step_s == alone


@pytest.mark.parametrize("name", schedule_names())
def test_batches_of_pipelines_end_as_each_alone(name):
    """Whole numbers, so that sums are exact in any order."""
    draw = random.Random(name)
    for blocking, together, opens in itertools.product((False, True), repeat=3):
        num_ranks = draw.randint(1, 4)
        schedule = make_schedule(name, num_ranks, num_ranks * draw.randint(2, 4), virtual=VIRTUAL[name])
        kinds = ("F", "B", "I", "W", "F.first", "B.last", "W.last")
        cases, columns = [], []
        for _ in range(3):
            actions = [{kind: random_clock_map(draw) for kind in kinds} for _ in range(schedule.num_stages)]
            updates = [random_clock_map(draw) for _ in range(num_ranks)]
            travel, send = [draw.choice((0, 7, 25)) for _ in range(schedule.num_stages)], draw.choice((0, 3))
            times = {}
            for stage in range(schedule.num_stages - 1):
                if schedule.placement[stage] != schedule.placement[stage + 1]:
                    times[stage, stage + 1] = times[stage + 1, stage] = travel[stage]
            runtime = Runtime(blocking=blocking, together=together, opens_with_gathers=opens)
            cases.append(pipeline_end_ps(schedule, actions, updates, times, send, runtime))
            ends = [(own.work_ps, own.cold_start_ps) for own in updates]
            columns.append((np.stack([action_columns(own) for own in actions], -1), np.array(ends).T, travel, send))
        work, update, travelled, sends = (np.stack(part, -1).astype(float) for part in zip(*columns, strict=True))
        found = pipeline_ends_ps(
            schedule, work, update, travelled, sends,
            Runtime(blocking=blocking, together=together, opens_with_gathers=opens),
        )  # fmt: skip
        assert found.tolist() == cases


@pytest.mark.parametrize("name", schedule_names())
def test_batches_of_peaks_are_those_of_each_alone(name):
    draw = np.random.default_rng(len(name))
    schedule = make_schedule(name, 3, 6, virtual=VIRTUAL[name])
    stages = schedule.num_stages
    kept = draw.integers(1, 100, (stages, 5))
    later = (kept * draw.random((stages, 5))).astype(np.int64)
    during = draw.integers(0, 100, (4, stages, 5))
    gradients = draw.integers(0, 300, (stages, 5))
    found = peak_bytes(schedule, kept, later, during, gradients)
    for number in range(5):
        own = [tuple(each) for each in during[:, :, number].T.tolist()]
        late = gradients[:, number].tolist()
        alone = peak_activations(schedule, kept[:, number].tolist(), later[:, number].tolist(), own, late)
        assert found[:, number].tolist() == list(alone)
