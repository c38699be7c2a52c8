"""A case on the parts of its peer: which of them its degrees take, and which the peer has no part for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.peers import ddp, fsdp, megatron, narrow, pipeline, single, tensor
from benchmarks.peers.cases import Case
from benchmarks.peers.model import Decoder, cross_entropy, filled
from benchmarks.peers.weights import SharedWeights
from executor.device import Device
from plans.plan import Plan

__all__ = ["cannot_compile", "lacks", "parts_of", "peer_step"]


def parts_of(case: Case) -> str:
    """The names of the parts that the case takes."""
    if case.parts == "megatron":
        return "megatron-core"
    level, found = int(case.degrees.get("zero", 0)), []
    if case.degree("pp") > 1:
        found.append("pipelining")
    if case.degree("tp") > 1:
        found.append("tensor.parallel")
    if case.degree("dp") > 1:
        found.append("fully_shard" if level >= 2 else "DistributedDataParallel")
    return " + ".join(found) or "one device"


def lacks(case: Case) -> str:
    """The feature of a case that its peer does not have; "" if it has them all."""
    if case.parts == "megatron":
        return megatron.lacks(case)
    if case.degree("pp") > 1 and case.degree("tp") > 1:
        return "tensor parallelism inside a pipeline"
    if case.degree("tp") > 1 and case.config.experts is not None:
        return "experts split by tensor parallelism"
    return "recomputation" if "recompute" in case.degrees else ""


def cannot_compile(case: Case) -> str:
    """Why torch.compile is not measured with the peer; "" where it is."""
    if case.degrees.get("schedule") in pipeline.SPLITS_BACKWARDS:
        return "torch's zero-bubble schedules do not support torch.compile"
    if case.config.experts is not None:
        return "the routing of experts is measured eager only"
    return ""


def peer_step(
    case: Case, plan: Plan, device: Device, rank: int, *, compiles: bool
) -> Callable[[Sequence[Tensor]], Tensor | None]:
    """One training step on the peer's parts.

    Returns:
        A function of this process's host tensors "tokens" and "labels", [batch, seq]; it returns the mean of the losses
        that this rank knows, or None.
    """
    dp, tp = case.degree("dp"), case.degree("tp")
    rows = single.Rows(
        micro_batch=int(case.degrees["micro_batch"]), dp=dp, index=(rank // tp) % dp, count=plan.num_micro_batches
    )
    if case.parts == "megatron":
        train: Any = megatron.step_of(case, plan, device)
    else:
        train = _on_torch(case, plan, device, rank, compiles=compiles)

    def step(batch: Sequence[Tensor]) -> Tensor | None:
        found: Tensor | None = train([each.to(device.torch_device, non_blocking=True) for each in batch])
        return found

    return _fed(step, rows, device)


def _on_torch(case: Case, plan: Plan, device: Device, rank: int, *, compiles: bool) -> Any:
    """One training step on torch's parts, a function of this rank's tokens and labels on its device."""
    dp, tp, config = case.degree("dp"), case.degree("tp"), case.config
    mesh = _mesh(device.kind, case.degree("pp"), dp, tp) if case.ranks > 1 else None
    weights, loss = SharedWeights(plan.graph), cross_entropy

    def built(blocks: list[int] | None = None, first: bool = True, last: bool = True) -> Decoder:
        with torch.device("meta"):
            model = Decoder(config, blocks, first=first, last=last)
        model = filled(model, config, weights, device.torch_device)
        if case.products:
            narrow.convert(model, case.products)
        if tp > 1:
            assert mesh is not None
            by_sequence = bool(case.degrees.get("sequence_parallel"))
            tensor.split(model, mesh["tp"], sequence_parallel=by_sequence, compiles=compiles)
        if compiles:
            single.compile_blocks(model)
        return model

    if compiles and tp == 1:  # torch 2.13 compiles a loss on split logits to one with another value
        loss = torch.compile(cross_entropy, dynamic=False)
    if case.degree("pp") > 1:
        assert mesh is not None
        return pipeline.step_of(plan, rank, mesh, built, loss)
    placed = _over_data(built(), mesh, plan, dp, tp)
    return single.step_of(placed, plan.optimizer, loss, plan.num_micro_batches)


def _fed(step: Any, rows: single.Rows, device: Device) -> Any:
    """Pick this rank's rows once, in pinned memory on accelerators: what a loader would hand over."""
    known: dict[int, list[Tensor]] = {}

    def fed(batch: Sequence[Tensor]) -> Tensor | None:
        key = id(batch)
        if key not in known:
            known[key] = [rows.of(each).pin_memory() if device.is_async else rows.of(each) for each in batch]
        found: Tensor | None = step(known[key])
        return found

    return fed


def _over_data(model: Decoder, mesh: DeviceMesh | None, plan: Plan, dp: int, tp: int) -> single.Placed:
    """The model, split by tensor parallelism already, over the data-parallel ranks."""
    loss_around: Any = tensor.loss_parallel if tp > 1 else contextlib.nullcontext
    level = plan.optimizer.parallel_level
    if mesh is None or dp == 1:
        placed = single.Placed(module=model)
    elif level < 2:
        placed = ddp.placed(model, mesh["dp"].get_group())
    else:
        placed = fsdp.placed(model, mesh["dp"], level, plan.optimizer.reduce_every)
    return replace(placed, loss_around=loss_around)


@functools.cache
def _mesh(kind: str, pp: int, dp: int, tp: int) -> DeviceMesh:
    """The ranks as plans count them: tp innermost, then dp, then pp; made once a job, since its groups stay."""
    assert dist.get_world_size() == pp * dp * tp
    return init_device_mesh(kind, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
