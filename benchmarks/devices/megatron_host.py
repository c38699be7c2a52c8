"""Host time of a Megatron-Core layer, beside a block of plain torch modules on the same host.

    python -m benchmarks.devices.megatron_host --out FILE                                     one rank
    torchrun --nproc-per-node 2 -m benchmarks.devices.megatron_host --out FILE                split over two ranks

Tensors are so small that the device has nearly nothing to do. Models of 2 and 12 layers are timed in turns, forward and
backward apart, and the time of a layer is the difference over ten. "layers" are Megatron's layers alone; "gradients"
adds its data parallelism, where a hook of every parameter accumulates gradients in single precision. Hosts differ by a
factor of two, so what counts is the ratio to plain torch.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers.cases import Case
from benchmarks.peers.megatron import chunks_of, over_data
from executor.calibrate.dispatch import block_points
from executor.calibrate.timing import Timer
from executor.device import Device, environment, pick_device
from executor.step.groups import connect
from plans.model.transformer import TransformerConfig

LAYERS = (2, 12)
LENGTH = 16
WARM, REPEATS = 3, 20

Times = tuple[float, float]
"""Microseconds of a layer's forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Small(Case):
    """A model of tiny tensors like the block of `executor.calibrate.block`."""

    layers: int

    @property
    def config(self) -> TransformerConfig:
        """Its sizes."""
        return TransformerConfig(
            name="small", num_layers=self.layers, hidden=128, num_heads=8, ffn=256, vocab=128, seq=LENGTH
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures here")
    parser.add_argument("--rounds", type=int, default=4, help="in which everything is measured once")
    options = parser.parse_args()
    device, ranks = pick_device("auto"), int(os.environ.get("WORLD_SIZE", "1"))
    device.use()
    if ranks > 1:
        connect(device, 120.0)
    measured: dict[str, Callable[[], Times]] = {"plain torch": functools.partial(_plain_us, device)}
    for sequence_parallel in (False, True)[: 1 + (ranks > 1)]:
        for gradients in (False, True):
            name = ("gradients" if gradients else "layers") + (" by sequence" if sequence_parallel else "")
            steps = [_passes(device, ranks, count, sequence_parallel, gradients) for count in LAYERS]
            measured[name] = functools.partial(_layer_us, steps)
    rounds = [{name: measure() for name, measure in measured.items()} for _ in range(options.rounds)]
    if int(os.environ.get("RANK", "0")) == 0:
        print("host us of a layer, in the median of rounds")
        for name in measured:
            forward, backward = (statistics.median(each[name][way] for each in rounds) for way in (0, 1))
            print(f"{name:24s} forward {forward:7.0f}   backward {backward:7.0f}")
        if options.out:
            found = {"environment": environment(device), "ranks": ranks, "layer_us": rounds}
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


def _plain_us(device: Device) -> Times:
    """Microseconds of the forward and backward of a block of plain torch modules."""
    forward, backward = [each.seconds * 1e6 for each in block_points(Timer(device, repeats=10, busy_s=0.0))][:2]
    return round(forward, 1), round(backward, 1)


def _layer_us(steps: Sequence[Callable[[], tuple[float, float]]]) -> Times:
    """The same of a Megatron layer, from models of `LAYERS` layers in turns."""
    times: list[list[tuple[float, float]]] = [[], []]
    for _ in range(WARM + REPEATS):
        for place, step in enumerate(steps):
            times[place].append(step())
    few, many = LAYERS
    medians = [[statistics.median(each[way] for each in of[WARM:]) for way in (0, 1)] for of in times]
    forward, backward = ((medians[1][way] - medians[0][way]) / (many - few) * 1e6 for way in (0, 1))
    return round(forward, 1), round(backward, 1)


def _passes(
    device: Device, ranks: int, count: int, sequence_parallel: bool, gradients: bool
) -> Callable[[], tuple[float, float]]:
    """A function that runs one forward and backward and returns the host's seconds of both."""
    degrees = {"tp": ranks, "sequence_parallel": sequence_parallel, "micro_batch": 1}
    chunks, config = chunks_of(_Small(model="small", batch=1, degrees=degrees, layers=count), device)
    for parameter in chunks[0].parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = over_data(chunks, config, sharded=False)[0] if gradients else chunks[0]
    tokens = torch.randint(0, 128, (1, LENGTH), device=device.torch_device)
    positions = torch.arange(LENGTH, device=device.torch_device).unsqueeze(0)

    def step() -> tuple[float, float]:
        device.synchronize()
        start = time.perf_counter()
        losses: Tensor = model(tokens, positions, None, labels=tokens)
        forward_s = time.perf_counter() - start
        mean = losses.float().mean()
        device.synchronize()
        start = time.perf_counter()
        mean.backward()
        return forward_s, time.perf_counter() - start

    return step


if __name__ == "__main__":
    main()
