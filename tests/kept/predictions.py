"""Prices, forecasts, simulated steps and what-if questions on made-up machines (see `tests.kept`)."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

from costmodels import Machine, executing
from costmodels.price.clock import at_clock
from costmodels.price.group import axes_group
from costmodels.price.instruction import price_collective, price_compute, price_transfer
from costmodels.utilization import forward_products, mfu, model_flops
from plans.degrees import RECOMPUTE_MODES, Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import EXECUTIONS
from plans.program import Program
from plans.schedules import schedule_names
from plans.timeline import Timeline
from simulator import WhatIf, composition, simulate
from simulator.engine.link_change import LinkChange
from simulator.estimate import estimate
from simulator.estimate.grid import estimate_grid
from simulator.forecast import Forecast, forecast
from simulator.forecast.composed import folded_mixture_forecast, hybrid_forecast
from simulator.predict import Outcome, outcome
from simulator.stacks import Stack
from simulator.stacks.names import stack_named, stack_names
from simulator.study.configured import Configured
from simulator.study.goodput import Checkpoints, Failures, sampled_goodput
from simulator.study.jobs import Job, simulate_jobs
from simulator.study.point import figures_of_point
from simulator.study.sensitivity import sensitivity
from simulator.timeline.analysis import time_by_call_s
from simulator.timeline.critical_path import critical_path
from simulator.timeline.live import live_by_role, worst_ranks
from simulator.timeline.messages import messages_of_operators
from simulator.timeline.peak import memory_peak
from tests.support.made_up import MACHINE, machines, models

Row = tuple[str, Iterable[float]]


# -- prices ------------------------------------------------------------------------------------------------------------

_CALLS: tuple[tuple[str, str], ...] = (
    # products: aligned, odd, thin, deep; batched; convolutions; experts
    *((f"linear.{part}", shapes) for part, of in (
        ("forward", "{0}x{2} {1}x{2} {0}x{1}"), ("grad0", "{0}x{1} {1}x{2} {0}x{2}"),
        ("grad1", "{0}x{1} {0}x{2} {1}x{2}"),
    ) for shapes in (of.format(*sizes) for sizes in (
        (4096, 4096, 4096), (300, 1000, 77), (16, 8192, 1024), (128, 130, 20000), (5, 3, 7), (1056, 2304, 512),
    ))),
    ("linear.grad2", "600x64 64"),
    ("matmul.forward", "3x8x40x60 3x8x60x50 3x8x40x50"), ("matmul.grad0", "24x40x50 24x60x50 24x40x60"),
    ("matmul.grad1", "24x40x50 24x40x60 24x60x50"), ("matmul.forward", "40x60 60x50 40x50"),
    ("conv2d.forward", "8x16x32x32 32x16x3x3 32 8x32x32x32"), ("conv2d.grad0", "8x32x32x32 32x16x3x3 8x16x32x32"),
    ("conv2d.grad1", "8x32x32x32 8x16x32x32 32x16x3x3"), ("conv2d.grad2", "8x32x32x32 32"),
    ("grouped_linear.forward", "8x64x100 8x200x100 8x64x200"), ("grouped_linear.grad0", "8x64x200 8x200x100 8x64x100"),
    ("grouped_linear.grad2", "8x64x200 8x64x100 8x200x100"),
    # attention: short and long, without and with kept sums
    ("attention.forward", "2x8x128x64 2x8x128x64 2x8x128x64 2x8x128x64"),
    ("attention.forward", "1x4x3000x80 1x4x5000x80 1x4x5000x40 1x4x3000x40"),
    ("attention.grad012", " ".join(["2x8x128x64"] * 7)),
    ("attention.grad012", " ".join(["1x4x900x64"] * 5 + ["1x4x900"] + ["1x4x900x64"] * 3)),
    ("attention.backward", " ".join(["1x4x900x64"] * 7)),
    # memory-bound ones: tiny, and beyond any cache
    *((call, shapes) for call in (
        "gelu.forward", "silu_mul.forward", "layer_norm.forward", "rms_norm.grad0", "mul.grad0", "softmax.forward",
        "cross_entropy.forward", "embedding.grad0", "dropout.forward",
    ) for shapes in ("40x30 40x30", "20000x3000 20000x3000")),
    ("layer_norm.grad0", "4000x512 4000x512 512 4000x512"), ("layer_norm.grad1", "4000x512 4000x512 512"),
    ("add.grad0", "100x100 100x100"), ("add.grad1", "100x100 100"), ("reshape.forward", "100x100 10000"),
    ("slice.forward", "100x100 100x50"), ("sum", "100x100 100x100 100x100"), ("accumulate", "1000x1000 1000x1000"),
    # updates, opaque calls, recurrent layers
    ("adamw.update", " ".join(["3000x1000"] * 7)), ("adamw.update", " ".join(["3000x1000"] * 14)),
    ("adamw.fused", " ".join(["3000x1000"] * 7)), ("adamw.foreach", " ".join(["3000x1000"] * 7)),
    ("sgd.update", "3000x1000 3000x1000 3000x1000"), ("momentum.update", " ".join(["3000x1000"] * 5)),
    ("opaque.forward", "8x16x1000 32x16x3 8x32x1000"), ("opaque.grad0", "8x32x1000 32x16x3 8x16x1000"),
    ("recurrent.forward", "30x4x64 2x64 256x64 256x64 256 256 30x4x128 4x128"),
    ("recurrent.grad012", "30x4x128 30x4x64 4x64 256x64 256x64 30x4x64 4x64 256x64"),
)  # fmt: skip


def _kernels(kind: str) -> Iterator[Row]:
    """Kernels of odd and even shapes, of torch's modules and of twofold's executor."""
    machine = at_clock(machines()[kind], 1500.0) if kind == "nodes" else machines()[kind]
    for call, text in _CALLS:
        shapes = tuple(tuple(map(int, shape.split("x"))) for shape in text.split())
        elements = sum(map(math.prod, shapes))
        flops = round(elements**1.5) if call.startswith(("opaque", "attention")) else 3 * elements
        costs = [
            price_compute(machine, call, shapes, dtype, elements * itemsize(dtype), flops, own)
            for dtype in ("float32", "bfloat16")
            for own in (False, True)
        ]
        yield f"{call} {text}", [part for cost in costs for part in (cost.dispatch_ps, cost.work_ps, cost.energy_pJ)]


def _messages(kind: str) -> Iterator[Row]:
    """Collectives and transfers of all sizes, in groups along every axis of a mesh of 12 or 16 ranks."""
    machine = machines()[kind]
    ranks = machine.num_devices
    for axes in (((2, 1),), ((4, 1),), ((2, 2),), ((4, 2),), ((ranks // 4, 4),), ((2, 1), (2, 4)), ((ranks, 1),)):
        group = axes_group(machine, axes, ranks)
        for call in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "all_gather_flat"):
            costs = [price_collective(machine, call, group, size, 2, size % 2) for size in (513, 2**16 + 2, 2**28)]
            numbers = [number for cost in costs for number in (cost.work_ps, cost.cpu_ps, cost.waiting_ps)]
            yield f"{call} along {axes}", [costs[0].dispatch_ps, *numbers]
    for other in (1, 2, 5, ranks - 1):
        costs = [price_transfer(machine, 0, other, size, pairs) for size, pairs in ((100, 1), (2**22, 1), (2**22, 4))]
        numbers = [number for cost in costs for number in (cost.work_ps, cost.cpu_ps, cost.waiting_ps)]
        yield f"transfer from 0 to {other}", [costs[0].dispatch_ps, *numbers]


# -- steps -------------------------------------------------------------------------------------------------------------

_ADAMW = {"kind": "adamw", "settings": {"lr": 1e-4}}
_STEPS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "one device": ("llama", "nodes", {}, {}),
    "data": ("tied", "nodes", {"dp": 4, "micro_batch": 2}, {"parallel_level": 1, "bucket_bytes": 2**20}),
    "sharded": ("llama", "a card of four", {"dp": 8}, {"parallel_level": 3, "master_dtype": "float32"}),
    "tensor": ("large", "nodes", {"tp": 4, "dp": 2, "sequence_parallel": True}, {"parallel_level": 2}),
    "context": ("llama", "leaves", {"cp": 4, "tp": 2, "recompute": "selective"}, {}),
    "pipeline": ("gpt", "rails", {"pp": 4, "dp": 2, "layers": (1, 1, 2, 1)}, {"parallel_level": 1}),
    "interleaved": (
        "large", "three tiers", {"pp": 2, "tp": 2, "dp": 2, "schedule": "interleaved_1f1b", "virtual": 2}, {},
    ),
    "zero bubble": (
        "llama", "torus", {"pp": 4, "schedule": "zb_h1", "recompute": "full"}, {"gradient_dtype": "float32"},
    ),
    "v shape": ("tied", "dragonfly", {"pp": 2, "cp": 2, "schedule": "zb_v", "virtual": 2}, {"parallel_level": 1}),
    "experts": ("experts", "nodes", {"dp": 4, "ep": 4, "tp": 2}, {"parallel_level": 1, "master_dtype": "float32"}),
    "latent": (
        "latent", "three tiers", {"dp": 2, "tp": 2, "pp": 2, "recompute": "memory_bound"}, {"parallel_level": 2},
    ),
    "slices": ("large", "nodes", {"tp": 2, "dp": 2, "micro_batch": 2, "interleave": 2}, {}),
    "cores": (
        "gpt", "cores", {"dp": 2, "tp": 2, "pp": 2}, {"kind": "momentum", "settings": {"lr": 0.1, "momentum": 0.9}},
    ),
    "plain": (
        "experts", "plain",
        {"dp": 2, "pp": 2, "recompute": "full", "recompute_layers": 1, "receives": "needed"}, {},
    ),
}  # fmt: skip
"""Model, machine, degrees and optimizer of each."""


def _case(name: str) -> tuple[TransformerConfig, Degrees, Machine]:
    model, machine, spread, optimizer = _STEPS[name]
    degrees = Degrees(global_batch=8, optimizer=Optimizer(**_ADAMW | optimizer), **spread)
    return models()[model], degrees, machines()[machine]


def _predicted(found: Forecast | Outcome | Timeline) -> list[float]:
    return [*_in_the_middle(found), found.low_s or 0.0, found.high_s or 0.0]


def _in_the_middle(found: Forecast | Outcome | Timeline) -> list[float]:
    """Without the interval, whose width for other software is of all hosts that were ever measured."""
    return [found.step_s, found.peak_bytes, found.bubble_fraction, found.exposed_comm_s, found.host_wait_s]


def _stack(name: str) -> Stack:
    """Software on a host whose times stay the same when others are measured."""
    stack = stack_named(name)
    return dataclasses.replace(stack, host="third") if stack.host else stack


def _by_name(sizes: Mapping[Any, float]) -> list[float]:
    return [size for _, size in sorted(sizes.items(), key=lambda item: str(item[0]))]


def _forecasts(name: str) -> Iterator[Row]:
    """Forecasts of twofold's executor, eager and replayed, with memory by role and the parts of every pipeline rank."""
    config, degrees, machine = _case(name)
    for execution in EXECUTIONS:
        found = forecast(config, degrees, executing(machine, execution))
        parts = [part for rank in found.rank_s for part in _by_name(rank)]
        yield execution, [*_predicted(found), *_by_name(found.memory), *parts]


