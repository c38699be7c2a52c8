"""Host time of an eager step: the executor's interpreter beside torch's autograd, on the same small decoder.

On a CPU with tensors this small a step is almost all host time: Python, dispatch, bookkeeping. Both sides take turns in
one process of one thread, and what counts is processor time, so that other processes take none of it; the ratio of the
medians is what counts, of all steps and of every fifth of them.

    python -m benchmarks.devices.host_time --layers 12 --steps 60

prints one JSON object: `own_s` and `torch_s` (medians of a step), `ratio`, `ratios` of the parts, and how many
instructions a step has.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from executor.capture.capture import capture
from executor.device import Device
from executor.step.interpreter import Interpreter
from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage

WORDS, WIDTH, HEADS, LENGTH, BATCH = 64, 16, 2, 8, 2
LR = 1e-3
PARTS = 5
"""Of the steps, each every fifth of them, whose medians tell how far the ratio is to be trusted."""


class Block(nn.Module):
    """A decoder block as Llama's: normalisation, attention, a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, width] to the same."""
        batch, length, _ = x.shape
        y = self.first(x)
        q, k, v = (
            each(y).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, WIDTH), nn.RMSNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy of [batch, length] tokens."""
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def own_step(module: nn.Module, inputs: tuple[Tensor, ...], kind: str) -> tuple[Callable[[], float], int]:
    """A step of the executor, and its number of instructions."""
    graph = capture(module, inputs)
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    optimizer = Optimizer(kind=kind, settings={"lr": LR})
    plan = Plan(graph=graph, stages=(stage,), optimizer=optimizer, fused=False)  # as searches plan for a CPU
    rank = Interpreter(lower(plan), 0, Device(kind="cpu"))
    held = dict([*module.named_parameters(), *module.named_buffers()])
    rank.set_parameters({each.name: held[each.name].detach().numpy() for each in (*graph.parameters, *graph.constants)})
    names = [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"]
    batch = dict(zip(names, (each.numpy() for each in inputs), strict=True))

    def step() -> float:
        loss = rank.step(batch)
        assert loss is not None
        return float(loss)

    return step, len(rank.codes)


def torch_step(module: nn.Module, inputs: tuple[Tensor, ...], kind: str) -> Callable[[], float]:
    """The same step by autograd and torch.optim, one kernel after the other."""
    optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind](module.parameters(), lr=LR, foreach=False)

    def step() -> float:
        optimizer.zero_grad()
        loss = module(*inputs)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def compare(layers: int, steps: int, kind: str) -> dict[str, object]:
    """Medians of both, measured in turns.

    Raises:
        AssertionError: the two do not compute the same.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = Decoder(layers)
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator) for _ in range(2))
    own, num_instructions = own_step(module, (ids, labels), kind)
    plain = torch_step(module, (ids, labels), kind)
    took: tuple[list[float], list[float]] = ([], [])
    for number in range(steps + 3):
        losses = []
        for side, step in enumerate((own, plain)):
            begun = time.process_time()
            losses.append(step())
            if number >= 3:
                took[side].append(time.process_time() - begun)
        assert np.isclose(*losses, rtol=2e-5), (number, losses)
    own_s, torch_s = map(statistics.median, took)
    parts = [[statistics.median(times[part::PARTS]) for times in took] for part in range(PARTS)]
    return {
        "layers": layers, "steps": steps, "optimizer": kind, "instructions": num_instructions,
        "own_s": own_s, "torch_s": torch_s,
        "ratio": own_s / torch_s, "ratios": [round(own / plain, 3) for own, plain in parts],
        "torch": str(torch.__version__), "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.layers, arguments.steps, arguments.optimizer), indent=1))


if __name__ == "__main__":
    main()
