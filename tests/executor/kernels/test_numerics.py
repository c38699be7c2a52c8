"""Rules that keep something for their gradients, against torch's own modules with autograd in double precision.

On a GPU or an NPU where there is one, else on the CPU: the same rules take other kernels there. On a CPU those of an
NPU run too, with a stand-in for torch-npu.
"""

import pytest
import torch
import torch.nn.functional as F

from executor.device import Device, pick_device
from executor.kernels import OpContext, StepCounter
from plans.layout import Layout

DEVICE = torch.device(pick_device("auto", 0).kind)
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative, in the norm: sums of some hundred terms, rounded to 24, 8 and 11 digits."""


KINDS = ["cpu", "npu"] if DEVICE.type == "cpu" else [DEVICE.type]
# On an NPU torch's operator keeps the statistics of half precision in float32; a CPU that stands for one does not.
NORMS = [
    (kind, norm, dtype) for kind in KINDS for norm in ("rms_norm", "layer_norm") for dtype in NEAR
    if kind == DEVICE.type or norm == "rms_norm" or dtype.itemsize == 4
]  # fmt: skip


@pytest.fixture(params=KINDS)
def kind(request):
    """Whose rules are taken."""
    if request.param != DEVICE.type:
        request.getfixturevalue("torch_npu")
    return request.param


@pytest.fixture
def rule_of(kind):
    """Call of an instruction -> rule."""
    return Device(kind=kind).rule_of


def site(shape=(), dtype=torch.float32, mesh=None, rank=0, step=1):
    return OpContext(
        rank=rank, mesh=mesh or Layout((1,), ("dp",)), shape=tuple(shape), dtype=str(dtype).removeprefix("torch."),
        counter=StepCounter(step=step), device=DEVICE,
    )  # fmt: skip


def randn(seed, *shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def wide(x):
    """In double precision, on the CPU: an NPU has none."""
    return x.detach().cpu().double()


def exact(*tensors):
    return [wide(each).clone().requires_grad_() for each in tensors]


def is_near(found, expected, dtype):
    assert found.shape == expected.shape
    found, expected = wide(found), wide(expected)
    error = (found - expected).norm() / expected.norm().clamp(min=1e-12)
    assert float(error) < NEAR[dtype]


SHAPES = {
    "square": ((2, 4, 48, 16), (2, 4, 48, 16), 16),
    "odd length": ((2, 3, 33, 16), (2, 3, 33, 16), 16),
    "heads in groups": ((2, 6, 40, 16), (2, 2, 40, 16), 16),
    "small heads": ((1, 2, 24, 12), (1, 2, 24, 12), 12),
    "other values": ((1, 2, 24, 16), (1, 2, 24, 16), 8),
    "other keys": ((2, 2, 24, 16), (2, 2, 40, 16), 16),
    "fewer keys": ((2, 2, 40, 16), (2, 2, 24, 16), 16),
    "no batch": ((4, 32, 16), (4, 32, 16), 16),
    "two batches": ((2, 2, 2, 32, 16), (2, 2, 2, 32, 16), 16),
}


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_and_its_gradients(rule_of, name, causal, layout, dtype):
    of_q, of_k, values = SHAPES[name]
    q, k = randn(0, *of_q, dtype=dtype), randn(1, *of_k, dtype=dtype)
    v, g = randn(2, *of_k[:-1], values, dtype=dtype), randn(3, *of_q[:-1], values, dtype=dtype)
    leaves = exact(q, k, v)
    grouped = of_q[-3] != of_k[-3]
    output = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=grouped, scale=0.3)
    gradients = torch.autograd.grad(output, leaves, wide(g))
    repeated = leaves[1].repeat_interleave(of_q[-3] // of_k[-3], -3)
    scores = 0.3 * leaves[0] @ repeated.transpose(-1, -2)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)

    def laid(x):
        return x if layout == "bhsd" else x.transpose(-2, -3).contiguous()

    attrs = {"causal": causal, "layout": layout, "scale": 0.3}
    with torch.inference_mode():
        given = [laid(each) for each in (q, k, v)]
        made, sums = rule_of("attention.forward")(site(dtype=dtype), attrs, *given)
        found = rule_of("attention.grad012")(site(dtype=dtype), attrs, laid(g), *given, made, sums)
        alone = rule_of("attention.grad1")(site(dtype=dtype), attrs, laid(g), *given, made, sums)
    is_near(made, laid(output), dtype)
    is_near(sums, scores.logsumexp(-1), dtype)
    assert sums.dtype == torch.float32 and made.is_contiguous()
    for mine, wanted, x in zip(found, gradients, given, strict=True):
        is_near(mine, laid(wanted), dtype)
        assert mine.dtype == x.dtype and mine.is_contiguous()
    is_near(alone, laid(gradients[1]), dtype)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_parts_of_a_causal_sequence(rule_of, dtype, kv_heads):
    q, g = randn(0, 2, 4, 36, 16, dtype=dtype), randn(3, 2, 4, 36, 16, dtype=dtype)
    k, v = (randn(seed, 2, kv_heads, 36, 16, dtype=dtype) for seed in (1, 2))
    leaves = exact(q, k, v)
    output = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=kv_heads != 4)
    gradients = torch.autograd.grad(output, leaves, wide(g))
    attrs, mesh = {"causal": True, "split": {"s": ("cp",)}}, Layout((3,), ("cp",))
    total = [torch.zeros_like(each, dtype=torch.float32) for each in (q, k, v)]
    for rank in range(3):
        rows, own = slice(12 * rank, 12 * rank + 12), site(dtype=dtype, mesh=mesh, rank=rank)
        with torch.inference_mode():
            mine = q[..., rows, :].contiguous()
            made, sums = rule_of("attention.forward")(own, attrs, mine, k, v)
            found = rule_of("attention.grad012")(own, attrs, g[..., rows, :].contiguous(), mine, k, v, made, sums)
        is_near(made, output[..., rows, :], dtype)
        total[0][..., rows, :] = found[0].float()
        total[1] += found[1]
        total[2] += found[2]
    for mine, wanted in zip(total, gradients, strict=True):
        is_near(mine, wanted, dtype)


@pytest.mark.parametrize(("kind", "norm", "dtype"), NORMS, indirect=["kind"], ids=str)
@pytest.mark.parametrize("num_dims", [1, 2])
def test_norms_and_their_gradients(rule_of, norm, num_dims, dtype):
    x, g = randn(0, 5, 7, 24, dtype=dtype), randn(1, 5, 7, 24, dtype=dtype)
    weights = [randn(2 + at, *x.shape[-num_dims:], dtype=dtype) for at in range(1 + (norm == "layer_norm"))]
    leaves = exact(x, *weights)
    output = getattr(F, norm)(leaves[0], x.shape[-num_dims:], *leaves[1:], eps=1e-5)
    gradients = torch.autograd.grad(output, leaves, wide(g))
    attrs = {"eps": 1e-5, "num_dims": num_dims}
    with torch.inference_mode():
        made, *kept = rule_of(f"{norm}.forward")(site(dtype=dtype), attrs, x, *weights)
        of_x = rule_of(f"{norm}.grad0")(site(x.shape, dtype), attrs, g, x, weights[0], *kept)
        of_weight = rule_of(f"{norm}.grad1")(site(weights[0].shape, dtype), attrs, g, x, *kept)
    is_near(made, output, dtype)
    is_near(of_x, gradients[0], dtype)
    is_near(of_weight, gradients[1], dtype)
    assert all(each.dtype == torch.float32 and each.shape == x.shape[:-num_dims] for each in kept)
    assert made.dtype == of_x.dtype == of_weight.dtype == dtype


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("ignored", [None, 3])
@pytest.mark.parametrize("classes", [7, 130])
def test_cross_entropy_and_its_gradient(rule_of, classes, ignored, dtype):
    x = 3 * randn(0, 4, 9, classes, dtype=dtype)
    t = torch.randint(classes, (4, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    t[0, :2] = 3
    (leaf,) = exact(x)
    ignore = {} if ignored is None else {"ignore_index": ignored}
    loss = F.cross_entropy(leaf.reshape(-1, classes), t.reshape(-1).cpu(), **ignore)
    (gradient,) = torch.autograd.grad(loss, leaf)
    attrs = {"count": t.numel(), "scale": 0.5, **ignore}
    count = [] if ignored is None else [(t != ignored).sum().to(torch.float32)]
    with torch.inference_mode():
        made, sums = rule_of("cross_entropy.forward")(site(dtype=dtype), attrs, x, t, *count)
        found = rule_of("cross_entropy.grad0")(site(x.shape, dtype), attrs, x, t, *count, sums)
    is_near(made, loss, dtype)
    is_near(sums, leaf.logsumexp(-1), torch.float32)
    is_near(found, gradient / 2, dtype)
    assert found.dtype == dtype and sums.dtype == torch.float32


def test_a_large_cross_entropy_is_made_some_rows_at_a_time(rule_of, monkeypatch):
    from executor.kernels import losses

    x, t = randn(0, 11, 40, dtype=torch.float32), torch.arange(11, device=DEVICE)
    attrs = {"count": 11}
    whole = rule_of("cross_entropy.forward")(site(), attrs, x, t)
    gradient = rule_of("cross_entropy.grad0")(site(x.shape), attrs, x, t, whole[1])
    monkeypatch.setattr(losses, "_CHUNK", 120)  # three rows
    again = rule_of("cross_entropy.forward")(site(), attrs, x, t)
    assert torch.equal(whole[0], again[0])
    assert torch.equal(gradient, rule_of("cross_entropy.grad0")(site(x.shape), attrs, x, t, again[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_of_many_is_adamw_of_each(rule_of, kind, dtype):
    sizes, settings = (5, 130, 1), {"lr": 0.1, "weight_decay": 0.05}
    leaves = [randn(at, size, dtype=dtype).requires_grad_() for at, size in enumerate(sizes)]
    is_fused = kind == "cuda" or (kind == "npu" and dtype == torch.bfloat16)  # rounds once
    optimizer = torch.optim.AdamW(leaves, lr=0.1, weight_decay=0.05, foreach=False, fused=is_fused)
    weights = [each.detach().clone() for each in leaves]
    states = [[torch.zeros_like(each), torch.zeros_like(each)] for each in weights]
    for step in range(1, 4):
        gradients = [randn(10 * step + at, size, dtype=dtype) for at, size in enumerate(sizes)]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient.clone()
        optimizer.step()
        operands = [x for w, g, (m, s) in zip(weights, gradients, states, strict=True) for x in (w, g, m, s)]
        with torch.inference_mode():
            made = rule_of("adamw.update")(site(step=step), settings, *operands)
        assert [id(each) for each in made] == [id(each) for at, each in enumerate(operands) if at % 4 != 1]
        for weight, leaf in zip(weights, leaves, strict=True):
            torch.testing.assert_close(weight, leaf.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("rank", [None, 0, 2])
def test_the_gradient_of_an_embedding_is_the_same_in_every_run(rule_of, rank, dtype):
    ids = torch.randint(12, (4, 500), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    g = randn(1, 4, 500, 16, dtype=dtype)
    attrs, mesh, first, num_rows = {"padding_id": 5}, None, 0, 12
    if rank is not None:  # of three, each with four rows
        attrs, mesh, first, num_rows = attrs | {"split": {"v": ("tp",)}}, Layout((3,), ("tp",)), 4 * rank, 4
    context = site((num_rows, 16), dtype, mesh, rank or 0)
    made = [rule_of("embedding.grad1")(context, attrs, g, ids) for _ in range(3)]
    table = torch.zeros(12, 16, dtype=torch.float64)
    table.index_add_(0, ids.cpu().reshape(-1), wide(g).reshape(-1, 16))
    table[5] = 0
    expected = table[first : first + num_rows]
    assert made[0].dtype == dtype and float((wide(made[0]) - expected).norm()) <= NEAR[dtype] * float(expected.norm())
    assert all(torch.equal(made[0], again) for again in made[1:])
