"""Host time of the executor itself: the issue time of each instruction of a program, for plans given as files."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from costmodels.fit.points import Point
from costmodels.price.instruction import compute_class
from executor.calibrate.timing import Timer
from executor.data.batches import random_batches, rows_of_rank
from executor.kernels import rule_of
from executor.kernels.fused import FusedRun
from executor.step.groups import Groups
from executor.step.interpreter import Interpreter
from executor.weights.models import RandomParameters
from plans.errors import TwofoldError
from plans.lower import lower
from plans.plan import load_plan
from plans.program import Instruction, Kind

__all__ = ["code_of", "dispatch_class", "instruction_points"]

WARM_STEPS = 3
STEPS = 12
KEPT = 0.99
"""Share of the times of an instruction that is kept: the shortest."""

MOST_PARAMETERS = 4_000_000
"""Larger plans keep the device busy, so their host times are less informative."""


def dispatch_class(instruction: Instruction) -> str:
    """One of `costmodels.machine.machine.DISPATCH_CLASSES`."""
    if instruction.kind is Kind.COMPUTE:
        return compute_class(instruction.call)
    if instruction.kind is Kind.COLLECTIVE:
        return "collective"
    return "wait" if instruction.kind is Kind.WAIT else "transfer"


@lru_cache(maxsize=1024)
def code_of(call: str) -> str:
    """A digest of the file that the rule of a call is in: figures of other code are not figures of this one."""
    try:
        rule: Any = FusedRun if call == "fused" else rule_of(call)
    except TwofoldError:  # a collective, a transfer, a wait
        return ""
    while isinstance(rule, partial):
        rule = rule.func
    source = inspect.getsource(sys.modules[rule.__module__])
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def instruction_points(timer: Timer, plans: Sequence[Path]) -> Iterator[Point]:
    """Run the plans for as many ranks as this job has, and time their instructions, by call and by class.

    Their tensors should be tiny, so that the host is what takes the time.
    """
    by_call: dict[tuple[str, str], list[float]] = defaultdict(list)
    by_class: dict[str, list[float]] = defaultdict(list)
    between: list[float] = []
    world = dist.get_world_size() if dist.is_initialized() else 1
    for path in plans:
        plan = load_plan(path)
        if plan.num_ranks != world or _num_parameters(plan) > MOST_PARAMETERS:
            continue
        for instruction, taken_s in _run(timer, plan, between):
            which = dispatch_class(instruction)
            by_call[instruction.call or str(instruction.kind), which].append(taken_s)
            by_class[which].append(taken_s)
    common: dict[str, Any] = {"kind": "dispatch", "stack": "twofold", "ranks": world, "active_ranks": world}
    for (call, which), seconds in sorted(by_call.items()):
        options: dict[str, int | float | str] = {"class": which}
        if code := code_of(call):
            options["code"] = code
        yield Point(call=call, options=options, **common, **_summary(seconds))
    for which, seconds in sorted(by_class.items()):
        yield Point(call=which, **common, **_summary(seconds, adds_up=False))
    if between:
        yield Point(call="between", **common, **_summary(between))


def _num_parameters(plan: Any) -> int:
    return sum(tensor.num_elements for tensor in plan.graph.parameters)


def _run(timer: Timer, plan: Any, between: list[float]) -> Iterator[tuple[Instruction, float]]:
    device, program = timer.device, lower(plan)
    alone = program.num_ranks == 1
    rank = 0 if alone else dist.get_rank()
    with contextlib.ExitStack() as stack:
        groups = None if alone else Groups(program, device)
        if groups is not None:
            stack.callback(groups.close)
        interpreter = Interpreter(program, rank, device, groups)
        interpreter.set_parameters(RandomParameters(plan.graph, 0))
        feed = rows_of_rank(plan, rank, random_batches(plan.graph, 0, WARM_STEPS + STEPS))
        for step, batch in enumerate(feed):
            if step < WARM_STEPS:
                interpreter.step(batch)
                continue
            _, recorded = interpreter.record(batch)
            for code, (start_ns, end_ns) in zip(interpreter.codes, recorded.host_ns, strict=True):
                yield code.instruction, (end_ns - start_ns) / 1e9
            if not device.is_async:  # with marks on the device between instructions the loop is not what it is without
                ends = zip(recorded.host_ns, recorded.host_ns[1:], strict=False)
                between.append(statistics.median((after[0] - before[1]) / 1e9 for before, after in ends))
        device.synchronize()
        if groups is not None:
            dist.barrier()


def _summary(seconds: list[float], *, adds_up: bool = True) -> dict[str, Any]:
    """Single calls have a long tail, which a step meets as often: the mean is what adds up to it, without the last
    percent, single interrupts. Of a class of unlike calls the median is given. Ends: 5th and 95th percentile.
    """
    ordered = sorted(max(1e-9, second) for second in seconds)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.05, 0.95))
    mean_s = statistics.fmean(ordered[: max(1, math.ceil(KEPT * len(ordered)))])
    figures = {"median_s": statistics.median(ordered), "mean_s": mean_s}
    taken_s = mean_s if adds_up else figures["median_s"]
    return {"seconds": taken_s, "low_s": low, "high_s": high, "repeats": len(ordered), "figures": figures}
