"""Whole programs on shared cores, devices and links."""

import os
import subprocess
import sys

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.schedules import make_schedule
from simulator import composition, critical_path, memory_timeline, run_program
from simulator.engine.network import Ports
from tests import ROOT
from tests.simulator.engine.test_longest_path import random_scripts
from tests.support.handmade import Script, pipeline, program_of, written_price


def busy_ranks(num_ranks: int, works: list[int]) -> list[Script]:
    scripts = [Script(rank) for rank in range(num_ranks)]
    for script in scripts:
        for number, work in enumerate(works):
            script.compute(f"n{number}", work, 10)
    return scripts


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_equal_ranks_on_two_cores_take_half_as_many_times_their_work(num_ranks):
    timeline = run_program(
        program_of(busy_ranks(num_ranks, [90, 190])), written_price, host_async=False, cores_per_node=2
    )
    slow = max(2, num_ranks)
    for rank in range(num_ranks):
        mine = timeline.rank == rank
        assert timeline.start_ps[mine].tolist() == [0, 100 * slow // 2]
        assert timeline.end_ps[mine].tolist() == [100 * slow // 2, 300 * slow // 2]


def test_nodes_do_not_share_cores_with_each_other():
    program = program_of(busy_ranks(4, [90]))

    def end(**settings):
        return run_program(program, written_price, host_async=False, cores_per_node=1, **settings).step_end_ps[0]

    assert end() == 400
    assert end(node_of=lambda rank: rank // 2) == 200
    assert end(node_of=lambda rank: rank) == 100


def test_communication_needs_the_cores_of_its_members():
    scripts = [Script(0), Script(1)]
    for script in scripts:
        script.collective("reduce", (0, 1), (0, 50, 30), "t")
        script.compute("a", 100)
        script.wait("t")
    timeline = run_program(program_of(scripts), written_price, host_async=False, cores_per_node=2)
    comm, compute = timeline.stream == 2, timeline.stream == 1
    # four activities on two cores to 60: the processor part is done, 70 of compute left at full rate; 50 on the links
    assert timeline.end_ps[comm].tolist() == [110, 110]
    assert timeline.end_ps[compute].tolist() == [130, 130]


@pytest.mark.parametrize("seed", range(25))
def test_enough_cores_are_as_good_as_own_ones(seed):
    program = program_of(random_scripts(seed))
    alone = run_program(program, written_price, num_steps=2, host_async=False)
    shared = run_program(program, written_price, num_steps=2, host_async=False, cores_per_node=200)
    assert columns(shared) == columns(alone)


@pytest.mark.parametrize("seed", range(25))
def test_overlap_at_full_rates_is_no_overlap_cost(seed):
    program = program_of(random_scripts(seed))
    alone = run_program(program, written_price, num_steps=2)
    beside = run_program(program, written_price, num_steps=2, overlap=lambda *_: (1.0, 1.0))
    assert columns(beside) == columns(alone)


@pytest.mark.parametrize("settings", [{"host_async": False, "cores_per_node": 1}, {"wires": Ports()}])
@pytest.mark.parametrize("seed", range(12))
def test_cores_get_busier_never_faster(seed, settings):
    program = program_of(random_scripts(seed))
    alone = run_program(program, written_price, host_async=settings.get("host_async", True))
    shared = run_program(program, written_price, **settings)
    assert shared.step_end_ps[0] >= alone.step_end_ps[0]


def columns(timeline):
    rows = zip(
        timeline.rank, timeline.stream, timeline.step, timeline.name_index, timeline.start_ps, timeline.end_ps,
        strict=True,
    )  # fmt: skip
    return [tuple(int(entry) for entry in row) for row in rows]


def test_overlap_slows_both_and_completes_both():
    scripts = [Script(0), Script(1)]
    for script in scripts:
        script.collective("reduce", (0, 1), (0, 40), "t")
        script.compute("a", 40)
        script.wait("t")
        script.compute("b", 10)
    asked = []

    def rates(compute, comm, compute_s, comm_s):
        asked.append((compute.name, comm.name, compute_s, comm_s))
        return 0.5, 0.25

    timeline = run_program(program_of(scripts), written_price, overlap=rates)
    one = [row[1:] for row in columns(timeline) if row[0] == 0]
    assert [(stream, start, end) for stream, _, _, start, end in one] == [(1, 0, 80), (2, 0, 100), (1, 100, 110)]
    assert set(asked) == {("a", "reduce", 40e-12, 40e-12)}  # their lengths alone


@pytest.mark.parametrize("rate", [0.0, -0.5, float("nan"), float("inf")])
def test_bad_overlap_rates_are_refused(rate):
    scripts = [Script(0), Script(1)]
    for script in scripts:
        script.collective("reduce", (0, 1), (0, 40), "t")
        script.compute("a", 40)
    with pytest.raises(TwofoldError, match="above 0"):
        run_program(program_of(scripts), written_price, overlap=lambda *_: (1.0, rate))


def test_two_transfers_of_one_rank_share_its_link():
    def end(wires):
        scripts = [Script(rank) for rank in range(3)]
        for target in (1, 2):
            scripts[0].send(f"x{target}", [(0, target)], (0, 30), f"t{target}")
            scripts[target].recv(f"x{target}", [(0, target)], (0, 30))
        return run_program(program_of(scripts), written_price, wires=wires).step_end_ps[0]

    assert (end(None), end(Ports())) == (30, 60)


def test_a_pipeline_on_as_many_cores_as_work_at_once_keeps_its_closed_form():
    schedule = make_schedule("1f1b", 4, 8)
    program = pipeline(schedule.order, schedule.placement, {"F": 10, "B": 20})
    timeline = run_program(program, written_price, host_async=False, cores_per_node=4)
    assert timeline.step_end_ps == ((8 + 3) * 30,)
    one_core = run_program(program, written_price, host_async=False, cores_per_node=1)
    assert one_core.step_end_ps == (4 * 8 * 30,)  # a core that is never idle does all the work and nothing else


SCRIPT = """
import sys
from tests.support.handmade import program_of, written_price
from tests.simulator.engine.test_longest_path import random_scripts
from simulator import composition, critical_path, memory_timeline, run_program
from simulator.engine.network import Ports
SETTINGS = [
    {}, {"host_async": False, "cores_per_node": 2}, {"overlap": lambda *_: (0.7, 0.9)}, {"wires": Ports()}
]
for seed in range(8):
    program = program_of(random_scripts(seed))
    for settings in SETTINGS:
        timeline = run_program(program, written_price, num_steps=2, **settings)
        for column in ("rank", "stream", "step", "name_index", "start_ps", "end_ps"):
            sys.stdout.buffer.write(getattr(timeline, column).tobytes())
        print(timeline.names, timeline.step_start_ps, timeline.step_end_ps, timeline.memory, flush=True)
"""

WHOLE = """
import sys
import tempfile
from pathlib import Path
from tests.support.reports_example import small_program
from tests.support.small_machine import small_machine
from costmodels.machine.sections import Overlap
from interop.chrome_trace import write_trace
from simulator import LinkChange, WhatIf, composition, critical_path, simulate
overlap = (Overlap(compute="matrix", collective="all_reduce", compute_rate=0.8, comm_rate=0.6),)
machine = small_machine(8, uplink_Bps=11e9, overlap=overlap)
program = small_program()
for what_if in (WhatIf(), WhatIf(jitter=0.1, seed=5), WhatIf(slowdown={3: 1.5}, bandwidth=0.7),
                WhatIf(links=(LinkChange.parse("wire:0~4:bandwidth=0.3"),))):
    timeline = simulate(program, machine, what_if=what_if)
    print(composition(timeline, program), critical_path(timeline, program), timeline.memory, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.buffer.write(write_trace(Path(folder) / "t.json.gz", [timeline], program=program).read_bytes())
"""


@pytest.mark.parametrize("script", [SCRIPT, WHOLE], ids=["engine", "whole"])
def test_equal_inputs_give_equal_bytes_in_any_process(script):
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script], check=True, capture_output=True, timeout=120,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for seed in ("1", "4242")
    ]  # fmt: skip
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) > 10_000


