"""Model FLOPs utilization against what was published and what torch counts."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from costmodels import Machine
from costmodels.utilization import forward_products, mfu, model_flops
from executor.capture.capture import capture
from plans.model.flops import necessary_flops
from plans.model.transformer import Experts, TransformerConfig


def machine_with(peak_flops_per_s: float) -> Machine:
    machine = Machine.load("h100-sxm-x8")
    rates = machine.compute.matrix_flops_per_s | {"bfloat16": peak_flops_per_s}
    return msgspec.structs.replace(
        machine, compute=msgspec.structs.replace(machine.compute, matrix_flops_per_s=rates)
    )  # fmt: skip


def test_palm_reaches_what_its_authors_published() -> None:
    """PaLM 540B: 46.2 % at 238,300 tokens/s on 6,144 TPU v4 of 275 TFLOP/s (arXiv 2204.02311, section 4.1, table 3)."""
    palm = TransformerConfig(
        name="palm-540b", num_layers=118, hidden=18_432, num_heads=48, num_kv_heads=1, head_dim=256, ffn=73_728,
        vocab=256_000, seq=2048, gated=True, tied=True,
    )  # fmt: skip
    step_s = 2048 * 2048 / 238_300
    found = mfu(palm, machine_with(275e12), sequences=2048, num_devices=6144, step_s=step_s)
    assert found == pytest.approx(0.462, abs=0.001)


def test_torch_counts_as_many_operations() -> None:
    """A block of two matrices beside attention without a mask, forward, counted by torch's own counter."""
    batch, config = 2, TransformerConfig(name="t", num_layers=1, hidden=64, num_heads=4, ffn=160, vocab=96, seq=32)
    x = torch.randn(batch, 32, 64)
    with FlopCounterMode(display=False) as counter:
        q, k, v = (torch.nn.functional.linear(x, torch.randn(64, 64)).view(batch, 32, 4, 16) for _ in range(3))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        y = torch.einsum("bhqk,bkhd->bqhd", scores, v).reshape(batch, 32, 64)
        y = torch.nn.functional.linear(y, torch.randn(64, 64))
        matrices = 3 if config.gated else 2
        inner = torch.nn.functional.linear(y, torch.randn((matrices - 1) * 160, 64))[..., :160]
        y = torch.nn.functional.linear(inner, torch.randn(64, 160))
        torch.nn.functional.linear(y, torch.randn(96, 64))
    assert model_flops(config, batch) == 3 * counter.get_total_flops()


def test_a_mixture_counts_the_experts_that_a_token_takes() -> None:
    """Beside a dense model of the same inner size, two of eight experts are twice the products, and a router more."""
    dense = TransformerConfig(name="d", num_layers=3, hidden=64, num_heads=4, ffn=160, vocab=96, seq=32)
    experts = Experts(num_experts=8, top_k=2, ffn=160)
    mixture = TransformerConfig(
        name="m", num_layers=3, hidden=64, num_heads=4, ffn=160, vocab=96, seq=32, experts=experts
    )  # fmt: skip
    matrices = 3 if dense.gated else 2
    more = forward_products(mixture)["weights"] - forward_products(dense)["weights"]
    assert more == 3 * (matrices * 64 * 160 + 64 * 8)


class Meets(nn.Module):
    """Two projections of the same rows, multiplied."""

    def __init__(self, multiply) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(8, 6, bias=False) for _ in range(2))
        self.multiply = multiply

    def forward(self, x):
        return self.multiply(self.first(x), self.second(x))


ROWS, IMAGES = (4, 5, 8), (4, 2, 9, 7)
PRODUCTS = {
    "linear": (nn.Linear(8, 6, bias=False), ROWS),
    "two linear": (nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 3, bias=False)), ROWS),
    "matmul": (Meets(lambda x, y: x @ y.transpose(1, 2)), ROWS),
    "einsum": (Meets(lambda x, y: torch.einsum("bik,bjk->bij", x, y)), ROWS),
    "conv2d": (nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1, bias=False), nn.Conv2d(4, 6, 2, bias=False)), IMAGES),
    "conv1d": (nn.Conv1d(5, 6, 3, bias=False), ROWS),
    "conv3d": (nn.Sequential(nn.Conv3d(2, 3, 2, bias=False), nn.Conv3d(3, 4, 2, bias=False)), (4, 2, 4, 4, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_captured_modules_are_those_that_torch_counts(name: str) -> None:
    """Forward and gradients of matrix products; torch's counter has no elementwise operations."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = PRODUCTS[name][0]

        def forward(self, x):
            return self.body(x).mean()

    module, x = Mean(), torch.randn(PRODUCTS[name][1])
    graph = capture(module, (x,))
    with FlopCounterMode(display=False) as counter:
        module(x).backward()
    means = module.body(x).numel() + len(x)  # of samples, then of the batch
    assert sum(necessary_flops(graph).values()) == counter.get_total_flops() + 2 * means
