"""Trains a program inside one launched rank and returns the rank's result.

The process may already have a default process group; otherwise it creates one from the variables that torchrun sets.
Batches and initial parameters are passed as mappings from names to arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from executor.data.batches import as_read
from executor.device import Device, environment, pick_device
from executor.kernels.context import torch_dtype
from executor.npz import write_npz
from executor.step.compiled import CompiledStep
from executor.step.count import compare, counted, planned_collectives
from executor.step.emulate import EmulatedInterpreter, Emulation
from executor.step.groups import Groups, connect
from executor.step.interpreter import Batch, Interpreter
from executor.train.clocks import ahead_ns
from executor.train.heartbeat import beating
from executor.train.loop import Training, train
from executor.train.options import AS_PLANNED, Checkpoints, RunOptions
from executor.train.replicas import ReplicaCheck
from executor.train.result import RankResult, spans_of
from executor.weights.initial import as_array
from executor.weights.module_weights import as_graph, as_module
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.plan import Plan, plan_digest
from plans.program import GroupProgram, ParameterPlacement, Program

if TYPE_CHECKING:
    from executor.train.checkpoints.checkpoint import Saver

__all__ = ["gather_parameters", "run_rank"]


def run_rank(
    program: Program,
    plan: Plan | None,
    feed: Iterable[Batch],
    parameters: Mapping[str, Any],
    steps: int,
    *,
    device: str | Device = "auto",
    weights_path: str | os.PathLike[str] | None = None,
    options: RunOptions = AS_PLANNED,
) -> RankResult:
    """Train for `steps` steps on this rank.

    Args:
        program: program of all ranks; a program of one rank needs no process group.
        plan: it comes from, for its memory limit and for parts of the module's weights; may be None.
        feed: one batch per step: name of an input -> array with the rows of all micro-batches, or this rank's own rows
            where the plan has full_batch=False. It is read one batch at a time.
        parameters: name in the module -> whole initial array (only those that this rank keeps are looked up).
        steps: at least 1; where a checkpoint is resumed from, those still to be done, maybe 0.
        device: "auto", "cpu", "cuda", "npu", or one that was picked before.
        weights_path: rank 0 writes the final parameters there as .npz.
        options: emulation, recording, counting, timeout.

    Raises:
        TwofoldError: bad input, such as a feed that ends early or a memory limit that is too small. Other errors carry
            a note with the instruction and the rank.
    """
    _check_steps(steps, options)
    device = pick_device(device) if isinstance(device, str) else device
    device.use()
    replays = device.can_record and options.emulation is None and (plan is None or plan.execution == "graph")
    if replays:
        device.use_own_stream()
    alone = program.num_ranks == 1
    joined = False if alone else connect(device, options.timeout_s)
    rank = 0 if alone else dist.get_rank()
    groups = None if alone else Groups(program, device, options.timeout_s)
    limit = None if plan is None else plan.memory_limit_bytes
    interpreter = _interpreter(program, rank, device, groups, limit, options.emulation)
    interpreter.set_parameters(as_graph(_graph(plan), parameters))
    compiled = CompiledStep(interpreter, None if groups is None else groups.all_agree) if replays else None
    device.reset_peak_memory()
    saver, first = _checkpoints(program, plan, interpreter, options.checkpoints, steps)
    check = None
    if not alone and options.replicas is not None and options.emulation is None:
        check = ReplicaCheck(program, plan, interpreter, options.replicas, first + steps)
    done = _trained(
        interpreter, compiled, plan, iter(as_read(_graph(plan), feed)), (first, steps), options, (check, saver)
    )
    peak_bytes, reserved_bytes = device.max_memory_allocated(), device.memory_reserved()
    ran = _execution(compiled)
    if compiled is not None:
        compiled.close()  # before the groups whose communication it holds
    weights = as_module(_graph(plan), gather_parameters(program, interpreter)) if options.gather_weights else None
    if weights is not None and weights_path is not None:
        write_npz(weights_path, weights)
    differences, num_communications = None, 0
    if options.count and options.emulation is None and done.last_batch is not None:
        differences, num_communications = _compared(program, interpreter, done.last_batch)
    earlier_ns = ahead_ns(device)
    result = RankResult(
        rank=rank, num_ranks=program.num_ranks,
        losses=_shared_losses(program, rank, device, done.losses),
        step_start_ns=done.times_ns[0] - earlier_ns, step_end_ns=done.times_ns[1] - earlier_ns, cpu_s=done.cpu_s,
        peak=interpreter.peak, device_peak_bytes=peak_bytes,
        spans=spans_of(interpreter.codes, done.recorded).earlier(earlier_ns), differences=differences,
        num_communications=num_communications, plan_digest="" if plan is None else plan_digest(plan),
        weights=weights, device_reserved_bytes=reserved_bytes, **ran, **_labels(interpreter, options.emulation),
    )  # fmt: skip
    if groups is not None:
        dist.barrier()  # nobody closes a connection that another still reads from
        groups.close()
    if joined:
        dist.destroy_process_group()
    return result


def _check_steps(steps: int, options: RunOptions) -> None:
    """Refuse too few steps; a run that is resumed may have none left."""
    least = 0 if options.checkpoints is not None and options.checkpoints.resumes else 1
    if steps < least:
        raise TwofoldError(f"steps must be at least {least}, not {steps}")


def _compared(program: Program, interpreter: Interpreter, batch: Batch) -> tuple[tuple[str, ...], int]:
    """Run a step and compare its communication with the plan: the differences, and how often it communicated."""
    with counted() as executed:
        interpreter.step(batch)
    planned = planned_collectives(program, interpreter.rank)
    return tuple(compare(planned, executed, interpreter.rank)), sum(executed.values())


def _graph(plan: Plan | None) -> Graph | None:
    return None if plan is None else plan.graph


def _trained(
    interpreter: Interpreter, compiled: CompiledStep | None, plan: Plan | None, batches: Iterator[Batch],
    steps: tuple[int, int], options: RunOptions, then: tuple[ReplicaCheck | None, Saver | None],
) -> Training:  # fmt: skip
    """Run steps, given by the number of the first and their count; `then` is called after each."""
    check, saver = then

    def after(done: int, batch: Batch, loss: Tensor | None) -> None:
        if check is not None:
            check.after(done, batch, loss)  # first: what has diverged is not written
        if saver is not None:
            saver.after(done)
        if options.after_step is not None:
            options.after_step(done, interpreter)

    predicted = None if plan is None else plan.prediction
    try:
        with beating(interpreter, predicted, watched=options.emulation is None) as heartbeat:
            done = train(
                compiled or interpreter, interpreter.device, batches, steps[1], options, heartbeat, first=steps[0],
                after_step=None if check is None and saver is None and options.after_step is None else after,
            )  # fmt: skip
    except BaseException:
        if compiled is not None:
            compiled.close(wait=False)
        raise
    if saver is not None:
        saver.finish()
    return done


def _checkpoints(
    program: Program, plan: Plan | None, interpreter: Interpreter, asked: Checkpoints | None, steps: int
) -> tuple[Saver | None, int]:
    """The writer of checkpoints, and the number of steps of the checkpoint that is resumed."""
    if asked is None or plan is None:
        return None, 0
    from executor.train.checkpoints.checkpoint import Saver, restore  # what it imports of torch takes most of a second

    first = restore(interpreter, asked) if asked.resumes else 0
    return Saver(program, plan, interpreter, asked, first + steps), first


def _interpreter(
    program: Program, rank: int, device: Device, groups: Groups | None, limit_bytes: int | None,
    emulation: Emulation | None,
) -> Interpreter:  # fmt: skip
    if emulation is None:
        return Interpreter(program, rank, device, groups, memory_limit_bytes=limit_bytes)
    return EmulatedInterpreter(program, rank, device, groups, emulation=emulation, memory_limit_bytes=limit_bytes)


def _execution(compiled: CompiledStep | None) -> dict[str, Any]:
    """The fields of a result about the execution of its steps."""
    if compiled is None:
        return {"execution": "eager"}
    spans = "replay" if compiled.times_replays else "eager"
    return {"execution": compiled.execution, "fallback": compiled.fallback, "spans_from": spans}


def _labels(interpreter: Interpreter, emulation: Emulation | None) -> dict[str, Any]:
    """The fields of a result about measurement or emulation."""
    found = environment(interpreter.device)
    if emulation is None:
        return {"kind": "measured", "environment": found}
    assert isinstance(interpreter, EmulatedInterpreter)
    return {
        "kind": "emulated", "dilate": emulation.dilate, "num_late": interpreter.num_late,
        "environment": found | {"emulated_machine": emulation.machine},
    }  # fmt: skip


@torch.inference_mode()
def gather_parameters(program: Program, interpreter: Interpreter) -> dict[str, np.ndarray[Any, Any]] | None:
    """The full parameters and changed constants on rank 0, None on the others; every rank must call it.

    Each distinct part (a region, or a shard of one) is sent once, by the lowest rank that keeps it.
    """
    whole: dict[str, Any] = {}
    for group in program.groups:
        for placement in group.changed:
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
    return as_array(whole)


def _shared_losses(program: Program, rank: int, device: Device, losses: npt.NDArray[np.float64]) -> Any:
    """The losses of all steps, broadcast from the lowest rank that has them."""
    source = min((member for group in program.groups if group.loss is not None for member in group.ranks), default=None)
    if source is None:
        raise TwofoldError("no rank of the program knows the loss")
    shared = torch.from_numpy(losses).to(device.torch_device, copy=True)
    if program.num_ranks > 1:
        dist.broadcast(shared, source)
    return shared.cpu().numpy()
