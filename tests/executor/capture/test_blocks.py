"""Transformer blocks and an image network in plain torch, captured and trained: losses and weights as by autograd.

The captured graph is lowered for one rank and run by the executor; the oracle is the module itself with torch.optim.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from costmodels import Machine
from costmodels.price.instruction import price
from executor.capture.capture import capture
from executor.capture.rules.independence import Call, Read, dims_of
from executor.device import Device
from executor.kernels.programs import aten_call
from executor.kernels.random import kept_elements
from executor.reference.reference import train_reference
from executor.step.interpreter import Interpreter
from executor.train.losscell import WithLossCell
from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.program import Kind
from search import uniform_plan

BATCH, LENGTH, WIDTH, HEADS, WORDS = 4, 6, 16, 4, 24
SGD = Optimizer(settings={"lr": 0.1}, parallel_level=0)


class RMSNorm(nn.Module):
    """As LLaMA's own code writes it, computed in float32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def rotated(x):
    """Rotary embedding with its angles made on the spot; x is [batch, heads, length, size]."""
    length, size = x.shape[-2:]
    rates = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
    angles = torch.arange(length).float()[:, None] * rates
    angles = torch.cat((angles, angles), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class LlamaBlock(nn.Module):
    """RMS norm, grouped-query attention with rotary embedding, SiLU-gated MLP."""

    def __init__(self, kv_heads=2, norm=RMSNorm):
        super().__init__()
        self.kv_heads, size = kv_heads, WIDTH // HEADS
        self.norm1, self.norm2 = norm(WIDTH), norm(WIDTH)
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, kv_heads * size, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, WIDTH, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (part(y).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GPT2Block(nn.Module):
    """Layer norm, fused q, k, v, attention written out with a mask, GELU."""

    def __init__(self, p=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        y = scores.masked_fill(later, float("-inf")).softmax(dim=-1) @ v
        x = x + self.drop(self.out(y.transpose(1, 2).contiguous().view(batch, length, WIDTH)))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class LanguageModel(nn.Module):
    """Embeddings, blocks, and a head of its own or tied; the loss over all positions is part of it."""

    def __init__(self, *blocks, positions=False, tied=False):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH) if positions else None
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids, labels):
        x = self.words(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


class MaskedBlock(nn.Module):
    """What is the same in every step: a mask and angles in buffers, a frozen projection; attention with dropout."""

    def __init__(self, p=0.2):
        super().__init__()
        size = WIDTH // HEADS
        self.p = p
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), persistent=False)
        self.register_buffer("angles", torch.arange(LENGTH)[:, None] / 10.0 ** (torch.arange(size) / size))

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.frozen(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        q, k = q * self.angles.cos(), torch.where(self.angles > 0.5, k, -k)
        bias = torch.where(self.later, -torch.inf, 0.0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.p)
        y = self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + torch.where(y > 0, y, y.new_zeros(()))


class Shifted(nn.Module):
    """Predicts the next token; the last has none, and so is made a label that torch ignores."""

    def __init__(self, p=0.2):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.block, self.drop = MaskedBlock(p), nn.Dropout(p)

    def forward(self, ids, labels):
        logits = self.head(self.drop(self.block(self.words(ids))))
        none = torch.full_like(labels[:, :1], -100)
        shifted = torch.cat((labels[:, 1:], none), dim=1)
        return F.cross_entropy(logits.flatten(0, 1), shifted.flatten())


class Ignoring(nn.Module):
    """Labels of 0 are padding."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, WORDS)
        self.loss = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, ids, labels):
        return self.loss(self.head(self.words(ids)).view(-1, WORDS), labels.view(-1))


def padded(batch=BATCH):
    """Other numbers of labels that count in every sample."""
    ids, labels = tokens(batch)
    return ids, labels.masked_fill(torch.arange(LENGTH) > torch.arange(batch)[:, None], 0)


class Images(nn.Module):
    """Convolutions, both poolings and a classifier."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding="same", groups=2)
        self.pool, self.average, self.last = nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.first(x)))
        return self.last(self.average(torch.tanh(self.second(x))).flatten(1))


def tokens(batch=BATCH):
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randint(0, WORDS, (batch, LENGTH), generator=generator) for _ in range(2))


def pictures():
    generator = torch.Generator().manual_seed(6)
    return torch.randn(BATCH, 1, 8, 8, generator=generator), torch.randint(0, 10, (BATCH,), generator=generator)


MODELS = {
    "masked": (Shifted, tokens),
    "padded": (Ignoring, padded),
    "llama": (lambda: LanguageModel(LlamaBlock(), LlamaBlock(kv_heads=4)), tokens),
    "llama with nn.RMSNorm": (lambda: LanguageModel(LlamaBlock(norm=nn.RMSNorm)), tokens),
    "gpt-2": (lambda: LanguageModel(GPT2Block(), positions=True, tied=True), tokens),
    "images": (lambda: WithLossCell(Images(), nn.CrossEntropyLoss()), pictures),
}