def _estimates(name: str) -> Iterator[Row]:
    """Steps of other software; every case is of every fifth, so that all are of some."""
    config, degrees, machine = _case(name)
    for stack in stack_names()[[*_STEPS].index(name) % 5 :: 5]:
        try:
            found = estimate(config, degrees, machine, stack=_stack(stack))
            yield stack, [*_in_the_middle(found), *_by_name(found.memory)]
        except TwofoldError:
            yield f"{stack}, refused", []


def _drawn(number: int) -> Iterator[Row]:
    """Degrees that are drawn, forecast for twofold's executor and estimated for other software."""
    draw = random.Random(number)
    for attempt in range(24):
        config, machine = draw.choice([*models().values()]), draw.choice([*machines().values()])
        name = draw.choice(schedule_names())
        optimizer = Optimizer(
            **_ADAMW, parallel_level=draw.choice((0, 1, 2, 3)), bucket_bytes=draw.choice((0, 2**18, 25 * 2**20)),
            master_dtype=draw.choice((None, "float32")), gradient_dtype=draw.choice((None, "float32")),
            reduce_every=draw.choice(("micro_batch", "step")),
        )  # fmt: skip
        dp, tp, pp, cp = (draw.choice((1, 2, 4)) for _ in range(4))
        wanted = {
            "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": draw.choice((1, 2)), "micro_batch": draw.choice((1, 2)),
            "schedule": name, "virtual": draw.choice((1, 2)), "sequence_parallel": draw.random() < 0.5,
            "recompute": draw.choice(RECOMPUTE_MODES), "recompute_layers": draw.choice((None, 1)),
            "fused": draw.random() < 0.5, "receives": draw.choice(("ahead", "needed")),
        }  # fmt: skip
        stacks = [_stack("twofold"), *(_stack(stack) for stack in draw.sample(stack_names(), 6))]
        for stack in stacks:
            try:
                degrees = Degrees(global_batch=8, optimizer=optimizer, **wanted)
                found = forecast(config, degrees, machine, stack=stack)
            except TwofoldError:
                continue
            own = _predicted(found) if stack.runs_programs else _in_the_middle(found)
            yield f"{attempt}, {stack.name}", [*own, *_by_name(found.memory)]


