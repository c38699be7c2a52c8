"""Forecasts of transformers for given degrees, on any number of devices: what the simulator does (part of floor 3).

* `predict`: the forecast, of one configuration at a time (`step`). `symbolic` and `program` make the same priced
  bodies, from templates or from a lowered program. `body`: what a body does to the clocks of a rank. `overlap`: the
  longer times of a body's operations. `rank`: the costs of a pipeline. `columns`: evaluates pipelines. `held`: memory.
  `contention`, `walk`: steps in which communication contends.
* `turns`: slices and pairs, in the event engine. `composed`: layouts of other software that plans do not support.
"""

from simulator.forecast.predict import forecast, forecast_grid
from simulator.result import Forecast

__all__ = ["Forecast", "forecast", "forecast_grid"]
