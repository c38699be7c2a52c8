"""Copies that differ between ranks are found: a weight that was changed, a rank that is fed other data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from executor.data.batches import rows_of_rank
from executor.train.options import RunOptions
from executor.train.replicas import checksum
from executor.train.run import run_rank
from executor.train.settings import Replicas
from plans.errors import TrainingStopped
from plans.lower import lower
from tests.support.on_ranks import run_on_ranks
from tests.support.small_training import batches, four_ranks, parameters

REPLICATED = "data parallel, level 0"


def outcome(plan, *, feed=None, on_step=None, **asked):
    options = RunOptions(on_step=on_step, count=False, record_steps=0, replicas=Replicas(**asked))
    try:
        rows = rows_of_rank(plan, dist.get_rank(), feed or batches(6))
        run_rank(lower(plan), plan, rows, parameters(), 6, device="cpu", options=options)
    except TrainingStopped as error:
        return str(error)
    return ""


def changed_weight(rank):
    """What changes the last bit of one element of one weight on rank 2 when step 3 is over."""
    import gc

    from executor.step.interpreter import Interpreter

    def on_step(step, loss):
        if step == 2 and rank == 2:
            gc.collect()
            (own,) = [each for each in gc.get_objects() if type(each) is Interpreter]
            with torch.inference_mode():
                own.value("w1").view(torch.int32)[3, 1] ^= 1

    return on_step


def work(rank, folder):
    plans, said = four_ranks(), {}
    for name, plan in plans.items():
        said[name] = outcome(plan, every=2)
    said["weight"] = outcome(plans[REPLICATED], on_step=changed_weight(rank), every=2)
    said["warn"] = outcome(plans[REPLICATED], on_step=changed_weight(rank), every=2, then="warn")
    other = batches(6)
    other[4]["x"][5, 2] += 1e-6 * (rank == 3)
    said["input"] = outcome(plans["split weights"], feed=other, every=5)
    if rank in (0, 3):
        np.savez(folder / f"said.{rank}.npz", **said)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replicas")
    run_on_ranks(work, 4, folder)
    return [{name: str(text) for name, text in np.load(folder / f"said.{rank}.npz").items()} for rank in (0, 3)]


@pytest.mark.parametrize("name", four_ranks())
def test_ranks_that_do_as_planned_agree_bit_for_bit(said, name):
    assert said[0][name] == ""


def test_a_bit_of_a_weight_and_an_input_are_found_with_rank_tensor_and_step(said):
    assert said[0] == said[1]
    assert "after step 4 weight of 'w1' is another on rank 2 than on 3 other ranks" in said[0]["weight"]
    assert "after step 5 input 'x' is another on rank 3 than on 3 other ranks" in said[0]["input"]
    assert said[0]["warn"] == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64])
def test_every_bit_counts(dtype):
    tensor = torch.arange(300_000).to(dtype)
    before, bits = checksum(tensor), tensor.view(torch.uint8)
    for place in (0, 1_000, bits.numel() - 1):
        for bit in (1, 128):
            bits[place] ^= bit
            assert checksum(tensor) != before
            bits[place] ^= bit
    assert checksum(tensor) == before
