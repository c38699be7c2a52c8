"""Weights of plans by config.json under the names of transformers, read and written, as one tensor or in parts."""

import json

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from executor.data.sources import Source
from executor.launch.checkpointed_main import main as job_main
from executor.launch.job import Job, Task, TaskCheckpoints, save_job
from executor.train.checkpoints import export
from executor.train.checkpoints.export import write_weights
from executor.train.result import RankResult
from executor.weights.files import check_weights, read_weights
from executor.weights.library_names import library_parts, with_names_of_files
from executor.weights.module_weights import as_graph
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.model.transformer import transformer, transformer_config
from plans.optimizer import Optimizer
from plans.plan import load_plan, save_plan
from tests import ROOT
from tests.executor.weights.test_files import write_safetensors
from tests.modules.plain_llama import PlainLlama
from tests.support.on_ranks import run_on_ranks
from tests.support.small_training import graph as other_graph
from twofold.cli import main

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 16, "torch_dtype": "float32",
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip
STEPS, LR = 2, 0.01

NAMES = {
    "first": "input_layernorm", "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj", "second": "post_attention_layernorm", "w1": "mlp.gate_proj", "w3": "mlp.up_proj",
    "w2": "mlp.down_proj",
}  # fmt: skip
"""As LlamaForCausalLM of transformers 5.23 saves a block."""

JOINED = {"self_attn.qkv_proj": ("wq", "wk", "wv"), "mlp.gate_up_proj": ("w1", "w3")}
"""What Phi3ForCausalLM keeps in one tensor, rows beside rows."""


def saved(module, model_type):
    """The weights of a module by the names of the library."""
    state = {name: each.detach().numpy() for name, each in module.named_parameters()}
    found = {"model.embed_tokens.weight": state["table.weight"], "model.norm.weight": state["norm.weight"]}
    found["lm_head.weight"] = state["head.weight"]
    for layer in range(CONFIG["num_hidden_layers"]):
        joined = JOINED if model_type == "phi3" else {}
        for name, parts in joined.items():
            rows = [state[f"layers.{layer}.{part}.weight"] for part in parts]
            found[f"model.layers.{layer}.{name}.weight"] = np.concatenate(rows)
        for name, theirs in NAMES.items():
            if not any(name in parts for parts in joined.values()):
                found[f"model.layers.{layer}.{theirs}.weight"] = state[f"layers.{layer}.{name}.weight"]
    return found


def read_safetensors(path):
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    return {
        name: np.frombuffer(content[start:], np.float32)[slice(*(at // 4 for at in said["data_offsets"]))].reshape(
            said["shape"]
        )
        for name, said in header.items()
    }


def write_config(path, **changed):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(CONFIG | changed))
    return path


@pytest.mark.ranks
@pytest.mark.parametrize("model_type", ["llama", "phi3"])
def test_a_saved_model_is_trained_as_plain_torch_and_saved_again(model_type, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    more = {"pad_token_id": 1, "original_max_position_embeddings": 16} if model_type == "phi3" else {}
    config = write_config(tmp_path / "start" / "config.json", model_type=model_type, **more)
    optimizer = Optimizer(kind="adamw", settings={"lr": LR}, parallel_level=1, threshold_bytes=0)
    of = transformer(config, batch_size=4)
    save_plan(plan_of(Degrees(global_batch=4, tp=2, optimizer=optimizer), of), tmp_path / "plan.json")
    torch.manual_seed(0)
    sizes = transformer_config(config)
    module = PlainLlama(replace_rope(sizes))
    for each in module.parameters():
        torch.nn.init.normal_(each, mean=float(each.dim() == 1), std=0.1)
    arrays = saved(module, model_type)
    for number in range(2):
        half = {name: arrays[name] for name in sorted(arrays)[number::2]}
        write_safetensors(tmp_path / "start" / f"model-{number}.safetensors", half)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 64, 16 * 40 + 1).astype(np.uint16))
    (tmp_path / "job.toml").write_text(
        f'plan = "{tmp_path}/plan.json"\nsteps = {STEPS}\nout = "{tmp_path}/out"\ndata = "{tmp_path}/tokens.npy"\n'
        f'weights = "{tmp_path}/start"\nlog_dir = "{tmp_path}/logs"\n[checkpoints]\nevery = {STEPS}\n'
    )
    assert main(["train", str(tmp_path / "job.toml")]) == 0

    update, losses = torch.optim.AdamW(module.parameters(), lr=LR, foreach=False), []
    for batch in Source(data=str(tmp_path / "tokens.npy"), seed=1).batches(of, STEPS):
        update.zero_grad()
        loss = module(torch.tensor(batch["tokens"]), torch.tensor(batch["labels"]))
        loss.backward()
        update.step()
        losses.append(loss.item())
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([row["loss"] for row in rows], losses, rtol=2e-6)

    checkpoint, expected = tmp_path / "out" / "checkpoints" / f"step-{STEPS:08d}", saved(module, model_type)
    assert (
        main(["export", str(checkpoint), str(tmp_path / "one.safetensors")]) == 0
    )  # the plan of the run has the names
    monkeypatch.setattr(export, "_FILE_BYTES", 20_000)
    assert main(["export", str(checkpoint), str(tmp_path / "end"), "--config", str(config)]) == 0
    assert json.loads((tmp_path / "end" / "config.json").read_text()) == json.loads(config.read_text())
    index = json.loads((tmp_path / "end" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "end").glob("*.safetensors"))
    assert [path.name for path in files] == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, 6)]
    assert all(path.stat().st_size < 22_000 for path in files)
    parts = {path.name: read_safetensors(path) for path in files}
    assert index["weight_map"] == {name: file for file, own in parts.items() for name in own}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in expected.values())
    for found in ({name: each for own in parts.values() for name, each in own.items()},
                  read_safetensors(tmp_path / "one.safetensors")):  # fmt: skip
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert np.linalg.norm(found[name] - array) <= 1e-5 * np.linalg.norm(array), name
    with pytest.raises(TwofoldError, match="is a file, or a folder that is not empty; name a new folder"):
        write_weights(checkpoint, tmp_path / "end")
    again = replace(load_plan(tmp_path / "plan.json").graph, parts={})
    assert with_names_of_files(again, str(tmp_path / "start")).parts == load_plan(checkpoint / "plan.json").graph.parts


