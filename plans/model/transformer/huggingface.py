"""Reads a Hugging Face config.json.

Every key belongs to one of four groups. It sets a field of the configuration; it must have the one value that is
modelled; it affects no shape, cost or result of a training step and is ignored, with the reason given; or it describes
a part that the planned model leaves out, which is reported. All other keys are refused, because they may change the
architecture. `families` has the names of the keys in each family.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from plans.errors import TwofoldError
from plans.model.transformer.config import Rope, Scales, TransformerConfig
from plans.model.transformer.families import FAMILIES, NESTED, REFUSED, Family
from plans.reading import read_json

__all__ = ["NotModelled", "Reading", "read_config", "read_keys", "reading_of"]


class NotModelled(TwofoldError):
    """A complete model description that no `TransformerConfig` can express."""


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
            "cache_implementation", "unk_token_id", "mask_token_id", "num_logits_to_keep",
        ),
        _GENERATION,
    ),
    **dict.fromkeys(
        (
            "_name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset", "architectures",
            "auto_map", "transformers_version", "torchscript", "output_attentions", "output_hidden_states",
            "return_dict", "return_dict_in_generate", "output_scores", "chunk_size_feed_forward", "use_bfloat16",
            "tf_legacy_loss", "gradient_checkpointing", "pruned_heads", "keys_to_ignore_at_inference",
            "model_max_length", "unsloth_version", "unsloth_fixed", "output_router_logits", "ep_size",
            "base_model_tp_plan", "pretraining_tp",
            "base_model_pp_plan", "base_model_ep_plan", "gradient_checkpointing_kwargs", "for_llm_compressor",
            "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "masked_softmax_fusion", "slow_but_exact",
            "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion", "offset_alibi", "_num_labels",
            "qk_head_dim", "is_llama_config", "rope_interleaved", "original_max_position_embeddings",
        ),
        _LIBRARY,
    ),
    **dict.fromkeys(("initializer_range", "initializer_factor", "embedding_initializer_range", "init_std"), _INITIAL),
    **dict.fromkeys(
        (
            "task_specific_params", "finetuning_task", "id2label", "label2id", "problem_type", "num_labels",
            "classifier_dropout", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            "summary_type", "summary_use_proj", "classifier_activation", "directionality", "pooler_fc_size",
            "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
        ),
        _FINE_TUNING,
    ),
}  # fmt: skip
"""Key -> why it is ignored."""

_AUXILIARY = "the auxiliary loss of the router is left out"
_ANGLES = "angles are not scaled by it; sizes and costs do not depend on them"

_LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("router_aux_loss_coef", "aux_loss_alpha", "seq_aux"), _AUXILIARY),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), "the noise of the router is left out"),
    **dict.fromkeys(("n_group", "topk_group", "topk_method"), "tokens choose among all experts, not among groups"),
    **dict.fromkeys(
        ("scoring_func", "routed_scaling_factor"), "router weights are a softmax, without a factor"
    ),
    "num_nextn_predict_layers": "multi-token prediction is left out",
    **dict.fromkeys(
        ("vision_config", "audio_config", "image_token_index", "boi_token_index", "eoi_token_index", "eoi_token_id",
         "mm_tokens_per_image", "image_token_id", "boi_token_id"), "only the text model is planned"
    ),
}  # fmt: skip
"""Key -> the part that the planned model leaves out if the key is neither null, 0 nor 1."""

_ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,), "is_decoder": (True, False),
    "is_encoder_decoder": (False,), "tie_encoder_decoder": (False,), "cross_attention_hidden_size": (None,),
    "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "reorder_and_upcast_attn": (False,),
    "quantization_config": (None,), "use_mrope": (False,), "use_bidirectional_attention": (False,),
}  # fmt: skip
"""Key -> the values that are modelled, in addition to null."""

_ROPE_SCALINGS = ("linear", "llama3")

_WINDOWS = ("sliding_window", "attention_chunk_size")

_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval")
"""Keys with the number of consecutive blocks of which the last has no window."""

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu": "relu",
    # the tanh form of gelu costs what gelu costs; its values differ by less than 5e-4
    "gelu": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The content of a config.json.

    Args:
        config: of the model.
        ignored: key -> why it changes nothing.
        left_out: key -> in what the planned model differs.
    """

    config: TransformerConfig
    ignored: Mapping[str, str]
    left_out: Mapping[str, str]

    def remarks(self) -> tuple[str, ...]:
        """In sentences: parts that the planned model leaves out, and ignored keys."""
        keys_by_reason: dict[str, list[str]] = {}
        for key, why in self.left_out.items():
            keys_by_reason.setdefault(why, []).append(key)
        remarks_by_reason = [f"{', '.join(keys)}: {why}" for why, keys in keys_by_reason.items()]
        if self.config.experts is not None:
            remarks_by_reason.append(
                f"experts: each has places for {self.config.experts.capacity_factor:g} times an even share of the "
                f"tokens, where transformers computes every token and no empty place"
            )
        if self.ignored:
            remarks_by_reason.append(f"keys that change neither sizes nor costs: {', '.join(sorted(self.ignored))}")
        return tuple(remarks_by_reason)


