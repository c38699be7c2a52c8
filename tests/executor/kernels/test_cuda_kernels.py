"""Kernels for GPUs: those in Triton against plain torch, and all rules of a block inside a CUDA graph.

They need a GPU. Where Triton is installed its interpreter runs the first part on a CPU:
`TRITON_INTERPRET=1 pytest tests/executor/kernels/test_cuda_kernels.py` (with numpy 2.4 Triton 3.9 does, 3.6 does not).
"""

from dataclasses import replace

import pytest
import torch

from executor.device import Device
from executor.kernels import OpContext, StepCounter, rule_of
from executor.kernels.expert_rows import PlainRouting
from executor.kernels.losses import gradient_plainly
from executor.kernels.positions import turned_plainly
from plans.layout import Layout

pytestmark = pytest.mark.needs("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
STEP = {torch.float32: 2e-7, torch.bfloat16: 2**-7, torch.float64: 1e-15}
"""One rounding, relative to the largest element; Triton's interpreter cuts bfloat16 off, a GPU rounds it."""


def close(found, expected):
    assert found.dtype == expected.dtype and found.shape == expected.shape
    largest = float(expected.double().abs().max())
    assert float((found.double() - expected.double()).abs().max()) <= 2 * STEP[found.dtype] * max(largest, 1e-30)


# [b, s, heads, d], turned elements, pairs beside each other, a tensor that is a view of another one
ROPES = [
    ((2, 3, 4, 8), 8, False, False), ((2, 3, 5, 12), 12, True, False), ((1, 7, 33, 6), 6, False, True),
    ((2, 3, 4, 10), 4, False, True), ((2, 3, 40, 10), 4, True, False), ((2, 2, 5, 3, 8), 8, False, False),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("shape", "rotary", "interleaved", "is_view"), ROPES)
def test_rope_in_one_pass(shape, rotary, interleaved, is_view, sign, dtype):
    from executor.kernels.triton_rope import turned

    torch.manual_seed(0)
    x = torch.randn(shape).to(DEVICE, dtype)
    if is_view:
        x = x.transpose(-2, -3).contiguous().transpose(-2, -3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    angles = torch.randn(shape[-3], 1, rotary // 2, dtype=torch.float64)
    cos, sin = angles.cos().to(DEVICE, wide), angles.sin().to(DEVICE, wide)
    found = turned(x, cos, sin, sign, interleaved=interleaved)
    close(found, turned_plainly(x, cos, sin, sign, interleaved=interleaved))
    assert found.is_contiguous()


@pytest.mark.parametrize("skips", [None, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [5, 1024, 5000])
def test_adamw_in_one_pass(size, dtype, skips):
    from executor.kernels.triton_adamw import adamw_in_one_pass

    torch.manual_seed(0)
    parameter = [torch.randn(size).to(DEVICE, dtype) for _ in range(4)]
    parameter[3].abs_()
    weight, gradient, mean, square = (each.double() for each in parameter)
    scalars = [torch.tensor(value, dtype=torch.float32, device=DEVICE) for value in (0.99, 0.3, 0.1)]
    check = None if skips is None else torch.tensor(skips, device=DEVICE)
    adamw_in_one_pass(parameter, scalars, (0.9, 0.999, 1e-8), check)
    if not skips:  # Loshchilov and Hutter 2019, with the corrections given
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        weight = 0.99 * weight - 0.1 * mean / (square.sqrt() / 0.3 + 1e-8)
    for found, expected in zip(parameter, (weight, gradient, mean, square), strict=True):
        close(found, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "classes"), [(5, 7), (3, 4097), (2, 9000), (4, 128)])
def test_cross_entropy_in_one_pass_each_way(rows, classes, dtype):
    from executor.kernels.triton_loss import label_gradient, log_sum_and_logit

    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    whole = (3 * torch.randn(rows, classes + 3)).to(DEVICE, dtype)
    label = torch.randint(classes, (rows,)).to(DEVICE)
    label[0] = -1  # a label of another shard
    ignored = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
    ignored[1] = True
    factor = torch.full((), 0.3, dtype=wide, device=DEVICE)
    for x in (whole[:, :classes], whole[:, :classes].contiguous(), whole[:, 1 : classes + 1]):
        sums, logit = log_sum_and_logit(x, label, wide)
        torch.testing.assert_close(sums, x.to(wide).logsumexp(-1), rtol=1e-6, atol=1e-6)
        picked = x.gather(-1, label.clamp(0).unsqueeze(-1)).squeeze(-1).to(wide)
        assert torch.equal(logit, torch.where(label >= 0, picked, 0))
        for rows_left_out in (None, ignored):
            found = label_gradient(x, label, sums, factor, rows_left_out)
            close(found, gradient_plainly(x, label.clamp(0), label >= 0, sums, factor, rows_left_out))


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")  # the interpreter's logarithm is numpy's
def test_a_row_of_minus_infinity_has_no_sum():
    from executor.kernels.triton_loss import log_sum_and_logit

    x = torch.full((2, 5), -torch.inf, device=DEVICE)
    x[1, 2] = 1.5
    sums, _ = log_sum_and_logit(x, torch.tensor([0, 2], device=DEVICE), torch.float32)
    assert sums.tolist() == [-torch.inf, 1.5]


# a part of [8, 6, 5, 4]: all, some samples, some of the last dim, of two dims, of three; counted along 1 to 3 dims
PARTS = [
    ((0, 8), (0, 6), (0, 5), (0, 4)), ((2, 5), (0, 6), (0, 5), (0, 4)), ((0, 8), (0, 6), (0, 5), (2, 4)),
    ((4, 8), (3, 6), (0, 5), (0, 4)), ((4, 8), (3, 6), (0, 5), (1, 2)), ((4, 8), (3, 6), (1, 4), (1, 3)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("region", PARTS)
def test_dropout_in_one_pass_drops_what_plain_torch_drops(region, p, dtype, monkeypatch):
    whole = (8, 6, 5, 4)
    splits = [size // (high - low) for size, (low, high) in zip(whole, region, strict=True)]
    monkeypatch.setattr("executor.kernels.random.offset", lambda context, attrs, dim, width: region[int(dim[1:])][0])
    monkeypatch.setattr("executor.kernels.random.num_parts", lambda context, attrs, dim: splits[int(dim[1:])])
    torch.manual_seed(0)
    x = torch.randn([high - low for low, high in region]).to(DEVICE, dtype)
    found = []
    for way in (True, False):
        monkeypatch.setattr("executor.kernels.random.has_triton", lambda x, way=way: way)
        context = replace(site(tuple(x.shape)), micro_batch=3)
        found.append(rule_of("dropout.forward")(context, {"p": p, "seed": 7}, x))
    assert torch.equal(found[0] == 0, found[1] == 0)
    close(*found)


# samples, tokens, experts, choices of a token, places, width: dropped choices, one choice, experts that nobody chooses,
# wide rows
MIXTURES = [(3, 9, 5, 2, 2, 20), (2, 7, 4, 1, 7, 33), (1, 4, 70, 2, 1, 8), (1, 6, 3, 3, 4, 1027)]


def mixture(sizes, dtype, weights):
    """attrs, tokens, gradients of them, routed rows and logits, no two of a token equal."""
    batch, length, experts, top_k, capacity, width = sizes
    torch.manual_seed(0)
    tokens, routed = (batch, length, width), (experts, batch * capacity, width)
    x, g, made = (torch.randn(shape).to(DEVICE, dtype) for shape in (tokens, tokens, routed))
    logits = (torch.rand(batch, length, experts).argsort(-1) / 8).to(DEVICE, dtype)
    return {"top_k": top_k, "capacity": capacity, "weights": weights}, x, g, made, logits


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", ["chosen", "all"])
@pytest.mark.parametrize("sizes", MIXTURES)
@pytest.mark.parametrize("blocks", ["as they are", "small"])
def test_rows_of_experts_in_one_pass(sizes, blocks, weights, dtype, monkeypatch):
    from executor.kernels.triton_experts import RoutingInOnePass

    if blocks == "small":
        for name in ("_LOGITS", "_CHOICES", "_WIDTH"):
            monkeypatch.setattr(f"executor.kernels.triton_experts.{name}", 256 if sizes[-1] > 256 else 8)
    attrs, x, g, routed, logits = mixture(sizes, dtype, weights)
    found, exact = RoutingInOnePass(attrs, logits), PlainRouting(attrs, logits.double())
    assert torch.equal(found.spread(x, weighted=False), exact.spread(x, weighted=False))
    close(found.spread(g, weighted=True), exact.spread(g.double(), weighted=True).to(dtype))
    wide = torch.cat([routed, routed], -1)[..., : routed.shape[-1]]  # rows apart, as a slice has them
    for weighted in (False, True):
        close(found.collected(wide, weighted=weighted), exact.collected(routed.double(), weighted=weighted).to(dtype))
    close(found.logits_gradient(g, routed), exact.logits_gradient(g.double(), routed.double()).to(dtype))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # their weights are not numbers either
def test_of_experts_with_equal_logits_the_first_are_chosen_and_what_is_no_number_comes_before_all():
    from executor.kernels.triton_experts import RoutingInOnePass

    logits = torch.tensor([[1.0, 1.0, 1.0], [-torch.inf] * 3, [1.0, 2.0, torch.nan]], device=DEVICE).unsqueeze(0)
    x = torch.tensor([[[1.0], [2.0], [3.0]]], device=DEVICE)
    routed = RoutingInOnePass({"top_k": 2, "capacity": 3}, logits).spread(x, weighted=False)
    assert routed.squeeze(-1).tolist() == [[1, 2, 0], [1, 2, 3], [3, 0, 0]]


@pytest.mark.needs("GPU")
def test_rows_of_experts_behind_the_two_billionth_element():
    from executor.kernels.triton_experts import RoutingInOnePass

    x = torch.randn(1, 8200, 65536, device=DEVICE, dtype=torch.bfloat16)
    logits = torch.randn(1, 8200, 4, device=DEVICE, dtype=torch.bfloat16)
    routing = RoutingInOnePass({"top_k": 4, "capacity": 8200}, logits)
    routed = routing.spread(x, weighted=False)
    assert routed.numel() > 2**31
    assert torch.equal(routing.collected(routed, weighted=False), 4 * x)


# -- in a graph --------------------------------------------------------------------------------------------------------


def site(shape, dtype="bfloat16"):
    mesh = Layout((1,), ("dp",))
    return OpContext(rank=0, mesh=mesh, shape=shape, dtype=dtype, counter=StepCounter(step=1), device=DEVICE)


def block(x, g, logits, labels):
    """The rules with kernels of their own, forward and backward."""
    shape, attrs = tuple(x.shape), {"causal": True, "layout": "bshd"}
    weight = torch.ones(shape[-1], dtype=x.dtype, device=x.device)
    turned = rule_of("rope.forward")(site(shape), {"base": 10000.0}, x)
    y, sums = rule_of("attention.forward")(site(shape), attrs, turned, turned, x)
    of_q, of_k, of_v = rule_of("attention.grad012")(site(shape), attrs, g, turned, turned, x, y, sums)
    back = rule_of("rope.grad0")(site(shape), {"base": 10000.0}, of_q + of_k)
    normed, scale = rule_of("rms_norm.forward")(site(shape), {"eps": 1e-5}, back, weight)
    of_x = rule_of("rms_norm.grad0")(site(shape), {"eps": 1e-5}, g, back, weight, scale)
    of_weight = rule_of("rms_norm.grad1")(site(tuple(weight.shape)), {"eps": 1e-5}, g, back, scale)
    loss, kept = rule_of("cross_entropy.forward")(site((), "float32"), {"count": labels.numel()}, logits, labels)
    of_logits = rule_of("cross_entropy.grad0")(
        site(tuple(logits.shape)), {"count": labels.numel()}, logits, labels, kept
    )
    mixture, router = {"top_k": 2, "capacity": 20}, logits[..., :8]
    tokens, of_tokens = x.flatten(2), g.flatten(2)
    routed = rule_of("dispatch.forward")(site(()), mixture, tokens, router)
    combined = rule_of("combine.forward")(site(()), mixture, routed, router)
    of_routed = rule_of("combine.grad0")(site(()), mixture, of_tokens, router)
    of_router = rule_of("combine.grad1")(site(()), mixture, of_tokens, routed, router)
    of_tokens = rule_of("dispatch.grad0")(site(()), mixture, of_routed, router)
    experts = routed, combined, of_routed, of_router, of_tokens
    return y, of_v, back, normed, of_x, of_weight, loss, of_logits, *experts


@pytest.mark.needs("GPU")
@pytest.mark.parametrize("length", [64, 50])
def test_a_block_replays_in_a_graph(length):
    torch.manual_seed(0)
    x, g = (torch.randn(2, length, 4, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    logits = torch.randn(2, length, 1000, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(1000, (2, length), device=DEVICE)
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and makes tables and constants
            block(x, g, logits, labels)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = block(x, g, logits, labels)
        for each in (x, g, logits):
            each.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for found, expected in zip(captured, block(x, g, logits, labels), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.needs("GPU")
def test_float32_convolutions_do_not_round_to_tf32():
    Device(kind="cuda").use()
    torch.manual_seed(0)
    x, w = torch.randn(2, 64, 16, 16, device=DEVICE), torch.randn(64, 64, 3, 3, device=DEVICE)
    attrs = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    made = rule_of("conv2d.forward")(site(tuple(x.shape), "float32"), attrs, x, w)
    exact = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    assert float((made - exact).norm() / exact.norm()) < 2e-6  # TF32: 3e-4
