"""Whole runs on four gloo ranks: training equals plain torch, communication is the planned one, emulated time holds."""

import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist

from executor.data.batches import rows_of_rank
from executor.step.count import Communication, compare, counted, planned_collectives
from executor.step.emulate import Emulation
from executor.train.options import RunOptions
from executor.train.result import RankResult, merged_timeline
from executor.train.run import run_rank
from plans.lower import lower
from plans.program import Kind
from plans.timeline import STREAMS
from simulator.engine.run import run_program
from tests import ROOT
from tests.support.on_ranks import run_on_ranks
from tests.support.small_training import batches, four_ranks, parameters, trained

pytestmark = pytest.mark.ranks

NUM_RANKS = 4
NUM_STEPS = 5
PLANS = four_ranks()
EMULATED = ("data parallel", "two stages", "unequal stages")
PS_PER_MS = 10**9
DILATE = 5.0


@dataclass(frozen=True)
class Cost:
    dispatch_ps: int
    work_ps: int
    cpu_ps: int = 0


def cost_of(instruction, group):
    """Fifths of 10 ms for compute and communication, of 1 ms for issuing."""
    if instruction.kind is Kind.WAIT:
        return Cost(0, 0)
    return Cost(PS_PER_MS // 5, 2 * PS_PER_MS)


def work(rank, folder):
    for name, plan in PLANS.items():
        program = lower(plan)
        feed = rows_of_rank(plan, rank, batches(NUM_STEPS))
        result = run_rank(
            program, plan, feed, parameters(), NUM_STEPS, device="cpu", weights_path=folder / f"{name}.npz",
            options=RunOptions(record_steps=2),
        )  # fmt: skip
        result.save(folder / f"{name}.{rank}.npz")
    for name in EMULATED:
        for host_async in (False, True):
            emulation = Emulation(machine="toy", dilate=DILATE, cost_of=cost_of, host_async=host_async)
            result = run_rank(
                lower(PLANS[name]), PLANS[name], batches(2), parameters(), 2, device="cpu",
                options=RunOptions(record_steps=2, emulation=emulation),
            )  # fmt: skip
            result.save(folder / f"emulated {name} {host_async}.{rank}.npz")
    with counted() as executed:
        dist.all_reduce(torch.zeros(3))
        if rank < 2:
            message = torch.zeros(2, dtype=torch.float64)
            (dist.send if rank == 0 else dist.recv)(message, 1 - rank)
    expected = Counter([Communication(kind="all_reduce", num_bytes=12, ranks=(0, 1, 2, 3))])
    if rank < 2:
        expected[Communication(kind="send" if rank == 0 else "recv", num_bytes=16, ranks=(0, 1))] += 1
    assert compare(expected, executed, rank) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_on_ranks(work, NUM_RANKS, folder)
    return folder


def results(folder, name):
    return [RankResult.load(folder / f"{name}.{rank}.npz") for rank in range(NUM_RANKS)]


def oracle(name):
    optimizer = PLANS[name].optimizer
    return trained(NUM_STEPS, optimizer.kind, optimizer.settings["lr"])


@pytest.mark.parametrize("name", PLANS)
def test_losses_are_those_of_one_device(folder, name):
    for result in results(folder, name):
        np.testing.assert_allclose(result.losses, oracle(name)[0], rtol=2e-6)


@pytest.mark.parametrize("name", PLANS)
def test_final_weights_are_those_of_one_device(folder, name):
    with np.load(folder / f"{name}.npz") as found:
        for parameter, expected in oracle(name)[1].items():
            assert np.linalg.norm(found[parameter] - expected) <= 1e-6 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", PLANS)
def test_executed_communication_is_the_planned_one(folder, name):
    found = results(folder, name)
    assert [result.differences for result in found] == [()] * NUM_RANKS
    planned = [sum(planned_collectives(lower(PLANS[name]), rank).values()) for rank in range(NUM_RANKS)]
    assert [result.num_communications for result in found] == planned
    assert all(planned)


@pytest.mark.parametrize("name", PLANS)
def test_timeline_covers_all_ranks_and_instructions(folder, name):
    timeline = merged_timeline(results(folder, name))
    assert (timeline.kind, timeline.num_ranks, timeline.num_steps) == ("measured", NUM_RANKS, 2)
    program = lower(PLANS[name])
    compute = Counter(span.rank for span in timeline.spans() if span.stream == "compute" and span.step == 1)
    for rank in range(NUM_RANKS):
        assert compute[rank] == sum(each.kind is Kind.COMPUTE for _, each in program.walk(rank))
    assert 0 < timeline.bubble_fraction < 1 and timeline.step_s > 0


@pytest.mark.parametrize("host_async", [False, True])
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_spans_last_as_modelled_and_lanes_never_overlap(folder, name, host_async):
    timeline = merged_timeline(results(folder, f"emulated {name} {host_async}"))
    assert timeline.kind == "emulated"
    work_ps = cost_of(next(lower(PLANS[name]).walk(0))[1], None).work_ps
    for rank in range(NUM_RANKS):
        rows = (timeline.rank == rank) & (timeline.stream == STREAMS.index("compute"))
        start, end = timeline.start_ps[rows], timeline.end_ps[rows]
        order = np.argsort(start)
        assert (end - start >= work_ps - 1000).all()  # to the nanosecond
        assert (start[order][1:] >= end[order][:-1]).all()


@pytest.mark.parametrize("host_async", [False, True])
def test_emulated_collective_begins_at_one_time_on_all_members(folder, host_async):
    timeline = merged_timeline(results(folder, f"emulated data parallel {host_async}"))
    begun = {}
    for span in timeline.spans():
        if span.stream == "comm":
            begun.setdefault((span.step, span.id), set()).add(span.start_ps)
    assert begun and all(len(times) == 1 for times in begun.values())


@pytest.mark.parametrize("host_async", [False, True])
@pytest.mark.parametrize("name", EMULATED)
def test_emulated_step_is_never_shorter_than_the_simulated_one(folder, name, host_async):
    """Nothing ends before its modelled time, so the simulator's step is a lower bound of the emulated one."""
    predicted = run_program(lower(PLANS[name]), cost_of, num_steps=1, host_async=host_async)
    ranks = [result.spans for result in results(folder, f"emulated {name} {host_async}")]
    first_ns, last_ns = min(each.step_start_ns[0] for each in ranks), max(each.step_end_ns[0] for each in ranks)
    rounding_ns = 1000
    assert last_ns - first_ns >= predicted.step_end_ps[0] * DILATE / 1000 - rounding_ns


@pytest.mark.parametrize("name", EMULATED)
def test_emulation_computes_the_same_values(folder, name):
    optimizer = PLANS[name].optimizer
    losses, _ = trained(2, optimizer.kind, optimizer.settings["lr"])
    for host_async in (False, True):
        np.testing.assert_allclose(results(folder, f"emulated {name} {host_async}")[0].losses, losses, rtol=2e-6)


def test_a_step_that_is_counted_imports_no_compiler_and_no_checkpoints():
    """Each takes most of a second of every rank that is started."""
    code = (
        "import sys\nfrom executor.train.run import run_rank\nfrom plans.lower import lower\n"
        "from tests.support.small_training import batches, one_rank, parameters\nplan = one_rank()\n"
        "found = run_rank(lower(plan), plan, iter(batches(1)), parameters(), 1, device='cpu')\n"
        "assert found.differences == ()\nprint({'torch._dynamo', 'torch.distributed.checkpoint'} & sys.modules.keys())"
    )
    root = ROOT
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr
