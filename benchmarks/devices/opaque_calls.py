"""Host and device time of calls that are computed by torch's operators and by autograd, over those of plain ones.

    python -m benchmarks.devices.opaque_calls --out FILE

An operator without a rule of its own ("opaque") runs as it is, and its result is copied. Its gradient runs the forward
again under autograd. Prices count both in plain calls (`costmodels.price.composite`), by the numbers printed here.
Tensors are tiny, so that only launches count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kept import measured_with, write_results
from executor.device import Device, now_ns, pick_device
from executor.kernels.operators import OPERATOR_RULES

BURST, REPEATS = 50, 9

PLAIN = ("mul.forward", "add.forward", "silu.forward", "silu.grad0")
"""Calls of one kernel each, with which the others are compared."""

X, PAIR, IMAGE, ONE = (2, 8, 8), ((2, 8, 8), (2, 8, 8)), (1, 2, 4, 4), (1,)
OPAQUE: dict[str, tuple[list[Any], Sequence[tuple[int, ...]]]] = {
    "cumsum.default": ([{"tensor": 0}, 1], (X,)),
    "roll.default": ([{"tensor": 0}, [1], [1]], (X,)),
    "constant_pad_nd.default": ([{"tensor": 0}, [1, 1], 0.0], (X,)),
    "logsumexp.default": ([{"tensor": 0}, [-1], True], (X,)),
    "sort.default": ([{"tensor": 0}, -1], (X,)),
    "atan2.default": ([{"tensor": 0}, {"tensor": 1}], PAIR),
    "amax.default": ([{"tensor": 0}, [-1], True], (X,)),
    "upsample_nearest2d.vec": ([{"tensor": 0}, None, [2.0, 2.0]], (IMAGE,)),
    "avg_pool2d.default": ([{"tensor": 0}, [2, 2]], (IMAGE,)),
    "_prelu_kernel.default": ([{"tensor": 0}, {"tensor": 1}], (X, ONE)),
    "glu.default": ([{"tensor": 0}, -1], (X,)),
    "native_group_norm.default": ([{"tensor": 0}, None, None, 2, 8, 8, 2, 1e-5], (X,)),
    "linalg_vector_norm.default": ([{"tensor": 0}, 2, [-1]], (X,)),
    "hardtanh.default": ([{"tensor": 0}, -1.0, 1.0], (X,)),
}
"""aten operators that have no rule: their arguments, and the shapes of their tensors."""

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}


def calls(device: Device) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """Kind of call, its name, and what runs it."""
    context: Any = SimpleNamespace(
        device=device.torch_device, torch_dtype=torch.float32, dtype="float32", shape=X, shares=False, can_assert=True
    )

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device.torch_device)

    def run(call: str, attrs: dict[str, Any], *inputs: Tensor) -> Callable[[], Any]:
        return lambda: OPERATOR_RULES[call](context, attrs, *inputs)

    for call in PLAIN:
        yield "plain", call, run(call, {}, *(tensor(*X) for _ in range(1 if call == "silu.forward" else 2)))
    for name, (arguments, shapes) in OPAQUE.items():
        result = 0 if name.startswith(("sort", "native")) else -1
        attrs = {"target": f"aten.{name}", "arguments": json.dumps([arguments, {}]), "result": result}
        inputs = [tensor(*shape) for shape in shapes]
        forward = run("opaque.forward", attrs, *inputs)
        yield "opaque.forward", name, forward
        yield "opaque.grad", name, run("opaque.grad0", attrs, torch.ones_like(forward()), *inputs)
    for mode, gates in GATES.items():
        attrs, inputs = {"mode": mode, "bias": True}, [tensor(2, 4, 8), tensor(8 * gates, 8), tensor(8 * gates, 8)]
        inputs += [tensor(8 * gates), tensor(8 * gates)]
        forward = run("recurrent.forward", attrs, *inputs)
        yield "recurrent.forward", mode, forward
        yield "recurrent.grad", mode, run("recurrent.grad01234", attrs, torch.ones_like(forward()), *inputs)


def host_us(device: Device, call: Callable[[], Any]) -> float:
    """Median microseconds of the host to issue a call; the device is idle when a burst begins."""
    times = []
    for _ in range(REPEATS):
        device.synchronize()
        start = now_ns()
        for _ in range(BURST):
            call()
        times.append((now_ns() - start) / BURST / 1e3)
    return statistics.median(times)


def kernels_of(call: Callable[[], Any]) -> int:
    """Kernels and copies on a GPU that a call runs, by torch's profiler."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def main() -> int:
    """Measure all calls, and print medians by kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = pick_device("auto")
    device.use()
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for kind, name, call in calls(device):
            for _ in range(5):
                call()
            row = {"kind": kind, "name": name, "host_us": host_us(device, call)}
            if device.is_async:
                row["kernels"] = kernels_of(call)
            rows.append(row)
    plain = statistics.fmean(row["host_us"] for row in rows if row["kind"] == "plain")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own = [row for row in rows if row["kind"] == kind]
        kernels = statistics.fmean(row.get("kernels", 0) for row in own)
        times = statistics.fmean(row["host_us"] for row in own) / plain
        print(
            f"{kind:18s} {len(own):3d} calls  {times:6.1f} times a plain call of {plain:.1f} us, {kernels:.1f} kernels"
        )
    if options.out:
        write_results(options.out, measured_with(device) | {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
