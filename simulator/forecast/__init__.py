"""Forecasts of transformers for given degrees, on any number of devices (part of floor 3).

* `predict`: the forecast, of one configuration at a time (`step`). `symbolic` and `program` make the same priced
  bodies, from templates or from a lowered program. `body`: what a body does to the clocks of a rank. `channels`:
  collectives and compute that slow each other. `overlap`: the longer times of a body's operations. `rank`: the costs of
  a pipeline. `columns`: evaluates pipelines. `held`: memory. `contention`, `walk`: steps in which communication
  contends. `turns`: slices and pairs, in the event engine.
* `estimate`, `estimate_grid`: a quick estimate for the search and for other software (`chunks`, `action`, `pricing`,
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
