"""The words of a shell script that launches a program."""

from __future__ import annotations

import re
import shlex

from plans.errors import TwofoldError

__all__ = ["is_whole", "shell_words"]


def shell_words(text: str, path: str) -> list[str]:
    r"""The words of a script; comments and the line breaks within a command are left out.

    Raises:
        TwofoldError: text that no shell could read, such as a quotation that does not end.

    >>> shell_words("torchrun train.py \\\n  --name 'two words'  # a comment", "run.sh")
    ['torchrun', 'train.py', '--name', 'two words']
    """
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise TwofoldError(f"{path} cannot be read as a shell script: {error}") from None


def is_whole(word: str) -> bool:
    """Whether a word is a whole number of at most 18 digits.

    >>> [is_whole(word) for word in ("12", "-1", "", "\u0662", "9" * 19)]
    [True, False, False, False, False]
    """
    return re.fullmatch("[0-9]{1,18}", word) is not None
