"""The search over degrees against plain loops over its space: `python -m benchmarks.search.spaces --count 200`.

Random small transformers on random machines (links up to 100 times slower or 4 times faster than they are), some
degrees pinned, half of them with a memory limit below what the fastest plan needs, for every stack. Loops that share
nothing with the search forecast every configuration. A search is beaten if one of them is faster than its result by
more than the gap that it states (0 unless the clocks of plans differ), or if one fits where it finds none; those that
are faster within the gap are counted, too. The spaces have 20 to `--most` configurations. A fourth of the problems has
no pins but tp = pp = cp = 1 and links up to 64 times slower, where recomputing can save time: searches that prune by
"recomputing only adds" fail there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import FOLDER
from benchmarks.kept import keep
from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, transformer_config
from plans.schedules import chunks_per_rank, schedule_names
from search.devices import Candidate, Pins, Problem, SearchResult, describe, solve
from simulator.forecast import forecast
from simulator.stacks import stack_named

__all__ = ["compared", "every_configuration", "problem"]

RESULTS = FOLDER / "results" / "search_spaces.json"
MACHINES = ("h100-sxm-x8", "h100-sxm-x16", "h100-sxm-x24", "a100-40gb-x16", "h200-x16", "b200-x16")
STACKS = ("twofold", "twofold", "twofold", "torch", "torch-compile", "megatron")
MODES = ("none", "memory_bound", "selective", "selective_op", "full")
AXES = ("tp", "cp", "dp", "pp")
TOLERANCE = 1e-7
"""Relative; steps are rounded to picoseconds, instruction by instruction."""


def divisors(number: int) -> list[int]:
    """Of a whole number, in order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def even_splits(layers: int, chunks: int) -> list[tuple[int, ...]]:
    """Even splits whose longer chunks come first, and last."""
    width, more = divmod(layers, chunks)
    first = tuple(width + (at < more) for at in range(chunks))
    return list(dict.fromkeys((first, first[::-1])))


