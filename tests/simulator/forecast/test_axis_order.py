"""The order in which ranks count along the axes: groups on tiers of links, plans, forecasts, and the search over it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from costmodels import Machine, axes_group
from plans.degrees import ORDER, Degrees
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.optimizer import Optimizer
from search import uniform_plan
from search.devices import Pins, Problem, solve
from search.devices.space import Mesh, orders
from simulator import simulate
from simulator.forecast import forecast, forecast_grid
from simulator.forecast.predict import step_forecast

CONFIG = TransformerConfig(
    num_layers=4, hidden=2048, num_heads=16, num_kv_heads=8, ffn=8192, vocab=32_000, seq=2048, dtype="bfloat16"
)
SHORT = replace(CONFIG, num_layers=2)
LONG = TransformerConfig(num_layers=4, hidden=256, num_heads=4, ffn=512, vocab=1024, seq=8192, dtype="bfloat16")
MIXED = TransformerConfig(
    num_layers=4, hidden=512, num_heads=4, ffn=1024, vocab=4096, seq=1024,
    experts=Experts(num_experts=4, top_k=2, ffn=1024),
)  # fmt: skip
EVERY = list(itertools.permutations(ORDER))


def machine(slower: float = 1.0) -> Machine:
    found = Machine.load("h100-sxm-x16")
    inside, outside = found.links
    outside = msgspec.structs.replace(outside, bandwidth_Bps=outside.bandwidth_Bps / slower)
    return msgspec.structs.replace(found, links=(inside, outside))


def stated(**values: Any) -> dict[str, Any]:
    level = values.pop("zero", 1)
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=level, bucket_bytes=0)
    return {"micro_batch": 1, "optimizer": optimizer, **values}


def test_ranks_count_in_the_order() -> None:
    degrees = Degrees(dp=3, tp=2, pp=2, global_batch=3, order=("pp", "tp", "cp", "dp"))
    assert degrees.strides == (2, 4, 4, 1)
    assert degrees.stage_ranks(0) == [0, 2, 4, 6, 8, 10] and degrees.stage_ranks(1) == [1, 3, 5, 7, 9, 11]
    plan = uniform_plan(
        transformer(CONFIG, batch_size=3), machine(), dp=3, tp=2, pp=2, micro_batch=1, order=degrees.order
    )
    assert [list(stage.mesh.rank_list) for stage in plan.stages] == [degrees.stage_ranks(0), degrees.stage_ranks(1)]


def test_the_usual_order_is_tensor_parallel_innermost() -> None:
    degrees = Degrees(dp=2, tp=4, cp=2, pp=2, global_batch=2)
    assert degrees.stage_ranks(1) == list(range(16, 32)) and degrees.strides == (1, 4, 8, 16)


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [((2, 2, 4, 2), (0, 2)), ((2, 3, 2, 2), (0, 2)), ((4, 2, 2, 2), (1, 3)), ((3, 2, 4), (0, 1)), ((2, 4, 4), (2,))],
)
def test_tiers_of_groups_along_several_axes_are_those_of_their_ranks(
    sizes: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    asked = Machine.load("h100-sxm-x64")
    count = int(np.prod(sizes))
    strides = [int(np.prod(sizes[:axis])) for axis in range(len(sizes))]
    place = np.stack(np.unravel_index(np.arange(count), sizes, order="F"))
    rest = [axis for axis in range(len(sizes)) if axis not in axes]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(count):
        groups.setdefault(tuple(place[rest, rank]), []).append(rank)
    tier = max(asked.tier(own) for own in groups.values())
    below = asked.links[tier - 1].ranks
    fewest = min(
        min(sum(rank // below == node for rank in own) for node in {rank // below for rank in own})
        for own in groups.values()
    )  # fmt: skip
    found = axes_group(asked, [(sizes[axis], strides[axis]) for axis in axes], count)
    assert (found.top, found.together) == ((tier, fewest) if tier else (0, 1))


@pytest.mark.parametrize(
    ("degrees", "zero"),
    [({"dp": 4, "tp": 2, "pp": 2}, 1), ({"dp": 2, "cp": 2, "tp": 2, "pp": 2}, 3), ({"dp": 8, "tp": 2}, 0)],
)
def test_every_order_is_forecast_as_the_engine_runs_it(degrees: dict[str, int], zero: int) -> None:
    seen, pp = dict[int, tuple[str, ...]](), degrees.get("pp", 1)
    ends_ps = dict[tuple[str, ...], int]()
    for order in EVERY:
        given = stated(zero=zero, order=order, **degrees)
        every = Degrees(global_batch=16, **given)
        found = forecast(CONFIG, every, machine())
        assert forecast_grid(CONFIG, [every], machine())[0].step_s == pytest.approx(found.step_s, rel=1e-9)
        first_ps = step_forecast(CONFIG, every, machine()).end_ps()  # the pace may be the host's, whatever the order
        same = tuple(axis for axis in order if degrees.get(axis, 1) > 1)
        assert ends_ps.setdefault(same, first_ps) == first_ps, f"{order}: an axis of one rank plays a part"
        if first_ps in seen:
            continue
        seen[first_ps] = order
        plan = uniform_plan(transformer(CONFIG, batch_size=16), machine(), layers_per_stage=[4 // pp] * pp, **given)
        expected = simulate(lower(plan), machine(), num_steps=3, fold_ranks=True, with_memory=False)
        assert first_ps == pytest.approx(expected.step_end_ps[0], rel=0.05)
        assert found.step_s == pytest.approx(expected.step_interval_s, rel=0.05)
    assert len(seen) > 1


def ask(config: TransformerConfig, slower: float, **pins: Any) -> Problem:
    return Problem(
        config=config, machine=machine(slower), num_devices=16, global_batch=32,
        pins=Pins(micro_batch=1, recompute="none", schedule="1f1b", zero=1, **pins),
    )  # fmt: skip


def by_hand(asked: Problem, layers: dict[int, tuple[int, ...] | None]) -> list[Degrees]:
    """All degrees and all orders of the axes, in plain loops; axes of one rank are nowhere in an order."""
    experts = asked.config.experts
    found = []
    for dp, cp, tp, pp in itertools.product((1, 2, 4, 8, 16), repeat=4):
        if dp * cp * tp * pp != 16 or pp not in layers or tp > asked.config.kv_heads or (cp > 1 and experts):
            continue
        size = {"dp": dp, "cp": cp, "tp": tp, "pp": pp}
        different = {tuple(axis for axis in order if size[axis] > 1): order for order in reversed(EVERY)}.values()
        for ep, sp, order in itertools.product((1, 2, 4), (False, True), different):
            if (ep > 1 and experts is None) or dp % ep or (sp and tp == 1):
                continue
            given = {**size, "ep": ep, "sequence_parallel": sp, "order": order}
            found.append(
                Degrees(global_batch=32, layers=layers[pp], optimizer=asked.at_level(1), **given)  # type: ignore[arg-type]
            )
    return found


@pytest.mark.parametrize(
    ("config", "slower", "pins"),
    [
        (replace(LONG, num_layers=2), 40, {"pp": 2, "layers": (1, 1)}),
        (SHORT, 1, {"pp": 2, "layers": (1, 1)}),
        (SHORT, 10, {"pp": 1}),
        (MIXED, 4, {"pp": 1}),
    ],
    ids=["transfers", "gradients", "no stages", "experts"],
)
def test_the_best_of_all_orders_is_that_of_plain_loops(
    config: TransformerConfig, slower: float, pins: dict[str, Any]
) -> None:
    asked = ask(config, slower, **pins)
    layers = {pins["pp"]: pins.get("layers")}
    every = by_hand(asked, layers)
    seen = forecast_grid(asked.config, every, asked.machine)
    least = min(each.step_s for each in seen)
    found = solve(asked)
    assert found.best.forecast.step_s == pytest.approx(least, rel=1e-9) and found.gap == 0.0
    assert found.relaxed_bound_s <= least
    usual = min(each.step_s for each, degrees in zip(seen, every, strict=True) if degrees.order == ORDER)
    assert least <= usual
    if slower == 40:
        assert found.best.degrees.order != ORDER and least < 0.99 * usual


def test_orders_with_equal_forecasts_are_searched_once() -> None:
    inside = ask(CONFIG, 1).changed(num_devices=8)
    assert [order for order, _ in orders(inside, Mesh(2, 1, 2, 2))] == [ORDER]
    whole_node = orders(ask(CONFIG, 1), Mesh(2, 1, 8, 1))
    assert [order[:2] for order, _ in whole_node] == [("tp", "cp"), ("dp", "tp")]


def test_an_order_that_is_pinned_is_kept() -> None:
    order = ("dp", "tp", "cp", "pp")
    found = solve(ask(CONFIG, 1, order=order))
    assert all(each.degrees.order == order for each in found.plans)


@pytest.mark.parametrize("order", [("tp", "dp"), ("tp", "cp", "dp", "dp"), "tp-cp-dp-pp", ["tp", "cp", "dp", "pp"]])
def test_what_is_no_order_is_refused(order: Any) -> None:
    for made in (Degrees, Pins):
        with pytest.raises(TwofoldError, match="must list tp, cp, dp, pp once each"):
            made(order=order)
