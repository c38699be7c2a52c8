"""A configuration's forecast, its lowered program and the event engine say the same.

    python -m benchmarks.simulator.one_world [--count 2000] [--seed 1] [--machines KIND ...] [--seconds S]
                                             [--jobs N] [--save]

Random degrees of random models on random machines. For every one that can be: the symbolic bodies of each pipeline rank
against the priced bodies of the lowered program (calls, host time, picoseconds, channels, one by one), the peak of its
memory against the program's (bytes), the forecast against the engine without contention (picoseconds, and the parts of
its third step as shares of it) and with it (relative error). Steps in which slices or pairs take turns are forecast
from their program by the event engine, with equal ranks once: they are compared with the engine that runs every rank.
Nothing is left out; what cannot be is refused by both, and counted. Machines are of many kinds
(`benchmarks.simulator.machines`), each with figures of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace

import msgspec
import numpy as np

from benchmarks import FOLDER
from benchmarks.simulator.machines import KINDS, machines_of
from costmodels import Machine, executing
from costmodels.price.clock import at_usual_clock
from plans.degrees import RECOMPUTE_MODES, Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.lower import lower
from plans.lower.lower import schedule_of
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import EXECUTIONS, Plan
from plans.program import Program
from plans.schedules import chunks_per_rank, schedule_names
from plans.timeline import Timeline
from simulator import simulate
from simulator.forecast import Forecast, forecast
from simulator.forecast.body import ISSUE, WAIT, Op
from simulator.forecast.predict import step_forecast
from simulator.forecast.program import bodies_of_program
from simulator.forecast.turns import program_of, simulated
from simulator.timeline.memory import peak_of_order

RESULTS = FOLDER / "results" / "one_world.json"
CASES_OF_A_PART = 50

MODELS = (
    TransformerConfig(
        name="wide", num_layers=8, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000, seq=4096,
        dtype="bfloat16",
    ),
    TransformerConfig(
        name="small", num_layers=8, hidden=1024, num_heads=16, num_kv_heads=8, ffn=2816, vocab=32_000, seq=512,
        dtype="bfloat16",
    ),
    TransformerConfig(
        name="two-heads", num_layers=6, hidden=1024, num_heads=16, num_kv_heads=2, ffn=2816, vocab=8000, seq=512,
        dtype="bfloat16",
    ),
    TransformerConfig(
        name="gpt", num_layers=6, hidden=768, num_heads=12, ffn=3072, vocab=50_304, seq=1024, gated=False, norm="layer",
        qkv_bias=True, out_bias=True, mlp_bias=True, position="learned", tied=True, dtype="bfloat16",
    ),
    TransformerConfig(
        name="mixture", num_layers=4, hidden=1024, num_heads=16, num_kv_heads=8, ffn=2816, vocab=8000, seq=512,
        dtype="bfloat16", experts=Experts(num_experts=8, top_k=2, ffn=1408, num_shared=1, num_dense_layers=1),
    ),
)  # fmt: skip


@dataclass
class Case:
    """One configuration; `kind` is that of its machine's network."""

    kind: str
    config: TransformerConfig
    degrees: Degrees
    machine: Machine
    plan: Plan


