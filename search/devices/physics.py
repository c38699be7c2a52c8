"""What no plan can beat, from the model and the device alone."""

from __future__ import annotations

from costmodels.price.compute import rate
from plans.model.transformer import TransformerConfig
from search.devices.bounds import physics_bound_s
from search.devices.problem import Problem

__all__ = ["model_flops", "physics_s"]


def model_flops(config: TransformerConfig, global_batch: int) -> float:
    """Arithmetic of the matrix products of one step, without anything made again.

    2 per weight and token forward, 4 backward, beside attention's 4 x heads x head dim (the mean of keys' and values')
    per pair of tokens forward and twice that backward, half of the pairs where it is causal (Narayanan et al. 2021,
    arXiv 2104.04473, section 5.1, and Dao 2023, arXiv 2307.08691, section 4.1, which counts a backward of 2.5 times;
    fewer keep this a bound).
    """
    tokens = float(global_batch * config.seq)
    gated = 3 if config.gated else 2
    attention = config.attention_weights
    mlp = gated * config.hidden * config.inner
    weights = float(config.num_layers * (attention + mlp) + config.vocab * config.hidden)
    if (experts := config.experts) is not None:
        chosen = experts.top_k * min(1.0, experts.capacity_factor) + experts.num_shared
        mixed = config.num_layers - experts.num_dense_layers
        weights += mixed * (chosen * gated * config.hidden * experts.ffn - mlp)
    pairs = tokens * config.seq * (0.5 if config.causal else 1.0)
    scores = 2.0 * config.num_heads * (config.head_size + config.value_size) * pairs * config.num_layers
    return 6.0 * weights * tokens + 3.0 * scores


def physics_s(problem: Problem) -> float:
    """The physical bound: see `physics_bound_s`. Each weight is read forward and backward, its optimizer state once."""
    config, machine, optimizer = problem.config, problem.machine, problem.optimizer
    assert optimizer is not None
    peak = max(rate(machine.compute, "matrix_flops_per_s", config.dtype), 1.0)
    fastest = max(1.0, *(1.0 / each for each in machine.compute.form_cost.values()), 1.0)
    moved = config.num_parameters * float(optimizer.bytes_per_element(config.dtype))
    flops = model_flops(config, problem.global_batch)
    return physics_bound_s(flops, peak * fastest, moved, machine.compute.memory_Bps, problem.num_devices)
