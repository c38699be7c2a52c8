"""Pipeline parallelism by torch.distributed.pipelining, chunks cut as the plan cuts them.

Losses are divided by the number of micro-batches, so that gradients need no scaling afterwards, and the outputs of the
micro-batches are not joined.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.peers import ddp, fsdp
from benchmarks.peers.model import Decoder
from benchmarks.peers.single import adamw
from plans.plan import Plan

__all__ = ["SPLITS_BACKWARDS", "chunks_of", "step_of"]

_SINGLE: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
_SEVERAL: dict[str, Any] = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,  # with one chunk a rank it is ZB1P, the paper's ZB-H1
    "interleaved_zb": ScheduleInterleavedZeroBubble,
    "zb_v": ScheduleZBVZeroBubble,
}
SPLITS_BACKWARDS = ("zb_h1", "interleaved_zb", "zb_v")
"""Schedules with backwards in two parts, which torch does not support with torch.compile."""


def chunks_of(plan: Plan) -> list[tuple[tuple[int, ...], list[int]]]:
    """Per chunk of the model its ranks, and the numbers of its blocks."""
    found = []
    for stage in plan.stages:
        blocks = {int(name.split(".")[1]) for name in stage.operators if name.startswith("layers.")}
        found.append((tuple(sorted(stage.mesh.rank_list)), sorted(blocks)))
    return found


def step_of(
    plan: Plan,
    rank: int,
    mesh: DeviceMesh,
    built: Callable[[list[int], bool, bool], Decoder],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Sequence[Tensor]], Tensor | None]:
    """One training step on this pipeline's tokens and labels; returns the mean loss on the rank of the last chunk.

    Args:
        plan: whose chunks, schedule and optimizer are taken.
        rank: rank of this process.
        mesh: with the dims "pp" and "dp".
        built: makes a chunk from its blocks and whether it is the first and the last.
        loss: of logits and labels of one micro-batch.
    """
    chunks, count = chunks_of(plan), plan.num_micro_batches
    device = torch.device("cpu") if mesh.device_type == "cpu" else torch.device(mesh.device_type, rank)
    stages = []
    for number, (ranks, blocks) in enumerate(chunks):
        if rank in ranks:
            first, last = number == 0, number == len(chunks) - 1
            module = _over_data(built(blocks, first, last), mesh, plan)
            stages.append(PipelineStage(module, number, len(chunks), device, group=mesh["pp"].get_group()))
    parameters = [weight for stage in stages for weight in stage.submod.parameters()]
    update = adamw(parameters, plan.optimizer)

    def part(output: Tensor, labels: Tensor) -> Tensor:
        return loss(output, labels) / count

    kind: Any = _SINGLE.get(plan.schedule) or _SEVERAL[plan.schedule]
    schedule = kind(
        stages[0] if plan.schedule in _SINGLE else stages, n_microbatches=count, loss_fn=part, scale_grads=False
    )
    keeps = {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    is_first, is_last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)

    def step(batch: Sequence[Tensor]) -> Tensor | None:
        losses: list[Tensor] = []
        tokens, labels = batch
        arguments = (tokens,) if is_first else ()
        schedule.step(*arguments, **({"target": labels, "losses": losses} if is_last else {}), **keeps)
        update.step()
        update.zero_grad()
        return torch.stack([value.detach() for value in losses]).sum() if is_last else None

    return step


def _over_data(model: Decoder, mesh: DeviceMesh, plan: Plan) -> Any:
    """A chunk over the data-parallel ranks: `fully_shard` from level 2 on, which a pipeline reduces once a step."""
    if mesh["dp"].size() == 1:
        return model
    if plan.optimizer.parallel_level >= 2:
        return fsdp.sharded(model, mesh["dp"], plan.optimizer.parallel_level)
    return ddp.replicated(model, mesh["dp"].get_group())
