"""Stacks by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from plans.errors import TwofoldError, unknown_name
from plans.extensions import load_extensions
from simulator.stacks.base import Stack
from simulator.stacks.megatron import CORE_HOST_FACTORS, FETCH_S, Megatron
from simulator.stacks.products import RECIPES
from simulator.stacks.torch_native import TorchNative

__all__ = ["declare_stack", "stack_named", "stack_names"]

_TORCHTITAN: dict[str, Any] = {
    "fused_norm": False, "update": "foreach", "flash_2": True, "complex_rotary": True, "loss_parallel": True,
    "holds_logits": False, "one_input": True, "reserved": True, "clips": True,
    "recomputes_some": (),
}  # fmt: skip
"""torchtitan of 2024 and 2025 (torchtitan/parallelisms/parallelize_llama.py, models/llama/model.py, train.py): logits
are dropped before the backward, PrepareModuleInput makes one input of what products share, norms are torch.nn.RMSNorm
before torch had a kernel for it, gradients are clipped by their norm, memory is reported as reserved. Only every k-th
block of a rank can recompute, not a number of them."""

_COMPILED: dict[str, Any] = {"compiled": True, "narrows": True}

_TORCHTITAN_COMPILED = {**_TORCHTITAN, **_COMPILED, "one_kernel_loss": True}
"""Since April 2025 torchtitan compiles the loss with the model (github.com/pytorch/torchtitan/pull/1033, where the
memory that it saves is shown); before that it was eager."""

_TORCHTITAN_2024 = {**_TORCHTITAN, **_COMPILED, "splits_evenly": False}
"""Before April 2025. Context parallelism split sequences in order: balanced parts were proposed in August 2024
(github.com/pytorch/pytorch/pull/132442), and torchtitan's paper measured steps as long as without them
(arXiv 2410.06511)."""

_UNMEASURED: dict[str, Any] = {"is_measured": False}

_CORE: dict[str, Any] = {
    **_UNMEASURED, "narrows": True, "recomputes_norms": True, "weights_early": True, "host_factors": CORE_HOST_FACTORS,
}  # fmt: skip
"""Megatron-core of 2025 (megatron/core/transformer/transformer_config.py, recompute_modules)."""

_TORCH_2024: dict[str, Any] = {**_UNMEASURED, "fused_norm": False, "update": "foreach", "flash_2": True}
"""torch's parts as other people ran them until 2025: scaled_dot_product_attention took FlashAttention-2, an RMS norm
was written out, torch.optim's default form of AdamW is foreach."""

_COMPOSER: dict[str, Any] = {
    **_TORCH_2024, "clips": True, "recipes": "engine", "narrows": True, "one_kernel_loss": True,
}  # fmt: skip
"""MosaicML's Composer, as llm-foundry uses it: FSDP around eager modules, gradients clipped by their norm, linears of
Transformer Engine with delayed scales under amp_fp8 (composer/core/precision.py, get_precision_context), flash-attn's
fused loss (llmfoundry/models/mpt/modeling_mpt.py, the default of loss_fn)."""

_DEEPSPEED: dict[str, Any] = {**_UNMEASURED, "overlaps_interleaved": False, "waits_for_device": False}
"""DeepSpeed's pipeline engine around Megatron's layers: sends and receives are instructions of the schedule between
those of compute (deepspeed/runtime/pipe/schedule.py, TrainSchedule.steps). Read in the code, not measured; that its
gradients are reduced after the last backward is not modelled."""

_STACKS: dict[str, Callable[[], Stack]] = {
    "megatron": lambda: Megatron(**_CORE),
    "megatron-overlap": lambda: Megatron(name="megatron-overlap", hides_experts=True, **_CORE),
    "megatron-graphs": lambda: Megatron(name="megatron-graphs", sinks_graph=True, **_CORE),
    "megatron-2022": lambda: Megatron(
        name="megatron-2022",
        flash_attention=False,
        overlaps_interleaved=False,
        fetch_s=FETCH_S,
    ),
    "megatron-deepspeed": lambda: Megatron(name="megatron-deepspeed", **_DEEPSPEED),
    "megatron-deepspeed-2022": lambda: Megatron(
        name="megatron-deepspeed-2022", flash_attention=False, fetch_s=FETCH_S, **_DEEPSPEED
    ),
    "mindspore": lambda: Megatron(name="mindspore", sinks_graph=True, holds_gradients=False, **_UNMEASURED),
    "torch": TorchNative,
    "torch-half-loss": lambda: TorchNative(name="torch-half-loss", float_loss=False),
    "torch-compile": lambda: TorchNative(name="torch-compile", **_COMPILED),
    "torch-composer": lambda: TorchNative(name="torch-composer", **_COMPOSER),
    "torch-composer-triton": lambda: TorchNative(name="torch-composer-triton", triton_attention=True, **_COMPOSER),
    "torch-2024": lambda: TorchNative(name="torch-2024", **_TORCH_2024),
    "torch-2024-compile": lambda: TorchNative(name="torch-2024-compile", **_COMPILED, **_TORCH_2024),
    "torchtitan": lambda: TorchNative(name="torchtitan", **_TORCHTITAN),
    "torchtitan-compile": lambda: TorchNative(name="torchtitan-compile", **_TORCHTITAN_COMPILED),
    "torchtitan-async": lambda: TorchNative(name="torchtitan-async", async_tp=True, **_TORCHTITAN_COMPILED),
    "torchtitan-2024-compile": lambda: TorchNative(name="torchtitan-2024-compile", **_TORCHTITAN_2024),
    "torchtitan-2024-async": lambda: TorchNative(name="torchtitan-2024-async", async_tp=True, **_TORCHTITAN_2024),
    "twofold": Stack,
    "zero-bubble": lambda: Megatron(name="zero-bubble", flash_attention=False, fetch_s=FETCH_S),
}


_PRECISIONS = sorted({name for own in RECIPES.values() for name in own}, key=len, reverse=True)
"""Suffixes of a stack's name: the precision of a block's linears."""


def stack_names() -> tuple[str, ...]:
    """The names that `stack_named` accepts, sorted."""
    stacks = {name: made() for name, made in _STACKS.items()}
    narrow = (f"{base}-{name}" for base, stack in stacks.items() for name in _PRECISIONS if stack.multiplies_in(name))
    return tuple(sorted([*stacks, *narrow]))


def declare_stack(name: str, make: Callable[[], Stack]) -> None:
    """Add a separate stack.

    Args:
        name: name in commands and tables.
        make: makes it.

    Raises:
        TwofoldError: there is one of this name.
    """
    if name in _STACKS:
        raise TwofoldError(f"stack {name!r} already exists; use another name")
    _STACKS[name] = make


def stack_named(name: str) -> Stack:
    """Find a stack by name, with an optional suffix for the precision of linear layers, as in "megatron-mxfp8".

    Raises:
        TwofoldError: an unknown name, with suggestions.

    >>> stack_named("torch-compile").name, stack_named("torchtitan-compile-float8-rowwise").products
    ('torch-compile', 'float8-rowwise')
    """
    if name not in _STACKS:
        load_extensions()
    if name in _STACKS:
        return _STACKS[name]()
    for products in _PRECISIONS:
        base = name.removesuffix(f"-{products}")
        if base in _STACKS and base != name and (stack := _STACKS[base]()).multiplies_in(products):
            return replace(stack, name=name, products=products)
    known = stack_names()
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
    raise TwofoldError(unknown_name("stack", name, known, close))
