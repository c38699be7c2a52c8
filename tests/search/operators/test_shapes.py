"""Stages of different widths, idle devices, micro-batches: against every shape searched on its own."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from benchmarks.search.exact import against_every_shape, random_problem
from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.flops import necessary_flops
from plans.model.graph import Graph
from plans.model.mlp import mlp_graph
from plans.model.transformer import transformer, transformer_config
from plans.optimizer import Optimizer
from plans.plan import Strategy, plan_from_json, plan_to_json
from search import search, uniform_plan
from search.operators.plan_search import PlanSearch
from search.operators.shape_costs import ShapeCosts
from search.physics import physics_s
from simulator import simulate


@pytest.fixture(scope="module")
def machine() -> Machine:
    return Machine.load("h200-x8")


@pytest.mark.parametrize("seed", [1, 2, 5])
def test_chosen_shape_is_within_one_percent_of_all_shapes(seed: int) -> None:
    chosen_s, least_s, count = against_every_shape(seed)
    assert count >= 10
    assert chosen_s <= 1.01 * least_s


def test_tiny_problems_leave_devices_idle() -> None:
    shared = Machine.load("cpu-2core-x8")
    found = search(mlp_graph([64, 32, 8], 16), shared, num_stages=1, widths="any")
    whole = search(mlp_graph([64, 32, 8], 16), shared, num_stages=1)
    assert found.best.num_ranks < 8 == whole.best.num_ranks
    assert found.best.prediction is not None and whole.best.prediction is not None
    assert found.best.prediction.step_s < whole.best.prediction.step_s


def test_large_problems_use_all_devices(machine: Machine) -> None:
    found = search(mlp_graph([4096, 8192, 4096], 8192), machine, num_stages=1, widths="any")
    assert found.best.num_ranks == 8


def test_given_widths_are_kept(machine: Machine) -> None:
    found = search(mlp_graph([64, 96, 32, 8], 24), machine, num_stages=3, widths=(3, 1, 2), num_micro_batches=2)
    assert [stage.mesh.num_ranks for stage in found.best.stages] == [3, 1, 2]
    assert [rank for stage in found.best.stages for rank in stage.mesh.rank_list] == list(range(6))
    again = plan_from_json(plan_to_json(found.best))
    assert found.best.prediction is not None
    assert simulate(again, machine).step_interval_s == found.best.prediction.step_s


def test_stages_need_not_divide_the_devices(machine: Machine) -> None:
    found = search(mlp_graph([512, 512, 512, 8], 48), machine, num_devices=5, num_stages=3, num_micro_batches=4)
    assert len(found.best.stages) == 3 and found.best.num_ranks <= 5


def test_given_operators_stay_in_their_stages_while_widths_are_searched(machine: Machine) -> None:
    names = ["layer1.linear", "layer1.relu"], ["layer2.linear", "loss.mse_loss"]
    found = search(mlp_graph([4096, 4096, 8], 64), machine, stages=names, num_stages=2, widths="any")
    assert [list(stage.operators) for stage in found.best.stages] == list(names)


def test_searching_stages_and_micro_batches_is_no_worse_than_one_stage(machine: Machine) -> None:
    graph = mlp_graph([784, 512, 512, 10], 32)
    plain, found = search(graph, machine), search(graph, machine, num_stages=None, num_micro_batches=None)
    assert plain.best.prediction is not None and found.best.prediction is not None
    assert found.best.prediction.step_s <= plain.best.prediction.step_s


def test_bounds_are_below_every_plan_and_in_the_json(machine: Machine) -> None:
    found = search(random_problem(3, 6), machine, num_stages=None, num_micro_batches=None, num_devices=4)
    least = min(plan.prediction.step_s for plan in found.plans if plan.prediction is not None)
    assert 0 < found.physics_bound_s < least and 0 < found.lower_bound_s <= least
    said = found.to_json()
    assert said["gap"] == pytest.approx(least / said["lower_bound_s"] - 1)
    assert said["gap_to_physics"] == pytest.approx(least / said["physics_bound_s"] - 1)
    assert said["complete"] and "longer than the optimistic relaxation" in found.summary()


def tied(graph: Graph, names: Sequence[str]) -> Graph:
    """The graph with the parameters of the first of some layers in all of them."""
    first, *others = (graph.by_name[name] for name in names)
    dropped = {name for operator in others for name in operator.inputs[1:]}
    operators = tuple(
        msgspec.structs.replace(operator, inputs=(operator.inputs[0], *first.inputs[1:]))
        if operator in others else operator
        for operator in graph.operators
    )  # fmt: skip
    kept = {name: tensor for name, tensor in graph.tensors.items() if name not in dropped}
    return msgspec.structs.replace(graph, operators=operators, tensors=kept)


def test_the_bound_counts_the_update_of_a_shared_parameter_once() -> None:
    graph = tied(mlp_graph([64] * 9, 8), [f"layer{number}.linear" for number in range(1, 9)])
    found = search(graph, Machine.load("cpu-2core-x8"), num_devices=2, optimizer=Optimizer(kind="sgd"))
    assert found.best.prediction is not None
    assert found.lower_bound_s <= found.best.prediction.step_s


def test_flops_of_a_chain_are_those_counted_by_hand(machine: Machine) -> None:
    graph = mlp_graph([64, 32], 16)  # the first layer has no gradient of its input
    assert necessary_flops(graph)["float32"] == pytest.approx(2 * 2 * 16 * 64 * 32, rel=0.05)
    assert physics_s(graph, machine, 4, Optimizer()) == pytest.approx(physics_s(graph, machine, 1, Optimizer()) / 4)


@pytest.mark.parametrize("num_stages", [None, 1])
def test_the_time_limit_gives_the_best_so_far(machine: Machine, num_stages: int | None) -> None:
    graph = mlp_graph([784, 512, 512, 10], 32)
    found = search(graph, machine, num_stages=num_stages, num_micro_batches=None, time_limit_s=1e-6)
    assert not found.complete and found.plans and "the best plan so far" in found.summary()


def test_a_search_that_cannot_price_all_shapes_uses_its_time_for_the_others(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by a second each time it is asked. Of 400 s, pricing takes 140 s and does not end."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    graph = mlp_graph([64, 48, 32, 16], 24)
    found = search(graph, machine, num_devices=6, num_stages=None, num_micro_batches=None, time_limit_s=400)
    assert not found.complete and found.search_s > 300


def test_without_time_a_plan_is_no_slower_than_data_parallelism(machine: Machine) -> None:
    """Of one shape too. Activations are so many that splitting weights, which an additive cost may prefer, is slow."""
    graph = mlp_graph([64, 64, 64, 64, 10], 4096)
    spread_s = simulate(uniform_plan(graph, machine, dp=machine.num_devices), machine).step_interval_s
    found = search(graph, machine, time_limit_s=1e-6)
    assert simulate(found.best, machine).step_interval_s <= spread_s
    assert spread_s in {simulate(plan, machine).step_interval_s for plan in found.plans}


def test_no_shape_is_priced_any_more_when_time_is_over(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One search of shapes prices many stages before the next simulation: the clock is asked before each."""
    priced: list[Any] = []
    price = ShapeCosts.price

    def counted(costs: ShapeCosts, option: Any) -> bool:
        priced.append(option)
        return price(costs, option)

    def search_until(count: float) -> int:
        priced.clear()
        monkeypatch.setattr(PlanSearch, "is_over", lambda _: len(priced) >= count)
        assert search(mlp_graph([4096] * 3, 32), machine, num_stages=None, num_micro_batches=None).plans
        return len(priced)

    monkeypatch.setattr(ShapeCosts, "price", counted)
    assert search_until(4) == 4 and search_until(10) == 10
    assert search_until(float("inf")) > 10


