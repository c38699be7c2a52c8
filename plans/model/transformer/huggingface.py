"""Reading a Hugging Face config.json.

Every key is one of three things: it says something that the configuration says too; it must have the one value that is
modelled; or it changes no shape, no cost and no result of a training step, and is ignored for a stated reason. A key
that is none of these is refused, since it may change the architecture.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plans.errors import TwofoldError
from plans.model.transformer.config import Experts, Latent, Rope, TransformerConfig

__all__ = ["FAMILIES", "config_from_dict", "ignored_keys", "read_config"]

Keys = Mapping[str, Any]

_GENERATION = "concerns the generation of text"
_LIBRARY = "concerns the library, not the model"
_INITIAL = "concerns initial values"
_FINE_TUNING = "concerns heads for other tasks"

_IGNORED: dict[str, str] = {
    **dict.fromkeys(
        (
            "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "use_cache",
            "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
            "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "diversity_penalty",
            "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens",
            "begin_suppress_tokens", "exponential_decay_length_penalty", "tokenizer_class", "prefix",
            "cache_implementation",
        ),
        _GENERATION,
    ),
    **dict.fromkeys(
        (
            "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "architectures",
            "auto_map", "transformers_version", "torchscript", "output_attentions", "output_hidden_states",
            "return_dict", "return_dict_in_generate", "output_scores", "chunk_size_feed_forward", "use_bfloat16",
            "tf_legacy_loss", "gradient_checkpointing", "pruned_heads", "keys_to_ignore_at_inference",
            "model_max_length", "unsloth_version", "unsloth_fixed", "output_router_logits",
        ),
        _LIBRARY,
    ),
    **dict.fromkeys(("initializer_range", "initializer_factor", "embedding_initializer_range"), _INITIAL),
    **dict.fromkeys(
        (
            "task_specific_params", "finetuning_task", "id2label", "label2id", "problem_type", "num_labels",
            "classifier_dropout", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            "summary_type", "summary_use_proj",
        ),
        _FINE_TUNING,
    ),
    "router_aux_loss_coef": "the auxiliary loss of the router is not modelled",
    "max_window_layers": "counts only with use_sliding_window, which must be false",
    "router_jitter_noise": "noise of the router is not modelled",
    **dict.fromkeys(("aux_loss_alpha", "seq_aux"), "the auxiliary loss of the router is not modelled"),
    **dict.fromkeys(
        ("n_group", "topk_group", "topk_method"), "routing limited to groups of experts is not modelled"
    ),
    **dict.fromkeys(
        ("scoring_func", "routed_scaling_factor"), "a router's weights are modelled as a softmax, without a factor"
    ),
    "num_nextn_predict_layers": "multi-token prediction is not modelled",
    "ep_size": _LIBRARY,
}  # fmt: skip
"""Key -> why it is ignored."""

_ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (1,), "use_sliding_window": (False,), "add_cross_attention": (False,),
    "is_decoder": (True, False), "is_encoder_decoder": (False,), "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,), "layer_types": (None,),
    "quantization_config": (None,), "attention_multiplier": (None, 1), "parallel_attn": (None,),
}  # fmt: skip
"""Key -> the values that are modelled."""


_BY_FAMILY = {("deepseek_v3", "quantization_config")}
"""(model_type, key) that the family's reader judges."""


