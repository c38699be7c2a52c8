"""Steps of small captured modules, most of whose operators have no kernel of their own: predicted, then measured.

    python -m benchmarks.devices.small_modules --device h100-sxm --predict --out FILE
    python -m benchmarks.devices.small_modules --device h100-sxm --predicted FILE --out FILE       on one GPU

Every module trains in float32 on one device, eagerly and replayed. FILE has the predictions, and the measurements next
to them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.kept import measured_with, write_results
from benchmarks.peers.own import measured_plan, with_execution
from costmodels import Machine
from executor.calibrate.rank_sync import RankSync
from executor.capture.capture import capture
from executor.data.batches import random_batches
from executor.device import pick_device
from plans.optimizer import Optimizer
from plans.plan import Plan
from search import uniform_plan
from simulator import simulate

BATCH, LENGTH, WIDTH = 32, 64, 128
EXECUTIONS = ("graph", "eager")


class Stack(nn.Module):
    """Layers of `mix` between linear ones; x [batch, length, width] in, a mean squared error out."""

    def __init__(self, mix: Callable[[Tensor], Tensor], layers: int) -> None:
        super().__init__()
        self.mix = mix
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """`y` [batch, length, width]."""
        h = x
        for layer in self.layers:
            h = self.mix(layer(h))
        return F.mse_loss(h, y)


class Tagger(nn.Module):
    """A recurrent layer between two linear ones."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cells = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """`x`, `y` [batch, length, width]."""
        h, _ = self.cells(self.inside(x))
        return F.mse_loss(self.out(h), y)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "running mean, 4 layers": lambda: Stack(lambda h: torch.cumsum(h, 1) / LENGTH, 4),
    "shifted windows, 6 layers": lambda: Stack(lambda h: torch.roll(h, 3, 1), 6),
    "log-sum-exp gate, 3 layers": lambda: Stack(lambda h: h - torch.logsumexp(h, -1, keepdim=True), 3),
    "largest feature, 5 layers": lambda: Stack(lambda h: h - h.amax(-1, keepdim=True), 5),
    "length of rows, 8 layers": lambda: Stack(lambda h: h / (1 + torch.linalg.vector_norm(h, dim=-1, keepdim=True)), 8),
    "sorted features, 2 layers": lambda: Stack(lambda h: torch.sort(h, -1).values, 2),
    "angles, 4 layers": lambda: Stack(lambda h: torch.atan2(h, 1 + h * h), 4),
    "LSTM tagger": lambda: Tagger(nn.LSTM),
    "GRU tagger": lambda: Tagger(nn.GRU),
}


def plan_of(name: str) -> Plan:
    """Of one device."""
    shape = (BATCH, LENGTH, WIDTH)
    graph = capture(MODULES[name](), (shape, shape), name=name)
    optimizer = Optimizer(kind="adamw", settings={"lr": 1e-3})
    return uniform_plan(graph, Machine.load("h100-sxm-x1"), optimizer=optimizer, micro_batch=BATCH)


def predicted(name: str, device: str) -> dict[str, Any]:
    """Step time and interval of each execution."""
    plan, machine, found = plan_of(name), Machine.load(f"{device}-x1"), {}
    for execution in EXECUTIONS:
        chosen = with_execution(plan, execution)
        timeline = simulate(chosen, machine)
        found[execution] = {"step_s": timeline.step_interval_s, "low_s": timeline.low_s, "high_s": timeline.high_s}
    return found


def main() -> int:
    """Predict, or measure beside predictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="h100-sxm", help="of the catalogue")
    parser.add_argument("--predict", action="store_true", help="do not measure")
    parser.add_argument("--predicted", type=Path, help="predictions made before")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    known = json.loads(options.predicted.read_bytes()) if options.predicted else {}
    told = known.get("predicted") or {name: predicted(name, options.device) for name in MODULES}
    if options.predict:
        write_results(options.out, measured_with() | {"predicted": told})
        return 0
    device = pick_device("auto")
    device.use()
    torch.set_num_threads(1)  # as torchrun does; copies of a batch by several threads waited for each other
    sync, rows, errors = RankSync(device, 60.0), {}, {execution: list[float]() for execution in EXECUTIONS}
    for name in told:
        plan = plan_of(name)
        batch = next(iter(random_batches(plan.graph, 0, 1)))
        rows[name] = {}
        for execution, step in told[name].items():
            rows[name][execution] = measured = measured_plan(plan, execution, device, sync, batch).json
            errors[execution].append(step["step_s"] / measured["step_s"] - 1)
            print(
                f"{name:28s} {execution:6s} {measured['step_s'] * 1e3:8.3f} ms, {errors[execution][-1]:+.1%}",
                flush=True,
            )
    for execution, own in errors.items():
        print(f"{execution}: mean error {statistics.fmean(map(abs, own)):.1%}, bias {statistics.fmean(own):+.1%}")
    sync.close()
    write_results(options.out, measured_with(device) | {"predicted": told, "measured": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