def replace_rope(sizes):
    """The module's tables turn halves, as the library's models do."""
    import dataclasses

    return dataclasses.replace(sizes, rope=dataclasses.replace(sizes.rope, angles="tables"))


FAMILIES = {
    "Llama": {}, "Mistral": {"sliding_window": None}, "Qwen2": {}, "Qwen3": {"head_dim": 16},
    "Granite": {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "Olmo": {"pad_token_id": 0, "rms_norm_eps": "left out"}, "Olmo2": {"pad_token_id": 0},
    "GPTNeoX": {"rotary_pct": 0.5, "rms_norm_eps": "left out", "num_key_value_heads": "left out"},
    "Phi3": {"pad_token_id": 0, "original_max_position_embeddings": 16},  # it does not train the row of token 0
}  # fmt: skip


def made(family):
    """A model of transformers with norms that are not 1 and biases that are not 0."""
    import transformers

    torch.manual_seed(0)
    sizes = {key: each for key, each in CONFIG.items() if key not in ("model_type", "torch_dtype", "rope_theta")}
    sizes = {key: each for key, each in (sizes | FAMILIES[family]).items() if each != "left out"}
    config = getattr(transformers, f"{family}Config")(**sizes)
    module = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for each in module.parameters():
            each.add_(0.02 * torch.randn_like(each))
    return module


def run_job(rank, folder):
    job_main([str(folder / "job.json")])


@pytest.fixture(scope="module")
def trained_families(tmp_path_factory):
    """A folder for each family, with its weights before ("start") and after ("out") training, all by one launch."""
    folder, tasks = tmp_path_factory.mktemp("families"), []
    np.save(folder / "tokens.npy", np.random.default_rng(0).integers(1, 64, 16 * 40 + 1).astype(np.uint16))
    optimizer = Optimizer(settings={"lr": 0.3}, parallel_level=2, threshold_bytes=0)
    for family in FAMILIES:
        own = folder / family
        made(family).save_pretrained(own / "start")
        of = transformer(own / "start" / "config.json", batch_size=4)
        plan = plan_of(Degrees(global_batch=4, tp=2, dp=2, optimizer=optimizer), of)
        plan = replace(plan, graph=with_names_of_files(plan.graph, str(own / "start")))
        checkpoints = TaskCheckpoints(folder=str(own / "out" / "checkpoints"), every=STEPS, keep=1)
        tasks.append(
            Task(
                plan=str(save_plan(plan, own / "plan.json")), out=str(own / "out"), steps=STEPS, seed=1,
                data=str(folder / "tokens.npy"), weights=str(own / "start"), checkpoints=checkpoints,
            )
        )  # fmt: skip
    save_job(Job(tasks=tuple(tasks), device="cpu"), folder / "job.json")
    run_on_ranks(run_job, 4, folder, joined=False)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_was_trained_from_what_it_wrote(family, trained_families, tmp_path):
    folder, module = trained_families / family, made(family)
    began = {name: each.detach().clone() for name, each in module.named_parameters()}
    checkpoint, config = folder / "out" / "checkpoints" / f"step-{STEPS:08d}", folder / "start" / "config.json"
    assert main(["export", str(checkpoint), str(tmp_path / "end"), "--config", str(config)]) == 0
    trained = dict(type(module).from_pretrained(tmp_path / "end", dtype=torch.float32).named_parameters())

    update, losses = torch.optim.SGD(module.parameters(), lr=0.3, foreach=False), []
    of = transformer(config, batch_size=4)
    for batch in Source(data=str(trained_families / "tokens.npy"), seed=1).batches(of, STEPS):
        update.zero_grad()
        logits = module(torch.tensor(batch["tokens"])).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(batch["labels"]).flatten())
        loss.backward()
        update.step()
        losses.append(loss.item())
    found = np.nanmean([RankResult.load(folder / "out" / f"rank.{rank}.npz").losses for rank in range(4)], axis=0)
    np.testing.assert_allclose(found, losses, rtol=2e-6)
    assert trained.keys() == dict(module.named_parameters()).keys()
    for name, each in module.named_parameters():
        assert (trained[name] - each).norm() <= 3e-6 * each.norm(), name
        assert (trained[name] - began[name]).norm() > 6e-6 * each.norm() or name.endswith("k_proj.bias"), name