def read_config(path: str | os.PathLike[str]) -> TransformerConfig:
    """The configuration in a config.json, or in the folder that holds one.

    Raises:
        TwofoldError: no such file, no JSON object, a family that is not known, a key or value that is not modelled.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        keys = json.loads(file.read_text())
    except OSError as error:
        raise TwofoldError(f"cannot read the model configuration {os.fspath(file)!r}: {error.strerror}") from None
    except ValueError as error:
        raise TwofoldError(f"{file}: not JSON ({error})") from None
    if not isinstance(keys, dict):
        raise TwofoldError(f"{file}: a model configuration is a JSON object, not {type(keys).__name__}")
    name = keys.get("_name_or_path") or (file.parent.name if file.name == "config.json" else file.stem)
    try:
        return config_from_dict(keys, str(name) or "transformer")
    except TwofoldError as error:
        raise TwofoldError(f"{file}: {error}") from None


def ignored_keys(keys: Keys) -> dict[str, str]:
    """The keys of a configuration that are ignored, with the reason.

    >>> ignored_keys({"model_type": "llama", "use_cache": True})
    {'use_cache': 'concerns the generation of text'}
    """
    return {key: _IGNORED[key] for key in keys if key in _IGNORED}


def config_from_dict(keys: Keys, name: str = "transformer") -> TransformerConfig:
    """The configuration described by the keys of a config.json.

    Raises:
        TwofoldError: as `read_config`.

    >>> keys = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    ...         "vocab_size": 50257, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    >>> config_from_dict(keys).num_parameters
    124439808
    """
    family = keys.get("model_type")
    if family not in FAMILIES:
        raise TwofoldError(f"model_type {family!r} is not known; known: {', '.join(sorted(FAMILIES))}")
    for key, allowed in _ONE_VALUE.items():
        if key in keys and keys[key] not in allowed and (family, key) not in _BY_FAMILY:
            raise TwofoldError(f"{key} {keys[key]!r} is not modelled; it may be {' or '.join(map(repr, allowed))}")
    reader = _Reader(family, keys)
    config = FAMILIES[family](reader, name)
    known = reader.read | _IGNORED.keys() | _ONE_VALUE.keys() | {"model_type"}
    if unknown := sorted(set(keys) - known):
        raise TwofoldError(
            f"the keys {', '.join(unknown)} of model_type {family!r} are not known and may change the architecture; "
            "take them out of the file if they do not"
        )
    return config


class _Reader:
    """Reads keys of a config.json and records which were read."""

    def __init__(self, family: str, keys: Keys) -> None:
        self.family, self.keys, self.read = family, keys, set[str]()

    def need(self, *names: str) -> Any:
        """The first of these keys that is there."""
        self.read.update(names)
        for name in names:
            if self.keys.get(name) is not None:
                return self.keys[name]
        raise TwofoldError(f"model_type {self.family!r} needs the key {names[0]!r}")

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        value = self.keys.get(name)
        return default if value is None else value

    def dtype(self) -> str:
        found = str(self.get("dtype", self.get("torch_dtype", "bfloat16"))).removeprefix("torch.")
        return found

    def activation(self, name: str, *, gated: bool) -> None:
        found = self.get(name, "silu" if gated else "gelu")
        # the tanh form of gelu costs what gelu costs; its values differ by less than 5e-4
        known = ("silu", "swish") if gated else ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
        if found not in known:
            raise TwofoldError(f"{name} {found!r} is not modelled; it may be {' or '.join(known)}")

    def rope(self, base_key: str, fraction: float, seq: int) -> Rope:
        given = dict(self.get("rope_parameters", {})) or dict(self.get("rope_scaling", {}))
        self.read |= {"rope_parameters", "rope_scaling"}
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        base = float(given.pop("rope_theta", self.get(base_key, 10_000.0)))
        fraction = float(given.pop("partial_rotary_factor", fraction))
        if kind == "default":
            return Rope(base=base, fraction=fraction)
        if kind not in ("linear", "llama3"):
            raise TwofoldError(f"rope scaling {kind!r} is not modelled; default, linear and llama3 are")
        return Rope(
            base=base, fraction=fraction, scaling=kind, factor=float(given.pop("factor", 1.0)),
            low_factor=float(given.pop("low_freq_factor", 1.0)), high_factor=float(given.pop("high_freq_factor", 4.0)),
            original_seq=int(given.pop("original_max_position_embeddings", seq)),
        )  # fmt: skip


def _llama_like(reader: _Reader, name: str, **rest: Any) -> TransformerConfig:
    """Llama and models derived from it: RMS norm, RoPE, a gated MLP."""
    reader.activation("hidden_act", gated=True)
    seq, num_heads = int(reader.need("max_position_embeddings")), int(reader.need("num_attention_heads"))
    window = reader.get("sliding_window")
    if window is not None and window < seq and reader.keys.get("use_sliding_window", True):
        raise TwofoldError(
            f"sliding_window {window} below max_position_embeddings {seq} is not modelled; with "
            f"max_position_embeddings at most {window} it changes nothing"
        )
    return TransformerConfig(
        name=name, num_layers=reader.need("num_hidden_layers"), hidden=reader.need("hidden_size"), num_heads=num_heads,
        num_kv_heads=reader.get("num_key_value_heads", num_heads), head_dim=reader.get("head_dim"),
        ffn=reader.need("intermediate_size"), vocab=reader.need("vocab_size"), seq=seq,
        norm_eps=reader.get("rms_norm_eps", 1e-6), tied=reader.get("tie_word_embeddings", False),
        rope=reader.rope("rope_theta", 1.0, seq), attention_dropout=reader.get("attention_dropout", 0.0),
        dtype=reader.dtype(), source="config.json", **rest,
    )  # fmt: skip


def _llama(reader: _Reader, name: str) -> TransformerConfig:
    bias = bool(reader.get("attention_bias", False))
    return _llama_like(reader, name, qkv_bias=bias, out_bias=bias, mlp_bias=bool(reader.get("mlp_bias", False)))


def _qwen2(reader: _Reader, name: str) -> TransformerConfig:
    return _llama_like(reader, name, qkv_bias=True)


def _mixtral(reader: _Reader, name: str) -> TransformerConfig:
    experts = Experts(
        num_experts=reader.need("num_local_experts"), top_k=reader.get("num_experts_per_tok", 2),
        ffn=reader.need("intermediate_size"),
    )  # fmt: skip
    return _llama_like(reader, name, experts=experts)


def _deepseek(reader: _Reader, name: str) -> TransformerConfig:
    """DeepSeek-V2 and V3: latent attention and a mixture of experts."""
    reader.activation("hidden_act", gated=True)
    for key, modelled in (("attention_bias", False), ("moe_layer_freq", 1)):
        if (found := reader.get(key, modelled)) != modelled:
            raise TwofoldError(f"{key} {found!r} is not modelled; it may be {modelled!r}")
    stored = reader.get("quantization_config", {})
    if stored and stored.get("quant_method") != "fp8":  # the published weights are stored so; the model is not
        raise TwofoldError(f"quantization_config {stored!r} is not modelled; it may be null, or fp8")
    seq, scaling = int(reader.need("max_position_embeddings")), dict(reader.get("rope_scaling", {}))
    if scaling.get("rope_type", scaling.get("type")) == "yarn":
        # YaRN was put on after pre-training (arXiv 2412.19437, section 4.3): the model as it was pre-trained
        seq = int(scaling.get("original_max_position_embeddings", seq))
        rope = Rope(base=float(reader.get("rope_theta", 10_000.0)))
    else:
        rope = reader.rope("rope_theta", 1.0, seq)
    latent = Latent(
        kv_rank=reader.need("kv_lora_rank"), q_rank=reader.get("q_lora_rank"), nope_dim=reader.need("qk_nope_head_dim"),
        rope_dim=reader.need("qk_rope_head_dim"), value_dim=reader.need("v_head_dim"),
    )  # fmt: skip
    chosen = bool(reader.get("norm_topk_prob", reader.family == "deepseek_v3"))
    experts = Experts(
        num_experts=reader.need("n_routed_experts"), top_k=reader.need("num_experts_per_tok"),
        ffn=reader.need("moe_intermediate_size"), num_shared=reader.get("n_shared_experts", 0),
        num_dense_layers=reader.get("first_k_dense_replace", 0), weights="chosen" if chosen else "all",
    )  # fmt: skip
    return TransformerConfig(
        name=name, num_layers=reader.need("num_hidden_layers"), hidden=reader.need("hidden_size"),
        num_heads=reader.need("num_attention_heads"), num_kv_heads=reader.get("num_key_value_heads"),
        ffn=reader.need("intermediate_size"), vocab=reader.need("vocab_size"), seq=seq,
        norm_eps=reader.get("rms_norm_eps", 1e-6), tied=reader.get("tie_word_embeddings", False), rope=rope,
        attention_dropout=reader.get("attention_dropout", 0.0), dtype=reader.dtype(), experts=experts, latent=latent,
        source="config.json",
    )  # fmt: skip


def _gpt2(reader: _Reader, name: str) -> TransformerConfig:
    reader.activation("activation_function", gated=False)
    hidden, seq = reader.need("n_embd"), reader.need("n_positions", "n_ctx")
    dropouts = {reader.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
    if len(dropouts) > 1:
        raise TwofoldError(f"resid_pdrop and embd_pdrop differ ({sorted(dropouts)}); one probability is modelled")
    return TransformerConfig(
        name=name, num_layers=reader.need("n_layer"), hidden=hidden, num_heads=reader.need("n_head"),
        ffn=reader.get("n_inner", 4 * hidden), vocab=reader.need("vocab_size"), seq=seq, gated=False, norm="layer",
        norm_eps=reader.get("layer_norm_epsilon", 1e-5), qkv_bias=True, out_bias=True, mlp_bias=True,
        tied=reader.get("tie_word_embeddings", True), position="learned", dropout=dropouts.pop(),
        attention_dropout=reader.get("attn_pdrop", 0.1), dtype=reader.dtype(), source="config.json",
    )  # fmt: skip


def _gpt_neox(reader: _Reader, name: str) -> TransformerConfig:
    reader.activation("hidden_act", gated=False)
    seq, bias = reader.need("max_position_embeddings"), bool(reader.get("attention_bias", True))
    base_key = "rotary_emb_base" if "rotary_emb_base" in reader.keys else "rope_theta"
    return TransformerConfig(
        name=name, num_layers=reader.need("num_hidden_layers"), hidden=reader.need("hidden_size"),
        num_heads=reader.need("num_attention_heads"), ffn=reader.need("intermediate_size"),
        vocab=reader.need("vocab_size"), seq=seq, gated=False, norm="layer",
        norm_eps=reader.get("layer_norm_eps", 1e-5), qkv_bias=bias, out_bias=bias, mlp_bias=True,
        tied=reader.get("tie_word_embeddings", False),
        rope=reader.rope(base_key, reader.get("rotary_pct", 0.25), seq),
        parallel_residual=reader.get("use_parallel_residual", True), dropout=reader.get("hidden_dropout", 0.0),
        attention_dropout=reader.get("attention_dropout", 0.0), dtype=reader.dtype(), source="config.json",
    )  # fmt: skip


FAMILIES: dict[str, Callable[[_Reader, str], TransformerConfig]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama_like,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
}
"""model_type -> its reader."""
