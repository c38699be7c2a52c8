"""How far training can be relied on; `python -m benchmarks.reliability PART... --out FILE` keeps the figures.

* `faults`: things that go wrong at random ranks and steps, each of which must be found, named and survived;
* `interrupted`: a GPT on text whose processes are killed at random, next to one that nothing happens to;
* `checkpoints`: what asynchronous checkpoints cost, and what the simulator predicts of it;
* `steps` and `forecasts` (`leaks`): memory, files and threads of a long run, and of many forecasts in one process.

`training` starts the jobs of all of them.
"""