def test_heads_with_norms_and_biases_have_names_too(tmp_path):
    for model_type, names in {
        "qwen2": {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"},
        "qwen3": {"self_attn.q_norm.weight", "self_attn.k_norm.weight"},
        "mistral": set(),
    }.items():
        config = write_config(tmp_path / f"{model_type}.json", model_type=model_type, head_dim=8)
        of = transformer(config, batch_size=2)
        found = {part.name.removeprefix("model.layers.1.") for part in library_parts(of, config).values()}
        assert {f"{name}.weight" for name in NAMES.values() if name} | names == {
            name for name in found if not name.startswith(("model.", "lm_head"))
        }
        assert all(part.is_whole for part in library_parts(of, config).values())


def test_other_models_are_refused(tmp_path):
    config = write_config(tmp_path / "config.json")
    of = transformer(config, batch_size=2)

    def refused(says, graph=of, **changed):
        other = write_config(tmp_path / "other.json", **changed)
        with pytest.raises(TwofoldError, match=says) as error:
            library_parts(graph, other)
        assert "\n" not in str(error.value)

    refused("the names of model_type 'gpt2' are not known; known: gpt_neox, granite, llama, ", model_type="gpt2")
    refused(r"is of another model than the plan: rope with .*5e\+05|500000", rope_theta=500000.0)
    refused("is of another model than the plan: rms_norm", rms_norm_eps=1e-6)
    refused("is of another model than the plan: attention with .*'scale'", model_type="granite")
    granite = write_config(tmp_path / "g.json", model_type="granite", residual_multiplier=0.5, attention_multiplier=1.0)
    there = {"model_type": "granite", "residual_multiplier": 0.6, "attention_multiplier": 1.0}
    refused("plan: mul with {'number': 0.6}, {} there", graph=transformer(granite, batch_size=2), **there)
    refused("the plan is of another module, whose weights have its own names", graph=other_graph())
    biased = transformer(write_config(tmp_path / "b.json", model_type="qwen3", head_dim=8), batch_size=2)
    assert library_parts(biased, tmp_path / "b.json").keys() == {each.name for each in biased.parameters}
    (tmp_path / "weights").mkdir()
    assert with_names_of_files(of, str(tmp_path / "weights")) is of  # no config.json
    with pytest.raises(TwofoldError, match=r"the folder has no .safetensors file"):
        check_weights(str(tmp_path / "weights"), of)


def test_a_state_dict_by_the_names_of_the_library_is_read_with_its_config(tmp_path):
    config = write_config(tmp_path / "saved" / "config.json", model_type="phi3", pad_token_id=1,
                          original_max_position_embeddings=16)  # fmt: skip
    of = transformer(config, batch_size=2)
    parts = library_parts(of, config)
    theirs = {part.name: torch.arange(float(np.prod(part.shape))).view(part.shape) for part in parts.values()}
    for path in (tmp_path / "alone.pt", tmp_path / "saved" / "beside.pt"):
        torch.save(theirs, path)
    torch.save({each.name: torch.zeros(each.shape) for each in of.parameters}, tmp_path / "saved" / "own.pt")
    assert with_names_of_files(of, str(tmp_path / "saved" / "own.pt")) is of
    with pytest.raises(TwofoldError, match=r"lack the parameter .* state config = '.../config.json'"):
        check_weights(str(tmp_path / "alone.pt"), with_names_of_files(of, str(tmp_path / "alone.pt")))
    for path, named in (("alone.pt", str(config)), ("saved/beside.pt", "")):
        weights = str(tmp_path / path)
        found = with_names_of_files(of, weights, named)
        check_weights(weights, found)
        read = as_graph(found, read_weights(weights))
        rows = theirs["model.layers.1.self_attn.qkv_proj.weight"]
        assert np.array_equal(read["layers.1.attention.wk.weight"][...], rows[32:48].numpy())
