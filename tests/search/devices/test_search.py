"""The search over degrees: it finds the best of all, its bounds hold, and it says so."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from costmodels import Machine
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import Experts, TransformerConfig, transformer_config
from search.candidate import identity
from search.devices import Candidate, NothingFits, Pins, Problem, SearchResult, baseline, describe, solve
from search.devices.baselines import usual_candidates
from search.devices.branch import Branching
from search.devices.explain import relaxations
from search.devices.seeds import seeds
from search.devices.space import (
    Mesh,
    ScheduleChoice,
    enumerate_degrees,
    layer_choices,
    meshes,
    schedule_of,
    shapes,
    values_of,
)
from search.devices.stage_config import StageConfig
from simulator.estimate import estimate
from simulator.forecast import Forecast, forecast_grid
from simulator.stacks import stack_named


def small(**values: Any) -> TransformerConfig:
    given = {"num_layers": 4, "hidden": 512, "num_heads": 8, "ffn": 2048, "vocab": 8192, "seq": 1024} | values
    return TransformerConfig(name="small", **given)


def mixture(num_dense: int) -> TransformerConfig:
    """The first blocks without experts."""
    experts = Experts(num_experts=8, top_k=2, ffn=1408, num_shared=2, num_dense_layers=num_dense)
    return small(num_layers=5, hidden=1024, ffn=4096, vocab=12_000, experts=experts)


SMALL = small()


def problem(config: TransformerConfig = SMALL, machine: str = "h100-sxm-x8", **values: object) -> Problem:
    given = {"num_devices": 4, "global_batch": 8} | values
    return Problem(config=config, machine=Machine.load(machine), **given)  # type: ignore[arg-type]


@cache
def usual() -> SearchResult[Candidate]:
    return solve(problem(), explain=True)


CASES = {
    "schedules": problem(pins=Pins(tp=1, cp=1, recompute="none", micro_batch=1, zero=1)),
    "one chunk": problem(pins=Pins(pp=4, schedule="zb_h1")),
    "tight memory": problem(
        pins=Pins(cp=1, pp=2, schedule="1f1b", micro_batch=1, sequence_parallel=False), memory_limit_bytes=400_000_000
    ),
    "levels": problem(pins=Pins(pp=1, recompute="none")),
    "twelve over slow links": problem(
        small(hidden=1536, num_heads=12, ffn=6144, vocab=12_288), "h100-sxm-x16", num_devices=12,
        global_batch=12,
        pins=Pins(recompute="none", micro_batch=1, tp=2, sequence_parallel=False, schedule="zb_v", zero=1),
    ),
    "experts": problem(
        small(experts=Experts(num_experts=4, top_k=2, ffn=1024)),
        pins=Pins(recompute="none", micro_batch=1, schedule="1f1b"),
    ),
    "one dense block": problem(
        mixture(1), num_devices=8, pins=Pins(recompute="none", micro_batch=1, pp=4, schedule="1f1b")
    ),
    "three dense blocks": problem(
        mixture(3), num_devices=4, pins=Pins(recompute="none", micro_batch=1, tp=1, cp=1, zero=3, schedule="1f1b")
    ),
    "megatron": problem(pins=Pins(tp=2, pp=2, micro_batch=1, zero=1), stack=stack_named("megatron")),
    "torch": problem(pins=Pins(cp=1, recompute="none", schedule="1f1b", micro_batch=1), stack=stack_named("torch")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_best_is_that_of_all_configurations_forecast_one_by_one(name: str) -> None:
    asked = CASES[name]
    everything = forecast_grid(asked.config, list(enumerate_degrees(asked)), asked.machine, stack=asked.stack)
    fitting = [found.step_s for found in everything if found.peak_bytes <= asked.limit_bytes]
    assert len(everything) >= 20 and fitting
    found = solve(asked)
    best_s = found.best.forecast.step_s
    assert best_s == pytest.approx(min(fitting), rel=1e-9)
    assert found.complete and found.gap == 0.0
    assert found.physics_bound_s <= found.relaxed_bound_s <= min(fitting)
    if name == "experts":
        assert {each.ep for each in enumerate_degrees(asked)} == {1, 2, 4}
    if name == "tight memory":
        assert len(fitting) < len(everything)


def by_hand(asked: Problem, layers: int) -> list[Degrees]:
    """All ways to spread a dense model over one node with one sequence per micro-batch, equal chunks and 1F1B.

    Not by the generator of the search: plain loops over all numbers, of which most do not divide.
    """
    found = []
    count, batch = asked.num_devices, asked.global_batch
    for dp, tp, pp in itertools.product(range(1, count + 1), repeat=3):
        if dp * tp * pp != count or batch % dp or layers % pp or asked.config.num_heads % tp:
            continue
        for mode, zero, sp in itertools.product(
            ("none", "memory_bound", "selective", "selective_op", "full"), range(4), (False, True)
        ):
            if (sp and tp == 1) or (zero and dp == 1):
                continue
            found += [
                Degrees(
                    dp=dp, tp=tp, pp=pp, global_batch=batch, recompute=mode, recompute_layers=some,
                    sequence_parallel=sp, optimizer=asked.at_level(zero),
                )
                for some in ([None, *range(1, layers // pp)] if mode != "none" else [None])
            ]  # fmt: skip
    return found


@cache
def forecast_by_hand(num_devices: int, **sizes: int) -> list[tuple[Forecast, Degrees]]:
    asked = problem(small(**sizes), num_devices=num_devices)
    every = by_hand(asked, asked.config.num_layers)
    return list(zip(forecast_grid(asked.config, every, asked.machine), every, strict=True))


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_the_best_with_some_blocks_that_recompute_is_that_of_plain_loops(share: float) -> None:
    asked, every = problem(small(num_heads=4)), forecast_by_hand(4, num_heads=4)
    limit = sorted(each.peak_bytes for each, _ in every)[int(share * len(every) / 8)]  # few fit
    fitting = [(each.step_s, degrees) for each, degrees in every if each.peak_bytes <= limit]
    least, best = min(fitting, key=lambda each: each[0])
    pins = Pins(micro_batch=1, cp=1, schedule="1f1b", pp=best.pp, layers=(4 // best.pp,) * best.pp)
    found = solve(asked.changed(memory_limit_bytes=limit, pins=pins))
    assert found.best.forecast.step_s == pytest.approx(least, rel=1e-9) and found.gap == 0.0
    assert found.best.forecast.peak_bytes <= limit
    all_or_none = [time for time, degrees in fitting if degrees.recompute_layers is None]
    assert not all_or_none or least <= min(all_or_none)


@pytest.mark.parametrize("keep", [3, 8])
def test_the_fastest_few_with_some_blocks_that_recompute_are_those_of_plain_loops(keep: int) -> None:
    asked, every = problem(small(num_layers=6), num_devices=2), forecast_by_hand(2, num_layers=6)
    limit = sorted(each.peak_bytes for each, _ in every)[len(every) // 3]
    fitting = sorted(each.step_s for each, degrees in every if each.peak_bytes <= limit and degrees.pp == 1)
    found = solve(asked.changed(memory_limit_bytes=limit, pins=Pins(micro_batch=1, cp=1, pp=1)), keep=keep)
    assert [each.forecast.step_s for each in found.plans[:keep]] == pytest.approx(fitting[:keep], rel=1e-9)


def test_a_number_of_blocks_that_recompute_is_kept() -> None:
    found = solve(problem(small(num_layers=8), pins=Pins(pp=1, recompute="full", recompute_layers=3))).best.degrees
    assert (found.recompute, found.recompute_layers) == ("full", 3)
    whole = solve(problem(pins=Pins(pp=4, recompute_layers=2, micro_batch=1, schedule="1f1b", layers=(1, 1, 1, 1))))
    assert whole.best.degrees.recompute != "none" and whole.best.degrees.recompute_layers is None


@pytest.mark.parametrize("stack", ["twofold", "megatron", "torch", "zero-bubble"])
def test_every_bound_is_below_every_forecast_of_its_branch(stack: str) -> None:
    asked = problem(num_devices=8, global_batch=16, stack=stack_named(stack))
    branching = Branching(problem=asked)
    checked = 0
    for mesh in (Mesh(2, 1, 2, 2), Mesh(2, 1, 1, 4), Mesh(1, 2, 1, 4)):
        for shape in shapes(asked, mesh.pp):
            count = 16 // mesh.dp
            frame = branching.space(shape, mesh.pp, count)
            if frame is None:
                continue
            for recompute, level in (("none", 1), ("full", 3)):
                inner = StageConfig(mesh.tp, mesh.cp, mesh.tp > 1, 1, recompute, frame.split)
                transfers = branching.costs.transfer_s(inner, mesh.dp, mesh.pp)
                early, settled = (
                    branching.costs.relaxed_table(inner, mesh.dp, level),
                    branching.costs.exact_table(inner, mesh.dp, level),
                )  # fmt: skip
                peaks = branching.peak_memory.peaks_bytes(inner, frame, dp=mesh.dp, level=level)
                layers = frame.layers[len(frame.layers) // 2]
                at = frame.layers.index(layers)
                degrees = Degrees(
                    dp=mesh.dp, cp=mesh.cp, tp=mesh.tp, pp=mesh.pp, micro_batch=1, global_batch=16, layers=layers,
                    schedule=shape.schedule, virtual=shape.virtual, recompute=recompute,
                    sequence_parallel=mesh.tp > 1, optimizer=asked.at_level(level),
                )  # fmt: skip
                seen = estimate(asked.config, degrees, asked.machine, stack=asked.stack)
                together = branching.spaces.together(shape)
                bounds = [
                    frame.bounds_s(early, transfers, together=together)[at],
                    frame.bounds_s(settled, transfers, together=together)[at],
                ]
                assert max(bounds) <= seen.step_s * (1 + 1e-9)
                assert bounds[0] <= bounds[1] * (1 + 1e-9)
                assert peaks[at] <= seen.peak_bytes
                if stack == "twofold" and shape.schedule in ("1f1b", "interleaved_1f1b"):
                    assert peaks[at] == seen.peak_bytes
                assert branching.peak_memory.least_bytes(inner, pp=mesh.pp, dp=mesh.dp, level=level) <= seen.peak_bytes
                checked += 1
    assert checked > 40


@pytest.mark.parametrize(("stack", "num_dense"), [("twofold", 0), ("twofold", 2), ("megatron", 0), ("torch", 0)])
def test_every_bound_holds_for_some_blocks_that_recompute(stack: str, num_dense: int) -> None:
    config = mixture(num_dense) if num_dense else small(num_layers=5)
    asked = problem(config, num_devices=8, global_batch=16, stack=stack_named(stack))
    branching, checked = Branching(problem=asked), 0
    for mesh, level in ((Mesh(4, 1, 2, 1), 3), (Mesh(2, 1, 2, 2), 1), (Mesh(2, 1, 2, 2), 2)):
        for shape in (
            ScheduleChoice("1f1b", 1),
            ScheduleChoice("zb_h1", 1),
            ScheduleChoice("zb_v", 2),
            ScheduleChoice("interleaved_1f1b", 2),
        ):
            frame = branching.space(shape, mesh.pp, 16 // mesh.dp)
            if frame is None or shape not in shapes(asked, mesh.pp):
                continue
            inner = StageConfig(mesh.tp, mesh.cp, True, 1, "full", frame.split)
            rows, transfers = branching.rows(frame, "full"), branching.costs.transfer_s(inner, mesh.dp, mesh.pp)
            tables = [branching.costs.mixed_table(inner, mesh.dp, level, exact=each) for each in (False, True)]
            floor = branching.costs.floor_table(inner, mesh.dp, level, partial=True)
            together = branching.spaces.together(shape)
            bounds = [frame.bounds_s(table, transfers, rows=rows, together=together) for table in tables]
            peaks = branching.peak_memory.peaks_bytes(inner, frame, dp=mesh.dp, level=level, rows=rows)
            most = branching.peak_memory.peaks_bytes(inner, frame, dp=mesh.dp, level=level, rows=rows, most=True)
            for number in range(0, len(rows), 3):
                layers, some = frame.choice(rows, number)
                degrees = asked.degrees(values_of(mesh, 1, True, "full", shape, level, layers, some))
                seen = estimate(asked.config, degrees, asked.machine, stack=asked.stack)
                own = frame.bounds_s(floor, transfers, together=together)[rows.spread[number]]
                assert max(own, *(each[number] for each in bounds)) <= seen.step_s * (1 + 1e-9)
                assert own <= bounds[0][number] * (1 + 1e-9)
                assert peaks[number] <= seen.peak_bytes
                assert stack != "twofold" or peaks[number] <= seen.peak_bytes <= most[number]
                checked += 1
    assert checked > 20


def test_what_is_forecast_first_is_of_the_space_and_fits() -> None:
    asked = problem(num_devices=8, global_batch=8)
    branching = Branching(problem=asked)
    every = {identity(each) for each in enumerate_degrees(asked)}
    first = [degrees for _, degrees in seeds(asked, branching.costs, branching.spaces, branching.peak_memory)]
    assert {each.tp > 1 for each in first} == {False, True}
    for degrees in first:
        assert identity(degrees) in every
        assert estimate(asked.config, degrees, asked.machine, stack=asked.stack).peak_bytes <= asked.limit_bytes


def test_the_bound_of_1f1b_is_its_closed_form() -> None:
    """Equal stages without communication: (m + p - 1)(F + B), here with the pieces at the ends left out."""
    asked = problem(num_devices=4, global_batch=8, pins=Pins(pp=4, recompute="none", schedule="1f1b", zero=0))
    branching = Branching(problem=asked)
    frame = branching.space(shapes(asked, 4)[0], 4, 8)
    assert frame is not None
    table = branching.costs.relaxed_table(StageConfig(1, 1, False, 1, "none", False), 1, 0)
    work = table.work.copy()
    work[[0, 2]] = 0.0
    even = frame.layers.index((1, 1, 1, 1))
    found = frame.bounds_s(replace(table, work=work), [0.0] * 4)[even]
    assert found == pytest.approx((8 + 4 - 1) * (work[1, 1] + work[1, 2]))


@pytest.mark.parametrize("count", [6, 12, 24, 1000])
def test_meshes_of_any_size(count: int) -> None:
    config = small(num_heads=40, hidden=1280, num_layers=50, vocab=10_000, ffn=5000)
    found, _ = meshes(problem(config, f"h100-sxm-x{-(-count // 8) * 8}", num_devices=count, global_batch=3000))
    assert found and all(each.dp * each.cp * each.tp * each.pp == count for each in found)
    assert len(set(found)) == len(found) and any(each.tp > 1 for each in found)


def test_layers_add_up_and_are_spread_fairly() -> None:
    for num_layers, num_chunks in ((32, 4), (80, 16), (126, 128), (7, 3), (5, 2), (4, 1)):
        for choice in layer_choices(num_layers, num_chunks, 3):
            assert sum(choice) == num_layers and len(choice) == num_chunks and min(choice) >= 0
            assert not choice[1:-1] or min(choice[1:-1]) >= 1


def test_a_pin_holds_and_costs() -> None:
    free, pinned = usual(), solve(problem(pins=Pins(tp=4, recompute="full")))
    assert pinned.best.degrees.tp == 4 and pinned.best.degrees.recompute == "full"
    assert free.best.forecast.step_s < pinned.best.forecast.step_s


def test_more_of_the_fastest_are_ranked_on_request() -> None:
    asked = CASES["levels"]
    every = sorted(found.step_s for found in forecast_grid(asked.config, list(enumerate_degrees(asked)), asked.machine))
    found = solve(asked, keep=4)
    assert [each.forecast.step_s for each in found.plans[:4]] == pytest.approx(every[:4], rel=1e-9)
    assert found.num_proven == 4 and "Proven: the first 4 plans" in found.summary() and solve(asked).num_proven == 1


def test_neighbours_lose_and_are_what_they_say() -> None:
    found = usual()
    assert len(found.alternatives) > 5
    for each in found.alternatives:
        assert each.extra_s is None or each.extra_s >= 0.0
        if each.candidate is not None:
            assert each.candidate.degrees != found.best.degrees
        else:
            assert each.reason


def test_the_smallest_relaxation_does_fit_and_less_does_not() -> None:
    asked = problem(pins=Pins(cp=1, schedule="1f1b"), memory_limit_bytes=100_000_000)
    with pytest.raises(NothingFits, match=r"nothing fits 0\.10 GB per device.*GB per device would be enough"):
        solve(asked)
    memory = next(each.value for each in relaxations(asked) if each.what == "memory")
    assert solve(asked.changed(memory_limit_bytes=memory)).best.forecast.peak_bytes <= memory
    with pytest.raises(NothingFits):
        solve(asked.changed(memory_limit_bytes=memory - 1))


@pytest.mark.parametrize("stack", ["torchtitan", "megatron-2022"])
def test_every_relaxation_holds_for_what_a_stack_adds(stack: str) -> None:
    asked = problem(
        small(hidden=1024, num_layers=4), num_devices=8, global_batch=16, memory_limit_bytes=150_000_000,
        pins=Pins(dp=2, micro_batch=2, schedule="1f1b"), stack=stack_named(stack),
    )  # fmt: skip
    changes = {
        "memory": lambda each: {"memory_limit_bytes": each.value},
        "devices": lambda each: {"num_devices": each.value, "machine": Machine.load(f"h100-sxm-x{each.value}")},
        "batch": lambda each: {"global_batch": each.value},
    }
    found = relaxations(asked)
    assert "memory" in {each.what for each in found}
    for each in found:
        rest = {name: value for name, value in asked.pins.given.items() if name != each.what}
        changed = changes.get(each.what, lambda _, rest=rest: {"pins": Pins(**rest)})(each)
        with contextlib.suppress(NothingFits):
            answer = solve(asked.changed(**changed))
            assert answer.best.forecast.peak_bytes <= answer.problem.limit_bytes
            continue
        pytest.fail(f"{each.text}: nothing fits")


@pytest.mark.parametrize("name", ["data-parallel", "grid", "greedy"])
def test_the_search_is_no_worse_than_a_baseline(name: str) -> None:
    found, other = usual(), baseline(problem(), name)
    assert other.method == name and other.best.degrees.num_ranks == 4
    assert found.best.forecast.step_s <= other.best.forecast.step_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["grid", "greedy"])
def test_a_baseline_on_one_device_is_the_best_of_its_sizes(name: str) -> None:
    """Micro-batches of 1, 2 and 4 sequences, three modes of recomputation; levels change nothing on one device."""
    asked = problem(num_devices=1, global_batch=8)
    every = [
        Degrees(micro_batch=size, global_batch=8, recompute=mode, optimizer=asked.at_level(0))
        for size in (1, 2, 4) for mode in ("none", "selective", "full")
    ]  # fmt: skip
    least = min(each.step_s for each in forecast_grid(asked.config, every, asked.machine))
    best = baseline(asked, name).best
    assert best.forecast.step_s == pytest.approx(least, rel=1e-9) and best.degrees.micro_batch == 4


@pytest.mark.parametrize("after", [1, 2])
def test_an_interrupt_gives_the_best_so_far_and_its_gap(after: int) -> None:
    asked = problem(pins=Pins(pp=4, recompute="none"))
    seen: list[Candidate] = []

    def stop(each: Candidate) -> None:
        seen.append(each)
        if len(seen) == after:
            raise KeyboardInterrupt

    best = solve(asked).best.forecast.step_s
    found = solve(asked, on_better=stop)
    assert len(seen) == after and not found.complete
    assert found.best is seen[-1] and found.best.forecast.step_s >= best
    assert found.physics_bound_s <= found.lower_bound_s <= best * (1 + 1e-9)


def test_a_search_without_time_is_no_slower_than_data_parallelism() -> None:
    asked = Problem(
        config=transformer_config("llama-3-70b", num_layers=16), machine=Machine.load("h100-sxm-x64"), num_devices=64,
        global_batch=512,
    )  # fmt: skip
    split = baseline(asked, "data-parallel").plans[0].forecast
    assert solve(asked, time_limit_s=1e-9).plans[0].forecast.step_s <= split.step_s * (1 + 1e-9)


def test_a_time_limit_ends_the_search() -> None:
    found = solve(CASES["schedules"], time_limit_s=1e-9)
    assert not found.complete and found.gap > 0.0 and "at most" in found.summary() and found.num_proven == 0
    assert usual_candidates(problem(), deadline_s=0.0) == [] and len(usual_candidates(problem())) == 2


def answer() -> str:
    found = solve(problem(pins=Pins(cp=1, tp=2, recompute="none")))
    return f"{[(describe(each.degrees), each.forecast.step_s) for each in found.plans]} {found.num_nodes}"


@pytest.mark.new_interpreters
def test_the_answer_does_not_depend_on_the_hash_seed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from tests.search.devices.test_search import answer; print(answer())"], check=True,
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "1"},
    )  # fmt: skip
    assert done.stdout == answer() + "\n" and sys.flags.hash_randomization


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch": 2, "pins": Pins(dp=4)}, "the next valid batch is 4"),
        ({"global_batch": 9, "pins": Pins(dp=2)}, "does not divide"),
        ({"pins": Pins(tp=3)}, "8 query heads cannot be split over tp 3"),
        ({"pins": Pins(pp=3)}, "cannot make up 4"),
        ({"pins": Pins(tp=2, pp=2, cp=2)}, "cannot make up 4"),
        ({"pins": Pins(ep=2)}, "has no experts"),
        ({"pins": Pins(dp=1, tp=1, pp=1, cp=1)}, "cannot make up 4"),
        ({"pins": Pins(tp=1, sequence_parallel=True)}, "leaves nothing to split"),
        ({"pins": Pins(pp=2, layers=(1, 1))}, "add up to 2"),
        ({"pins": Pins(layers=(2, 2))}, "pp must be pinned"),
        ({"num_devices": 0}, "at least 1"),
        ({"global_batch": 0}, "at least 1"),
        ({"num_devices": 9}, "has 8; use a larger one, such as h100-sxm-x16"),
        ({"memory_limit_bytes": 0}, "at least 1"),
    ],
)
def test_bad_questions_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        problem(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"zero": 4}, "0, 1, 2 or 3"),
        ({"recompute": "some"}, "one of none"),
        ({"schedule": "2f2b"}, "unknown schedule"),
        ({"schedule": "zb_v", "virtual": 3}, "2 chunks"),
        ({"tp": 0}, "at least 1"),
        ({"recompute_layers": 0}, "at least 1"),
        ({"recompute": "none", "recompute_layers": 1}, "recompute is none"),
    ],
)
def test_bad_pins_are_refused(pins: dict[str, object], message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        Pins(**pins)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stack", "mode", "message"),
    [
        (
            "megatron",
            "selective",
            "megatron applies recompute selective to all blocks of a chunk.*set recompute to full",
        ),
        ("torchtitan", "selective_op", "torchtitan applies .* to all blocks of a chunk.*; omit recompute_layers"),
        ("torchtitan", None, "any recompute mode to all blocks"),
    ],
)
def test_some_blocks_that_recompute_are_refused_where_the_software_has_no_such_mode(stack, mode, message) -> None:
    with pytest.raises(TwofoldError, match=message):
        problem(stack=stack_named(stack), pins=Pins(recompute=mode, recompute_layers=1, pp=1))


def test_an_estimate_refuses_some_blocks_where_the_search_does() -> None:
    machine, megatron = Machine.load("h100-sxm-x8"), stack_named("megatron")
    stated = Degrees(global_batch=4, recompute="selective", recompute_layers=1)
    with pytest.raises(TwofoldError, match=r"megatron applies recompute selective to all .*set recompute to full"):
        estimate(SMALL, stated, machine, stack=megatron)
    assert estimate(SMALL, replace(stated, recompute="full"), machine, stack=megatron).step_s > 0


def test_software_that_recomputes_all_blocks_of_a_chunk_may_do_so_where_as_many_are_pinned() -> None:
    pins = Pins(recompute_layers=2, pp=2, tp=2, zero=0)
    asked = problem(stack=stack_named("megatron"), pins=pins, num_devices=4)
    modes = {(each.recompute, each.recompute_layers) for each in enumerate_degrees(asked)}
    assert modes == {("memory_bound", None), ("selective", None), ("full", None), ("full", 2)}
    every = [
        found.step_s for each in enumerate_degrees(asked)
        if (found := estimate(asked.config, each, asked.machine, stack=asked.stack)).peak_bytes <= asked.limit_bytes
    ]  # fmt: skip
    assert solve(asked).best.forecast.step_s == pytest.approx(min(every), rel=1e-9)


def test_pipelines_whose_chunks_have_more_blocks_than_are_pinned_are_left_out() -> None:
    """Of 4 blocks only those of pipelines with 4 chunks stand alone; in small memory nothing fits."""
    asked = problem(stack=stack_named("megatron"), pins=Pins(recompute="selective", recompute_layers=1), global_batch=4)
    best = solve(asked).best.degrees
    assert best.recompute == "selective" and best.pp * best.virtual == 4 and best.pp in (2, 4)
    with pytest.raises(NothingFits, match="would be enough"):
        solve(replace(asked, memory_limit_bytes=1_000_000))


def test_an_empty_search_space_is_reported_with_reasons() -> None:
    with pytest.raises(TwofoldError, match=r"no configuration is valid.*does not divide"):
        solve(problem(num_devices=7, global_batch=8))


def test_a_machine_whose_hosts_compute_is_refused() -> None:
    with pytest.raises(TwofoldError, match="computes on its hosts"):
        problem(machine="cpu-2core-x8")


def test_a_schedule_that_cannot_be_made_is_left_out() -> None:
    asked = problem(num_devices=4, global_batch=5, pins=Pins(pp=4, micro_batch=1))
    found = {shape.schedule for shape in shapes(asked, 4) if schedule_of(shape, 4, 5) is not None}
    assert "1f1b" in found and "dualpipe_v" not in found


def test_running_bests_say_what_the_result_says() -> None:
    """The machine's power is known, so that every step has a clock of its own."""
    told: list[Candidate] = []
    asked = problem(machine="h200-x8", num_devices=2, pins=Pins(tp=1, cp=1, recompute="none", micro_batch=1))
    found = solve(asked, on_better=told.append)
    assert asked.machine.compute.at_MHz is None
    assert told
    assert told[-1] in found.plans
    own = forecast_grid(asked.config, [each.degrees for each in told], asked.machine)
    assert [each.forecast for each in told] == own
