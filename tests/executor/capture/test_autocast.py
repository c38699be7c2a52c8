"""torch.autocast as casts: the oracle is autocast itself."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from executor.autocast import autocast_as_casts
from executor.capture.capture import capture
from executor.device import Device
from executor.reference.reference import compare_losses, compare_weights, train_reference
from executor.step.interpreter import Interpreter
from executor.train.run import gather_parameters
from plans.errors import TwofoldError
from plans.lower import lower
from tests.executor.capture.test_modules import fed, plan_of, values

WIDTH = 8


class Mixed(nn.Module):
    """Functions that autocast casts down, casts up, casts to the widest argument, and leaves alone."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.device = device
        self.first, self.last, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10), nn.LayerNorm(WIDTH)
        self.local = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x, label):
        with torch.autocast(self.device, torch.bfloat16):
            h = self.norm(F.gelu(self.first(x)))
            h = h + torch.einsum("bi,ij->bj", h, self.first.weight)  # a weight that is cast once, and a view of it
            h = self.local(h[:, None])[:, 0]
            with torch.autocast(self.device, enabled=False):
                h = h + self.first(h.float())
            heads = h.view(-1, 1, 2, 4)
            h = F.scaled_dot_product_attention(heads, heads, heads).flatten(1)
            h = h / h.norm(dim=-1, keepdim=True) + F.normalize(h, dim=-1)
            h = torch.cat([h, x], -1)[:, :WIDTH].softmax(-1)
            return F.cross_entropy(self.last(h.to(self.norm(h).dtype)), label)


class Layers(nn.Module):
    """The forward of two layers is decorated; the dtype of what autocast made decides about a cast."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    @torch.autocast("cpu", torch.bfloat16)
    def made(self, x):
        h = self.up(x)
        scale = torch.rsqrt(h.float().square().mean(-1, keepdim=True) + 1e-6)
        return self.down((h * scale).to(h.dtype))

    def forward(self, x, label):
        made = self.made(x)
        return F.mse_loss(made.float(), label) if made.dtype is torch.bfloat16 else made.mean()


def batch(classes=True):
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, 10, (8,), generator=generator) if classes else torch.randn(8, WIDTH, generator=generator)
    return torch.randn(8, WIDTH, generator=generator), label


def trained(module, data):
    module.zero_grad()
    loss = module(*data)
    loss.backward()
    return loss.detach(), [each.grad.clone() for each in module.parameters()]


def test_casts_give_the_loss_and_the_gradients_of_autocast():
    module, data = Mixed(), batch()
    loss, gradients = trained(module, data)
    with autocast_as_casts():
        cast_loss, cast_gradients = trained(module, data)
    assert torch.equal(loss, cast_loss) and all(map(torch.equal, gradients, cast_gradients))
    assert not torch.equal(loss, F.cross_entropy(module.last(data[0]), data[1]))


def test_a_captured_autocast_trains_as_torch():
    torch.manual_seed(0)
    module, data = Layers(), batch(classes=False)
    graph = capture(module, data)
    kinds = [(each.kind, graph.tensors[each.outputs[0]].dtype) for each in graph.operators]
    assert kinds.count(("linear", "bfloat16")) == 2 and kinds.count(("cast", "bfloat16")) == 6
    plan = plan_of(graph)
    program = lower(plan)
    rank = Interpreter(program, 0, Device(kind="cpu"))
    rank.set_parameters(values(graph, module))
    losses = [rank.step(fed(graph, data)).item() for _ in range(3)]
    expected = train_reference(module, [data] * 3, optimizer=plan.optimizer, num_steps=3, graph=graph)
    assert compare_losses(losses, expected.losses).max_rel_diff < 2e-6
    assert compare_weights(gather_parameters(program, rank), expected.weights).max_rel_diff < 2e-6


def test_an_absent_device_casts_as_it_would_where_it_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module, data = Mixed("cuda"), batch()
    with autocast_as_casts(only_absent=True):
        loss, _ = trained(module, data)
        with torch.autocast("cuda", torch.float16):
            x = torch.ones(2, 2)
            made = {"product": x @ x, "sum": (x @ x).sum(), "norm": F.rms_norm(x @ x, (2,)), "sine": (x @ x).sin()}
    dtypes = {name: each.dtype for name, each in made.items()}
    half, single = torch.float16, torch.float32  # docs: "CUDA Ops that can autocast to float16", "to float32"
    assert dtypes == {"product": half, "sum": single, "norm": single, "sine": half}
    module.device = "cpu"
    assert 0 < abs(loss / module(*data) - 1) < 1e-2


def test_a_function_that_is_cast_in_its_middle_is_refused():
    net = nn.GRU(WIDTH, WIDTH, batch_first=True)
    with autocast_as_casts(), torch.autocast("cpu", torch.bfloat16), pytest.raises(TwofoldError, match="middle of gru"):
        net(torch.zeros(2, 3, WIDTH))