def every_configuration(problem: Problem) -> Iterator[dict[str, Any]]:
    """Degrees by name of all configurations of a space, by plain loops.

    Args:
        problem: its pins hold; context parallelism below 512 tokens a rank is not in the space unless pinned.
    """
    config, pins, devices = problem.config, problem.pins, problem.num_devices

    def left(name: str, values: Any) -> list[Any]:
        return [each for each in values if pins.given.get(name) in (None, each)]

    for tp, cp, pp in itertools.product(divisors(devices), repeat=3):
        dp, rest = divmod(devices, tp * cp * pp)
        pinned = all(left(name, [value]) for name, value in zip(AXES, (tp, cp, dp, pp), strict=True))
        if rest or not pinned or problem.global_batch % dp:
            continue
        if cp > 1 and pins.cp is None and config.seq < 512 * cp:
            continue
        mesh = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
        experts = config.experts.num_experts if config.experts else 1
        for ep, micro_batch, (schedule, virtual, layers) in itertools.product(
            left("ep", [each for each in divisors(experts) if dp % each == 0]),
            left("micro_batch", [each for each in divisors(problem.global_batch // dp) if each <= 64]),
            list(_splits(problem, pp)),
        ):
            for values in _settings(problem, mesh, layers):
                yield mesh | {"ep": ep, "micro_batch": micro_batch, "schedule": schedule, "virtual": virtual} | values


def _splits(problem: Problem, pp: int) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Schedules, chunks per rank and blocks of every chunk."""
    pins, num_layers = problem.pins.given, problem.config.num_layers
    for schedule in schedule_names() if pp > 1 or "schedule" in pins else ["1f1b"]:
        fixed = chunks_per_rank(schedule)
        for virtual in [fixed] if fixed else range(2, 9):
            wanted = pins.get("schedule", schedule) == schedule and pins.get("virtual", virtual) == virtual
            if not wanted or pp * virtual > num_layers + 2:
                continue
            for layers in even_splits(num_layers, pp * virtual):
                if pins.get("layers", layers) == layers and 0 not in layers[1:-1]:
                    yield schedule, virtual, layers


def _settings(problem: Problem, mesh: Mapping[str, int], layers: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Sequence parallelism, recomputation, optimizer levels and orders of axes."""
    pins, most = problem.pins.given, max(layers)
    split = [axis for axis in AXES if mesh[axis] > 1]
    orders = [(*order, *(axis for axis in AXES if axis not in split)) for order in itertools.permutations(split)]
    orders = [pins["order"]] if "order" in pins else orders
    for sequence, mode, level, order in itertools.product(
        (False, True) if mesh["tp"] > 1 else (False,), MODES, range(4) if mesh["dp"] * mesh["cp"] > 1 else (0,), orders
    ):
        given = {"sequence_parallel": sequence, "recompute": mode, "zero": level, "order": order}
        if any(pins.get(name, value) != value for name, value in given.items()):
            continue
        counts: list[int | None] = [None] if mode == "none" else [None, *range(1, most)]
        if "recompute_layers" in pins:
            asked = pins["recompute_layers"]
            counts = [] if mode == "none" else [None if asked >= most else asked]
        for count in counts:
            yield given | {"layers": layers, "recompute_layers": count}


def _model(rng: random.Random) -> TransformerConfig:
    kind = rng.choice(["gpt", "llama", "moe"])
    num_layers, seq = rng.choice([2, 3, 4, 5, 6, 8]), rng.choice([512, 1024, 2048, 4096])
    if kind == "moe":
        return transformer_config("mixtral-8x7b", num_layers=num_layers, seq=seq)
    heads = rng.choice([4, 6, 8, 12, 16])
    hidden = heads * rng.choice([64, 128])
    return TransformerConfig(
        name="random", num_layers=num_layers, hidden=hidden, num_heads=heads, seq=seq,
        num_kv_heads=rng.choice(divisors(heads)) if kind == "llama" else heads, ffn=rng.choice([3, 4]) * hidden,
        vocab=rng.choice([1024, 32_000, 128_256]) // heads * heads,
    )  # fmt: skip


def _machine(rng: random.Random, factors: tuple[float, ...]) -> Machine:
    machine = Machine.load(rng.choice(MACHINES))
    links = [
        msgspec.structs.replace(link, bandwidth_Bps=link.bandwidth_Bps * rng.choice(factors)) for link in machine.links
    ]
    return msgspec.structs.replace(machine, links=tuple(links))


def _problem(rng: random.Random) -> Problem:
    """May be refused."""
    of_recompute = rng.random() < 0.25
    config = _model(rng)
    machine = _machine(rng, (1, 1 / 4, 1 / 16, 1 / 64) if of_recompute else (1, 1, 1 / 16, 1 / 4, 4, 1 / 100))
    devices = rng.choice([each for each in (1, 2, 3, 4, 6, 8, 12, 16) if each <= machine.num_devices])
    drawn = {
        "tp": divisors(devices), "pp": divisors(devices), "dp": divisors(devices), "micro_batch": [1, 2],
        "recompute": MODES, "zero": range(4), "schedule": schedule_names(), "sequence_parallel": [False], "cp": [1],
        "recompute_layers": [1, 2],
    }  # fmt: skip
    pins = {name: rng.choice(list(values)) for name, values in drawn.items() if rng.random() < 0.25}
    return Problem(
        config=config, machine=machine, num_devices=devices, global_batch=devices * rng.choice([1, 2, 3, 4]),
        pins=Pins(tp=1, pp=1, cp=1) if of_recompute else Pins(**pins), stack=stack_named(rng.choice(STACKS)),
    )  # fmt: skip


def problem(seed: int, most: int) -> Problem:
    """The first problem of a seed with 20 to `most` configurations."""
    rng = random.Random(seed)
    while True:
        try:
            made = _problem(rng)
        except TwofoldError:
            continue
        if 20 <= sum(1 for _ in itertools.islice(every_configuration(made), most + 1)) <= most:
            return made


def compared(seed: int, most: int = 3000) -> dict[str, Any]:
    """The results of the search and of the loops for one problem.

    `above` is the step of the search over the least of the loops, less 1.
    """
    rng, asked = random.Random(seed), problem(seed, most)
    every = [(made.step_s, made.peak_bytes) for made in map(_forecast_of(asked), every_configuration(asked)) if made]
    started_s = time.process_time()
    found = _found(asked)
    if found is not None and rng.random() < 0.5:
        limit_bytes = int(found.best.forecast.peak_bytes * rng.choice([0.95, 0.8, 0.6, 0.5, 0.35]))
        asked = asked.changed(memory_limit_bytes=limit_bytes)
        found = _found(asked)
    search_s = time.process_time() - started_s
    least_s = min((step_s for step_s, peak_bytes in every if peak_bytes <= asked.limit_bytes), default=None)
    row: dict[str, Any] = {
        "seed": seed, "configurations": len(every), "stack": asked.stack.name, "least_s": least_s,
        "search_s": search_s,
    }  # fmt: skip
    if found is None or least_s is None:
        return row | {"above": 0.0, "beaten": least_s is not None}
    best = found.best
    above = best.forecast.step_s / least_s - 1
    return row | {
        "above": above, "gap": found.gap, "plan": describe(best.degrees), "beaten": above > found.gap + TOLERANCE,
    }  # fmt: skip


def _found(asked: Problem) -> SearchResult[Candidate] | None:
    try:
        return solve(asked)
    except TwofoldError:  # nothing fits, or no configuration is valid
        return None


def _forecast_of(asked: Problem) -> Any:
    def of(values: dict[str, Any]) -> Any:
        try:
            return forecast(asked.config, asked.degrees(values), asked.machine, stack=asked.stack)
        except TwofoldError:
            return None

    return of


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.spaces", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=200, help="problems")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem")
    parser.add_argument("--most", type=int, default=3000, help="configurations of a space at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--save", type=Path, nargs="?", const=RESULTS, help="write the figures to a file")
    given = parser.parse_args()
    rows = []
    with ProcessPoolExecutor(given.jobs) as pool:
        for row in pool.map(partial(compared, most=given.most), range(given.seed, given.seed + given.count)):
            rows.append(row)
            if row["above"] > TOLERANCE or row["beaten"]:
                print(json.dumps(row), flush=True)
            if len(rows) % 20 == 0:
                print(f"{len(rows)} of {given.count}", flush=True)
            if given.save:  # a run that is interrupted keeps what is known
                keep(given.save, "spaces", _figures(rows))
    found = _figures(rows)
    print(json.dumps(found, indent=1))
    return 1 if found["beaten"] else 0


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    beaten = [row for row in rows if row["beaten"]]
    return {
        "problems": len(rows), "configurations": sum(row["configurations"] for row in rows),
        "nothing_fits": sum(row["least_s"] is None for row in rows),
        "stacks": {name: sum(row["stack"] == name for row in rows) for name in dict.fromkeys(STACKS)},
        "beaten": len(beaten), "beaten_seeds": [row["seed"] for row in beaten],
        "faster_within_gap": sum(row["above"] > TOLERANCE and not row["beaten"] for row in rows),
        "largest_above": max(row["above"] for row in rows),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
