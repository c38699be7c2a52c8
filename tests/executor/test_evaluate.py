"""The forward of a plan alone: loss and outputs equal those of a plain module; trained weights come back into it."""

import numpy as np
import pytest
import torch
from torch import nn

import twofold as tf
from costmodels import Machine
from executor.device import Device
from executor.reference.reference import train_reference
from executor.train.evaluate import Evaluation, evaluate, evaluation_plan
from executor.train.losscell import MAELoss, WithLossCell
from executor.weights.initial import initialise
from executor.weights.returned import take_back
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.program import Kind
from search.uniform import uniform_plan
from tests.modules.transformer import Decoder, random_tokens, random_weights
from tests.support.on_ranks import run_on_ranks

CONFIG = TransformerConfig(
    num_layers=4, hidden=16, num_heads=4, ffn=24, vocab=32, seq=8, dtype="float64", dropout=0.3, attention_dropout=0.2
)
DEGREES = {
    "data": {"dp": 4, "zero": 3},
    "tensor": {"dp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "pipeline": {"dp": 2, "pp": 2, "micro_batch": 2, "zero": 1},
    "virtual": {"tp": 2, "pp": 2, "micro_batch": 2, "schedule": "zb_v", "virtual": 2},
}


def plan_of(name):
    optimizer = Optimizer(kind="adamw", settings={"lr": 0.1})
    degrees = DEGREES[name] | ({"micro_batch": 8 // DEGREES[name].get("dp", 1)} if "pp" not in DEGREES[name] else {})
    return uniform_plan(transformer(CONFIG, batch_size=8), Machine.load("h200-x4"), optimizer=optimizer, **degrees)


def expected(graph, weights, batch):
    """Loss, and logits of the whole batch."""
    module = Decoder(CONFIG).to(torch.float64)
    module.load_state_dict(weights)
    with torch.no_grad():
        loss = module(**batch).item()
        x = module.tok_embeddings(batch["tokens"])
        for layer in module.layers:
            x = layer(x, None)
        return loss, (module.norm(x) @ module.output.weight.T).numpy()


@pytest.mark.parametrize("name", DEGREES)
def test_an_evaluation_has_forwards_alone(name):
    program = lower(evaluation_plan(plan_of(name)))
    lines = [line for group in program.groups for _, line in group.walk() if line.kind is Kind.COMPUTE]
    assert {line.part for line in lines} <= {"F", "L"}
    assert not any(group.parameters for group in program.groups)
    assert all(line.attrs.get("p", 0) == 0 for line in lines)


def evaluate_on_rank(rank, folder):
    for name in DEGREES:
        plan = plan_of(name)
        weights = {name: each.numpy() for name, each in random_weights(plan.graph).items()}
        feed = [{key: each.numpy() for key, each in random_tokens(plan.graph, 32, seed).items()} for seed in (1, 2)]
        found = evaluate(plan, feed, weights, device=Device(kind="cpu"), outputs=True)
        np.savez(folder / f"{name}.{rank}.npz", losses=found.losses, outputs=np.array(found.outputs))


@pytest.mark.ranks
def test_loss_and_outputs_are_those_of_a_plain_module(tmp_path):
    run_on_ranks(evaluate_on_rank, 4, tmp_path)
    for name in DEGREES:
        graph = plan_of(name).graph
        weights = random_weights(graph)
        each = [expected(graph, weights, random_tokens(graph, 32, seed)) for seed in (1, 2)]
        for rank in range(4):
            with np.load(tmp_path / f"{name}.{rank}.npz") as found:
                np.testing.assert_allclose(found["losses"], [loss for loss, _ in each], rtol=1e-12)
                if rank == 0:
                    np.testing.assert_allclose(found["outputs"], [logits for _, logits in each], rtol=1e-10, atol=1e-12)
                else:
                    assert found["outputs"].size == 0


def test_one_rank_needs_no_others():
    plan = uniform_plan(transformer(CONFIG, batch_size=2), Machine.load("h200-x1"), dp=1)
    weights = random_weights(plan.graph)
    batch = random_tokens(plan.graph, 32)
    arrays = {name: each.numpy() for name, each in weights.items()}
    found = evaluate(plan, [batch], arrays, device=Device(kind="cpu"), outputs=True)
    loss, logits = expected(plan.graph, weights, batch)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(found.outputs[0], logits, rtol=1e-10, atol=1e-12)
    with pytest.raises(TwofoldError, match="no batch to evaluate"):
        evaluate(plan, [], arrays, device=Device(kind="cpu"))


def test_the_loss_is_the_mean_over_batches():
    assert Evaluation(losses=(1.0, 2.0)).loss == 1.5


# -- weights that come back --------------------------------------------------------------------------------------------


def test_weights_come_back_whether_or_not_there_was_memory():
    with tf.no_init_parameters():
        net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    net.append(nn.Linear(2, 1))
    net[2].weight = net[1].weight
    before = net[1].bias
    take_back(net, {"0.weight": np.ones((2, 3), np.float32), "1.bias": np.full(1, 5.0)}, Device(kind="cpu"))
    assert net[0].weight.tolist() == [[1.0] * 3] * 2 and net[1].bias.tolist() == [5.0] and before.is_meta
    assert net[2].weight is net[1].weight and not net[1].weight.is_meta  # not trained: its initial value
    half = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    take_back(half, {"weight": np.array([[1.0, 1 + 2**-12]], np.float32)}, Device(kind="cpu"))
    assert half.weight.dtype == torch.bfloat16 and half.weight.tolist() == [[1.0, 1.0]]


def network():
    tf.set_seed(3)
    with tf.no_init_parameters():
        return WithLossCell(nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1)), MAELoss())


def dataset():
    random = np.random.default_rng(0)
    return [(random.standard_normal((8, 6)).astype(np.float32), np.zeros((8, 1), np.float32)) for _ in range(3)]


def train_and_evaluate(rank, folder):
    net = network()
    wrapped = tf.AutoParallel(tf.Pipeline(net, 2, {"_backbone.0": 0, "_backbone.2": 1}))
    wrapped.pipeline(stages=2)
    model = tf.Model(wrapped, optimizer=torch.optim.SGD(net.parameters(), 0.1), machine="cpu-2core-x8")
    before = model.eval(dataset())
    model.train(2, dataset())
    torch.save({"before": before.losses, "state": net.state_dict()}, folder / f"{rank}.pt")
    after = model.eval(dataset(), outputs=True)
    torch.save({"after": after.losses, "outputs": after.outputs}, folder / f"{rank}.after.pt")


@pytest.mark.ranks
def test_a_model_is_trained_evaluated_and_used(tmp_path):
    run_on_ranks(train_and_evaluate, 2, tmp_path, joined=False)
    plain = network()
    reference = train_reference(
        plain, [*dataset(), *dataset()], optimizer=Optimizer(settings={"lr": 0.1}), num_steps=6, num_micro_batches=2
    )
    fresh = initialise(plain)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        after = torch.load(tmp_path / f"{rank}.after.pt", weights_only=False)
        batches = [tuple(map(torch.from_numpy, batch)) for batch in dataset()]
        fresh.load_state_dict(initialise(network()).state_dict())
        assert found["before"] == pytest.approx([fresh(*batch).item() for batch in batches], rel=1e-6)
        for name, weight in reference.weights.items():
            torch.testing.assert_close(found["state"][name], weight)
        fresh.load_state_dict(found["state"])
        assert after["after"] == pytest.approx([fresh(*batch).item() for batch in batches], rel=1e-6)
        if rank == 0:
            outputs = torch.from_numpy(np.concatenate(after["outputs"]))
            made = torch.cat([fresh._backbone(x) for x, _ in batches])
            torch.testing.assert_close(outputs, made.detach())
