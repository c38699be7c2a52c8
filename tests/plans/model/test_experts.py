"""Mixtures of experts with a fixed capacity, on one process; the oracle walks token by token."""

import numpy as np
import pytest
import torch

from executor.kernels import OpContext, rule_of
from executor.kernels.expert_rows import choices, places
from executor.train.run import run_rank
from plans.degrees import Degrees, check
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import Experts, TransformerConfig, named_config, sizes_of, transformer, transformer_config
from plans.operators import declare
from plans.operators.experts import expert_capacity
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from tests.modules.transformer import Decoder, Mixture, random_tokens, random_weights, trained

CHOSEN = Experts(num_experts=4, top_k=2, ffn=12, capacity_factor=0.75)
ALL = Experts(num_experts=6, top_k=3, ffn=8, num_shared=2, num_dense_layers=1, capacity_factor=1.0, weights="all")


def config_of(experts):
    return TransformerConfig(
        num_layers=2, hidden=16, num_heads=4, num_kv_heads=2, ffn=24, vocab=32, seq=8, dtype="float64", experts=experts
    )


def dropless(experts):
    return transformer_config(config_of(experts), capacity_factor="dropless").experts


def site(shape):
    return OpContext(rank=0, mesh=Layout((1,), ("a",)), shape=shape, dtype="float64", device=torch.device("cpu"))


def by_hand(attrs, x, logits):
    """Who is where, with lists: [expert][sample] -> tokens in the order of their places."""
    chosen = logits.argsort(-1, descending=True)[..., : attrs["top_k"]]
    found = [[[] for _ in x] for _ in range(logits.shape[-1])]
    for sample, rows in enumerate(chosen):
        for choice in range(attrs["top_k"]):
            for token, row in enumerate(rows):
                queue = found[int(row[choice])][sample]
                if len(queue) < attrs["capacity"]:
                    queue.append(token)
    return found


def material(seed, batch=3, seq=7, experts=5, hidden=4):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, seq, hidden, generator=generator, dtype=torch.float64)
    return x, torch.randn(batch, seq, experts, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_tokens_take_places_in_the_order_of_choices_then_of_positions(capacity):
    attrs, (x, logits) = {"top_k": 2, "capacity": capacity}, material(capacity)
    routed = rule_of("dispatch.forward")(site(()), attrs, x, logits).view(5, 3, capacity, 4)
    for expert, samples in enumerate(by_hand(attrs, x, logits)):
        for sample, tokens in enumerate(samples):
            expected = torch.zeros(capacity, 4, dtype=x.dtype)
            expected[: len(tokens)] = x[sample, tokens]
            torch.testing.assert_close(routed[expert, sample], expected, rtol=0, atol=0)


@pytest.mark.parametrize("weights", ["chosen", "all"])
def test_combining_and_all_gradients_are_those_of_autograd(weights):
    attrs = {"top_k": 3, "capacity": 2, "weights": weights}
    x, logits = (each.requires_grad_() for each in material(4))
    rows = places(attrs, choices(attrs, logits), 5)
    with torch.no_grad():
        routed = torch.randn(5, 6, 4, dtype=torch.float64)
    routed.requires_grad_()
    padded = torch.cat([routed.reshape(-1, 4), torch.zeros(1, 4, dtype=torch.float64)])
    chosen = choices(attrs, logits)
    share = logits.softmax(-1).gather(-1, chosen) if weights == "all" else logits.gather(-1, chosen).softmax(-1)
    expected = (padded[rows] * share.unsqueeze(-1)).sum(-2)
    made = rule_of("combine.forward")(site(()), attrs, routed.detach(), logits.detach())
    torch.testing.assert_close(made, expected.detach(), rtol=1e-12, atol=1e-12)
    g = torch.randn_like(expected)
    to_routed, to_logits = torch.autograd.grad(expected, (routed, logits), g)
    found = rule_of("combine.grad0")(site(()), attrs, g, logits.detach())
    torch.testing.assert_close(found, to_routed, rtol=1e-10, atol=1e-12)
    found = rule_of("combine.grad1")(site(()), attrs, g, routed.detach(), logits.detach())
    torch.testing.assert_close(found, to_logits, rtol=1e-10, atol=1e-12)

    spread = torch.zeros(31, 4, dtype=torch.float64)
    for choice in range(3):
        spread = spread.index_put((rows[..., choice].reshape(-1),), x.reshape(-1, 4), accumulate=True)
    g = torch.randn(5, 6, 4, dtype=torch.float64)
    (to_x,) = torch.autograd.grad(spread[:-1].view(5, 6, 4), x, g)
    found = rule_of("dispatch.grad0")(site(()), attrs, g, logits.detach())
    torch.testing.assert_close(found, to_x, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("experts", [CHOSEN, ALL, dropless(CHOSEN)], ids=["chosen", "all", "dropless"])
def test_the_graph_trains_as_a_module_that_walks_token_by_token(experts, tmp_path):
    config = config_of(experts)
    graph = transformer(config, batch_size=4)
    operators = tuple(operator.name for operator in graph.operators)
    plan = Plan(
        graph=graph, stages=(Stage(mesh=Layout((1,), ("dp",)), operators=operators),), num_micro_batches=2,
        optimizer=Optimizer(settings={"lr": 0.1}),
    )  # fmt: skip
    weights = random_weights(graph)
    batches = [random_tokens(graph, config.vocab, seed) for seed in range(2)]
    result = run_rank(
        lower(plan), plan, [{name: each.numpy() for name, each in batch.items()} for batch in batches],
        {name: each.numpy() for name, each in weights.items()}, 2, device="cpu", weights_path=tmp_path / "w.npz",
    )  # fmt: skip
    losses, expected = trained(config, weights, batches)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-10)
    with np.load(tmp_path / "w.npz") as found:
        assert set(found.files) == set(expected)
        for name, weight in expected.items():
            np.testing.assert_allclose(found[name], weight.numpy(), rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(("experts", "drops"), [(CHOSEN, True), (dropless(CHOSEN), False)])
def test_the_oracle_drops_tokens_so_that_the_capacity_is_tested(experts, drops):
    config = config_of(experts)
    graph = transformer(config, batch_size=4)
    module, weights = Decoder(config).to(torch.float64), random_weights(graph)
    module.load_state_dict(weights)
    module(**random_tokens(graph, config.vocab))
    dropped = sum(layer.feed_forward.dropped for layer in module.layers if isinstance(layer.feed_forward, Mixture))
    assert (dropped > 0) is drops


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "deepseek-moe-16b"])
def test_parameters_of_the_graph_are_those_of_the_configuration(name):
    config = named_config(name)
    graph = transformer(config, num_layers=2, seq=64)
    counted = sum(tensor.num_elements for tensor in graph.parameters)
    outside = config.num_parameters - sum(config.block_parameters(layer) for layer in range(config.num_layers))
    assert counted == outside + config.block_parameters(0) + config.block_parameters(1)


