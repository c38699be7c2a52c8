"""The path of an Ascend NPU with a stand-in for torch-npu: which kernels a step takes, and that it trains as torch.

Nothing here was run on Ascend. Attention, norms and AdamW are compared with torch one by one (kernels/test_numerics).
"""

import importlib
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from costmodels import Machine
from executor.device import Device, pick_device
from executor.kernels import OpContext, StepCounter
from executor.kernels import rule_of as torchs_rule_of
from executor.kinds import KINDS
from executor.step.compiled import CompiledStep
from executor.step.interpreter import Interpreter
from executor.train.options import RunOptions
from executor.train.run import run_rank
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import Experts, Rope, TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from search import uniform_plan
from tests.modules.transformer import Decoder, random_tokens, random_weights
from tests.support.npu_device import STANDINS, NpuDevice
from tests.support.on_ranks import keep_plan, kept_plan, run_on_ranks

pytestmark = pytest.mark.usefixtures("torch_npu")

SMALL = {"num_layers": 2, "hidden": 32, "num_heads": 4, "ffn": 48, "vocab": 64, "seq": 16, "dtype": "float32"}
# no bias of keys: it changes no softmax, and AdamW would scale the rounding errors that its gradient consists of
GPT = {"gated": False, "norm": "layer", "out_bias": True, "mlp_bias": True, "position": "learned"}
CONFIGS = {
    "llama": TransformerConfig(**SMALL, num_kv_heads=2, rope=Rope(base=100.0)),
    "gpt": TransformerConfig(**SMALL, **GPT),
    "mixture": TransformerConfig(**SMALL, experts=Experts(num_experts=4, top_k=2, ffn=24)),
}
ADAMW = Optimizer(kind="adamw", settings={"lr": 0.01, "weight_decay": 0.05})


@pytest.fixture(autouse=True)
def calls(torch_npu):
    """How often each function of torch-npu was called."""
    torch_npu.CALLS.clear()
    return torch_npu.CALLS


def site(shape, dtype):
    return OpContext(
        rank=0, mesh=Layout((1,), ("dp",)), shape=tuple(shape), dtype=str(dtype).removeprefix("torch."),
        counter=StepCounter(step=1),
    )  # fmt: skip


def both(call, shape, attrs, *inputs):
    """What the rule of an NPU makes, and torch's."""
    context = site(shape, inputs[0].dtype)
    return Device(kind="npu").rule_of(call)(context, attrs, *inputs), torchs_rule_of(call)(context, attrs, *inputs)


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [8, 4])
@pytest.mark.parametrize("call", ["rope.forward", "rope.grad0"])
def test_rope_turns_as_torchs_does(call, rotary, interleaved, calls):
    attrs = {"base": 100.0, "rotary": rotary, "interleaved": interleaved}
    for shape in ((2, 5, 3, 8), (2, 2, 5, 3, 8)):
        torch.testing.assert_close(*both(call, shape, attrs, torch.randn(shape)), rtol=1e-6, atol=1e-6)
    half = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)
    found, expected = both(call, half.shape, attrs, half)
    # cos and sin are rounded to 8 digits here, and the result as there
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)
    assert calls == {"npu_rotary_mul": 3}


def test_products_of_experts_are_grouped(calls):
    a, c = torch.randn(4, 6, 8, dtype=torch.bfloat16), torch.randn(4, 8, 5, dtype=torch.bfloat16)
    g = torch.randn(4, 6, 5, dtype=torch.bfloat16)
    for call, shape, *inputs in (
        ("matmul.forward", g.shape, a, c), ("matmul.grad0", a.shape, g, c), ("matmul.grad1", c.shape, g, a),
    ):  # fmt: skip
        found, expected = both(call, shape, {}, *inputs)
        assert found.shape == expected.shape and found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)
    assert calls == {"npu_grouped_matmul": 3}


WHAT_TORCH_DOES = {
    "double precision": ("rms_norm.forward", {"eps": 1e-5}, [(3, 8), (8,)], torch.float64),
    "a norm without a weight": ("rms_norm.forward", {"eps": 1e-5}, [(3, 8)], torch.float32),
    "a head of 1024": ("attention.forward", {}, [(1, 1, 2, 1024)] * 3, torch.float32),
    "values of another width": ("attention.forward", {}, [(1, 1, 2, 8), (1, 1, 2, 8), (1, 1, 2, 4)], torch.float32),
    "a thousand heads": ("rope.forward", {"base": 10.0}, [(1, 2, 1000, 4)], torch.float32),
    "matrices against one": ("matmul.forward", {}, [(2, 3, 4), (4, 5)], torch.bfloat16),
    "single-precision products": ("matmul.forward", {}, [(2, 3, 4), (2, 4, 5)], torch.float32),
}


