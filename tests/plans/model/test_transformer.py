"""Transformers without torch: parameter counts and FLOPs as published, training equal to a plain torch module."""

import json
from fractions import Fraction

import pytest
import torch

from executor.device import Device
from executor.step.interpreter import Interpreter
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import (
    Experts,
    Rope,
    Scales,
    TransformerConfig,
    model_names,
    named_config,
    parts_of,
    recompute_set,
    transformer,
    transformer_config,
)
from plans.model.transformer.huggingface import reading_of
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from tests.modules.transformer import random_tokens, random_weights, trained

SMALL = {"num_layers": 2, "hidden": 64, "num_heads": 4, "ffn": 96, "vocab": 128, "seq": 16}
GPT = {"gated": False, "norm": "layer", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "position": "learned"}
CONFIGS = {
    "llama": TransformerConfig(**SMALL, num_kv_heads=2, rope=Rope(base=100.0)),
    "gpt": TransformerConfig(**SMALL, **GPT, tied=True),
    "neox": TransformerConfig(
        **SMALL, **GPT | {"position": "rope"}, parallel_residual=True, rope=Rope(fraction=0.25), num_kv_heads=1
    ),
    "encoder": TransformerConfig(**SMALL, causal=False, position="none", head_dim=8, qkv_bias=True),
    "qwen3": TransformerConfig(**SMALL, num_kv_heads=2, qk_norm="head"),
    "olmo2": TransformerConfig(**SMALL, num_kv_heads=2, qk_norm="row", norm_place="after"),
    "gemma": TransformerConfig(
        **SMALL, num_kv_heads=2, qk_norm="head_no_weights", norm_place="around", activation="gelu", tied=True,
        scales=Scales(embedding=8.0, attention=0.3, logits_cap=2.0),
    ),
    "gptj": TransformerConfig(
        **SMALL, gated=False, norm="layer", mlp_bias=True, head_bias=True, parallel_residual=True, shared_norm=True
    ),
    "cohere": TransformerConfig(
        **SMALL, norm="layer_no_bias", parallel_residual=True, shared_norm=True, tied=True, scales=Scales(logits=0.25)
    ),
    "olmo": TransformerConfig(**SMALL, norm="layer_no_weights"),
    "granite": TransformerConfig(**SMALL, scales=Scales(embedding=3.0, attention=0.2, residual=0.5, logits=0.5)),
    "opt": TransformerConfig(**SMALL, **GPT, activation="relu", first_position=2, tied=True),
    "bloom": TransformerConfig(**SMALL, **GPT | {"position": "alibi"}, embedding_norm=True, tied=True),
    "bert": TransformerConfig(
        **SMALL, **GPT, norm_place="sum", embedding_norm=True, token_types=2, head_transform=True, head_bias=True,
        tied=True, causal=False,
    ),
    "qwen2_moe": TransformerConfig(
        **SMALL, qkv_bias=True,
        experts=Experts(
            num_experts=4, top_k=2, ffn=32, num_shared=2, shared_gate=True, weights="all", capacity_factor=4.0
        ),
    ),
}  # fmt: skip

# Hugging Face model cards and checkpoints; billions: Narayanan et al. 2021, table 1, and Korthikanti et al. 2022
EXACT = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
}
BILLIONS = {
    "gpt3-175b": 174.6, "megatron-1.7b": 1.7, "megatron-3.6b": 3.6, "megatron-7.5b": 7.5, "megatron-18.4b": 18.4,
    "megatron-39.1b": 39.1, "megatron-76.1b": 76.1, "megatron-145.6b": 145.6, "megatron-310.1b": 310.1,
    "megatron-530b": 529.6, "megatron-1t": 1008.0,
}  # fmt: skip


