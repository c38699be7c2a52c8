"""Measuring devices for their cost models: `python -m executor.calibrate.main POINTS.jsonl`, one process per device.

* `session`: one calibration on one rank; it runs a table of `sections` inside a budget of time.
* `device_sections`: the table of accelerators; `cpu`: that of ranks that share the cores of a CPU.
* `timing`: device time of calls and host time of issuing them; `shared_cores`: times on shared cores.
* `operands`: jobs, and the random operands they work on.
* `matrix`, `kernels`, `attention`, `rules`: grids of what one device does; `requested_points`: others.
* `load`: how a device slows, and full blocks; `allocation`: memory inside and outside the allocator.
* `dispatch`, `instructions`, `stacks`: host time of eager torch, of the executor, of torch's parallel parts.
* `communication`, `overlap`: what several devices do.
* `rank_sync`: how ranks keep in step, and who is named when one hangs; `resume`: files of earlier runs.
* `main`: the main module of every rank; `steps`: complete steps of plans.

The same code runs on CPU (gloo), CUDA (NCCL) and Ascend NPU (HCCL); it was not run on Ascend.
"""

from executor.calibrate.device_sections import DEVICE_SECTIONS
from executor.calibrate.session import Session, SessionOptions

__all__ = ["DEVICE_SECTIONS", "Session", "SessionOptions"]