def read_config(path: str | os.PathLike[str], *, seq: int | None = None) -> Reading:
    """Read a config.json, or the one in a folder.

    Args:
        path: path of the file or its folder.
        seq: tokens of a sample, where not the longest that the model can read: a window of attention that hides none
            of them changes nothing.

    Raises:
        NotModelled: a family that is not known, a key or value that is not modelled.
        TwofoldError: no such file, no JSON object, a value that a key cannot have.
    """
    file, keys = read_keys(path)
    name = keys.get("_name_or_path") or (file.parent.name if file.name == "config.json" else file.stem)
    try:
        return reading_of(keys, str(name) or "transformer", seq=seq)
    except TwofoldError as error:
        raise type(error)(f"{file}: {error}") from None


def read_keys(path: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The file and the keys of a config.json, or of the one in a folder.

    Raises:
        TwofoldError: no such file, no JSON object.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.exists() and file.suffix != ".json":
        raise TwofoldError(f"no file or folder {str(path)!r}; download the config.json of the model and give its path")
    keys = read_json(file, "the model configuration")
    if not isinstance(keys, dict):
        raise TwofoldError(f"{file}: a model configuration must be a JSON object, not {type(keys).__name__}")
    return file, keys


def reading_of(keys: Mapping[str, Any], name: str = "transformer", *, seq: int | None = None) -> Reading:
    """Interpret the keys of a config.json.

    Raises:
        TwofoldError: as `read_config`.

    >>> keys = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    ...         "vocab_size": 50257, "use_cache": True}
    >>> found = reading_of(keys)
    >>> found.config.num_parameters, found.remarks()
    (124439808, ('keys that change neither sizes nor costs: use_cache',))
    """
    model_type = keys.get("model_type")
    if not isinstance(model_type, str | None):
        raise TwofoldError(f"model_type must be a name such as 'llama', not {str(model_type)[:80]}")
    if model_type in REFUSED:
        raise NotModelled(f"{model_type}: {REFUSED[model_type]}")
    if model_type in NESTED:
        inner = keys.get("text_config")
        if not isinstance(inner, dict):
            raise TwofoldError(f"model_type {model_type!r} needs the key 'text_config', an object")
        keys = {key: value for key, value in keys.items() if key != "text_config"} | inner
        model_type = NESTED[model_type]
    if model_type not in FAMILIES:
        raise NotModelled(f"model_type {model_type!r} is not known; known: {', '.join(sorted((*FAMILIES, *NESTED)))}")
    family = FAMILIES[model_type]
    reader = _Reader(model_type, family, keys)
    reader.check_values()
    try:
        config = reader.config(name, seq)
    except TwofoldError:
        raise
    except (
        TypeError,
        ValueError,
        AttributeError,
        KeyError,
        ArithmeticError,
    ) as error:  # what JSON holds may be anything
        reason = str(error)[:200]
        raise TwofoldError(f"{model_type}: a key has a value that it cannot have ({reason})") from None
    return Reading(config=config, ignored=reader.ignored(), left_out=reader.left_out())


class _Reader:
    """Reads the keys of one file and records which were read."""

    def __init__(self, model_type: str, family: Family, keys: Mapping[str, Any]) -> None:
        self.model_type, self.family, self.given = model_type, family, keys
        self.keys = {**family.defaults, **{key: value for key, value in keys.items() if value is not None}}
        self.keys = {key: value for key, value in self.keys.items() if key not in keys or keys[key] is not None}
        self.used: set[str] = {"model_type"}
        self.notes: dict[str, str] = {}

    def get(self, name: str, default: Any = None) -> Any:
        """See `families.Keys`."""
        self.used.add(name)
        return self.keys.get(name, default)

    def need(self, name: str) -> Any:
        """See `families.Keys`."""
        value = self.get(name)
        if value is None:
            raise TwofoldError(f"model_type {self.model_type!r} needs the key {name!r}")
        return value

    def refuse(self, key: str, why: str, way: str) -> TwofoldError:
        """See `families.Keys`."""
        return NotModelled(f"{self.model_type}: {key} {why}, which is not modelled; {way}")

    def check_values(self) -> None:
        """Refuse values of keys that must have another one."""
        for key, allowed in (_ONE_VALUE | dict(self.family.only)).items():
            if key in self.keys and self.keys[key] not in allowed and not self._says_how_stored(key):
                way = f"it may be {' or '.join(map(repr, allowed))}" if allowed else "it may be null"
                raise self.refuse(key, f"is {self.keys[key]!r}", way)
            self.used.add(key)

    def _says_how_stored(self, key: str) -> bool:
        """Whether the key describes how published weights are stored, which does not affect training."""
        value, stored = self.keys[key], self.family.stored
        is_stated = key == "quantization_config" and isinstance(value, dict) and bool(stored)
        return is_stated and value.get("quant_method") == stored

    def config(self, name: str, seq: int | None) -> TransformerConfig:
        """The configuration, from all fields."""
        fields: dict[str, Any] = {"gated": True} | dict(self.family.fixed)
        for field, keys in self.family.keys.items():
            value = self._first((keys,) if isinstance(keys, str) else keys, needed=field in _NEEDED)
            if value is not None:
                fields[field] = value
        if self.family.activation:
            fields["activation"] = self._activation(fields["gated"])
        if self.family.finish is not None:
            self.family.finish(self, fields)
        if seq is not None and fields.get("position") != "learned":
            fields["seq"] = seq
        self._note_windows(fields)
        self.used |= {"rope_parameters", "rope_scaling", "rope_theta"}
        if fields.get("position", "rope") == "rope":
            fields["rope"] = self._rope(fields)
        scales = {field: fields.pop(f"scales.{field}") for field in Scales.__slots__ if f"scales.{field}" in fields}
        fields = {field: value for field, value in fields.items() if not field.startswith("rope.")}
        dtype = str(self._first(("dtype", "torch_dtype"), needed=False) or "bfloat16").removeprefix("torch.")
        fields |= {"name": name, "dtype": dtype, "scales": Scales(**scales), "source": "config.json"}
        made = msgspec.convert(fields, TransformerConfig, from_attributes=True)  # which checks the types
        self._check_all_read()
        return made

    def _first(self, names: tuple[str, ...], *, needed: bool) -> Any:
        """The first of these keys that exists."""
        self.used.update(names)
        for name in names:
            if name in self.keys:
                return self.keys[name]
        return self.need(names[0]) if needed else None

    def _activation(self, gated: bool) -> str:
        key = self.family.activation
        found = self.get(key) or self.get("hidden_act") or ("silu" if gated else "gelu")
        self.used.add("hidden_act")
        if found not in _ACTIVATIONS:
            raise self.refuse(key, f"is {found!r}", f"it may be {' or '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[found]

    def _rope(self, fields: Mapping[str, Any]) -> Rope:
        base_key, fraction_key = self.family.rope
        given = dict(self.get("rope_parameters") or self.get("rope_scaling") or {})
        if "full_attention" in given:  # one set of angles for each kind of layer
            self.notes["rope_parameters"] = "all blocks use the angles of those without a window"
            given = dict(given["full_attention"] or {})
        kind = given.get("rope_type", given.get("type", "default"))
        base = float(given.get("rope_theta", self._first((base_key, "rope_theta"), needed=False) or 10_000.0))
        fraction = given.get("partial_rotary_factor", self._first((fraction_key,), needed=False))
        fraction = float(fields.get("rope.fraction", 1.0 if fraction is None else fraction))
        rope = {"base": base, "fraction": fraction, "interleaved": fields.get("rope.interleaved", False)}
        if kind not in _ROPE_SCALINGS:
            if kind != "default":
                self.notes["rope_scaling" if "rope_scaling" in self.given else "rope_parameters"] = f"{kind} {_ANGLES}"
            return Rope(**rope)
        return Rope(
            **rope, scaling=kind, factor=float(given.get("factor", 1.0)),
            low_factor=float(given.get("low_freq_factor", 1.0)), high_factor=float(given.get("high_freq_factor", 4.0)),
            original_seq=int(given.get("original_max_position_embeddings", fields["seq"])),
        )  # fmt: skip

    def _note_windows(self, fields: Mapping[str, Any]) -> None:
        """Windows of attention, where they hide tokens of a sample: here every block attends to all of them."""
        used = self.get("use_sliding_window", True)
        kinds = list(self.get("layer_types") or ())
        if unknown := set(kinds) - {"full_attention", "sliding_attention", "chunked_attention"}:
            raise self.refuse(
                "layer_types", f"has {', '.join(sorted(unknown))}", "attention may be full or have a window"
            )
        everywhere = self.get("max_window_layers", 0) if "use_sliding_window" in self.keys else 0
        self.used |= {"sliding_window_pattern", "_sliding_window_pattern"}
        pattern = next((each for name in _PATTERNS if (each := self.keys.get(name))), None)
        num_layers = fields["num_layers"]
        if kinds:
            narrow = sum(kind != "full_attention" for kind in kinds)
        else:  # every `pattern`-th block attends to all tokens
            narrow = num_layers - everywhere - (num_layers // pattern if pattern else 0)
        for key in _WINDOWS:
            window = self.get(key)
            if window and used and narrow > 0 and window < fields["seq"]:
                self.notes[key] = (
                    f"{narrow} of {num_layers} blocks attend to {window} tokens; the plan lets them attend to all "
                    f"{fields['seq']} of a sample, which takes longer"
                )

    def _check_all_read(self) -> None:
        known = {*self.used, *_IGNORED, *_LEFT_OUT, *self.family.approximated, *self.family.unused}
        if unknown := sorted(set(self.given) - known):
            raise NotModelled(
                f"the keys {', '.join(unknown)} of model_type {self.model_type!r} are unknown and may change the "
                "architecture; remove them from the file if they do not"
            )

    def ignored(self) -> dict[str, str]:
        """See `Reading`."""
        ignored = _IGNORED | dict.fromkeys(self.family.unused, _LIBRARY)
        return {key: ignored[key] for key in self.given if key in ignored and key not in self.used}

    def left_out(self) -> dict[str, str]:
        """See `Reading`."""
        own = {key: why for key, why in self.family.approximated.items() if self.keys.get(key) not in (None, False)}
        general = {
            key: why for key, why in _LEFT_OUT.items()
            if key in self.keys and key not in self.used and self.keys[key] not in (None, False, 0, 1)
        }  # fmt: skip
        return own | self.notes | general


_NEEDED = frozenset({"num_layers", "hidden", "num_heads", "vocab", "seq"})