@dataclass
class Score:
    """What was found; `differ` says of each configuration that differs how much, bodies and memory above all."""

    cases: int = 0
    refused: int = 0
    bodies_equal: int = 0
    memory_equal: int = 0
    time_equal: int = 0
    turns: int = 0
    not_forecast: Counter[str] = field(default_factory=Counter)
    quiet_errors: list[float] = field(default_factory=list)
    part_errors: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    differ: list[tuple[float, str]] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Count what another one has found, too."""
        for each in fields(self):
            own, its = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, own + its)

    def row(self) -> dict[str, object]:
        """As it is printed and saved."""
        return {
            "cases": self.cases, "of_turns": self.turns, "refused": self.refused,
            "not_forecast": dict(self.not_forecast), "bodies_equal": self.bodies_equal,
            "peak_memory_equal": self.memory_equal, "time_equal_without_overlap": self.time_equal,
            "without_overlap": _sizes(self.quiet_errors),
            "parts_of_the_step_without_overlap": _sizes(self.part_errors),
            "contention": _sizes(self.errors),
        }  # fmt: skip


def _sizes(errors: Sequence[float]) -> dict[str, float]:
    """Of relative errors."""
    sizes = np.abs(errors) if errors else np.zeros(1)
    return {
        "median": float(np.median(sizes)), "p95": float(np.quantile(sizes, 0.95)), "largest": float(sizes.max()),
        "within_2_percent": float((sizes <= 0.02).mean()), "above_4_percent": int((sizes > 0.04).sum()),
    }  # fmt: skip


def draw_case(draw: random.Random, num_ranks: int = 16, kinds: Sequence[str] = KINDS) -> Case | None:
    """A random configuration; None where it cannot be."""
    config = draw.choice(MODELS)
    config = replace(config, num_layers=draw.choice((config.num_layers, 5, 9, 12)))
    kind, machine = draw.choice([(kind, machine) for kind in kinds for machine in machines_of()[kind]])
    dp, tp, pp, cp = (draw.choice((1, 2, 4)) for _ in range(4))
    if dp * tp * pp * cp > min(num_ranks, machine.num_devices):
        return None
    name = draw.choice(schedule_names())
    virtual = 2 if (chunks_per_rank(name) or 2) == 2 else 1
    optimizer = Optimizer(
        kind="adamw", settings={"lr": 1e-4}, parallel_level=draw.choice((0, 1, 2, 3)),
        bucket_bytes=draw.choice((0, 2**20, 25 * 2**20)), master_dtype=draw.choice((None, "float32")),
        gradient_dtype=draw.choice((None, "float32")), reduce_every=draw.choice(("micro_batch", "step")),
    )  # fmt: skip
    ep = draw.choice((1, 2)) if config.experts is not None and dp > 1 else 1
    degrees_of = {
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro_batch": draw.choice((1, 2)), "schedule": name,
        "virtual": virtual, "optimizer": optimizer, "sequence_parallel": tp > 1 and draw.random() < 0.5,
        "recompute": draw.choice(RECOMPUTE_MODES),
    }  # fmt: skip
    try:
        degrees = Degrees(global_batch=16, **degrees_of)
        apart = random.Random(str(degrees))  # so that the rest does not depend on it
        more: dict[str, object] = {"fused": apart.random() < 0.5}
        if apart.random() < 0.25:
            more |= {"interleave": degrees.micro_batch} if name != "dualpipe_v" else {"overlap_pairs": True}
        if apart.random() < 0.25:
            more |= {"receives": "needed"}
        degrees = replace(degrees, layers=degrees.layers_of(config.num_layers), **more)
        plan = plan_of(degrees, transformer(config, batch_size=16))
    except TwofoldError:
        return None
    return Case(kind=kind, config=config, degrees=degrees, machine=machine, plan=plan)


def check(case: Case, score: Score) -> None:
    """Compare one configuration in every way, at one clock: its own depends on the pace of several steps."""
    case = replace(case, machine=at_usual_clock(case.machine))
    quiet = msgspec.structs.replace(case.machine, overlap=())
    try:
        program = lower(case.plan)
        step = None if case.degrees.takes_turns else step_forecast(case.config, case.degrees, quiet)
    except TwofoldError:
        score.refused += 1
        return
    if step is None:
        _check_turns(case, program, score)
        return
    schedule = schedule_of(case.plan)
    try:
        ranks, _ = bodies_of_program(program, schedule, quiet)
    except TwofoldError as error:
        score.not_forecast[str(error).split(":")[-1].strip()[:60]] += 1
        return
    score.cases += 1
    equal = all(
        _normal(own.begin) == _normal(other.begin) and _normal(own.end) == _normal(other.end)
        and all(_normal(ops) == _normal(other.actions.get(key, ())) for key, ops in own.actions.items())
        for own, other in zip(ranks, (rank.undisturbed for rank in step.ranks), strict=True)
    )  # fmt: skip
    peaks = [peak for peak, _ in step.peaks]
    same_peaks = peaks == [peak_of_order(group).peak_bytes for group in program.groups]
    timeline = simulate(program, quiet, num_steps=3, with_memory=False)
    times = step.end_ps(), int(timeline.step_end_ps[0])
    score.bodies_equal += equal
    score.memory_equal += same_peaks
    score.time_equal += times[0] == times[1]
    score.quiet_errors.append(times[0] / times[1] - 1)
    score.part_errors.append(max(map(abs, part_errors(step.forecast(), timeline))))
    said = f"{case.config.name} {case.config.num_layers} {case.degrees} {case.machine.name}"
    if not (equal and same_peaks and times[0] == times[1]):
        size = abs(score.quiet_errors[-1]) if equal and same_peaks else math.inf
        score.differ.append((size, f"{said}: bodies {equal}, memory {same_peaks}, times {times}"))
    contended = step_forecast(case.config, case.degrees, case.machine).end_ps()
    score.errors.append(contended / _engine_ps(program, case.machine) - 1)
    if abs(score.errors[-1]) > 0.04:
        score.differ.append((abs(score.errors[-1]), f"{said}: {score.errors[-1]:+.2%}"))


def part_errors(found: Forecast, timeline: Timeline) -> tuple[float, float, float]:
    """By how much of a step exposed communication, host wait and bubble of a forecast are longer than the engine's."""
    step_s = timeline.step_interval_s
    return (
        (found.exposed_comm_s - timeline.exposed_comm_s) / step_s, (found.host_wait_s - timeline.host_wait_s) / step_s,
        found.bubble_fraction - timeline.bubble_fraction,
    )  # fmt: skip


