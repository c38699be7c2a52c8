"""Why the best is the best: what operators cost, and what the critical path consists of."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from costmodels import Machine
from costmodels.utilization import forward_products
from plans.degrees.words import layout_words
from plans.model.transformer import Experts, TransformerConfig, transformer_config
from reports.prediction import roofline_parts
from reports.search_report import search_tables as tables
from search.devices import Candidate, Pins, Problem, SearchResult, solve
from search.devices.branch import Branching
from search.devices.critical import critical_path_s
from search.devices.explain import composition, neighbours
from search.devices.operators import OperatorCost, operator_costs
from search.devices.reasons import explained
from simulator.estimate.chunks import Chunks
from simulator.estimate.estimate import rates_of
from simulator.forecast import forecast

CONFIG = TransformerConfig(name="small", num_layers=4, hidden=512, num_heads=8, ffn=2048, vocab=8192, seq=1024)
WIDE = TransformerConfig(name="wide", num_layers=4, hidden=4096, num_heads=32, ffn=16_384, vocab=8192, seq=4096)
"""Whose host is never late."""
MIXTURE = TransformerConfig(
    name="mixture", num_layers=4, hidden=512, num_heads=8, vocab=8192, seq=1024,
    experts=Experts(num_experts=4, top_k=2, ffn=1024),
)  # fmt: skip


def problem(config: TransformerConfig = CONFIG, **pins: Any) -> Problem:
    return Problem(
        config=config, machine=Machine.load("h100-sxm-x8"), num_devices=8, global_batch=16, pins=Pins(**pins)
    )  # fmt: skip


@cache
def best(config: TransformerConfig = CONFIG, **pins: Any) -> SearchResult[Candidate]:
    return solve(problem(config, **pins))


@cache
def with_alternatives() -> SearchResult[Candidate]:
    return solve(problem(cp=1, zero=1, micro_batch=1, schedule="1f1b"), explain=True)


def costs(found: SearchResult[Candidate]) -> list[OperatorCost]:
    return operator_costs(found.problem, found.best.degrees, [])


@pytest.mark.parametrize("tp", [1, 4])
def test_operators_add_up_to_the_block(tp: int) -> None:
    found = best(tp=tp, pp=2, cp=1, recompute="none", schedule="1f1b", zero=1)
    degrees, problem = found.best.degrees, found.problem
    pieces = Chunks(
        config=CONFIG, degrees=degrees, machine=problem.machine, stack=problem.stack,
        rates=rates_of(problem.machine, problem.stack), split_backward=False,
    )  # fmt: skip
    body = [pieces.clock_map("block", part) for part in ("F", "B")]
    runs = degrees.num_micro_batches * CONFIG.num_layers / degrees.pp / 1e12
    alone = sum(each.compute_s for each in costs(found))
    assert alone <= sum(each.compute_ps for each in body) * runs * (1 + 1e-9)  # what overlaps takes longer
    if tp == 1:
        assert alone == pytest.approx(sum(each.compute_ps for each in body) * runs)
    exposed = sum(sum(each.exposed_ps.values()) for each in body) * runs
    assert sum(each.exposed_s for each in costs(found)) == pytest.approx(exposed, rel=0.35, abs=1e-9)


@pytest.mark.parametrize("pins", [{"tp": 4, "pp": 2}, {"tp": 1, "pp": 1}, {"tp": 2, "pp": 1, "recompute_layers": 2}])
def test_products_of_the_operators_are_those_of_the_model(pins: dict[str, Any]) -> None:
    """All ranks together make each product once forward and twice backward, and all but the last again where a block is
    recomputed, as no gradient reads its result; no kernel beats the roofline of its device."""
    again = pins.get("recompute_layers", 0)  # of four blocks on one stage
    found = best(WIDE, cp=1, recompute="full" if again else "none", schedule="1f1b", zero=1, **pins)
    problem, rows = found.problem, costs(found)
    products = sum(each.flops for each in rows if each.operator.partition(".")[2].startswith("w")) * problem.num_devices
    tokens = problem.global_batch * WIDE.seq
    weights, last = forward_products(WIDE)["weights"], WIDE.hidden * WIDE.inner
    assert products == pytest.approx(tokens * (6 * weights + 2 * again * (weights / WIDE.num_layers - last)))
    peak, memory_Bps = problem.machine.compute.matrix_flops_per_s["bfloat16"], problem.machine.compute.memory_Bps
    for each in rows:
        if each.flops:
            assert each.flops_per_s <= min(peak, each.flops_per_byte * memory_Bps)
    chart, table = roofline_parts(rows, peak, memory_Bps)
    assert [row[0] for row in table.rows] == [each.operator for each in rows if each.flops]
    svg = chart.svg()
    for name, _, rate, share, _, _ in table.rows:
        assert 0 < share <= 1 and f"<title>{name}: {rate:.3g} TFLOP/s, {share} of" in svg


def test_redistributions_count_for_those_that_ask_for_them() -> None:
    split = {each.operator: each for each in costs(best(tp=4, pp=1, sequence_parallel=True, recompute="none"))}
    moved = {name for name, each in split.items() if each.redistribution_s}
    assert moved == {"attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2"}
    assert all(each.exposed_s <= each.redistribution_s * (1 + 1e-9) for each in split.values())
    assert not any(each.redistribution_s for each in costs(best(tp=1, pp=1, cp=1, recompute="none")))
    routed = {each.operator for each in costs(best(MIXTURE, ep=4, tp=1, pp=1)) if each.redistribution_s}
    assert routed == {"feed_forward.experts.w1", "feed_forward.combine"}


def test_other_layouts_are_shown_with_the_chosen_one() -> None:
    found, other = best(tp=1, pp=1, cp=1, recompute="none"), best(tp=4, pp=1, recompute="none")
    rows = operator_costs(found.problem, found.best.degrees, [other.best.degrees, other.best.degrees])
    assert {each.layout for each in rows} == {layout_words(each.best.degrees) for each in (found, other)}
    assert [each.chosen for each in rows[:2]] == [True, False] and rows[0].operator == rows[1].operator
    split = {each.operator: each for each in rows if not each.chosen}
    assert {each.operator: each for each in costs(other)}["attention.wo"].total_s == split["attention.wo"].total_s


def test_blocks_that_recompute_and_others_are_mixed() -> None:
    """Two chunks of two blocks, one of each recomputes: half way between none and all."""
    found = best(tp=2, pp=2, cp=1, recompute="full", schedule="1f1b")
    none, some, every = (
        sum(each.compute_s for each in costs(_with(found, mode, count)))
        for mode, count in (("none", None), ("full", 1), ("full", None))
    )
    assert none < some < every and some == pytest.approx((none + every) / 2)


def _with(found: SearchResult[Candidate], mode: str, some: int | None) -> SearchResult[Candidate]:
    degrees = replace(found.best.degrees, recompute=mode, recompute_layers=some)
    return replace(found, plans=(replace(found.best, degrees=degrees),))


def test_the_critical_path_of_one_stage_is_what_its_rank_does() -> None:
    found = best(WIDE, pp=1, tp=1, cp=1, recompute="none", zero=0)
    path = critical_path_s(found.problem, found.best)
    told = found.best.forecast.rank_s[0]["compute"]
    update = path["gradients and optimizer after the last action"]
    assert path["forward compute"] + path["backward compute"] <= told * (1 + 1e-6)
    late = path.get("host", 0.0)  # kernels for which the host is late are on its path
    beside = path.get("all_reduce", 0.0)  # updates that run beside the last reductions are not on the path
    assert path["forward compute"] + path["backward compute"] + update + late + beside >= told * (1 - 1e-6)
    assert late < 0.01 * told
    assert math.fsum(path.values()) == pytest.approx(found.best.forecast.step_s)
    assert list(path.values()) == sorted(path.values(), reverse=True)


def test_the_critical_path_of_a_small_model_is_the_hosts() -> None:
    found = best(pp=1, tp=1, cp=1, recompute="none", zero=0)
    assert next(iter(critical_path_s(found.problem, found.best))) == "host"


def test_the_critical_path_of_a_pipeline_adds_up_to_the_step() -> None:
    found = best(WIDE, pp=4, dp=2, micro_batch=1, schedule="1f1b", recompute="none")
    path = critical_path_s(found.problem, found.best)
    assert math.fsum(path.values()) == pytest.approx(found.best.forecast.step_s)
    assert path["transfers between stages"] > 0.0
    assert path["backward compute"] > 1.5 * path["forward compute"]


def test_the_composition_of_a_step_adds_up_and_computes_what_its_ranks_do() -> None:
    found = best(WIDE, pp=2, cp=1, recompute="none", schedule="1f1b").best
    parts = composition(found)
    assert sum(parts.values()) == pytest.approx(found.forecast.step_s)
    ranks = found.forecast.rank_s
    assert parts["compute"] == pytest.approx(sum(rank["compute"] for rank in ranks) / len(ranks), rel=1e-6)
    assert parts["exposed communication"] > 0


def test_tables_and_json_agree() -> None:
    found = with_alternatives()
    why = explained(found)
    told = why.to_json()
    assert sum(told["critical_path_s"].values()) == pytest.approx(found.best.forecast.step_s)
    titles = [table.title.split(" of ")[0] for table in tables(found, 3, why)]
    assert "Critical path" in titles and "Operators" in titles
    shown = next(table for table in tables(found, 3, why) if table.title.startswith("Operators"))
    assert [row[0] for row in shown.rows] == list(dict.fromkeys(each["operator"] for each in told["operators"]))
    assert shown.notes[1].endswith("(chosen)")


def test_neighbours_are_what_they_say() -> None:
    asked = problem(WIDE, tp=2, pp=2, cp=1, schedule="1f1b", micro_batch=1, zero=0)
    asked = asked.changed(memory_limit_bytes=6_500_000_000)
    found = solve(asked, explain=True)
    told = {each.change: each.candidate.degrees for each in found.alternatives if each.candidate is not None}
    mode, some = found.best.degrees.recompute, found.best.degrees.recompute_layers
    for change, degrees in told.items():
        assert degrees != found.best.degrees
        if change.endswith("in all blocks"):
            assert degrees.recompute != "none" and degrees.recompute_layers is None
        elif "blocks" in change:
            assert degrees.recompute_layers != some and f"{degrees.recompute_layers} of" in change
        elif change.startswith("recompute"):
            assert degrees.recompute != mode
    assert any(change.startswith("recompute") for change in told)


def test_experts_are_spread_again_where_fewer_ranks_are_data_parallel() -> None:
    """dp 4 with ep 4 becomes dp 2, which ep 4 does not divide."""
    asked = replace(problem(MIXTURE, cp=1, recompute="none", micro_batch=1, schedule="1f1b", zero=1), num_devices=4)
    best = next(each for each in solve(asked, keep=60).plans if (each.degrees.dp, each.degrees.ep) == (4, 4))
    told = {each.change: each.candidate for each in neighbours(Branching(problem=asked), asked, best)}
    found = told["tp 1 -> 2, dp 4 -> 2, ep chosen again"]
    assert found is not None and found.degrees.dp == 2 and found.degrees.ep in (1, 2)


def test_a_faster_neighbour_is_stated() -> None:
    """The certificate holds if estimates are close; a neighbour that is faster shows that one was not."""
    found = with_alternatives()
    assert found.alternatives[0].extra_s is not None
    faster = replace(found.alternatives[0], extra_s=-0.1 * found.best.forecast.step_s)
    notes = {
        title: [note for table in tables(known, 3) for note in table.notes if "would be faster" in note]
        for title, known in (("as found", found), ("changed", replace(found, alternatives_to=lambda _: (faster,))))
    }
    assert notes["as found"] == [] and notes["changed"][0].startswith("1 of these changes would be faster")


def test_alternatives_are_those_of_the_plan_that_is_listed_first() -> None:
    """Every step has its own clock here, so that a forecast from scratch is an independent check."""
    llama, machine = transformer_config("llama-3-8b", num_layers=2), Machine.load("h200-x8")
    pins = Pins(cp=1, pp=1, recompute="none", schedule="1f1b")
    asked = Problem(config=llama, machine=machine, num_devices=8, global_batch=16, pins=pins)
    found = solve(asked, keep=2, explain=True)
    for shown in (found, found.reordered(found.plans[::-1])):
        best = shown.best.degrees
        best_s = forecast(llama, best, machine).step_s
        levels = {
            each.change: each for each in shown.alternatives
            if each.change.startswith("optimizer level") and each.candidate is not None
        }  # fmt: skip
        level = best.optimizer.parallel_level
        assert set(levels) <= {f"optimizer level {level} -> {other}" for other in range(4)} and levels
        for each in levels.values():
            assert each.candidate is not None
            other = each.candidate.degrees
            assert (other.tp, other.dp, other.micro_batch) == (best.tp, best.dp, best.micro_batch)
            assert each.extra_s == pytest.approx(forecast(llama, other, machine).step_s - best_s, abs=1e-12)
    assert found.best.degrees != shown.best.degrees


def test_steps_that_contention_shortens_are_forecast() -> None:
    """Of uneven stages a walked step is up to 7 % shorter than one without contention."""
    pins = Pins(tp=2, pp=2, dp=2, micro_batch=1, schedule="1f1b", recompute="none")
    llama = transformer_config("llama-3-8b", num_layers=2)
    found = solve(
        Problem(config=llama, machine=Machine.load("h200-x8"), num_devices=8, global_batch=8, pins=pins), explain=True
    )
    assert found.best.degrees.sequence_parallel
    assert min(each.extra_s for each in found.alternatives if each.extra_s is not None) >= 0