def _timelines(name: str) -> Iterator[Row]:
    """A simulated step: its parts, critical path, peaks and messages."""
    config, degrees, machine = _case(name)
    program = lower(plan_of(degrees, transformer(config, batch_size=8)))
    timeline = simulate(program, machine, num_steps=2)
    path, last = critical_path(timeline, program), program.num_ranks - 1
    whole = composition(timeline, program)[last]
    peak, live = memory_peak(program, timeline, last), live_by_role(program, timeline, last).thinned(10**9, 20)
    messages = messages_of_operators(program)
    yield "step, memory", [
        *_predicted(timeline), *(size for peak in worst_ranks(timeline) for size in _by_name(peak.by_role)),
    ]  # fmt: skip
    yield "parts", [
        whole.compute_ps, whole.host_wait_ps, whole.bubble_ps, *_by_name(whole.exposed_ps),
        *_by_name(whole.straggler_ps), *_by_name(path.by_kind_ps), *_by_name(path.by_rank_ps), len(path.spans),
        *(straggler.waited_ps for straggler in path.stragglers[:3]), *_by_name(time_by_call_s(timeline)),
    ]  # fmt: skip
    yield "live", [
        peak.time_ps, *_by_name(peak.by_role), *_by_name(peak.by_action), len(peak.values), *live.times_ps[:20],
        *live.total[:20], len(live.total), len(messages),
        *(sum(each.count for each in found) for found in messages.values()),
    ]  # fmt: skip


