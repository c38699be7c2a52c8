"""The time of a matrix product on cores that compute tiles of its result: waves, split sums, unaligned rows.

`tiled_s` works on arrays, for fits. `one_tiled_s` is the same for a single product and five times as fast.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from costmodels.machine.sections import Section, check_known, check_share
from costmodels.price.size_table import SizeTable
from plans.errors import TwofoldError

__all__ = [
    "ALIGNMENTS",
    "FORMS",
    "SPLITS",
    "TILES",
    "ProductTerms",
    "Tiled",
    "alignment_bytes",
    "one_tiled_s",
    "one_tiled_share",
    "tiled_s",
]

Floats = npt.NDArray[np.float64]

Term = TypeVar("Term", float, Floats)
"""A number, or an array with an entry for each product."""

TILES = (
    (320, 128), (256, 128), (192, 192), (192, 128), (128, 128), (128, 64), (96, 64), (64, 64), (64, 32), (64, 16),
    (64, 8),
)  # fmt: skip
"""Result tiles of 16-bit products: the most frequent of cuBLAS on an H100 by the names of its kernels
(benchmarks/data/kernels-h100-sxm.jsonl.gz). It has some hundred, most of them seldom taken."""

SPLITS = (1, 2, 4, 8, 16, 32)
"""Parts into which a library cuts the sums of a product that has fewer tiles than the device has cores."""

STEP = 64
"""Depth of the sums that a core works on between two loads."""

FORMS = ("nt", "nn", "tn")
"""Storage of a product's operands: nt x[m, k] w[n, k]^T (forward), nn g[m, k] w[k, n], tn g[k, m]^T x[k, n]."""

ALIGNMENTS = (16, 8, 4, 2)
"""Bytes that rows may be aligned to. Bulk copies to a core, and 16-byte loads, need 16 (CUDA C++ Programming Guide,
sections on the tensor map and on asynchronous copies); kernels for less are older and slower."""


class Tiled(Section, frozen=True, kw_only=True):
    """The way cores compute a matrix product (m, n, k).

    The result is cut into T tiles, `num_cores` of which are made at a time, w = T / num_cores; the sums may be cut into
    equal parts as well, which makes as many times more tiles. Of all tiles and cuts the fastest is taken. With (r, c)
    the sides of a tile and d the steps of 64 in its sums, it takes

        tile_s + d step_s + d max(128 r c / rate of a core, 64 (r + c) bytes / core_Bps, hidden_s)
        + r c bytes / core_store_Bps,

    and all of them max(1, (1 - quantisation) w + quantisation ceil w) times that, plus `split_s` where sums are cut.
    Rows that are not aligned to 16 bytes cost a factor on arithmetic and steps, one on loads and on memory, and
    `unaligned_start_s`. Latencies scale with the clock, as arithmetic does.

    Args:
        tiles: (rows, columns); a product may also take them turned.
        start_s: fixed part of a product, next to `kernel_s`.
        tile_s: fixed part of a tile.
        step_s: latency of a step that work does not hide.
        hidden_s: latency of a step that work hides: a load's, over the steps that are loaded ahead.
        core_Bps: loads of the operands by a core.
        core_store_Bps: stores of the result by a core, at the end of a tile.
        unaligned_start_s: fixed part of a product with rows that are not aligned.
        split_s: fixed part of adding the parts of cut sums.
        quantisation: how much of a full wave one that is not full costs.
        arithmetic_cost: bytes that the least aligned rows are aligned to, as text -> factor on arithmetic and steps;
            of one form alone where its name follows ("2 nt").
        memory_cost: likewise, on loads and on memory.
        table: factors on the full time of single products whose rows are aligned; None: none.
    """

    tiles: tuple[tuple[int, int], ...] = TILES
    start_s: float = 0.0
    unaligned_start_s: float = 0.0
    tile_s: float = 0.0
    step_s: float = 0.0
    hidden_s: float = 0.0
    core_Bps: float = 1e15
    core_store_Bps: float = 1e15
    split_s: float = 0.0
    quantisation: float = 1.0
    arithmetic_cost: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    memory_cost: dict[str, float] = {}  # noqa: RUF012
    table: SizeTable | None = None

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        check_share("quantisation", self.quantisation)
        if not self.tiles or any(rows < 1 or columns < 1 for rows, columns in self.tiles):
            raise TwofoldError(f"tiles are {self.tiles}; give at least one, with at least 1 row and 1 column each")
        known = [str(each) for each in ALIGNMENTS]
        for name in self.memory_cost:
            check_known("alignment in bytes", name, known)
        for name in self.arithmetic_cost:
            check_known("alignment in bytes", name, [*known, *(f"{each} {form}" for each in known for form in FORMS)])

    def arithmetic_factor(self, aligned: str, form: str) -> float:
        """The factor on arithmetic of products of a form whose rows are aligned to that many bytes."""
        return self.arithmetic_cost.get(f"{aligned} {form}", self.arithmetic_cost.get(aligned, 1.0))


def alignment_bytes(shape: tuple[int, int, int], form: str, item_bytes: int) -> int:
    """Bytes, at most 16, that all rows in memory of both operands and the result begin at multiples of.

    >>> alignment_bytes((7, 4096, 4100), "nt", 2), alignment_bytes((7, 4096, 4100), "tn", 2)
    (8, 2)
    """
    m, n, k = shape
    rows = (m, n) if form == "tn" else (k, n)
    return min(16, *((row * item_bytes) & -(row * item_bytes) for row in rows))


