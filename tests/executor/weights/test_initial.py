"""Initial values: the same for every rank, layout, order and process, and what torch's own initialisers say."""

import hashlib
import os

import pytest
import torch
from torch import nn

from executor.train.losscell import MAELoss, WithLossCell
from executor.weights.initial import (
    get_seed,
    initial_parameter,
    initialise,
    initialised_copy,
    initializer,
    no_init_parameters,
    set_seed,
)
from plans.errors import TwofoldError
from tests.support.on_ranks import run_on_ranks


class Network(nn.Module):
    """Parameters of every kind: of modules, tied, bare, with an initialiser of their own."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(784, 64)
        self.layer2 = nn.Linear(64, 64)
        self.layer3 = nn.Linear(64, 64)
        self.layer3.weight = self.layer2.weight
        self.own = nn.Linear(64, 8)
        nn.init.constant_(self.own.bias, 3.0)
        self.bare = nn.Parameter(torch.randn(50, 40) * 0.1 + 5)
        self.cut = nn.Parameter(nn.init.trunc_normal_(torch.empty(400), std=2.0, a=-1.0, b=1.0))
        self.given = initializer("normal", [100, 40])
        self.wrapped = nn.Parameter(initializer("ones", [3]))
        self.rows = nn.Embedding(5, 4, padding_idx=2)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(8, 2)


@pytest.fixture(scope="module")
def lazy():
    with no_init_parameters():
        return Network()


@pytest.fixture(scope="module")
def values(lazy):
    return {name: initial_parameter(lazy, name, 3) for name, _ in lazy.named_parameters()}


def digest(values):
    text = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(values.items()))
    return hashlib.sha256(text).hexdigest()


def test_nothing_has_data_and_asking_does_not_change_that(lazy, values):
    assert all(tensor.is_meta for tensor in [*lazy.parameters(), *lazy.buffers()])
    assert all(not value.is_meta and value.isfinite().all() for value in values.values())


def test_modules_built_afterwards_are_ordinary(lazy):
    assert not nn.Linear(2, 2).weight.is_meta
    assert not hasattr(nn.Linear(2, 2).weight, "_twofold_initial")


def test_linear_is_initialised_as_torch_does(values):
    weight, bias = values["layer1.weight"], values["layer1.bias"]
    bound = 784**-0.5  # torch.nn.Linear: U(-1/sqrt(k), 1/sqrt(k)) for weight and bias, k input features
    assert weight.shape == (64, 784)
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert 0.8 * bound < bias.abs().max() <= bound


def test_own_initialisers_are_kept(values):
    assert values["own.bias"].eq(3).all()
    assert values["bare"].mean().item() == pytest.approx(5, abs=0.02)
    assert values["bare"].std().item() == pytest.approx(0.1, rel=0.1)
    assert values["given"].std().item() == pytest.approx(0.01, rel=0.1)
    assert values["wrapped"].eq(1).all()
    assert values["rows.weight"][2].eq(0).all() and values["rows.weight"][3].ne(0).all()
    assert 0.9 < values["cut"].abs().max() <= 1
    assert values["attention.out_proj.bias"].eq(0).all()


def test_parameters_of_equal_shape_differ_and_tied_ones_do_not(lazy, values):
    assert not torch.equal(values["layer2.bias"], values["layer3.bias"])
    assert torch.equal(values["layer2.weight"], initial_parameter(lazy, "layer3.weight", 3))
    assert not torch.equal(values["layer1.weight"], initial_parameter(lazy, "layer1.weight", 4))


def test_the_order_of_calls_and_torch_generator_have_no_influence(lazy, values):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = {name: initial_parameter(lazy, name, 3) for name in reversed(values)}
    assert digest(again) == digest(values)
    assert torch.equal(torch.get_rng_state(), before)


def first_values():
    with no_init_parameters():
        net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    return [initial_parameter(net, name, 11).flatten().tolist()[:3] for name in ("1.bias", "0.weight")]


def write_first_values(rank, folder):
    (folder / "values").write_text(f"{hash('values')} {first_values()}")


def test_other_processes_find_the_same_values(tmp_path):
    """The server of ranks has a hash seed of its own."""
    run_on_ranks(write_first_values, 1, tmp_path, joined=False)
    seed, values = (tmp_path / "values").read_text().split(" ", 1)
    assert values == str(first_values())
    assert "PYTHONHASHSEED" in os.environ or int(seed) != hash("values")


def test_built_with_or_without_data_gives_the_same_values():
    with no_init_parameters():
        lazy = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Embedding(5, 3))
    eager = initialise(nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Embedding(5, 3)), 3, overwrite=True)
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Embedding(5, 3))
    for name, parameter in eager.named_parameters():
        assert torch.equal(initial_parameter(lazy, name, 3), parameter), name
        assert torch.equal(initial_parameter(meta, name, 3), parameter), name


def test_values_that_are_there_are_used():
    net = nn.Linear(4, 3)
    assert torch.equal(initial_parameter(net, "weight", 1), net.weight)
    before = net.weight.clone()
    assert torch.equal(initialise(net, 1).weight, before)


def test_the_loss_around_a_network_does_not_change_its_values():
    with no_init_parameters():
        net = nn.Linear(4, 3)
    cell = WithLossCell(net, MAELoss())
    assert torch.equal(initial_parameter(cell, "_backbone.weight", 5), initial_parameter(net, "weight", 5))


def test_initialise_fills_in_place_what_an_optimizer_holds_already():
    with no_init_parameters():
        net = Network()
        optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    held = optimizer.param_groups[0]["params"]
    copied = initialised_copy(net, 3)
    assert all(parameter.is_meta for parameter in held)
    assert initialise(net, 3) is net
    assert all(one is other for one, other in zip(held, net.parameters(), strict=True))
    assert net.layer3.weight is net.layer2.weight
    assert copied.layer3.weight is copied.layer2.weight
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, initial_parameter(net, name)) and torch.equal(
            parameter, copied.get_parameter(name)
        )
    assert net.norm.running_var.eq(1).all() and net.norm.num_batches_tracked == 0


def test_a_copy_computes_with_layers_of_its_own_also_in_functions_that_read_them():
    """minGPT keeps its MLP as a lambda that reads the layers around it."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"fc": nn.Linear(2, 2)})
            layers = self.layers
            self.mlp = lambda x: layers.fc(x)

        def forward(self, x):
            return self.mlp(x)

    block = Block()
    copied = initialised_copy(block)
    copied(torch.ones(1, 2)).sum().backward()
    assert copied.layers.fc.weight.grad is not None and block.layers.fc.weight.grad is None


