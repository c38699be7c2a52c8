"""Host time of torch's own parallel modules: tensor parallelism with DTensor, FSDP2, DDP, pipelining.

Each module runs a decoder block of tiny sizes, so that the devices are idle and only the host's time remains. Runs with
few and with many blocks (modules, micro-batches) give the time of one as the slope. Every rank must take part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from costmodels.fit.points import Point
from executor.calibrate.block import Block, Sizes, turns
from executor.calibrate.dispatch import slope
from executor.calibrate.timing import Timer

__all__ = ["sharded_points", "stack_points", "tensor_parallel_points"]

BLOCKS = (2, 6)
MODULES = (4, 16)
MICRO_BATCHES = (4, 12)
SEQUENCE = 8
SIZES = Sizes(hidden=128, heads=8, ffn=256)

Times = tuple[list[float], list[float]]
"""Host seconds of forward and of backward, several times each."""


class _Chain(nn.Module):
    """Blocks one behind the other."""

    turns: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(SIZES) for _ in range(count))
        self.register_buffer("turns", turns(SEQUENCE, SIZES.head_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.turns)
        return x


def stack_points(timer: Timer) -> Iterator[Point]:
    """Measure all points; every rank of the default group must take part."""
    for take in (tensor_parallel_points, _tensor_parallel_modules, sharded_points, _replicated, _pipeline):
        yield from take(timer)


def _point(call: str, stack: str, times: Sequence[list[float]], counts: tuple[int, int], **more: Any) -> Point:
    sample, fixed_s = slope(times[0], times[1], counts)
    return Point(
        kind="dispatch", call=call, stack=stack, dtype="bfloat16", ranks=dist.get_world_size(),
        active_ranks=dist.get_world_size(), figures={"fixed_s": fixed_s}, **more, **sample.fields,
    )  # fmt: skip


def _both_ways(stack: str, times: Sequence[Times], counts: tuple[int, int], what: str, **more: Any) -> Iterator[Point]:
    yield _point(f"{what}_forward", stack, [one[0] for one in times], counts, **more)
    yield _point(f"{what}_backward", stack, [one[1] for one in times], counts, **more)


def _times(timer: Timer, forward: Callable[[], list[Tensor]], clear: Callable[[], None], repeats: int = 0) -> Times:
    """Run forward and backward alternately; the device is idle when either begins."""
    ahead, back = [], []
    for _ in range((repeats or 2 * timer.repeats) + 2):
        clear()
        timer.device.synchronize()
        dist.barrier()
        timer.device.synchronize()
        start = timer.clock_ns()
        made = forward()
        ahead.append((timer.clock_ns() - start) / 1e9)
        gradients = [torch.ones_like(one) for one in made]
        timer.device.synchronize()
        start = timer.clock_ns()
        torch.autograd.backward(made, gradients)
        back.append((timer.clock_ns() - start) / 1e9)
        timer.device.synchronize()
    return ahead[2:], back[2:]


def _input(timer: Timer, *shape: int) -> Tensor:
    return torch.randn(*shape, device=timer.device.torch_device).bfloat16().requires_grad_()


def _chain(timer: Timer, count: int) -> _Chain:
    return _Chain(count).to(timer.device.torch_device, torch.bfloat16)


def tensor_parallel_points(timer: Timer) -> Iterator[Point]:
    """Blocks whose products are split, on distributed tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, times_by_count = init_device_mesh(timer.device.kind, (dist.get_world_size(),)), []
    weights: list[list[Tensor]] = []
    for count in BLOCKS:
        model, x = _chain(timer, count), _input(timer, 1, SEQUENCE, SIZES.hidden)
        plan: dict[str, Any] = {f"blocks.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
        plan |= {f"blocks.*.{name}": RowwiseParallel() for name in ("o", "down")}
        parallelize_module(model, mesh, plan)
        times_by_count.append(_times(timer, lambda model=model, x=x: [_plain(model(x))], model.zero_grad))  # type: ignore[misc]
        weights.append([weight for weight in model.parameters() if type(weight.data) is not Tensor])
    yield from _both_ways("dtensor", times_by_count, BLOCKS, "block")
    times, counts = [], (len(weights[0]), len(weights[1]))
    for each in weights:
        for weight in each:
            weight.grad = torch.zeros_like(weight)
        optimizer = torch.optim.AdamW(each, lr=1e-6, fused=timer.device.is_async)
        times.append(_update_times(timer, optimizer.step))
    yield _point("adamw_fused", "dtensor", times, counts)


def _update_times(timer: Timer, step: Callable[[], object]) -> list[float]:
    return [timer.host_time(step, burst=1, repeats=1).seconds for _ in range(timer.repeats)]


def _plain(x: Tensor) -> Tensor:
    """A result that is still being reduced is waited for by the next operator, here an addition."""
    return x if type(x) is Tensor else x + 0


def _tensor_parallel_modules(timer: Timer) -> Iterator[Point]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ways = dist.get_world_size()
    mesh = init_device_mesh(timer.device.kind, (ways,))
    for name, style, features in (
        ("colwise", ColwiseParallel, SIZES.hidden),
        ("rowwise", RowwiseParallel, SIZES.hidden // ways),
    ):
        times_by_count = []
        for count in MODULES:
            linears = nn.ModuleList(nn.Linear(SIZES.hidden, SIZES.hidden, bias=False) for _ in range(count))
            linears = linears.to(timer.device.torch_device, torch.bfloat16)
            for linear in linears:
                parallelize_module(linear, mesh, style())
            x = _input(timer, SEQUENCE, features)

            def forward(linears: nn.ModuleList = linears, x: Tensor = x) -> list[Tensor]:
                return [_plain(linear(x)) for linear in linears]

            times_by_count.append(_times(timer, forward, linears.zero_grad))
        yield from _both_ways("dtensor", times_by_count, MODULES, name)


def sharded_points(timer: Timer) -> Iterator[Point]:
    """FSDP2 with and without gathered weights kept, with and without reduced gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(timer.device.kind, (dist.get_world_size(),))
    for reshard in (0, 1):
        models: list[Any] = []
        for count in BLOCKS:
            model = _chain(timer, count)
            for block in model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=bool(reshard))
            models.append(fully_shard(model, mesh=mesh, reshard_after_forward=bool(reshard)))
        for sync in (1, 0):
            times_by_count = []
            for model in models:
                model.set_requires_gradient_sync(bool(sync))
                x = _input(timer, 1, SEQUENCE, SIZES.hidden)
                times_by_count.append(_times(timer, lambda m=model, x=x: [m(x)], model.zero_grad))  # type: ignore[misc]
            yield from _both_ways("fsdp2", times_by_count, BLOCKS, "block", options={"reshard": reshard, "sync": sync})
        if reshard == 0:
            times = []
            for model in models:
                for weight in model.parameters():
                    weight.grad = torch.zeros_like(weight)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=timer.device.is_async)
                times.append(
                    [timer.host_time(optimizer.step, burst=1, repeats=1).seconds for _ in range(timer.repeats)]
                )
            counts = [len(list(model.parameters())) for model in models]
            yield _point("adamw_fused", "fsdp2", times, (counts[0], counts[1]))


def _replicated(timer: Timer) -> Iterator[Point]:
    from torch.nn.parallel import DistributedDataParallel

    for bucket_MiB, sync in ((25.0, 1), (25.0, 0), (0.001, 1)):
        times_by_count = []
        for count in BLOCKS:
            where = [timer.device.index] if timer.device.is_async else None
            model = DistributedDataParallel(
                _chain(timer, count), device_ids=where, bucket_cap_mb=bucket_MiB, gradient_as_bucket_view=False
            )
            x = _input(timer, 1, SEQUENCE, SIZES.hidden)

            def forward(model: Any = model, x: Tensor = x, sync: int = sync) -> list[Tensor]:
                with contextlib.nullcontext() if sync else model.no_sync():
                    return [model(x)]

            times_by_count.append(_times(timer, forward, model.zero_grad))
        options = {"bucket_bytes": int(bucket_MiB * 2**20), "sync": sync}
        yield from _both_ways("ddp", times_by_count, BLOCKS, "block", options=options)


def _pipeline(timer: Timer) -> Iterator[Point]:
    """One block per stage; per micro-batch: its forward, backward, send and receive, on the first and last rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, stages = dist.get_rank(), dist.get_world_size()
    for name, kind in (("1f1b", Schedule1F1B), ("gpipe", ScheduleGPipe)):
        times_by_count: list[list[float]] = []
        for count in MICRO_BATCHES:
            model = _chain(timer, 1)
            stage = PipelineStage(model, rank, stages, timer.device.torch_device)
            schedule = kind(stage, count, loss_fn=lambda y, target: (y.float() - target.float()).square().mean())
            x = _input(timer, count, SEQUENCE, SIZES.hidden).detach()
            times: list[float] = []
            for _ in range(timer.repeats + 3):
                model.zero_grad()
                timer.device.synchronize()
                dist.barrier()
                timer.device.synchronize()
                start = timer.clock_ns()
                if rank == 0:
                    schedule.step(x)
                elif rank == stages - 1:
                    schedule.step(target=x, losses=[])
                else:
                    schedule.step()
                times.append((timer.clock_ns() - start) / 1e9)
                timer.device.synchronize()
            times_by_count.append(times[3:])
        yield _point("micro_batch", "pipelining", times_by_count, MICRO_BATCHES, options={"schedule": name})
