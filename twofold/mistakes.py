"""Error messages for invalid command lines: one sentence with a way out, instead of tyro's boxes."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping, Sequence

from plans.errors import TwofoldError
from twofold.commands.examples import example_of
from twofold.option_list import Option, options_of, types_in

__all__ = ["check_arguments", "mistake", "unknown_command"]


def unknown_command(word: str, commands: Sequence[str]) -> str:
    """The message about an unknown command; "" is not a command at all."""
    listed = f"the commands are {', '.join(commands)}; see `twofold --help`"
    if not word:
        return f"name a command: {listed}"
    close = difflib.get_close_matches(word, commands, n=1)
    return f"unknown command {word!r}; {f'did you mean {close[0]}? ' if close else ''}{listed}"


def check_arguments(name: str, command: type, arguments: Sequence[str]) -> None:
    """Refuse what tyro accepts silently: a flag without its values, and values after separate flags.

    Raises:
        TwofoldError: an option with several values that is given twice, or without a value.
    """
    options = {option.name: option for option in options_of(command)}
    seen: set[str] = set()
    for argument, after in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        if argument == "--":
            return
        option = options.get(_spelled(argument))
        if option is None or option.is_word or Ellipsis not in types_in(option.type):
            continue
        if option.name in seen:
            raise TwofoldError(f"{option.name} is given twice; write all values after one {option.name}")
        seen.add(option.name)
        if "=" not in argument and after.startswith("--"):
            raise TwofoldError(_needs_value(name, option.name))


def mistake(name: str, command: type, arguments: Sequence[str], message: str) -> str:
    """The error in the arguments of a command.

    Args:
        name: name of the command.
        command: its class.
        arguments: arguments after the name.
        message: tyro's message.
    """
    options = {option.name: option for option in options_of(command)}
    words = re.sub(r"\s+", " ", re.sub(r"[│╭╮╰╯─]", " ", message))
    for describe in (_switch, _unknown, _valueless, _choice, _unread, _missing):
        if text := describe(name, options, arguments, words):
            return text
    return f"{_first_sentence(words)}; `twofold {name} --help` lists the options"


Options = Mapping[str, Option]


def _switch(name: str, options: Options, arguments: Sequence[str], words: str) -> str:
    """Message about a switch with a value."""
    for switch, value in itertools.pairwise(arguments):
        if value in ("True", "False", "true", "false") and _is_switch(options.get(_spelled(switch))):
            other = f"--no-{switch[2:]}" if value.lower() == "false" else switch
            return f"{switch} is a switch and takes no value; write {other}"
    return ""


def _unknown(name: str, options: Options, arguments: Sequence[str], words: str) -> str:
    """Message about an unknown option."""
    known = [option for option in options if option.startswith("--")]
    for argument in arguments:
        spelled = _spelled(argument)
        if re.fullmatch(r"-[A-Za-z]+", argument):
            options_like = [each for each in known if each.startswith(f"-{argument[:2]}")]
            hint = f"did you mean {options_like[0]}? " if options_like else ""
            return (
                f"{argument} is not an option: options begin with two dashes; {hint}`twofold {name} --help` lists them"
            )
        if not argument.startswith("--") or len(argument) == 2 or spelled in known:
            continue
        if spelled.startswith("--no-") and _is_switch(options.get(f"--{spelled[5:]}")):
            continue
        word = options.get(spelled[2:])
        if word is not None and word.is_word:
            example = f"twofold {name} {example_of(name, '')}"
            return f"{spelled} is not an option of twofold {name}; write the {word.name} alone, as in `{example}`"
        close = difflib.get_close_matches(spelled, known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return (
            f"{argument.partition('=')[0]} is not an option of twofold {name}; {hint}`twofold {name} --help` lists them"
        )
    return ""


def _valueless(name: str, options: Options, arguments: Sequence[str], words: str) -> str:
    """Message about an option without a value."""
    option = re.search(r"Missing value for argument '(--[\w-]+)", words)
    if option is None:
        return ""
    return _needs_value(name, option[1])


def _needs_value(name: str, option: str) -> str:
    example = example_of(name, option)
    return f"{option} needs a value{f', such as {option} {example}' if example else ''}"


def _choice(name: str, options: Options, arguments: Sequence[str], words: str) -> str:
    """Message about a value that is not one of a few."""
    found = re.search(r"invalid choice '(.*?)' for argument '(--[\w-]+)'\. Expected one of \((.*?),?\)", words)
    if found is None:
        return ""
    choices = sorted(choice.strip("'") for choice in found[3].split(", "))
    return f"{found[2]} {found[1]}: must be {' or '.join(choice for choice in choices if choice != 'None')}"


def _unread(name: str, options: Options, arguments: Sequence[str], words: str) -> str:
    """Message about a value of the wrong type."""
    found = re.search(r"Error parsing (--[\w-]+)(?: \(.*?\))?: ", words)
    if found is None:
        return ""
    option = options.get(found[1])
    kinds = {int: "a whole number", float: "a number"}
    kind = next((kind_text for each, kind_text in kinds.items() if option and each in types_in(option.type)), "a value")
    value = re.search(r"(?:base 10: |to float: |arguments: \['|from \[')'?([^']*)'", words)
    shown = value[1] if value else "..."
    if "," in shown and option and any(part is Ellipsis for part in types_in(option.type)):
        apart = " ".join(re.split("[, ]+", shown))
        return f"{found[1]} {shown}: write the values with spaces between them, {found[1]} {apart}"
    return f"{found[1]} {shown}: must be {kind}; `twofold {name} --help` lists the options"


def _missing(name: str, options: Options, arguments: Sequence[str], words: str) -> str:
    """Message about missing options, or an extra argument."""
    given = {_spelled(argument) for argument in arguments}
    unread = re.search(r"Unrecognized options: (\S+)", words)
    extra = unread[1].rstrip(",") if unread is not None else ""
    needed = []
    if "Missing from" in words:
        has_word = _has_word(arguments, options)
        needed = [
            option
            for option in options.values()
            if option.is_needed and not (has_word if option.is_word else option.name in given)
        ]
    if extra and needed and not needed[0].is_word:
        return f"{extra!r} is not the value of an option; did you mean {needed[0].name} {extra}?"
    before = arguments[arguments.index(extra) - 1] if extra in arguments[1:] else ""
    if _is_switch(options.get(_spelled(before))):
        return f"{before} is a switch and takes no value; leave out {extra!r}"
    if extra:
        return f"{extra!r} is an unexpected argument for twofold {name}; `twofold {name} --help` lists the options"
    return f"twofold {name} needs {' and '.join(_said(name, option) for option in needed)}" if needed else ""


def _said(name: str, option: Option) -> str:
    """An option with an example value, if there is one."""
    example = example_of(name, "" if option.is_word else option.name)
    if option.name == "file":
        return "a file to write (such as model.safetensors)"
    if option.is_word:
        named = option.name if option.name.endswith("s") else f"a {option.name}"
        return f"{named}{f' (such as {example})' if example else ''}"
    return f"{option.name} {example}" if example else option.name


def _has_word(arguments: Sequence[str], options: Options) -> bool:
    """Whether some argument is positional, not the value of an option."""
    before = ""
    for argument in arguments:
        if not argument.startswith("--") and (not before.startswith("--") or _is_switch(options.get(_spelled(before)))):
            return True
        before = "" if "=" in argument else argument
    return False


def _spelled(argument: str) -> str:
    """The name of an option without its value, with dashes: --global_batch=8 is --global-batch."""
    return argument.partition("=")[0].replace("_", "-")


def _is_switch(option: Option | None) -> bool:
    return option is not None and option.type is bool


def _first_sentence(words: str) -> str:
    return words.strip().partition(". ")[0][:200] or "the command line cannot be read"