# -- questions ---------------------------------------------------------------------------------------------------------

_LINKS = ("NVLink:bandwidth=0.5", "1:0-3:latency=3,bandwidth=0.8", "0:0~1:failed", "1:0~8:bandwidth=0.3", "*:latency=2")
_CHANGES: Mapping[str, dict[str, Any]] = {
    "slow ranks": {"slowdown": {1: 1.5, 6: 1.2}},
    "jitter": {"jitter": 0.2, "seed": 3},
    "factors": {"bandwidth": 0.5, "latency": 3.0, "compute": 2.0, "memory": 0.7, "dispatch": 1.5},
    "another device": {"devices": {3: "plain"}},
    "blocking": {
        "checkpoints": Checkpoints(every_steps=50, write_Bps=1e6, size_bytes=10**7),
        "failures": Failures(device_mtbf_s=5e4, restart_s=20.0),
    },
    "asynchronous": {
        "checkpoints": Checkpoints(every_steps=500, write_Bps=1e7, blocking=False, stall_s=0.01),
        "failures": Failures(device_mtbf_s=5e4, restart_s=20.0),
    },
}  # fmt: skip


_SPREAD = Degrees(dp=2, tp=2, pp=2, global_batch=4, optimizer=Optimizer(**_ADAMW, parallel_level=1))