def counted(graph):
    return sum(tensor.num_elements for tensor in graph.tensors.values() if tensor.kind == "parameter")


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXACT)
def test_published_numbers_of_parameters(name):
    assert counted(transformer(name)) == named_config(name).num_parameters == EXACT[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_published_billions_of_parameters(name):
    assert round(counted(transformer(name)) / 1e9, 1) == BILLIONS[name]


@pytest.mark.parametrize("name", model_names())
def test_every_name_gives_a_graph_of_its_size_with_a_source(name):
    config = named_config(name)
    assert counted(transformer(name, num_layers=2)) == transformer_config(name, num_layers=2).num_parameters
    assert config.source and config.name == name


def test_a_mixture_of_experts_has_counts_and_a_graph():
    """Jiang et al. 2024, section 2.1: 47B parameters, 13B active; the checkpoint has 46,702,792,704."""
    config = named_config("mixtral-8x7b")
    assert (config.num_parameters, round(config.num_active_parameters / 1e9)) == (46_702_792_704, 13)
    assert counted(transformer("mixtral-8x7b", seq=512)) == config.num_parameters


def matrix_flops(graph):
    """FLOPs of matrix products: forward, input gradients, weight gradients; without what attention makes again."""
    forward = inputs = weights = 0
    for operator in graph.operators:
        spec = graph.spec(operator)
        if operator.kind == "linear":
            forward += spec.flops
            inputs += spec.gradients[0].flops
            weights += spec.gradients[1].flops
        elif operator.kind == "attention":
            forward += spec.flops
            inputs += sum(gradient.flops - gradient.remade_flops for gradient in spec.gradients.values())
    return forward, inputs, weights


@pytest.mark.parametrize(("batch", "seq", "hidden"), [(1, 16, 64), (3, 32, 128)])
def test_flops_of_a_layer_are_those_of_the_zero_bubble_paper(batch, seq, hidden):
    """Qi et al. 2024, table 1: F sbh(24h + 4s), B sbh(24h + 8s), W 24 sbh^2, for attention without a mask."""
    config = TransformerConfig(num_layers=1, hidden=hidden, num_heads=4, vocab=64, seq=seq, causal=False, **GPT)
    graph = transformer(config, batch_size=batch)
    head = 2 * batch * seq * hidden * 64
    unit = batch * seq * hidden
    expected = (unit * (24 * hidden + 4 * seq), unit * (24 * hidden + 8 * seq), unit * 24 * hidden)
    assert tuple(each - head for each in matrix_flops(graph)) == expected


@pytest.mark.parametrize("name", ["gpt3-175b", "megatron-1t"])
def test_flops_of_a_step_are_those_of_narayanan(name):
    """Narayanan et al. 2021, eq. 3, without recompute 72 in place of 96: F = 72 B s l h^2 (1 + s / 6h + V / 12lh).

    With full recompute a quarter is added for the blocks, not for the head: 96 B s l h^2 (1 + s / 6h + V / 16lh).
    """
    config = named_config(name)
    b, s, n, h, v = 4, config.seq, config.num_layers, config.hidden, config.vocab
    graph = transformer(TransformerConfig(**fields(config) | {"causal": False}), batch_size=b)
    step = sum(matrix_flops(graph))
    assert step == 72 * b * s * n * h**2 * (1 + Fraction(s, 6 * h) + Fraction(v, 12 * n * h))
    again = matrix_flops(graph)[0] - 2 * b * s * h * v
    assert step + again == 96 * b * s * n * h**2 * (1 + Fraction(s, 6 * h) + Fraction(v, 16 * n * h))


def fields(config):
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_causal_attention_does_the_work_of_its_triangle():
    both = [transformer(TransformerConfig(**SMALL, causal=causal)) for causal in (True, False)]
    cores = [next(graph.spec(op).flops for op in graph.operators if op.kind == "attention") for graph in both]
    assert Fraction(cores[0], cores[1]) == Fraction(SMALL["seq"] + 1, 2 * SMALL["seq"])


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_graph_trains_as_a_plain_torch_module_does(name, num_micro_batches):
    config = TransformerConfig(**fields(CONFIGS[name]) | {"dtype": "float64"})
    graph = transformer(config, batch_size=4)
    weights, batches = random_weights(graph), [random_tokens(graph, config.vocab, seed) for seed in range(3)]
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    plan = Plan(
        graph=graph, stages=(stage,), optimizer=Optimizer(settings={"lr": 0.1}), num_micro_batches=num_micro_batches
    )
    rank = Interpreter(lower(plan), 0, Device(kind="cpu"))
    rank.set_parameters({name: each.numpy() for name, each in weights.items()})
    losses = [rank.step({name: each.numpy() for name, each in batch.items()}).item() for batch in batches]
    expected, final = trained(config, weights, batches)
    assert losses == pytest.approx(expected, rel=1e-12)
    for placement in rank.group.parameters:
        torch.testing.assert_close(torch.as_tensor(rank.kept(placement)), final[placement.name], rtol=1e-10, atol=1e-12)


def test_half_precision_takes_the_loss_in_float32():
    graph = transformer("llama-3-8b", num_layers=1)
    assert graph.tensors["output.out"].dtype == "bfloat16" and graph.tensors["loss"].dtype == "float32"
    wide = transformer(TransformerConfig(**SMALL, dtype="float32"))
    assert "output.cast" not in {operator.name for operator in wide.operators}


def test_blocks_have_equal_operators_under_their_own_prefix():
    graph = transformer("llama-3-8b", num_layers=3)
    parts, specs = parts_of(graph), {operator.name: graph.spec(operator) for operator in graph.operators}
    assert [name for part in (parts.embedding, *parts.blocks, parts.head) for name in part] == list(specs)
    first = parts.blocks[0]
    for number, block in enumerate(parts.blocks):
        assert [name.replace("layers.0.", f"layers.{number}.") for name in first] == list(block)
        assert all(specs[mine] is specs[other] for mine, other in zip(block, first, strict=True))


def test_dropout_follows_embedding_attention_and_mlp():
    graph = transformer(TransformerConfig(**SMALL, dropout=0.1, attention_dropout=0.2))
    dropouts = {operator.name: operator.attrs for operator in graph.operators if operator.kind == "dropout"}
    assert list(dropouts)[:3] == ["embeddings.dropout", "layers.0.attention.dropout", "layers.0.feed_forward.dropout"]
    assert len({attrs["seed"] for attrs in dropouts.values()}) == len(dropouts) == 5
    assert all(operator.attrs["p"] == 0.2 for operator in graph.operators if operator.kind == "attention")


def test_sequence_and_layers_can_be_given():
    graph = transformer("llama-3-8b", batch_size=2, seq=1024, num_layers=1)
    assert graph.tensors["tokens"].shape == (2, 1024) and len(parts_of(graph).blocks) == 1
    short = transformer("gpt3-125m", seq=512)
    assert short.tensors["pos_embeddings.weight"].shape == (2048, 768)
    assert short.tensors["layers.0.residual.out"].shape == (1, 512, 768)
    with pytest.raises(TwofoldError, match="4096 tokens, but its table of positions has 2048 rows"):
        transformer("gpt3-125m", seq=4096)


def test_another_batch_size_gives_the_graph_of_that_size():
    for config in CONFIGS.values():
        graph, other = (transformer(config, batch_size=size) for size in (6, 2))
        assert graph.with_batch(2) == other


# -- recompute ---------------------------------------------------------------------------------------------------------


def test_recompute_sets():
    graph = transformer("llama-3-8b", num_layers=2)
    assert recompute_set(graph, "none") == ()
    assert recompute_set(graph, "selective") == ("layers.0.attention.core", "layers.1.attention.core")
    full = recompute_set(graph, "full")
    kept = {name for block in parts_of(graph).blocks for name in block} - set(full)
    assert kept == {"layers.0.residual", "layers.1.residual"}
    assert recompute_set(graph, ["layers.1.feed_forward"]) == tuple(
        f"layers.1.feed_forward.{name}" for name in ("w1", "act", "w3", "mul", "w2")
    )
    with pytest.raises(TwofoldError, match="not an operator or module"):
        recompute_set(graph, ["layers.7"])
    with pytest.raises(TwofoldError, match=r"recompute .some. is not known; known: none, memory_bound, selective, "):
        recompute_set(graph, "some")


# -- names and files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Llama3_8B", "llama-3-8b"), ("meta-llama-3.1-405b", "llama-3-405b"), ("GPT3 1.3B", "gpt3-1.3b"),
        ("gpt3-13b", "gpt3-13b"),
    ],
)  # fmt: skip
def test_names_are_found_whatever_their_punctuation(given, name):
    assert named_config(given).name == name