def test_published_sizes():
    billions = {
        "mixtral-8x7b": 46.7,
        "mixtral-8x22b": 140.6,
        "deepseek-moe-16b": 16.4,
        "qwen3-30b-a3b": 30.5,
        "qwen3-235b-a22b": 235,
    }  # fmt: skip - as their authors say
    for name, expected in billions.items():
        assert named_config(name).num_parameters / 1e9 == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize("factor", ["dropless", 100.0])
def test_no_expert_has_more_places_than_there_are_tokens(factor):
    config = transformer_config("qwen3-30b-a3b", seq=321, capacity_factor=factor)
    assert config.experts.capacity(config.seq) == 321


@pytest.mark.parametrize(
    ("model", "factor", "message"),
    [("llama-3-8b", 1.0, "has no experts"), ("mixtral-8x7b", "none", "above 0, such as 1.25, or dropless"),
     ("mixtral-8x7b", "nan", "above 0"), ("mixtral-8x7b", -1.0, "above 0")],
)  # fmt: skip
def test_a_capacity_factor_that_cannot_be_is_refused(model, factor, message):
    with pytest.raises(TwofoldError, match=message):
        transformer_config(model, capacity_factor=factor)


def test_capacity_is_an_even_share_times_a_factor():
    assert expert_capacity(seq=10, num_experts=4, top_k=2, factor=1.0) == 5
    assert expert_capacity(seq=10, num_experts=4, top_k=2, factor=1.1) == 6
    assert expert_capacity(seq=4, num_experts=64, top_k=1, factor=1.0) == 1


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        (((2, 8, 4), (2, 8, 3), (3, 8, 4)), {"top_k": 2, "capacity": 5}, "with a capacity of 5"),
        (((2, 8, 4), (2, 8, 3), (3, 8, 4)), {"top_k": 4, "capacity": 4}, "top_k is 4; there are 3 experts"),
        (((2, 8, 4), (2, 8, 3), (3, 8, 4)), {"top_k": 1, "capacity": 4, "weights": "none"}, "chosen, all"),
    ],
)
def test_shapes_and_attrs_that_do_not_fit_are_refused(shapes, attrs, message):
    with pytest.raises(TwofoldError, match=message):
        declare("dispatch", shapes[:2], shapes[2:], attrs, "d")


def test_degrees_that_do_not_fit_are_refused():
    graph = transformer(config_of(CHOSEN), batch_size=6)
    sizes = sizes_of(graph)
    with pytest.raises(TwofoldError, match="dp 6 is not a multiple of ep 4: 6 % 4 != 0"):
        Degrees(dp=6, ep=4, global_batch=6)
    with pytest.raises(TwofoldError, match="4 experts cannot be split over ep 3: 4 % 3 != 0"):
        check(Degrees(dp=3, ep=3, global_batch=6), sizes)
    with pytest.raises(TwofoldError, match="experts need complete samples, but cp 2 splits them"):
        check(Degrees(cp=2), sizes)
    with pytest.raises(TwofoldError, match="gpt2 has no experts to split over ep 2"):
        check(Degrees(dp=2, ep=2, global_batch=2), sizes_of(transformer("gpt2", num_layers=1)))