def test_an_interrupt_gives_the_best_so_far(machine: Machine) -> None:
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    found = search(mlp_graph([64, 32, 8], 16), machine, num_stages=None, on_progress=interrupt)
    assert not found.complete and found.best.prediction is not None

    def at_once(line: str) -> None:
        raise KeyboardInterrupt

    nothing: dict[str, Any] = {"num_stages": 2, "num_micro_batches": 2, "stages": [["layer1.linear"], []]}
    with pytest.raises(TwofoldError, match="stage 1 has no operators"):
        search(mlp_graph([64, 8], 16), machine, on_progress=at_once, **nothing)


@pytest.mark.parametrize("num_micro_batches", [1, None])
def test_unknown_operators_of_a_stage_are_named(num_micro_batches: int | None) -> None:
    graph, machine = mlp_graph([8, 8, 8], 8), Machine.load("h200-x8")
    stages = [[graph.operators[0].name, "nowhere"], [each.name for each in graph.operators[1:]]]
    with pytest.raises(TwofoldError, match="stage 0 lists the operator 'nowhere'"):
        search(graph, machine, num_devices=2, stages=stages, num_stages=2, num_micro_batches=num_micro_batches)


@pytest.mark.parametrize(
    ("pinned", "message"),
    [
        (Strategy(dims={"zz": ("d0",)}), "has no dim 'zz'"),
        (Strategy(dims={"n": ("tp",)}), "The axis 'tp' is not found"),
        (Strategy(dims={"n": ("d0",), "k": ("d0",)}), "splits both 'n' and 'k'"),
    ],
)
def test_pins_that_fit_no_mesh_are_refused(machine: Machine, pinned: Strategy, message: str) -> None:
    for widths in (None, "any"):
        with pytest.raises(TwofoldError, match=message):
            search(mlp_graph([64, 32, 8], 16), machine, widths=widths, pinned={"layer1.linear": pinned})


