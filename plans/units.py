"""Numbers that print themselves with a unit: a table shows "12.3 ms" and sorts and exports 0.0123. Sizes from text."""

from __future__ import annotations

import re
import textwrap

from plans.errors import TwofoldError

__all__ = ["Bytes", "Change", "Count", "Quantity", "Seconds", "Share", "parse_bytes", "time_unit", "wrapped"]

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Quantity(float):
    """A number with a unit; `str` is what people read."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{float(self):.4g}"


class Seconds(Quantity):
    """A length of time.

    >>> str(Seconds(0.0123456)), str(Seconds(0))
    ('12.3 ms', '0 s')
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "0 s" if not self else _scaled(self, *time_unit(self))


class Bytes(Quantity):
    """A size in decimal units: 1 kB is 1000 bytes.

    >>> str(Bytes(802816)), str(Bytes(12))
    ('803 kB', '12 B')
    """

    __slots__ = ()

    def __str__(self) -> str:
        return _scaled(self, *next(((size, name) for size, name in _BYTES if abs(self) >= size), _BYTES[-1]))


class Share(Quantity):
    """A fraction, shown in per cent.

    >>> str(Share(0.0123))
    '1.2 %'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"{100 * self:.1f} %"


class Change(Quantity):
    """A relative change.

    >>> str(Change(0.0123)), str(Change(-0.5))
    ('+1.2 %', '-50.0 %')
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"{100 * self:+z.1f} %"  # z: no -0.0


class Count(Quantity):
    """A count.

    >>> str(Count(12345))
    '12,345'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"{self:,.0f}"


def time_unit(length_s: float) -> tuple[float, str]:
    """The unit in which a length reads as a number from 1 to 1000: its seconds and its name.

    >>> time_unit(0.0123)
    (0.001, 'ms')
    """
    return next(((size, name) for size, name in _TIME if abs(length_s) >= size), _TIME[-1])


def _scaled(value: float, size: float, name: str) -> str:
    scaled = float(value) / size
    return f"{scaled:.0f} {name}" if abs(scaled) >= 100 or name == "B" else f"{scaled:#.3g} {name}"


def wrapped(text: str, width: int) -> str:
    """The text in lines of at most `width` characters; no line ends between a number and its unit.

    >>> wrapped("A step takes 12.3 ms.", 18)
    'A step takes\\n12.3 ms.'
    """
    joined = re.sub(r"(\d) (?=%|[a-zµ]?s\b|[kMGTP]?B\b)", "\\1\N{NO-BREAK SPACE}", text)
    return textwrap.fill(joined, width, break_long_words=False).replace("\N{NO-BREAK SPACE}", " ")


def parse_bytes(size: str | int, what: str = "size") -> int:
    """Parse a size with a unit into bytes.

    >>> parse_bytes("25GB"), parse_bytes("16GiB")
    (25000000000, 17179869184)

    Raises:
        TwofoldError: a text without a size or without a unit; `what` names it.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", size) if isinstance(size, str) else None
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise TwofoldError(f'{what} is {size!r}; give a size with a unit such as "25GB" or "16GiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])