def test_an_unknown_name_suggests_others():
    with pytest.raises(TwofoldError, match=r"did you mean llama-3-8b or "):
        transformer("lama-3-8b")


LLAMA = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
QWEN2 = {
    "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
    "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1e6, "sliding_window": 131072,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
PYTHIA = {
    "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 8192, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 16, "num_hidden_layers": 16,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "torch_dtype": "float16",
    "use_parallel_residual": True, "vocab_size": 50304,
}  # fmt: skip
GPT2 = {
    "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
    "resid_pdrop": 0.1, "vocab_size": 50257, "task_specific_params": {"text-generation": {"do_sample": True}},
}  # fmt: skip
MISTRAL = {
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "parameters"),  # of the checkpoints on Hugging Face
    [
        (LLAMA, 8_030_261_248), (QWEN2, 7_615_616_512), (PYTHIA, 1_011_781_632), (GPT2, 124_439_808),
        (MISTRAL, 7_248_023_552),
    ],
    ids=lambda given: given.get("model_type") if isinstance(given, dict) else None,
)  # fmt: skip
def test_a_config_json_gives_the_published_number_of_parameters(keys, parameters, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(keys))
    for source in (tmp_path, str(tmp_path / "config.json")):
        assert transformer_config(source).num_parameters == parameters
    assert counted(transformer(tmp_path, seq=64)) == parameters


