"""Lowered programs on pretend ranks against training on one device, and the properties that a program must have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Graph
from plans.model.mlp import mlp_graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.program import GroupProgram, Instruction, Kind, Program
from plans.step_check import LossScale, Spike, StepCheck
from tests.pretend.operators import UPDATES
from tests.pretend.program import Pretend, live_bytes
from tests.support.random_plans import GraphMaker, random_plan
from tests.support.small_training import one_rank

TOLERANCE = 1e-10
ELEMENTWISE = {
    "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "abs": torch.abs,
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "linear": F.linear,
    "l1_loss": F.l1_loss, "mse_loss": F.mse_loss,
}  # fmt: skip


def torch_loss(graph: Graph, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The whole batch on one device."""
    tensors = dict(tensors)
    for operator in graph.operators:
        inputs, made = [tensors[name] for name in operator.inputs], graph.tensors[operator.outputs[0]]
        if operator.kind == "reshape":
            result = inputs[0].reshape(made.shape)
        elif operator.kind == "cast":
            result = inputs[0].double()
        elif operator.kind == "cross_entropy":
            result = F.cross_entropy(inputs[0].flatten(0, -2), inputs[1].flatten())
        else:
            result = ELEMENTWISE[operator.kind](*inputs)
        tensors[made.name] = result
    return tensors[graph.loss]


class OneDevice:
    """Trains the whole batch at once: gradients by autograd, updates by the whole tensors."""

    def __init__(self, graph: Graph, optimizer: Optimizer, parameters: dict[str, np.ndarray]) -> None:
        self.graph, self.optimizer, self.steps, self.weights = graph, optimizer, 0, dict(parameters)
        self.states = {name: [np.zeros_like(value)] * optimizer.num_states for name, value in parameters.items()}

    def step(self, batch: dict[str, np.ndarray]) -> float:
        self.steps += 1
        leaves = {name: torch.tensor(value, requires_grad=True) for name, value in self.weights.items()}
        loss = torch_loss(self.graph, leaves | {name: torch.tensor(value) for name, value in batch.items()})
        loss.backward()
        if self.optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(leaves.values(), self.optimizer.clip_norm)
        for name, leaf in leaves.items():
            self.weights[name], *self.states[name] = UPDATES[f"{self.optimizer.kind}.update"](
                self.optimizer.settings, self.steps, self.weights[name], leaf.grad.numpy(), *self.states[name]
            )
        return loss.item()


def random_values(graph: Graph, seed: int, steps: int) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    random = np.random.default_rng(seed)
    parameters = {tensor.name: random.normal(size=tensor.shape) * 0.5 for tensor in graph.parameters}
    batches = []
    for _ in range(steps):
        batch = {}
        for tensor in graph.inputs:
            batch[tensor.name] = random.normal(size=tensor.shape)
            if tensor.dtype == "int64":
                batch[tensor.name] = random.integers(0, 3, size=tensor.shape)
        batches.append(batch)
    return parameters, batches


