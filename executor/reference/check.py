"""One number of a verification, and the limits it must keep."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Check"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number of a verification and its limit.

    Args:
        name: what is compared.
        value: the number found; True or False where there is nothing to count.
        low, high: its allowed range; None is not a bound. True and False need no bounds.
        unit: behind the number; "s" and "B" are scaled, "" is none.
        detail: where to look, how it was found.
        informs: it is reported, but does not fail (a time on a shared machine).
    """

    name: str
    value: float | bool
    low: float | None = None
    high: float | None = None
    unit: str = ""
    detail: str = ""
    informs: bool = False

    @property
    def passed(self) -> bool:
        """Whether the check passed; a non-finite number never passes.

        >>> Check(name="loss", value=3e-7, high=2e-6).passed, Check(name="loss", value=float("nan"), high=1.0).passed
        (True, False)
        """
        if isinstance(self.value, bool):
            return self.value
        return bool(
            math.isfinite(self.value)
            and (self.low is None or self.value >= self.low)
            and (self.high is None or self.value <= self.high)
        )
