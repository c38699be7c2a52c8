"""Fused runs: the same training on pretend ranks, the same bits in the executor, fewer bytes in the price."""

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.peers.configs import MODELS
from benchmarks.peers.sets import case_named
from costmodels import Machine
from costmodels.price.compute import fused_rule
from costmodels.price.instruction import price
from executor.device import Device
from executor.step.interpreter import Interpreter
from executor.step.memory import memory_peak
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.lower import lower
from plans.lower.emit import ValueTable
from plans.lower.fuse import FUSIBLE, fuse_runs
from plans.model.transformer import transformer
from plans.optimizer import Optimizer
from plans.program import Kind, moved_values
from simulator import simulate
from tests.plans.lower.test_lowering import check_training
from tests.support.random_plans import random_plan

ADAMW = Optimizer(kind="adamw", settings={"lr": 1e-3})


def apart(plan):
    return msgspec.structs.replace(plan, fused=False)


def transformer_plan(name, dtype="float32", **degrees):
    config = dataclasses.replace(MODELS[name], dtype=dtype)
    degrees = Degrees(**{"micro_batch": 2, "global_batch": 4, "optimizer": ADAMW, **degrees})
    return plan_of(degrees, transformer(config, batch_size=4))


def lines_of(plan):
    return [line for group in lower(plan).groups for _, line in group.walk()]


def steps_of(plan):
    """Calls of the runs of a plan -> how often they occur."""
    return Counter(tuple(step.call for step in line.attrs["steps"]) for line in lines_of(plan) if line.call == "fused")


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_train_as_one_device_does(seed):
    check_training(random_plan(seed))


def test_random_plans_have_runs():
    found = sum((steps_of(random_plan(seed)) for seed in range(40)), Counter())
    assert found.total() > 50 and len(found) > 10


@pytest.mark.parametrize("seed", range(40))
def test_communication_products_and_updates_keep_their_order(seed):
    def others(group):
        walk = group.walk()
        return [(block.label, line.name) for block, line in walk if line.call not in FUSIBLE and line.call != "fused"]

    plan = random_plan(seed)
    for one, other in zip(lower(apart(plan)).groups, lower(plan).groups, strict=True):
        assert others(one) == others(other)


@pytest.mark.parametrize("seed", range(12))
def test_fusing_again_changes_nothing(seed):
    for group in lower(random_plan(seed)).groups:
        table = ValueTable(values=dict(group.values))
        for block in group.blocks:
            body = list(block.body.instructions)
            ((again,),) = fuse_runs([[body]], table, {}, 1)
            assert [line for line in again if line.call == "fused"] == [line for line in body if line.call == "fused"]


def test_a_decoder_has_these_runs():
    block = 4  # of them
    assert steps_of(transformer_plan("tiny", "bfloat16", micro_batch=4)) == {
        ("add.forward", "rms_norm.forward"): block,
        ("silu.forward", "mul.forward"): block,
        ("cast.forward", "cross_entropy.forward"): 1,
        ("cast.forward", "cross_entropy.grad0", "cast.grad0"): 1,
        ("rms_norm.grad0", "rms_norm.grad1"): 1,
        ("silu.forward", "mul.grad0", "mul.grad1", "silu.grad0"): block,
        ("sum", "rms_norm.grad0", "sum", "rms_norm.grad1"): 2 * block,
    }


def trained(plan, steps=3):
    draw = np.random.default_rng(0)
    rank = Interpreter(lower(plan), 0, Device(kind="cpu"))
    rank.set_parameters({
        each.name: (0.1 * draw.standard_normal(each.shape) + each.name.endswith("norm.weight")).astype(np.float32)
        for each in plan.graph.parameters
    })  # fmt: skip
    losses = []
    for _ in range(steps):
        batch = {each.name: draw.integers(0, 100, each.shape) for each in plan.graph.inputs}
        losses.append(rank.step(batch).item())
    return losses, rank.kept_tensors


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["tiny", "tiny-gpt", "tiny-moe"])
def test_plain_torch_gives_the_same_bits(name, dtype, recompute):
    plan = transformer_plan(name, dtype, recompute=recompute)
    (losses, kept), (expected, others) = trained(plan), trained(apart(plan))
    assert losses == expected
    assert all(torch.equal(one, other) for one, other in zip(kept, others, strict=True))


@pytest.mark.parametrize("name", ["8x4096-b8-dp2-mb4", "gpt-b16-dp2-mb8", "moe-b8-dp2-mb4", "8x4096-b8-tp2-mb4-sp"])
def test_fewer_bytes_are_moved_and_held(name):
    plan = case_named(name).plan()
    moved, held, steps = [], [], []
    for each in (apart(plan), plan):
        (group,) = lower(each).groups
        own = [line for _, line in group.walk() if line.kind is Kind.COMPUTE]
        moved.append(sum(group.values[name].span_bytes for line in own for name in moved_values(line)))
        held.append(memory_peak(group, 0).peak_bytes)
        steps.append(simulate(each, Machine.load("h200-x2")).step_s)
    assert moved[1] < 0.9 * moved[0] and held[1] < 0.95 * held[0] and steps[1] < 0.99 * steps[0]


def without_runs(machine):
    """The machine without what was measured of fused runs."""
    rules = {name: rule for name, rule in machine.compute.rules.items() if not name.startswith("fused")}
    return msgspec.structs.replace(machine, compute=msgspec.structs.replace(machine.compute, rules=rules))


def test_a_run_takes_what_runs_of_its_kind_took_where_they_were_measured():
    (group,) = lower(transformer_plan("tiny", "bfloat16")).groups
    machine, found = Machine.load("h200-x1"), {}
    for line in (line for _, line in group.walk() if line.call == "fused"):
        kind = fused_rule(line.attrs["steps"])
        rule, moved = machine.compute.rules[kind], sum(group.values[name].span_bytes for name in moved_values(line))
        found[kind] = price(line, group, machine, 1)
        expected_s = rule.kernels * machine.compute.kernel_s + rule.passes * moved / machine.compute.memory_Bps
        expected_s *= 1 + machine.compute.longer_in_steps
        assert found[kind].work_ps == pytest.approx(1e12 * expected_s, abs=1)
        assert found[kind].dispatch_ps == pytest.approx(1e12 * rule.dispatch_s, abs=1)
    assert found.keys() == {"fused:elements", "fused:rows", "fused:columns", "fused:loss"}


def test_the_price_is_one_kernel_on_a_gpu_and_the_steps_elsewhere():
    (group,) = lower(transformer_plan("tiny")).groups
    line = next(line for _, line in group.walk() if line.call == "fused")
    whole = dataclasses.replace(group, values={**group.values, **line.attrs["inner"]})
    for name, is_one in (("h200-x1", True), ("cpu-2core-x8", False), ("ascend-910b1-x8", False)):
        machine = without_runs(Machine.load(name))
        steps = [price(step, whole, machine, 1) for step in line.attrs["steps"]]
        found, summed = price(line, group, machine, 1), sum(cost.work_ps for cost in steps)
        assert found.work_ps < summed if is_one else found.work_ps == summed
        issued = round(1e12 * machine.dispatch_s["memory"]) if is_one else sum(cost.dispatch_ps for cost in steps)
        assert found.dispatch_ps == issued
