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

__all__ = ["folded_mixture_forecast", "hybrid_forecast"]


def folded_mixture_forecast(
    config: TransformerConfig, degrees: Degrees, machine: Machine, stack: Stack, ep: int, *, whole_experts: bool
) -> Forecast:
    """Predict a mixture of experts whose experts are spread over ranks that split samples or the products of attention.

    Megatron-core calls it parallel folding (arXiv 2504.14960). Apart from attention, a rank with a part of each sample
    does what it would do with shorter samples of its own. So this is the forecast of short samples on more
    data-parallel ranks, plus what splitting costs a dense model with the same attention and hardly any MLP, in which
    both read the same input, so that tensor parallelism sends no messages for the MLP. That is the device's time, and
    hidden where the host of the mixture takes longer.

    Args:
        config: the model, with whole samples.
        degrees: with cp above 1, or with tp above 1 and whole experts.
        machine, stack: as of `forecast`.
        ep: ranks that share the experts; they may span the ranks of cp, and those of tp if experts are whole.
        whole_experts: whether tensor parallelism splits no expert (--expert-tensor-parallel-size 1).

    Raises:
        TwofoldError: as `forecast`.
    """
    tp = 1 if whole_experts else degrees.tp
    parts = degrees.cp * (degrees.tp // tp)
    apart = dataclasses.replace(
        degrees, dp=degrees.dp * parts, cp=1, ep=1, tp=tp, global_batch=degrees.global_batch * parts,
        sequence_parallel=degrees.sequence_parallel and tp > 1,
    )  # fmt: skip
    short = dataclasses.replace(config, seq=config.seq // parts)
    spread = dataclasses.replace(apart, ep=math.gcd(ep, apart.dp))
    mixture, device = (forecast(short, spread, machine, stack=each) for each in (stack, stack.without_host()))
    dense = dataclasses.replace(
        config, experts=None, ffn=_LEAST_WIDTH * degrees.tp, parallel_residual=True, shared_norm=True
    )
    split = forecast(dense, dataclasses.replace(degrees, ep=1), machine, stack=stack.without_host())
    own = forecast(dataclasses.replace(dense, seq=short.seq), apart, machine, stack=stack.without_host())
    memory = {
        role: max(0, size + split.memory.get(role, 0) - own.memory.get(role, 0))
        for role, size in mixture.memory.items()
    }
    more_s = max(0.0, split.step_s - own.step_s) + device.step_s - mixture.step_s
    return _longer(mixture, max(0.0, more_s), memory)


_LEAST_WIDTH = 128
"""Features of the MLP of the dense model on each rank."""


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
