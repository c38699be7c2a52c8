"""Complete training steps with torch's own parallel modules, to compare predictions of other software stacks with.

These times are for comparison only; `stacks` measures the host times of stacks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.block import Decoder, Sizes
from executor.calibrate.rank_sync import RankSync
from executor.calibrate.timing import Timer, sampled
from executor.device import now_ns

__all__ = ["stack_step_points"]

REAL = Sizes(hidden=2048, heads=16, ffn=5632, vocab=32000, blocks=6)
STEPS = (4, 10)  # to warm up, to measure
MICRO_BATCHES = 2


def stack_step_points(timer: Timer, sync: RankSync) -> Iterator[Point]:
    """One step of a decoder under each stack; every rank of the job must take part."""
    sizes = REAL if timer.device.is_async else Sizes()
    batch, sequence = (4, 2048) if timer.device.is_async else (2, 8)
    for stack, options in (
        ("dtensor", {}),
        ("ddp", {}),
        ("fsdp2", {"reshard": 0}),
        ("fsdp2", {"reshard": 1}),
    ):
        torch.manual_seed(0)
        model = Decoder(sizes, sequence).to(timer.device.torch_device, torch.bfloat16)
        placed, within = _place(stack, model, timer, options)
        optimizer = torch.optim.AdamW(_by_type(placed.parameters()), lr=1e-5, fused=timer.device.is_async)
        ids = torch.randint(sizes.vocab, (MICRO_BATCHES, batch, sequence + 1), device=timer.device.torch_device)
        times: list[float] = []

        def train(placed: Any = placed, optimizer: Any = optimizer, ids: Tensor = ids, within: Any = within) -> None:
            for number, rows in enumerate(ids):
                with within(number == MICRO_BATCHES - 1):
                    logits = placed(rows[:, :-1])
                    F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten()).backward()
                    del logits
            optimizer.step()
            optimizer.zero_grad()

        timer.device.reset_peak_memory()
        for step in range(sum(STEPS)):
            timer.device.synchronize()
            sync.barrier()
            start = now_ns()
            train()
            timer.device.synchronize()
            taken = sync.maximum([(now_ns() - start) / 1e9])[0]
            if step >= STEPS[0]:
                times.append(taken)
        sync.barrier()
        sensors = timer.sensors_during(lambda train=train: [train() for _ in range(STEPS[0])])  # type: ignore[misc]
        memory_bytes = [float(timer.device.max_memory_allocated()), float(timer.device.memory_reserved())]
        peak, reserved = sync.maximum(memory_bytes)
        what: dict[str, Any] = {
            "hidden": sizes.hidden, "heads": sizes.heads, "ffn": sizes.ffn, "vocab": sizes.vocab,
            "blocks": sizes.blocks, "batch": batch, "sequence": sequence, "micro_batches": MICRO_BATCHES,
        }  # fmt: skip
        fields = sampled(times, 1).fields | sensors
        yield Point(
            kind="step", call="decoder_step", stack=stack, dtype="bfloat16", ranks=sync.size,
            active_ranks=sync.size, options=what | options,
            figures={"peak_bytes": peak, "reserved_bytes": reserved}, **fields,
        )  # fmt: skip
        del model, placed, optimizer, train
        timer.device.release_memory()


def _by_type(weights: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Groups of parameters of one type: a fused update takes either distributed tensors or plain ones."""
    groups: dict[type, list[Tensor]] = {}
    for weight in weights:
        groups.setdefault(type(weight.data), []).append(weight)
    return [{"params": group} for group in groups.values()]


Accumulating = Callable[[bool], contextlib.AbstractContextManager[object]]


def _place(stack: str, model: Decoder, timer: Timer, options: dict[str, int]) -> tuple[Any, Accumulating]:
    """The model under a stack, and a context for a micro-batch, which knows whether it is the last."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    if stack == "ddp":
        where = [timer.device.index] if timer.device.is_async else None
        replicated = DistributedDataParallel(model, device_ids=where)
        return replicated, lambda last: contextlib.nullcontext() if last else replicated.no_sync()
    mesh = init_device_mesh(timer.device.kind, (dist.get_world_size(),))
    if stack == "dtensor":
        plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")}
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
        plan["head"] = ColwiseParallel(output_layouts=Replicate())
        return parallelize_module(model, mesh, plan), lambda last: contextlib.nullcontext()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=bool(options["reshard"]))
    sharded: Any = fully_shard(model, mesh=mesh, reshard_after_forward=bool(options["reshard"]))

    @contextlib.contextmanager
    def accumulating(last: bool) -> Iterator[None]:
        sharded.set_requires_gradient_sync(last)
        yield

    return sharded, accumulating
