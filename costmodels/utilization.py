"""Model FLOPs utilization (MFU): the share of the devices' peak arithmetic that training needs.

The definition is that of PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), which most published figures
follow: the FLOPs of all matrix products and of all scores of attention, masked ones too, forward and twice as many
backward, without what is recomputed; divided by the step time and by the devices' peak rate of dense products in the
dtype of the model, whatever dtype some of its products take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodels.machine.machine import Machine
from costmodels.price.compute import rate

if TYPE_CHECKING:
    from plans.model.transformer import TransformerConfig

__all__ = ["forward_products", "mfu", "model_flops", "peak_flops_per_s"]


def forward_products(config: TransformerConfig) -> dict[str, float]:
    """Multiplications of the forward for each token: of a model's weights, of the scores of attention, of the head.

    Of a mixture of experts, the chosen ones, the shared ones and the router count.
    """
    mlp, sparse, experts = (3 if config.gated else 2) * config.hidden, 0, 0
    if (mixture := config.experts) is not None:
        sparse = config.num_layers - mixture.num_dense_layers
        experts = mlp * mixture.ffn * (mixture.top_k + mixture.num_shared) + config.hidden * mixture.num_experts
    dense = config.num_layers - sparse
    return {
        "weights": float(config.num_layers * config.attention_weights + dense * mlp * config.inner + sparse * experts),
        "scores": float(config.num_layers * config.seq * config.num_heads * (config.head_size + config.value_size)),
        "head": float(config.vocab * config.hidden),
    }


def model_flops(config: TransformerConfig, sequences: int) -> float:
    """FLOPs that a training step of some sequences needs, as the module counts them: two for each multiplication."""
    return 3 * 2.0 * sequences * config.seq * sum(forward_products(config).values())


def mfu(config: TransformerConfig, machine: Machine, *, sequences: int, num_devices: int, step_s: float) -> float:
    """Model FLOPs utilization of a training step, from 0 to 1.

    Args:
        config: the model.
        machine: whose peak rate counts.
        sequences: of a step, on all devices together.
        num_devices: that work on it.
        step_s: how long it takes.

    Raises:
        TwofoldError: the machine has no rate for the model's dtype.

    >>> from plans.model.transformer import transformer_config
    >>> config, machine = transformer_config("llama-3-8b"), Machine.load("h100-sxm-x8")
    >>> round(mfu(config, machine, sequences=8, num_devices=8, step_s=1.0), 3)
    0.48
    """
    return model_flops(config, sequences) / step_s / num_devices / peak_flops_per_s(config, machine)


def peak_flops_per_s(config: TransformerConfig, machine: Machine) -> float:
    """A device's peak rate of dense products in the dtype of a model."""
    return rate(machine.compute, "matrix_flops_per_s", config.dtype, machine.name)
