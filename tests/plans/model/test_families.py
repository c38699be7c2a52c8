"""config.json of each family, as published and as transformers 5 saves it.

The oracle is `data/configs/counted.json`: the parameters of the models that transformers itself builds from the files.
"""

import json
import random

import pytest

from benchmarks.simulator.one_world import Score, check, draw_case
from plans.errors import TwofoldError
from plans.model.transformer import (
    Rope,
    Scales,
    TransformerConfig,
    config_remarks,
    sizes_of,
    transformer,
    transformer_config,
)
from plans.model.transformer.families import FAMILIES, NESTED, REFUSED
from plans.model.transformer.huggingface import reading_of
from tests import DATA
from twofold.cli import main

FOLDER = DATA / "configs"
COUNTED = json.loads((FOLDER / "counted.json").read_text())["models"]
TOO_MUCH = {
    "opt-350m": "opt: word_embed_proj_dim 512 differs from hidden_size 1024, which is not modelled",
    "t5-base": "t5: encoder-decoder models .* plan the module itself",
    "vit-base-patch16-224": "vit: image patches .* plan the module itself",
}
MODELLED = sorted(COUNTED.keys() - TOO_MUCH)
# of 24 blocks: biases of 32 experts (two inner rows and one outer), of the router, and a sink for each of 64 heads
LEFT_OUT = {"gpt-oss-20b": 24 * (32 * (2 * 2880 + 2880) + 32 + 64)}


def keys_of(name, form):
    return COUNTED[name]["saved"] if form == "saved" else json.loads((FOLDER / f"{name}.json").read_text())


def test_every_family_has_a_file():
    families = {keys_of(name, "published")["model_type"] for name in COUNTED}
    text_only = {NESTED.get(each, each) for each in families} | {"llama4_text", "gemma3_text"}
    assert FAMILIES.keys() | REFUSED.keys() == text_only
    assert len(FAMILIES) >= 30 and len(families & FAMILIES.keys() | families & NESTED.keys()) >= 25


@pytest.mark.parametrize("form", ["published", "saved"])
@pytest.mark.parametrize("name", MODELLED)
def test_the_number_of_parameters_is_that_of_transformers(name, form):
    config = reading_of(keys_of(name, form), name, seq=64).config
    assert config.num_parameters == COUNTED[name]["parameters"] - LEFT_OUT.get(name, 0)
    few = transformer(config, num_layers=2, seq=64)
    assert sum(each.num_elements for each in few.parameters) == transformer_config(config, num_layers=2).num_parameters
    assert sizes_of(few).hidden == config.hidden


@pytest.mark.parametrize("form", ["published", "saved"])
@pytest.mark.parametrize("name", TOO_MUCH)
def test_inexpressible_configurations_are_refused_with_a_way_out(name, form):
    with pytest.raises(TwofoldError, match=TOO_MUCH[name]):
        reading_of(keys_of(name, form))


def test_both_forms_are_equivalent():
    for name in MODELLED:
        published, saved = (reading_of(keys_of(name, form), "m", seq=64).config for form in ("published", "saved"))
        for field in TransformerConfig.__slots__:
            assert getattr(published, field) == getattr(saved, field), (name, field)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("bert-base-uncased", {"norm_place": "sum", "causal": False, "token_types": 2, "head_transform": True}),
        ("command-r", {"norm": "layer_no_bias", "shared_norm": True, "scales": Scales(logits=0.0625)}),
        ("falcon-7b", {"num_kv_heads": 1, "parallel_residual": True, "shared_norm": True, "ffn": 18176}),
        ("falcon-40b", {"num_kv_heads": 8, "parallel_residual": True, "shared_norm": False}),
        ("falcon-rw-1b", {"num_kv_heads": 32, "parallel_residual": False, "position": "alibi", "mlp_bias": True}),
        ("gemma-2-2b", {"norm_place": "around", "scales": Scales(embedding=48.0, logits_cap=30.0), "head_dim": 256}),
        ("gpt-j-6b", {"rotary_dim": 64, "shared_norm": True, "head_bias": True, "qkv_bias": False}),
        ("granite-3.0-8b", {
            "scales": Scales(embedding=12.0, attention=0.0078125, residual=0.22, logits=1 / 16),
            "attention_dropout": 0.1,
        }),
        ("llama-4-scout", {"qk_norm": "head_no_weights", "num_kv_heads": 8}),
        ("olmo-2-7b", {"norm_place": "after", "qk_norm": "row"}),
        ("opt-6.7b", {"first_position": 2, "position_rows": 2050, "activation": "relu", "embedding_dropout": 0.0}),
        ("phi-2", {"rotary_dim": 32, "dropout": 0.1, "embedding_dropout": 0.0, "tied": False}),
        ("qwen3-8b", {"qk_norm": "head", "qkv_bias": False}),
    ],
)  # fmt: skip
def test_structure_of_a_family(name, fields):
    config = reading_of(keys_of(name, "published"), name, seq=1024).config
    assert {field: getattr(config, field) for field in fields} == fields


