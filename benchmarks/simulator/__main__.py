"""How exact and how fast the simulator is.

    python -m benchmarks.simulator [part ...] [--save]

Parts: exact (`simulator.forecast.columns` against the SimPy engine on 500 random pipeline programs without contention),
contention (predictions at scale against the engine with overlap rates), timelines, grid (whole predictions of a
declared grid), engine, against_simpy (the engine against a plain SimPy model on the same actions), slow_ranks (one and
two slow ranks of many), scale (a 405B-parameter model on 16,384 and 100,096 devices). All of them by default.

Times are processor time of one process (time.process_time), the best of several runs where it says so: other work on
the same cores does not count, though it slows caches and memory. `--save` writes benchmarks/results/simulator.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import simpy

from benchmarks import FOLDER
from costmodels import Machine
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer, transformer_config
from plans.optimizer import Optimizer
from plans.schedules import Action, Schedule, chunks_per_rank, make_schedule, schedule_names
from search.uniform import uniform_plan
from simulator import WhatIf, run_program, simulate
from simulator.estimate import estimate, estimate_grid
from simulator.forecast import forecast, forecast_grid
from simulator.forecast.columns import MaxPlus, PipelineCosts, pipeline_times
from tests.support import handmade, pipeline_programs  # the programs written by hand are those of the tests

RESULTS = FOLDER / "results" / "simulator.json"


def main() -> None:
    """Run the parts that are requested."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "exact": exact, "contention": contention, "timelines": timelines, "grid": grid, "engine": engine,
        "against_simpy": against_simpy, "slow_ranks": slow_ranks, "scale": scale,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="all by default")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.cold:
        print(json.dumps(grid_of_this_process()))
        return
    found: dict[str, Any] = {"environment": environment()}
    for name in arguments.parts or parts:
        found[name] = parts[name]()
        print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
        if arguments.save:
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.write_text(json.dumps(kept | found, indent=1) + "\n")


def environment() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m benchmarks.simulator {' '.join(sys.argv[1:])}".strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "simpy": simpy.__version__,
        "times": "processor time of one process, best of several runs where it says so",
    }


def best_s(call: Callable[[], object], repeats: int) -> float:
    """The least processor time of a call."""
    least = float("inf")
    for _ in range(repeats):
        begin = time.process_time()
        call()
        least = min(least, time.process_time() - begin)
    return least


def exact(num_programs: int = 500) -> dict[str, Any]:
    """Random programs: all schedules and custom orders, stages that differ, two steps."""
    names = [*schedule_names(), "custom"]
    equal = repeated = instructions = 0
    for seed in range(num_programs):
        draw = random.Random(seed)
        name = names[seed % len(names)]
        schedule = pipeline_programs.random_schedule(draw, name, 40)
        dispatch = draw.choice([(0,), (0, 1, 4), (5, 9)])
        times = pipeline_programs.Drawn(draw, with_channel=draw.random() < 0.7, dispatch=dispatch)
        program, costs = pipeline_programs.random_pipeline(schedule, times)
        timeline = run_program(program, handmade.written_price, num_steps=2, with_memory=False)
        first = pipeline_times(schedule, costs)
        second = pipeline_times(schedule, costs, start_ps=first.end_ps)
        ends = [pipeline_programs.rank_ends(timeline, schedule.num_ranks, step) for step in (0, 1)]
        equal += [first.end_ps.tolist(), second.end_ps.tolist()] == ends
        repeated += int(first.evaluated) < schedule.num_micro_batches
        instructions += 2 * sum(len(block.body.instructions) for group in program.groups for block in group.blocks)
    return {
        "programs": num_programs, "equal_to_the_picosecond": equal, "instructions": instructions,
        "with_micro_batches_left_out": repeated,
    }  # fmt: skip


