"""Bounds of the search over degrees hold: nothing below a node is faster by its estimate, or needs less memory."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from costmodels import Machine
from costmodels.price.clock import at_usual_clock
from plans.degrees import Degrees
from plans.model.transformer import TransformerConfig, transformer_config
from plans.schedules import make_schedule
from search.devices import Pins, Problem, solve
from search.devices.bounds import ScheduleSpace
from search.devices.branch import ESTIMATE_MARGIN, Branching
from search.devices.bubbles import Bubbles
from search.devices.costs import WAYS, Table
from search.devices.nodes import Kind, leaf_values
from search.devices.space import layer_choices, meshes, spreads
from search.devices.stage_config import StageConfig, in_any_place
from simulator.estimate import estimate
from simulator.forecast import forecast
from simulator.forecast.predict import step_forecast

PROBLEMS = {
    "two nodes": Problem(
        config=transformer_config("llama-3-8b", num_layers=8), machine=Machine.load("h100-sxm-x16"), num_devices=16,
        global_batch=64,
    ),
    "little memory": Problem(  # all but the smallest micro-batches recompute
        config=transformer_config("llama-3-8b", num_layers=16), machine=Machine.load("h100-sxm-x8"), num_devices=8,
        global_batch=32, memory_limit_bytes=20 * 10**9,
    ),
    "recompute is pinned": Problem(  # of some blocks
        config=transformer_config("llama-3-8b", num_layers=4), machine=Machine.load("h100-sxm-x8"), num_devices=8,
        global_batch=32, pins=Pins(recompute="full"),
    ),
    "experts": Problem(
        config=transformer_config("deepseek-moe-16b", num_layers=6), machine=Machine.load("h100-sxm-x16"),
        num_devices=16, global_batch=64,
    ),
    "three tiers": Problem(
        config=transformer_config("llama-3-8b", num_layers=8), machine=Machine.load("leaf-spine-x256"),
        num_devices=64, global_batch=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_step_without_contention_is_no_longer_than_its_forecast(schedule):
    """Kernels slow long transfers, but not while they are waited for. With the average time that kernels cost a
    transfer, these steps without contention were 18 and 16 % longer than their forecasts."""
    config = TransformerConfig(name="small", num_layers=2, hidden=384, num_heads=6, ffn=1020, vocab=128256, seq=2048)
    machine = Machine.load("h100-sxm-x16")
    slow = tuple(msgspec.structs.replace(link, bandwidth_Bps=link.bandwidth_Bps / 4) for link in machine.links)
    degrees = Degrees(pp=2, micro_batch=6, global_batch=6, schedule=schedule, recompute="selective_op")
    step = step_forecast(config, degrees, msgspec.structs.replace(machine, links=slow))
    assert step.is_walked
    assert 0.9 < step.alone_s / step.forecast().step_s <= 1.0


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_bound_on_the_way_to_a_configuration_exceeds_its_estimate(name):
    problem, draw = PROBLEMS[name], random.Random(name)
    branching = Branching(problem=problem)
    nodes = branching._nodes()
    roots = [child for mesh in meshes(problem)[0] for child in nodes.roots(mesh, float("inf"))]
    compared = 0
    while compared < 15:
        child = draw.choice(roots)
        bounds = [child[0]]
        while child[1] is not Kind.LEAF and (children := list(nodes.open(child[1], child[0], child[2], float("inf")))):
            child = draw.choice(children)
            bounds.append(child[0])
        if child[1] is not Kind.LEAF:
            continue  # nothing of this branch fits
        decided, ranked, _ = child[2]
        at = draw.randrange(len(ranked))
        estimate = branching.estimated(problem.degrees(leaf_values(problem, (decided, ranked, at))))
        if estimate is not None:
            assert max(*bounds, ranked[at][0]) <= estimate.step_s * (1 + 1e-9)
            _check_least_memory(branching, nodes, decided, ranked[at][1][0])
            compared += 1


def _check_least_memory(branching, nodes, decided, layers):
    """Against the peak of every number of blocks that recompute, with limits that some or all of them exceed."""
    mesh, stage, level, shape = decided
    count = branching.problem.global_batch // (mesh.dp * stage.micro_batch)
    group, stage = nodes.spaces.group(mesh.pp, count, split=stage.split), in_any_place(stage)
    partial = nodes.spaces.is_partial(stage.recompute)
    space = branching.space(shape, mesh.pp, count)
    rows, spread = branching.rows(space, stage.recompute), space.layers.index(layers)
    own = rows.take(np.flatnonzero(rows.spread == spread))
    peaks = branching.peak_memory.peaks_bytes(stage, space, dp=mesh.dp, level=level, rows=own)
    number = group.linear.starts[group.shapes.index(shape)] + spread
    for limit in np.quantile(peaks, [0.0, 0.5, 1.0]).astype(int).tolist():
        least, blocks = group.memory.needs(
            branching.peak_memory, stage, dp=mesh.dp, level=level, partial=partial, limit=limit
        )
        assert least[number] <= peaks.min()
        assert blocks[number] <= own.recomputed[peaks <= limit].min()


@pytest.mark.parametrize("split", [False, True])
def test_the_least_memory_counts_what_blocks_that_recompute_need(split):
    """Most layer splits need little more than is known early; without the backward it was two fifths."""
    machine = Machine.load("h100-sxm-x64")
    problem = Problem(
        config=transformer_config("deepseek-v3", num_layers=30), machine=machine, num_devices=64, global_batch=256
    )
    branching, stage = Branching(problem=problem), StageConfig(1, 1, False, 1, "full", split, 8)
    group = branching.spaces.group(8, 32, split=split)
    least, _ = group.memory.needs(branching.peak_memory, stage, dp=8, level=3, partial=True, limit=0)
    for number, shape in enumerate(group.shapes):
        space = branching.space(shape, 8, 32)
        rows = branching.rows(space, "full")
        peaks = branching.peak_memory.peaks_bytes(stage, space, dp=8, level=3, rows=rows)
        fewest = np.array([peaks[rows.spread == spread].min() for spread in range(len(space.layers))])
        own = least[group.linear.starts[number] : group.linear.starts[number + 1]]
        assert (own <= fewest).all() and np.median(own / fewest) > 0.55


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_estimate_of_one_device_is_its_forecast(dtype):
    """Nothing is averaged there: every kernel, and one update of all parameters of a block."""
    config = replace(transformer_config("llama-3-8b", num_layers=3), dtype=dtype)
    problem = Problem(config=config, machine=at_usual_clock(Machine.load("h200-x8")), num_devices=1, global_batch=2)
    degrees = problem.degrees({"dp": 1, "micro_batch": 1, "recompute": "full", "recompute_layers": 1, "layers": (3,)})
    steps_s = [each(config, degrees, problem.machine).step_s for each in (estimate, forecast)]
    assert steps_s[0] == pytest.approx(steps_s[1], rel=1e-9)


@pytest.mark.parametrize("level", [0, 1])
def test_long_reductions_do_not_slow_the_head(level):
    """The backward of the head comes before all reductions: an estimate that slows it exceeds the forecast by 5 %."""
    machine = at_usual_clock(Machine.load("h100-sxm-x8"))
    slow = [msgspec.structs.replace(link, bandwidth_Bps=link.bandwidth_Bps / 16) for link in machine.links]
    machine = msgspec.structs.replace(machine, links=tuple(slow))
    config = TransformerConfig(
        name="small", num_layers=8, hidden=768, num_heads=6, ffn=3072, vocab=31998, seq=2048, num_kv_heads=6
    )
    problem = Problem(config=config, machine=machine, num_devices=6, global_batch=12)
    degrees = problem.degrees({"dp": 6, "micro_batch": 2, "recompute": "none", "zero": level, "layers": (8,)})
    estimated_s, forecast_s = (each(config, degrees, machine).step_s for each in (estimate, forecast))
    assert estimated_s <= 1.02 * forecast_s


@pytest.mark.parametrize(
    ("model", "devices", "values"),
    [
        ("llama-3-8b", 64, {"dp": 32, "pp": 2, "schedule": "dualpipe_v", "layers": (8, 8, 9, 7)}),
        ("llama-3-70b", 1024, {
            "dp": 32, "tp": 2, "cp": 4, "pp": 4, "sequence_parallel": True, "schedule": "interleaved_1f1b",
            "virtual": 8, "layers": (1, *[2] * 13, *[3] * 17, 2),
        }),
    ],
    ids=["whole backwards beside split ones", "gathers that open a step"],
)  # fmt: skip
def test_an_estimate_exceeds_its_forecast_by_no_more_than_the_margin(model, devices, values):
    config, machine = transformer_config(model), Machine.load(f"h100-sxm-x{devices}")
    problem = Problem(config=config, machine=machine, num_devices=devices, global_batch=8 * devices)
    degrees = problem.degrees({"micro_batch": 1, "recompute": "none", "zero": 1, **values})
    estimated_s, forecast_s = (each(config, degrees, machine).step_s for each in (estimate, forecast))
    assert 0.98 * forecast_s < estimated_s < 1.005 * forecast_s


def test_the_margin_falls_with_every_forecast():
    branching = Branching(problem=PROBLEMS["recompute is pinned"].changed(pins=Pins(dp=8, pp=1, recompute="full")))
    widest = branching.margin
    branching.run()
    assert branching.complete and branching.num_forecasts < 32
    assert 0.005 < branching.margin < widest == ESTIMATE_MARGIN


def test_the_margin_is_learned_from_forecasts_not_from_steps_without_contention():
    """Without contention this step takes 7 % less than its estimate, with it 4 % more."""
    pins = Pins(
        dp=6, pp=4, tp=1, cp=1, micro_batch=1, schedule="interleaved_zb", virtual=8, recompute="none", zero=1,
        order=("tp", "cp", "dp", "pp"), layers=(0, *[1] * 28, 2, 2, 0),
    )  # fmt: skip
    config, machine = transformer_config("llama-3-8b"), at_usual_clock(Machine.load("h200-x24"))
    branching = Branching(problem=Problem(config=config, machine=machine, num_devices=24, global_batch=30, pins=pins))
    branching.run()
    best = branching.candidates[0]
    estimated_s = branching.estimated(best.degrees).step_s
    assert (
        step_forecast(config, best.degrees, machine).alone_s < 0.95 * estimated_s < estimated_s < best.forecast.step_s
    )
    assert branching.complete and branching.margin <= ESTIMATE_MARGIN


def test_the_update_of_a_later_rank_is_part_of_the_bound():
    """Embedding and block on rank 0, block and head on rank 1, one second each way; the head's update takes 100 s."""
    space = ScheduleSpace(schedule=make_schedule("1f1b", 2, 1), layers=((1, 1),))
    none, work = np.zeros((3, len(WAYS))), np.tile([1.0, 1.0, 1.0, 1.0, 0.0, 0.0], (3, 1))
    table = Table(
        work=work, first_gather=none, dispatch=none, update=np.array([0.0, 0.0, 100.0]), update_dispatch=np.zeros(3)
    )
    assert space.bounds_s(table, (0.0, 0.0)) == pytest.approx([2 + 2 + 2 + 100])