@pytest.mark.parametrize(
    ("name", "key", "window", "narrow"),
    [
        ("mistral-7b-v0.1", "sliding_window", 4096, "32 of 32"), ("gemma-3-1b", "sliding_window", 512, "22 of 26"),
        ("phi-3-mini-4k", "sliding_window", 2047, "32 of 32"), ("gpt-oss-20b", "sliding_window", 128, "12 of 24"),
        ("llama-4-scout", "attention_chunk_size", 8192, "36 of 48"),
    ],
)  # fmt: skip
def test_a_window_that_hides_tokens_is_reported_as_left_out(name, key, window, narrow):
    path = FOLDER / f"{name}.json"
    assert not any(remark.startswith(key) for remark in config_remarks(path, seq=window))
    (said,) = [remark for remark in config_remarks(path, seq=window + 1) if remark.startswith(key)]
    assert said == (
        f"{key}: {narrow} blocks attend to {window} tokens; the plan lets them attend to all {window + 1} of a "
        "sample, which "
        "takes longer"
    )


def test_windows_that_are_off_are_not_mentioned():
    def said(**changes):
        return "sliding_window" in reading_of(keys_of("qwen2-7b", "published") | changes, seq=8192).left_out

    on = {"sliding_window": 4096, "use_sliding_window": True}
    assert not said(sliding_window=4096)
    assert said(**on, max_window_layers=0) and said(**on, max_window_layers=27)
    assert not said(**on, max_window_layers=28)
    assert not said(**on, layer_types=["full_attention"] * 28)


def test_weights_that_are_published_in_few_bits_are_trained_as_they_are():
    keys = keys_of("gpt-oss-20b", "published")
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    assert reading_of(keys | {"quantization_config": stored}, seq=64).config == reading_of(keys, seq=64).config
    with pytest.raises(TwofoldError, match=r"quantization_config is .*, which is not modelled"):
        reading_of(keys | {"quantization_config": {"quant_method": "fp8"}}, seq=64)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen1.5-moe-a2.7b", {"decoder_sparse_step": 2}, "qwen2_moe: decoder_sparse_step is 2: .* alternate"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [3]}, "qwen3_moe: mlp_only_layers is .3.: .* not the first ones"),
        ("qwen1.5-moe-a2.7b", {"shared_expert_intermediate_size": 1000}, "no multiple of moe_intermediate_size 1408"),
        ("llama-4-scout", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2"),
        ("command-r", {"use_qk_norm": True}, "cohere: use_qk_norm is True, which is not modelled; it may be False"),
        ("olmo-7b", {"clip_qkv": 8.0}, "olmo: clip_qkv is 8.0, which is not modelled; it may be null"),
        ("phi-2", {"qk_layernorm": True}, "phi: qk_layernorm is true"),
        ("bert-base-uncased", {"position_embedding_type": "relative_key"}, "it may be 'absolute'"),
    ],
)
def test_what_is_not_modelled_names_family_key_and_way_out(name, change, message):
    keys = keys_of(name, "published")
    place = keys.get("text_config", keys)
    place |= change
    with pytest.raises(TwofoldError, match=message):
        reading_of(keys, seq=64)


def test_dense_layers_before_experts():
    keys = keys_of("qwen3-30b-a3b", "published") | {"mlp_only_layers": [0, 1]}
    assert reading_of(keys, seq=64).config.experts.num_dense_layers == 2


def test_left_out_parts_are_reported(capsys):
    remarks = config_remarks(FOLDER / "gemma-2-2b.json")
    assert remarks[0].startswith("attn_logit_softcapping: attention scores are not capped")
    assert remarks[-1].startswith("keys that change neither sizes nor costs: architectures, bos_token_id")
    assert config_remarks("llama-3-8b") == config_remarks(transformer_config("llama-3-8b")) == ()
    command = ["predict", str(FOLDER / "llama-4-scout.json"), "--seq", "512", "--layers", "2", "--machine"]
    assert main([*command, "h200-x8", "--dp", "8", "--global-batch", "8"]) == 0
    said = capsys.readouterr().out
    assert "no_rope_layer_interval: every block rotates its queries and keys" in said
    assert "vision_config" in said and "only the text model is planned" in said
    assert "experts: each has places for 1.25 times an even share of the tokens" in said


STRUCTURES = {
    "gemma": {"norm_place": "around", "qk_norm": "head", "activation": "gelu", "tied": True,
              "scales": Scales(embedding=32.0, attention=0.06, logits_cap=30.0)},
    "phi": {"gated": False, "norm": "layer", "parallel_residual": True, "shared_norm": True, "head_bias": True,
            "rope": Rope(fraction=0.5), "dropout": 0.1, "embedding_dropout": 0.0},
    "opt": {"gated": False, "norm": "layer", "position": "learned", "first_position": 2, "activation": "relu"},
    "llama4": {"qk_norm": "head_no_weights", "rope": Rope(interleaved=True)},
}  # fmt: skip


@pytest.mark.parametrize("name", STRUCTURES)
def test_forecast_program_and_engine_agree_on_a_structure(name, monkeypatch):
    config = TransformerConfig(
        name=name, num_layers=4, hidden=1024, num_heads=16, num_kv_heads=4, ffn=2816, vocab=8000, seq=512,
        **STRUCTURES[name],
    )  # fmt: skip
    monkeypatch.setattr("benchmarks.simulator.one_world.MODELS", (config,))
    draw, score = random.Random(3), Score()
    while score.cases < 2:
        case = draw_case(draw, num_ranks=8)
        if case is not None:
            check(case, score)
    assert score.differ == []
    assert score.bodies_equal == score.memory_equal == score.time_equal == score.cases