def contention(num_plans: int = 40) -> dict[str, Any]:
    """Transformers in random degrees on one node: `forecast` against the engine on the whole lowered program, compute
    and communication slowing each other at the machine's rates in both."""
    config = TransformerConfig(
        num_layers=8, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000, seq=4096, dtype="bfloat16"
    )
    draw, errors = random.Random(1), []
    machine = Machine.load("h200-x8")
    worst: tuple[float, str] = (0.0, "")
    while len(errors) < num_plans:
        tp, pp = draw.choice((1, 2, 4, 8)), draw.choice((1, 2, 4))
        name = draw.choice(("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v", "looped_bfs"))
        virtual = 2 if (chunks_per_rank(name) or 2) == 2 else 1
        if tp * pp > 8:
            continue
        optimizer = Optimizer(
            kind="adamw", settings={"lr": 1e-4}, parallel_level=draw.choice((0, 1, 2, 3)),
            bucket_bytes=draw.choice((0, 25 * 2**20)), master_dtype=draw.choice((None, "float32")),
        )  # fmt: skip
        try:
            degrees = Degrees(
                dp=8 // tp // pp, tp=tp, pp=pp, micro_batch=draw.choice((1, 2)), global_batch=32, schedule=name,
                virtual=virtual, optimizer=optimizer, sequence_parallel=tp > 1 and draw.random() < 0.5,
            )  # fmt: skip
            layers = degrees.layers_of(config.num_layers)
        except TwofoldError:
            continue
        plan = uniform_plan(
            transformer(config, batch_size=32), machine, dp=degrees.dp, tp=tp, pp=pp, micro_batch=degrees.micro_batch,
            schedule=name, virtual=virtual, optimizer=optimizer, sequence_parallel=degrees.sequence_parallel,
            layers_per_stage=layers,
        )  # fmt: skip
        expected = simulate(lower(plan), machine, num_steps=1, with_memory=False).step_s
        error = forecast(config, degrees, machine).step_s / expected - 1
        errors.append(error)
        worst = max(worst, (abs(error), f"dp {degrees.dp} tp {tp} pp {pp} {name} level {optimizer.parallel_level}"))
    sizes = sorted(map(abs, errors))
    return {
        "plans": num_plans, "machine": machine.name, "median_error": statistics.median(sizes),
        "within_2_percent": sum(size <= 0.02 for size in sizes) / num_plans, "largest_error": worst[0],
        "largest_is": worst[1], "bias": statistics.fmean(errors),
    }  # fmt: skip


