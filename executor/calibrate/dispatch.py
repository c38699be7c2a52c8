"""Host time of eager torch on one device: forward calls, modules, the autograd engine, checkpoints, optimizers.

Tensors are so small that the device finishes before the host, so the time is that of the host. If a call cannot be
timed alone (a backward), chains of two lengths are timed: the slope is the time of one call, the rest is the fixed
part.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from costmodels.fit.points import Point
from executor.calibrate.block import Block, Sizes, turns
from executor.calibrate.timing import Sample, Timer, sampled

__all__ = ["block_points", "dispatch_points", "slope"]

SIZE = 8
BURST = 50
CHAINS = (10, 50)
BLOCKS = (2, 6)
SEQUENCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Op:
    """An operator on x [SIZE, SIZE] that returns the same shape."""

    call: Callable[[Tensor, Tensor], Tensor]
    weight: bool = False


def _ops() -> dict[str, _Op]:
    return {
        "linear": _Op(call=F.linear, weight=True),
        "mm": _Op(call=torch.mm, weight=True),
        "add": _Op(call=torch.add, weight=True),
        "mul": _Op(call=torch.mul, weight=True),
        "relu": _Op(call=lambda x, w: torch.relu(x)),
        "silu": _Op(call=lambda x, w: F.silu(x)),
        "gelu": _Op(call=lambda x, w: F.gelu(x)),
        "softmax": _Op(call=lambda x, w: torch.softmax(x, -1)),
        "rms_norm": _Op(call=lambda x, w: F.rms_norm(x, (SIZE,), w[0], 1e-6), weight=True),
        "layer_norm": _Op(call=lambda x, w: F.layer_norm(x, (SIZE,), w[0], w[1], 1e-5), weight=True),
        "view": _Op(call=lambda x, w: x.view(SIZE * SIZE).view(SIZE, SIZE)),
        "transpose": _Op(call=lambda x, w: x.transpose(0, 1)),
        "contiguous": _Op(call=lambda x, w: x.transpose(0, 1).contiguous()),
        "cast": _Op(call=lambda x, w: x.float().to(x.dtype)),
        "cat": _Op(call=lambda x, w: torch.cat(x.chunk(2))),
        "dropout": _Op(call=lambda x, w: F.dropout(x, 0.1, training=True)),
        "sdpa": _Op(
            call=lambda x, w: F.scaled_dot_product_attention(
                x.view(1, 1, SIZE, SIZE), x.view(1, 1, SIZE, SIZE), x.view(1, 1, SIZE, SIZE), is_causal=True
            ).view(SIZE, SIZE)
        ),
    }


def dispatch_points(timer: Timer) -> Iterator[Point]:
    """Take all of them, one after the other."""
    yield from _forward(timer)
    yield from _backward(timer)
    yield from _modules(timer)
    yield from block_points(timer)
    yield from _optimizers(timer)


def slope(few: list[float], many: list[float], counts: tuple[int, int]) -> tuple[Sample, float]:
    """Per-unit times from repeats with few and with many units, and the fixed part.

    >>> sample, fixed_s = slope([3.0], [5.0], (1, 3))
    >>> sample.seconds, fixed_s
    (1.0, 2.0)
    """
    low, high = statistics.median(few), statistics.median(many)
    each = (high - low) / (counts[1] - counts[0])
    spread = [(one - low) / (counts[1] - counts[0]) for one in many]
    sample = sampled([max(1e-9, value) for value in [each, *spread]], 1)
    return sample, low - each * counts[0]


def _point(call: str, stack: str, sample: Sample, **more: Any) -> Point:
    return Point(kind="dispatch", call=call, stack=stack, dtype="bfloat16", **{**sample.fields, **more})


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def _small(timer: Timer) -> Tensor:
    return torch.randn(SIZE, SIZE, device=timer.device.torch_device).bfloat16()


def _forward(timer: Timer) -> Iterator[Point]:
    for name, op in _ops().items():
        x, weight = _small(timer), _small(timer)
        with torch.no_grad():
            yield _point(name, "torch_no_grad", timer.host_time(partial(op.call, x, weight), burst=BURST))
        x, weight = _small(timer).requires_grad_(), _small(timer).requires_grad_()
        yield _point(name, "torch", timer.host_time(partial(op.call, x, weight), burst=BURST))
    table, ids = _small(timer), torch.zeros(SIZE, dtype=torch.long, device=timer.device.torch_device)
    for stack, trained in (("torch_no_grad", False), ("torch", True)):
        weight = table.clone().requires_grad_(trained)
        logits = table.clone().requires_grad_(trained)
        yield _point("embedding", stack, timer.host_time(partial(F.embedding, ids, weight), burst=BURST))
        sample = timer.host_time(partial(_loss, logits, ids), burst=BURST)
        yield _point("cross_entropy", stack, sample)


def _backward(timer: Timer) -> Iterator[Point]:
    for name, op in _ops().items():
        times = [_chain_times(timer, op, length) for length in CHAINS]
        sample, fixed_s = slope(times[0], times[1], CHAINS)
        yield _point(name, "backward", sample, figures={"fixed_s": fixed_s})


def _chain_times(timer: Timer, op: _Op, length: int) -> list[float]:
    """Host seconds of one backward through `length` operators, several times."""
    weights = [_small(timer).requires_grad_() for _ in range(length)]
    g, times = _small(timer), []
    for _ in range(3 * timer.repeats + 2):
        y = x = _small(timer).requires_grad_()
        for weight in weights:
            weight.grad = None
            y = op.call(y, weight)
        timer.device.synchronize()
        start = timer.clock_ns()
        y.backward(g)
        times.append((timer.clock_ns() - start) / 1e9)
        timer.device.synchronize()
        del x, y
    return times[2:]


def _modules(timer: Timer) -> Iterator[Point]:
    """Calling a module, its function included."""
    x = _small(timer)
    for name, module in (
        ("linear", nn.Linear(SIZE, SIZE, bias=False)),
        ("rms_norm", nn.RMSNorm(SIZE)),
        ("layer_norm", nn.LayerNorm(SIZE)),
        ("identity", nn.Identity()),
    ):
        placed = module.to(x.device, x.dtype)
        yield _point(name, "module", timer.host_time(partial(placed, x), burst=BURST))


def block_points(timer: Timer) -> Iterator[Point]:
    """A whole decoder block in plain torch and under a checkpoint: per block, forward and backward."""
    for stack in ("torch", "checkpoint"):
        forward: list[list[float]] = []
        backward: list[list[float]] = []
        for count in BLOCKS:
            times = _block_times(timer, count, recompute=stack == "checkpoint")
            forward.append(times[0])
            backward.append(times[1])
        for part, times_s in (("block_forward", forward), ("block_backward", backward)):
            sample, fixed_s = slope(times_s[0], times_s[1], BLOCKS)
            yield _point(part, stack, sample, figures={"fixed_s": fixed_s})


def _block_times(timer: Timer, count: int, *, recompute: bool) -> tuple[list[float], list[float]]:
    where, sizes = timer.device.torch_device, Sizes()
    blocks = [Block(sizes).to(where, torch.bfloat16) for _ in range(count)]
    positions = turns(SEQUENCE, sizes.head_dim).to(where, torch.bfloat16)
    x = torch.randn(1, SEQUENCE, sizes.hidden, device=where).bfloat16().requires_grad_()
    forward, backward = [], []
    for _ in range(3 * timer.repeats + 2):
        for block in blocks:
            block.zero_grad()
        timer.device.synchronize()
        start, y = timer.clock_ns(), x
        for block in blocks:
            y = checkpoint(block, y, positions, use_reentrant=False) if recompute else block(y, positions)
        forward.append((timer.clock_ns() - start) / 1e9)
        g = torch.ones_like(y)
        timer.device.synchronize()
        start = timer.clock_ns()
        y.backward(g)
        backward.append((timer.clock_ns() - start) / 1e9)
        timer.device.synchronize()
    return forward[2:], backward[2:]


def _optimizers(timer: Timer) -> Iterator[Point]:
    """One step and zero_grad over many tiny tensors: per tensor and the fixed part."""
    for name, options in (("adamw_fused", {"fused": True}), ("adamw_foreach", {"foreach": True})):
        times, zeros = [], []
        for count in CHAINS:
            weights = [_small(timer).requires_grad_() for _ in range(count)]
            optimizer = torch.optim.AdamW(weights, lr=1e-6, **options)  # type: ignore[arg-type]

            def give(weights: list[Tensor] = weights) -> None:
                for weight in weights:
                    weight.grad = torch.zeros_like(weight)

            give()
            samples = [timer.host_time(optimizer.step, burst=1, repeats=1) for _ in range(2 * timer.repeats)]
            times.append([sample.seconds for sample in samples])
            cleared = [
                timer.host_time(optimizer.zero_grad, burst=1, repeats=1, before=give) for _ in range(timer.repeats)
            ]
            zeros.append([one.seconds for one in cleared])
        for call, measured in ((name, times), ("zero_grad", zeros)):
            if call == "zero_grad" and name != "adamw_fused":
                continue
            sample, fixed_s = slope(measured[0], measured[1], CHAINS)
            yield _point(call, "optimizer", sample, figures={"fixed_s": fixed_s})
