"""A plan's steps as this executor runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.peers.timing import Measured, measured_steps
from benchmarks.peers.weights import SharedWeights
from executor.calibrate.rank_sync import RankSync
from executor.device import Device
from executor.step.groups import Groups
from executor.step.interpreter import Interpreter
from plans.lower import lower
from plans.model.graph import Graph
from plans.plan import Plan
from plans.program import Program

__all__ = ["executions", "measured_plan"]


def executions(plan: Plan) -> tuple[str, ...]:
    """How this executor can run the plan; a further way needs its own branch in `measured_plan`."""
    return ("eager",)


def measured_plan(plan: Plan, execution: str, device: Device, sync: RankSync, batch: Mapping[str, Any]) -> Measured:
    """Steps of a plan from the shared weights; every rank calls it.

    Args:
        plan: for as many ranks as there are.
        execution: one of `executions(plan)`.
        device, sync: of this rank and of all.
        batch: inputs of the whole step.
    """
    assert execution in executions(plan), execution
    left_bytes = device.memory_allocated()
    program = lower(plan)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_stream(device))
        groups = None
        if program.num_ranks > 1:
            groups = Groups(program, device, sync.timeout_s)
            stack.callback(groups.close)
        measured = _measured(program, plan.graph, groups, device, sync, batch, left_bytes)
        sync.barrier()  # nobody closes a connection that another still reads from
    return measured


def _measured(
    program: Program,
    graph: Graph,
    groups: Groups | None,
    device: Device,
    sync: RankSync,
    batch: Mapping[str, Any],
    left_bytes: int,
) -> Measured:
    """The interpreter lives in this function alone, so that it is gone before its groups are."""
    interpreter = Interpreter(program, sync.rank, device, groups)
    interpreter.set_parameters(SharedWeights(graph))
    device.release_memory()
    return measured_steps(device, sync, lambda: interpreter.step(batch), left_bytes)


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
