"""A case on Megatron-Core's own layers, data parallelism, schedules and optimizer.

Written for megatron-core 0.16.1 (`pip install megatron-core`), imported only when a step is built, without Transformer
Engine and Apex. What its wheel has without them is used: fused SwiGLU and cross entropy (by torch.compile), gradients
reduced in buckets beside the backward, the distributed optimizer for level 1, 1F1B and interleaved pipelines. Three
parts are torch's: attention is `scaled_dot_product_attention` and AdamW its fused kernel, because the wheel's own forms
are far slower than what people train with; and norms, which the wheel does not let sequence parallelism split.

Megatron accumulates and reduces gradients in single precision and updates weights in single precision. Cases with
`parts="megatron"` give the executor's plan the same dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.cases import Case
from benchmarks.peers.weights import SharedWeights
from executor.device import Device
from plans.plan import Plan

__all__ = ["chunks_of", "lacks", "over_data", "step_of"]

_SCHEDULES = ("1f1b", "interleaved_1f1b")


def lacks(case: Case) -> str:
    """The feature of a case that this peer does not have; "" if it has them all."""
    if case.config.experts is not None:
        return "experts"
    if int(case.degrees.get("zero", 0)) > 1:
        return "sharded gradients"
    if case.degrees.get("schedule", "1f1b") not in _SCHEDULES:
        return f"the schedule {case.degrees['schedule']}"
    return "recomputation" if "recompute" in case.degrees else ""


def step_of(case: Case, plan: Plan, device: Device) -> Callable[[Sequence[Tensor]], Tensor | None]:
    """One training step on Megatron-Core.

    Args:
        case: its model and degrees.
        plan: gives the number of micro-batches, the optimizer and the names and shapes of parameters.
        device: an accelerator; Megatron-Core does not train on CPUs.

    Returns:
        A function of this rank's tokens and labels [rows, seq] on its device; it returns the mean of the losses, or
        None where the rank has no last chunk.
    """
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    virtual = case.degree("virtual")
    chunks, config = chunks_of(case, device)
    for chunk in chunks:
        _fill(chunk, case, SharedWeights(plan.graph), device.torch_device)
    models = over_data(chunks, config, sharded=plan.optimizer.parallel_level == 1)
    update = _optimizer(models, plan)
    config.grad_scale_func = update.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = [model.no_sync for model in models] if virtual > 1 else models[0].no_sync
    run, count = get_forward_backward_func(), plan.num_micro_batches
    positions = torch.arange(case.config.seq, device=device.torch_device).unsqueeze(0)

    def forward(batches: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        tokens, labels = next(batches)
        return model(tokens, positions.expand_as(tokens), None, labels=labels), _mean

    def step(batch: Sequence[Tensor]) -> Tensor | None:
        for model in models:
            model.zero_grad_buffer()
        update.zero_grad()
        parts = list(zip(*(each.chunk(count) for each in batch), strict=True))
        losses = run(
            forward_step_func=forward, data_iterator=[iter(parts) for _ in models], model=models,
            num_microbatches=count, seq_length=case.config.seq, micro_batch_size=int(case.degrees["micro_batch"]),
            forward_only=False,
        )  # fmt: skip
        update.step()
        return torch.stack([each["loss"] for each in losses]).mean() if losses else None

    return step


def chunks_of(case: Case, device: Device) -> tuple[list[nn.Module], Any]:
    """The chunks of the model on this rank, with uninitialised weights, and Megatron's configuration of the model.

    Megatron's groups of ranks are created for the degrees of the case.
    """
    from megatron.core import parallel_state as ranks
    from megatron.core import tensor_parallel

    virtual = case.degree("virtual")
    if not dist.is_initialized():  # on one rank
        dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1)
    ranks.destroy_model_parallel()
    ranks.initialize_model_parallel(
        tensor_model_parallel_size=case.degree("tp"),
        pipeline_model_parallel_size=case.degree("pp"),
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        create_gloo_process_groups=False,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = _config(case)
    return [_chunk(case, config, number if virtual > 1 else None, device) for number in range(virtual)], config


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over the tokens of a micro-batch; losses [batch, seq]."""
    mean = losses.float().mean()
    return mean, {"loss": mean.detach().clone()}  # Megatron divides the mean in place


def _config(case: Case) -> Any:
    """Megatron's sizes, degrees and choices of kernels."""
    from megatron.core.transformer import TransformerConfig

    model, pp, virtual = case.config, case.degree("pp"), case.degree("virtual")
    dtype: torch.dtype = getattr(torch, model.dtype)
    return TransformerConfig(
        num_layers=model.num_layers, hidden_size=model.hidden, ffn_hidden_size=model.inner,
        num_attention_heads=model.num_heads, kv_channels=model.head_size,
        normalization="RMSNorm" if model.norm == "rms" else "LayerNorm", layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.gated, activation_func=F.silu if model.gated else F.gelu,
        add_bias_linear=model.mlp_bias, add_qkv_bias=model.qkv_bias, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=case.degree("tp"), pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        sequence_parallel=bool(case.degrees.get("sequence_parallel")), bf16=dtype is torch.bfloat16,
        params_dtype=dtype, pipeline_dtype=dtype, perform_initialization=False, gradient_accumulation_fusion=False,
        # the fused GELU is the tanh form, which is another model
        bias_activation_fusion=model.gated, bias_dropout_fusion=True, masked_softmax_fusion=False,
        cross_entropy_loss_fusion=True, overlap_p2p_comm=virtual > 1, batch_p2p_comm=virtual == 1,
        deallocate_pipeline_outputs=pp > 1,
    )  # fmt: skip


