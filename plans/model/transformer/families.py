"""Model families of Hugging Face: one row for each, with its keys, their defaults and its structure.

A row maps keys of a config.json to fields of `TransformerConfig`. It contains the defaults of the class of transformers
and the common properties of the family. Values that need a calculation have a function next to the row. What cannot be
modelled is refused with the family, the key and a way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from plans.errors import TwofoldError
from plans.model.transformer.config import Experts, Latent

__all__ = ["FAMILIES", "NESTED", "REFUSED", "Family", "Keys"]


class Keys(Protocol):
    """The keys of a config.json, as `huggingface` passes them to the functions of this module."""

    def get(self, name: str, default: Any = None) -> Any:
        """A key, or the default where the file leaves it out or has null."""

    def need(self, name: str) -> Any:
        """The value of a required key."""

    def refuse(self, key: str, why: str, way: str) -> TwofoldError:
        """The error that names the family, the key and the way out."""


Fields = dict[str, Any]
"""Settings of `TransformerConfig`; "scales.logits" is a field of its `scales`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family, identified by its model_type.

    Args:
        keys: field -> the key that holds it, or keys of which a file has one.
        defaults: key -> what the class of transformers takes where a file leaves it out.
        fixed: fields that are equal in all models of the family.
        finish: adds the fields that take a calculation.
        activation: the key of the activation.
        rope: keys of the base and of the part of a head that is rotated.
        only: key -> the values that are modelled beside null.
        approximated: key -> in what the model that is planned differs, where the key is there and not null.
        stored: form in which weights are published (`quant_method`); the model trains without it.
        unused: keys of published files that the class of transformers does not read.
    """

    keys: Mapping[str, str | tuple[str, ...]]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Keys, Fields], None] | None = None
    activation: str = "hidden_act"
    rope: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    approximated: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    stored: str = ""


_SIZES: dict[str, str | tuple[str, ...]] = {
    "num_layers": "num_hidden_layers", "hidden": "hidden_size", "num_heads": "num_attention_heads",
    "ffn": "intermediate_size", "vocab": "vocab_size", "seq": "max_position_embeddings", "tied": "tie_word_embeddings",
    "attention_dropout": "attention_dropout",
}  # fmt: skip
_LLAMA: dict[str, str | tuple[str, ...]] = _SIZES | {
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
}  # fmt: skip
_DEEPSEEK = _SIZES | {"num_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps"}
_OPENAI: dict[str, str | tuple[str, ...]] = {
    "num_layers": "n_layer", "hidden": "n_embd", "num_heads": "n_head", "ffn": "n_inner", "vocab": "vocab_size",
    "seq": ("n_positions", "n_ctx"), "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
    "dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop", "attention_dropout": "attn_pdrop",
}  # fmt: skip

_UNTIED: dict[str, Any] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_TIED = _UNTIED | {"tie_word_embeddings": True}
_QWEN = _UNTIED | {"use_sliding_window": False}
_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_PARALLEL = {"parallel_residual": True, "shared_norm": True}
_CAPPED = {"attn_logit_softcapping": "attention scores are not capped; the cap costs a few operations per score"}
_TURNED = "every block rotates its queries and keys; in this model some blocks do not"


def _all_biases(key: str) -> Callable[[Keys, Fields], None]:
    def finish(keys: Keys, fields: Fields) -> None:
        fields |= dict.fromkeys(_BIASES, bool(keys.get(key)))

    return finish


def _attention_biases(keys: Keys, fields: Fields) -> None:
    fields |= dict.fromkeys(("qkv_bias", "out_bias"), bool(keys.get("attention_bias", False)))


def _llama(keys: Keys, fields: Fields) -> None:
    _attention_biases(keys, fields)
    fields["mlp_bias"] = bool(keys.get("mlp_bias", False))


def _mixtral(keys: Keys, fields: Fields) -> None:
    fields["experts"] = Experts(
        num_experts=keys.need("num_local_experts"), top_k=keys.need("num_experts_per_tok"), ffn=fields["ffn"]
    )


def _first_dense_layers(keys: Keys, num_layers: int) -> int:
    """Number of dense first layers, if all later layers have experts."""
    if (step := keys.get("decoder_sparse_step", 1)) != 1:
        raise keys.refuse("decoder_sparse_step", f"is {step}: layers with and without experts alternate",
                          "1, experts in every layer, is modelled")  # fmt: skip
    dense = sorted(keys.get("mlp_only_layers", ()))
    if dense != list(range(len(dense))) or len(dense) >= num_layers:
        raise keys.refuse("mlp_only_layers", f"is {dense}: layers without experts are not the first ones",
                          "an empty list, or the first layers, are modelled")  # fmt: skip
    return len(dense)


def _qwen_moe(keys: Keys, fields: Fields) -> None:
    ffn, shared = keys.need("moe_intermediate_size"), keys.get("shared_expert_intermediate_size", 0)
    if shared % ffn:
        raise keys.refuse("shared_expert_intermediate_size", f"{shared} is no multiple of moe_intermediate_size {ffn}",
                          "make it one")  # fmt: skip
    fields["experts"] = Experts(
        num_experts=keys.get("num_experts") or keys.need("num_local_experts"), top_k=keys.need("num_experts_per_tok"),
        ffn=ffn, num_shared=shared // ffn, shared_gate=shared > 0,
        num_dense_layers=_first_dense_layers(keys, fields["num_layers"]),
        weights="chosen" if keys.get("norm_topk_prob", False) else "all",
    )  # fmt: skip
    _attention_biases(keys, fields)
    if keys.get("qkv_bias", False):
        fields["qkv_bias"] = True


def _olmoe(keys: Keys, fields: Fields) -> None:
    _attention_biases(keys, fields)
    fields["experts"] = Experts(
        num_experts=keys.need("num_experts"), top_k=keys.need("num_experts_per_tok"), ffn=fields["ffn"],
        weights="chosen" if keys.get("norm_topk_prob", False) else "all",
    )  # fmt: skip


def _llama4(keys: Keys, fields: Fields) -> None:
    if (step := keys.get("interleave_moe_layer_step", 1)) != 1:
        raise keys.refuse("interleave_moe_layer_step", f"is {step}: layers with and without experts alternate",
                          "1, experts in every layer (Scout), is modelled")  # fmt: skip
    if keys.get("moe_layers") not in (None, list(range(fields["num_layers"]))):
        raise keys.refuse("moe_layers", "leaves layers without experts", "experts in every layer are modelled")
    _attention_biases(keys, fields)
    fields["qk_norm"] = "head_no_weights" if keys.get("use_qk_norm", True) else "none"
    fields["experts"] = Experts(
        num_experts=keys.need("num_local_experts"), top_k=keys.need("num_experts_per_tok"), ffn=fields["ffn"],
        num_shared=1, weights="all",
    )  # fmt: skip


def _deepseek(keys: Keys, fields: Fields) -> None:
    """DeepSeek-V2 and V3: latent attention and a mixture of experts."""
    fields["latent"] = Latent(
        kv_rank=keys.need("kv_lora_rank"), q_rank=keys.get("q_lora_rank"), nope_dim=keys.need("qk_nope_head_dim"),
        rope_dim=keys.need("qk_rope_head_dim"), value_dim=keys.need("v_head_dim"),
    )  # fmt: skip
    fields["experts"] = Experts(
        num_experts=keys.need("n_routed_experts"), top_k=keys.need("num_experts_per_tok"),
        ffn=keys.need("moe_intermediate_size"), num_shared=keys.get("n_shared_experts", 0),
        num_dense_layers=keys.get("first_k_dense_replace", 0),
        weights="chosen" if keys.get("norm_topk_prob") else "all",
    )  # fmt: skip
    given = keys.get("rope_parameters") or keys.get("rope_scaling", {})
    if given.get("rope_type", given.get("type")) == "yarn":
        # YaRN was put on after pre-training (arXiv 2412.19437, section 4.3): the model as it was pre-trained
        fields["seq"] = int(given.get("original_max_position_embeddings", fields["seq"]))


def _gpt_oss(keys: Keys, fields: Fields) -> None:
    _attention_biases(keys, fields)
    _mixtral(keys, fields)


def _gemma(keys: Keys, fields: Fields) -> None:
    _attention_biases(keys, fields)
    fields["scales.embedding"], fields["norm_offset"] = fields["hidden"] ** 0.5, 1.0
    scalar = keys.get("query_pre_attn_scalar")
    if scalar is not None and scalar != fields["head_dim"]:
        fields["scales.attention"] = scalar**-0.5


def _granite(keys: Keys, fields: Fields) -> None:
    _llama(keys, fields)
    fields["scales.logits"] = 1 / keys.get("logits_scaling", 1.0)


def _granite_moe(keys: Keys, fields: Fields) -> None:
    _granite(keys, fields)
    _mixtral(keys, fields)


def _gptj(keys: Keys, fields: Fields) -> None:
    fields["rope.fraction"] = keys.need("rotary_dim") * fields["num_heads"] / fields["hidden"]


def _opt(keys: Keys, fields: Fields) -> None:
    if (width := keys.get("word_embed_proj_dim", fields["hidden"])) != fields["hidden"]:
        raise keys.refuse("word_embed_proj_dim", f"{width} differs from hidden_size {fields['hidden']}",
                          "an embedding of the hidden size is modelled (all sizes of OPT but 350m)")  # fmt: skip
    _all_biases("enable_bias")(keys, fields)
    fields["norm"] = "layer" if keys.get("layer_norm_elementwise_affine") else "layer_no_weights"
    fields["norm_place"] = "before" if keys.get("do_layer_norm_before") else "sum"


def _falcon(keys: Keys, fields: Fields) -> None:
    _all_biases("bias")(keys, fields)
    num_heads, is_new = fields["num_heads"], bool(keys.get("new_decoder_architecture"))
    grouped, given = keys.get("multi_query"), keys.get("num_kv_heads") or keys.get("n_head_kv") or num_heads
    fields["num_kv_heads"] = given if is_new or not grouped else 1
    fields["parallel_residual"] = is_new or bool(keys.get("parallel_attn"))
    num_norms = keys.get("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if is_new and not keys.get("parallel_attn"):
        raise keys.refuse("parallel_attn", "is false in the new decoder architecture", "true is modelled there")
    fields["shared_norm"] = fields["parallel_residual"] and num_norms == 1
    fields["position"] = "alibi" if keys.get("alibi") else "rope"


def _phi(keys: Keys, fields: Fields) -> None:
    if keys.get("qk_layernorm", False):
        raise keys.refuse("qk_layernorm", "is true", "false is modelled")


_NEOX_LAYER = {"gated": False, "norm": "layer"}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        keys=_SIZES | {
            "norm_eps": "layer_norm_eps", "token_types": "type_vocab_size", "dropout": "hidden_dropout_prob",
            "attention_dropout": "attention_probs_dropout_prob",
        },
        defaults={
            "tie_word_embeddings": True, "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1, "type_vocab_size": 2, "hidden_act": "gelu",
        },
        fixed=_NEOX_LAYER | _BIASES | {
            "norm_place": "sum", "embedding_norm": True, "position": "learned", "causal": False, "head_bias": True,
            "head_transform": True,
        },
        only={"position_embedding_type": ("absolute",), "is_decoder": (False,)},
    ),
    "bloom": Family(
        keys={
            "num_layers": ("n_layer", "num_hidden_layers"), "hidden": ("hidden_size", "n_embed"),
            "num_heads": ("n_head", "num_attention_heads"), "vocab": "vocab_size", "seq": "seq_length",
            "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings", "dropout": "hidden_dropout",
            "attention_dropout": "attention_dropout",
        },
        defaults={
            "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            "seq_length": 2048,
        },
        fixed=_NEOX_LAYER | _BIASES | {"embedding_norm": True, "position": "alibi", "embedding_dropout": 0.0},
        activation="", only={"apply_residual_connection_post_layernorm": (False,)}, unused=("n_inner",),
    ),
    "cohere": Family(
        keys=_LLAMA | {"norm_eps": "layer_norm_eps", "scales.logits": "logit_scale"},
        defaults={"tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625},
        fixed=_PARALLEL | {"norm": "layer_no_bias", "rope.interleaved": True}, finish=_attention_biases,
        only={"use_qk_norm": (False,)},
    ),
    "cohere2": Family(
        keys=_LLAMA | {"norm_eps": "layer_norm_eps", "scales.logits": "logit_scale"},
        defaults={
            "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096
        },
        fixed=_PARALLEL | {"norm": "layer_no_bias", "rope.interleaved": True}, finish=_attention_biases,
        only={"use_qk_norm": (False,)},
        approximated={"sliding_window": _TURNED},
        unused=(
            "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct",
            "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding",
        ),
    ),
    "deepseek_v2": Family(
        keys=_DEEPSEEK, defaults=_UNTIED | {"norm_topk_prob": False}, finish=_deepseek,
        unused=("head_dim",),
        only={"attention_bias": (False,), "moe_layer_freq": (1,), "mlp_bias": (False,)},
    ),
    "deepseek_v3": Family(
        keys=_DEEPSEEK, defaults=_UNTIED | {"norm_topk_prob": True}, finish=_deepseek,
        unused=("head_dim", "rope_interleave"),
        only={"attention_bias": (False,), "moe_layer_freq": (1,)}, stored="fp8",
    ),
    "falcon": Family(
        keys={
            "num_layers": ("num_hidden_layers", "n_layer"), "hidden": "hidden_size",
            "num_heads": ("num_attention_heads", "n_head"), "ffn": "ffn_hidden_size", "vocab": "vocab_size",
            "seq": "max_position_embeddings", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
            "dropout": "hidden_dropout", "attention_dropout": "attention_dropout",
        },
        defaults={
            "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            "max_position_embeddings": 2048, "multi_query": True, "parallel_attn": True, "activation": "gelu",
        },
        fixed=_NEOX_LAYER | {"embedding_dropout": 0.0}, finish=_falcon, activation="activation",
        only={"apply_residual_connection_post_layernorm": (False,)},
    ),
    "gemma": Family(keys=_LLAMA, defaults=_TIED | {"head_dim": 256}, finish=_gemma, activation="hidden_activation"),
    "gemma2": Family(
        keys=_LLAMA | {"scales.logits_cap": "final_logit_softcapping"},
        defaults=_TIED | {
            "head_dim": 256, "query_pre_attn_scalar": 256, "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0, "sliding_window": 4096,
        },
        fixed={"norm_place": "around"}, finish=_gemma, activation="hidden_activation", approximated=_CAPPED,
    ),
    "gemma3_text": Family(
        keys=_LLAMA | {"scales.logits_cap": "final_logit_softcapping"},
        defaults=_TIED | {
            "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "num_attention_heads": 8,
            "num_key_value_heads": 4, "vocab_size": 262_208, "max_position_embeddings": 131_072,
            "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 1_000_000.0,
        },
        fixed={"norm_place": "around", "qk_norm": "head"}, finish=_gemma, activation="hidden_activation",
        approximated=_CAPPED | {"rope_local_base_freq": "all blocks use the angles of those without a window"},
    ),
    "gpt2": Family(
        keys=_OPENAI,
        defaults={
            "tie_word_embeddings": True, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
        },
        fixed=_NEOX_LAYER | _BIASES | {"position": "learned"}, activation="activation_function",
    ),
    "gpt_neox": Family(
        keys=_SIZES | {
            "norm_eps": "layer_norm_eps", "dropout": "hidden_dropout", "parallel_residual": "use_parallel_residual"
        },
        defaults={
            "tie_word_embeddings": False, "layer_norm_eps": 1e-5, "use_parallel_residual": True, "rotary_pct": 0.25,
            "attention_bias": True,
        },
        fixed=_NEOX_LAYER | {"mlp_bias": True}, finish=_attention_biases, rope=("rotary_emb_base", "rotary_pct"),
        unused=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    ),
    "gpt_oss": Family(
        keys=_LLAMA,
        defaults=_UNTIED | {
            "rms_norm_eps": 1e-5, "head_dim": 64, "attention_bias": True, "rope_theta": 150_000.0,
            "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
        },
        finish=_gpt_oss,
        approximated={
            "num_local_experts": "biases of experts and router and attention sinks are left out (0.03 % of parameters)",
            "swiglu_limit": "the limit and the factor of the experts' activation are left out",
            "swiglu_alpha": "the limit and the factor of the experts' activation are left out",
        },
        unused=("experts_per_token", "initial_context_length"), stored="mxfp4",
    ),
    "gptj": Family(
        keys=_OPENAI,
        defaults={
            "tie_word_embeddings": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "rotary_dim": 64,
        },
        fixed=_NEOX_LAYER | _PARALLEL | {"mlp_bias": True, "head_bias": True, "rope.interleaved": True}, finish=_gptj,
        activation="activation_function", only={"rotary": (True,)},
    ),
    "granite": Family(
        keys=_LLAMA | {
            "scales.embedding": "embedding_multiplier", "scales.residual": "residual_multiplier",
            "scales.attention": "attention_multiplier",
        },
        defaults=_UNTIED | {"attention_multiplier": 1.0}, finish=_granite,
    ),
    "granitemoe": Family(
        keys=_LLAMA | {
            "scales.embedding": "embedding_multiplier", "scales.residual": "residual_multiplier",
            "scales.attention": "attention_multiplier",
        },
        defaults=_UNTIED | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2},
        finish=_granite_moe,
    ),
    "llama": Family(keys=_LLAMA, defaults=_UNTIED, finish=_llama),
    "llama4_text": Family(
        keys=_LLAMA,
        defaults=_UNTIED | {
            "rms_norm_eps": 1e-5, "head_dim": 128, "num_experts_per_tok": 1, "num_local_experts": 16,
            "attention_chunk_size": 8192, "rope_theta": 500_000.0, "vocab_size": 202_048, "no_rope_layer_interval": 4,
        },
        fixed={"rope.interleaved": True}, finish=_llama4,
        approximated={
            "no_rope_layer_interval": _TURNED, "attn_temperature_tuning": "queries are not scaled by their position",
            "num_local_experts": "router weights are a softmax applied to the output of experts; this model "
            "applies sigmoids to their input",
        },
        unused=("intermediate_size_mlp", "no_rope_layers", "attn_scale", "floor_scale"),
    ),
    "mistral": Family(keys=_LLAMA, defaults=_UNTIED | {"sliding_window": 4096}),
    "mixtral": Family(
        keys=_LLAMA, defaults=_UNTIED | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2}, finish=_mixtral
    ),
    "olmo": Family(
        keys=_SIZES | {"num_kv_heads": "num_key_value_heads"}, defaults={"tie_word_embeddings": False},
        fixed={"norm": "layer_no_weights"}, finish=_attention_biases, only={"clip_qkv": ()},
    ),
    "olmo2": Family(
        keys=_LLAMA, defaults=_UNTIED | {"rms_norm_eps": 1e-5}, fixed={"norm_place": "after", "qk_norm": "row"},
        finish=_attention_biases,
    ),
    "olmo3": Family(
        keys=_LLAMA, defaults=_UNTIED | {"rms_norm_eps": 1e-5, "sliding_window": 4096},
        fixed={"norm_place": "after", "qk_norm": "row"}, finish=_attention_biases,
    ),
    "olmoe": Family(
        keys=_LLAMA, defaults=_UNTIED | {"rms_norm_eps": 1e-5}, fixed={"qk_norm": "row"}, finish=_olmoe,
        only={"clip_qkv": ()},
    ),
    "opt": Family(
        keys=_SIZES | {"ffn": "ffn_dim", "dropout": "dropout"},
        defaults={
            "tie_word_embeddings": True, "dropout": 0.1, "attention_dropout": 0.0, "enable_bias": True,
            "layer_norm_elementwise_affine": True, "do_layer_norm_before": True, "activation_function": "relu",
        },
        fixed={"gated": False, "position": "learned", "first_position": 2, "embedding_dropout": 0.0}, finish=_opt,
        activation="activation_function",
        only={"_remove_final_layer_norm": (False,), "layerdrop": (0,), "activation_dropout": (0,)},
    ),
    "phi": Family(
        keys=_LLAMA | {"norm_eps": "layer_norm_eps", "dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"},
        defaults={
            "tie_word_embeddings": False, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "hidden_act": "gelu_new",
        },
        fixed=_NEOX_LAYER | _BIASES | _PARALLEL | {"head_bias": True}, finish=_phi,
    ),
    "phi3": Family(
        keys=_LLAMA | {"dropout": "resid_pdrop", "embedding_dropout": "embd_pdrop"},
        defaults=_UNTIED | {"rms_norm_eps": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        only={"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,)},
        unused=("full_attn_mod", "interpolate_factor"),
    ),
    "qwen2": Family(keys=_LLAMA, defaults=_QWEN, fixed={"qkv_bias": True}),
    "qwen2_moe": Family(keys=_LLAMA, defaults=_QWEN | {"qkv_bias": True}, finish=_qwen_moe),
    "qwen3": Family(
        keys=_LLAMA, defaults=_QWEN | {"head_dim": 128}, fixed={"qk_norm": "head"}, finish=_attention_biases
    ),
    "qwen3_moe": Family(keys=_LLAMA, defaults=_QWEN, fixed={"qk_norm": "head"}, finish=_qwen_moe),
    "starcoder2": Family(
        keys=_LLAMA | {
            "norm_eps": "norm_epsilon", "dropout": "residual_dropout", "embedding_dropout": "embedding_dropout"
        },
        defaults={
            "tie_word_embeddings": True, "norm_epsilon": 1e-5, "residual_dropout": 0.0, "embedding_dropout": 0.0,
            "use_bias": True, "hidden_act": "gelu_pytorch_tanh",
        },
        fixed=_NEOX_LAYER, finish=_all_biases("use_bias"),
        only={"mlp_type": ("default",), "norm_type": ("layer_norm",)},
        unused=("activation_function", "layer_norm_epsilon"),
    ),
}  # fmt: skip
"""model_type -> its row."""

NESTED = {"gemma3": "gemma3_text", "llama4": "llama4_text"}
"""model_type of text and images -> that of its text model, which is under text_config."""

_MODULE = "plan the module itself, as package.module:function"

REFUSED = {
    "t5": f"encoder-decoder models (is_encoder_decoder) are not modelled; {_MODULE}",
    "vit": f"image patches (patch_size) instead of tokens are not modelled; {_MODULE}",
}  # fmt: skip
"""Properties of a model_type that `TransformerConfig` cannot express, and the way out."""
