"""dtypes of weights, gradients, master weights and states: against a plain torch loop of the same recipe."""

import numpy as np
import pytest
import torch

from executor.device import Device
from executor.step.interpreter import Interpreter
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.program import Scope
from tests.support.layered_training import ADAMW, batches, graph, parameters, plan, trained

ONE = Layout((1,), ("one",))
RECIPES = {
    "float32": ("float32", {}),
    "bfloat16 throughout": ("bfloat16", {}),
    "float32 gradients": ("bfloat16", {"gradient_dtype": "float32"}),
    "float32 master weights": ("bfloat16", {"gradient_dtype": "float32", "master_dtype": "float32"}),
    "master weights, bfloat16 gradients": ("bfloat16", {"master_dtype": "float32"}),
    "clipped": ("bfloat16", {"gradient_dtype": "float32", "master_dtype": "float32", "clip_norm": 0.05}),
}


def on_one_rank(of, optimizer, num_micro_batches=1):
    rank = Interpreter(lower(plan(ONE, optimizer, of=of, num_micro_batches=num_micro_batches)), 0, Device(kind="cpu"))
    rank.set_parameters(parameters(of))
    return rank


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_the_plain_loop(recipe, num_micro_batches):
    """The same roundings in the same places, so that bfloat16 weights agree as far as float32 ones do."""
    dtype, dtypes = RECIPES[recipe]
    of, optimizer = graph(dtype=dtype), Optimizer(kind="adamw", settings=ADAMW, **dtypes)
    rank = on_one_rank(of, optimizer, num_micro_batches)
    found = [rank.step(batch).item() for batch in batches(of, 5)]
    losses, masters, weights = trained(of, optimizer, 5, num_micro_batches)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    for placement in rank.group.parameters:
        assert rank.kept(placement).dtype == getattr(torch, optimizer.updates_in(dtype))
        np.testing.assert_allclose(rank.kept(placement).float().numpy(), masters[placement.name], rtol=1e-6, atol=1e-6)
        weight = rank._env[rank._slot(placement.weight, 0)]
        assert weight.dtype == getattr(torch, dtype)
        assert torch.equal(weight, rank.kept(placement).to(weight.dtype))
        np.testing.assert_allclose(weight.float().numpy(), weights[placement.name], rtol=1e-6, atol=1e-6)


def test_master_weights_keep_digits_that_bfloat16_loses():
    """Steps of 1e-4 on weights near 1 are below half an ulp of bfloat16, 2**-9."""
    of = graph(dtype="bfloat16")
    moved = {}
    for master in (None, "float32"):
        settings = {"lr": 1e-4, "weight_decay": 0.0}
        rank = on_one_rank(of, Optimizer(kind="adamw", settings=settings, master_dtype=master))
        ones = {name: np.ones_like(value) for name, value in parameters(of).items()}
        rank.set_parameters(ones)
        for batch in batches(of, 3):
            rank.step(batch)
        moved[master] = max(
            float((rank.kept(placement).float() - 1).abs().max()) for placement in rank.group.parameters
        )
    assert moved[None] == 0.0
    assert moved["float32"] == pytest.approx(3e-4, rel=0.1)


@pytest.mark.parametrize(
    ("dtypes", "per_element"),
    [({}, 2 + 2 + 4), ({"gradient_dtype": "float32", "master_dtype": "float32"}, 18), ({"state_dtype": "float32"}, 12)],
)
def test_bytes_per_parameter(dtypes, per_element):
    optimizer = Optimizer(kind="adamw", **dtypes)
    assert optimizer.bytes_per_element("bfloat16") == per_element
    of = graph(dtype="bfloat16")
    (group,) = lower(plan(ONE, optimizer, of=of)).groups
    held = [
        value
        for name, value in group.values.items()
        if value.scope is Scope.KEPT or name in {f"g:{placement.name}" for placement in group.parameters}
    ]
    elements = sum(tensor.num_elements for tensor in of.parameters)
    assert sum(value.size_bytes for value in held) == per_element * elements


def test_states_may_have_fewer_digits_than_what_they_update():
    of = graph(dtype="bfloat16")
    optimizer = Optimizer(kind="adamw", settings=ADAMW, master_dtype="float32", state_dtype="bfloat16")
    rank = on_one_rank(of, optimizer)
    losses = [rank.step(batch).item() for batch in batches(of, 5)]
    np.testing.assert_allclose(losses, trained(of, optimizer, 5)[0], rtol=2**-6)
    states = {
        rank._env[rank._slot(state, 0)].dtype for placement in rank.group.parameters for state in placement.states
    }
    assert states == {torch.bfloat16}


def test_dtypes_that_are_not_known_are_refused():
    for name in ("gradient_dtype", "reduce_dtype", "master_dtype", "state_dtype"):
        with pytest.raises(TwofoldError, match=f"{name} 'fp8' is not known: float64, float32"):
            Optimizer(**{name: "fp8"})


def test_the_reference_trains_with_the_same_recipe():
    from torch import nn

    from executor.reference.reference import train_reference

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).bfloat16()

        def forward(self, x, y):
            x = x.bfloat16()
            for layer in self.layers:
                x = nn.functional.gelu(layer(x))
            return nn.functional.mse_loss(x.float(), y)

    of = graph(dtype="bfloat16")
    optimizer = Optimizer(
        kind="adamw", settings=ADAMW, gradient_dtype="float32", master_dtype="float32", clip_norm=0.05
    )
    module = Layers()
    with torch.no_grad():
        for name, value in parameters(of).items():
            module.get_parameter(name).copy_(torch.from_numpy(value))
    data = [(batch["x"], batch["y"]) for batch in batches(of, 4)]
    reference = train_reference(module, data, optimizer=optimizer, num_steps=4, num_micro_batches=2)
    losses, masters, _ = trained(of, optimizer, 4, 2)
    np.testing.assert_allclose(reference.losses, losses, rtol=1e-6)
    for name, weight in reference.weights.items():
        assert weight.dtype is torch.float32
        np.testing.assert_allclose(weight.numpy(), masters[name], rtol=1e-6, atol=1e-6)
