"""A stack of equal layers for tests of the optimizer: its graph, plans, and training in plain torch as the oracle.

A layer is a linear map with gelu, in a module "layers.<n>"; weights may be bfloat16, in which case activations are too,
between casts at both ends.
"""

import numpy as np
import torch
import torch.nn.functional as F

from plans.layout import Layout
from plans.model.graph import Graph, Operator, Tensor
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage, Strategy

WIDTH, BATCH = 6, 24
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
MOMENTUM = {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1}


def graph(num_layers: int = 3, dtype: str = "float32", width: int = WIDTH, batch: int = BATCH) -> Graph:
    tensors, operators = {}, []

    def tensor(name: str, shape: tuple[int, ...], kind: str = "activation", of: str = dtype) -> str:
        tensors[name] = Tensor(name=name, shape=shape, kind=kind, dtype=of)
        return name

    def apply(name: str, kind: str, inputs: tuple[str, ...], module: str, of: str = dtype) -> str:
        made = tensor(f"{name}.out", () if kind == "mse_loss" else (batch, width), of=of)
        operators.append(Operator(name=name, kind=kind, inputs=inputs, outputs=(made,), module=module))
        return made

    value = apply("enter", "cast", (tensor("x", (batch, width), "input", "float32"),), "")
    for number in range(num_layers):
        module = f"layers.{number}"
        weight = tensor(f"{module}.weight", (width, width), "parameter")
        bias = tensor(f"{module}.bias", (width,), "parameter")
        value = apply(f"{module}.linear", "linear", (value, weight, bias), f"{module}.linear")
        value = apply(f"{module}.gelu", "gelu", (value,), f"{module}.activation")
    value = apply("leave", "cast", (value,), "", "float32")
    loss = apply("loss", "mse_loss", (value, tensor("y", (batch, width), "input", "float32")), "", "float32")
    return Graph(name="layers", batch_size=batch, tensors=tensors, operators=tuple(operators), loss=loss)


def plan(mesh: Layout, optimizer: Optimizer, *, of: Graph | None = None, tp: str = "", **rest) -> Plan:
    """One stage; the batch is split over axis "dp", columns of every layer over axis `tp`."""
    of = of or graph()
    strategies = {}
    for operator in of.operators:
        rows = "b0" if operator.kind == "linear" else "d0"
        split = {rows: ("dp",)} if "dp" in mesh.alias_name else {}
        if tp and operator.kind == "linear":
            split["n"] = (tp,)
        strategies[operator.name] = Strategy(dims=split)
    names = tuple(operator.name for operator in of.operators)
    return Plan(
        graph=of, stages=(Stage(mesh=mesh, operators=names),), strategies=strategies, optimizer=optimizer, **rest
    )


def parameters(of: Graph) -> dict[str, np.ndarray]:
    """Float32 arrays whose values bfloat16 can hold, so that every dtype begins with the same."""
    random = np.random.default_rng(0)
    found = {}
    for tensor in of.parameters:
        values = torch.from_numpy(random.normal(size=tensor.shape).astype(np.float32) * 0.5)
        found[tensor.name] = values.bfloat16().float().numpy()
    return found


def batches(of: Graph, count: int) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    return [
        {tensor.name: random.normal(size=tensor.shape).astype(np.float32) for tensor in of.inputs} for _ in range(count)
    ]


def trained(
    of: Graph, optimizer: Optimizer, num_steps: int, num_micro_batches: int = 1
) -> tuple[list[float], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A plain loop: losses, the updated (master) weights and the weights of the graph.

    Gradients of each micro-batch are accumulated in `gradient_dtype`, clipped, given to torch.optim (AdamW, or SGD with
    momentum: AdamW hardly sees the scale of gradients) on weights of `master_dtype`, which are rounded into those that
    the network reads.
    """
    dtypes = {tensor.name: getattr(torch, tensor.dtype) for tensor in of.parameters}
    weights = {name: torch.tensor(value).to(dtypes[name]).requires_grad_() for name, value in parameters(of).items()}
    kinds = {name: getattr(torch, optimizer.updates_in(str(dtype)[6:])) for name, dtype in dtypes.items()}
    masters = {name: weight.detach().to(kinds[name], copy=True).requires_grad_() for name, weight in weights.items()}
    make = torch.optim.AdamW if optimizer.kind == "adamw" else torch.optim.SGD
    update = make(list(masters.values()), **optimizer.settings, foreach=False)
    losses = []
    for batch in batches(of, num_steps):
        total, sums = accumulated(of, optimizer, weights, batch, num_micro_batches)
        for name, master in masters.items():
            master.grad = sums[name].to(master.dtype)
        if optimizer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters.values(), optimizer.clip_norm)
        update.step()
        with torch.no_grad():
            for name, master in masters.items():
                weights[name].copy_(master)
        losses.append(total)
    return losses, *({name: each.detach().float().numpy() for name, each in of.items()} for of in (masters, weights))


def accumulated(
    of, optimizer, weights, batch, num_micro_batches, *, scaled=lambda loss: loss, between=lambda value: value
):
    """The loss of a batch, and its gradients, summed over micro-batches as the optimizer accumulates them.

    `scaled` gives what is differentiated in place of the loss, `between` what the second layer reads of the first.
    """
    sums = {
        name: torch.zeros_like(weight, dtype=getattr(torch, optimizer.accumulates_in(str(weight.dtype)[6:])))
        for name, weight in weights.items()
    }
    total, dtype = 0.0, getattr(torch, of.parameters[0].dtype)
    for x, y in zip(*(torch.tensor(batch[name]).chunk(num_micro_batches) for name in "xy"), strict=True):
        value = x.to(dtype)
        for number in range(len(weights) // 2):
            value = F.gelu(F.linear(value, weights[f"layers.{number}.weight"], weights[f"layers.{number}.bias"]))
            value = between(value) if number == 0 else value
        loss = F.mse_loss(value.float(), y) / num_micro_batches
        scaled(loss).backward()
        total += loss.item()
        for name, weight in weights.items():
            sums[name] += weight.grad
            weight.grad = None
    return total, sums
