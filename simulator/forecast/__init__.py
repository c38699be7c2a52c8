"""Predictions at scale (part of floor 3): a transformer in stated degrees on any number of devices.

`forecast` is the whole prediction: templates of `plans.lower.symbolic` priced (`pricing`) as a software `Stack` runs
them,
joined to actions (`action`, `chunks`), put through the pipeline's schedule (`pipeline`), with memory (`memory`).
`forecast_grid` predicts thousands of configurations in batches (`batch`).
"""

from simulator.forecast.grid import forecast_grid
from simulator.forecast.predict import Forecast, forecast
from simulator.stacks import Kernel, Stack, stack_named, stack_names

__all__ = ["Forecast", "Kernel", "Stack", "forecast", "forecast_grid", "stack_named", "stack_names"]