@pytest.mark.parametrize("name", ["1f1b", "interleaved_zb", "v_half", "dualpipe_v"])
def test_the_longest_path_is_the_step_of_a_schedule(name):
    """Against a replay of the schedule, action by action."""
    schedule = make_schedule(name, 4, 8, virtual=3 if name == "interleaved_zb" else None)
    space = ScheduleSpace(schedule=schedule, layers=layer_choices(40, schedule.num_stages, 3))
    numbers = np.random.default_rng(3)
    times = numbers.random((len(space.layers), schedule.num_stages, len(WAYS)))
    hops = space.hops_s(tuple(numbers.random(4)))
    space.paths.learn(times, hops, only_first=False)
    lengths = space.paths.lengths_s(times, hops).max(axis=1)
    for own, length in zip(times, lengths, strict=True):
        replayed = _replayed(schedule, own, hops, split=space.split)
        assert replayed / 1.0021 <= length <= replayed * (1 + 1e-12)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_no_pipeline_is_faster_than_its_least_bubble(name):
    """Against a replay of the schedule with every spread of the layers."""
    virtual = 2 if name.startswith("interleaved") else None
    config, pp, count = transformer_config("llama-3-8b", num_layers=10), 4, 8
    machine = Machine.load("h100-sxm-x8")
    pins = Pins(schedule=name, virtual=virtual)
    problem = Problem(config=config, machine=machine, num_devices=8, global_batch=64, pins=pins)
    bubbles = Bubbles(problem=problem, together=lambda shape: True)
    schedule = make_schedule(name, pp, count, virtual=virtual)
    space = ScheduleSpace(schedule=schedule, layers=spreads(problem, schedule.num_stages))
    numbers = np.random.default_rng(7)
    for transfers_s in [(), tuple((0.5 * numbers.random(pp)).tolist()), (0.0, 1.0, 0.0, 0.0)]:
        hops = space.hops_s(transfers_s or (0.0,) * pp)
        forward, inputs, weights = numbers.random((3, 3)) * [[0.1, 1.0, 0.5]]
        parts = (forward, weights, inputs) if space.split else (forward, inputs + weights, 0 * inputs)
        ways = np.stack([parts[0], parts[0], parts[1], parts[1], parts[2], 0 * inputs], axis=1)
        steps = [_replayed(schedule, each, hops, split=space.split) for each in space.pieces @ ways]
        back = inputs if space.split else inputs + weights
        bound = bubbles.bound_s(pp, count, forward, back, inputs + weights, split=space.split, transfers_s=transfers_s)
        assert max(steps) / 2 < bound <= min(steps) * (1 + 1e-12)