def test_set_seed_is_the_default_and_seeds_torch(lazy, values):
    before = get_seed()
    try:
        set_seed(3)
        assert torch.equal(initial_parameter(lazy, "bare"), values["bare"])
        drawn = torch.rand(3)
        set_seed(3)
        assert torch.equal(torch.rand(3), drawn)
    finally:
        set_seed(before)
    with pytest.raises(TwofoldError, match="seed"):
        set_seed(-1)


def test_a_change_of_dtype_is_followed(lazy):
    with no_init_parameters():
        net = nn.Linear(4, 3).bfloat16()
        also = nn.Linear(4, 3)
    assert torch.equal(initial_parameter(net, "weight", 1), initial_parameter(also, "weight", 1).bfloat16())


class Bare(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.weight = nn.Parameter(tensor())


@pytest.mark.parametrize("tensor", [lambda: torch.empty(3), lambda: torch.tensor([1.0, 2.0])])
def test_a_parameter_nobody_initialises_is_an_error(tensor):
    with no_init_parameters():
        module = Bare(tensor)
    with pytest.raises(TwofoldError, match=r"'weight' of Bare.*initializer.*reset_parameters"):
        initial_parameter(module, "weight", 1)


def test_writing_to_a_parameter_without_data_is_an_error():
    with no_init_parameters():
        net = nn.Linear(4, 3)
    nn.init.zeros_(net.weight)
    with pytest.raises(TwofoldError, match="'weight' was written to after"):
        initialise(net, 1)


def test_unknown_names_are_refused(lazy):
    with pytest.raises(TwofoldError, match=r"no parameter 'layer9'.*layer1\.weight"):
        initial_parameter(lazy, "layer9", 1)
    with pytest.raises(TwofoldError, match="'nromal' is not known; known: normal"):
        initializer("nromal", [2])


@pytest.mark.parametrize(
    ("name", "mean", "std"),
    [
        ("normal", 0, 0.01), ("uniform", 0, 0.14 / 12**0.5), ("truncatedNormal", 0, 0.01 * 0.8796),  # cut at 2 sigma
        ("xavier_uniform", 0, (2 / 1000) ** 0.5), ("he_uniform", 0, (2 / 600) ** 0.5), ("zeros", 0, 0), ("ones", 1, 0),
    ],
)  # fmt: skip
def test_named_initializers_have_the_documented_deviations(name, mean, std):
    """Those of MindSpore; Glorot and Bengio 2010 and He et al. 2015 of a weight [400, 600]."""
    torch.manual_seed(1)
    value = initializer(name, [400, 600]).detach()
    assert value.mean().item() == pytest.approx(mean, abs=1e-4 + 0.01 * std)
    assert value.std().item() == pytest.approx(std, rel=0.01)
