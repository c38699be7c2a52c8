"""Trains with a program inside one launched rank and returns the rank's result.

The process may have joined the default process group already; otherwise it joins with the variables that torchrun sets.
Batches and initial parameters come from outside, as mappings from names to arrays.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from executor.device import Device, environment, now_ns, pick_device
from executor.kernels.context import torch_dtype
from executor.step.count import Communication, compare, counted, planned_collectives
from executor.step.emulate import EmulatedInterpreter, Emulation
from executor.step.groups import Groups, connect
from executor.step.interpreter import Batch, Interpreter, RecordedStep
from executor.train.result import RankResult, spans_of, write_npz
from plans.errors import TwofoldError
from plans.plan import Plan, plan_digest
from plans.program import GroupProgram, ParameterPlacement, Program

__all__ = ["gather_parameters", "run_rank"]

OnStep = Callable[[int, float | None], None]
"""Called after step 0, 1, ... with its loss, None where this rank does not know it."""


def run_rank(
    program: Program,
    plan: Plan | None,
    feed: Iterable[Batch],
    parameters: Mapping[str, Any],
    steps: int,
    *,
    device: str | Device = "auto",
    emulation: Emulation | None = None,
    record_steps: int = 3,
    count: bool = True,
    on_step: OnStep | None = None,
    weights_path: str | os.PathLike[str] | None = None,
    timeout_s: float = 60.0,
) -> RankResult:
    """Train for `steps` steps on this rank.

    Args:
        program: of all ranks; a program of one rank needs no process group.
        plan: it comes from, for its memory limit; may be None.
        feed: one batch per step: name of an input -> array with the rows of all micro-batches, or this rank's own rows
            where the plan has full_batch=False. It is read one batch at a time.
        parameters: name -> whole initial array (only those that this rank keeps are looked up).
        steps: at least 1.
        device: "auto", "cpu", "cuda", "npu", or one that was picked before.
        emulation: let instructions take a machine's modelled time; the result is labelled "emulated".
        record_steps: of how many of the last steps spans are kept; recording is done in these steps only.
        count: run one more step at the end, whose result is thrown away, to compare executed with planned communication
            (not under emulation).
        on_step: progress.
        weights_path: rank 0 writes the final parameters there as .npz.
        timeout_s: after which a rank that waits for another one gives up.

    Raises:
        TwofoldError: bad input, such as a feed that ends early or a memory limit that is too small. Other errors carry
            a note with the instruction and the rank.
    """
    if steps < 1:
        raise TwofoldError(f"{steps} steps cannot be run; it takes at least 1")
    device = pick_device(device) if isinstance(device, str) else device
    device.use()
    alone = program.num_ranks == 1
    joined = False if alone else connect(device, timeout_s)
    rank = 0 if alone else dist.get_rank()
    groups = None if alone else Groups(program, device, timeout_s)
    limit = None if plan is None else plan.memory_limit_bytes
    interpreter: Interpreter
    if emulation is None:
        interpreter = Interpreter(program, rank, device, groups, memory_limit_bytes=limit)
    else:
        interpreter = EmulatedInterpreter(
            program, rank, device, groups, emulation=emulation, memory_limit_bytes=limit
        )  # fmt: skip
    interpreter.set_parameters(parameters)
    device.reset_peak_memory()
    losses: list[Tensor] = []
    recorded: list[RecordedStep] = []
    times = np.zeros((2, steps), dtype=np.int64)
    batches, batch = iter(feed), None
    warm, cpu_ns = steps // 4, 0
    for step in range(steps):
        if step == warm:
            cpu_ns = time.process_time_ns()
        batch = next(batches, None)
        if batch is None:
            raise TwofoldError(f"the data ended after {step} steps, {steps} were asked for")
        times[0, step] = now_ns()
        if step >= steps - record_steps:
            loss, spans = interpreter.record(batch)
            recorded.append(spans)
        else:
            loss = interpreter.step(batch)
        times[1, step] = now_ns()
        if loss is not None:
            losses.append(loss)
        if on_step is not None:
            on_step(step, None if loss is None else float(loss))
    cpu_ns = time.process_time_ns() - cpu_ns
    peak_bytes = device.max_memory_allocated()
    weights = gather_parameters(program, interpreter)
    if weights is not None and weights_path is not None:
        write_npz(weights_path, weights)
    differences, executed = None, Counter[Communication]()
    if count and emulation is None:
        assert batch is not None
        with counted() as executed:
            interpreter.step(batch)
        differences = tuple(compare(planned_collectives(program, rank), executed, rank))
    result = RankResult(
        rank=rank, num_ranks=program.num_ranks, kind="measured" if emulation is None else "emulated",
        losses=_shared_losses(program, rank, device, losses, steps), step_start_ns=times[0], step_end_ns=times[1],
        cpu_s=cpu_ns / 1e9 / (steps - warm),
        peak=interpreter.peak, device_peak_bytes=peak_bytes, spans=spans_of(interpreter.codes, recorded),
        differences=differences, num_communications=sum(executed.values()),
        dilate=1.0 if emulation is None else emulation.dilate,
        num_late=interpreter.num_late if isinstance(interpreter, EmulatedInterpreter) else 0,
        environment=environment(device) | ({} if emulation is None else {"emulated_machine": emulation.machine}),
        plan_digest="" if plan is None else plan_digest(plan), weights=weights,
    )  # fmt: skip
    if groups is not None:
        dist.barrier()  # nobody closes a connection that another still reads from
        groups.close()
    if joined:
        dist.destroy_process_group()
    return result


@torch.inference_mode()
def gather_parameters(program: Program, interpreter: Interpreter) -> dict[str, np.ndarray[Any, Any]] | None:
    """The whole parameters on rank 0, None on the others; every rank must call it.

    Each distinct part (a region, or a shard of one) is sent once, by the lowest rank that keeps it.
    """
    whole: dict[str, Any] = {}
    for group in program.groups:
        for placement in group.parameters:
            if placement.name not in whole:
                whole[placement.name] = _gather_one(group, placement, interpreter)
    return whole if interpreter.rank == 0 else None


def _gather_one(
    group: GroupProgram, placement: ParameterPlacement, interpreter: Interpreter
) -> np.ndarray[Any, Any] | None:
    rank, mesh = interpreter.rank, placement.layout.mesh
    kept = group.values[placement.kept]
    owners: dict[tuple[Any, int], int] = {}
    for member in sorted(mesh.rank_list):
        owners.setdefault(
            (placement.layout.region(member, placement.shape), mesh.index(member, placement.shard_axes)), member
        )
    whole = torch.empty(placement.shape, dtype=torch_dtype(kept.dtype)) if rank == 0 else None
    shards: dict[Any, list[Tensor]] = {}
    for (region, _), owner in sorted(owners.items()):
        mine = interpreter.kept(placement).contiguous() if rank == owner else None
        if rank == 0:
            if mine is None:
                mine = torch.empty(kept.shape, dtype=torch_dtype(kept.dtype), device=interpreter.device.torch_device)
                dist.recv(mine, owner)
            shards.setdefault(region, []).append(mine.cpu())
        elif mine is not None:
            dist.send(mine, 0)
    if whole is None:
        return None
    for region, parts in shards.items():
        box = whole[tuple(slice(*ends) for ends in region)]
        box.copy_(torch.cat([part.reshape(-1) for part in parts])[: box.numel()].view(box.shape))
    return (whole.float() if whole.dtype is torch.bfloat16 else whole).numpy()


def _shared_losses(program: Program, rank: int, device: Device, losses: list[Tensor], steps: int) -> Any:
    """The losses of all steps, told to every rank by the lowest one that knows them."""
    source = min((each for group in program.groups if group.loss is not None for each in group.ranks), default=None)
    if source is None:
        raise TwofoldError("no rank of the program knows the loss")
    shared = torch.zeros(steps, dtype=torch.float64, device=device.torch_device)
    if rank == source:
        shared.copy_(torch.stack(losses))
    if program.num_ranks > 1:
        dist.broadcast(shared, source)
    return shared.cpu().numpy()
