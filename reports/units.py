"""Human-readable numbers: seconds, bytes and axis ticks with a unit."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_seconds", "nice_ticks", "time_unit"]

_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def time_unit(length_s: float) -> tuple[float, str]:
    """The unit in which a length reads as a number from 1 to 1000: its seconds and its name.

    >>> time_unit(0.0123)
    (0.001, 'ms')
    """
    return next(((size, name) for size, name in _TIME if abs(length_s) >= size), _TIME[-1])


def format_seconds(length_s: float) -> str:
    """Seconds with three digits and a unit.

    >>> format_seconds(0.0123456), format_seconds(0.0)
    ('12.3 ms', '0 s')
    """
    return "0 s" if length_s == 0 else _scaled(length_s, *time_unit(length_s))


def format_bytes(size_bytes: float) -> str:
    """Bytes with three digits and a decimal unit (1 kB is 1000 bytes).

    >>> format_bytes(802816), format_bytes(12)
    ('803 kB', '12 B')
    """
    return _scaled(size_bytes, *next(((size, name) for size, name in _BYTES if abs(size_bytes) >= size), _BYTES[-1]))


def nice_ticks(high: float, about: int = 8) -> list[float]:
    """Ticks at 1, 2, 2.5 or 5 times a power of ten, from 0 to at most `high`.

    >>> nice_ticks(9.3, about=5)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    if high <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(high / about))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if high / (factor * power) <= about), 10 * power)
    return [position * step for position in range(int(high / step * (1 + 1e-12)) + 1)]


def _scaled(value: float, size: float, name: str) -> str:
    scaled = value / size
    return f"{scaled:.0f} {name}" if abs(scaled) >= 100 or name == "B" else f"{scaled:#.3g} {name}"