def _check_turns(case: Case, program: Program, score: Score) -> None:
    """Compare a step in which slices or pairs take turns."""
    score.cases += 1
    score.turns += 1
    quiet = msgspec.structs.replace(case.machine, overlap=())
    lowered, timelines = program_of(case.config, case.degrees), {}
    for name, machine in (("quiet", quiet), ("contended", case.machine)):
        timelines[name] = simulated(lowered, machine, num_steps=1)
    seen = forecast(case.config, case.degrees, case.machine)
    peaks = [peak_of_order(group).peak_bytes for group in program.groups]
    equal, same_peaks = lowered.groups == program.groups, seen.peak_bytes == max(peaks)
    score.bodies_equal += equal
    score.memory_equal += same_peaks
    times = [(int(timelines[name].step_end_ps[0]), _engine_ps(program, machine, fold=False))
             for name, machine in (("quiet", quiet), ("contended", case.machine))]  # fmt: skip
    score.time_equal += times[0][0] == times[0][1]
    score.quiet_errors.append(times[0][0] / times[0][1] - 1)
    score.errors.append(times[1][0] / times[1][1] - 1)
    if not (equal and same_peaks and all(own == engine for own, engine in times)):
        size = max(abs(score.quiet_errors[-1]), abs(score.errors[-1])) if equal and same_peaks else math.inf
        said = f"{case.config.name} {case.degrees} {case.machine.name}"
        score.differ.append((size, f"{said}: bodies {equal}, memory {same_peaks}, times {times}"))


def _engine_ps(program: Program, machine: Machine, *, fold: bool | None = None) -> int:
    timeline = simulate(program, machine, num_steps=1, with_memory=False, fold_ranks=fold)
    return int(timeline.step_end_ps[0])


def _normal(ops: Sequence[Op]) -> list[tuple[object, ...]]:
    """Operations with tokens by the number of what they wait for."""
    numbers: dict[str, int] = {}
    found: list[tuple[object, ...]] = []
    for op in ops:
        if op.kind == ISSUE:
            numbers[op.token] = len(found)
            found.append((*op[:5], op.payload, len(found)))
        elif op.kind == WAIT:
            found.append((op.kind, op.dispatch_ps, numbers.get(op.token, -1)))
        else:
            found.append(tuple(op[:4]))
    return found


def run(
    count: int, seed: int, execution: str = "eager", kinds: Sequence[str] = KINDS, ends: float = math.inf
) -> dict[str, Score]:
    """Compare `count` configurations under an execution, or fewer if the clock (`time.monotonic`) passes `ends`;
    returns what was found on machines of each kind."""
    draw, found = random.Random(seed), {kind: Score() for kind in kinds}
    while sum(score.cases for score in found.values()) < count and time.monotonic() < ends:
        case = draw_case(draw, kinds=kinds)
        if case is not None:
            check(replace(case, machine=executing(case.machine, execution)), found[case.kind])
    return found


def run_in_parts(
    jobs: int, count: int, seed: int, execution: str, kinds: Sequence[str], seconds: float
) -> Iterator[dict[str, Score]]:
    """`run` in parts of at most 50 configurations, several at a time; each has a seed of its own from `seed` on.

    Yields what was found so far after every part. Every part has a new process: its memory goes back when it ends, and
    nothing runs on for long if this process is killed.
    """
    found = {kind: Score() for kind in kinds}
    ends = time.monotonic() + seconds
    sizes = [min(CASES_OF_A_PART, count - begin) for begin in range(0, count, CASES_OF_A_PART)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        parts = [pool.submit(run, size, seed + number, execution, kinds, ends) for number, size in enumerate(sizes)]
        for number, part in enumerate(parts):
            for kind, score in part.result().items():
                found[kind].add(score)
            cases = sum(score.cases for score in found.values())
            print(f"part {number + 1} of {len(parts)}: {cases} configurations", file=sys.stderr, flush=True)
            yield found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--execution", choices=EXECUTIONS, default="eager")
    parser.add_argument("--machines", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    parts = run_in_parts(
        arguments.jobs, arguments.count, arguments.seed, arguments.execution, arguments.machines, arguments.seconds
    )
    for of_kind in parts:
        whole = Score()
        for score in of_kind.values():
            whole.add(score)
        found = {
            "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(),
            "command": f"python -m benchmarks.simulator.one_world {' '.join(sys.argv[1:])}".strip(),
            **whole.row(), "machines": {kind: score.row() for kind, score in of_kind.items()},
            "differ": [said for _, said in sorted(whole.differ, reverse=True)[:50]],
        }  # fmt: skip
        if arguments.save:  # a run that is interrupted keeps what is known
            RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
