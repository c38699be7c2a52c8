"""Numbers in tables: thousands separators, decimal commas, k and M."""

from __future__ import annotations

import math
import re
from functools import lru_cache

__all__ = ["number"]

_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


@lru_cache(maxsize=8192)
def number(text: str) -> float | None:
    """The number in a text; None if it is not a finite number.

    >>> number("11,000"), number("3,25"), number("1.234,5"), number("6950,5"), number("7.1k"), number("fast")
    (11000.0, 3.25, 1234.5, 6950.5, 7100.0, None)
    >>> number("3,2e3"), number("3.2e3")
    (3200.0, 3200.0)
    >>> number("1'536"), number("~ 42 %"), number("350~"), number("ca. 5"), number("4.194.304")
    (1536.0, 42.0, 350.0, 5.0, 4194304.0)
    """
    plain = re.sub(r"[\s_\u00a0]+|(?<=\d)['\u2019](?=\d{3})", "", text).lower()
    plain = re.sub(r"^(?:[~\u2248\u223c]|ca\.|circa|approx\.?|about)|[~*]$", "", plain).removesuffix("%")
    suffix = plain[-1:] if plain[-1:] in ("k", "m", "b", "t") else ""
    plain = plain.removesuffix(suffix)
    if re.fullmatch(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?", plain):
        plain = plain.replace(",", "")
    elif re.fullmatch(r"[+-]?(?:\d{1,3}(\.\d{3})*,\d+|\d+,\d{1,2})(e[+-]?\d+)?|[+-]?[1-9]\d{0,2}(\.\d{3}){2,}", plain):
        plain = plain.replace(".", "").replace(",", ".")
    try:
        found = float(plain) * _SUFFIXES[suffix]
    except ValueError:
        return None
    return found if math.isfinite(found) else None
