"""The command line: `twofold COMMAND`, with the commands of `commands`.

Each command reads and writes files. With `--json` it prints one JSON object on stdout and its progress on stderr. Exit
codes: 0 success, 1 a run or a check failed, 2 bad input.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import itertools
import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from plans.errors import TwofoldError
from plans.files import finite, replacing_all
from twofold.console import shortened, visible

if TYPE_CHECKING:
    from twofold.commands.options import Command

__all__ = ["COMMANDS", "command_class", "commands", "main"]

EXTRAS = {"torch": "torch", "distributed": "dask", "mlxtend": "data", "matplotlib": "reports", "pandas": "reports"}
"""Optional package -> the extra that installs it."""


COMMANDS: Mapping[str, str] = {
    "demo": "Demo", "plan": "PlanCommand", "simulate": "Simulate", "whatif": "WhatIfCommand", "study": "StudyCommand",
    "run": "Run", "train": "Train", "export": "Export", "verify": "Verify", "calibrate": "Calibrate",
    "predict": "Predict", "validate": "Validate", "compare": "Compare", "links": "Links", "serve": "Serve",
}  # fmt: skip
"""Command -> its class in the module of the same name, which is imported when it is needed."""


def command_class(name: str) -> type[Command]:
    """The class of a command."""
    command: type[Command] = getattr(importlib.import_module(f"twofold.commands.{name}"), COMMANDS[name])
    return command


def commands() -> Mapping[str, type[Command]]:
    """The class of every command, by name."""
    return {name: command_class(name) for name in COMMANDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        for word in given:
            if visible(word) != word:
                raise TwofoldError(f"argument {word[:80]!r} has control characters; remove them")
        _tell(given)
        with _warnings_in_one_line():
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


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print warnings without the line of twofold that gives them."""
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = usual


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
    first = arguments[0] if arguments else ""
    if first == "--version":
        import twofold

        print(f"twofold {twofold.__version__}")
    elif first in ("-h", "--help"):
        from twofold.help_page import first_page

        print(first_page(list(COMMANDS)))
    elif first == "--completion":
        _print_completion(arguments[1:])
    elif first not in COMMANDS:
        from twofold.mistakes import unknown_command

        raise TwofoldError(unknown_command(first, list(COMMANDS)))
    elif asked := {"-h", "--help", "--help-all"} & set(itertools.takewhile(lambda word: word != "--", arguments)):
        from twofold.help_page import command_page

        print(command_page(first, command_class(first), full="--help-all" in asked))
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
    import tyro

    with contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            dict(commands()), args=["--tyro-print-completion", *shells], prog="twofold",
            config=(tyro.conf.OmitArgPrefixes,),
        )  # fmt: skip


def _read(arguments: list[str]) -> Command:
    """Parse a command line into a command.

    Raises:
        TwofoldError: the command line is invalid.
    """
    import tyro

    from twofold.mistakes import check_arguments, mistake

    name, rest = arguments[0], arguments[1:]
    known, output = command_class(name), io.StringIO()
    check_arguments(name, known, rest)
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(known, args=rest, prog=f"twofold {name}", config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit:
        raise TwofoldError(mistake(name, known, rest, output.getvalue())) from None


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
    print(f"error: {shortened(visible(message))}", file=sys.stderr, flush=True)
    return exit_code