def test_random_programs_on_few_cores_do_all_their_work():
    for seed in range(20):
        program = program_of(random_scripts(seed))
        timeline = run_program(program, written_price, host_async=False, cores_per_node=1)
        work = sum(
            sum(instruction.attrs["price"])
            for group in program.groups
            for _, instruction in group.walk()
            if instruction.kind == "compute"
        )
        on_compute = timeline.stream == 1
        assert np.sum(timeline.end_ps[on_compute] - timeline.start_ps[on_compute]) >= work
        assert timeline.step_end_ps[0] >= work  # one core


def test_who_looks_at_a_timeline_changes_nothing():
    """The engine with and without following the memory, and before and after everything that reads a timeline."""
    for seed in range(8):
        program = program_of(random_scripts(seed))
        for settings in ({}, {"host_async": False, "cores_per_node": 2}, {"overlap": lambda *_: (0.7, 0.9)}):
            seen = run_program(program, written_price, num_steps=2, **settings)
            columns = ("rank", "stream", "step", "name_index", "start_ps", "end_ps")
            before = [getattr(seen, column).tobytes() for column in columns]
            composition(seen, program)
            critical_path(seen, program)
            memory_timeline(program, seen)
            list(seen.spans())
            assert [getattr(seen, column).tobytes() for column in columns] == before
            unseen = run_program(program, written_price, num_steps=2, with_memory=False, **settings)
            assert [getattr(unseen, column).tobytes() for column in columns] == before
            with pytest.raises(ValueError, match="read-only"):
                seen.start_ps[0] = 1