def test_the_least_bubble_of_1f1b_is_that_of_the_literature():
    """(m + p - 1) (f + b) with equal chunks: Narayanan et al. 2021, section 2.2."""
    pins = Pins(schedule="1f1b", pp=4, layers=(2, 2, 2, 2))
    problem = Problem(
        config=transformer_config("llama-3-8b", num_layers=8), machine=Machine.load("h100-sxm-x8"), num_devices=8,
        global_batch=64, pins=pins,
    )  # fmt: skip
    bubbles = Bubbles(problem=problem, together=lambda shape: True)
    block = np.array([0.0, 1.0, 0.0])
    assert bubbles.bound_s(4, 8, block, 2 * block, 2 * block, split=False) == pytest.approx((8 + 3) * 2 * 3)


def _replayed(schedule, times, hops, *, split):
    """When the last action ends, each begun as soon as its rank is free and its tensor is there."""
    last = {  # of each stage the numbers of its first forward and of its last backward
        stage: max(at for at, action in enumerate(order) if action.stage == stage and str(action.kind) in "BW")
        for order in schedule.order for stage in {each.stage for each in order}
    }  # fmt: skip
    free, done, at = [0.0] * schedule.num_ranks, {}, [0] * schedule.num_ranks
    begun = set()
    while any(number < len(order) for number, order in zip(at, schedule.order, strict=True)):
        for rank, order in enumerate(schedule.order):
            while at[rank] < len(order):
                action, kind = order[at[rank]], str(order[at[rank]].kind)
                stage, batch = action.stage, action.micro_batch
                needed = {"F": ("F", stage - 1, batch), "W": None}.get(kind, ("back", stage + 1, batch))
                there = 0.0
                if needed and 0 <= needed[1] < schedule.num_stages:
                    if needed not in done:
                        break
                    moved = schedule.placement[needed[1]] != rank
                    there = done[needed] + moved * hops[max(stage, needed[1])]
                way = dict(zip(WAYS, times[stage], strict=True))
                if kind == "F":
                    took = way["F" if stage in begun else "F.first"]
                    begun.add(stage)
                else:
                    closing = way["closing.last" if at[rank] == last[stage] else "closing"]
                    whole = way["I"] + way["closing"] + way["joined"] if split else closing
                    took = {"I": way["I"], "W": closing, "B": whole}[kind]
                free[rank] = max(free[rank], there) + took
                if kind != "W":
                    done["F" if kind == "F" else "back", stage, batch] = free[rank]
                at[rank] += 1
    return max(free)