def _chunk(case: Case, config: Any, virtual: int | None, device: Device) -> nn.Module:
    """This rank's model, or the part of it that is chunk `virtual`."""
    from megatron.core import parallel_state as ranks
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = Attention
    layers = [layer] * get_num_layers_to_build(config, virtual)
    first = ranks.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual)
    last = ranks.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual)
    model = GPTModel(
        config=config, transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm),
        vocab_size=case.config.vocab, max_sequence_length=case.config.seq, pre_process=first, post_process=last,
        parallel_output=True, share_embeddings_and_output_weights=False, rotary_base=case.config.rope.base,
        position_embedding_type="rope" if case.config.position == "rope" else "learned_absolute", vp_stage=virtual,
    )  # fmt: skip
    return Float16Module(config, model.to(device.torch_device))


class Attention(nn.Module):
    """Causal attention by torch's flash kernels instead of `megatron.core.transformer.DotProductAttention`."""

    def __init__(self, config: Any, **unused: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **unused: Any) -> Tensor:
        """query, key and value are [seq, batch, heads, head size]; returns [seq, batch, hidden]."""
        q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)


class Norm:
    """torch's norm. Its parameters are marked if a rank has gradients of its part of the sequence only."""

    def __new__(cls, config: Any, hidden_size: int, eps: float, **unused: Any) -> nn.Module:
        """The module."""
        norm: nn.Module = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def _fill(chunk: nn.Module, case: Case, weights: SharedWeights, device: torch.device) -> None:
    """Copy this rank's part of the shared weights into the chunk, as Megatron lays it out.

    One matrix has the rows of q, k and v head by head; another has those of the gate above those of the up-projection.
    """
    from megatron.core import parallel_state as ranks

    tp, index = case.degree("tp"), ranks.get_tensor_model_parallel_rank()

    def full(name: str) -> Tensor:
        return weights.tensor(name, device)

    def rows(name: str) -> Tensor:
        return full(name).chunk(tp)[index]

    def columns(name: str) -> Tensor:
        return full(name).chunk(tp, 1)[index]

    def heads(kind: str, at: str) -> Tensor:
        parts = [rows(f"{at}.attention.{name}.{kind}") for name in ("wq", "wk", "wv")]
        return torch.cat([part.unflatten(0, (-1, case.config.head_size)) for part in parts], 1).flatten(0, 1)

    def inner(kind: str, at: str) -> Tensor:
        return torch.cat([rows(f"{at}.feed_forward.{name}.{kind}") for name in ("w1", "w3")[: 1 + case.config.gated]])

    found = {
        "embedding.word_embeddings.weight": lambda: rows("tok_embeddings.weight"),
        "embedding.position_embeddings.weight": lambda: full("pos_embeddings.weight"),
        "decoder.final_layernorm.weight": lambda: full("norm.weight"),
        "decoder.final_layernorm.bias": lambda: full("norm.bias"),
        "output_layer.weight": lambda: rows("output.weight"),
    }
    inside: dict[str, Callable[[str], Tensor]] = {
        "input_layernorm.weight": lambda at: full(f"{at}.attention_norm.weight"),
        "input_layernorm.bias": lambda at: full(f"{at}.attention_norm.bias"),
        "self_attention.linear_qkv.weight": lambda at: heads("weight", at),
        "self_attention.linear_qkv.bias": lambda at: heads("bias", at),
        "self_attention.linear_proj.weight": lambda at: columns(f"{at}.attention.wo.weight"),
        "self_attention.linear_proj.bias": lambda at: full(f"{at}.attention.wo.bias"),
        "pre_mlp_layernorm.weight": lambda at: full(f"{at}.ffn_norm.weight"),
        "pre_mlp_layernorm.bias": lambda at: full(f"{at}.ffn_norm.bias"),
        "mlp.linear_fc1.weight": lambda at: inner("weight", at),
        "mlp.linear_fc1.bias": lambda at: inner("bias", at),
        "mlp.linear_fc2.weight": lambda at: columns(f"{at}.feed_forward.w2.weight"),
        "mlp.linear_fc2.bias": lambda at: full(f"{at}.feed_forward.w2.bias"),
    }
    model: Any = chunk.module
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("decoder.layers."):
                local, within = name.removeprefix("decoder.layers.").split(".", 1)
                number = model.decoder.layers[int(local)].layer_number - 1
                parameter.copy_(inside[within](f"layers.{number}"))
            else:
                parameter.copy_(found[name]())


def over_data(chunks: Sequence[nn.Module], config: Any, *, sharded: bool) -> list[Any]:
    """The chunks with gradients in single precision, reduced in buckets beside the backward."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=sharded,
        overlap_param_gather=sharded,
    )  # fmt: skip
    return [
        # as in Megatron's trainer: later chunks have one bucket each, which the backward of the first covers
        DistributedDataParallel(config, settings, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _optimizer(models: list[Any], plan: Plan) -> Any:
    """Megatron's mixed-precision AdamW around torch's fused kernel."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = plan.optimizer.settings
    sharded = plan.optimizer.parallel_level == 1
    update = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=settings["lr"], weight_decay=settings.get("weight_decay", 1e-2),
            adam_beta1=settings.get("beta1", 0.9), adam_beta2=settings.get("beta2", 0.999),
            adam_eps=settings.get("eps", 1e-8), clip_grad=0.0, bf16=True, params_dtype=torch.bfloat16,
            use_distributed_optimizer=sharded, overlap_param_gather=sharded,
        ),
        models,
        use_gloo_process_groups=False,
    )  # fmt: skip
    for each in getattr(update, "chained_optimizers", [update]):
        for group in each.optimizer.param_groups:
            group |= {"fused": True, "foreach": False}
    return update
