"""Where the time of a step with float8 linears goes, kernel by kernel, beside its prices.

    python -m benchmarks.devices.float8_steps --out FILE            on one GPU with torchao

Steps of `benchmarks.peers` on one device, compiled, with float8 linears and without. Prints the seconds of products,
attention, the optimizer and everything else in a step, and what the cost model expects of these classes; FILE, which
is written after each of the steps, has every kernel.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.devices.profiled import kernels_of
from benchmarks.kept import measured_with, write_results
from benchmarks.peers.cases import Case
from benchmarks.peers.peer import peer_step
from benchmarks.peers.predictions import PEER_STACKS
from benchmarks.peers.sets import case_named
from benchmarks.peers.weights import tokens_of
from benchmarks.peers.worker import INPUTS
from executor.device import Device, pick_device
from simulator.estimate.classes import device_classes
from simulator.estimate.estimate import chunk_costs, chunks_of, known_layouts

CASES = ("7x3200-b4-mb4-float8-rowwise", "5x5376-b2-mb2-float8")
WARM_STEPS, STEPS = 8, 5
_CLASSES = (("attention", r"flash|fmha|sdpa|attention"), ("update", r"multi_tensor"),
            ("matrix", r"gemm|nvjet|cutlass|scaled_mm|cublas"))  # fmt: skip


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = pick_device("auto")
    device.use()
    found = {}
    for case in map(case_named, CASES):
        for each in (case, replace(case, products="")):
            kernels = _step_kernels(each, device)
            classes = {"measured": _by_class(kernels), "predicted": _predicted(each)}
            found[each.name] = classes | {"kernels": kernels}
            print(each.name)
            for name in ("matrix", "attention", "memory"):
                said, was = classes["predicted"][name], classes["measured"][name]
                print(f"  {name:10s} measured {1e3 * was:8.2f} ms  predicted {1e3 * said:8.2f} ms")
            print(f"  {'update':10s} measured {1e3 * classes['measured']['update']:8.2f} ms")
            for name, figures in list(kernels.items())[:12]:
                print(
                    f"    {1e3 * figures['seconds']:8.3f} ms  {figures['times']:5.1f} times  {name[:100]}", flush=True
                )
            if options.out:
                write_results(options.out, measured_with(device) | {"steps": found})


def _step_kernels(case: Case, device: Device) -> dict[str, dict[str, float]]:
    """Seconds and launches of a step by the name of its kernels, the longest first."""
    plan = case.plan()
    told = tokens_of(plan.graph, case.config.vocab)
    batch = [torch.from_numpy(told[name]) for name in INPUTS]
    step = peer_step(case, plan, device, 0, compiles=True)
    for _ in range(WARM_STEPS):
        step(batch)
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "times": 0.0})
    for kernel in kernels_of(device, lambda: [step(batch) for _ in range(STEPS)]):
        found[kernel.name]["seconds"] += kernel.seconds / STEPS
        found[kernel.name]["times"] += 1 / STEPS
    torch.compiler.reset()
    device.release_memory()
    return dict(sorted(found.items(), key=lambda item: -item[1]["seconds"]))


def _by_class(kernels: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    found = {"matrix": 0.0, "attention": 0.0, "memory": 0.0, "update": 0.0}
    for kernel, figures in kernels.items():
        words_of = () if kernel.startswith("triton") else _CLASSES  # which bear the names of their neighbours
        names = (name for name, words in words_of if re.search(words, kernel, re.I))
        found[next(names, "memory")] += figures["seconds"]
    return found


def _predicted(case: Case) -> dict[str, float]:
    """Seconds by class, without the update, at the clock of the machine's file."""
    degrees, machine = case.degrees_value(), case.machine()
    stack = replace(PEER_STACKS["compiled"], products=case.products)
    costs = chunk_costs(case.config, degrees, machine, stack, False, known_layouts(case.config, machine, stack))
    seconds = device_classes(costs, chunks_of(case.config, degrees))
    return {name: degrees.num_micro_batches * each for name, each in seconds.items()}


if __name__ == "__main__":
    main()
