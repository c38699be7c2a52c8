"""Predictions at scale (part of floor 3): a transformer in stated degrees on any number of devices.

`forecast` is the whole prediction: templates of `plans.scale` priced (`pricing`) as a software `Stack` runs them,
joined to actions (`action`, `chunks`), put through the pipeline's schedule (`pipeline`), with memory (`memory`).
"""

from simulator.scale.predict import Forecast, forecast
from simulator.scale.stacks import Kernel, Stack, stack_named, stack_names

__all__ = ["Forecast", "Kernel", "Stack", "forecast", "stack_named", "stack_names"]
