"""A plan's steps as this executor runs them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from benchmarks.peers.timing import Measured, measured_steps
from benchmarks.peers.weights import SharedWeights
from executor.calibrate.rank_sync import RankSync
from executor.device import Device
from executor.step.compiled import CompiledStep
from executor.step.groups import Groups
from executor.step.interpreter import Interpreter
from plans.errors import TwofoldError
from plans.lower import lower
from plans.plan import Plan

__all__ = ["EXECUTIONS", "measured_plan", "with_execution"]


EXECUTIONS = ("graph", "apart", "eager")
"""How this executor runs a plan. "graph" and "apart" are replayed, on devices that can record launches; "apart" does
not join runs of memory-bound instructions (`Plan.fused`)."""


def with_execution(plan: Plan, execution: str) -> Plan:
    """The plan run that way; a transfer of NCCL is received when it is needed, so the program says so."""
    execution, fused = ("graph", False) if execution == "apart" else (execution, plan.fused)
    return msgspec.structs.replace(plan, execution=execution, fused=fused, receives="needed")


def measured_plan(plan: Plan, execution: str, device: Device, sync: RankSync, batch: Mapping[str, Any]) -> Measured:
    """Steps of a plan from the shared weights; every rank calls it.

    Args:
        plan: for as many ranks as there are.
        execution: one of `EXECUTIONS`.
        device, sync: of this rank and of all.
        batch: inputs of the complete step.
    """
    assert execution in EXECUTIONS, execution
    left_bytes = device.memory_allocated()
    program = lower(with_execution(plan, execution))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_stream(device))
        groups = None
        if program.num_ranks > 1:
            groups = Groups(program, device, sync.timeout_s)
            stack.callback(groups.close)
        interpreter = Interpreter(program, sync.rank, device, groups)
        interpreter.set_parameters(SharedWeights(plan.graph))
        device.release_memory()
        if execution != "eager":
            measured = _replayed(interpreter, groups, device, sync, batch, left_bytes)
        else:
            measured = measured_steps(device, sync, functools.partial(interpreter.step, batch), left_bytes)
        del interpreter
        sync.barrier()  # nobody closes a connection that another still reads from
    return measured


def _replayed(
    interpreter: Interpreter, groups: Groups | None, device: Device, sync: RankSync, batch: Mapping[str, Any],
    left_bytes: int,
) -> Measured:  # fmt: skip
    """Steps from one recording, freed before the groups whose communication it holds.

    Raises:
        TwofoldError: the steps ran eagerly after all, and why.
    """
    compiled = CompiledStep(interpreter, None if groups is None else groups.all_agree)
    try:
        measured = measured_steps(device, sync, functools.partial(compiled.step, batch), left_bytes)
    finally:
        compiled.close()
    if compiled.fallback:
        raise TwofoldError(f"steps ran eagerly: {compiled.fallback}")
    return measured


@contextlib.contextmanager
def _own_stream(device: Device) -> Iterator[None]:
    """Work on the default stream cannot be captured; afterwards the stream of before is the current one again."""
    if not device.is_async:
        yield
        return
    before = torch.accelerator.current_stream()
    device.use_own_stream()
    try:
        yield
    finally:
        device.synchronize()
        torch.accelerator.set_stream(before)
