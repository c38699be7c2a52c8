"""Multi-head latent attention and DeepSeek's models: counts, files, and training on one and on four ranks."""

import json
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from costmodels import Machine
from executor.train.run import run_rank
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.lower.symbolic import model_template
from plans.model.transformer import Experts, Latent, TransformerConfig, named_config, transformer, transformer_config
from plans.model.transformer.huggingface import reading_of
from plans.operators import declare
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from search import uniform_plan
from simulator import simulate
from simulator.forecast import forecast
from tests.modules.transformer import random_tokens, random_weights, trained
from tests.support.folded_lowering import check_template, small_plan
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks

LATENT = Latent(q_rank=12, kv_rank=8, nope_dim=6, rope_dim=4, value_dim=8)
DIRECT = Latent(kv_rank=8, nope_dim=4, rope_dim=2, value_dim=10)
OPTIMIZER = Optimizer(settings={"lr": 0.1}, threshold_bytes=1)
CASES = {
    "tp 2, dp 2, ep 2": (LATENT, {"dp": 2, "ep": 2, "tp": 2}),
    "tp 2, sequence parallel, dp 2, recompute, zero 1": (
        LATENT, {"dp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full", "zero": 1},
    ),
    "tp 2, sequence parallel, dp 2, recompute memory-bound": (
        LATENT, {"dp": 2, "tp": 2, "sequence_parallel": True, "recompute": "memory_bound"},
    ),
    "tp 2, pp 2, queries in one product": (DIRECT, {"tp": 2, "pp": 2, "recompute": "selective_op"}),
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27, "q_lora_rank": None,
    "norm_topk_prob": False, "scoring_func": "softmax", "vocab_size": 102400, "aux_loss_alpha": 0.001, "seq_aux": True,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "quantization_config": None,
}  # fmt: skip


def config_of(latent):
    experts = Experts(num_experts=4, top_k=2, ffn=12, num_shared=1, num_dense_layers=1, capacity_factor=1.0)
    return TransformerConfig(
        num_layers=2, hidden=16, num_heads=4, ffn=24, vocab=32, seq=8, dtype="float64", latent=latent, experts=experts
    )


def material(graph):
    batches = [random_tokens(graph, 32, seed) for seed in range(2)]
    plain = [{name: each.numpy() for name, each in batch.items()} for batch in batches]
    return {name: each.numpy() for name, each in random_weights(graph).items()}, plain, batches


def check(config, graph, losses, path):
    expected, weights = trained(config, random_weights(graph), material(graph)[2])
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    with np.load(path) as found:
        assert set(found.files) == set(weights)
        for name, weight in weights.items():
            np.testing.assert_allclose(found[name], weight.numpy(), rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("latent", [LATENT, DIRECT], ids=["both latents", "keys and values only"])
def test_the_graph_trains_as_a_plain_module(latent, tmp_path):
    config = config_of(latent)
    graph = transformer(config, batch_size=4)
    operators = tuple(operator.name for operator in graph.operators)
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=operators)
    plan = Plan(graph=graph, stages=(stage,), num_micro_batches=2, optimizer=OPTIMIZER)
    weights, batches, _ = material(graph)
    result = run_rank(lower(plan), plan, batches, weights, 2, device="cpu", weights_path=tmp_path / "w.npz")
    check(config, graph, result.losses, tmp_path / "w.npz")


def plan_of(name):
    latent, degrees = CASES[name]
    graph = transformer(config_of(latent), batch_size=4)
    return uniform_plan(graph, Machine.load("h200-x8"), optimizer=OPTIMIZER, **degrees)


def work(rank, folder):
    for name in CASES:
        plan, program = kept_plan(folder / f"{name}.plan")
        weights, batches, _ = material(plan.graph)
        result = run_rank(program, plan, batches, weights, 2, device="cpu", weights_path=folder / f"{name}.npz")
        assert not result.differences, result.differences
        if rank == 0:
            np.save(folder / f"{name}.losses.npy", np.asarray(result.losses))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    for name in CASES:
        keep_plan(plan_of(name), folder / f"{name}.plan")
    run_on_ranks(work, 4, folder)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_train_as_a_plain_module(folder, name):
    losses = np.load(folder / f"{name}.losses.npy")
    check(config_of(CASES[name][0]), plan_of(name).graph, losses, folder / f"{name}.npz")


def test_attention_counts_the_products_of_its_two_head_dims():
    shapes = ((2, 4, 8, 6), (2, 4, 8, 6), (2, 4, 8, 10))
    spec = declare("attention", shapes, ((2, 4, 8, 10),), {}, "core")
    scores = 2 * 4 * 8 * 8
    assert spec.flops == 2 * scores * 6 + 2 * scores * 10
    assert spec.output_shape(0) == (2, 4, 8, 10)
    # the scores again, their gradient (10), those of q (6), k (6) and v (10)
    assert sum(each.flops for each in spec.gradients.values()) == 2 * scores * (6 + 10 + 6 + 6 + 10)