def seeded(make):
    torch.manual_seed(0)
    return make()


def trained(graph, module, batches, num_micro_batches=1):
    """Losses and final weights of the graph on one rank."""
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    plan = Plan(graph=graph, stages=(stage,), optimizer=SGD, num_micro_batches=num_micro_batches)
    rank = Interpreter(lower(plan), 0, Device(kind="cpu"))
    held = dict([*module.named_parameters(), *module.named_buffers()])
    rank.set_parameters(
        {tensor.name: held[tensor.name].detach().numpy() for tensor in (*graph.parameters, *graph.constants)}
    )
    names = [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"]
    losses = [rank.step(dict(zip(names, map(torch.Tensor.numpy, batch), strict=True))).item() for batch in batches]
    return losses, {placement.name: rank.kept(placement) for placement in rank.group.parameters}


@pytest.mark.filterwarnings("ignore:aten.triu.default.*every rank computes all of it")
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_the_captured_graph_trains_as_the_module(model, num_micro_batches):
    make, inputs = MODELS[model]
    module, batches = seeded(make), [inputs()] * 3
    graph = capture(module, inputs())
    losses, weights = trained(graph, module, batches, num_micro_batches)
    expected = train_reference(
        module, batches, optimizer=SGD, num_steps=3, num_micro_batches=num_micro_batches, graph=graph
    )
    assert losses == pytest.approx(expected.losses, rel=2e-6)
    assert set(weights) == {name for name, each in module.named_parameters() if each.requires_grad}
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected.weights[name], rtol=2e-5, atol=2e-6)


@pytest.mark.filterwarnings("ignore:aten.triu.default.*every rank computes all of it")
@pytest.mark.parametrize("model", MODELS)
def test_another_batch_size_gives_the_graph_of_a_capture_of_that_size(model):
    make, inputs = MODELS[model]
    module, whole = seeded(make), inputs()
    graph = capture(module, whole)
    for size in (1, 2):
        small = capture(module, tuple(part[:size] for part in whole))
        assert graph.with_batch(size) == small and small.with_batch(BATCH) == graph


def test_a_llama_block_consists_of_these_operators():
    graph = capture(LanguageModel(LlamaBlock(norm=nn.RMSNorm)), tokens())
    own = [operator for operator in graph.operators if operator.module.startswith("blocks.0")]
    kinds = [operator.kind for operator in own]
    assert [kinds.count(kind) for kind in ("rms_norm", "linear", "attention", "silu", "permute")] == [2, 7, 1, 1, 4]
    assert "opaque" not in kinds
    attention = next(operator for operator in own if operator.kind == "attention")
    assert attention.attrs == {"causal": True} and graph.spec(attention).sizes["r"] == 2


class Exponential(nn.Module):
    """Times the exponential of a matrix, of which no dim can be split."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 36).reshape(6, 6))

    def forward(self, x):
        return x @ torch.linalg.matrix_exp(self.weight)


def test_an_unknown_operator_is_replicated_and_named():
    module = WithLossCell(nn.Sequential(nn.Linear(6, 6), Exponential(), nn.Linear(6, 1)), nn.MSELoss())
    batch = (torch.randn(4, 6), torch.randn(4, 1))
    with pytest.warns(match=r"linalg_matrix_exp\.default in module '_backbone\.1' .*every rank computes all"):
        graph = capture(module, batch)
    (unknown,) = [operator for operator in graph.operators if operator.kind == "opaque"]
    assert graph.spec(unknown).splittable == frozenset() and unknown.attrs["dims"] == "..->.."
    losses, _ = trained(graph, module, [batch] * 3, 2)
    assert losses == pytest.approx(train_reference(module, [batch] * 3, optimizer=SGD, num_steps=3).losses, rel=1e-6)


def test_undeclared_products_cost_what_declared_ones_do():
    """A conv3d of one picture is a conv2d, and an einsum may be a matrix product."""
    machine = Machine.load("h200-x1")

    def forward_s(layer, x, *rest):
        module = WithLossCell(layer, nn.MSELoss())
        graph = capture(module, (x, tuple(layer(torch.empty(x, device="meta")).shape)))
        program = lower(uniform_plan(graph, machine, dp=1))
        (group,) = program.groups
        calls = [each for block in group.blocks for each in block.body.instructions if each.call in rest]
        return sum(price(call, group, machine, 1).work_ps for call in calls) / 1e12

    with torch.device("meta"):
        flat, deep = nn.Conv2d(64, 512, 3, padding=1), nn.Conv3d(64, 512, (1, 3, 3), padding=(0, 1, 1))
        bmm, einsum = Applied(lambda x, w: x @ w), Applied(lambda x, w: torch.einsum("bsi,io->bos", x, w).mT)
    for one, other, x, shape in (
        (flat, deep, (32, 64, 16, 32), (32, 64, 1, 16, 32)),
        (bmm, einsum, *[(32, 64, 256)] * 2),
    ):
        declared = forward_s(one, x, "conv2d.forward", "matmul.forward", "linear.forward")
        assert forward_s(other, shape, "opaque.forward") == pytest.approx(declared, rel=0.1)


class Applied(nn.Module):
    """A function of x and a weight."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.empty(256, 1024))

    def forward(self, x):
        return self.function(x, self.weight)


