"""The command line: `twofold demo | plan | simulate | run | verify | calibrate | whatif | predict |
validate`.

Each command reads and writes files. With `--json` it prints one JSON object on stdout and its progress on stderr. Exit
codes: 0 done, 1 a run or a check failed, 2 bad input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from plans.errors import TwofoldError

__all__ = ["main"]

EXTRAS = {"torch": "torch", "mlxtend": "data", "matplotlib": "reports", "pandas": "reports"}
"""Optional package -> the extra that installs it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # before the command began, which says more
        print("interrupted", file=sys.stderr, flush=True)
        return 130


def _run(arguments: Sequence[str] | None) -> int:
    import tyro

    from twofold.commands.run import COMMANDS

    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments == ["--version"]:
        from twofold import __version__

        print(f"twofold {__version__}")
        return 0
    command = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, args=arguments, prog="twofold", description="Plan, simulate and run parallel training."
    )  # fmt: skip
    return int(command or 0)


def run_command(work: Any, json_output: bool) -> int:
    """Call `work`, which returns (JSON object, passed), and turn errors into messages and exit codes."""
    try:
        found, passed = work()
    except TwofoldError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return int(getattr(error, "exit_code", 2))
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(
            f"error: this needs {error.name}: pip install 'twofold[{EXTRAS[error.name]}]'", file=sys.stderr, flush=True
        )
        return 2
    except OSError as error:  # a file that the user named: not there, a folder, not allowed, no space
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; name another file", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt as stopped:
        more = f"; {stopped}" if str(stopped) else ""  # what is kept, and how to go on
        print(f"interrupted; every process that was started has ended{more}", file=sys.stderr, flush=True)
        return 130
    if json_output:
        print(json.dumps(found, indent=1), flush=True)
    return 0 if passed else 1
