"""The clock of a step from its load: the law, its fit, and one answer of engine, forecast and search."""

import gzip
import itertools
import json

import msgspec
import numpy as np
import pytest

from costmodels import Machine, executing
from costmodels.fit.points import Point, load_points
from costmodels.fit.power import CHECKED, fit_power, mixtures
from costmodels.machine.catalogue import load_device
from costmodels.price.clock import at_clock, at_usual_clock
from costmodels.price.group import mesh_group
from costmodels.price.instruction import copies_of, price, price_collective, price_compute
from costmodels.price.power import Load, Power, mean_W, settled_MHz, slowest_of
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer, transformer_config
from plans.optimizer import Optimizer
from search.devices import Pins, Problem, solve
from simulator import WhatIf, simulate
from simulator.forecast import forecast
from simulator.study.configured import Configured
from tests import ROOT

DATA = ROOT / "benchmarks" / "data"
CHIP = Power(
    limit_W=700, highest_MHz=2000, idle_W=120, matrix_W=1200, attention_W=1400, memory_W=500, update_W=400, peak_W=950,
    exponent=2.3, memory_exponent=1.4,
)  # fmt: skip
CONFIG = TransformerConfig(
    name="wide", num_layers=2, hidden=4096, num_heads=32, ffn=11008, vocab=32000, seq=1024, dtype="bfloat16"
)


def heavy(step_s=1.0):
    return Load(2000.0, step_s, {"matrix": 0.8 * step_s}, {"matrix": 0.65 * step_s * CHIP.matrix_W})


def test_a_step_settles_where_it_draws_the_limit_and_no_more():
    clock = settled_MHz(CHIP, heavy())
    assert mean_W(CHIP, heavy(), clock) <= CHIP.limit_W < mean_W(CHIP, heavy(), clock + 2)
    assert settled_MHz(CHIP, heavy(10.0)) == clock  # only shares matter


def test_a_chip_that_waits_more_runs_faster():
    waiting = heavy()._replace(step_s=1.2)
    assert settled_MHz(CHIP, heavy()) < settled_MHz(CHIP, waiting) <= CHIP.highest_MHz


def test_many_chips_in_step_go_at_the_pace_of_the_slowest():
    spread = msgspec.structs.replace(CHIP, chip_spread=0.015)
    clocks = [settled_MHz(spread, heavy(), count) for count in (1, 2, 1024)]
    assert clocks[0] > clocks[1] > clocks[2] > 0.94 * clocks[0]


def test_chips_that_meet_often_wait_for_the_one_that_is_slower_at_that_moment():
    wandering = msgspec.structs.replace(CHIP, wander=0.045)
    steps = [heavy(0.1)._replace(meetings={4: count}) for count in (0, 66)]
    alone, *_ = (settled_MHz(wandering, step) for step in steps)
    once, often = (settled_MHz(wandering, step, 4) for step in steps)
    assert alone > once > often
    # 67 stretches of 1.5 ms: the slowest of 4 such means is 1.03 * 4.5 % slower than their average
    assert often / alone == pytest.approx(1 - 0.045 * slowest_of(4), abs=1e-3)


