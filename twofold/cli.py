"""The command line: `twofold COMMAND`, with the commands of `commands`.

Each command reads and writes files. With `--json` it prints one JSON object on stdout and its progress on stderr. Exit
codes: 0 success, 1 a run or a check failed, 2 bad input.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from plans.errors import TwofoldError
from plans.files import finite, replacing_all
from twofold.console import visible

if TYPE_CHECKING:
    from twofold.commands.options import Command

__all__ = ["commands", "main"]

EXTRAS = {"torch": "torch", "distributed": "dask", "mlxtend": "data", "matplotlib": "reports", "pandas": "reports"}
"""Optional package -> the extra that installs it."""


def commands() -> Mapping[str, type[Command]]:
    """The class of every command, by name."""
    from twofold.commands.calibrate import Calibrate
    from twofold.commands.compare import Compare
    from twofold.commands.demo import Demo
    from twofold.commands.export import Export
    from twofold.commands.links import Links
    from twofold.commands.plan import PlanCommand
    from twofold.commands.predict import Predict
    from twofold.commands.run import Run
    from twofold.commands.serve import Serve
    from twofold.commands.simulate import Simulate
    from twofold.commands.study import StudyCommand
    from twofold.commands.train import Train
    from twofold.commands.validate import Validate
    from twofold.commands.verify import Verify
    from twofold.commands.whatif import WhatIfCommand

    return {
        "demo": Demo, "plan": PlanCommand, "simulate": Simulate, "whatif": WhatIfCommand, "study": StudyCommand,
        "run": Run, "train": Train, "export": Export, "verify": Verify, "calibrate": Calibrate, "predict": Predict,
        "validate": Validate, "compare": Compare, "links": Links, "serve": Serve,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        for word in given:
            if visible(word) != word:
                raise TwofoldError(f"argument {word[:80]!r} has control characters; remove them")
        _tell(given)
        return _run(_read(given), shlex.join(["twofold", *given]))
    except TwofoldError as error:
        return _refused(str(error))
    except _Done:
        return 0
    except KeyboardInterrupt:  # before the command began, which says more
        print("interrupted", file=sys.stderr, flush=True)
        return 130
    except BrokenPipeError:  # who reads has gone, as `head` does; nothing is left to say
        _drop_output()
        return 1
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        return _refused(f"the output cannot be written: {error.strerror}")


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _drop_output() -> None:
    """Discard what stdout still holds: Python writes it once more when it ends, and would fail again."""
    with contextlib.suppress(OSError, ValueError):  # not a real stream
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Done(Exception):
    """Help, the version or a completion script was printed."""


def _tell(arguments: list[str]) -> None:
    """Print help, the version or a completion script if requested.

    Raises:
        _Done: something was printed.
        TwofoldError: no command, or an unknown one.
    """
    from twofold.help_page import command_page, first_page
    from twofold.mistakes import unknown_command

    first = arguments[0] if arguments else ""
    known = commands()
    if first == "--version":
        import twofold

        print(f"twofold {twofold.__version__}")
    elif first in ("-h", "--help"):
        print(first_page(known))
    elif first == "--completion":
        _print_completion(arguments[1:])
    elif first not in known:
        raise TwofoldError(unknown_command(first, list(known)))
    elif {"-h", "--help"} & set(itertools.takewhile(lambda word: word != "--", arguments)):
        print(command_page(first, known[first]))
    else:
        return
    raise _Done


def _print_completion(shells: list[str]) -> None:
    """Print the completion script for a shell.

    Raises:
        TwofoldError: no shell, or an unknown one.
    """
    if shells not in (["bash"], ["zsh"], ["tcsh"]):
        raise TwofoldError("--completion needs a shell, bash, zsh or tcsh: write twofold --completion bash")
    with contextlib.suppress(SystemExit):
        _parsed(["--tyro-print-completion", *shells])


def _read(arguments: list[str]) -> Command:
    """Parse a command line into a command.

    Raises:
        TwofoldError: the command line is invalid.
        _Done: the long help was printed.
    """
    from twofold.mistakes import check_arguments, mistake

    name, rest = arguments[0], arguments[1:]
    check_arguments(name, commands()[name], rest)
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return _parsed([name, *("--help" if word == "--help-all" else word for word in rest)])
    except SystemExit as ended:
        if not ended.code:
            raise _Done from None
        raise TwofoldError(mistake(name, commands()[name], rest, output.getvalue())) from None


def _parsed(arguments: list[str]) -> Command:
    import tyro

    command: Command = tyro.extras.subcommand_cli_from_dict(
        dict(commands()), args=arguments, prog="twofold", description="Plan, simulate and run parallel training.",
        config=(tyro.conf.OmitArgPrefixes,),
    )  # fmt: skip
    return command


def _run(command: Command, line: str) -> int:
    """Run a command and turn errors into messages and exit codes."""
    from twofold.commands.values import check_values
    from twofold.console import Console

    as_json = command.output.json
    force = replacing_all() if getattr(command.output, "force", False) else contextlib.nullcontext()
    try:
        with force:
            check_values(command)
            result, passed = command.run(Console(json=as_json, command=line))
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
        more = f"; {stopped}" if str(stopped) else ""  # what is kept, and how to continue
        print(f"interrupted; all started processes have ended{more}", file=sys.stderr, flush=True)
        return 130
    if as_json:
        print(json.dumps(finite(result), indent=1, allow_nan=False), flush=True)
    return 0 if passed else 1


def _refused(message: str, exit_code: int = 2) -> int:
    print(f"error: {visible(message)}", file=sys.stderr, flush=True)
    return exit_code
