"""What libraries write in a roundabout way: masks of positions, no_grad around angles, empty caches, permuted parts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._device import _device_constructors
from torch.utils.checkpoint import checkpoint

from benchmarks.field.ordinary import BATCH_MIXING
from costmodels import Machine
from executor.capture.calls.masks import hides_later
from executor.capture.capture import capture
from executor.reference.reference import train_reference
from plans.errors import TwofoldError
from plans.lower import lower
from plans.optimizer import Optimizer
from search import search
from tests.executor.capture.test_blocks import seeded, trained

BATCH, LENGTH, HEADS, SIZE = 4, 6, 2, 8


def mask_of_positions(x):
    """As transformers makes it: positions counted per sample, indexed and compared."""
    length = x.shape[1]
    positions = torch.arange(length, device=x.device)[None].expand(len(x), -1)
    documents = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    sample = torch.arange(len(x), device=x.device)[:, None, None, None]
    row, column = (torch.arange(length, device=x.device)[:, None], torch.arange(length, device=x.device)[None])
    same = documents[sample, row[None, None]] == documents[sample, column[None, None]]
    return same & (positions[sample, column[None, None]] <= positions[sample, row[None, None]])


class Block(nn.Module):
    """Attention of a library's kind; `way` says which roundabout forms it has."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH))
        self.register_buffer("rates", torch.tensor([1.0, 0.1]))

    def heads(self, x):
        if self.way == "permuted":
            return self.qkv(x).reshape(-1, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        if self.way == "selected":
            made = self.qkv(x).reshape(-1, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
            return made[0], made[1], made[2]
        return [each.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1)]

    def turned(self, x):
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            angles = torch.arange(LENGTH, device=x.device)[:, None] * torch.cat([self.rates, self.rates])
            cos, sin = angles.cos(), angles.sin()
        first, rest = x[..., :4], x[..., 4:]
        half = torch.cat([-first[..., 2:], first[..., :2]], -1)
        made = torch.cat([first * cos + half * sin, rest, x[..., SIZE:]], -1)  # nothing is left behind SIZE
        return made

    def forward(self, x, labels):
        if self.way == "numbers":
            half = torch.tensor(min(x.shape[1], LENGTH) // 2)
            x = torch.cat([x[:, : half + 1] * 2.0, x[:, half + 1 :]], 1) + sum(x[:, at : at + 1] for at in range(half))
            self.out = self.out.to(x.device)
            x = x * torch.tensor([True, False] * 8, dtype=torch.int64)
            copied = x[..., [0, 1]]
            copied += 1.0
        q, k, v = self.heads(x)
        mask, causal = None, False
        if self.way == "mask":
            mask = mask_of_positions(x)
        if self.way == "added mask":
            mask = torch.where(mask_of_positions(x), 0.0, torch.finfo(x.dtype).min)
        if self.way == "open mask":
            mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=x.device)
        if self.way == "rotated":
            q, k, causal = self.turned(q), self.turned(k), True
        if self.way == "cached":
            k = torch.cat([torch.empty(len(x), HEADS, 0, SIZE, device=x.device), k], 2)
        if self.way.startswith("trained mask"):
            mask = self.bias + 0.0
        dropped = 0.25 if self.way == "trained mask, dropped" else 0.0
        made = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal=causal).transpose(1, 2).flatten(2)
        return (
            F.mse_loss(self.out(made), labels) if self.way.startswith("trained mask") else self.with_bias(made, labels)
        )

    def with_bias(self, made, labels):
        return F.mse_loss(self.out(made) + self.bias.mean(), labels)


