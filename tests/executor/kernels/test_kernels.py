"""Every rule against torch autograd (or torch.optim, or numpy), in float64."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from executor.kernels import RULES, OpContext, StepCounter, rule_of
from executor.kernels.losses import LOSS_RULES
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.operators import declare
from plans.redistribution import Step, StepKind

TOLERANCE = 1e-12
ALONE = Layout((1,), ("dp",))
LOSSES = {"l1_loss": F.l1_loss, "mse_loss": F.mse_loss, "cross_entropy": F.cross_entropy}

# kind, input shapes, attrs, the same in torch
OPERATORS = [
    ("linear", ((5, 4), (3, 4), (3,)), {}, F.linear),
    ("linear", ((5, 4), (3, 4)), {}, F.linear),
    ("linear", ((2, 5, 4), (3, 4), (3,)), {}, F.linear),
    ("linear", ((4,), (3, 4), (3,)), {}, F.linear),
    ("relu", ((5, 4),), {}, torch.relu),
    ("gelu", ((5, 4),), {}, F.gelu),
    ("gelu", ((5, 4),), {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    ("silu", ((5, 4),), {}, F.silu),
    ("abs", ((5, 4),), {}, torch.abs),
    ("cast", ((5, 4),), {}, lambda x: x.to(torch.float64)),
    ("add", ((5, 4), (5, 4)), {}, torch.add),
    ("add", ((5, 4), (4,)), {}, torch.add),
    ("sub", ((5, 4), (5, 1)), {}, torch.sub),
    ("sub", ((1, 4), (5, 1)), {}, torch.sub),
    ("mul", ((5, 4), (5, 4)), {}, torch.mul),
    ("mul", ((4,), (2, 5, 4)), {}, torch.mul),
    ("mul", ((2, 1, 4), (5, 1)), {}, torch.mul),
    ("reshape", ((6, 4),), {}, lambda x: x.reshape(2, 3, 4)),
]


def site(shape=(), shares=False, mesh=ALONE, rank=0, step=1, dtype="float64"):
    return OpContext(
        rank=rank, mesh=mesh, shape=tuple(shape), dtype=dtype, shares=shares, counter=StepCounter(step=step)
    )


def randn(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def shares_memory(found, given):
    return found.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


def autograd_case(kind, shapes, reference):
    inputs = [randn(seed, *shape).requires_grad_() for seed, shape in enumerate(shapes)]
    output = reference(*inputs)
    return inputs, output, randn(99, *output.shape)


@pytest.mark.parametrize(("kind", "shapes", "attrs", "reference"), OPERATORS)
def test_forward_equals_torch(kind, shapes, attrs, reference):
    inputs, output, _ = autograd_case(kind, shapes, reference)
    with torch.inference_mode():
        found = RULES[f"{kind}.forward"](site(output.shape), attrs, *[each.detach() for each in inputs])
    close(found, output.detach())


@pytest.mark.parametrize(("kind", "shapes", "attrs", "reference"), OPERATORS)
def test_gradients_equal_autograd(kind, shapes, attrs, reference):
    inputs, output, g = autograd_case(kind, shapes, reference)
    expected = torch.autograd.grad(output, inputs, g)
    spec = declare(kind, shapes, (tuple(output.shape),), attrs, "op")
    operands = {f"x{index}": each.detach() for index, each in enumerate(inputs)} | {"y0": output.detach()}
    assert sorted(spec.gradients) == list(range(len(inputs)))
    for index, gradient in spec.gradients.items():
        needs = [operands[need] for need in gradient.needs]
        found = RULES[f"{kind}.grad{index}"](site(shapes[index]), attrs, g, *needs)
        assert found.shape == inputs[index].shape
        close(found, expected[index])


@pytest.mark.parametrize(("kind", "shapes", "attrs", "reference"), OPERATORS)
def test_results_have_memory_of_their_own(kind, shapes, attrs, reference):
    inputs, output, g = autograd_case(kind, shapes, reference)
    given = [each.detach() for each in inputs]
    made = [RULES[f"{kind}.forward"](site(output.shape), attrs, *given)]
    spec = declare(kind, shapes, (tuple(output.shape),), attrs, "op")
    operands = {f"x{index}": each for index, each in enumerate(given)} | {"y0": output.detach()}
    for index, gradient in spec.gradients.items():
        needs = [operands[need] for need in gradient.needs]
        made.append(RULES[f"{kind}.grad{index}"](site(shapes[index]), attrs, g, *needs))
    assert not any(shares_memory(result, each) for result in made for each in [*operands.values(), g])


def test_reshape_that_shares_is_a_view():
    x = randn(0, 6, 4)
    found = RULES["reshape.forward"](site((3, 8), shares=True), {}, x)
    assert found.shape == (3, 8) and shares_memory(found, x)


def test_cast_changes_the_dtype_and_back():
    x = randn(0, 3)
    low = RULES["cast.forward"](site((3,), dtype="float32"), {}, x)
    back = RULES["cast.grad0"](site((3,)), {}, low)
    assert (low.dtype, back.dtype) == (torch.float32, torch.float64)


def test_linear_over_a_split_sum_adds_the_bias_once():
    mesh = Layout((2,), ("tp",))
    x, w, bias = randn(0, 5, 4), randn(1, 3, 4), randn(2, 3)
    parts = [
        RULES["linear.forward"](
            site((5, 3), mesh=mesh, rank=rank),
            {"bias_axes": ("tp",)},
            x[:, cut].contiguous(),
            w[:, cut].contiguous(),
            bias,
        )
        for rank, cut in enumerate((slice(0, 2), slice(2, 4)))
    ]
    close(parts[0] + parts[1], F.linear(x, w, bias))


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_parts_of_a_loss_add_up_to_its_mean(kind):
    x = randn(0, 6, 5)
    t = torch.tensor([0, 4, 2, 2, 1, 3]) if kind == "cross_entropy" else randn(1, 6, 5)
    parts = [loss_of(kind, t.numel(), x[rows], t[rows])[0] for rows in ([0, 1], [2, 3, 4, 5])]
    close(parts[0] + parts[1], LOSSES[kind](x, t))


def loss_of(kind, count, x, t):
    """The loss, and what it keeps for its gradient."""
    made = LOSS_RULES[f"{kind}.forward"](site(), {"count": count}, x, t)
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("kind", sorted(LOSSES))
def test_gradient_of_a_loss_equals_autograd_and_takes_its_scale(kind):
    x = randn(0, 6, 5).requires_grad_()
    t = torch.tensor([0, 4, 2, 2, 1, 3]) if kind == "cross_entropy" else randn(1, 6, 5)
    LOSSES[kind](x, t).backward()
    kept = loss_of(kind, t.numel(), x.detach(), t)[1:]
    found = LOSS_RULES[f"{kind}.grad0"](site((6, 5)), {"count": t.numel(), "scale": 0.25}, x.detach(), t, *kept)
    close(found, x.grad / 4)


def test_l1_gradient_is_zero_where_the_label_is_met():
    x = torch.zeros(2, dtype=torch.float64)
    assert LOSS_RULES["l1_loss.grad0"](site((2,)), {"count": 2}, x, x).tolist() == [0.0, 0.0]


def test_unknown_call_is_named():
    with pytest.raises(TwofoldError, match=r"'fft\.forward'"):
        rule_of("fft.forward")


# -- movement ----------------------------------------------------------------------------------------------------------


def test_slice_takes_the_chunk_of_the_ranks_index():
    mesh = Layout((2, 2), ("a", "b"), (3, 1, 2, 0))
    x = randn(0, 2, 8)
    step = Step(
        kind=StepKind.SLICE, axes=("b", "a"), dim=1, before=mesh("None", "None"), after=mesh("None", ("b", "a"))
    )
    for rank in range(4):
        found = RULES["slice"](site((2, 2), mesh=mesh, rank=rank), {"step": step}, x)
        (_, (low, high)) = step.after.region(rank, (2, 8))
        assert torch.equal(found, x[:, low:high]) and found.is_contiguous() and not shares_memory(found, x)


def test_sum_adds_all_inputs_and_changes_none():
    inputs = [randn(seed, 3) for seed in range(3)]
    kept = [each.clone() for each in inputs]
    close(RULES["sum"](site((3,)), {}, *inputs), kept[0] + kept[1] + kept[2])
    assert all(torch.equal(each, before) for each, before in zip(inputs, kept, strict=True))


def test_accumulate_copies_first_and_adds_in_place_then():
    first, second = randn(0, 3), randn(1, 3)
    total = RULES["accumulate"](site((3,)), {"scale": 0.5}, first, None)
    again = RULES["accumulate"](site((3,)), {"scale": 0.5}, second, total)
    assert again is total and not shares_memory(total, first)
    close(total, (first + second) / 2)


def test_losses_in_half_precision_are_averaged_in_single():
    """Added up in bfloat16, 512 losses of 5 would have a mean of 2."""
    sizes = {"num_layers": 1, "hidden": 16, "num_heads": 2, "vocab": 32, "seq": 8}
    graph = transformer(TransformerConfig(**sizes, dtype="bfloat16", float_loss=False), batch_size=512)
    program = lower(plan_of(Degrees(global_batch=512, micro_batch=1), graph))
    dtype, total = program.groups[0].values["step_loss"].dtype, None
    for _ in range(512):
        loss = torch.tensor(5.0, dtype=torch.bfloat16)
        total = RULES["accumulate"](site(dtype=dtype), {"scale": 1 / 512}, loss, total)
    assert total.item() == pytest.approx(5, rel=1e-6)


@pytest.mark.parametrize("num_elements", [8, 7, 5, 3])
def test_flat_slices_of_all_ranks_make_the_padded_tensor(num_elements):
    mesh = Layout((2, 2), ("a", "b"))
    x = randn(0, num_elements)
    size = math.ceil(num_elements / 4)
    parts = [RULES["flat_slice"](site((size,), mesh=mesh, rank=rank), {"axes": ("b", "a")}, x) for rank in (0, 2, 1, 3)]
    assert torch.equal(torch.cat(parts), F.pad(x, (0, 4 * size - num_elements)))


# -- optimizers --------------------------------------------------------------------------------------------------------

UPDATES = [
    ("sgd", {"lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1, foreach=False)),
    ("sgd", {"lr": 0.1, "weight_decay": 0.01}, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, foreach=False)),
    ("momentum", {"lr": 0.1, "momentum": 0.8}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, foreach=False)),
    (
        "momentum",
        {"lr": 0.1, "momentum": 0.8, "dampening": 0.3},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.3, foreach=False),
    ),
    (
        "momentum",
        {"lr": 0.1, "momentum": 0.8, "nesterov": 1.0, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.1, foreach=False),
    ),
    ("adamw", {"lr": 0.1}, lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False)),
    ("adamw", {}, lambda p: torch.optim.AdamW(p, foreach=False)),
    (
        "adamw",
        {"lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.0},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.0, foreach=False),
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "settings", "make"), UPDATES)
def test_update_is_torch_optim_bit_for_bit(kind, settings, make, dtype):
    reference = randn(0, 7).to(dtype).requires_grad_()
    weight = reference.detach().clone()
    states = [torch.zeros_like(weight) for _ in range({"sgd": 0, "momentum": 1, "adamw": 2}[kind])]
    optimizer = make([reference])
    for step in range(1, 5):
        gradient = randn(step, 7).to(dtype)
        reference.grad = gradient.clone()
        optimizer.step()
        with torch.inference_mode():
            result = RULES[f"{kind}.update"](site((7,), step=step), settings, weight, gradient, *states)
        first = result if kind == "sgd" else result[0]
        assert first is weight
        assert torch.equal(weight, reference.detach())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_causal_attention_of_a_split_sequence_is_that_of_the_whole(dtype, kv_heads):
    torch.manual_seed(0)
    q, g = torch.randn(2, 2, 4, 12, 8).to(dtype)
    k, v = torch.randn(2, 2, kv_heads, 12, 8).to(dtype)
    exact = [each.double().clone().requires_grad_() for each in (q, k, v)]
    whole = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=kv_heads != 4)
    wanted = torch.autograd.grad(whole, exact, g.double())
    attrs = {"causal": True, "split": {"s": ("cp",)}}
    outputs, gradients = [], [torch.zeros_like(each) for each in (q, k, v)]
    for rank in range(3):
        rows = slice(4 * rank, 4 * rank + 4)
        site = OpContext(rank=rank, mesh=Layout((3,), ("cp",)), dtype=str(dtype).split(".")[-1])
        kept = rule_of("attention.forward")(site, attrs, q[..., rows, :], k, v)
        outputs.append(kept[0])
        mine = rule_of("attention.grad012")(site, attrs, g[..., rows, :], q[..., rows, :], k, v, *kept)
        gradients[0][..., rows, :] = mine[0]
        gradients[1] += mine[1]
        gradients[2] += mine[2]
    near = 1e-12 if dtype is torch.float64 else 0.02
    for found, exactly in zip((torch.cat(outputs, -2), *gradients), (whole.detach(), *wanted), strict=True):
        assert float((found.double() - exactly).norm() / exactly.norm()) < near
