"""What is made in memory that is there already: sums over ranks, gradients that a product adds up, views of parts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor.device import Device
from executor.kernels import OpContext, rule_of
from executor.step.comm import collective_launch
from executor.step.groups import Groups, Lane
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.layout import Layout, TensorLayout
from plans.lower import lower
from plans.lower.emit import ValueTable
from plans.lower.in_place import sum_in_place
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.program import Block, Body, GroupProgram, Instruction, Kind, Program, Value
from plans.redistribution import Step, StepKind
from tests.support.on_ranks import run_on_ranks

ALONE = Layout((1,), ("dp",))


def program_of(optimizer=None, dtype="float32", **degrees):
    config = TransformerConfig(num_layers=2, hidden=16, num_heads=2, vocab=32, seq=8, ffn=32, dtype=dtype)
    degrees = Degrees(global_batch=8, optimizer=optimizer or Optimizer(kind="adamw", settings={"lr": 0.1}), **degrees)
    return lower(plan_of(degrees, transformer(config, batch_size=8)))


def instructions(program):
    return [each for _, each in program.groups[0].walk()]


# -- sums over ranks ---------------------------------------------------------------------------------------------------


def test_tensor_parallel_sums_need_no_second_tensor():
    group = program_of(tp=2).groups[0]
    sums = [each for _, each in group.walk() if each.call == "all_reduce" and each.inputs != each.outputs]
    assert sums and all(group.values[each.outputs[0]].shares == each.inputs[0] for each in sums)


def chain(*lines):
    """A table of equal values, and the instructions (kind, call, input, output) that make them."""
    table = ValueTable()
    for name in dict.fromkeys(name for _, _, *names in lines for name in names if name):
        table.add(Value(name=name, shape=(4,)))
    body = [
        Instruction(
            name=str(at), kind=kind, call=call, part="C", inputs=(given,) if given else (),
            outputs=(made,) if made else (),
        )
        for at, (kind, call, given, made) in enumerate(lines)
    ]  # fmt: skip
    return body, table


MADE = (Kind.COMPUTE, "relu.forward", "", "partial")
SUMMED = (Kind.COLLECTIVE, "all_reduce", "partial", "total")


@pytest.mark.parametrize(
    ("lines", "shares"),
    [
        ((MADE, SUMMED), True),
        ((MADE, (Kind.COMPUTE, "relu.forward", "partial", "other"), SUMMED), True),
        ((MADE, SUMMED, (Kind.COMPUTE, "relu.forward", "partial", "other")), False),
        ((MADE, (Kind.SEND, "transfer", "partial", ""), SUMMED), False),
        ((MADE, SUMMED, (Kind.COLLECTIVE, "all_reduce", "partial", "again")), False),
        (((Kind.RECV, "transfer", "", "partial"), SUMMED), False),
    ],
)
def test_a_sum_is_made_in_place_only_where_nothing_else_needs_the_parts(lines, shares):
    body, table = chain(*lines)
    sum_in_place([[body]], table)
    assert table["total"].shares == ("partial" if shares else None)


def test_a_sum_is_not_made_in_memory_that_another_value_needs():
    body, table = chain(MADE, SUMMED, (Kind.COMPUTE, "relu.forward", "view", "other"))
    table.values["view"] = replace(table["view"], shares="partial")
    sum_in_place([[body]], table)
    assert table["total"].shares is None


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_product_adds_to_the_gradient_that_is_there(dtype):
    torch.manual_seed(0)
    g, x = torch.randn(3, 5, 6).to(dtype), torch.randn(3, 5, 4).to(dtype)
    site, attrs = OpContext(rank=0, mesh=ALONE, shape=(6, 4), dtype=str(dtype).split(".")[1]), {"adds": True}
    with torch.inference_mode():
        first = rule_of("linear.grad1")(site, attrs, g, x, None)
        expected = first.double() + torch.einsum("abn,abk->nk", g.double(), x.double())
        second = rule_of("linear.grad1")(site, attrs, g, x, first)
    assert second is first
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(second.double(), expected, rtol=near, atol=near)


def test_linear_gradients_are_accumulated_by_their_product():
    for each in instructions(program_of(micro_batch=2)):
        assert (each.call != "linear.grad1") or (each.attrs["adds"] and each.outputs[0].startswith("g:"))
        assert each.call != "accumulate" or "norm" in each.inputs[0] or "loss" in each.name or "embed" in each.name


def test_half_precision_is_only_written_by_its_product():
    """A sum in the product would be rounded once, where torch rounds the product and the sum."""
    several, single = (instructions(program_of(dtype="bfloat16", micro_batch=size)) for size in (2, 8))
    assert not any(each.attrs.get("adds") for each in several)
    assert all(each.attrs.get("adds") for each in single if each.call == "linear.grad1")


def test_gradients_of_another_dtype_and_those_reduced_at_once_are_not():
    wide = Optimizer(kind="adamw", settings={"lr": 0.1}, gradient_dtype="float64")
    sharded = Optimizer(kind="adamw", settings={"lr": 0.1}, parallel_level=2, threshold_bytes=0)
    for program in (program_of(wide), program_of(sharded, dp=2)):
        assert not any(each.attrs.get("adds") for each in instructions(program))


def test_gradients_of_a_residual_share_one_memory():
    group = program_of().groups[0]
    passed = [each for _, each in group.walk() if each.call in ("add.grad0", "add.grad1")]
    assert passed and all(group.values[each.outputs[0]].shares == each.inputs[0] for each in passed)


# -- parts of a dim behind dims of one element -------------------------------------------------------------------------

PAIR = Layout((2,), ("t",))
SHAPE = (1, 6, 3)


def steps():
    whole, cut = TensorLayout(mesh=PAIR, dims=((), (), ())), TensorLayout(mesh=PAIR, dims=((), ("t",), ()))
    partial = TensorLayout(mesh=PAIR, dims=((), (), ()), partial=("t",))
    yield Step(kind=StepKind.ALL_GATHER, axes=("t",), dim=1, before=cut, after=whole)
    yield Step(kind=StepKind.REDUCE_SCATTER, axes=("t",), dim=1, before=partial, after=cut)


def on_two_ranks(rank, folder):
    lines = [
        Instruction(
            name=str(step.kind), kind=Kind.COLLECTIVE, call=str(step.kind), part="C", inputs=("x",), outputs=("y",),
            mesh=PAIR, axes=("t",), channel="t", attrs={"step": step, "shape": SHAPE},
        )
        for step in steps()
    ]  # fmt: skip
    block = Block(label="0F0", micro_batch=0, body=Body(name="all", instructions=tuple(lines)))
    groups = Groups(
        Program(groups=(GroupProgram(mesh=PAIR, values={}, blocks=(block,)),), num_micro_batches=1), Device(kind="cpu")
    )
    team, whole = groups.team("t", (0, 1)), torch.arange(18.0).view(SHAPE)
    gathered = collective_launch(lines[0], team, Value(name="y", shape=SHAPE))(
        whole[:, 3 * rank : 3 * rank + 3].contiguous()
    ).finish()[0]
    summed = collective_launch(lines[1], team, Value(name="y", shape=(1, 3, 3)))(whole * (rank + 1)).finish()[0]
    np.savez(folder / f"{rank}.npz", gathered=gathered.numpy(), summed=summed.numpy())


@pytest.mark.ranks
def test_parts_behind_a_batch_of_one_are_gathered_and_scattered(tmp_path):
    run_on_ranks(on_two_ranks, 2, tmp_path)
    whole = np.arange(18.0).reshape(SHAPE)
    for rank in range(2):
        with np.load(tmp_path / f"{rank}.npz") as found:
            np.testing.assert_array_equal(found["gathered"], whole)
            np.testing.assert_array_equal(found["summed"], 3 * whole[:, 3 * rank : 3 * rank + 3])


# -- receives ----------------------------------------------------------------------------------------------------------


def test_a_lane_starts_receives_in_the_order_of_posting_and_once():
    lane, started = Lane(), []
    numbers = [lane.post(lambda name=name: started.append(name)) for name in "abc"]
    assert started == []
    lane.start_until(numbers[1])
    assert started == ["a", "b"]
    lane.start_until(numbers[0])
    lane.start_until(numbers[2])
    assert started == ["a", "b", "c"]