WAYS = (
    "permuted", "selected", "rotated", "cached", "mask", "added mask", "open mask", "trained mask",
    "trained mask, dropped", "numbers",
)  # fmt: skip


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, LENGTH, 16, generator=generator), torch.randn(BATCH, LENGTH, 3, generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_written(way):
    module = seeded(lambda: Block(way))
    graph, fed = capture(module, batches(1)[0]), batches(3)
    losses, _ = trained(graph, module, fed, 2)
    expected = train_reference(module, fed, optimizer=Optimizer(settings={"lr": 0.1}), num_steps=3, num_micro_batches=2)
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert graph.with_batch(2 * BATCH) == capture(module, tuple(torch.cat([each, each]) for each in fed[0]))


@pytest.mark.parametrize(("way", "causal"), [("mask", True), ("added mask", True), ("open mask", False)])
def test_a_mask_that_depends_on_shapes_only_is_recognised(way, causal):
    graph = capture(Block(way), batches(1)[0])
    (attention,) = [operator for operator in graph.operators if operator.kind == "attention"]
    assert len(attention.inputs) == 3 and attention.attrs["causal"] is causal
    assert not any(operator.kind in ("opaque", "arange", "le") for operator in graph.operators)


def test_nothing_without_elements_is_left():
    for way in ("cached", "rotated"):
        assert all(tensor.num_elements for tensor in capture(Block(way), batches(1)[0]).tensors.values())


def test_other_masks_are_not_taken_for_causal():
    assert hides_later(torch.ones(4, 4).tril(1).bool()) is None
    assert hides_later(torch.ones(2, 3).bool().tril()) is None
    assert hides_later(torch.full((3, 3), -1.0)) is None
    window = torch.ones(4, 4).tril().triu(-1).bool()
    assert hides_later(window) is None
    assert hides_later(torch.stack([torch.ones(3, 3).tril(), torch.ones(3, 3)]).bool()) is None


class Windowed(Block):
    """Reads through a window, which no word says; `way` says who applies it."""

    def forward(self, x, labels):
        q, k, v = self.heads(x)
        seen = mask_of_positions(x) & torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device).triu(-2)
        if self.way == "attention":
            made = F.scaled_dot_product_attention(q, k, v, seen)
        else:  # by hand, from parts written in place, with a window for every sample
            hidden = x.new_zeros(LENGTH, LENGTH).masked_fill_(~seen[0, 0], float("-inf"))
            hidden[0, 1:] = float("-inf")
            made = (q @ k.transpose(-1, -2) + hidden.expand(len(x), HEADS, -1, -1)).softmax(-1) @ v
        return self.with_bias(self.through(made), labels)

    def through(self, made):
        """Stochastic depth, as torchvision and timm write it."""
        kept = torch.empty(len(made), 1, 1, 1, dtype=made.dtype, device=made.device).bernoulli_(1 - 0.1 / 3)
        return (made * kept.div_(1 - 0.1 / 3)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("way", ["attention", "by hand"])
def test_a_window_of_positions_and_stochastic_depth_train_as_written(way):
    module, fed = seeded(lambda: Windowed(way)), batches(3)
    graph = capture(module, fed[0])
    assert sum(operator.kind == "computed" for operator in graph.operators) == 1
    losses, _ = trained(graph, module, fed, 2)
    expected = train_reference(
        module, fed, optimizer=Optimizer(settings={"lr": 0.1}), num_steps=3, num_micro_batches=2, graph=graph
    )
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    assert graph.with_batch(2 * BATCH) == capture(module, tuple(torch.cat([each, each]) for each in fed[0]))


class Teacher(nn.Module):
    """Under no_grad: a frozen teacher, and a part of the student."""

    def __init__(self, cut):
        super().__init__()
        self.cut = cut
        self.teacher = nn.Linear(16, 3).requires_grad_(False)
        self.first, self.student = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        with torch.no_grad():
            wanted = self.teacher(x)
            start = self.first(x) if self.cut else x
        return F.mse_loss(self.student(start), wanted)


def test_a_frozen_teacher_may_be_under_no_grad():
    (x, _), module = batches(1)[0], seeded(lambda: Teacher(False))
    with pytest.warns(UserWarning, match="does not depend on first"):
        graph = capture(module, (x,))
    assert {tensor.name for tensor in graph.parameters} == {"student.weight", "student.bias"}
    assert {tensor.name for tensor in graph.constants} == {"teacher.weight", "teacher.bias"}
    with pytest.warns(UserWarning, match="does not depend on first"):
        graph = capture(Teacher(True), (x,))
    assert {tensor.name for tensor in graph.parameters} == {"student.weight", "student.bias"}
    assert {"first.weight", "first.bias"} <= {tensor.name for tensor in graph.constants}


def written_in_parts(fc, x):
    """Through a slice of a transposed view, through a selection, and by a mask; earlier views see it."""
    y = fc(x).clone()
    before, parts = y.view(-1, 2, 3), y.view(-1, 2, 3).transpose(1, 2)
    parts[:, 1:].mul_(2.0)
    y[:, 0] = x.sum(1)
    y[:, -2:] += x[:, :2]
    copied = parts.reshape(-1, 6)  # a copy, which later writes do not reach
    y.masked_fill_(x > 1, 0.5)
    return before.flatten(1) + copied * y.narrow(1, 2, 1).square_()


def shifted_by_a_copy(fc, x):
    shifted = x.new_zeros(x.shape)
    shifted[:, 1:] = fc(x)[:, :-1].clone()
    shifted[:, ::2] = x[:, ::2]
    return shifted


class Rows(nn.Module):
    """A loss of what a function makes of a linear layer and rows of six numbers."""

    def __init__(self, function):
        super().__init__()
        self.function, self.fc = function, nn.Linear(6, 6)

    def forward(self, x, labels):
        return F.mse_loss(self.function(self.fc, x), labels)


@pytest.mark.parametrize("function", [written_in_parts, shifted_by_a_copy])
@pytest.mark.filterwarnings("ignore:.*every rank computes all of it")
def test_in_place_writes_train_as_written(function):
    module = seeded(lambda: Rows(function))
    fed = [(torch.randn(BATCH, 6), torch.randn(BATCH, 6)) for _ in range(3)]
    losses, _ = trained(capture(module, fed[0]), module, fed, 2)
    expected = train_reference(module, fed, optimizer=Optimizer(settings={"lr": 0.1}), num_steps=3, num_micro_batches=2)
    assert losses == pytest.approx(expected.losses, rel=1e-5)


class Checkpointed(nn.Module):
    """Blocks, of which every one or every second one is a checkpoint."""

    def __init__(self, every, reentrant=False):
        super().__init__()
        self.every, self.reentrant = every, reentrant
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6)) for _ in range(5))

    def forward(self, x, labels):
        for number, block in enumerate(self.blocks):
            kept = number % self.every
            x = x + (block(x) if kept else checkpoint(block, x.requires_grad_(), use_reentrant=self.reentrant))
        return F.mse_loss(x, labels)