def _random_costs(num_stages: int, batch: int | None, seed: int) -> PipelineCosts:
    """Stages that all differ, with hosts and transfers."""
    draw = np.random.default_rng(seed)
    shape = (num_stages,) if batch is None else (batch, num_stages)

    def ns(low: int, high: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return draw.integers(low, high, shape) * 1000

    def action() -> MaxPlus:
        return MaxPlus.identity().wait_for("arrival").compute(ns(1, 50), ns(1000, 1200))

    return PipelineCosts(
        maps={kind: action() for kind in "FBIW"}, transfer_ps={"F": ns(10, 100), "B": ns(10, 100)},
        receive_dispatch_ps={"F": ns(1, 5), "B": ns(1, 5)},
    )  # fmt: skip


def timelines(num_ranks: int = 16, num_micro_batches: int = 256, batch: int = 256) -> dict[str, Any]:
    """One pipeline alone and in a batch, stages all different; the schedule was seen before, but for `first_ms`."""
    found: dict[str, Any] = {"ranks": num_ranks, "micro_batches": num_micro_batches, "batch": batch}
    for name in schedule_names():
        virtual = 2 if chunks_per_rank(name) is None else None
        schedule = make_schedule(name, num_ranks, num_micro_batches, virtual=virtual)
        alone = [_random_costs(schedule.num_stages, None, seed) for seed in range(5)]
        cold_s = best_s(lambda schedule=schedule, costs=alone[0]: pipeline_times(schedule, costs), 1)
        alone_s = [best_s(lambda schedule=schedule, costs=costs: pipeline_times(schedule, costs), 3) for costs in alone]
        many = _random_costs(schedule.num_stages, batch, 9)
        many_s = best_s(lambda schedule=schedule, many=many: pipeline_times(schedule, many), 3)
        found[name] = {
            "first_ms": 1e3 * cold_s, "alone_ms": 1e3 * statistics.median(alone_s),
            "each_in_batch_ms": 1e3 * many_s / batch,
        }  # fmt: skip
    return found


def declared_grid() -> list[Degrees]:
    """Llama-3-70B on 1,024 devices, 1,024 sequences a step: every combination of these that can be."""
    optimizers = [
        Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level, master_dtype="float32")
        for level in (0, 1, 3)
    ]
    spreads = [(name, chunks_per_rank(name) or chunks) for name in schedule_names() for chunks in (2, 5)]
    found = []
    for tp, pp, micro_batch, (name, virtual), recompute, optimizer, split in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8), dict.fromkeys(spreads), ("none", "selective", "full"), optimizers,
        (False, True),
    ):  # fmt: skip
        dp = 1024 // tp // pp
        if 1024 % (dp * micro_batch) or pp * virtual > 80 or (split and tp == 1):
            continue
        degrees = Degrees(
            dp=dp, tp=tp, pp=pp, micro_batch=micro_batch, global_batch=1024, schedule=name, virtual=virtual,
            recompute=recompute, optimizer=optimizer, sequence_parallel=split,
        )  # fmt: skip
        try:
            assert degrees.pipeline
        except TwofoldError:  # too few micro-batches for the schedule
            continue
        found.append(degrees)
    return found


def grid_of_this_process() -> dict[str, Any]:
    """Templates, schedules and prices are all made: the process is new. Estimates of all, forecasts of a few."""
    config, machine = transformer_config("llama-3-70b"), Machine.load("h100-sxm-x1024")
    begin = time.process_time()
    degrees = declared_grid()
    found = estimate_grid(config, degrees, machine)
    took_s = time.process_time() - begin
    chosen = random.Random(2).sample(range(len(degrees)), 100)
    begin = time.process_time()
    exact = forecast_grid(config, [degrees[number] for number in chosen], machine)
    exact_s = time.process_time() - begin
    errors = sorted(abs(found[number].step_s / one.step_s - 1) for number, one in zip(chosen, exact, strict=True))
    memory = sorted(
        abs(found[number].peak_bytes / one.peak_bytes - 1) for number, one in zip(chosen, exact, strict=True)
    )
    return {
        "configurations": len(degrees), "schedules": len({id(degree.pipeline) for degree in degrees}),
        "seconds": took_s, "estimates_per_second": len(degrees) / took_s,
        "forecasts_per_second": len(chosen) / exact_s,
        "estimate_against_forecast": {
            "median": statistics.median(errors), "p90": errors[90], "largest": errors[-1],
            "median_of_peaks": statistics.median(memory), "largest_of_peaks": memory[-1],
        },
    }  # fmt: skip


def grid(repeats: int = 3) -> dict[str, Any]:
    """Whole predictions from a cold start, imports apart; each run in a new process. And one whose like was asked."""
    runs = []
    for _ in range(repeats):
        command = [sys.executable, "-m", "benchmarks.simulator", "--cold"]
        runs.append(json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout))
    config, machine = transformer_config("llama-3-70b"), Machine.load("h100-sxm-x1024")
    degrees = Degrees(dp=16, tp=8, pp=8, global_batch=512)
    alone_s = best_s(lambda: forecast(config, degrees, machine), 100)
    estimate_s = best_s(lambda: estimate(config, degrees, machine), 100)
    best = max(runs, key=lambda run: run["estimates_per_second"])
    return best | {
        "best_of": repeats, "one forecast of 8 x 32, seen before, ms": 1e3 * alone_s,
        "one estimate of 8 x 32, seen before, ms": 1e3 * estimate_s,
    }  # fmt: skip