def test_a_batch_below_the_devices_is_split_otherwise(machine: Machine) -> None:
    found = search(mlp_graph([4096, 8192, 4096], 2), machine)
    for operator, strategy in found.best.strategies.items():
        mesh = found.best.stages[0].mesh
        assert mesh.size(strategy.dims.get("b0", ())) <= 2, operator


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_flops_of_a_transformer_are_those_of_the_published_formula(name: str) -> None:
    """6 per weight and token, and for attention 12 x hidden x tokens x sequence, half of it where that is causal.

    Narayanan et al. 2021, arXiv 2104.04473, section 5.1, without recomputing and without what is not a product.
    """
    config = transformer_config(name)
    tokens = 4 * config.seq
    kv_share = config.num_kv_heads / config.num_heads if config.num_kv_heads else 1.0
    attention = 2 * config.hidden**2 * (1 + kv_share)
    weights = config.num_layers * (attention + (3 if config.gated else 2) * config.hidden * config.inner)
    weights += config.vocab * config.hidden
    pairs = 6 * config.num_layers * config.hidden * tokens * config.seq
    found = sum(necessary_flops(transformer(config, batch_size=4)).values())
    assert found == pytest.approx(6 * weights * tokens + pairs, rel=2e-3)


@pytest.mark.parametrize(("name", "value"), [("top_k", 0), ("time_limit_s", -1), ("memory_limit_bytes", 0)])
def test_numbers_that_mean_nothing_are_refused(machine: Machine, name: str, value: int) -> None:
    with pytest.raises(TwofoldError, match=name):
        search(mlp_graph([64, 8], 16), machine, **{name: value})  # type: ignore[arg-type]


def test_a_transformer_is_searched_operator_by_operator(machine: Machine) -> None:
    graph = transformer("llama-3-8b", batch_size=4, seq=256, num_layers=2)
    found = search(graph, machine, num_devices=4, top_k=1, method="operators")
    assert found.best.prediction is not None and found.lower_bound_s < found.best.prediction.step_s
    blocks = [
        {name.split(".", 2)[2]: strategy.dims for name, strategy in found.best.strategies.items()
         if name.startswith(f"layers.{layer}.")}
        for layer in range(2)
    ]  # fmt: skip
    assert set(blocks[0]) == set(blocks[1])


def test_every_width_adds_up() -> None:
    found = search(mlp_graph([64, 32, 32, 8], 12), Machine.load("h200-x8"), num_devices=5, num_stages=None)
    assert sum(stage.mesh.num_ranks for stage in found.best.stages) <= 5
    ends = list(itertools.accumulate(stage.mesh.num_ranks for stage in found.best.stages))
    assert [stage.mesh.rank_list[-1] + 1 for stage in found.best.stages] == ends


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_no_boundary_is_better_where_a_shared_weight_forbids_many(machine: Machine, num_micro_batches: int) -> None:
    """Small layers come before the large ones between whose readers no stage may end."""
    whole = mlp_graph([256, 256, 256, 256, 1024, 1024, 1024, 1024, 1024, *[256] * 6], 512)
    graph = tied(whole, ["layer5.linear", "layer8.linear"])
    names = [operator.name for operator in graph.operators]
    asked: dict[str, Any] = {"num_devices": 2, "num_stages": 2, "num_micro_batches": num_micro_batches}
    steps = []
    for cut in range(1, len(names)):
        with contextlib.suppress(TwofoldError):  # between the readers
            found = search(graph, machine, stages=[names[:cut], names[cut:]], **asked)
            steps.append(found.best.prediction.step_s)
    assert 12 < len(steps) < len(names) - 1
    assert search(graph, machine, **asked).best.prediction.step_s == min(steps)
