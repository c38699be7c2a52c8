"""The oracle against oracles: gradient descent by hand, finite differences, torch's own optimizers."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from executor.reference.reference import compare_losses, compare_weights, train_reference
from executor.reference.verification import Verification
from executor.train.losscell import MAELoss, WithLossCell
from executor.weights.initial import initial_parameter, no_init_parameters
from plans.errors import TwofoldError
from plans.optimizer import Optimizer


def cell():
    with no_init_parameters():
        return WithLossCell(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), MAELoss())


def batches(count=4, size=8):
    random = np.random.default_rng(5)
    made = []
    for _ in range(count):
        x = random.normal(size=(size, 3)).astype(np.float32)
        x.flags.writeable = False  # as those of executor.data.digits may be
        made.append((x, random.integers(0, 10, size)))
    return made


def test_one_layer_is_gradient_descent_by_hand():
    net = WithLossCell(nn.Linear(3, 1, bias=False), nn.MSELoss())
    weight = net._backbone.weight.detach().numpy().astype(np.float64).copy()
    steps = [(x, y[:, None].astype(np.float32)) for x, y in batches()]
    reference = train_reference(net, steps, optimizer=Optimizer(settings={"lr": 0.1}), num_steps=4)
    expected = []
    for x, y in steps:
        error = x @ weight.T - y
        expected.append((error**2).mean())
        weight -= 0.1 * 2 / len(x) * error.T @ x
    assert reference.losses == pytest.approx(expected, rel=1e-5)
    assert reference.weights["_backbone.weight"].numpy() == pytest.approx(weight, rel=1e-5)


def test_micro_batches_train_the_same_function():
    whole = train_reference(cell(), batches(), optimizer=Optimizer(), num_steps=4, seed=1)
    parts = train_reference(cell(), batches(), optimizer=Optimizer(), num_steps=4, num_micro_batches=4, seed=1)
    assert compare_losses(parts.losses, whole.losses).max_rel_diff < 1e-6
    assert compare_weights(parts.weights, whole.weights).max_rel_diff < 1e-6


def test_the_module_is_left_alone_and_runs_are_repeatable():
    module = cell()
    first, second = (train_reference(module, batches(), optimizer=Optimizer(), num_steps=2, seed=1) for _ in range(2))
    assert all(parameter.is_meta for parameter in module.parameters())
    assert first.losses == second.losses
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_no_steps_give_the_initial_weights():
    module = cell()
    reference = train_reference(module, [], optimizer=Optimizer(), num_steps=0, seed=9)
    assert reference.losses == ()
    assert all(torch.equal(value, initial_parameter(module, name, 9)) for name, value in reference.weights.items())


SETTINGS = {
    "sgd": ({"lr": 0.1, "weight_decay": 0.2}, torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    "momentum": ({"lr": 0.1}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (
        {"lr": 0.1, "beta2": 0.9, "weight_decay": 0.5, "eps": 1e-6},
        torch.optim.AdamW,
        {"lr": 0.1, "betas": (0.9, 0.9), "weight_decay": 0.5, "eps": 1e-6},
    ),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_reach_the_optimizer_of_torch(kind):
    settings, optimizer_class, arguments = SETTINGS[kind]
    net = WithLossCell(nn.Linear(3, 1), MAELoss())
    reference = train_reference(net, batches(), optimizer=Optimizer(kind=kind, settings=settings), num_steps=4)
    optimizer = optimizer_class(net.parameters(), **arguments)
    for x, y in batches():
        optimizer.zero_grad()
        net(torch.tensor(x), torch.tensor(y)).backward()
        optimizer.step()
    assert all(torch.equal(value, net.get_parameter(name)) for name, value in reference.weights.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 5}, "5 steps need 5 batches, got 4"),
        ({"num_micro_batches": 3}, "3 micro-batches do not divide"),
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
    ],
)
def test_untrainable_plans_are_refused(settings, message):
    with pytest.raises(TwofoldError, match=message):
        train_reference(cell(), batches(), **{"optimizer": Optimizer(), "num_steps": 4} | settings)


def test_differences_are_relative_and_the_greatest_is_named():
    difference = compare_weights(
        {"a": torch.tensor([[3.0, 4.0]]), "b": np.array([1.0, 0.0])}, {"a": torch.tensor([[3.0, 5.0]]), "b": np.ones(2)}
    )
    assert difference.where == "b"
    assert difference.max_rel_diff == pytest.approx(1 / math.sqrt(2))
    assert difference.rel_diffs["a"] == pytest.approx(1 / math.sqrt(34))
    assert compare_losses([1.0, 2.2], [1.0, -2.0]).max_rel_diff == pytest.approx(2.1)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_what_is_no_number_never_passes(wrong):
    assert compare_losses([1.0, wrong], [1.0, wrong]).max_rel_diff == math.inf
    assert compare_weights({"w": torch.tensor([wrong])}, {"w": torch.ones(1)}).max_rel_diff == math.inf
    assert compare_weights({"w": torch.tensor([1e-9])}, {"w": torch.zeros(1)}).max_rel_diff == math.inf
    assert compare_weights({"w": torch.zeros(1)}, {"w": torch.zeros(1)}).max_rel_diff == 0


def test_only_equals_can_be_compared():
    with pytest.raises(TwofoldError, match="3 losses cannot be compared with 2"):
        compare_losses([1.0] * 3, [1.0] * 2)
    with pytest.raises(TwofoldError, match=r"\['v', 'w'\]"):
        compare_weights({"v": torch.ones(1)}, {"w": torch.ones(1)})
    with pytest.raises(TwofoldError, match=r"shape"):
        compare_weights({"w": torch.ones(2, 3)}, {"w": torch.ones(3, 2)})


def test_a_nudge_shows_which_weights_rounding_decides():
    """The bias of the keys adds the same to every score of a query: its gradient is zero but for rounding, which
    AdamW makes steps of."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x, label):
            q, k, v = (part(x) for part in (self.q, self.k, self.v))
            return nn.functional.mse_loss((q @ k.transpose(1, 2)).softmax(-1) @ v, label)

    torch.manual_seed(0)
    module, batch = Attention(), (torch.randn(4, 6, 8), torch.randn(4, 6, 8))
    adamw = Optimizer(kind="adamw", settings={"lr": 0.01})

    def weights(nudge=None):
        return train_reference(module, [batch] * 4, optimizer=adamw, num_steps=4, nudge=nudge).weights

    found = compare_weights(weights(nudge=0), weights()).rel_diffs
    assert found.pop("k.bias") > 1e-4
    assert max(found.values()) < 1e-5
    assert compare_weights(weights(), weights()).max_rel_diff == 0


@pytest.mark.parametrize(
    ("predicted_s", "says"),
    [(0.03, "predicted 30.0 ms, 25.0 % too short"), (0.05, "predicted 50.0 ms, 25.0 % too long")],
)
def test_a_step_time_is_compared_with_its_prediction(predicted_s, says):
    ran = SimpleNamespace(step_s=0.04, timeline=SimpleNamespace(kind="measured"))
    predicted = SimpleNamespace(step_interval_s=predicted_s, low_s=0.9 * predicted_s, high_s=1.1 * predicted_s)
    (check,) = Verification.timing_checks(SimpleNamespace(run=ran, predicted=predicted))
    assert check.detail.startswith(says) and check.informs and (check.value, check.high) == (0.04, 1.1 * predicted_s)
