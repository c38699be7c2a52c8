"""Measuring devices for their cost models: `python -m executor.calibrate.main POINTS.jsonl`, one process per device.

* `timing`: device time of calls and host time of issuing them; `bench`: random operands, and points to be measured.
* `matrix`, `kernels`, `attention`: grids of what one device does; `load`: how it slows, and whole blocks.
* `dispatch`, `instructions`, `stacks`: host time of eager torch, of the executor, of torch's parallel parts.
* `communication`, `overlap`: what several devices do; `allocation`: memory inside and outside the allocator.
* `meeting`: how ranks keep in step, and who is named when one hangs; `resume`: files of earlier runs.
* `session`: all of it within a budget of time; `main`: what every rank runs; `steps`: whole steps of plans.

The same code runs on CPU (gloo), CUDA (NCCL) and Ascend NPU (HCCL); it was not run on Ascend.
"""

from executor.calibrate.session import SECTIONS, Session

__all__ = ["SECTIONS", "Session"]
