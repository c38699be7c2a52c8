"""Forecasts of layouts that plans do not support, for other software, composed from forecasts of supported layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from costmodels import Machine
from costmodels.price.group import axes_group
from costmodels.price.instruction import price_collective
from plans.degrees import Degrees
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig
from plans.timeline import PS_PER_S
from simulator.forecast.predict import forecast
from simulator.result import Forecast
from simulator.stacks import Stack

__all__ = ["hybrid_forecast", "split_mixture_forecast"]


def split_mixture_forecast(
    config: TransformerConfig, degrees: Degrees, machine: Machine, stack: Stack, ep: int
) -> Forecast:
    """Predict a mixture of experts under context parallelism.

    Apart from attention, a rank with a part of each sample does what it would do with shorter samples of its own. So
    this is the forecast of short samples on `cp` times as many data-parallel ranks, plus what context parallelism costs
    a dense model of the same width: attention over the whole sample, and the exchange of keys and values.

    Args:
        config: the model, with whole samples.
        degrees: with cp above 1.
        machine, stack: as of `forecast`.
        ep: ranks that share the experts; they may span the ranks of cp too, as in Megatron-core (arXiv 2504.14960).

    Raises:
        TwofoldError: as `forecast`.
    """
    cp = degrees.cp
    short = dataclasses.replace(config, seq=config.seq // cp)
    apart = dataclasses.replace(degrees, dp=degrees.dp * cp, cp=1, ep=1, global_batch=degrees.global_batch * cp)
    mixture = forecast(short, dataclasses.replace(apart, ep=math.gcd(ep, apart.dp)), machine, stack=stack)
    experts = config.experts
    assert experts is not None
    active = experts.ffn * (experts.top_k + experts.num_shared)
    dense = dataclasses.replace(config, experts=None, ffn=-(-active // degrees.tp) * degrees.tp)
    whole = forecast(dense, dataclasses.replace(degrees, ep=1), machine, stack=stack)
    parts = forecast(dataclasses.replace(dense, seq=short.seq), apart, machine, stack=stack)
    memory = {
        role: size + max(0, whole.memory.get(role, 0) - parts.memory.get(role, 0))
        for role, size in mixture.memory.items()
    }
    return _longer(mixture, max(0.0, whole.step_s - parts.step_s), memory)


def hybrid_forecast(
    config: TransformerConfig, degrees: Degrees, machine: Machine, stack: Stack, shards: int
) -> Forecast:
    """Predict hybrid sharding (HSDP): weights sharded within groups of data-parallel ranks, replicated across them.

    A group runs its share of the batch as fully sharded data parallelism does. Its shards of the gradients are then
    reduced across the groups, block by block, during the backward (torch/distributed/fsdp/_fully_shard,
    FSDPCommContext's all_reduce_stream). Two parts are exposed: the reduction of the embedding, which comes last, and
    the time by which the other reductions outlast the backward.

    Args:
        config, machine, stack: as of `forecast`.
        degrees: at optimizer-parallel level 3.
        shards: data-parallel ranks of a group.

    Raises:
        TwofoldError: as `forecast`.
    """
    groups = degrees.dp // shards
    ep = math.gcd(degrees.ep, shards)
    own = dataclasses.replace(degrees, dp=shards, ep=ep, global_batch=degrees.global_batch // groups)
    found = forecast(config, own, machine, stack=stack)
    optimizer = degrees.optimizer
    item_bytes = itemsize(optimizer.reduce_dtype or optimizer.accumulates_in(config.dtype))
    across = axes_group(machine, [(groups, degrees.tp * degrees.cp * shards)], degrees.num_ranks)
    split = degrees.tp * shards * degrees.cp

    def reduced_s(parameters: float) -> float:
        size_bytes = math.ceil(parameters / split) * item_bytes
        return price_collective(machine, "all_reduce", across, size_bytes, item_bytes).work_ps / PS_PER_S

    block_s = reduced_s(config.block_parameters(config.num_layers - 1))
    hidden_s = _BACKWARD * found.step_s / degrees.num_micro_batches
    late_s = max(0.0, -(-config.num_layers // degrees.pp) * block_s - hidden_s)
    exposed_s = reduced_s(config.vocab * config.hidden) + late_s
    times = degrees.num_micro_batches if optimizer.reduced_per_micro_batch else 1
    return _longer(found, times * exposed_s, found.memory)


_BACKWARD = 2 / 3
"""Share of a step that is backward: twice the operations of the forward."""


def _longer(found: Forecast, more_s: float, memory: Mapping[str, int]) -> Forecast:
    """A forecast of a longer step, whose interval is as wide in proportion."""
    longer = 1 + more_s / found.step_s
    return dataclasses.replace(
        found, step_s=longer * found.step_s, low_s=longer * found.low_s, high_s=longer * found.high_s,
        exposed_comm_s=found.exposed_comm_s + more_s, peak_bytes=sum(memory.values()), memory=memory,
    )  # fmt: skip
