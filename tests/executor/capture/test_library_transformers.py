"""Transformers as libraries write them are recognised whole, and train on ranks as the module does alone.

Of the models of transformers itself two are trained here; `EVERY_MODEL=1` trains all of them.
"""

import functools
import os
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from costmodels import Machine
from executor.capture.capture import capture
from executor.data.batches import as_read
from executor.device import Device
from executor.reference.reference import compare_losses, compare_weights, train_reference
from executor.train.checkpoints.export import write_weights
from executor.train.checkpoints.files import written_checkpoints
from executor.train.evaluate import evaluate
from executor.train.options import Checkpoints, RunOptions
from executor.train.run import run_rank
from executor.weights.files import check_weights, read_weights
from executor.weights.initial import no_init_parameters
from executor.weights.models import InitialParameters
from executor.weights.module_weights import as_graph, as_module
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import patterns_of_parts
from plans.model.transformer import Rope, Scales, TransformerConfig, recognise, transformer
from plans.model.whole import apart
from plans.optimizer import Optimizer, ParameterGroup
from plans.plan import Plan, Stage
from search import search
from simulator import simulate
from simulator.forecast import forecast
from tests.modules.library_transformers import (
    BATCH,
    HEADS,
    LAYERS,
    LENGTH,
    OF_TRANSFORMERS,
    VOCAB,
    WIDTH,
    DoubledLlama,
    LanguageModel,
    NanoGPT,
    batch,
    made,
)  # fmt: skip
from tests.support.on_ranks import kept_plan, run_on_ranks
from tests.support.recognised_training import NUM_STEPS, save_cases, train_cases

PLAIN = TransformerConfig(
    num_layers=LAYERS, hidden=WIDTH, num_heads=HEADS, vocab=VOCAB, seq=LENGTH, gated=False, norm="layer",
    activation="gelu", qkv_bias=True, out_bias=True, mlp_bias=True, position="learned", dtype="float32",
)  # fmt: skip
NANO = replace(PLAIN, name="NanoGPT", tied=True, ignore_index=-1)
GPT2 = replace(PLAIN, name="LanguageModel", tied=True)
NEOX = replace(PLAIN, name="LanguageModel", position="rope")
PHI = replace(
    NEOX, norm="rms", norm_eps=1e-6, gated=True, activation="silu", ffn=48, qkv_bias=False, out_bias=False,
    mlp_bias=False,
)  # fmt: skip
OPT = replace(GPT2, activation="relu", ffn=48, first_position=2)
BERT = replace(
    PLAIN, name="BertForMaskedLM", ffn=48, norm_eps=1e-12, norm_place="sum", embedding_norm=True, causal=False,
    tied=True, token_types=2, segment=0, head_bias=True, head_transform=True,
)  # fmt: skip
COHERE = replace(
    PHI, norm="layer_no_bias", norm_eps=1e-5, num_kv_heads=2, tied=True, parallel_residual=True, shared_norm=True,
    rope=Rope(angles="frequencies", interleaved=True), scales=Scales(logits=1 / 16),
)  # fmt: skip
CONFIGS = {
    "nanoGPT": NANO,
    "nanoGPT, untied, no biases": replace(
        PLAIN, name="NanoGPT", ignore_index=-1, norm="layer_no_bias", qkv_bias=False, out_bias=False, mlp_bias=False
    ),
    "nanoGPT, mask in a buffer, dropout": replace(NANO, attention_dropout=0.1),
    "nanoGPT, mask by tril": NANO,
    "nanoGPT, mask by where": NANO,
    "nanoGPT, added mask": NANO,
    "nanoGPT, no mask": replace(NANO, causal=False),
    "GPT-2": GPT2,
    "GPT-2, dropout, more rows": replace(GPT2, dropout=0.1, embedding_dropout=0.1, num_positions=2 * LENGTH),
    "GPT-NeoX": replace(NEOX, parallel_residual=True, rope=Rope(angles="frequencies", fraction=0.25)),
    "GPT-NeoX, one after the other": replace(NEOX, rope=Rope(angles="frequencies")),
    "Phi-4-mini": replace(PHI, tied=True, rope=Rope(angles="frequencies", fraction=0.75)),
    "Granite": replace(
        PHI,
        num_kv_heads=2,
        rope=Rope(angles="frequencies"),
        qk_norm="head",
        scales=Scales(embedding=12.0, residual=0.22, logits=1 / 8),
    ),
    "Phi-3, padded labels": replace(
        PHI, num_layers=4, num_kv_heads=2, rope=Rope(angles="frequencies"), ignore_index=-100
    ),
    "GPT-NeoX, cut labels": replace(
        NEOX, parallel_residual=True, rope=Rope(angles="frequencies", fraction=0.25), ignore_index=-100
    ),
    "OPT, norms after the sums": replace(OPT, norm_place="sum"),
    "OPT, more rows": replace(OPT, num_positions=2 * LENGTH + 2),
    "BERT, more rows": replace(BERT, num_positions=2 * LENGTH),
    "Cohere": COHERE,
    "Cohere, positions of GLM": replace(COHERE, rope=Rope(angles="frequencies", interleaved=True, fraction=0.5)),
    "Llama of Meta": replace(PHI, rope=Rope(angles="tables", interleaved=True)),
    "Gemma": replace(PHI, rope=Rope(angles="tables"), norm_offset=1.0, tied=True, scales=Scales(embedding=6.0)),
    "doubled tables, more rows": replace(PHI, rope=Rope(angles="tables")),
}
"""What each module is."""