def feed(plan: Plan, rank: int, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With full_batch everything, else the rank's rows of every micro-batch."""
    if plan.full_batch:
        return batch
    mesh = next(stage.mesh for stage in plan.stages if rank in stage.mesh.rank_list)
    index = mesh.rank_list.index(rank)
    return {
        name: np.concatenate(
            [np.split(rows, mesh.num_ranks)[index] for rows in np.split(whole, plan.num_micro_batches)]
        )
        for name, whole in batch.items()
    }


def check_training(plan: Plan, steps: int = 2) -> Pretend:
    parameters, batches = random_values(plan.graph, 0, steps)
    one_device = OneDevice(plan.graph, plan.optimizer, parameters)
    pretend = Pretend(lower(plan), parameters)
    loss_stage = next(s for s in plan.stages if plan.graph.operators[-1].name in s.operators)
    for batch in batches:
        losses = pretend.step(lambda rank, batch=batch: feed(plan, rank, batch))
        loss = one_device.step(batch)
        knows = set(losses) if plan.output_broadcast else set(loss_stage.mesh.rank_list)
        assert {rank for rank, value in losses.items() if value is not None} == knows
        for rank in knows:
            assert losses[rank] == pytest.approx(loss, abs=TOLERANCE, rel=TOLERANCE), rank
    found = pretend.parameters()
    assert found.keys() == one_device.weights.keys()
    for name, weight in one_device.weights.items():
        np.testing.assert_allclose(found[name], weight, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    return pretend


@pytest.mark.parametrize("seed", [*range(34), 3649])  # the last: a sum over 3 ranks of 8 columns
def test_random_plans_train_as_one_device_does(seed):
    check_training(random_plan(seed))


class OneCheckedDevice(OneDevice):
    """It scales nothing, and leaves out updates whose gradients are far larger than those of the last two."""

    def __init__(self, plan: Plan, parameters: dict[str, np.ndarray]) -> None:
        super().__init__(plan.graph, plan.optimizer, parameters)
        self.factor, self.norms, self.skipped = plan.step_check.spike.factor, list[float](), list[bool]()

    def step(self, batch: dict[str, np.ndarray]) -> float:
        leaves = {name: torch.tensor(value, requires_grad=True) for name, value in self.weights.items()}
        loss = torch_loss(self.graph, leaves | {name: torch.tensor(value) for name, value in batch.items()})
        loss.backward()
        norm = float(torch.cat([leaf.grad.flatten() for leaf in leaves.values()]).norm())
        usual = sum(self.norms[-2:]) / 2
        self.skipped.append(not np.isfinite(norm) or (len(self.norms) > 1 and norm > self.factor * usual))
        if self.skipped[-1]:
            return loss.item()
        self.norms.append(norm)
        return super().step(batch)


@pytest.mark.parametrize("seed", [*range(19), *range(20, 29)])  # 19: its gradients do not grow with the inputs
def test_random_plans_skip_the_steps_that_one_device_skips(seed, monkeypatch):
    """With scaled losses, too: a scale that is undone before the update changes nothing."""
    monkeypatch.setattr(StepCheck, "check", lambda *_: None)  # of float16, which numpy's float64 stands for here
    plan = random_plan(seed)
    scale = LossScale(initial=8.0, growth_every=2) if seed % 3 else None
    check = StepCheck(loss_scale=scale, spike=Spike(factor=1.5, window=2, then="skip"))
    plan = msgspec.structs.replace(plan, step_check=check)
    parameters, batches = random_values(plan.graph, 0, 6)
    for name, array in batches[3].items():
        if array.dtype == np.float64:
            batches[3][name] = array * 1e3
    one_device, pretend = OneCheckedDevice(plan, parameters), Pretend(lower(plan), parameters)
    for batch in batches:
        losses = pretend.step(lambda rank, batch=batch: feed(plan, rank, batch))
        loss = one_device.step(batch)
        for rank, value in losses.items():
            held = pretend.ranks[rank].env["step_check.held", None]
            assert bool(held[4]) is one_device.skipped[-1] and held[2] == sum(one_device.skipped)
            assert value is None or value == pytest.approx(loss, abs=TOLERANCE, rel=TOLERANCE), rank
    assert any(one_device.skipped) and not all(one_device.skipped)
    found = pretend.parameters()
    for name, weight in one_device.weights.items():
        np.testing.assert_allclose(found[name], weight, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


# ------------------------------------------------------------------ structure


Splits = dict[str, dict[str, tuple[str, ...]]]


def plan_of(graph: Graph, mesh: Layout, strategies: Splits | None = None, **rest) -> Plan:
    """One stage on `mesh`."""
    names = tuple(operator.name for operator in graph.operators)
    return Plan(
        graph=graph,
        stages=(Stage(mesh=mesh, operators=names),),
        strategies={name: Strategy(dims=dims) for name, dims in (strategies or {}).items()},
        **rest,
    )


def one_group(plan: Plan) -> GroupProgram:
    (group,) = lower(plan).groups
    return group


def body(plan: Plan, label: str) -> list[Instruction]:
    return [line for block in one_group(plan).blocks if block.label == label for line in block.body.instructions]


def calls(instructions: list[Instruction], kind: Kind = Kind.COLLECTIVE) -> list[str]:
    return [each.call for each in instructions if each.kind is kind]


@pytest.mark.parametrize("seed", range(0, 34, 5))
def test_ids_are_unique_and_every_send_has_its_receive(seed):
    program = lower(random_plan(seed))
    for group in program.groups:
        # the two ends of a transfer inside a stage have one name
        ids = Counter((f"{block.label}/{each.name}", each.kind is Kind.RECV) for block, each in group.walk())
        assert max(ids.values()) == 1
    sent, received = Counter(), Counter()
    for group in program.groups:
        for block, each in group.walk():
            if each.kind in (Kind.SEND, Kind.RECV):
                count = sent if each.kind is Kind.SEND else received
                count[each.channel, each.name, block.micro_batch, each.pieces] += 1
    assert sent == received


def test_column_then_row_split_costs_one_all_reduce_each_way():
    graph = mlp_graph([8, 8, 16, 4], 4)
    strategies = {
        "layer2.linear": {"n": ("tp",)}, "layer2.relu": {"d1": ("tp",)}, "layer3.linear": {"k": ("tp",)},
    }  # fmt: skip
    plan = plan_of(graph, Layout((2,), ("tp",)), strategies)
    assert calls(body(plan, "0F0")) == ["all_reduce"]
    assert calls(body(plan, "0B0")) == ["all_reduce"]
    assert calls(body(plan, "end")) == []
    check_training(plan)


def test_weight_gradients_hide_the_reduction_of_the_input_gradient():
    graph = mlp_graph([8, 8, 4], 4)
    plan = plan_of(graph, Layout((2,), ("tp",)), {"layer2.linear": {"n": ("tp",)}})
    names = [each.name for each in body(plan, "0B0")]
    reduce = next(each for each in body(plan, "0B0") if each.call == "all_reduce")
    wait = names.index(f"{reduce.token}.wait")
    assert names.index("layer2.linear.B0") < names.index(reduce.name) < names.index("layer2.linear.W1") < wait


def two_readers() -> tuple[Graph, Splits]:
    """x -> t0 (rows split) -> relu t1 -> t2 and t3 (columns split) -> t4 = t2 * t3."""
    make = GraphMaker(4)
    hidden = make.apply("relu", make.linear(make.tensor("x", (4, 6), "input"), 8))
    product = make.apply("mul", make.linear(hidden, 6), make.linear(hidden, 6))
    graph = make.graph(make.apply("mse_loss", product, make.tensor("y", (4, 6), "input"), shape=()))
    columns, rows = {"n": ("tp",)}, {"b0": ("tp",)}
    both = {"d1": ("tp",)}
    return graph, {
        "t0.linear": rows, "t1.relu": {"d0": ("tp",)}, "t2.linear": columns, "t3.linear": columns, "t4.mul": both,
        "t5.mse_loss": both,
    }  # fmt: skip


def test_two_readers_of_one_layout_share_a_redistribution():
    graph, strategies = two_readers()
    plan = plan_of(graph, Layout((2,), ("tp",)), strategies)
    assert calls(body(plan, "0F0")) == ["all_gather"]
    backward = [each for each in body(plan, "0B0") if not each.name.startswith("g:")]
    assert calls(backward) == ["reduce_scatter"]
    order = [each.call for each in backward]
    assert order.count("sum") == 1
    assert order.index("sum") < order.index("reduce_scatter")
    check_training(plan)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_sharded_parameter_is_gathered_and_scattered_once_a_step(schedule):
    graph = mlp_graph([7, 9, 4], 24)
    strategies = {operator.name: {"b0": ("dp",)} for operator in graph.operators if operator.kind == "linear"}
    optimizer = Optimizer(kind="adamw", settings={"lr": 0.01}, parallel_level=1, threshold_bytes=100, bucket_bytes=0)
    mesh = Layout((3,), ("dp",))
    plan = plan_of(graph, mesh, strategies, num_micro_batches=4, optimizer=optimizer, schedule=schedule)
    found = Counter((each.call, each.outputs[0].split("#")[0]) for _, each in one_group(plan).walk() if each.axes)
    weights = ["layer1.weight", "layer2.weight"]  # the biases are below the threshold
    assert {key: found[key] for key in found if key[0] == "all_gather_flat"} == {
        ("all_gather_flat", name): 1 for name in weights
    }
    assert {key: found[key] for key in found if key[0] == "reduce_scatter_flat"} == {
        ("reduce_scatter_flat", f"g:{name}"): 1 for name in weights
    }
    assert found["all_reduce", "g:layer1.bias"] == found["all_reduce", "g:layer2.bias"] == 1
    kept = {
        placement.name: one_group(plan).values[placement.shard or placement.weight].shape
        for placement in one_group(plan).parameters
    }
    assert kept == {"layer1.weight": (21,), "layer2.weight": (12,), "layer1.bias": (9,), "layer2.bias": (4,)}
    check_training(plan)


# ------------------------------------------------------------------ memory


def wide_chain(**rest) -> Plan:
    """Four linear layers with relus; activations of 64 x 32 floats, 8192 bytes, and small weights."""
    return plan_of(mlp_graph([4, 32, 32, 32, 4], 64, bias=False), Layout((1,), ("a",)), **rest)


def bytes_between(plan: Plan) -> int:
    """Live bytes when the backward begins."""
    return next(size for name, size in live_bytes(one_group(plan)) if name.startswith("0B0/"))


def peak(plan: Plan) -> int:
    return max(size for _, size in live_bytes(one_group(plan)))


def test_recompute_of_relus_only_moves_what_is_saved():
    relus = tuple(f"layer{number}.relu" for number in (1, 2, 3))
    before, after = wide_chain(), wide_chain(recompute=relus)
    assert bytes_between(after) == bytes_between(before)
    assert peak(after) >= peak(before)
    assert Counter(each.part for _, each in one_group(after).walk())["R"] == 3
    check_training(after)


def test_recompute_of_a_chain_lowers_live_memory():
    chain = ("layer1.linear", "layer1.relu", "layer2.linear", "layer2.relu", "layer3.linear", "layer3.relu")
    before, after = wide_chain(), wide_chain(recompute=chain)
    activation = 64 * 32 * 4
    assert bytes_between(before) - bytes_between(after) == 3 * activation
    check_training(after)


def test_recomputed_values_are_made_once_for_both_parts_of_a_split_backward():
    recompute = ("layer1.linear", "layer1.relu")
    plan = wide_chain(recompute=recompute, schedule="zb_h1", num_micro_batches=2, fused=False)  # a run has no name
    again = Counter(each.name for each in body(plan, "0I0") + body(plan, "0W0") if each.part == "R")
    assert again == {"layer1.linear.F~again": 1, "layer1.relu.F~again": 1}
    check_training(plan)


# ------------------------------------------------------------------ refusals


def refused(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TwofoldError, match=text):
        make()


def test_labels_that_are_trained_are_refused():
    make = GraphMaker(4)
    x = make.tensor("x", (4, 6), "input")
    graph = make.graph(make.apply("mse_loss", make.linear(x, 3), make.linear(x, 3), shape=()))
    refused(lambda: lower(plan_of(graph, Layout((1,), ("a",)))), "no gradient for its input 't1'.*detach it")


def test_operators_that_do_not_reach_the_loss_have_no_backward():
    make = GraphMaker(4)
    hidden = make.linear(make.tensor("x", (4, 6), "input"), 3)
    rounded = make.apply("cast", hidden, dtype="int64")
    total = make.apply("add", hidden, make.apply("cast", rounded))
    make.apply("abs", total)
    graph = make.graph(make.apply("l1_loss", total, make.tensor("y", (4, 3), "input"), shape=()))
    names = [operator.name for operator in graph.operators]
    stages = (
        Stage(mesh=Layout((1,), ("a",), (0,)), operators=tuple(names[:2])),
        Stage(mesh=Layout((1,), ("a",), (1,)), operators=tuple(names[2:])),
    )
    program = lower(Plan(graph=graph, stages=stages))
    made = {each.name for group in program.groups for _, each in group.walk() if each.part == "B"}
    assert made == {"t3.add.B0", "t5.l1_loss.B0"}
    Pretend(program, random_values(graph, 0, 1)[0]).step(lambda rank: random_values(graph, 0, 1)[1][0])


def test_meshes_that_do_not_fit_are_refused():
    graph = mlp_graph([4, 4], 4)
    own = {"layer1.linear": Strategy(mesh=Layout((1,), ("a",)))}
    stage = Stage(mesh=Layout((2,), ("a",)), operators=("layer1.linear", "loss.mse_loss"))
    refused(lambda: Plan(graph=graph, stages=(stage,), strategies=own), "'layer1.linear' has the ranks .0., its stage")
    stages = tuple(
        Stage(mesh=Layout((2,), ("a",), ranks), operators=(name,))
        for ranks, name in (((0, 1), "layer1.linear"), ((1, 0), "loss.mse_loss"))
    )
    refused(lambda: Plan(graph=graph, stages=stages), "same order")


# ------------------------------------------------------- the oracle sees faults


def edited(program: Program, change: Callable[[Instruction], Instruction | None]) -> Program:
    """The program with every instruction changed, or left out where `change` gives None."""
    groups = []
    for group in program.groups:
        blocks = []
        for block in group.blocks:
            lines = [new for each in block.body.instructions if (new := change(each)) is not None]
            blocks.append(replace(block, body=replace(block.body, instructions=tuple(lines))))
        groups.append(replace(group, blocks=tuple(blocks)))
    return replace(program, groups=tuple(groups))


def without(kind: Kind) -> Callable[[Instruction], Instruction | None]:
    return lambda each: None if each.kind is kind else each


def freed_early(each: Instruction) -> Instruction:
    return replace(each, frees=(*each.frees, *each.outputs)) if each.name == "layer1.relu.F" else each


FAULTS = {
    "deadlock: rank 0 at": without(Kind.SEND),
    "is not there": without(Kind.WAIT),
    "before it is issued": without(Kind.RECV),
    "is not there any more": freed_early,
    "made 1, freed 0": lambda each: replace(each, frees=()) if each.part == "B" else each,
    "makes .* a second time": lambda each: (
        replace(each, outputs=("layer1.act@(None, None)",)) if each.name == "loss.mse_loss.B0" else each
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_the_oracle_sees_a_fault(message):
    graph = mlp_graph([4, 4, 4], 8)
    stages = (
        Stage(mesh=Layout((1,), ("a",), (0,)), operators=("layer1.linear",)),
        Stage(mesh=Layout((1,), ("a",), (1,)), operators=("layer1.relu", "layer2.linear", "loss.mse_loss")),
    )
    plan = Plan(graph=graph, stages=stages, num_micro_batches=2)
    parameters, (batch,) = random_values(graph, 0, 1)
    Pretend(lower(plan), parameters).step(lambda rank: batch)
    with pytest.raises(AssertionError, match=message):
        Pretend(edited(lower(plan), FAULTS[message]), parameters).step(lambda rank: batch)


@pytest.mark.parametrize(("kind", "each"), [("sgd", 2), ("momentum", 4), ("adamw", 6)])
def test_updates_count_two_operations_for_the_weight_and_each_state(kind, each):
    plan = one_rank(optimizer=Optimizer(kind=kind, settings={"lr": 0.1}))
    updates = [made for _, made in lower(plan).groups[0].walk() if made.call == f"{kind}.update"]
    assert sum(made.flops for made in updates) == each * (8 * 6 + 8 + 2 * 8 + 2)
