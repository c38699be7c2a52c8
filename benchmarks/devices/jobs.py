"""Starts the ranks of a benchmark; the folder of their logs goes with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence

from executor.device import num_accelerators
from executor.launch.launch import Follow, launch
from executor.launch.rank_failures import RunFailed
from executor.launch.temporary import temporary_folder

__all__ = ["check_gpus", "on_ranks"]


def check_gpus(parser: argparse.ArgumentParser, count: int) -> None:
    """End with an error if `--gpus count` is not a group of devices of this host."""
    if count < 2:
        parser.error(f"--gpus must be at least 2, not {count}: the ranks of a group communicate")
    if count > (there := num_accelerators()):
        parser.error(f"--gpus {count}: this host has {there} GPUs; run it on one with more, or lower --gpus")


def on_ranks(
    module: str, arguments: Sequence[str], ranks: int, *, limit_s: float, env: Mapping[str, str] | None = None
) -> int:
    """The exit code of `module.main()` on `ranks` processes of this host; what rank 0 prints is printed.

    Args:
        module: name.
        arguments: its `sys.argv[1:]`.
        ranks: processes.
        limit_s: a job that takes longer is ended.
        env: variables beside those of this process.
    """
    with temporary_folder() as logs:
        try:
            launch(
                f"{module}:main", num_ranks=ranks, args=arguments, log_dir=logs, timeout_s=limit_s, env=env,
                follow=Follow(lambda rank, line: print(line, flush=True), rank=0),
            )  # fmt: skip
        except RunFailed as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
    return 0
