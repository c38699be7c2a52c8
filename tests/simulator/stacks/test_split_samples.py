"""Forecasts of other software with split samples and with hybrid sharding, against closed forms."""

from __future__ import annotations

import dataclasses

import pytest

from costmodels import Machine
from plans.degrees import Degrees
from plans.model.transformer import TransformerConfig, transformer_config
from plans.model.transformer.config import Experts
from plans.optimizer import Optimizer
from simulator.estimate.pricing import attention_flops
from simulator.forecast import forecast
from simulator.forecast.composed import folded_mixture_forecast, hybrid_forecast
from simulator.stacks import stack_named
from simulator.stacks.ring import ring_attention
from simulator.stacks.steps import Kernel, Message

_TORCH, _MEGATRON = stack_named("torch"), stack_named("megatron")
_NODE = Machine.load("h200-x8")


def _attention(queries: int, keys: int) -> Kernel:
    heads, depth = 4, 128
    shapes = ((1, heads, queries, depth), (1, heads, keys, depth), (1, heads, keys, depth), (1, heads, queries, depth))
    return Kernel(call="attention.forward", shapes=shapes, dtype="bfloat16", touched_bytes=0, causal=True)


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_ring_attention_gives_each_rank_an_equal_share_of_the_scores_below_the_mask(parts: int) -> None:
    whole = _attention(3072, 3072)
    steps = ring_attention([_attention(3072 // parts, 3072)])
    pieces = [step for step in steps if isinstance(step, Kernel) and step.call == "attention.forward"]
    flops = sum(step.times * attention_flops(step.call, step.shapes, causal=step.causal) for step in pieces)
    assert flops * parts == pytest.approx(attention_flops(whole.call, whole.shapes, causal=True), rel=1e-3)


def test_keys_arrive_while_a_ring_computes_and_their_gradients_leave_during_its_last_piece() -> None:
    gather = Message(call="all_gather", axes=("cp",), token=1)
    gradients = Message(call="reduce_scatter", axes=("cp",), token=2)
    wait = Message(call="wait", token=1)
    own, middle, *rest = ring_attention([gather, wait, _attention(64, 256), gradients])[1:]
    assert isinstance(own, Kernel) and own.causal and isinstance(middle, Kernel) and middle.times == 2
    assert rest[:2] == [wait, gradients] and isinstance(rest[2], Kernel) and not rest[2].causal


def test_a_long_sequence_split_over_ranks_runs_at_the_rate_of_one_rank() -> None:
    """Samples of twice the length on twice the ranks have twice the attention; all else is equal for each token."""
    config = dataclasses.replace(transformer_config("llama-3-8b"), seq=32_768)
    degrees = Degrees(dp=8, global_batch=8, recompute="full")
    alone = forecast(config, degrees, _NODE, stack=_MEGATRON)
    longer = dataclasses.replace(config, seq=65_536)
    split = forecast(longer, dataclasses.replace(degrees, dp=4, cp=2, global_batch=4), _NODE, stack=_MEGATRON)
    scores = 4.5 * 4 * config.num_layers * config.hidden * config.seq**2 / 2
    more = scores / 560e12  # FlashAttention reaches 500 to 620 TFLOP/s of 989 on this device
    assert split.step_s - alone.step_s == pytest.approx(more, rel=0.15)


def test_a_rank_keeps_its_own_keys_and_values_only() -> None:
    """A part of a long sample has as many tokens as a short sample, and keeps as much."""
    config = dataclasses.replace(transformer_config("llama-2-7b"), seq=4096)
    degrees = Degrees(dp=8, global_batch=8)
    longer = dataclasses.replace(config, seq=8 * 4096)
    split = dataclasses.replace(degrees, dp=1, cp=8, global_batch=1)
    alone, parts = (forecast(config, degrees, _NODE, stack=stack) for stack in (_MEGATRON, _TORCH))
    assert forecast(longer, split, _NODE, stack=_MEGATRON).memory["activation"] == alone.memory["activation"]
    assert forecast(longer, split, _NODE, stack=_TORCH).memory["activation"] == parts.memory["activation"]
    own = forecast(longer, split, _NODE).memory["activation"] - forecast(config, degrees, _NODE).memory["activation"]
    gathered = 2 * 7 / 8 * longer.seq * config.hidden * 2 * config.num_layers  # which twofold's programs keep
    assert own == pytest.approx(gathered, rel=0.05)


_MIXTURE = TransformerConfig(
    name="mixture", num_layers=8, hidden=2048, num_heads=16, num_kv_heads=4, ffn=1024, vocab=32_000, seq=8192,
    dtype="bfloat16", experts=Experts(num_experts=8, top_k=2, ffn=1024),
)  # fmt: skip


def test_a_mixture_with_split_samples_takes_as_much_longer_as_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(_MEGATRON), "longer_on", lambda stack, machine: 0.0)  # the prices of the parts alone
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=1, master_dtype="float32")
    split = Degrees(dp=2, cp=4, global_batch=8, optimizer=optimizer)
    short = dataclasses.replace(_MIXTURE, seq=_MIXTURE.seq // 4)
    apart = dataclasses.replace(split, dp=8, cp=1, ep=8, global_batch=32)
    device = _MEGATRON.without_host()  # whose host takes longer than these small blocks
    found = folded_mixture_forecast(_MIXTURE, split, _NODE, device, ep=8, whole_experts=False)
    base = forecast(short, apart, _NODE, stack=device)
    scores = 3.5 * 4 * _MIXTURE.num_layers * _MIXTURE.hidden * (_MIXTURE.seq**2 / 4 - short.seq**2) / 2
    # keys and values of 3 other ranks in bf16, once forward and, with their gradients, twice backward
    sent_bytes = 3 * 3 * 2 * 2 * short.seq * _MIXTURE.kv_heads * _MIXTURE.head_size * _MIXTURE.num_layers
    assert found.step_s > base.step_s
    assert found.step_s - base.step_s == pytest.approx(4 * (scores / 450e12 + sent_bytes / 360e9), rel=0.35)
    assert found.peak_bytes == sum(found.memory.values()) >= base.peak_bytes
    assert found.low_s < found.step_s < found.high_s


def test_hybrid_sharding_costs_a_group_and_a_reduction_between_groups() -> None:
    config = transformer_config("llama-3-8b")
    machine = Machine.load("h100-sxm-x32")
    sharded = Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=3, reduce_every="micro_batch")
    degrees = Degrees(dp=32, global_batch=32, optimizer=sharded)
    group = forecast(config, dataclasses.replace(degrees, dp=8, global_batch=8), machine, stack=_TORCH)
    found = hybrid_forecast(config, degrees, machine, _TORCH, shards=8)
    sent_bytes = 2 * 3 / 4 * config.vocab * config.hidden / 8 * 2  # a ring of 4 groups, bf16; 50 GB/s of each device
    assert found.peak_bytes == group.peak_bytes
    assert 1.0 < (found.step_s - group.step_s) / (sent_bytes / 50e9) < 1.3
