"""Quick estimates of transformers for given degrees, a millisecond each (part of floor 3).

The search ranks configurations by them, and software other than twofold's executor is predicted by them.
`simulator.forecast` predicts what the simulator does.

* `estimate`: one configuration; `grid`: thousands of them, with shared results computed once.
* `pieces`: the pieces of a model in one layout, with prices and memory (`pricing`, `memory`, `classes`). `chunk`: the
  content of a pipeline stage. Forecasts read these too.
* `chunks`: the clock maps of chunks, made of priced pieces (`action`, `optimizer_lines`). `layout`: what all
  configurations of a layout share. `case`: one configuration. `pipeline`, `batch`: its actions in time, one
  configuration at a time or many.
"""

from simulator.estimate.estimate import estimate
from simulator.estimate.grid import estimate_grid

__all__ = ["estimate", "estimate_grid"]