@pytest.mark.parametrize(("chips", "team"), [(4, 4), (64, 4), (64, 8), (64, 64)])
def test_teams_that_meet_often_wait_for_their_own_members_only(chips, team):
    wandering = msgspec.structs.replace(CHIP, wander=0.045, chip_spread=0.015)
    step = heavy(0.1)._replace(meetings={team: 66})
    slower = 1 - settled_MHz(wandering, step, chips) / settled_MHz(wandering, step)
    # drawn: how late every chip is in each of 67 stretches; means over t stretches vary by t to the power of -0.25
    draw, stretches = np.random.default_rng(0), 67
    gaps = np.arange(stretches)[:, None] - np.arange(stretches)
    together = (np.abs(gaps + 1.0) ** 1.5 - 2 * np.abs(gaps) ** 1.5 + np.abs(gaps - 1.0) ** 1.5) / 2
    wander = draw.normal(size=(100, chips, stretches)) @ np.linalg.cholesky(together).T
    later = 0.045 * wander + 0.015 * draw.normal(size=(100, chips, 1))
    teams = later.reshape(100, chips // team, team, stretches).max(axis=2).mean(axis=2)
    assert slower == pytest.approx(teams.max(axis=1).mean(), abs=0.008)


def test_a_clock_falls_evenly_as_a_step_nears_its_limit():
    wandering = msgspec.structs.replace(CHIP, wander=0.045, chip_spread=0.015)
    steps = [heavy()._replace(step_s=1.6 - 0.002 * each, meetings={8: 100}) for each in range(300)]
    clocks = [settled_MHz(wandering, step, 8) for step in steps]
    assert clocks[0] == CHIP.highest_MHz
    assert all(0.99 * before <= after <= before for before, after in itertools.pairwise(clocks))


def test_powers_in_no_order_are_refused():
    with pytest.raises(TwofoldError, match="idle_W 800 < limit_W 700"):
        msgspec.structs.replace(CHIP, idle_W=800.0)


# -- the fit -----------------------------------------------------------------------------------------------------------


def measured(chip, mixture):
    """A window of a mixture on a made-up chip, which lowers its clock until it draws the limit."""
    shares = {part.split()[0]: int(part.split()[1]) / 100 for part in mixture.split(", ")}
    load, drawn = {"matrix": 0.8, "small": 0.7, "attention": 0.5}, {}
    for kind, share in shares.items():
        if kind in load:
            drawn[kind] = share * load[kind] * (chip.attention_W if kind == "attention" else chip.matrix_W)
    slow = sum(shares.get(kind, 0.0) * (chip.update_W if kind == "update" else chip.memory_W)
               for kind in ("memory", "norm", "update"))  # fmt: skip

    def draws(clock):  # the shares are those of the time at that clock
        return chip.idle_W + sum(drawn.values()) * clock**chip.exponent + slow * clock**chip.memory_exponent

    clock = 1.0
    while draws(clock) > chip.limit_W:
        clock -= 1e-4
    figures = {}
    for kind, share in shares.items():
        seconds = 1e-3 / clock if kind in load else 1e-3
        peak = load.get(kind, 0.0) * clock
        figures |= {f"{kind}_s": seconds, f"{kind}_share": share, f"{kind}_flops": peak * 1e15 * seconds}
    return [
        Point(kind="clock", call="mixture", dtype="bfloat16", options={"mixture": mixture, "window": window},
              seconds=1e-2, figures=figures, clock_MHz=clock * chip.highest_MHz, power_W=draws(clock))
        for window in range(9)
    ]  # fmt: skip


def test_the_fit_finds_the_powers_of_a_chip_from_the_clocks_of_mixtures():
    from executor.calibrate.load import MIXTURES

    names = [", ".join(f"{kind} {percent}" for kind, percent in mixture.items()) for mixture in MIXTURES]
    chip = msgspec.structs.replace(CHIP, peak_W=2000.0)
    points = [point for name in names for point in measured(chip, name)]
    base = msgspec.structs.replace(load_device("h200").compute, matrix_flops_per_s={"bfloat16": 1e15}, power=None)
    found = fit_power(points, (), base).power
    for name in ("idle_W", "matrix_W", "attention_W", "memory_W", "update_W", "exponent", "limit_W"):
        assert getattr(found, name) == pytest.approx(getattr(chip, name), rel=0.04), name


def test_too_few_mixtures_leave_the_chip_as_it_is():
    base = load_device("h100-sxm").compute
    assert fit_power(measured(CHIP, "matrix 100"), (), base) is base


def test_the_mixture_that_was_not_fitted_settles_where_the_law_says():
    points, _ = load_points(DATA / "h200-fifth-x2.jsonl.gz")
    compute = load_device("h200").compute
    held_out = [each for each in mixtures([p for p in points if p.call == "mixture"], compute) if each.name == CHECKED]
    assert len(held_out) == 2  # one for each device
    power = compute.power
    for each in held_out:
        energy = {
            "matrix": each.peak_share * power.matrix_W, "attention": each.attention_share * power.attention_W,
            "memory": each.shares["memory"] * power.memory_W + each.shares["update"] * power.update_W,
        }  # fmt: skip
        load = Load(
            each.clock_MHz, 1.0, {"matrix": each.shares["small"], "attention": each.shares["attention"]}, energy
        )
        assert settled_MHz(power, load) == pytest.approx(each.clock_MHz, rel=0.02)


def test_steps_run_at_the_clock_that_their_programs_settle_at():
    """Steps that nothing was fitted to, on one device: the driver's clock beside the law's."""
    from benchmarks.accuracy.former_kernels import with_former_kernels
    from benchmarks.accuracy.step_plans import SETS

    plans, device = SETS["fourth"](), with_former_kernels(load_device("h200"))
    apart = []
    for name in ("h200-fifth-steps-x1a", "h200-fifth-steps-x1b"):
        for line in gzip.decompress((DATA / f"{name}.jsonl.gz").read_bytes()).splitlines():
            row = json.loads(line)
            if row.get("kind") != "step" or row["options"] != {"execution": "graph"}:
                continue
            timeline = simulate(plans[row["call"]], executing(Machine.of_device(device, 1), "graph"))
            apart.append(timeline.meta["clock_MHz"] / row["figures"]["clock_MHz_0"] - 1)
    assert len(apart) == 8
    assert sum(map(abs, apart)) / len(apart) < 0.025
    assert max(map(abs, apart)) < 0.08


# -- prices and one answer ---------------------------------------------------------------------------------------------


def test_compute_bound_work_scales_with_the_clock():
    machine = Machine.load("h200-x1")
    slow, fast = (at_clock(machine, clock) for clock in (1400.0, 1700.0))
    shapes = ((8192, 4096), (4096, 4096), (8192, 4096))
    product, copy = (
        [price_compute(each, call, shapes, "bfloat16", 2**28).work_ps for each in (slow, fast)]
        for call in ("linear.forward", "slice")
    )
    assert product[0] / product[1] == pytest.approx(1700 / 1400, rel=0.03)
    assert 1 < copy[0] / copy[1] < 1.05


def test_a_machine_without_its_power_keeps_its_clock():
    machine = Machine.load("h100-sxm-x8")
    assert at_usual_clock(machine) is machine


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(micro_batch=2, global_batch=4),
        Degrees(dp=2, micro_batch=2, global_batch=8),
        Degrees(tp=2, micro_batch=2, global_batch=4, sequence_parallel=True),
    ],
)
def test_forecast_and_engine_settle_at_one_clock(degrees):
    machine = executing(Machine.load("h200-x8"), "graph")
    engine = simulate(lower(plan_of(degrees, transformer(CONFIG, batch_size=degrees.global_batch))), machine)
    assert forecast(CONFIG, degrees, machine).step_s == pytest.approx(engine.step_interval_s, rel=1e-6)
    usual = simulate(
        lower(plan_of(degrees, transformer(CONFIG, batch_size=degrees.global_batch))), at_usual_clock(machine)
    )
    assert engine.meta["clock_MHz"] != usual.meta["clock_MHz"]