def test_queries_keys_and_values_made_of_latents_are_computed_again():
    """Of 4096 tokens 128 heads of 192 + 192 + 128 features in each of the 4 blocks, next to norms and activations."""
    config = replace(named_config("deepseek-v3"), num_layers=4, experts=None, ffn=1024)
    degrees = Degrees(global_batch=2)
    none, less = (
        forecast(config, replace(degrees, recompute=mode), Machine.load("h200-x1")).memory["activation"]
        for mode in ("none", "memory_bound")
    )
    attended = 4 * 4096 * 128 * (192 + 192 + 128) * 2
    others = 4 * 4096 * (2 * 7168 + 1536 + 512 + 2 * 1024) * 2
    assert 0.85 * (attended + others) < none - less < attended + others


def test_deepseek_v3_has_the_published_number_of_parameters():
    config = named_config("deepseek-v3")
    assert config.num_parameters == pytest.approx(671e9, rel=0.01)
    assert config.num_active_parameters == pytest.approx(37e9, rel=0.02)


@pytest.mark.parametrize("latent", [LATENT, DIRECT])
def test_parameters_of_the_graph_are_those_of_the_configuration(latent):
    config = config_of(latent)
    assert sum(each.num_elements for each in transformer(config).parameters) == config.num_parameters


def test_the_published_file_gives_the_catalogued_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    found, known = transformer_config(tmp_path), named_config("deepseek-v3")
    for name in ("num_layers", "hidden", "latent", "experts", "rope", "seq", "vocab", "inner", "dtype", "norm_eps"):
        assert getattr(found, name) == getattr(known, name), name


def test_deepseek_v2_lite_reads_as_well():
    found = reading_of(DEEPSEEK_V2_LITE).config
    assert found.latent == Latent(kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    assert found.experts.weights == "all"
    assert found.num_parameters == pytest.approx(15.7e9, rel=0.01)  # arXiv 2405.04434, appendix B.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 8}, "num_kv_heads 8"),
        ({"qk_rope_head_dim": 63}, "rope_dim must be even"),
        ({"attention_bias": True}, "attention_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"kv_lora_rank": None}, "kv_lora_rank"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_files_with_unmodelled_settings_are_refused(changes, message):
    with pytest.raises(TwofoldError, match=message):
        reading_of(DEEPSEEK_V3 | changes)


@pytest.mark.parametrize("latent", [LATENT, DIRECT], ids=["both latents", "keys and values only"])
@pytest.mark.parametrize(
    ("tp", "ep", "sequence_parallel", "recompute", "schedule"),
    [(1, 1, False, "none", "zb_h1"), (2, 2, False, "full", "1f1b"), (2, 2, True, "selective_op", "1f1b")],
)
def test_template_says_what_lowering_of_these_sizes_says(latent, tp, ep, sequence_parallel, recompute, schedule):
    experts = Experts(num_experts=4, top_k=2, ffn=12, num_shared=1)
    config = replace(config_of(latent), experts=experts, num_layers=1, seq=64, hidden=32)
    settings = {"tp": tp, "ep": ep, "sequence_parallel": sequence_parallel, "recompute": recompute}
    program = lower(small_plan(config, schedule=schedule, **settings))
    template = model_template(config, **settings)
    check_template(template, program, config, tp=tp, ep=ep)


@pytest.mark.parametrize("degrees", [{"dp": 4, "ep": 2, "pp": 2}, {"dp": 2, "ep": 2, "tp": 2}])
def test_forecast_is_close_to_the_engine_on_the_whole_program(degrees):
    config = TransformerConfig(
        num_layers=4, hidden=2048, num_heads=16, ffn=8192, vocab=32_000, seq=2048, dtype="bfloat16",
        latent=Latent(q_rank=768, kv_rank=256, nope_dim=128, rope_dim=64, value_dim=128),
        experts=Experts(num_experts=8, top_k=2, ffn=2048, num_shared=1, num_dense_layers=1),
    )  # fmt: skip
    machine = msgspec.structs.replace(Machine.load("h200-x8"), overlap=())
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-4}, bucket_bytes=0)
    plan = uniform_plan(transformer(config, batch_size=16), machine, optimizer=optimizer, micro_batch=1, **degrees)
    expected = simulate(lower(plan), machine, num_steps=3)
    found = forecast(config, Degrees(global_batch=16, optimizer=optimizer, micro_batch=1, **degrees), machine)
    assert found.step_s == pytest.approx(expected.step_interval_s, rel=0.01)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.03)