def engine() -> dict[str, Any]:
    """Instructions per second of the SimPy engine, best of five."""
    schedule = make_schedule("1f1b", 16, 256)
    work = dict.fromkeys("FBIW", 10)
    program = handmade.pipeline(schedule.order, schedule.placement, work)
    count = sum(1 for rank in range(16) for _ in program.walk(rank))
    found: dict[str, Any] = {}
    for steps, with_memory in ((1, False), (4, False), (1, True)):
        took_s = best_s(
            lambda steps=steps, with_memory=with_memory: run_program(
                program, handmade.written_price, num_steps=steps, with_memory=with_memory
            ),
            5,
        )
        name = f"pipeline of 16 x 256, {steps} step{'s' * (steps > 1)}{', with memory' * with_memory}, per second"
        found[name] = steps * count / took_s
    config = TransformerConfig(
        num_layers=2, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000, seq=4096, dtype="bfloat16"
    )
    machine = Machine.load("h200-x8")
    plan = uniform_plan(transformer(config, batch_size=16), machine, dp=2, tp=4, micro_batch=1)
    lowered = lower(plan)
    count = sum(1 for rank in range(8) for _ in lowered.walk(rank))
    took_s = best_s(lambda: simulate(lowered, machine, num_steps=1), 3)
    found["transformer of 2 layers on 8 ranks, with contention and memory, s"] = took_s
    found["its instructions per second"] = count / took_s
    return found


def simpy_pipeline(schedule: Schedule, work_ps: Mapping[str, int], transfer_ps: int) -> list[tuple[int, str, int, int]]:
    """The pipeline that `handmade.pipeline` writes, as a plain SimPy model: one process per rank and one store per pair
    of neighbours. A receive takes what is in the store, and then the time of the transfer.

    Returns:
        (rank, action, start, end) of every action.
    """
    env = simpy.Environment(initial_time=0)
    last = schedule.num_stages - 1
    neighbours = [(stage, stage + way) for stage in range(last + 1) for way in (-1, 1)]
    stores = {pair: simpy.Store(env) for pair in neighbours}
    spans: list[tuple[int, str, int, int]] = []

    def run(rank: int, actions: Sequence[Action]) -> Iterator[simpy.Event]:
        for action in actions:
            kind, stage = str(action.kind), action.stage
            way = 1 if kind == "F" else -1
            before, after = stage - way, stage + way
            if kind != "W" and 0 <= before <= last:
                yield stores[before, stage].get()
                if transfer_ps:
                    yield env.timeout(transfer_ps)
            start = env.now
            yield env.timeout(work_ps[kind])
            spans.append((rank, str(action), start, env.now))
            if kind != "W" and 0 <= after <= last:
                yield stores[stage, after].put(action.micro_batch)

    for rank, actions in enumerate(schedule.order):
        env.process(run(rank, actions))
    env.run()
    return spans


def against_simpy(repeats: int = 9) -> dict[str, Any]:
    """Actions per second of the engine and of a plain SimPy model with stores, one after the other in turn, best of
    `repeats`; both find the same times. The engine matches and checks the program and keeps named spans, every time."""
    work, found = dict.fromkeys("FBIW", 10), {}
    for name, num_ranks, num_micro_batches, transfer_ps in (
        ("1f1b", 16, 256, 3), ("1f1b", 16, 256, 0), ("zb_h1", 8, 512, 3), ("gpipe", 32, 128, 3),
    ):  # fmt: skip
        schedule = make_schedule(name, num_ranks, num_micro_batches)
        program = handmade.pipeline(schedule.order, schedule.placement, work, transfer=(0, transfer_ps))
        timeline = run_program(program, handmade.written_price, with_memory=False)
        ours = sorted(
            (span.rank, span.id.removesuffix("/work"), span.start_ps, span.end_ps)
            for span in timeline.spans()
            if span.stream == "compute"
        )
        assert ours == sorted(simpy_pipeline(schedule, work, transfer_ps))
        plain = partial(simpy_pipeline, schedule, work, transfer_ps)
        engine = partial(run_program, program, handmade.written_price, with_memory=False)
        plain_s = engine_s = float("inf")
        for _ in range(repeats):
            plain_s = min(plain_s, best_s(plain, 1))
            engine_s = min(engine_s, best_s(engine, 1))
        actions = sum(map(len, schedule.order))
        found[f"{name}, {num_ranks} ranks, {num_micro_batches} micro-batches, transfers of {transfer_ps}"] = {
            "actions": actions, "simpy_actions_per_s": actions / plain_s, "engine_actions_per_s": actions / engine_s,
            "ratio": plain_s / engine_s,
        }  # fmt: skip
    return found