@pytest.mark.parametrize(("every", "reentrant"), [(1, True), (1, False), (2, False)])
def test_a_checkpoint_recomputes_everything_but_its_result(every, reentrant):
    module = seeded(lambda: Checkpointed(every, reentrant))
    fed = [(torch.randn(BATCH, 6), torch.randn(BATCH, 6)) for _ in range(3)]
    graph = capture(module, fed[0])
    chosen = range(0, 5, every)
    assert graph.recompute == tuple(f"blocks.{at}.{part}" for at in chosen for part in ("0.linear", "1.gelu"))
    plan = search(graph, Machine.load("h200-x2"), num_devices=1).best
    assert plan.recompute == graph.recompute
    again = {each.operator for group in lower(plan).groups for _, each in group.walk() if each.part == "R"}
    assert again and again <= set(graph.recompute)


def test_a_pair_that_combines_samples_is_refused():
    kind, examples = BATCH_MIXING
    with pytest.raises(TwofoldError, match=r"mixes the batch into other dims.*each sample must be computed separately"):
        capture(kind(), examples)


class Contrastive(nn.Module):
    """CLIP's loss: every sample is compared with all others of its batch."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(16, 8), nn.Linear(12, 8)

    def forward(self, x, z):
        one, other = F.normalize(self.image(x), dim=-1), F.normalize(self.text(z), dim=-1)
        return F.cross_entropy(one @ other.t(), torch.arange(x.shape[0]))


def test_the_place_where_samples_combine_and_the_fix_are_named():
    with pytest.raises(
        TwofoldError, match=r"in forward \(.*line \d+, in forward \| .*other\.t\(\).*mixes the batch"
    ) as e:
        capture(Contrastive(), ((8, 16), (8, 12)))
    assert "pass what it is compared with as a separate input" in str(e.value)


class Doubled(nn.Module):
    """SimCLR's loss: both views of all samples are one batch of twice the size."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 8)

    def forward(self, x, z):
        size = x.shape[0]
        both = F.normalize(torch.cat([self.head(x), self.head(z)]), dim=-1)
        likeness = (both @ both.t()).masked_fill(torch.eye(2 * size, dtype=torch.bool), -1e9)
        first = torch.arange(size)
        return F.cross_entropy(likeness, torch.cat([first + size, first]))


def test_a_mask_of_twice_the_batch_is_refused_in_a_sentence():
    with pytest.raises(TwofoldError, match=r"eye.* in forward \(.*line \d+.*on the position of a sample .* negatives"):
        capture(Doubled(), ((8, 16), (8, 16)))


class Numbered(nn.Module):
    """Makes a tensor of a number in its forward."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 3)

    def forward(self, x, labels):
        return F.mse_loss(self.out(x) * torch.tensor(2.0), labels)


def test_torchs_devices_apply_to_tensors_of_numbers_after_a_capture():
    _device_constructors.cache_clear()  # as in a process that has used no device yet
    capture(Numbered(), batches(1)[0])
    with torch.device("meta"):
        assert torch.tensor([1.0, 2.0]).is_meta