@pytest.mark.parametrize("name", WHAT_TORCH_DOES)
def test_torch_runs_what_a_kernel_does_not_support(name, calls):
    call, attrs, shapes, dtype = WHAT_TORCH_DOES[name]
    made, expected = both(call, shapes[0], attrs, *[torch.randn(shape, dtype=dtype) for shape in shapes])
    torch.testing.assert_close(made, expected)
    assert not calls


# -- steps -------------------------------------------------------------------------------------------------------------


def plan_of(name, optimizer=ADAMW, num_micro_batches=2):
    graph = transformer(CONFIGS[name], batch_size=4)
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    return Plan(graph=graph, stages=(stage,), optimizer=optimizer, num_micro_batches=num_micro_batches)


def started(plan, device):
    rank = Interpreter(lower(plan), 0, device)
    rank.set_parameters({name: each.float().numpy() for name, each in random_weights(plan.graph).items()})
    return rank


def batches_of(plan, count):
    made = [random_tokens(plan.graph, SMALL["vocab"], seed) for seed in range(count)]
    return [{name: each.numpy() for name, each in batch.items()} for batch in made]


def trained_by_torch(name, batches, rates):
    """Losses and final weights of a plain torch module with torch.optim.AdamW, all samples at once."""
    module = Decoder(CONFIGS[name])
    module.load_state_dict({key: each.float() for key, each in random_weights(transformer(CONFIGS[name])).items()})
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.05, foreach=False)
    losses = []
    for batch, rate in zip(batches, rates, strict=True):
        optimizer.zero_grad()
        loss = module(*(torch.from_numpy(batch[key]) for key in ("tokens", "labels")))
        loss.backward()
        optimizer.param_groups[0]["lr"] = rate or 0.01
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: each.detach() for key, each in module.named_parameters()}


# per micro-batch and layer; a norm more at the end of the network; rope of queries and of keys
FUSED = {
    "llama": {
        "npu_fusion_attention": 4, "npu_fusion_attention_grad": 4, "npu_rms_norm": 10, "npu_rms_norm_backward": 20,
        "npu_rotary_mul": 16,
    },
    "gpt": {"npu_fusion_attention": 4, "npu_fusion_attention_grad": 4},
    "mixture": {
        "npu_fusion_attention": 4, "npu_fusion_attention_grad": 4, "npu_rms_norm": 10, "npu_rms_norm_backward": 20,
        "npu_rotary_mul": 16,
    },
}  # fmt: skip


ONE_RATE, SCHEDULE = [None] * 5, [0.01, 0.02, 0.03, 0.02, 0.01]


@pytest.mark.parametrize(("name", "rates"), [("gpt", ONE_RATE), *((name, SCHEDULE) for name in CONFIGS)])
def test_replayed_steps_train_as_one_device_does(name, rates, calls):
    plan = plan_of(name)
    device, batches = NpuDevice(), batches_of(plan, 5)
    rank, eager = CompiledStep(started(plan, device)), started(plan, NpuDevice())
    losses = [rank.step(batch, rate).item() for batch, rate in zip(batches, rates, strict=True)]
    assert rank.execution == "graph" and device.log.count("replay") == 3
    assert calls == Counter({key: 3 * count for key, count in FUSED[name].items()})  # two eager steps and a recording
    assert losses == [eager.step(batch, rate).item() for batch, rate in zip(batches, rates, strict=True)]
    expected, weights = trained_by_torch(name, batches, rates)
    assert losses == pytest.approx(expected, rel=2e-5)
    for placement in eager.group.parameters:
        torch.testing.assert_close(eager.kept(placement), weights[placement.name], rtol=2e-4, atol=2e-4)


def test_a_rate_that_the_run_begins_to_state_is_recorded_anew():
    """The fused AdamW has the plan's rate from the host, so that a recording keeps it."""
    plan = plan_of("gpt")
    batches, rates = batches_of(plan, 7), [None] * 5 + [0.05, 0.04]
    device = NpuDevice()
    rank, eager = CompiledStep(started(plan, device)), started(plan, NpuDevice())
    losses = [rank.step(batch, rate).item() for batch, rate in zip(batches, rates, strict=True)]
    assert losses == [eager.step(batch, rate).item() for batch, rate in zip(batches, rates, strict=True)]
    assert device.log.count("capture") == 2


