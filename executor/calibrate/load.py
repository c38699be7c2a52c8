"""The clock of a chip under load: several kinds of kernels run in turn until the clock has settled.

A chip at its power limit lowers its clock, more so the more time it spends in kernels with high power. A training step
mixes matrix products, attention and memory-bound kernels. Mixtures of these kinds show the power of each and how its
time depends on the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.kernels import gradient
from executor.calibrate.timing import Timer
from executor.device import Device

__all__ = ["MIXTURES", "load_points"]

MIXTURES: tuple[Mapping[str, int], ...] = (
    {"matrix": 100},
    {"matrix": 60, "memory": 40},
    {"memory": 100},
    {"attention": 100},
    {"update": 100},
    {"matrix": 80, "memory": 20},
    {"matrix": 60, "idle": 40},
    {"matrix": 80, "update": 20},
    {"small": 100},
    {"matrix": 40, "memory": 60},
    {"norm": 100},
    {"matrix": 80, "norm": 20},
    {"idle": 100},
    {"matrix": 30, "idle": 70},
    {"matrix": 80, "attention": 20},
    {"small": 65, "attention": 10, "memory": 15, "update": 10},
)
"""Percent of the time, at the speed that each kind of kernel has alone; the most informative come first."""

WINDOW_S = 0.1
ROUND_S = 0.01
"""In a round every kind of a mixture has its turn: well below the time a chip takes to change its clock."""

IDLE_CYCLES = 400_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A kernel that is run again and again: its operations on matrix units, and the bytes it moves."""

    call: Callable[[], object]
    flops: float = 0.0
    moved_bytes: float = 0.0


def load_points(timer: Timer, seconds: float = 1.3) -> Iterator[Point]:
    """Times, shares, clock and power of every mixture, window by window.

    Figures of kind k: k_s, seconds of one call; k_share of the window; k_flops and k_bytes of a call.

    Args:
        timer: of the device.
        seconds: per mixture.
    """
    loads = _loads(timer.device)
    alone_s = {name: _alone_s(timer, load) for name, load in loads.items()}
    for mixture in MIXTURES:
        name = ", ".join(f"{kind} {percent}" for kind, percent in mixture.items())
        longest_s = max(alone_s[kind] / percent for kind, percent in mixture.items())
        round_s = max(ROUND_S, 100 * longest_s)
        turns = {kind: max(1, round(round_s * percent / 100 / alone_s[kind])) for kind, percent in mixture.items()}
        rounds = max(1, round(WINDOW_S / sum(count * alone_s[kind] for kind, count in turns.items())))
        for window in range(max(2, round(seconds / WINDOW_S))):
            yield _window(timer, {kind: loads[kind] for kind in mixture}, turns, rounds, name, window)


def _window(
    timer: Timer, loads: Mapping[str, Load], turns: Mapping[str, int], rounds: int, name: str, window: int
) -> Point:
    marks = []
    for _ in range(rounds):
        for kind, count in turns.items():
            first = timer.mark()
            for _ in range(count):
                loads[kind].call()
            marks.append((kind, first, timer.mark()))
    spun = timer.spin_marks()
    sensors = timer.device.sensors()  # while it is at work: the host is ahead
    timer.device.synchronize()
    spent_s = dict.fromkeys(loads, 0.0)
    for kind, first, last in marks:
        spent_s[kind] += timer.between_s(first, last)
    total_s = sum(spent_s.values())
    figures = {}
    for kind, load in loads.items():
        figures[f"{kind}_s"] = spent_s[kind] / rounds / turns[kind]
        figures[f"{kind}_share"] = spent_s[kind] / total_s
        figures[f"{kind}_flops"], figures[f"{kind}_bytes"] = load.flops, load.moved_bytes
    if "clock_MHz" in sensors:
        figures["sensor_clock_MHz"] = sensors["clock_MHz"]
    return Point(
        kind="clock", call="mixture", dtype="bfloat16" if timer.device.is_async else "float32",
        options={"mixture": name, "window": window}, seconds=total_s / rounds, figures=figures,
        clock_MHz=round(timer.clock_of(spun), 1), power_W=sensors.get("power_W", 0.0),
        temperature_C=sensors.get("temperature_C", 0.0),
    )  # fmt: skip


def _alone_s(timer: Timer, load: Load) -> float:
    load.call()
    first = timer.mark()
    for _ in range(4):
        load.call()
    last = timer.mark()
    timer.device.synchronize()
    return max(1e-7, timer.between_s(first, last) / 4)


def _loads(device: Device) -> dict[str, Load]:
    large = device.is_async
    kind = torch.bfloat16 if large else torch.float32

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device.torch_device).to(kind)

    def product(m: int, n: int, k: int) -> Load:
        return Load(call=partial(torch.mm, random(m, k), random(k, n)), flops=2.0 * m * n * k)

    batch, heads, length, dim = (4, 32, 4096, 128) if large else (1, 2, 64, 16)
    q, k, v, g = (random(batch, length, heads, dim).transpose(1, 2) for _ in range(4))
    backward = gradient(_attend, [q, k, v], g)
    source, rows = random(2**27 if large else 2**18), random(*(16384, 8192) if large else (64, 64))
    scale, shift = random(rows.shape[1]), random(rows.shape[1])
    weight = random(2**26 if large else 2**12).requires_grad_()
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-6, fused=large)

    def attention() -> None:
        _attend(q, k, v)
        backward()

    return {
        "matrix": product(8192, 8192, 8192) if large else product(256, 256, 256),
        "small": product(4096, 4096, 4096) if large else product(64, 64, 64),
        "attention": Load(call=attention, flops=7.0 * batch * heads * length**2 * dim),
        "memory": Load(call=source.clone, moved_bytes=2.0 * source.nbytes),
        "norm": Load(call=partial(_norm, rows, scale, shift), moved_bytes=2.0 * rows.nbytes),
        "update": Load(call=optimizer.step, moved_bytes=7.0 * weight.nbytes),
        "idle": Load(call=partial(device.spin, IDLE_CYCLES)),
    }


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _norm(rows: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.layer_norm(rows, scale.shape, scale, shift)