@cache
def _program() -> Program:
    return lower(plan_of(_SPREAD, transformer(models()["llama"], batch_size=4)))


def _changes(kind: str) -> Iterator[Row]:
    """What-if questions."""
    machine = machines()[kind]
    changes = {name: WhatIf(**change | _devices(change)) for name, change in _CHANGES.items()}
    for text in _LINKS if machine.graph is None else ("inside:bandwidth=0.1", "card:0-3:bandwidth=0.2"):
        changes[text] = WhatIf(links=(LinkChange.parse(text),))
    for name, change in changes.items():
        try:
            found = outcome(_program(), machine, change, num_steps=2)
        except TwofoldError:
            yield f"{name}, refused", []
            continue
        left = found.goodput
        yield name, [
            *_predicted(found), left.effective_step_s, left.checkpoint_s, left.best_every_steps or 0, left.fraction,
        ]  # fmt: skip


def _questions() -> Iterator[Row]:
    """Sensitivities, slow ranks, goodput, and two jobs on one machine."""
    known = machines()
    what = Configured(config=models()["llama"], degrees=_SPREAD, machine=known["nodes"])
    start = WhatIf(**_CHANGES["blocking"])
    yield "effects", [
        value for effect in sorted(sensitivity(what.outcome, known["nodes"], start), key=lambda effect: effect.knob)
        for value in (effect.low_s, effect.high_s, effect.swing_s)
    ]  # fmt: skip
    yield "slow ranks of a forecast", _predicted(what.outcome(WhatIf(slowdown={1: 1.5, 6: 1.2})))
    sampled = {
        blocking: sampled_goodput(
            1.0, 8, checkpoints=Checkpoints(every_steps=30, write_Bps=1e6, blocking=blocking, size_bytes=5 * 10**6),
            failures=Failures(device_mtbf_s=2e3, restart_s=20.0), num_checkpoints=300, seed=1,
        ).effective_step_s
        for blocking in (True, False)
    }  # fmt: skip
    yield "goodput played out", sampled.values()
    jobs = [Job(program=_program(), ranks=tuple(range(start, 16, 2))) for start in (0, 1)]
    for number, timeline in enumerate(simulate_jobs(jobs, known["a card of four"], num_steps=2)):
        yield f"job {number} of two", _predicted(timeline)


