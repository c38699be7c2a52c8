"""What torch draws inside of `PlannedRandom`: the distributions of torch's documentation, from the plan's numbers."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from executor.kernels.random import drawn_elements, kept_elements, seed_of
from executor.reference.random import PlannedRandom
from plans.errors import TwofoldError
from plans.model.graph import Graph, Operator, Tensor

SHAPE, STEP, MICRO_BATCH = (8, 500), 3, 2
REGION = [(0, size) for size in SHAPE]


def planned(kind, number=1, dtype=torch.float32):
    return drawn_elements(kind, REGION, SHAPE, dtype, seed_of(number), STEP, MICRO_BATCH)


def inside(make):
    with PlannedRandom().forward(STEP, MICRO_BATCH):
        return make()


DRAWS = {
    "rand": (lambda: torch.rand(SHAPE), lambda u: u, 1 / 2, 1 / 12),
    "rand_like": (lambda: torch.rand_like(torch.ones(SHAPE)), lambda u: u, 1 / 2, 1 / 12),
    "uniform_": (lambda: torch.empty(SHAPE).uniform_(2, 5), lambda u: 2 + 3 * u, 3.5, 9 / 12),
    "randint": (lambda: torch.randint(3, 7, SHAPE), lambda u: (3 + 4 * u).long(), 4.5, 15 / 12),
    "randint below": (lambda: torch.randint(4, SHAPE), lambda u: (4 * u).long(), 1.5, 15 / 12),
    "exponential_": (lambda: torch.empty(SHAPE).exponential_(2.0), lambda u: -torch.log(1 - u) / 2, 1 / 2, 1 / 4),
    "exponential_ of 1": (lambda: torch.empty(SHAPE).exponential_(), lambda u: -torch.log(1 - u), 1, 1),
    "bernoulli": (lambda: torch.bernoulli(torch.full(SHAPE, 0.3)), lambda u: (u < 0.3).float(), 0.3, 0.21),
    "randn": (lambda: torch.randn(SHAPE), None, 0, 1),
    "normal_": (lambda: torch.empty(SHAPE).normal_(3, 2), None, 3, 4),
    "normal": (lambda: torch.normal(-1.0, 3.0, SHAPE), None, -1, 9),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_draws_have_their_distribution_and_are_those_of_the_plan(name):
    make, formula, mean, variance = DRAWS[name]
    found = inside(make)
    if formula is None:
        expected = planned("normal") * math.sqrt(variance) + mean
    else:
        expected = formula(planned("uniform"))
    torch.testing.assert_close(found, expected)
    values = found.double()
    assert abs(values.mean() - mean) < 5 * math.sqrt(variance / values.numel())
    assert abs(values.var() / variance - 1) < 0.15


@pytest.mark.parametrize("p", [0.25, 0.75])
def test_dropout_keeps_the_elements_of_the_plan(p):
    x = torch.rand(SHAPE) + 1
    forms = {
        "functional": lambda: F.dropout(x, p), "torch": lambda: torch.dropout(x, p, True),
        "in place": lambda: F.dropout(x.clone(), p, inplace=True),
        "module": lambda: torch.nn.Dropout(p)(x),
    }  # fmt: skip
    kept = kept_elements(REGION, SHAPE, p, seed_of(1), STEP, MICRO_BATCH)
    assert abs(kept.double().mean() - (1 - p)) < 0.04
    for name, make in forms.items():
        torch.testing.assert_close(inside(make), x * kept / (1 - p), msg=name)
    assert torch.equal(inside(lambda: F.dropout(x, p, training=False)), x)
    assert torch.equal(inside(lambda: F.dropout(x, 1.0)), torch.zeros(SHAPE))
    seconds = inside(lambda: (F.dropout(x, 0.0), F.dropout(x, p), F.dropout(x, p))[2])
    torch.testing.assert_close(seconds, x * kept_elements(REGION, SHAPE, p, seed_of(2), STEP, MICRO_BATCH) / (1 - p))


def test_attention_with_a_dropout_of_almost_nothing_is_that_of_torch():
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    masks = {"none": None, "choice": torch.rand(5, 5) < 0.6, "added": torch.randn(5, 5)}
    masks["choice"].fill_diagonal_(True)
    for (name, mask), causal, scale, shared in itertools.product(
        masks.items(), (False, True), (None, 0.4), (True, False)
    ):
        if causal and mask is not None:
            continue  # torch takes one of them
        keys, values = (k, v) if shared else (k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
        options = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": shared}
        expected = F.scaled_dot_product_attention(q, keys, values, **options)
        call = F.scaled_dot_product_attention
        for p in (0.0, 1e-9):
            found = inside(lambda p=p, call=call, keys=keys, values=values, options=options: call(
                q, keys, values, dropout_p=p, **options))  # fmt: skip
            torch.testing.assert_close(found, expected, msg=f"{name}, {options}, {p}")


def graph_of(shape, kind="dropout", **attrs):
    x, y, loss = (
        Tensor(name=name, shape=size, kind=what)
        for name, size, what in (("x", shape, "input"), ("y", shape, "activation"), ("loss", (), "activation"))
    )
    operators = (
        Operator(name="drop", kind=kind, inputs=("x",), outputs=("y",), attrs=attrs),
        Operator(name="mean", kind="mean_loss", inputs=("y",), outputs=("loss",)),
    )
    return Graph(
        name="g", batch_size=shape[0], tensors={each.name: each for each in (x, y, loss)}, operators=operators,
        loss="loss",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("drawn", "fits"),
    [
        (lambda: F.dropout(torch.ones(4, 6), 0.3), True), (lambda: F.dropout(torch.ones(2, 6), 0.3), True),
        (lambda: F.dropout(torch.ones(4, 6), 1 - (1 - 0.3)), True), (lambda: F.dropout(torch.ones(4, 6), 0.4), False),
        (lambda: F.dropout(torch.ones(2, 5), 0.3), False), (lambda: F.dropout(torch.ones(3, 4, 6), 0.3), False),
        (lambda: torch.rand(4, 6), False), (lambda: torch.ones(4, 6), False),
        (lambda: F.dropout(torch.ones(6), 0.3), True),
    ],
)  # fmt: skip
def test_a_module_that_draws_other_numbers_than_its_graph_is_refused(drawn, fits):
    random = PlannedRandom(graph_of((4, 6), p=0.3, seed=seed_of(1)))

    def run():
        with random.forward(1, 0):
            drawn()

    if fits:
        run()
        return
    with pytest.raises(TwofoldError, match=r"operator 'drop' draws a dropout of 0.3 of \(4, 6\) where the module"):
        run()
