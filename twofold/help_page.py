"""Help pages: the purpose of a command, examples, and its options by group."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from twofold.commands.examples import EXAMPLES
from twofold.option_list import Option, options_of

__all__ = ["command_page", "first_page"]

_WIDTH = 100
_SCREEN = 40
"""Lines of a page that fits a screen."""
_COLUMN = 26
"""Where descriptions of options begin."""


def first_page(commands: Sequence[str]) -> str:
    """The text of `twofold --help`, which is printed without importing the commands."""
    lines = ["usage: twofold COMMAND ...", "", "Plan, simulate and run parallel training.", ""]
    for name in commands:
        lines += _entry(f"  {name:<10} ", _purpose(name))
    lines += ["", "examples:", *(f"  {EXAMPLES[name][0]}" for name in ("demo", "plan", "whatif", "predict"))]
    lines += ["", "twofold COMMAND --help lists the options of a command, and twofold --version prints the version."]
    lines += ["twofold --completion bash|zsh|tcsh prints a completion script. With --json, every command"]
    lines += ["prints one JSON object."]
    return "\n".join(lines)


def command_page(name: str, command: type, *, full: bool) -> str:
    """The text of `twofold COMMAND --help` or, with `full`, of `twofold COMMAND --help-all`.

    The shorter page only names the options if their descriptions do not fit a screen.
    """
    options = list(options_of(command))
    words = [f"[{option.value}]" if not option.is_needed else option.value for option in options if option.is_word]
    needed = [f"{option.name} ..." for option in options if option.is_needed and not option.is_word]
    head = textwrap.wrap(" ".join(["usage: twofold", name, *words, *needed, "[options]"]), _WIDTH)
    paragraphs = _paragraphs(command)
    examples = ["", "examples:", *(f"  {example}" for example in EXAMPLES[name])]
    described = [*head, *_texts(paragraphs), *examples, *_described(options)]
    if full or len(described) <= _SCREEN:
        return "\n".join(described)
    return "\n".join([*head, *_texts(paragraphs[:1]), *examples, *_named(name, options)])


def _described(options: Sequence[Option]) -> Iterator[str]:
    """All options with their descriptions, positional arguments first."""
    for group, members in _by_group(options).items():
        yield from ["", *textwrap.wrap(f"{group or 'options'}:", _WIDTH)]
        for option in members:
            head = f"  {_spelled(option)}  "
            text = option.meaning.rstrip(".") + _default(option)
            if len(head) > _COLUMN:
                yield head.rstrip()
                head = ""
            yield from _entry(head.ljust(_COLUMN), text)


def _spelled(option: Option) -> str:
    """An option with its value, or both forms of a switch that is on by default."""
    if option.is_word:
        return option.value
    name = option.name.replace("--", "--[no-]", 1) if option.default is True else option.name
    return f"{name} {option.value}".rstrip()


def _default(option: Option) -> str:
    """The default of an option, unless it is empty or the description has it."""
    if option.default in (None, "", ()) or isinstance(option.default, bool) or "default" in option.meaning:
        return ""
    shown = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else option.default
    return f" (default: {shown})"


def _named(name: str, options: Sequence[Option]) -> Iterator[str]:
    """The names of all options."""
    yield from ["", f"options (twofold {name} --help-all describes them):"]
    for group, members in _by_group([option for option in options if not option.is_word]).items():
        if group:
            yield from textwrap.wrap(f"{group}:", _WIDTH, initial_indent="  ", subsequent_indent="  ")
        yield from textwrap.wrap(
            " ".join(option.name for option in members), _WIDTH, initial_indent="    ", subsequent_indent="    ",
            break_on_hyphens=False,
        )  # fmt: skip


def _by_group(options: Sequence[Option]) -> dict[str, list[Option]]:
    groups: dict[str, list[Option]] = {}
    for option in options:
        groups.setdefault("arguments" if option.is_word else option.group, []).append(option)
    return groups


def _purpose(name: str) -> str:
    """The first line of a command's module."""
    text = (Path(__file__).parent / "commands" / f"{name}.py").read_text(encoding="utf-8")
    purpose = text.partition(f"`twofold {name}`: ")[2].partition('"""')[0].partition("\n\n")[0]
    return purpose[:1].upper() + " ".join(purpose.split())[1:]


def _paragraphs(command: type) -> list[str]:
    """The paragraphs of a command's docstring, up to its arguments."""
    text = (inspect.getdoc(command) or "").partition("\n\nArgs:")[0]
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def _texts(paragraphs: Sequence[str]) -> Iterator[str]:
    for paragraph in paragraphs:
        yield from ["", *textwrap.wrap(paragraph, _WIDTH)]


def _entry(head: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_on_hyphens=False)