def test_estimates_of_few_micro_batches_are_of_steps_in_a_row():
    """A rank that ends early begins its next step early. There its host is ahead, and it may end before the first rank:
    one step alone takes 18 % longer."""
    config = TransformerConfig(
        name="short", num_layers=4, hidden=512, num_heads=8, num_kv_heads=4, ffn=1536, vocab=1024, seq=1024
    )
    machine = at_usual_clock(Machine.load("h100-sxm-x16"))
    degrees = Degrees(pp=2, micro_batch=6, global_batch=6)
    step_s = forecast(config, degrees, machine).step_s
    assert step_forecast(config, degrees, machine).end_ps() / 1e12 > 1.1 * step_s
    assert estimate(config, degrees, machine).step_s == pytest.approx(step_s, rel=0.01)


def test_transfers_of_one_micro_batch_slow_no_kernels():
    """Its ranks are idle while they wait for tensors; estimates that slowed every action were 12 % too long."""
    config = TransformerConfig(name="short", num_layers=4, hidden=768, num_heads=6, ffn=3072, vocab=32000, seq=4096)
    machine = Machine.load("h100-sxm-x8")
    slow = tuple(msgspec.structs.replace(link, bandwidth_Bps=link.bandwidth_Bps / 16) for link in machine.links)
    machine = msgspec.structs.replace(machine, links=slow)
    degrees = Degrees(pp=2, micro_batch=8, global_batch=8)
    step_s = forecast(config, degrees, machine).step_s
    assert 0.97 * step_s < estimate(config, degrees, machine).step_s <= 1.001 * step_s


def test_full_weights_of_a_head_are_there_once():
    """Beside those of a block: twice a head that is six blocks wide would not fit, by formula."""
    config = TransformerConfig(
        name="wide", num_layers=8, hidden=2048, num_heads=16, num_kv_heads=4, ffn=6144, vocab=128_256, seq=4096
    )
    machine = Machine.load("h100-sxm-x24")
    pins = {"tp": 1, "cp": 1, "pp": 1, "zero": 3, "micro_batch": 1, "recompute": "selective_op"}
    asked = Problem(config=config, machine=machine, num_devices=6, global_batch=12, pins=Pins(**pins))
    free = solve(asked.changed(pins=Pins(**pins, recompute_layers=8))).best
    found = solve(asked.changed(memory_limit_bytes=free.forecast.peak_bytes)).best
    assert found.forecast.step_s == free.forecast.step_s
    assert estimate(config, free.degrees, machine).peak_bytes == pytest.approx(free.forecast.peak_bytes, rel=5e-3)