def _composed() -> Iterator[Row]:
    """Experts over ranks that split samples, sharding within groups, grids, utilization."""
    known, given = machines(), models()
    megatron, torch = _stack("megatron"), _stack("torchtitan")
    optimizer = Optimizer(**_ADAMW, parallel_level=1, master_dtype="float32")
    split = Degrees(dp=2, cp=2, tp=2, global_batch=8, optimizer=optimizer, sequence_parallel=True)
    for whole in (False, True):
        found = folded_mixture_forecast(given["experts"], split, known["nodes"], megatron, 8, whole_experts=whole)
        yield f"folded, {whole}", [*_in_the_middle(found), *_by_name(found.memory)]
    for every in ("micro_batch", "step"):
        sharded = Optimizer(**_ADAMW, parallel_level=3, reduce_every=every)
        degrees = Degrees(dp=16, global_batch=32, optimizer=sharded)
        yield f"hybrid, {every}", _in_the_middle(hybrid_forecast(given["large"], degrees, known["nodes"], torch, 4))
    for name in ("twofold", "torchtitan", "megatron-2022"):
        spreads = [
            Degrees(dp=16 // (tp * pp), tp=tp, pp=pp, global_batch=32, schedule=schedule, optimizer=optimizer)
            for tp in (1, 2) for pp in (2, 4) for schedule in ("1f1b", "gpipe")
        ]  # fmt: skip
        found = estimate_grid(given["llama"], spreads, known["nodes"], stack=_stack(name))
        yield f"grid of {name}", [number for each in found for number in _in_the_middle(each)]
    for name, config in given.items():
        stack = stack_named("torch")
        yield f"{name}: utilization", [
            *_by_name(forward_products(config)), model_flops(config, 3), *stack.unknown_bytes(config, split),
            mfu(config, known["nodes"], sequences=3, num_devices=2, step_s=0.5),
        ]  # fmt: skip


_POINTS: Mapping[str, dict[str, Any]] = {
    "devices": {"devices": 8, "tp": 2},
    "precision": {"tp": 4, "precision": "float16", "mixed_precision": False, "seq": 1024},
    "zero": {"dp": 8, "zero": 3},
    "factors": {"tp": 8, "bandwidth": 0.5, "latency": 2.0, "compute": 1.5, "execution": "eager"},
    "tier": {"dp": 4, "tp": 4, "bandwidth.NVLink": 0.5, "latency.NVLink": 3.0},
    "slow": {"pp": 4, "dp": 2, "slow": "1=1.2 stage2=1.1"},
    "failures": {"dp": 8, "mtbf_hours.device": 1000.0, "mtbf_hours.network": 500.0, "restart_s": 120.0,
                 "checkpoint_every": 100, "price_per_device_hour": 2.5},
    "spares": {"dp": 8, "mtbf_hours": 100.0, "spares": 2, "repair_hours": 24.0, "checkpoint_minutes": 10.0,
               "checkpoint_GBps": 2.0, "checkpoint_async": True, "restart_s": 60.0},
}  # fmt: skip


def _points() -> Iterator[Row]:
    """Points of studies."""
    base = {"model": "llama-3-8b", "layers": 4, "seq": 512, "machine": str(MACHINE), "global_batch": 16}
    for name, settings in _POINTS.items():
        figures = figures_of_point(base | settings)
        assert "refused" not in figures, f"{name}: {figures['refused']}"
        yield name, [float(value) for _, value in sorted(figures.items()) if isinstance(value, float | int)]


def _devices(change: Mapping[str, Any]) -> dict[str, Any]:
    return {"devices": {rank: machines()[kind] for rank, kind in change.get("devices", {}).items()}}


_BEHIND_HOSTS = [name for name, (_, machine, *_) in _STEPS.items() if machine != "cores"]

CASES: Mapping[str, Callable[[], Iterator[Row]]] = {
    **{f"kernels on {kind}": partial(_kernels, kind) for kind in ("nodes", "plain", "cores")},
    **{f"messages on {kind}": partial(_messages, kind) for kind in machines()},
    **{f"forecasts of {name}": partial(_forecasts, name) for name in _BEHIND_HOSTS},
    **{f"estimates of {name}": partial(_estimates, name) for name in _BEHIND_HOSTS},
    **{f"drawn {number}": partial(_drawn, number) for number in range(6)},
    **{f"timeline of {name}": partial(_timelines, name) for name in _STEPS},
    **{f"changes on {kind}": partial(_changes, kind) for kind in ("nodes", "a card of four", "leaves")},
    "questions": _questions,
    "composed predictions": _composed,
    "points of studies": _points,
}
"""Name -> what computes the rows of numbers."""
