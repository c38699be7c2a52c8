"""One action of a pipeline schedule: the forward or (part of the) backward of one micro-batch on one chunk.

The text form is that of torch.distributed.pipelining: stage, kind, micro-batch, e.g. `2F0`, `1B3`, `1I3`, `1W3`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from plans.schedules.errors import ScheduleError

__all__ = ["KINDS", "Action", "ActionKind"]


class ActionKind(StrEnum):
    """The kind of an action; prints as its letter."""

    FORWARD = "F"
    BACKWARD = "B"
    """The full backward: gradients of the input and of the weights."""
    INPUT_GRADIENT = "I"
    """The part of the backward that the previous stage waits for."""
    WEIGHT_GRADIENT = "W"
    """The rest of the backward, free to run any time after the input gradient."""


KINDS: tuple[ActionKind, ...] = tuple(ActionKind)
"""The kinds in the order of their numbers in a `ScheduleTable`: F is 0, B is 1, I is 2, W is 3."""

_KIND_OF_LETTER = {kind.value: kind for kind in KINDS}
_DIGITS = frozenset("0123456789")
_MOST_DIGITS = 18


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Action:
    """One action.

    Args:
        stage: the virtual stage (chunk) counted along the complete model, as in torch.distributed.pipelining.
        kind: forward, full backward, input gradient or weight gradient.
        micro_batch: counted from 0.

    >>> Action.parse("2F0")
    Action(stage=2, kind=<ActionKind.FORWARD: 'F'>, micro_batch=0)
    >>> str(Action(stage=1, kind=ActionKind.WEIGHT_GRADIENT, micro_batch=3))
    '1W3'
    """

    stage: int
    kind: ActionKind
    micro_batch: int

    def __post_init__(self) -> None:
        if self.stage < 0 or self.micro_batch < 0:
            raise ScheduleError(
                f"Action(stage={self.stage}, micro_batch={self.micro_batch}): stages and micro-batches count from 0"
            )

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads `2F0`; blanks around it are ignored.

        Raises:
            ScheduleError: the text is not an action; the message points at the first character that does not fit.
        """
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        letter_at = _skip_digits(text, start, end)
        if letter_at == start:
            raise _unreadable(text, start, "expected the number of a stage")
        kind = _KIND_OF_LETTER.get(text[letter_at : letter_at + 1])
        if kind is None:
            raise _unreadable(text, letter_at, "expected F, B, I or W")
        stop = _skip_digits(text, letter_at + 1, end)
        if stop == letter_at + 1:
            raise _unreadable(text, stop, "expected the number of a micro-batch")
        if stop != end:
            raise _unreadable(text, stop, "expected the end of the action")
        if max(letter_at - start, stop - letter_at - 1) > _MOST_DIGITS:
            raise ScheduleError(f"a number in the action {text[:30]!r} has more than {_MOST_DIGITS} digits")
        return cls(stage=int(text[start:letter_at]), kind=kind, micro_batch=int(text[letter_at + 1 : stop]))


def _skip_digits(text: str, position: int, end: int) -> int:
    while position < end and text[position] in _DIGITS:
        position += 1
    return position


def _unreadable(text: str, position: int, expected: str) -> ScheduleError:
    return ScheduleError(
        f"{text!r} is not an action: {expected} at position {position}; write the stage, one of F, B, I, W, and the "
        f"micro-batch, e.g. 2F0 or 1B3\n  {text}\n  {' ' * position}^"
    )
