"""The command line: `twofold COMMAND`, with the commands of `commands`.

Each command reads and writes files. With `--json` it prints one JSON object on stdout and its progress on stderr. Exit
codes: 0 done, 1 a run or a check failed, 2 bad input.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from plans.errors import TwofoldError
from plans.files import finite
from twofold.console import visible

if TYPE_CHECKING:
    from twofold.commands.options import Command

__all__ = ["commands", "main"]

EXTRAS = {"torch": "torch", "distributed": "dask", "mlxtend": "data", "matplotlib": "reports", "pandas": "reports"}
"""Optional package -> the extra that installs it."""


def commands() -> dict[str, Callable[..., Command]]:
    """Name of a command -> its class."""
    from twofold.commands.calibrate import Calibrate
    from twofold.commands.demo import Demo
    from twofold.commands.plan import PlanCommand
    from twofold.commands.predict import Predict
    from twofold.commands.run import Run
    from twofold.commands.simulate import Simulate
    from twofold.commands.study import StudyCommand
    from twofold.commands.train import Train
    from twofold.commands.validate import Validate
    from twofold.commands.verify import Verify
    from twofold.commands.whatif import WhatIfCommand

    return {
        "demo": Demo, "plan": PlanCommand, "simulate": Simulate, "whatif": WhatIfCommand, "study": StudyCommand,
        "run": Run, "train": Train, "verify": Verify, "calibrate": Calibrate, "predict": Predict, "validate": Validate,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        if given == ["--version"]:
            import twofold

            print(f"twofold {twofold.__version__}")
            return 0
        for word in given:
            if visible(word) != word:
                raise TwofoldError(f"argument {word[:80]!r} has control characters, which no name here has")
        return _run(_read(given))
    except TwofoldError as error:
        return _refused(str(error))
    except KeyboardInterrupt:  # before the command began, which says more
        print("interrupted", file=sys.stderr, flush=True)
        return 130


def _read(arguments: list[str]) -> Command:
    import tyro

    told = io.StringIO()
    # what is said of a value that looks like a switch's is looked at first
    looked_at = any(word in ("True", "False") for word in arguments)
    try:
        with contextlib.redirect_stderr(told) if looked_at else contextlib.nullcontext():
            command: Command = tyro.extras.subcommand_cli_from_dict(
                commands(), args=arguments, prog="twofold", description="Plan, simulate and run parallel training.",
                config=(tyro.conf.OmitArgPrefixes,),
            )  # fmt: skip
    except SystemExit:
        for switch, value in itertools.pairwise(arguments):
            if switch.startswith("--") and f"Unrecognized options: {value}" in told.getvalue():
                other = f"--no-{switch[2:]}" if value == "False" else switch
                raise TwofoldError(f"{switch} is a switch, which takes no value: write {other} alone") from None
        sys.stderr.write(told.getvalue())
        raise
    return command


def _run(command: Command) -> int:
    """Run a command and turn errors into messages and exit codes."""
    from twofold.console import Console

    as_json = command.output.json
    try:
        result, passed = command.run(Console(json=as_json))
    except TwofoldError as error:
        return _refused(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        return _refused(f"this needs {error.name}: pip install 'twofold[{EXTRAS[error.name]}]'")
    except OSError as error:  # a file that the user named: not there, a folder, not allowed, no space
        if error.filename is None:
            raise
        return _refused(f"{error.filename}: {error.strerror}; name another file")
    except KeyboardInterrupt as stopped:
        more = f"; {stopped}" if str(stopped) else ""  # what is kept, and how to go on
        print(f"interrupted; every process that was started has ended{more}", file=sys.stderr, flush=True)
        return 130
    if as_json:
        print(json.dumps(finite(result), indent=1, allow_nan=False), flush=True)
    return 0 if passed else 1


def _refused(message: str, exit_code: int = 2) -> int:
    print(f"error: {visible(message)}", file=sys.stderr, flush=True)
    return exit_code
