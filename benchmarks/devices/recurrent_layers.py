"""Device time of recurrent layers as the executor calls them, forward and all gradients, replayed on one GPU.

python -m benchmarks.devices.recurrent_layers --out FILE                 measure
python -m benchmarks.devices.recurrent_layers --compare FILE             beside the prices of the device of the file
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import measured_with, write_results
from costmodels import Machine
from costmodels.price.instruction import price_compute
from executor.device import Device, pick_device
from executor.kernels import OpContext, StepCounter, rule_of
from plans.layout import Layout

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}
SIZES = {
    "LSTM": ((64, 16, 32), (64, 64, 32), (64, 256, 32), (64, 64, 256), (64, 64, 1024), (512, 64, 512), (16, 64, 512)),
    "GRU": ((64, 16, 32), (64, 64, 256)),
    "RNN_TANH": ((64, 16, 32), (64, 64, 256)),
}
"""Kind of layer -> (batch, length, width)."""

IN_A_ROW, REPEATS = 3, 7


def cases() -> Iterator[tuple[str, tuple[int, int, int], torch.dtype]]:
    """(kind, sizes, dtype) of every layer that is measured."""
    for mode, sizes in SIZES.items():
        for size in sizes:
            for dtype in (torch.float32, torch.bfloat16):
                yield mode, size, dtype


def shapes_of(mode: str, size: tuple[int, int, int]) -> list[tuple[int, ...]]:
    """Of the sequence, the two weights and the two biases."""
    batch, length, width = size
    gates = GATES[mode] * width
    return [(batch, length, width), (gates, width), (gates, width), (gates,), (gates,)]


def replayed_us(device: Device, call: Callable[[], object]) -> float:
    """Microseconds of a call, the median of replays of a few in a row."""
    call()
    call()
    recording = device.capture(lambda: [call() for _ in range(IN_A_ROW)])
    assert recording is not None, f"a device of kind {device.kind} cannot record launches"
    taken = []
    for _ in range(REPEATS + 2):
        first = device.mark()
        recording.replay()
        last = device.mark()
        device.synchronize()
        taken.append(device.between_ns(first, last) / 1e3 / IN_A_ROW)
    recording.release()
    return statistics.median(taken[2:])


@torch.inference_mode()
def measured(device: Device, mode: str, size: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Forward and gradients of one layer."""
    batch, length, width = size
    operands = [0.1 * torch.randn(shape, device=device.torch_device, dtype=dtype) for shape in shapes_of(mode, size)]
    g = torch.randn(size, device=device.torch_device, dtype=dtype)
    context = OpContext(
        rank=0, mesh=Layout((1,), ("dp",)), shape=size, dtype=str(dtype).removeprefix("torch."),
        counter=StepCounter(step=1), device=device.torch_device,
    )  # fmt: skip
    attrs = {"mode": mode, "bias": True}
    forward, gradients = rule_of("recurrent.forward"), rule_of("recurrent.grad01234")
    return {
        "mode": mode, "batch": batch, "length": length, "width": width, "dtype": context.dtype,
        "forward_us": replayed_us(device, lambda: forward(context, attrs, *operands)),
        "grad_us": replayed_us(device, lambda: gradients(context, attrs, g, *operands)),
    }  # fmt: skip


def compared(row: dict[str, Any], machine: Machine) -> str:
    """One line: what was measured, and how far off the price is."""
    size = row["batch"], row["length"], row["width"]
    operands = shapes_of(row["mode"], size)
    said = f"{row['mode']:9s} {size!s:16s} {row['dtype']:9s}"
    for part, shapes in (("forward", (*operands, size)), ("grad01234", (size, *operands, *operands))):
        taken_us = row["forward_us" if part == "forward" else "grad_us"]
        told_us = price_compute(machine, f"recurrent.{part}", tuple(shapes), row["dtype"], 1, own=True).work_ps / 1e6
        said += f"  {part} {taken_us:8.1f} us, priced {told_us:8.1f} ({told_us / taken_us - 1:+.0%})"
    return said


def main() -> int:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to write what is measured to")
    parser.add_argument("--compare", type=Path, help="file of what was measured")
    parser.add_argument("--machine", default="h100-sxm-x1", help="of the prices")
    options = parser.parse_args()
    if options.compare:
        machine = Machine.load(options.machine)
        for row in json.loads(options.compare.read_bytes())["rows"]:
            print(compared(row, machine))
        return 0
    device = pick_device("auto")
    device.use()
    device.use_own_stream()
    rows = [measured(device, *case) for case in cases()]
    print("\n".join(map(json.dumps, rows)))
    if options.out:
        write_results(options.out, measured_with(device) | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