class Sorted(nn.Module):
    """An operator with two results."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        values, places = self.fc(x).sort(dim=1)
        return values * places


DERIVED = {
    "pointwise": (lambda x: torch.sinc(x), "ab->ab"),
    "pointwise, far from its limit": (lambda x: x.clamp_min(1e4), "ab->ab"),
    "with a bias": (lambda x: torch.lerp(x, torch.ones(6, device=x.device), 0.5), "ab,b->ab"),
    "sums up to each": (lambda x: x.cumsum(1), "a.->a."),
    "sums of pairs": (lambda x: (x[:, :, None] * x[:, None]).logcumsumexp(2), "ab.->ab."),
    "groups of channels": (lambda x: F.group_norm(x[:, :, None], 3), "a..->a.."),
    "one result of several": (lambda x: x[:, :, None].expand(-1, -1, 4).sort(dim=2)[0], "ab.->ab."),
    "numbers that it cannot take": (lambda x: torch.acosh(2 + x.abs()), "ab->ab"),
}


@pytest.mark.parametrize("name", DERIVED)
def test_dims_of_an_operator_without_an_entry_are_found_by_trying_it_out(name):
    function, dims = DERIVED[name]
    module = WithLossCell(nn.Sequential(nn.Linear(6, 6), Called(function)), nn.MSELoss())
    made = function(torch.randn(4, 6))
    graph = capture(module, (torch.randn(4, 6), torch.randn(made.shape)))
    (found,) = [operator for operator in graph.operators if operator.kind == "opaque"]
    assert found.attrs["dims"] == dims


LARGE = {
    "shifted by half the sizes tried otherwise": (
        "roll.default",
        "[[{'tensor': 0}, [20], [1]], {}]",
        (40, 96),
        "a.b->a.b",
    ),
    "stretched to stated sizes": (
        "upsample_nearest2d.vec",
        "[[{'tensor': 0}, [32, 32], null], {}]",
        (96, 16, 16),
        "ab..->ab..",
    ),
    "viewed in sizes that halves do not have": (
        "view.default",
        "[[{'tensor': 0}, [4, 40, 2, 48]], {}]",
        (40, 96),
        "A..->A...",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_operators_have_the_dims_that_they_have_in_small_sizes(name):
    target, arguments, sizes, dims = LARGE[name]
    read = Read(shape=(4, *sizes), dtype="float32", batch=0)
    call = Call(target=f"aten.{target}", arguments=arguments.replace("'", '"'), inputs=(read,))
    made = aten_call(call.target, call.arguments)(torch.device("meta"), torch.empty(read.shape, device="meta"))
    assert dims_of(call, -1, tuple(made.shape)) == dims


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_a_grid_of_places_is_the_same_in_every_sample():
    """A grid of constant rotations, made for as many samples as a batch has."""

    def turned(x):
        pictures = x.view(-1, 1, 2, 3)
        turns = torch.eye(2, 3, device=x.device).repeat(len(x), 1, 1)
        return F.grid_sample(pictures, F.affine_grid(turns, (len(x), 1, 4, 4), False), align_corners=False).flatten(1)

    module = WithLossCell(nn.Sequential(nn.Linear(6, 6), Called(turned)), nn.MSELoss())
    batch = (torch.randn(4, 6), torch.randn(4, 16))
    losses, _ = trained(capture(module, batch), module, [batch] * 3, 2)
    assert losses == pytest.approx(train_reference(module, [batch] * 3, optimizer=SGD, num_steps=3).losses, rel=1e-6)


@pytest.mark.filterwarnings("ignore:aten.sort.default.*every rank computes all of it")
def test_each_result_of_an_unknown_operator_is_an_operator():
    module, batch = WithLossCell(Sorted(), nn.MSELoss()), (torch.randn(4, 6), torch.randn(4, 6))
    graph = capture(module, batch)
    assert [operator.attrs["result"] for operator in graph.operators if operator.kind == "opaque"] == [0, 1]
    losses, _ = trained(graph, module, [batch] * 2)
    assert losses == pytest.approx(train_reference(module, [batch] * 2, optimizer=SGD, num_steps=2).losses, rel=1e-6)


def test_dropout_is_the_same_for_any_number_of_micro_batches():
    module = WithLossCell(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.4)), nn.MSELoss())
    batch = (torch.randn(4, 6), torch.randn(4, 6))
    graph = capture(module, batch)
    (dropout,) = [operator for operator in graph.operators if operator.kind == "dropout"]
    losses, weights = trained(graph, module, [batch] * 2)
    for count in (2, 4):
        again, same = trained(graph, module, [batch] * 2, count)
        assert again == pytest.approx(losses, rel=1e-6)
        for name in weights:
            torch.testing.assert_close(same[name], weights[name])
    kept = kept_elements([(0, 4), (0, 6)], (4, 6), 0.4, dropout.attrs["seed"], step=1)
    expected = F.mse_loss(module._backbone[0](batch[0]) * kept / 0.6, batch[1]).item()
    assert losses[0] == pytest.approx(expected, rel=1e-6)


SQUARES = {
    "exponential": (lambda x: torch.empty_like(x).exponential_(4.0), 2 / 4**2),
    "normal around": (lambda x: torch.normal(torch.full_like(x, 2.0), 3.0), 2**2 + 3**2),
    "normal in place": (lambda x: torch.empty_like(x).normal_(-1.0, 2.0), 1**2 + 2**2),
    "uniform": (lambda x: torch.empty_like(x).uniform_(-1.0, 3.0), (3**3 + 1**3) / (3 * 4)),
    "whole numbers": (lambda x: torch.randint_like(x, 2, 7), (4 + 9 + 16 + 25 + 36) / 5),
    "standard normal": (torch.randn_like, 1.0),
}
"""Calls that draw numbers, and the mean of their squares."""


@pytest.mark.parametrize("name", SQUARES)
def test_numbers_drawn_in_a_module_have_the_squares_of_their_distribution(name):
    function, expected = SQUARES[name]
    module = WithLossCell(nn.Sequential(nn.Linear(64, 64), Called(lambda x: 0 * x + function(x))), nn.MSELoss())
    batch = (torch.randn(256, 64), torch.zeros(256, 64))
    losses, _ = trained(capture(module, batch), module, [batch] * 2)
    assert losses == pytest.approx([expected] * 2, rel=0.1) and losses[0] != losses[1]


def test_a_llama_block_under_tensor_parallel_has_two_all_reduces_forward_and_two_backward():
    graph, mesh = capture(LanguageModel(LlamaBlock(norm=nn.RMSNorm)), tokens()), Layout((2,), ("tp",))
    columns, rows = ("q", "k", "v", "gate", "up"), ("o", "down")
    given, made = {}, {}
    for operator in graph.operators:
        spec, layer = graph.spec(operator), operator.module.rpartition(".")[2]
        dim = "n" if layer in columns else "k" if layer in rows else None
        if dim is None:  # as its split inputs come, whichever dim that is
            split = {index for index, name in enumerate(operator.inputs) if any(made.get(name, ()))}
            for each in spec.splittable if split else ():
                if spec.fits(mesh, {each: ("tp",)}) and all(
                    spec.input_layout(i, mesh, {each: ("tp",)}).dims == made[operator.inputs[i]] for i in split
                ):
                    dim = each
        given[operator.name] = Strategy(dims={} if dim is None else {dim: ("tp",)})
        made[operator.outputs[0]] = spec.output_layout(0, mesh, given[operator.name].dims).dims
    stage = Stage(mesh=mesh, operators=tuple(given))
    (group,) = lower(Plan(graph=graph, stages=(stage,), strategies=given, optimizer=SGD)).groups
    done = [(block.label, each.call) for block, each in group.walk() if each.kind is Kind.COLLECTIVE]
    assert done == [("0F0", "all_reduce")] * 2 + [("0B0", "all_reduce")] * 2


def test_a_mask_of_a_large_batch_is_computed_for_few_samples():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(4, 4)

        def forward(self, x, y):
            batch, length, _ = x.shape
            where = torch.arange(length)
            seen = (where[None, :] <= where[:, None]).expand(batch, 1, length, length)
            heads = self.project(x)[:, None]
            made = nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)
            return ((made[:, 0] - y) ** 2).mean()

    graph = capture(Masked(), ((4096, 1024, 4), (4096, 1024, 4)))  # a mask of 4,294,967,296 elements
    (attention,) = [each for each in graph.operators if each.kind == "attention"]
    assert graph.batch_size == 4096 and attention.attrs["causal"] and len(attention.inputs) == 3
