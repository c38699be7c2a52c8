"""The chain of spans that determines a step's end."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from costmodels.machine.sections import Overlap
from plans.layout import Layout
from plans.lower import lower
from plans.program import Body, Kind, Program
from plans.schedules import make_schedule
from plans.timeline import Timeline
from simulator import WhatIf, composition, critical_path, run_program, simulate
from tests.simulator.engine.test_longest_path import random_scripts
from tests.support.handmade import Price, Script, pipeline, program_of, written_price
from tests.support.random_plans import random_plan
from tests.support.reports_example import measured, predicted, small_program
from tests.support.small_machine import small_machine

SETTINGS = [
    {},
    {"host_async": False},
    {"host_async": False, "cores_per_node": 2},
    {"overlap": lambda *_: (0.7, 0.9)},
]


def with_own_names(program: Program) -> Program:
    """A RECV with another id than its SEND, so that every span tells whose it is."""

    def renamed(block):
        lines = (
            replace(line, name=f"{line.name}.recv") if line.kind is Kind.RECV else line
            for line in block.body.instructions
        )
        return replace(block, body=Body(name=block.body.name, instructions=tuple(lines)))

    groups = (replace(group, blocks=tuple(map(renamed, group.blocks))) for group in program.groups)
    return replace(program, groups=tuple(groups))


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("num_steps", [1, 3])
def test_the_path_covers_the_step_without_a_hole(settings, num_steps):
    for seed in range(40):
        program = program_of(random_scripts(seed))
        timeline = run_program(program, written_price, num_steps=num_steps, **settings)
        path = critical_path(timeline, program, host_async=settings.get("host_async", True))
        begin = timeline.step_end_ps[-2] if num_steps > 1 else timeline.step_start_ps[0]
        assert (
            path.step_ps
            == timeline.step_end_ps[-1] - begin
            == sum(path.by_kind_ps.values())
            == sum(path.by_rank_ps.values())
        )
        assert "gap" not in path.by_kind_ps
        assert all(a.end_ps == b.start_ps for a, b in pairwise(path.spans))


def program_with_distinct_prices(seed: int) -> tuple[Program, dict[str, int]]:
    """A random program whose compute takes lengths of which no two sums are equal, but by a rare accident."""
    program = with_own_names(program_of(random_scripts(seed)))
    draw = np.random.default_rng(seed)
    names = sorted(
        {
            f"{block.label}/{line.name}"
            for group in program.groups
            for block, line in group.walk()
            if line.kind is Kind.COMPUTE
        }
    )
    return program, {name: int(draw.integers(10**6, 10**9)) for name in names}


@pytest.mark.parametrize("host_async", [True, False])
def test_only_what_is_on_the_path_matters(host_async):
    """1. Give every compute instruction a large random length. 2. Find the path. 3. Shorten one instruction at a time:
    the step ends earlier exactly if it is on the path."""
    checked = {True: 0, False: 0}
    for seed in range(60):
        program, works = program_with_distinct_prices(seed)
        changed: dict[str, int] = {}

        def price(line, group, works=works, changed=changed):
            if line.kind is not Kind.COMPUTE:
                return written_price(line, group)
            name = f"{group.ranks[0]}F0/{line.name}"
            return Price(line.attrs["price"][0], works[name] - changed.get(name, 0))

        def end(program=program, price=price):
            return run_program(program, price, host_async=host_async, with_memory=False).step_end_ps[0]

        timeline = run_program(program, price, host_async=host_async, with_memory=False)
        path = critical_path(timeline, program, host_async=host_async)
        on_path = {span.id for span in path.spans if span.kind == "compute"}
        whole = end()
        for name in works:
            changed[name] = 7
            assert whole - end() == (7 if name in on_path else 0), (seed, name)
            checked[name in on_path] += 1
            del changed[name]
    assert min(checked.values()) > 100


def test_of_a_pipeline_the_fill_the_slowest_stage_and_the_drain():
    schedule = make_schedule("1f1b", 4, 8)
    work = {"F": 10, "B": 20}
    program = pipeline(schedule.order, schedule.placement, work, transfer=(0, 1))
    path = critical_path(run_program(program, written_price), program)
    assert path.by_kind_ps["compute"] + path.by_kind_ps["transfer"] == path.step_ps
    assert path.by_kind_ps["compute"] == (8 + 3) * 30
    assert path.stragglers == ()


def test_the_last_member_of_a_collective_is_named():
    scripts = [Script(rank) for rank in range(3)]
    for script, work in zip(scripts, (10, 100, 40), strict=True):
        script.compute("a", work)
        script.collective("reduce", (0, 1, 2), (0, 30))
        script.compute("b", 50 if script.rank == 0 else 1)
    program = program_of(scripts)
    timeline = run_program(program, written_price)
    path = critical_path(timeline, program)
    assert [(span.rank, span.kind, span.end_ps - span.start_ps) for span in path.spans] == [
        (1, "compute", 100), (0, "all_reduce", 30), (0, "compute", 50),
    ]  # fmt: skip
    (straggler,) = path.stragglers
    assert (straggler.rank, straggler.last, straggler.id, straggler.waited_ps) == (0, 1, "meet/reduce", 90)
    parts = composition(timeline, program)
    assert [dict(part.straggler_ps) for part in parts] == [{1: 90}, {}, {1: 60}]
    assert [part.bubble_ps for part in parts] == [0, 49, 49]
    assert {part.step_ps for part in parts} == {180}


def test_without_the_program_a_straggler_wait_is_bubble():
    scripts = [Script(0), Script(1)]
    for script, work in zip(scripts, (10, 100), strict=True):
        script.compute("a", work)
        script.collective("reduce", (0, 1), (0, 30))
    timeline = run_program(program_of(scripts), written_price)
    assert [part.bubble_ps for part in composition(timeline)] == [90, 0]


def as_measured(timeline: Timeline, arrivals: dict[int, int]) -> Timeline:
    """Spans of communication begin when a rank issues it, as executors see them."""
    start = timeline.start_ps.copy()
    for row in np.flatnonzero(timeline.stream == 2):
        start[row] = arrivals[int(timeline.rank[row])]
    return replace(timeline, kind="measured", start_ps=start)


def test_waiting_inside_a_measured_span_is_separated():
    scripts = [Script(0), Script(1)]
    for script, work in zip(scripts, (10, 100), strict=True):
        script.compute("a", work)
        script.collective("reduce", (0, 1), (0, 30))
    program = program_of(scripts)
    predicted = run_program(program, written_price, host_async=False)
    timeline = as_measured(predicted, {0: 10, 1: 100})
    assert timeline.exposed_comm_s == predicted.exposed_comm_s == 30e-12
    assert timeline.bubble_fraction == predicted.bubble_fraction == pytest.approx(45 / 130)
    fast, slow = composition(timeline, program)
    assert (dict(fast.straggler_ps), dict(fast.exposed_ps), fast.bubble_ps) == ({1: 90}, {"all_reduce": 30}, 0)
    assert (dict(slow.straggler_ps), dict(slow.exposed_ps), slow.bubble_ps) == ({}, {"all_reduce": 30}, 0)
    path = critical_path(timeline, program)
    assert [(span.kind, span.end_ps - span.start_ps) for span in path.spans] == [("compute", 100), ("all_reduce", 30)]


def test_a_hole_in_a_measured_timeline_is_a_gap():
    script = Script(0)
    script.compute("a", 10)
    script.compute("b", 20)
    program = program_of([script])
    timeline = run_program(program, written_price, host_async=False)
    shift = np.array([0, 5])
    later = replace(
        timeline, kind="measured", start_ps=timeline.start_ps + shift, end_ps=timeline.end_ps + shift, step_end_ps=(35,)
    )
    assert dict(critical_path(later, program).by_kind_ps) == {"compute": 30, "gap": 5}


@pytest.mark.parametrize("timeline", [predicted(3), measured(3)], ids=["predicted", "jittered"])
def test_a_real_plan(timeline):
    program = small_program()
    path = critical_path(replace(timeline, kind="predicted"), program)
    assert path.step_ps == timeline.step_end_ps[-1] - timeline.step_end_ps[-2]
    assert "gap" not in path.by_kind_ps
    waits = [sum(part.straggler_ps.values()) for part in composition(replace(timeline, kind="predicted"), program)]
    assert any(waits) == (timeline.kind == "measured")  # only jittered ranks wait for each other


def test_no_spans_no_path():
    assert critical_path(Timeline.from_spans([], kind="predicted", num_ranks=1), program_of([Script(0)])).spans == ()


def test_of_folded_ranks_those_that_were_simulated_are_taken_apart():
    scripts = [Script(rank) for rank in range(4)]
    for script in scripts:
        script.compute("a", 10)
        script.collective("reduce", range(4), (0, 30))
    one = program_of(scripts[:1]).groups[0]
    mesh = Layout((4,), ("axis",))
    blocks = tuple(
        replace(
            block,
            body=replace(block.body, instructions=tuple(replace(each, mesh=None) for each in block.body.instructions)),
        )
        for block in one.blocks
    )
    program = Program(groups=(replace(one, mesh=mesh, blocks=blocks),), num_micro_batches=1)
    folded = run_program(program, written_price, fold_ranks=True)
    assert dict(folded.represents) == {0: 4}
    (part,) = composition(folded, program)
    assert (part.rank, part.compute_ps, dict(part.exposed_ps), part.step_ps) == (0, 10, {"all_reduce": 30}, 40)
    path, other = (critical_path(each, program) for each in (folded, run_program(program, written_price)))
    assert [(each.id, each.start_ps, each.end_ps) for each in path.spans] == [
        (each.id, each.start_ps, each.end_ps) for each in other.spans
    ]


@pytest.mark.parametrize("seed", range(6))
def test_paths_and_parts_over_folded_ranks_are_those_of_all_ranks(seed):
    program = lower(random_plan(seed))
    what_if = WhatIf(slowdown={program.num_ranks - 1: 1.7})
    rates = dict.fromkeys(("float32", "float64", "bfloat16"), 1e12)
    compute = msgspec.structs.replace(small_machine().compute, matrix_flops_per_s=rates, vector_flops_per_s=rates)
    machine = small_machine(64, uplink_Bps=11e9, latency_s=1e-7, compute=compute)
    folded, whole = (
        simulate(program, machine, num_steps=2, what_if=what_if, fold_ranks=fold) for fold in (True, False)
    )
    one, other = critical_path(folded, program), critical_path(whole, program)
    assert one.by_kind_ps == other.by_kind_ps
    of_rank = {part.rank: part for part in composition(whole, program)}
    for part in composition(folded, program):
        same = of_rank[part.rank]
        assert (part.compute_ps, part.exposed_ps, part.host_wait_ps) == (
            same.compute_ps, same.exposed_ps, same.host_wait_ps
        )  # fmt: skip
        assert part.step_ps == same.step_ps


@pytest.mark.parametrize(("uplink_Bps", "comm_rate"), [(None, 1.0), (11e9, 0.5)])
def test_paths_and_parts_add_up_where_links_and_devices_are_shared(uplink_Bps, comm_rate):
    """Plans drawn at random, with a straggler and with jitter: no hole, and every picosecond counted once."""
    rates = dict.fromkeys(("float32", "float64", "bfloat16"), 1e12)
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
    overlap = tuple(
        Overlap(compute=kind, collective=each, compute_rate=0.8, comm_rate=comm_rate)
        for kind in ("matrix", "memory")
        for each in collectives
    )
    machine = small_machine(
        64, uplink_Bps=uplink_Bps, latency_s=1e-7, overlap=overlap if comm_rate < 1 else (),
        compute=msgspec.structs.replace(small_machine().compute, matrix_flops_per_s=rates, vector_flops_per_s=rates),
        dispatch_s=dict.fromkeys(small_machine().dispatch_s, 3e-8),
    )  # fmt: skip
    for seed in range(3):
        program = lower(random_plan(seed))
        for what_if in (WhatIf(slowdown={program.num_ranks - 1: 1.7}), WhatIf(jitter=0.2, seed=seed)):
            timeline = simulate(program, machine, num_steps=2, what_if=what_if)
            path = critical_path(timeline, program)
            assert path.step_ps == timeline.step_end_ps[1] - timeline.step_end_ps[0]
            assert "gap" not in path.by_kind_ps
            assert {part.step_ps for part in composition(timeline, program)} == {path.step_ps}
