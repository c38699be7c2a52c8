"""Device time of the executor's own instructions, each alone: every distinct COMPUTE call and shape of given plans.

Some instructions (a norm's gradient, rotary positions, a loss) run several kernels and take longer than their bytes
suggest. Fused instructions are measured as compiled, and their steps are also measured alone. Matrix products have a
grid of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from costmodels.fit.points import Point
from costmodels.price.compute import fused_rule
from costmodels.price.free_calls import LOADS
from executor.calibrate.instructions import code_of, dispatch_class
from executor.calibrate.operands import DTYPES, Job, OperandPool
from executor.calibrate.timing import Call
from executor.kernels.context import OpContext, StepCounter, torch_dtype
from executor.step.compute import prepared
from plans.errors import TwofoldError, unknown_name
from plans.lower import lower
from plans.plan import load_plan
from plans.program import GroupProgram, Instruction, Kind, Program, Value

__all__ = ["rule_jobs"]

_HELD_OUT = "wide"
"""Plans with this in the name of their file are to report on, not to fit."""


def rule_jobs(plans: Sequence[Path], tiny_plans: Sequence[Path] = (), calls: Sequence[str] = ()) -> list[Job]:
    """A job per distinct call, shapes and attributes; kind "rule", `shape` that of the first output.

    Args:
        plans: whose instructions are taken first.
        tiny_plans: whose instructions tell the least time of each, and are taken after them.
        calls: the only instructions to take, such as "adamw.update"; empty: all.

    Raises:
        TwofoldError: a call that no plan has.
    """
    jobs: dict[Any, Job] = {}
    for tier, path in [*((0, path) for path in plans), *((1, path) for path in tiny_plans)]:
        plan, held_out = load_plan(path), _HELD_OUT in Path(path).stem
        for fused in sorted({False, plan.fused}):  # a run, and its steps alone
            for job in _jobs(lower(msgspec.structs.replace(plan, fused=fused)), held_out, tier):
                jobs.setdefault(job.point.key, job)
    known = sorted({job.point.call for job in jobs.values()})
    if unknown := [call for call in calls if call not in known]:
        raise TwofoldError(unknown_name("call of these plans", unknown[0], known))
    return [job for job in jobs.values() if not calls or job.point.call in calls]


def _jobs(program: Program, held_out: bool, tier: int) -> Iterator[Job]:
    for group in program.groups:
        for instruction in _distinct(group):
            job = _job(instruction, group, program.num_ranks, held_out, tier)
            if job is not None:
                yield job


def _distinct(group: GroupProgram) -> Iterator[Instruction]:
    bodies = {id(block.body): block.body for block in group.blocks}
    for body in bodies.values():
        for instruction in body.instructions:
            known = all(name in group.values for name in (*instruction.inputs, *instruction.outputs))
            if instruction.kind is Kind.COMPUTE and known and instruction.call not in LOADS:
                yield instruction


def _job(instruction: Instruction, group: GroupProgram, num_ranks: int, held_out: bool, tier: int) -> Job | None:
    which, call = dispatch_class(instruction), instruction.call
    if which in ("matrix", "view"):
        return None
    reads = [group.values[name] for name in instruction.inputs]
    writes = [group.values[name] for name in instruction.outputs]
    if instruction.call in ("accumulate", "store"):
        reads += writes
    moved = sum(value.span_bytes for value in (*reads, *writes))
    if not moved or not writes:
        return None
    inputs = ";".join("x".join(map(str, value.shape)) for value in reads)
    options: dict[str, int | float | str] = {"class": which, "inputs": inputs, "code": code_of(call)}
    if call == "fused":
        steps = [step.call for step in instruction.attrs["steps"]]
        call, options = fused_rule(instruction.attrs["steps"]), options | {"steps": "+".join(steps)}
    options |= {f"dtype{number}": value.dtype for number, value in enumerate(reads) if value.dtype != writes[0].dtype}
    if writes[0].shares is not None:
        options["shares"] = 1  # a view: no kernel
    if "causal" in instruction.attrs:
        options["causal"] = int(instruction.attrs["causal"])
    point = Point(
        kind="rule", call=call, shape=tuple(writes[0].shape), size_bytes=moved, dtype=writes[0].dtype,
        stack="twofold", options=options, held_out=held_out, seconds=0.0,
    )  # fmt: skip
    work = float(instruction.flops) if which == "attention" else 0.0
    return Job(point=point, make=_calls(instruction, group, reads, writes), tier=tier, needs_bytes=6 * moved, work=work)


def _calls(
    instruction: Instruction, group: GroupProgram, reads: list[Value], writes: list[Value]
) -> Callable[[OperandPool], list[Call]]:
    def make(pool: OperandPool) -> list[Call]:
        rule, context = prepared(instruction, group, group.ranks[0], 0, StepCounter(step=2), pool.device)

        num_ids = _num_ids(instruction.call, reads, writes)

        def one() -> Call:
            inputs = [_operand(pool, value, instruction.call, num_ids) for value in reads]
            return lambda: _without_autograd(rule, context, instruction.attrs, inputs)

        sizes = sum(value.span_bytes for value in (*reads, *writes))
        return [one() for _ in pool.sets(sizes)]

    return make


def _without_autograd(rule: Callable[..., Any], context: OpContext, attrs: Any, inputs: list[Tensor]) -> Any:
    with torch.inference_mode():
        return rule(context, attrs, *inputs)


def _num_ids(call: str, reads: list[Value], writes: list[Value]) -> int:
    """The number of ids that a table or a loss distinguishes: random ids are spread as in training."""
    if call == "embedding.forward":
        return reads[1].shape[0]
    if call == "embedding.grad1":
        return writes[0].shape[0]
    if call.startswith("cross_entropy."):
        return reads[0].shape[-1]
    return 2


def _operand(pool: OperandPool, value: Value, call: str, num_ids: int) -> Tensor:
    if value.dtype in DTYPES:
        made = pool.tensor(*value.shape, dtype=value.dtype)
        # what is changed in place, over and over, is a copy, so that the random numbers stay what they are
        return made.clone().abs_() if call.endswith(".update") or call in ("accumulate", "store") else made
    kind, place = torch_dtype(value.dtype), pool.device.torch_device
    if not math.prod(value.shape):
        return torch.zeros(value.shape, dtype=kind, device=place)
    return torch.randint(num_ids, value.shape, device=place).to(kind)
