"""Sizes as products of symbols, derived from numbers.

Lowering works with numbers. If every size of a model is a different prime, the factors of a number in the lowered
program show which sizes it is the product of: with b = 43, s = 47 and h = 53, an element count of 214,226 can only be 2
b s h. A block that was lowered once with prime sizes thus determines the shapes and bytes of every block of the same
structure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from plans.errors import TwofoldError

__all__ = ["Monomials", "Symbols"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbols:
    """The sizes with which a template is lowered.

    Args:
        sizes: symbol -> its number in the template. A symbol's number may be a product that contains the numbers of
            other symbols (heads that a degree divides); such symbols come before those they contain.
        marks: symbol -> the prime that is in no other symbol's number, in the order of `sizes`.

    >>> symbols = Symbols(sizes={"heads": 3 * 11, "tp": 3}, marks={"heads": 11, "tp": 3})
    >>> symbols.read(2 * 11)  # half as many twos as heads over tp
    (Fraction(2, 1), (1, -1))
    """

    sizes: Mapping[str, int]
    marks: Mapping[str, int]

    def read(self, number: int) -> tuple[Fraction, tuple[int, ...]]:
        """The constant and the exponents of the product of symbols that `number` represents.

        Raises:
            AssertionError: the number is 0, or no product of the symbols.
        """
        assert number > 0, number
        rest, exponents = Fraction(number), []
        for symbol, mark in self.marks.items():
            count = _multiplicity(rest.numerator, mark) - _multiplicity(rest.denominator, mark)
            exponents.append(count)
            rest /= Fraction(self.sizes[symbol]) ** count
        assert _is_smooth(rest.numerator) and _is_smooth(rest.denominator), (number, rest)
        return rest, tuple(exponents)


@dataclass(slots=True)
class Monomials:
    """A collection of products of symbols, each once; `enter` gives a product's place, `values` all their numbers."""

    symbols: Symbols
    places: dict[tuple[Fraction, tuple[int, ...]], int] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)
    columns: tuple[npt.NDArray[np.int64], ...] | None = None
    numbers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def enter(self, number: int) -> int:
        """The position of the product that a number of the template represents."""
        place = self.known.get(number)
        if place is None:
            entry = self.symbols.read(number)
            place = self.known[number] = self.places.setdefault(entry, len(self.places))
            self.columns = None
        return place

    def values(self, sizes: Mapping[str, int]) -> list[int]:
        """The numbers of all entered products for other sizes of the symbols; kept, so not to be written to.

        Raises:
            TwofoldError: sizes that do not divide as the products ask for.
        """
        key = tuple([sizes[symbol] for symbol in self.symbols.sizes])
        found = self.numbers.setdefault(key, [])
        if len(found) < len(self.places):
            found += self._values(sizes, len(found))
        return found

    def _values(self, sizes: Mapping[str, int], first: int) -> list[int]:
        """The numbers of the products from a place on."""
        if self.columns is None:
            self.columns = self._columns()
        above, below, numerator, denominator = (column[first:] for column in self.columns)
        numbers = np.array([sizes[symbol] for symbol in self.symbols.sizes], dtype=np.int64)
        top = numerator * np.prod(numbers**above, axis=1)
        bottom = denominator * np.prod(numbers**below, axis=1)
        whole, rest = np.divmod(top, bottom)
        if rest.any():
            constant, exponents = list(self.places)[first + int(np.flatnonzero(rest)[0])]
            product = " ".join(
                f"{symbol}^{power}" for symbol, power in zip(self.symbols.sizes, exponents, strict=True) if power
            )
            sizes_text = ", ".join(f"{symbol} = {size}" for symbol, size in sizes.items())
            raise TwofoldError(f"{constant} {product} is not whole for {sizes_text}")
        return whole.tolist()

    def _columns(self) -> tuple[npt.NDArray[np.int64], ...]:
        exponents = np.array([entry for _, entry in self.places], dtype=np.int64).reshape(len(self.places), -1)
        constants: Sequence[Fraction] = [constant for constant, _ in self.places]
        return (
            np.maximum(exponents, 0),
            np.maximum(-exponents, 0),
            np.array([constant.numerator for constant in constants], dtype=np.int64),
            np.array([constant.denominator for constant in constants], dtype=np.int64),
        )


def _multiplicity(number: int, prime: int) -> int:
    count = 0
    while number % prime == 0:
        number //= prime
        count += 1
    return count


def _is_smooth(number: int) -> bool:
    """Whether only 2, 3, 5 and 7 divide it: constants of formulas are small."""
    for prime in (2, 3, 5, 7):
        while number % prime == 0:
            number //= prime
    return number == 1