def test_a_mixture_in_half_precision_takes_grouped_products(calls):
    config = TransformerConfig(**SMALL | {"dtype": "bfloat16"}, experts=Experts(num_experts=4, top_k=2, ffn=24))
    graph = transformer(config, batch_size=4)
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    plan = Plan(graph=graph, stages=(stage,), optimizer=ADAMW)
    losses = []
    for device in (NpuDevice(), Device(kind="cpu")):
        rank = started(plan, device)  # the first step checks the shape and dtype of every value
        losses.append([rank.step(batch).item() for batch in batches_of(plan, 2)])
    assert losses[0] == pytest.approx(losses[1], rel=2**-7)
    assert calls["npu_grouped_matmul"] == 2 * 2 * 9  # steps, layers, three products and two gradients of each


# -- on several ranks --------------------------------------------------------------------------------------------------

SPLIT = {
    "cp 2, tp 2": ("llama", {"cp": 2, "tp": 2, "sequence_parallel": True}),
    "pp 2, dp 2, zero 1": ("llama", {"pp": 2, "dp": 2, "zero": 1, "recompute": "full"}),
    "dp 2, ep 2, tp 2": ("mixture", {"dp": 2, "ep": 2, "tp": 2}),
}


def split_plan(name):
    config, degrees = SPLIT[name]
    graph = transformer(CONFIGS[config], batch_size=4)
    return uniform_plan(graph, Machine.load("ascend-910b2-x8"), optimizer=ADAMW, micro_batch=2, **degrees)


def train_on_ranks(rank, folder):
    sys.path.insert(0, str(STANDINS))
    for name in SPLIT:
        (plan, program), device = kept_plan(folder / f"{name}.plan"), NpuDevice()
        weights = {key: each.float().numpy() for key, each in random_weights(plan.graph).items()}
        result = run_rank(
            program, plan, batches_of(plan, 4), weights, 4, device=device, weights_path=folder / f"{name}.npz",
            options=RunOptions(record_steps=1),
        )  # fmt: skip
        assert (result.execution, result.differences) == ("graph", ()), result.fallback
        np.save(folder / f"{name}.{rank}.npy", result.losses)


@pytest.mark.ranks
def test_ranks_train_as_one_device_does(tmp_path):
    plans = {name: split_plan(name) for name in SPLIT}
    for name, plan in plans.items():
        keep_plan(plan, tmp_path / f"{name}.plan")
    run_on_ranks(train_on_ranks, 4, tmp_path)
    for name, (config, _) in SPLIT.items():
        losses, weights = trained_by_torch(config, batches_of(plans[name], 4), [None] * 4)
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.0.npy"), losses, rtol=2e-5)
        with np.load(tmp_path / f"{name}.npz") as found:
            assert set(found.files) == set(weights)
            for key, weight in weights.items():
                np.testing.assert_allclose(found[key], weight.numpy(), rtol=2e-4, atol=2e-4, err_msg=f"{name}: {key}")


# -- the kind ----------------------------------------------------------------------------------------------------------


def test_records_name_torch_npu():
    assert KINDS["npu"].versions() == {"torch_npu": "stand-in"}


def test_tensors_keep_the_order_of_their_dims(torch_npu):
    KINDS["npu"].prepare()
    assert torch_npu.npu.config.allow_internal_format is False


def test_torch_npu_that_does_not_load_is_explained(monkeypatch, tmp_path):
    with pytest.raises(TwofoldError, match="'npu' is not available: no accelerator found on this host; use cpu"):
        pick_device("npu")  # it loads, but there is no device
    monkeypatch.delitem(sys.modules, "torch_npu")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(each for each in sys.path if each != str(STANDINS))])
    importlib.invalidate_caches()
    with pytest.raises(TwofoldError, match=r"needs torch-npu in the version of your torch: pip install twofold\[npu\]"):
        pick_device("npu")
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    importlib.invalidate_caches()
    with pytest.raises(TwofoldError, match=r"torch-npu does not load \(libhccl.so: .*\); is the Ascend toolkit"):
        pick_device("npu")
    assert pick_device("auto").kind == "cpu"


def test_every_npu_kernel_replaces_one_of_torchs():
    for call in KINDS["npu"].rules():
        assert callable(torchs_rule_of(call))
