"""A small realistic case for the tests of reports: a plan, and its program in virtual time at made-up prices."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np

from costmodels.price.instruction import Cost
from plans.layout import Layout
from plans.lower import lower
from plans.model.graph import Graph, Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy
from plans.program import GroupProgram, Instruction, Kind, Program
from plans.timeline import Timeline
from simulator import run_program

US = 10**6


def small_graph(batch: int = 32, sizes: tuple[int, ...] = (784, 512, 512, 1)) -> Graph:
    """Digits through three linear layers with relus to a mean absolute error."""
    tensors: dict[str, Tensor] = {}
    operators: list[Operator] = []

    def tensor(name: str, shape: tuple[int, ...], dtype: str = "float32", kind: str = "activation") -> str:
        tensors[name] = Tensor(name=name, shape=shape, dtype=dtype, kind=kind)
        return name

    def operator(name: str, kind: str, inputs: tuple[str, ...], output: str, module: str) -> str:
        operators.append(Operator(name=name, kind=kind, inputs=inputs, outputs=(output,), module=module))
        return output

    tensor("x", (batch, 1, 28, 28), kind="input")
    tensor("y", (batch,), "int64", "input")
    current = operator("flatten.reshape", "reshape", ("x",), tensor("flat", (batch, sizes[0])), "net.flatten")
    for number, (narrow, wide) in enumerate(pairwise(sizes), 1):
        weight = tensor(f"layer{number}.weight", (wide, narrow), kind="parameter")
        bias = tensor(f"layer{number}.bias", (wide,), kind="parameter")
        out = tensor(f"layer{number}.out", (batch, wide))
        current = operator(f"layer{number}.linear", "linear", (current, weight, bias), out, f"net.layer{number}")
        if number < len(sizes) - 1:
            out = tensor(f"relu{number}.out", (batch, wide))
            current = operator(f"relu{number}.relu", "relu", (current,), out, f"net.relu{number}")
    operator("loss.reshape", "reshape", ("y",), tensor("y.column", (batch, 1), "int64"), "loss")
    operator("loss.cast", "cast", ("y.column",), tensor("y.float", (batch, 1)), "loss")
    operator("loss.l1_loss", "l1_loss", (current, "y.float"), tensor("loss", ()), "loss")
    return Graph(name="digits", batch_size=batch, tensors=tensors, operators=tuple(operators), loss="loss")


def small_plan() -> Plan:
    """Two stages of 2 x 2 ranks, four micro-batches, sharded optimizer, relus recomputed."""
    graph = small_graph()
    names = [operator.name for operator in graph.operators]
    cut = names.index("layer2.linear")
    rows = ("dp",)
    dims = {
        "flatten.reshape": {"d0": rows},
        "layer1.linear": {"b0": rows, "n": ("tp",)},
        "relu1.relu": {"d0": rows, "d1": ("tp",)},
        "layer2.linear": {"b0": rows, "k": ("tp",)},
        "relu2.relu": {"d0": rows},
        "layer3.linear": {"b0": rows},
        "loss.reshape": {},
        "loss.cast": {"d0": rows},
        "loss.l1_loss": {"d0": rows},
    }
    return Plan(
        graph=graph,
        stages=(
            Stage(mesh=Layout((2, 2), ("dp", "tp"), [0, 1, 2, 3]), operators=tuple(names[:cut])),
            Stage(mesh=Layout((2, 2), ("dp", "tp"), [4, 5, 6, 7]), operators=tuple(names[cut:])),
        ),
        strategies={name: Strategy(dims=each) for name, each in dims.items()},
        num_micro_batches=4,
        recompute=("relu1.relu", "relu2.relu"),
        optimizer=Optimizer(parallel_level=1),
    )


def cost(instruction: Instruction, group: GroupProgram) -> Cost:
    """A made-up price: 20 us a kernel and 60 us a message, and more for large ones."""
    if instruction.kind is Kind.COMPUTE:
        return Cost(dispatch_ps=3 * US, work_ps=(20 + instruction.flops // 40_000) * US)
    work = 0 if instruction.kind is Kind.WAIT else (60 + instruction.message_bytes // 8000) * US
    return Cost(dispatch_ps=US, work_ps=work)


@cache
def predicted(num_steps: int = 1) -> Timeline:
    """The small program in virtual time, with an interval."""
    timeline = run_program(small_program(), cost, num_steps=num_steps)
    return replace(
        timeline,
        low_s=0.8 * timeline.step_interval_s,
        high_s=1.3 * timeline.step_interval_s,
        meta={"machine": "made up"},
    )


@cache
def measured(num_steps: int = 5, seed: int = 3) -> Timeline:
    """The same with all work up to 40 % off, called measured."""

    def slowdown(rank: int, step: int, size: int) -> np.ndarray:
        return np.random.default_rng((seed, rank, step)).uniform(0.9, 1.4, size)

    timeline = run_program(small_program(), cost, num_steps=num_steps, slowdown=slowdown)
    return replace(timeline, kind="measured", memory_curve={}, meta={"command": "made up"})


def small_program() -> Program:
    """The program of `small_plan`."""
    return lower(small_plan())