def test_a_slow_rank_is_slower_than_at_the_clock_of_the_others():
    """Two replicas whose reductions are hidden take as many times as long as their slow one, though the other idles
    and so draws less power."""
    machine = msgspec.structs.replace(executing(Machine.load("h200-x8"), "graph"), overlap=())
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=1)
    degrees = Degrees(dp=2, micro_batch=2, global_batch=32, optimizer=optimizer)
    program = lower(plan_of(degrees, transformer(CONFIG, batch_size=32)))
    even, slow = (simulate(program, machine, what_if=WhatIf(slowdown=each)) for each in ({}, {1: 1.3}))
    assert 1.28 < slow.step_interval_s / even.step_interval_s <= 1.3
    configured = Configured(config=CONFIG, degrees=degrees, machine=machine)
    assert configured.outcome(WhatIf(slowdown={1: 1.3})).step_s == pytest.approx(slow.step_interval_s, rel=1e-4)


def test_a_search_lists_plans_at_their_own_clocks():
    machine = executing(Machine.load("h200-x8"), "graph")
    problem = Problem(
        config=CONFIG, machine=machine, num_devices=8, global_batch=16, pins=Pins(pp=1, recompute="none", micro_batch=1)
    )
    found = solve(problem, keep=2)
    for each in found.plans:
        assert each.forecast.step_s == forecast(CONFIG, each.degrees, machine).step_s
    assert found.lower_bound_s <= found.best.forecast.step_s
    assert found.problem is problem


def test_a_search_compares_the_plans_near_the_best_at_their_own_clocks():
    """At one clock a plan with 2 samples a micro-batch has the shortest step. With 1 it draws less power, and its own
    clock makes it 1.5 % shorter."""
    config, machine = transformer_config("llama-3-8b", num_layers=8), Machine.load("h200-x8")
    pins, limit_bytes = Pins(dp=8, schedule="1f1b"), 26_000_000_000
    problem = Problem(
        config=config, machine=machine, num_devices=8, global_batch=32, pins=pins, memory_limit_bytes=limit_bytes
    )
    found = solve(problem)
    at_one_clock = [forecast(config, plan.degrees, at_usual_clock(machine)).step_s for plan in found.plans]
    other = found.plans[at_one_clock.index(min(at_one_clock))]
    assert (found.best.degrees.micro_batch, other.degrees.micro_batch) == (1, 2)
    assert other.forecast.step_s > 1.01 * found.best.forecast.step_s
    assert not found.num_proven and "no other plan speeds up more at its own clock" in found.summary()


@pytest.mark.parametrize(("micro_batch", "copies"), [(1, 0), (2, 0), (32, 1)])
def test_gathers_of_many_rows_are_priced_with_their_copy(micro_batch, copies):
    machine = Machine.load("h200-x8")
    degrees = Degrees(tp=2, micro_batch=micro_batch, global_batch=32, sequence_parallel=True)
    program = lower(plan_of(degrees, transformer(CONFIG, batch_size=32)))
    group = program.groups[0]
    line = next(each for _, each in group.walk() if each.call == "all_gather" and each.attrs["step"].dim == 1)
    plain = price_collective(machine, "all_gather", mesh_group(machine, group.mesh, line.axes), line.message_bytes, 2)
    copied_ps = price(line, group, machine, 2).work_ps - plain.work_ps
    assert copies_of(line) == copies
    assert copied_ps == copies * price_compute(machine, "slice", (), "uint8", 2 * line.message_bytes).work_ps
