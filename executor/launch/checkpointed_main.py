"""The main module of ranks that write checkpoints: `executor.launch.job_main` with the checkpoint writer already
imported.

Forked ranks share imported modules, and importing torch's checkpoint code takes most of a second.
"""

import executor.train.checkpoints.checkpoint  # noqa: F401
from executor.launch.job_main import main

__all__ = ["main"]