@functools.cache
def found_in(name):
    return recognise(capture(made(name), batch()))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_module_of_a_library_is_recognised_whole(name):
    found = found_in(name)
    assert found.config == CONFIGS[name]
    held = {key: tuple(each.shape) for key, each in made(name).named_parameters()}
    trained = {each.name for each in found.graph.parameters}
    parts = [part for name, part in found.graph.parts.items() if name in trained]
    assert {found.graph.of_module(each) for each in found.graph.parameters} == set(held)
    assert all(part.shape == held[part.name] for part in parts)
    assert sum(each.num_elements for each in found.graph.parameters) == sum(map(np.prod, held.values()))


@pytest.mark.parametrize("name", CONFIGS)
def test_its_plan_is_the_program_of_the_model_by_name(name):
    found, degrees = found_in(name), Degrees(dp=2, tp=2, micro_batch=2, global_batch=BATCH, fused=False)
    by_name = plan_of(degrees, transformer(CONFIGS[name], batch_size=BATCH))
    assert signature(lower(found.plan(by_name))) == signature(lower(by_name))


def test_its_forecast_is_that_of_its_program():
    config, machine = CONFIGS["GPT-2, dropout, more rows"], Machine.load("h100-sxm-x4")
    degrees = Degrees(dp=2, tp=2, micro_batch=2, global_batch=BATCH, fused=True)
    timeline = simulate(lower(plan_of(degrees, transformer(config, batch_size=BATCH))), machine)
    assert forecast(config, degrees, machine).step_s == pytest.approx(timeline.step_interval_s, rel=1e-6)


def signature(program):
    """All that is executed, but for names."""
    return [
        [(block.label, each.kind, each.call, each.part, each.shapes, each.dtype, each.axes)
         for block, each in group.walk()]
        for group in program.groups
    ]  # fmt: skip


def test_it_is_searched_over_degrees():
    said = []
    machine, graph = Machine.load("h200-x2"), capture(made("GPT-2"), batch())
    best = search(graph, machine, top_k=1, on_progress=said.append).best
    assert said[0] == "LanguageModel is a transformer: searched over degrees"
    assert {best.graph.of_module(each) for each in best.graph.parameters} == set(dict(made("GPT-2").named_parameters()))


