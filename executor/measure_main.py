"""The worker of a calibration: `executor.measure_main POINTS.json [SECONDS]`, started once per rank by a launcher.

Rank 0 writes the points; progress goes to its standard output.
"""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

from costmodels.points import save_points
from executor.measure import measure_rank

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write the points to the path given; the environment of torchrun must be set."""
    arguments = sys.argv[1:] if arguments is None else arguments
    start = time.perf_counter()
    dist.init_process_group("gloo")
    try:
        budget = {"budget_s": float(arguments[1])} if len(arguments) > 1 else {}
        points, environment = measure_rank(report=lambda line: print(line, flush=True), **budget)
        if dist.get_rank() == 0:
            save_points(arguments[0], points, environment)
            others = f"other processes used {environment['outside_cores']} of {environment['cores']} cores meanwhile"
            print(f"{len(points)} points in {time.perf_counter() - start:.1f} s; {others}", flush=True)
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
