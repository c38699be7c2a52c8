"""The gain of a kernel if the previous kernel left an operand in the cache: each alone, with cold and warm operands.

    python -m benchmarks.warm_operands --out FILE          on one GPU
    python -m benchmarks.warm_operands --smoke --out FILE  tiny sizes on a CPU

"cold": all operands come from memory, as `twofold calibrate` measures. "warm": the first operand, an activation or its
gradient, is the same in every call, the others come from memory, as in a training step. "hot": all are the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kept import measured_with, write_results
from executor.calibrate.operands import OperandPool
from executor.calibrate.timing import Call, Timer
from executor.device import pick_device

__all__ = ["main"]

MODES = ("cold", "warm", "hot")
MIB = 2**20
BLOCK_BYTES = 2**30
_TINY_PRODUCTS = ((64, 64, 64),)
_PRODUCTS = (  # (m, n, k), of layers of width 768 to 4096
    (1536, 1024, 1024), (1536, 2816, 1024), (1536, 1024, 2816), (3072, 3072, 768), (1024, 1536, 1536),
    (2048, 2048, 2048), (4096, 1024, 4096), (8192, 2048, 1024), (2048, 4096, 4096), (4096, 4096, 11008),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A call on operands of these shapes; the first is the one that may be warm."""

    call: str
    shapes: tuple[tuple[int, ...], ...]
    run: Callable[..., object]

    @property
    def first_bytes(self) -> int:
        """Of the operand that may be warm, in 16-bit numbers."""
        return 2 * torch.Size(self.shapes[0]).numel()


def _cases(*, smoke: bool) -> list[Case]:
    cases = []
    for rows in (64,) if smoke else (512, 1536, 3072, 6144, 12288, 24576):
        x = (rows, 1024)
        cases += [
            Case("silu", (x,), F.silu), Case("add", (x, x), torch.add), Case("mul", (x, x), torch.mul),
            Case("accumulate", (x, x), _accumulate), Case("rms_norm", (x, (1024,)), _norm),
        ]  # fmt: skip
    for m, n, k in _TINY_PRODUCTS if smoke else _PRODUCTS:
        cases += [
            Case("mm nt", ((m, k), (n, k)), lambda a, b: torch.mm(a, b.mT)),
            Case("mm nn", ((m, k), (k, n)), torch.mm),
            Case("mm tn", ((m, n), (m, k)), lambda a, b: torch.mm(a.mT, b)),
        ]  # fmt: skip
    return cases


def _accumulate(gradient: Tensor, total: Tensor) -> Tensor:
    return total.add_(gradient, alpha=1e-6)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def calls_of(case: Case, mode: str, pool: OperandPool) -> list[Call]:
    """As many calls as sets of operands leave nothing in the cache that is not meant to be there."""
    moved = sum(2 * torch.Size(shape).numel() for shape in case.shapes) + case.first_bytes
    first = pool.tensor(*case.shapes[0]).clone()  # what is written in place must not be another's operand
    kept = [pool.tensor(*shape).clone() for shape in case.shapes[1:]]

    def one() -> Call:
        operands = [
            first if mode != "cold" else pool.tensor(*case.shapes[0]),
            *(kept if mode == "hot" else [pool.tensor(*shape) for shape in case.shapes[1:]]),
        ]
        return lambda: case.run(*operands)

    return [one() for _ in pool.sets(moved)]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds saved for each byte of the warm operand, and of all operands, by kind of call."""
    found: dict[str, float] = {}
    for kind in ("mm", ""):
        own = [row for row in rows if row["call"].startswith("mm") == bool(kind) and row["first_bytes"] <= 12 * MIB]
        for mode in MODES[1:]:
            saved = [1 - row[mode]["seconds"] / row["cold"]["seconds"] for row in own]
            found[f"{kind or 'memory-bound'}, {mode}, share of the time saved"] = statistics.median(saved)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "warm_operands.json")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on a CPU too")
    options = parser.parse_args(arguments)
    device = pick_device("cpu" if options.smoke else "auto")
    device.use()
    device.use_own_stream()
    timer, rows = Timer(device), list[dict[str, Any]]()
    pool = OperandPool(device=device, block_bytes=BLOCK_BYTES if device.is_async else 2**22)
    for case in _cases(smoke=options.smoke):
        row: dict[str, Any] = {"call": case.call, "shapes": case.shapes, "first_bytes": case.first_bytes}
        for mode in MODES:
            with torch.inference_mode():
                sample = timer.device_time(calls_of(case, mode, pool))
            row[mode] = {"seconds": sample.seconds, "clock_MHz": sample.clock_MHz, "flag": sample.flag}
        rows.append(row)
        times = "  ".join(f"{mode} {row[mode]['seconds'] * 1e6:8.2f}" for mode in MODES)
        print(f"{case.call:12s} {'x'.join(map(str, case.shapes[0])):12s} {case.first_bytes / MIB:6.1f} MiB  {times} us")
    found = summary(rows)
    for name, figure in found.items():
        print(f"{name}: {figure:.3f}")
    write_results(options.out, measured_with(device) | {"summary": found, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
