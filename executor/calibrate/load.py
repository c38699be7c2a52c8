"""How a chip slows under load, and how whole blocks compare with the sum of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.block import Decoder, Sizes
from executor.calibrate.timing import Timer, sampled
from executor.device import Mark

__all__ = ["block_points", "load_points"]

DUTIES = (100, 60)
WINDOW_S = 0.1
BLOCKS = (
    # sizes, batch, sequence
    (Sizes(hidden=4096, heads=32, ffn=11008, vocab=32000, blocks=2), 1, 2048),
    (Sizes(hidden=4096, heads=32, ffn=11008, vocab=32000, blocks=2), 4, 2048),
    (Sizes(hidden=2048, heads=16, ffn=5632, vocab=32000, blocks=4), 4, 1024),
    (Sizes(hidden=1024, heads=16, ffn=2816, vocab=32000, blocks=4), 8, 1024),
)
STEPS = 12


def load_points(timer: Timer, seconds: float = 1.5) -> Iterator[Point]:
    """A product again and again, alone or with a share of the time spent in copies, then attention, then copies alone:
    times, clocks and power, window by window.

    Args:
        timer: of the device.
        seconds: per share.
    """
    yield from _products(timer, seconds)
    yield from _others(timer, seconds)


def _others(timer: Timer, seconds: float) -> Iterator[Point]:
    """What draws other power than a product."""
    device = timer.device
    place, kind = device.torch_device, torch.bfloat16 if device.is_async else torch.float32
    shape = (4, 32, 4096, 128) if device.is_async else (1, 2, 64, 16)
    q, k, v = (torch.randn(*shape, device=place).to(kind) for _ in range(3))
    x = torch.randn(2**29 if device.is_async else 2**18, device=place).to(kind)
    batch, heads, sequence, dim = shape
    calls: dict[str, tuple[tuple[int, ...], Callable[[], object]]] = {
        "attention": ((batch, heads, heads, sequence, sequence, dim), partial(_attend, q, k, v)),
        "memory": ((x.numel(),), x.clone),
    }
    for name, (sizes, call) in calls.items():
        call()
        first = timer.mark()
        call()
        last = timer.mark()
        device.synchronize()
        rounds = max(1, round(WINDOW_S / max(1e-6, timer.between_s(first, last))))
        for window in range(max(2, round(seconds / WINDOW_S))):
            first = timer.mark()
            for _ in range(rounds):
                call()
            last = timer.mark()
            spun = timer.spin_marks()
            device.synchronize()
            clock = {"clock_MHz": round(timer.clock_of(spun), 1)}
            sensors = {sensor: value for sensor, value in device.sensors().items() if sensor != "clock_MHz"}
            fields = sampled([timer.between_s(first, last)], rounds).fields | clock | sensors
            yield Point(
                kind="clock", call=f"sustained_{name}", shape=sizes, dtype=str(kind).split(".")[-1],
                options={"window": window}, **fields,
            )  # fmt: skip


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _products(timer: Timer, seconds: float) -> Iterator[Point]:
    device = timer.device
    size = 8192 if device.is_async else 256
    kind = torch.bfloat16 if device.is_async else torch.float32
    left, right = (torch.randn(size, size, device=device.torch_device).to(kind) for _ in range(2))
    block = torch.empty(2**28 if device.is_async else 2**20, device=device.torch_device, dtype=torch.uint8)
    for duty in DUTIES:
        torch.mm(left, right)
        block.clone()
        product_s, copy_s = _alone(timer, left, right, block)
        copies = round(product_s * (100 - duty) / duty / copy_s)
        rounds = max(1, round(WINDOW_S / (product_s + copies * copy_s)))
        for window in range(max(2, round(seconds / WINDOW_S))):
            marks = []
            for _ in range(rounds):
                first = timer.mark()
                torch.mm(left, right)
                marks.append((first, timer.mark()))
                for _ in range(copies):
                    block.clone()
            spun = timer.spin_marks()
            device.synchronize()
            clock_MHz = timer.clock_of(spun)
            sample = sampled([timer.between_s(first, last) for first, last in marks], 1)
            sensors = {name: value for name, value in device.sensors().items() if name != "clock_MHz"}
            fields = sample.fields | {"clock_MHz": round(clock_MHz, 1)} | sensors
            options: dict[str, Any] = {"duty": duty, "window": window}
            yield Point(
                kind="clock", call="sustained", shape=(size, size, size), form="nn", dtype=str(kind).split(".")[-1],
                options=options, **fields,
            )  # fmt: skip


def _alone(timer: Timer, left: Tensor, right: Tensor, block: Tensor) -> tuple[float, float]:
    marks = [timer.mark()]
    torch.mm(left, right)
    marks.append(timer.mark())
    block.clone()
    marks.append(timer.mark())
    timer.device.synchronize()
    return timer.between_s(marks[0], marks[1]), timer.between_s(marks[1], marks[2])


def block_points(timer: Timer, *, small: bool = False) -> Iterator[Point]:
    """Training steps of plain torch decoders of a few blocks, one device: device time from first to last kernel.

    They are for comparison with predictions, never for fitting.
    """
    device = timer.device
    for sizes, batch, sequence in BLOCKS[: 1 if small else None]:
        if small:
            sizes, batch, sequence = Sizes(), 2, 8
        torch.manual_seed(0)
        with torch.device(device.torch_device):
            model = Decoder(sizes, sequence).to(torch.bfloat16)
            ids = torch.randint(sizes.vocab, (batch, sequence + 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.is_async)
        parts: dict[str, list[float]] = {"step": [], "forward": [], "backward": [], "update": []}
        device.reset_peak_memory()

        def train(
            model: Decoder = model, ids: Tensor = ids, optimizer: torch.optim.Optimizer = optimizer
        ) -> list[Mark]:
            marks = [timer.mark()]
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            del logits
            marks.append(timer.mark())
            loss.backward()
            marks.append(timer.mark())
            optimizer.step()
            optimizer.zero_grad()
            marks.append(timer.mark())
            return marks

        for step in range(STEPS):
            marks = train()
            device.synchronize()
            if step >= STEPS // 3:
                for name, first, last in (("step", 0, 3), ("forward", 0, 1), ("backward", 1, 2), ("update", 2, 3)):
                    parts[name].append(timer.between_s(marks[first], marks[last]))
        clock_MHz = timer.clock_during(train, parts["step"][-1])
        peak = float(device.max_memory_allocated())
        options: dict[str, Any] = {
            "hidden": sizes.hidden, "heads": sizes.heads, "ffn": sizes.ffn, "vocab": sizes.vocab,
            "blocks": sizes.blocks, "batch": batch, "sequence": sequence,
        }  # fmt: skip
        for name, times in parts.items():
            figures = {"peak_bytes": peak} if name == "step" else {}
            fields = sampled(times, 1).fields | {"clock_MHz": round(clock_MHz, 1)}
            yield Point(
                kind="step", call=f"decoder_{name}", dtype="bfloat16", options=options, figures=figures, **fields
            )
        del model, optimizer, train
        device.release_memory()
