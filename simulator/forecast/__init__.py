"""Predictions at scale (part of floor 3): a transformer for given degrees on any number of devices.

* `predict`: the forecast. `step`: one configuration. `symbolic`, `program`: its bodies, from templates or from a
  lowered program, the same either way. `body`: the effect of a body on a rank's clocks. `overlap`: how long its
  operations take next to each other. `rank`: the costs of a pipeline. `columns`: the pipeline evaluated. `held`:
  memory. `turns`: slices and pairs, in the event engine.
* `estimate`, `estimate_grid`: a quick estimate for searches and for other software (`chunks`, `action`, `pricing`,
  `case`, `pipeline`, `batch`, `memory`).
"""

from simulator.forecast.case import Forecast
from simulator.forecast.estimate import estimate
from simulator.forecast.estimate_grid import estimate_grid
from simulator.forecast.predict import forecast, forecast_grid
from simulator.stacks import Kernel, Stack, stack_named, stack_names

__all__ = [
    "Forecast", "Kernel", "Stack", "estimate", "estimate_grid", "forecast", "forecast_grid", "stack_named",
    "stack_names",
]  # fmt: skip
