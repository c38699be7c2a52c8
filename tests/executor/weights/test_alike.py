"""Modules that were built with values must hold the same ones on all ranks."""

import numpy as np
import pytest
import torch
from torch import nn

from executor.device import Device
from executor.weights.initial import no_init_parameters
from executor.weights.models import load_model
from executor.weights.same_start import check_same_start
from plans.errors import TwofoldError
from tests.support.on_ranks import run_on_ranks

pytestmark = pytest.mark.ranks

NUM_RANKS = 3


class Mixed(nn.Module):
    """A layer without data, one with values, and a buffer of bools."""

    def __init__(self):
        super().__init__()
        with no_init_parameters():
            self.late = nn.Linear(3, 3)
        self.early = nn.Linear(3, 3).bfloat16()
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def same(rank):
    torch.manual_seed(1)
    return Mixed()


def other_seed(rank):
    torch.manual_seed(1 + (rank == 1))
    return Mixed()


def other_buffer(rank):
    module = same(rank)
    module.mask[rank // 2] = False
    return module


def other_module(rank):
    return nn.Linear(3, 3) if rank == 2 else same(rank)


def without_data(rank):
    with no_init_parameters():
        return nn.Linear(3, 3)


CASES = {
    "same": (same, ""),
    "without data": (without_data, ""),
    "other seed": (other_seed, "'early.weight' of Mixed has other initial values on rank 1 than on rank 0: call set_s"),
    "other buffer": (other_buffer, "'mask' of Mixed has other initial values on rank 2 than on rank 0"),
    "other module": (other_module, "holds values of other tensors on rank 2 than on rank 0"),
}


def work(rank, folder):
    said = {}
    for name, (make, _) in CASES.items():
        try:
            check_same_start(make(rank), Device(kind="cpu"))
        except TwofoldError as error:
            said[name] = str(error)
    np.savez(folder / f"{rank}.npz", **said)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike")
    run_on_ranks(work, NUM_RANKS, folder)
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(NUM_RANKS)]


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_agree_on_the_same_tensor(said, name):
    message = CASES[name][1]
    for rank in range(NUM_RANKS):
        assert message in str(said[rank].get(name, "")) and (name in said[rank]) == bool(message)


def test_a_model_function_draws_by_the_seed_and_leaves_the_generator_alone(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("from torch import nn\ndef net():\n    return nn.Linear(3, 3), ((4, 3),)\n")
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first, again, other = (load_model(f"{path}:net", seed)[0].weight for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.rand(2), expected)
