"""A tensor that was sent to another stage is kept until its arrival is proven, and not longer."""

import random

import numpy as np
import pytest
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from executor.data.batches import rows_of_rank
from executor.train.run import run_rank
from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.program import Kind
from plans.schedules import make_schedule, schedule_names
from plans.schedules.arrivals import release_rows, releases_of_rows
from plans.schedules.dependencies import remote_dependencies, unit_start_times
from tests.support.on_ranks import run_on_ranks
from tests.support.pipeline_programs import random_schedule
from tests.support.small_training import batches, parameters, plan

STEPS = 3


def two_stages(schedule: str, num_micro_batches: int):
    return plan(
        (Layout((1,), ("a",), (0,)), ("fc1", "act")), (Layout((1,), ("a",), (1,)), ("fc2", "loss")),
        num_micro_batches=num_micro_batches, schedule=schedule, optimizer=Optimizer(kind="adamw", settings={"lr": 0.1}),
    )  # fmt: skip


def kept_by_program(group) -> list[int]:
    """At each SEND of a step, how many sent tensors are alive by the program, this one included."""
    alive: set[tuple[str, int]] = set()
    found = []
    for block, line in group.walk():
        if line.kind is Kind.SEND:
            alive.add((line.inputs[0], block.micro_batch))
            found.append(len(alive))
        alive -= {(name, block.micro_batch) for name in line.frees}
    assert not alive
    return found


def on_ranks(rank, folder):
    """Count at each send the sent tensors whose memory is still there, whoever keeps it."""
    isend = dist.isend
    for schedule in ("1f1b", "gpipe"):
        storages, kept = [], []

        def counted(tensor, *args, storages=storages, kept=kept, **rest):
            storages.append(StorageWeakRef(tensor.untyped_storage()))
            kept.append(sum(not storage.expired() for storage in storages))
            return isend(tensor, *args, **rest)

        dist.isend = counted
        of = two_stages(schedule, 8)
        program = lower(of)
        result = run_rank(program, of, rows_of_rank(of, rank, batches(STEPS)), parameters(), STEPS, device="cpu")
        dist.isend = isend
        assert result.differences == ()
        np.save(folder / f"{schedule}.{rank}.npy", kept)


@pytest.mark.ranks
def test_ranks_keep_as_many_sent_tensors_as_the_program_says(tmp_path):
    """The process counts memory by weak references to storages. gloo's handles keep sent tensors alive, too."""
    run_on_ranks(on_ranks, 2, tmp_path)
    most = {}
    for schedule in ("1f1b", "gpipe"):
        for rank, group in enumerate(lower(two_stages(schedule, 8)).groups):
            expected = kept_by_program(group)
            kept = np.load(tmp_path / f"{schedule}.{rank}.npy").reshape(-1, len(expected))
            assert len(kept) >= STEPS and (kept == expected).all()
            most[schedule, rank] = max(expected)
    # each gradient that arrives releases a forward; each forward that arrives releases a gradient, if one follows
    assert most == {("1f1b", 0): 2, ("1f1b", 1): 2, ("gpipe", 0): 8, ("gpipe", 1): 8}


@pytest.mark.parametrize("name", [*schedule_names(), "custom"])
def test_arrivals_are_proven_by_what_happened_before(name):
    """A tensor is released after a row that cannot run before the tensor has been received."""
    for seed in range(6):
        schedule = random_schedule(random.Random(f"{name}{seed}"), name)
        needed = remote_dependencies(schedule)
        receivers = np.flatnonzero(needed >= 0)
        released = release_rows(schedule, needed[receivers], receivers)
        table, rows = schedule.table, len(needed)
        before = np.zeros((rows, rows), dtype=bool)  # whether a row is, or must run before, another
        rank_of = np.repeat(np.arange(schedule.num_ranks), np.diff(table.rank_start))
        for row in np.argsort(unit_start_times(schedule), kind="stable").tolist():
            before[row, row] = True
            if row > table.rank_start[rank_of[row]]:
                before[:, row] |= before[:, row - 1]
            if needed[row] >= 0:
                before[:, row] |= before[:, needed[row]]
        done = released >= 0
        assert np.array_equal(rank_of[released[done]], rank_of[needed[receivers][done]])
        assert before[receivers[done], released[done]].all()
        assert np.array_equal(releases_of_rows(schedule), np.bincount(released[done], minlength=rows))


@pytest.mark.parametrize(("name", "num_ranks", "count", "virtual"), [
    ("interleaved_1f1b", 8, 32, 4), ("interleaved_zb", 4, 16, 7), ("dualpipe_v", 8, 32, None), ("1f1b", 8, 32, None),
])  # fmt: skip
def test_ranks_keep_few_more_sent_tensors_than_the_order_of_actions_demands(name, num_ranks, count, virtual):
    """The least is kept if a tensor is released after the first row that cannot run before it has been received."""
    schedule = make_schedule(name, num_ranks, count, virtual=virtual)
    table, needed = schedule.table, remote_dependencies(schedule)
    receivers = np.flatnonzero(needed >= 0)
    senders, rank_of = needed[receivers], np.repeat(np.arange(num_ranks), np.diff(table.rank_start))
    known = np.full((len(needed), num_ranks), -1)  # (row, rank) the last row of the rank that must run before
    for row in np.argsort(unit_start_times(schedule), kind="stable").tolist():
        if row > table.rank_start[rank_of[row]]:
            known[row] = known[row - 1]
        if needed[row] >= 0:
            known[row] = np.maximum(known[row], known[needed[row]])
        known[row, rank_of[row]] = row
    end = table.rank_start[1:]
    least = np.array([
        next((row for row in range(sent, end[rank_of[sent]]) if known[row, rank_of[received]] >= received), -1)
        for sent, received in zip(senders.tolist(), receivers.tolist(), strict=True)
    ])  # fmt: skip
    own, least_kept = (
        _most_kept(table, senders, released) for released in (release_rows(schedule, senders, receivers), least)
    )
    assert (least_kept <= own).all()
    assert (own <= least_kept + 2).all()  # with answers only 41 instead of 15, and 33 instead of 6


def _most_kept(table, senders, released):
    """(rank) the most sent tensors that are kept at a time."""
    change = np.bincount(senders, minlength=len(table.kind))
    change = change - np.bincount(released[released >= 0], minlength=len(table.kind))
    return np.array([np.cumsum(own).max() for own in np.split(change, table.rank_start[1:-1])])
