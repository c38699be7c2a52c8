"""The main module of ranks that write checkpoints: `executor.launch.job_main`, with the writer already imported.

Where ranks are forked, the module of the target is imported once for all of them, and what torch's checkpoints import
takes most of a second.
"""

import executor.train.checkpoint  # noqa: F401
from executor.launch.job_main import main

__all__ = ["main"]