def slow_ranks(repeats: int = 3) -> dict[str, Any]:
    """Seconds to simulate a step of data-parallel x tensor-parallel ranks, all equal and with slow ones among them."""
    config = TransformerConfig(
        num_layers=4, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000, seq=4096, dtype="bfloat16"
    )
    found = {}
    for dp in (2, 8, 32, 512):
        machine = Machine.load(f"h100-sxm-x{8 * dp}")
        optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4})
        plan = uniform_plan(
            transformer(config, batch_size=2 * dp), machine, dp=dp, tp=8, micro_batch=1, optimizer=optimizer
        )
        program = lower(plan)
        for slow in ({}, {3: 1.1}, {3: 1.1, 12: 1.2}):
            run = partial(
                simulate,
                program,
                machine,
                num_steps=1,
                what_if=WhatIf(slowdown=slow),
                fold_ranks=True,
                with_memory=False,
            )
            found[f"{8 * dp} ranks, {len(slow)} slow"] = {
                "seconds": best_s(run, repeats), "step_s": run().step_s, "kinds_of_ranks": len(run().represents),
            }  # fmt: skip
    return found


def scale() -> dict[str, Any]:
    """Llama-3.1-405B in dp x 8 x 16 with 16 micro-batches: the fast forecast, and SimPy with equal ranks folded."""
    config = transformer_config("llama-3.1-405b")
    found: dict[str, Any] = {}
    for dp in (128, 782):
        num_devices = dp * 8 * 16
        machine = Machine.load(f"h100-sxm-x{num_devices}")
        optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4})
        degrees = Degrees(dp=dp, tp=8, pp=16, global_batch=16 * dp, optimizer=optimizer)
        begin = time.process_time()
        fast = forecast(config, degrees, machine)
        fast_s = time.process_time() - begin
        layers = degrees.layers_of(config.num_layers)
        begin = time.process_time()
        graph = transformer(config, batch_size=16 * dp)
        plan = uniform_plan(
            graph, machine, dp=dp, tp=8, pp=16, micro_batch=1, optimizer=optimizer, layers_per_stage=layers
        )
        program = lower(plan)
        lowered_s = time.process_time() - begin
        begin = time.process_time()
        timeline = simulate(program, machine, num_steps=1, fold_ranks=True)
        simulated_s = time.process_time() - begin
        found[f"{num_devices} devices"] = {
            "forecast_s": fast_s, "forecast_step_s": fast.step_s, "lowering_s": lowered_s, "simpy_s": simulated_s,
            "simpy_step_s": timeline.step_s, "ranks_simulated": len(timeline.represents), "spans": len(timeline.rank),
        }  # fmt: skip
    found["forecast_s by micro-batches"] = {
        count: best_s(
            lambda count=count: forecast(config, Degrees(dp=128, tp=8, pp=16, global_batch=count * 128), machine), 3
        )
        for count in (64, 128, 256, 512)
    }
    found["peak_memory_MB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return found


if __name__ == "__main__":
    main()