def test_settings_of_a_config_json_besides_sizes():
    llama, neox, gpt2 = (reading_of(keys).config for keys in (LLAMA, PYTHIA, GPT2))
    assert llama.rope == Rope(
        base=5e5, scaling="llama3", factor=8.0, low_factor=1.0, high_factor=4.0, original_seq=8192
    )
    assert llama.rope == Rope(base=5e5, scaling="llama3", factor=8.0)  # the rest is what is published of 3.1
    assert (neox.rotary_dim, neox.parallel_residual, neox.dtype) == (32, True, "float16")
    assert (gpt2.tied, gpt2.position, gpt2.dropout, gpt2.attention_dropout) == (True, "learned", 0.1, 0.1)
    dropouts = {"resid_pdrop", "embd_pdrop", "attn_pdrop"}  # 0.1 each in GPT2Config of transformers
    unsaid = reading_of({key: value for key, value in GPT2.items() if key not in dropouts}).config
    assert (unsaid.dropout, unsaid.embedding_dropout, unsaid.attention_dropout) == (0.1, 0.1, 0.1)
    assert reading_of(LLAMA).ignored.keys() == {
        "architectures", "bos_token_id", "initializer_range", "pretraining_tp", "transformers_version", "use_cache"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual_multiplier": 0.22}, "residual_multiplier of model_type 'llama' are unknown and may change"),
        ({"no_rope_layer_interval": 4}, "no_rope_layer_interval of model_type 'llama' are unknown and may change"),
        ({"hidden_act": "quick_gelu"}, "llama: hidden_act is 'quick_gelu', which is not modelled; it may be silu or"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; known: bert, bloom, cohere, "),
        ({"layer_types": ["linear_attention"]}, "layer_types has linear_attention, which is not modelled"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True, which is not modelled; it may be False"),
        ({"num_attention_heads": 30}, "hidden 4096 is not a multiple of num_heads 30"),
        ({"num_key_value_heads": 5}, "num_heads 32 is not a multiple of num_kv_heads 5"),
        ({"vocab_size": None}, "model_type 'llama' needs the key 'vocab_size'"),
        ({"hidden_size": "big"}, r"got `str` - at `\$.hidden`"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
    ],
)
def test_what_is_not_modelled_is_refused(change, message, tmp_path):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(LLAMA | change))
    with pytest.raises(TwofoldError, match=message) as error:
        transformer(path)
    assert str(path) in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(TwofoldError, match="cannot read the model configuration"):
        transformer(tmp_path / "missing.json")
    for content in (b"{", b"[" * 100_000, b"\xff"):
        (tmp_path / "broken.json").write_bytes(content)
        with pytest.raises(TwofoldError, match=r"not a complete JSON|too deeply"):
            transformer(tmp_path / "broken.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(TwofoldError, match="a JSON object, not list"):
        transformer(tmp_path / "list.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1"),
        ({"num_layers": 10_001}, "num_layers must be at most 10,000, not 10001"),
        ({"vocab": 2**63 - 1}, "vocab must be at most 16,777,216, not 9223372036854775807"),
        ({"hidden": 66}, "give head_dim"),
        ({"norm": "batch"}, "norm 'batch' is not known"),
        ({"dropout": 1.0}, "dropout 1.0 must be a probability below 1"),
        ({"dtype": "int32"}, "is not a float"),
        ({"head_dim": 15}, "rope rotates pairs"),
    ],
)
def test_impossible_configurations_are_refused(change, message):
    with pytest.raises(TwofoldError, match=message):
        TransformerConfig(**SMALL | change)


@pytest.mark.parametrize("size", [0, True, 1.5])
def test_impossible_batches_are_refused(size):
    with pytest.raises(TwofoldError, match="batch_size must be a whole number of at least 1"):
        transformer("gpt2", batch_size=size)
