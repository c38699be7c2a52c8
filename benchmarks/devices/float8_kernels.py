"""The cost of a float8 linear on a GPU: its products by torch's two libraries, and the kernels that make operands.

    python -m benchmarks.devices.float8_kernels --out FILE          on one GPU
    python -m benchmarks.devices.float8_kernels --smoke --out FILE  tiny sizes on a CPU: operands only

Products with a scale a row come from cuBLAS since torch 2.9 (CUDA 12.9) and from CUTLASS before
(aten/src/ATen/native/cuda/ScaledBlas.cpp asks `cublasLtGetVersion` at run time). `--cutlass` starts this command again
with a library before all others in which that function says 12.8, and so measures the kernels of older releases.

Operands are made as torchao makes them (torchao/float8/float8_scaling_utils.py, `hp_tensor_to_float8_dynamic`): the
largest value of the tensor or of a row, a division, a cast, and a copy where the product reads along the other dim;
`torch.compile` fuses what it can. "passes" is the time over that of reading the operand once at the bandwidth that
copying one tensor reaches in the same run (two passes).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kept import measured_with, write_results
from executor.calibrate.matrix import matrix_job
from executor.calibrate.operands import OperandPool
from executor.calibrate.timing import Timer
from executor.device import pick_device

__all__ = ["main"]

PRODUCTS = (  # (m, n, k): Llama 3 8B whole, and 70B and 8B over eight tensor-parallel ranks; forward and both gradients
    (16384, 4096, 4096), (16384, 1024, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (4096, 14336, 16384),
    (14336, 4096, 16384), (4096, 4096, 16384), (16384, 3584, 8192), (16384, 8192, 3584), (16384, 1024, 8192),
    (16384, 8192, 1024), (3584, 8192, 16384), (16384, 1792, 4096), (16384, 4096, 1792),
)  # fmt: skip
OPERANDS = (  # activations and weights, the tall ones as tensor parallelism gathers them
    (16384, 4096), (16384, 14336), (14336, 4096), (4096, 14336), (16384, 8192), (8192, 3584),
    (98304, 4096), (98304, 1792), (131072, 8192), (131072, 3584), (131072, 1024),
)  # fmt: skip
TINY = ((64, 128),)
DTYPES = ("bfloat16", "float8", "float8_precise", "float8_rowwise")
EPS = 1e-12


def _scale(largest: Tensor) -> Tensor:
    """As torchao's `amax_to_scale`: the largest number of the format over the largest value."""
    return torch.finfo(torch.float8_e4m3fn).max / largest.to(torch.float64).clamp(min=EPS).to(torch.float32)


def _cast(x: Tensor, scale: Tensor) -> Tensor:
    limit = torch.finfo(torch.float8_e4m3fn).max
    return (x.to(torch.float32) * scale).clamp(-limit, limit).to(torch.float8_e4m3fn)


def _by_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(x.abs().max())
    return _cast(x, scale), scale


def _by_tensor_turned(x: Tensor) -> tuple[Tensor, Tensor]:
    narrow, scale = _by_tensor(x)
    return narrow.t().contiguous(), scale


def _by_row(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _scale(x.abs().amax(dim=1, keepdim=True))
    return _cast(x, scale), scale


def _by_column_turned(x: Tensor) -> tuple[Tensor, Tensor]:
    """A scale a column, written so that a product reads along the columns."""
    scale = _scale(x.abs().amax(dim=0, keepdim=True))
    return _cast(x, scale).t().contiguous(), scale


def _both(x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The gradient of an output, of which both products of the backward want a copy."""
    return _by_row(x), _by_column_turned(x)


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": _by_tensor, "tensor, turned": _by_tensor_turned, "row": _by_row, "column, turned": _by_column_turned,
    "row and column": _both,
}  # fmt: skip


def _operands(timer: Timer, pool: OperandPool, *, smoke: bool) -> list[dict[str, Any]]:
    rows = []
    for shape in TINY if smoke else OPERANDS:
        size = 2 * shape[0] * shape[1]
        torch._dynamo.reset()  # its limit of compiled shapes would leave the last ones uncompiled
        copied = _seconds(timer, pool, torch.clone, shape, 2 * size)
        for name, maker in MAKERS.items():
            taken = _seconds(timer, pool, maker if smoke else torch.compile(maker, dynamic=False), shape, 3 * size)
            rows.append({"operand": name, "shape": shape, "seconds": taken, "passes": 2 * taken / copied})
            print(f"{name:16s} {shape[0]:6d} x {shape[1]:6d}  {taken * 1e6:8.1f} us  {2 * taken / copied:5.2f} passes")
    for name in MAKERS:
        found = [row["passes"] for row in rows if row["operand"] == name]
        print(f"{name:16s} median {statistics.median(found):5.2f} passes, {min(found):.2f} to {max(found):.2f}")
    return rows


def _seconds(
    timer: Timer, pool: OperandPool, call: Callable[[Tensor], Any], shape: tuple[int, int], moved: float
) -> float:
    with torch.no_grad():
        call(pool.tensor(*shape))  # compiled now, not while it is recorded
        calls = [partial(call, pool.tensor(*shape)) for _ in pool.sets(round(moved))]
        return timer.device_time(calls).seconds


def _products(timer: Timer, pool: OperandPool, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for shape in PRODUCTS:
        for dtype in dtypes:
            calls = matrix_job("nt", shape, dtype=dtype).make(pool)
            with torch.no_grad():
                kernel = _kernel(calls[0])
                taken = timer.device_time(calls).seconds
            rate = 2.0 * shape[0] * shape[1] * shape[2] / taken
            rows.append({"product": dtype, "shape": shape, "seconds": taken, "flops_per_s": rate, "kernel": kernel})
            print(f"{dtype:15s} {shape!s:22s} {taken * 1e6:8.1f} us {rate / 1e12:7.1f} TFLOP/s  {kernel[:60]}")
    return rows


def _kernel(call: Callable[[], object]) -> str:
    """Name of the kernel that takes longest of a call's."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    found = sorted(profiler.key_averages(), key=lambda each: each.self_device_time_total)
    return found[-1].key if found else ""


def _older(out: Path) -> int:
    """Starts this command again where cuBLAS says that it is 12.8."""
    with tempfile.TemporaryDirectory(prefix="twofold-") as folder:
        source, library = Path(folder, "older.c"), Path(folder, "older.so")
        source.write_text("unsigned long cublasLtGetVersion(void) { return 120800; }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
        command = [sys.executable, "-m", "benchmarks.devices.float8_kernels", "--rows-only", "--out", str(out)]
        return subprocess.run(command, env=os.environ | {"LD_PRELOAD": str(library)}).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "float8_kernels.json")
    parser.add_argument("--smoke", action="store_true", help="tiny operands on a CPU, no products")
    parser.add_argument("--cutlass", action="store_true", help="measure products by row of older releases")
    parser.add_argument("--rows-only", action="store_true", help="only products with a scale a row")
    options = parser.parse_args(arguments)
    if options.cutlass:
        return _older(options.out)
    device = pick_device("cpu" if options.smoke else "auto")
    device.use()
    device.use_own_stream()
    timer, pool = Timer(device), OperandPool(device=device, block_bytes=2**30 if device.is_async else 2**22)
    told = measured_with(device)
    if not options.smoke:
        told["products"] = _products(timer, pool, DTYPES[-1:] if options.rows_only else DTYPES)
    if not options.rows_only:
        told["operands"] = _operands(timer, pool, smoke=options.smoke)
    write_results(options.out, told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