@pytest.mark.parametrize(
    "name",
    ["nanoGPT", "nanoGPT, untied, no biases", "nanoGPT, mask in a buffer, dropout", "GPT-2, dropout, more rows"],
)  # the others compute norms, angles or a softmax in single precision
def test_split_products_compute_the_same(name):
    """Losses and weights are those of torch, in double precision."""
    module, rows = made(name).double(), batch()
    graph = apart(capture(module, rows))
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(each.name for each in graph.operators))
    plan = Plan(graph=graph, stages=(stage,), optimizer=Optimizer(settings={"lr": 0.1}))
    names = [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"]
    fed = dict(zip(names, map(torch.Tensor.numpy, rows), strict=True))
    result = run_rank(
        lower(plan), plan, [fed] * 2, InitialParameters(module, 0), 2, device="cpu", options=RunOptions(count=False)
    )
    expected = train_reference(module, [rows] * 2, optimizer=plan.optimizer, num_steps=2, graph=graph)
    assert compare_losses(result.losses.tolist(), expected.losses).max_rel_diff < 1e-12
    weights = {key: expected.weights[key] for key in result.weights}
    assert compare_weights(result.weights, weights).max_rel_diff < 1e-12


def test_a_norm_in_parts_is_one_operator_in_half_precision_too():
    kinds = [each.kind for each in capture(made("Cohere").bfloat16(), batch()).operators]
    assert kinds.count("layer_norm") == LAYERS + 1 and kinds.count("rope") == 2 * LAYERS
    assert not {"reduce_mean", "rsqrt", "concat"} & set(kinds)


@pytest.mark.parametrize("change", ["position_ids", "token_type_ids"])
def test_numbers_in_a_buffer_are_said_only_where_they_are_counted_or_all_the_same(change):
    """Positions in another order and segments that differ are read from the buffer, and train as in the module."""
    module = made("BERT")
    getattr(module, change).copy_(torch.arange(LENGTH).flip(0)[None] % (2 if change == "token_type_ids" else LENGTH))
    graph = capture(module, batch())
    assert any(change in each.name for each in graph.constants)
    with pytest.raises(TwofoldError, match="BertForMaskedLM is not a supported transformer"):
        recognise(graph)


@pytest.mark.parametrize("mask", ["window", "small", "read"])
def test_an_attention_that_is_not_torchs_own_stays_as_it_is_written(mask):
    """A window, scores that are made small but not hidden, weights that are read elsewhere."""
    module = NanoGPT(mask=mask).double()
    kinds = [each.kind for each in capture(module, batch()).operators]
    assert "attention" not in kinds and kinds.count("softmax") == LAYERS


def test_a_mask_in_a_buffer_is_known_where_its_value_is():
    with torch.device("meta"):
        unknown = NanoGPT(mask="buffer")
    other = NanoGPT(mask="buffer")
    other.transformer.h[1].attn.bias.fill_(1.0)
    assert not any(each.kind == "attention" for each in capture(unknown, batch()).operators)
    attentions = [each for each in capture(other, batch()).operators if each.kind == "attention"]
    assert [each.attrs["causal"] for each in attentions] == [True, False]


# -- parts of weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_weights_are_the_weights(name):
    graph = found_in(name).graph
    whole = {key: each.detach().numpy() for key, each in made(name).named_parameters()}
    cut = as_graph(graph, whole)
    parts = {each.name: cut[each.name][...] for each in graph.parameters}
    assert {key: each.shape for key, each in parts.items()} == {each.name: each.shape for each in graph.parameters}
    joined = as_module(graph, parts)
    assert joined.keys() == whole.keys() and all(np.array_equal(joined[key], whole[key]) for key in whole)
    if not set(graph.parts) & set(parts):
        return
    with pytest.raises(TwofoldError, match=r"trains parts of '.*' only"):
        as_module(graph, {key: each for key, each in parts.items() if ".1." not in key or "attn.1" in key})


def test_queries_are_the_products_of_their_parts():
    module = made("GPT-NeoX")
    graph, attention = found_in("GPT-NeoX").graph, module.model.layers[0].attention
    x = torch.randn(LENGTH, WIDTH)
    own = attention.query_key_value(x).view(LENGTH, HEADS, 3, WIDTH // HEADS)
    held = as_graph(graph, {key: each.detach().numpy() for key, each in module.named_parameters()})
    for number in range(3):
        weight, bias = (held[f"model.layers.0.attention.query_key_value.{number}.{part}"][...]
                        for part in ("weight", "bias"))  # fmt: skip
        made_apart = torch.nn.functional.linear(x, torch.tensor(weight), torch.tensor(bias))
        assert torch.allclose(made_apart, own[:, :, number].flatten(1), atol=1e-6)


def test_a_product_is_left_together_where_its_parts_are_not_all_of_it():
    module = made("nanoGPT")
    module.transformer.h[0].attn.c_attn = torch.nn.Linear(WIDTH, 3 * WIDTH + 2)
    forward = module.transformer.h[0].attn.c_attn.forward
    module.transformer.h[0].attn.c_attn.forward = lambda x: forward(x)[..., 1:-1]
    graph = capture(module, batch())
    assert not any("h.0" in part.name for part in apart(graph).parts.values())
    with pytest.raises(TwofoldError, match="NanoGPT is not a supported transformer"):
        recognise(graph)


def test_decay_follows_the_names_of_the_module():
    graph = found_in("nanoGPT").graph
    named = "transformer.h.0.attn.c_attn.bias"
    group = ParameterGroup(parameters=(named, "*ln_1.bias"), weight_decay=0.0)
    found = Optimizer(groups=(group,), settings={"lr": 1.0, "weight_decay": 1.0}).for_parts(graph)
    spared = {each.name for each in graph.parameters if found.settings_of(each.name)["weight_decay"] == 0}
    norms = {f"transformer.h.{layer}.ln_1.bias" for layer in range(LAYERS)}
    assert spared == norms | {f"transformer.h.0.attn.c_attn.{number}.bias" for number in range(3)}
    assert patterns_of_parts(graph, ("*bias",)) == ("*bias",)


def test_one_half_of_a_doubled_table_is_enough_only_where_it_is_known_to_be():
    with no_init_parameters():
        recorded = made("doubled tables, more rows")
    assert recognise(capture(recorded, batch())).config == CONFIGS["doubled tables, more rows"]
    with torch.device("meta"):
        unknown = made("doubled tables")
    for module in (unknown, LanguageModel(DoubledLlama(same=False))):
        graph = capture(module, batch())
        assert not graph.parts and any(each.kind == "neg" for each in graph.operators)
        with pytest.raises(TwofoldError, match="LanguageModel is not a supported transformer"):
            recognise(graph)


def test_checkpointed_blocks_are_recomputed_whether_degrees_are_searched_or_not():
    """All blocks are the mode "full" of a transformer's recompute; some of them are no mode."""
    machine, every = Machine.load("h200-x2"), LanguageModel(DoubledLlama(checkpointed=LAYERS))
    found = recognise(capture(every, batch()))
    plan = search(capture(every, batch()), machine, degrees={}).best
    assert found.recompute == "full" and set(plan.recompute) == set(found.graph.recompute)
    some = capture(LanguageModel(DoubledLlama(checkpointed=1)), batch())
    assert recognise(some).recompute is None and found_in("doubled tables, more rows").recompute == "none"
    with pytest.raises(TwofoldError, match="other operators again than whole blocks or attention cores"):
        search(some, machine, degrees={})


def test_a_table_that_has_changed_is_refused():
    module = made("doubled tables, more rows")
    graph = capture(module, batch())
    module.model.cos[3, -1] += 0.5
    values = as_graph(graph, InitialParameters(module, 0))
    assert values["model.half_0_16.sin"].shape == (LENGTH, WIDTH // HEADS // 2)
    with pytest.raises(TwofoldError, match=r"'model\.cos' holds other values than when the module was captured"):
        values["model.half_0_16.cos"]


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_files_of_weights_have_the_tensors_of_the_module(kind, tmp_path):
    """Begin with a file of the module's weights, write a checkpoint, and export it: the result is that of the run."""
    module, degrees = made("GPT-2"), Degrees(micro_batch=4, global_batch=BATCH, optimizer=MOMENTUM)
    found = recognise(capture(module, batch()))
    plan = found.plan(plan_of(degrees, transformer(found.config, batch_size=BATCH)))
    torch.save(module.state_dict(), tmp_path / "first.pt")
    check_weights(str(tmp_path / "first.pt"), plan.graph)
    rows = dict(zip(names_of(module), (each.numpy() for each in batch()), strict=True))
    checkpoints = Checkpoints(folder=tmp_path / "checkpoints", every=2, keep=1)
    result = run_rank(
        lower(plan), plan, [rows] * 2, read_weights(str(tmp_path / "first.pt")), 2, device="cpu",
        options=RunOptions(checkpoints=checkpoints),
    )  # fmt: skip
    (checkpoint,) = written_checkpoints(tmp_path / "checkpoints")
    write_weights(checkpoint, tmp_path / f"last.{kind}")
    read = read_weights(str(tmp_path / f"last.{kind}"))
    assert set(read) == set(dict(module.named_parameters())) == set(result.weights)
    assert all(np.array_equal(read[name][...], result.weights[name]) for name in result.weights)
    missing = {name: each for name, each in module.state_dict().items() if "0.attn.c_attn.weight" not in name}
    torch.save(missing, tmp_path / "missing.pt")
    with pytest.raises(TwofoldError, match=r"lack the parameter 'model\.h\.0\.attn\.c_attn\.weight'"):
        check_weights(str(tmp_path / "missing.pt"), plan.graph)


def test_labels_that_the_model_shifts_are_fed_one_place_later():
    found = found_in("GPT-NeoX, cut labels")
    assert found.graph.later == {"labels": -100} and not found_in("GPT-NeoX").graph.later
    fed = {"input_ids": np.ones((2, 3)), "labels": np.array([[1, 2, 3], [4, 5, 6]])}
    (read,) = as_read(found.graph, [fed])
    assert read["labels"].tolist() == [[2, 3, -100], [5, 6, -100]] and read["input_ids"] is fed["input_ids"]
    assert fed["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("name", ["Phi-3, padded labels", "GPT-NeoX, cut labels", "GPT-2"])
def test_an_evaluation_is_the_loss_of_the_module(name):
    module, rows = made(name), batch(name)
    config = CONFIGS[name]
    plan = found_in(name).plan(
        plan_of(Degrees(micro_batch=BATCH, global_batch=BATCH), transformer(config, batch_size=BATCH))
    )
    fed = dict(zip(names_of(module), (each.numpy() for each in rows), strict=True))
    found = evaluate(plan, [fed], InitialParameters(module, 0), device=Device(kind="cpu"))
    assert found.loss == pytest.approx(module(*rows).item(), rel=1e-6)


# -- ranks -------------------------------------------------------------------------------------------------------------

SPARED = ParameterGroup(parameters=("*bias", "*ln*"), weight_decay=0.0)
ADAMW = Optimizer(kind="adamw", settings={"lr": 1e-3, "weight_decay": 0.1}, groups=(SPARED,))
MOMENTUM = Optimizer(kind="momentum", settings={"lr": 0.1, "weight_decay": 0.01}, clip_norm=1.0)
"""For modules whose keys have a bias, which has no gradient but for rounding: Adam would train that."""

RUNS = {
    "nanoGPT, untied, no biases; dp 2 pp 2": Degrees(dp=2, pp=2, micro_batch=2, global_batch=BATCH, optimizer=ADAMW),
    "nanoGPT; dp 2 tp 2, sequence parallel, level 2": Degrees(
        dp=2, tp=2, sequence_parallel=True, micro_batch=2, global_batch=BATCH,
        optimizer=msgspec.structs.replace(MOMENTUM, parallel_level=2, threshold_bytes=1),
    ),
    "nanoGPT, mask in a buffer, dropout; dp 2 tp 2": Degrees(
        dp=2, tp=2, micro_batch=2, global_batch=BATCH, optimizer=MOMENTUM
    ),
    "GPT-2, dropout, more rows; tp 4, sequence parallel": Degrees(
        tp=4, sequence_parallel=True, micro_batch=4, global_batch=BATCH, optimizer=MOMENTUM
    ),
    "GPT-NeoX; tp 2 pp 2": Degrees(tp=2, pp=2, micro_batch=2, global_batch=BATCH, optimizer=MOMENTUM),
    "Phi-3, padded labels; tp 2 pp 2, interleaved": Degrees(
        tp=2, pp=2, sequence_parallel=True, schedule="interleaved_1f1b", virtual=2, micro_batch=2, global_batch=BATCH,
        optimizer=ADAMW,
    ),
    "Granite; dp 2 pp 2": Degrees(dp=2, pp=2, micro_batch=2, global_batch=BATCH, optimizer=ADAMW),
    "GPT-NeoX, cut labels; cp 2 tp 2": Degrees(cp=2, tp=2, micro_batch=4, global_batch=BATCH, optimizer=MOMENTUM),
    "OPT, dropout; dp 2 tp 2": Degrees(dp=2, tp=2, micro_batch=2, global_batch=BATCH, optimizer=MOMENTUM),
    "BERT, more rows; cp 2 tp 2, sequence parallel": Degrees(
        cp=2, tp=2, sequence_parallel=True, micro_batch=4, global_batch=BATCH, optimizer=MOMENTUM
    ),
    "Cohere, positions of GLM; cp 2 tp 2": Degrees(
        cp=2, tp=2, micro_batch=4, global_batch=BATCH, optimizer=ADAMW
    ),
    "Llama of Meta; cp 2 tp 2": Degrees(cp=2, tp=2, micro_batch=4, global_batch=BATCH, optimizer=ADAMW),
    "Gemma; dp 2 tp 2": Degrees(dp=2, tp=2, micro_batch=2, global_batch=BATCH, optimizer=ADAMW),
    "Phi-4-mini; cp 2 tp 2, level 3": Degrees(
        cp=2, tp=2, micro_batch=4, global_batch=BATCH,
        optimizer=msgspec.structs.replace(ADAMW, parallel_level=3, threshold_bytes=1),
    ),
}  # fmt: skip


DEGREES = (
    Degrees(dp=2, tp=2, micro_batch=2, global_batch=BATCH, optimizer=MOMENTUM),
    Degrees(cp=2, tp=2, micro_batch=4, global_batch=BATCH, optimizer=MOMENTUM),
)
TRIED = OF_TRANSFORMERS if os.environ.get("EVERY_MODEL") == "1" else ("cohere", "gpt2")
RUNS |= {  # the models themselves, with the losses that they make
    f"transformers: {name}; {'cp' if number % 2 else 'dp'} 2 tp 2": DEGREES[number % 2]
    for number, name in enumerate(TRIED)
}


def module_of(run):
    return made(run.split("; ")[0])


def names_of(module):
    """The names of the arguments of forward: tokens and labels."""
    return module.forward.__code__.co_varnames[1:3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libraries")
    save_cases(folder, ((found_in(run.split("; ")[0]), RUNS[run], module_of(run), batch(run)) for run in RUNS))
    run_on_ranks(train_cases, 4, folder)
    return folder


@pytest.mark.ranks
@pytest.mark.parametrize("run", RUNS)
def test_it_trains_on_ranks_as_the_module_does_alone(folder, run):
    number, degrees, module = list(RUNS).index(run), RUNS[run], module_of(run)
    plan = kept_plan(folder / f"{number}.plan")[0]
    expected = train_reference(
        module, [batch(run)] * NUM_STEPS, optimizer=degrees.optimizer, num_steps=NUM_STEPS,
        num_micro_batches=plan.num_micro_batches, graph=plan.graph,
    )  # fmt: skip
    losses = np.load(folder / f"{number}.losses.npy").tolist()
    assert losses[-1] < losses[0]
    assert compare_losses(losses, expected.losses).max_rel_diff < 2e-6
    trained = {name: expected.weights[name] for name, _ in module.named_parameters()}
    with np.load(folder / f"{number}.weights.npz") as found:
        weights = dict(found)
    for name in [name for name in trained if name.endswith("k_proj.bias") and "opt" in run]:
        # begins at zero and has no gradient but for rounding
        assert max(np.abs(weights.pop(name)).max(), trained.pop(name).abs().max()) < 1e-7
    assert compare_weights(weights, trained).max_rel_diff < 1e-5