class ProductTerms(NamedTuple, Generic[Term]):
    """The properties of a product that its time depends on, besides its shape; arrays for many products at once.

    Args:
        core_flops_per_s: rate of one core.
        num_cores: number of cores of the device.
        batch: equal products in each call.
        item_bytes: of an element.
        form_cost: factor on the arithmetic.
        arithmetic_cost: factor on arithmetic and steps (alignment).
        memory_cost: factor on loads (alignment).
        clock: relative to that of the latencies; the rate of a core has it already.
    """

    core_flops_per_s: Term
    num_cores: int
    batch: Term
    item_bytes: Term
    form_cost: Term
    arithmetic_cost: Term
    memory_cost: Term
    clock: Term


def tiled_s(shapes: Floats, terms: ProductTerms[Floats], model: Tiled) -> Floats:
    """Seconds of the arithmetic of products, without `start_s`, by the fastest way to cut each.

    Args:
        shapes: (m, n, k) of each product, [products, 3].
        terms: of the products.
        model: the device's.
    """
    num_cores = terms.num_cores
    m, n, k = (shapes[:, at, np.newaxis] for at in range(3))
    rows, columns, parts = _cuts(model.tiles)
    batch, item_bytes, core_flops_per_s, form_cost, arithmetic_cost, memory_cost, clock = (
        np.reshape(value, (-1, 1))
        for value in (
            terms.batch,
            terms.item_bytes,
            terms.core_flops_per_s,
            terms.form_cost,
            terms.arithmetic_cost,
            terms.memory_cost,
            terms.clock,
        )
    )
    steps = np.ceil(k / (STEP * parts))
    made_s = form_cost * arithmetic_cost * (2 * STEP * rows * columns) / core_flops_per_s
    loaded_s = memory_cost * item_bytes * (STEP * (rows + columns)) / model.core_Bps
    stored_s = item_bytes * (rows * columns) / model.core_store_Bps
    busy_s = np.maximum(np.maximum(made_s, loaded_s), arithmetic_cost * model.hidden_s / clock)
    each_s = steps * (busy_s + arithmetic_cost * model.step_s / clock) + model.tile_s / clock + stored_s
    waves = batch * np.ceil(m / rows) * np.ceil(n / columns) / num_cores
    taken = (parts == 1) | (waves < 1)
    waves = waves * parts
    waves = np.maximum(1.0, (1 - model.quantisation) * waves + model.quantisation * np.ceil(waves))
    all_s = waves * each_s + np.where(parts > 1, model.split_s / clock, 0.0)
    return np.asarray(np.min(np.where(taken, all_s, np.inf), axis=1))


def one_tiled_s(shape: tuple[int, int, int], terms: ProductTerms[float], model: Tiled) -> float:
    """`tiled_s` of one product, whose terms are numbers."""
    return _fastest(shape, terms, model)[0]


def one_tiled_share(shape: tuple[int, int, int], terms: ProductTerms[float], model: Tiled) -> float:
    """The share of the cores that are busy while one product is made: its waves over those that it takes the time of.

    >>> terms = ProductTerms(1e12, 100, 1, 2, 1.0, 1.0, 1.0, 1.0)
    >>> one_tiled_share((128, 50 * 128, 64), terms, Tiled(tiles=((128, 128),)))
    0.5
    """
    return _fastest(shape, terms, model)[1]


def _fastest(shape: tuple[int, int, int], terms: ProductTerms[float], model: Tiled) -> tuple[float, float]:
    """Seconds of the fastest way to cut a product, and the share of the cores that it keeps busy."""
    core_flops_per_s, num_cores, batch, item_bytes, form_cost, arithmetic_cost, memory_cost, clock = terms
    m, n, k = shape
    q, best_s, share = model.quantisation, math.inf, 1.0
    rate_s, step_s = form_cost * arithmetic_cost * 2 * STEP / core_flops_per_s, arithmetic_cost * model.step_s / clock
    load_s, store_s = memory_cost * item_bytes * STEP / model.core_Bps, item_bytes / model.core_store_Bps
    hidden_s, split_s = arithmetic_cost * model.hidden_s / clock, model.split_s / clock
    for rows, columns in _turned(model.tiles):
        each_s = max(rate_s * rows * columns, load_s * (rows + columns), hidden_s) + step_s
        once_s = model.tile_s / clock + store_s * rows * columns
        tiles = batch * -(-m // rows) * -(-n // columns) / num_cores
        for parts in SPLITS if tiles < 1 else SPLITS[:1]:
            steps, waves = -(-k // (STEP * parts)), tiles * parts
            taken = max(1.0, (1 - q) * waves + q * math.ceil(waves))
            all_s = taken * (steps * each_s + once_s) + (split_s if parts > 1 else 0.0)
            if all_s < best_s:
                best_s, share = all_s, waves / taken
            if steps == 1:
                break
    return best_s, share


@lru_cache(maxsize=64)
def _turned(tiles: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted({*tiles, *((columns, rows) for rows, columns in tiles)}))


@lru_cache(maxsize=64)
def _cuts(tiles: tuple[tuple[int, int], ...]) -> tuple[Floats, Floats, Floats]:
    cuts = [(rows, columns, parts) for rows, columns in _turned(tiles) for parts in SPLITS]
    rows, columns, parts = np.array(cuts, dtype=float).T
    return rows[np.newaxis], columns[np.newaxis], parts[np.newaxis]
