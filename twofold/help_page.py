"""Help of one screen: purpose of a command, examples, and its options by group."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Sequence
from pathlib import Path

from twofold.commands.examples import EXAMPLES

__all__ = ["command_page", "first_page"]

_WIDTH = 100


def first_page(commands: Sequence[str]) -> str:
    """The text of `twofold --help`, which is printed without importing the commands."""
    lines = ["usage: twofold COMMAND ...", "", "Plan, simulate and run parallel training.", ""]
    for name in commands:
        lines += _entry(f"  {name:<10} ", _purpose(name))
    lines += ["", "examples:", *(f"  {EXAMPLES[name][0]}" for name in ("demo", "plan", "whatif", "predict"))]
    lines += ["", "twofold COMMAND --help lists its options; twofold --completion bash|zsh|tcsh prints a script for"]
    lines += ["completion; twofold --version. Every command prints one JSON object with --json."]
    return "\n".join(lines)


def command_page(name: str, command: type) -> str:
    """The text of `twofold COMMAND --help`."""
    from twofold.mistakes import options_of

    options = list(options_of(command))
    words = [
        f"[{option.name}]" if not option.is_needed else option.name.upper() for option in options if option.is_word
    ]
    needed = [f"{option.name} ..." for option in options if option.is_needed and not option.is_word]
    lines = textwrap.wrap(" ".join(["usage: twofold", name, *words, *needed, "[options]"]), _WIDTH)
    lines += ["", *textwrap.wrap(_sentence(command), _WIDTH), "", "examples:"]
    lines += [f"  {example}" for example in EXAMPLES[name]]
    groups: dict[str, list[str]] = {}
    for option in options:
        if not option.is_word:
            groups.setdefault(option.group, []).append(option.name)
    lines += ["", f"options (twofold {name} --help-all describes them):"]
    for group, names in groups.items():
        if group:
            lines += textwrap.wrap(f"{group}:", _WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines += textwrap.wrap(" ".join(names), _WIDTH, initial_indent="    ", subsequent_indent="    ",
                               break_on_hyphens=False)  # fmt: skip
    return "\n".join(lines)


def _purpose(name: str) -> str:
    """The first line of a command's module."""
    text = (Path(__file__).parent / "commands" / f"{name}.py").read_text(encoding="utf-8")
    purpose = text.partition(f"`twofold {name}`: ")[2].partition('"""')[0].partition("\n\n")[0]
    return purpose[:1].upper() + " ".join(purpose.split())[1:]


def _sentence(command: type) -> str:
    """The first sentence of a command's docstring."""
    first = (inspect.getdoc(command) or "").partition("\n\n")[0]
    return " ".join(first.split())


def _entry(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
