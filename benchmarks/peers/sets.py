"""Sets of cases on 1, 2 and 4 devices, in the order in which they run: the most telling first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.peers.cases import Case

__all__ = ["CASES", "SECOND_CASES", "SETS", "SMOKE_CASES", "case_named"]


def _case(
    model: str, batch: int, reduce_every: str = "micro_batch", compiles: bool = False, products: str = "",
    parts: str = "torch", **degrees: Any,
) -> Case:  # fmt: skip
    return Case(
        model=model, batch=batch, degrees=degrees, reduce_every=reduce_every, compiles=compiles, products=products,
        parts=parts,
    )  # fmt: skip


_ON_1 = (
    _case("8x4096", 4, micro_batch=4, compiles=True),
    _case("24x1024", 4, micro_batch=1, compiles=True),
    _case("8x4096", 4, micro_batch=1),
    _case("4x8192", 4, micro_batch=4, compiles=True),
    _case("moe", 4, micro_batch=4),
    _case("gpt", 8, micro_batch=8),
    _case("24x1024", 16, micro_batch=16),
    _case("moe", 4, micro_batch=1),
    _case("gpt", 8, micro_batch=2),
)
_ON_2 = (
    _case("8x4096", 8, dp=2, micro_batch=4, compiles=True),
    _case("8x4096", 8, pp=2, micro_batch=1, compiles=True),
    _case("24x1024", 8, dp=2, micro_batch=1, compiles=True),
    _case("8x4096", 8, tp=2, micro_batch=4, compiles=True),
    _case("8x4096", 8, dp=2, micro_batch=4, zero=2, compiles=True),
    _case("8x4096", 8, dp=2, micro_batch=1, zero=3),
    _case("8x4096", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("8x4096", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("24x1024", 8, tp=2, micro_batch=1),
    _case("8x4096", 8, dp=2, micro_batch=1),
    _case("24x1024", 8, pp=2, micro_batch=1),
    _case("4x8192", 8, dp=2, micro_batch=4, compiles=True),
    _case("8x4096", 8, dp=2, micro_batch=4, zero=3),
    _case("8x4096", 8, pp=2, micro_batch=1, schedule="interleaved_1f1b", virtual=2),
    _case("8x4096", 8, tp=2, micro_batch=1),
    _case("gpt", 16, dp=2, micro_batch=8),
    _case("moe", 8, dp=2, micro_batch=4),
    _case("8x4096", 8, pp=2, micro_batch=1, schedule="zb_v"),
    _case("24x1024", 8, dp=2, micro_batch=1, zero=3),
    _case("8x4096", 8, dp=2, micro_batch=1, zero=2),
    _case("4x8192", 8, dp=2, micro_batch=4, zero=2),
    _case("gpt", 16, tp=2, micro_batch=8),
    _case("24x1024", 8, tp=2, micro_batch=1, sequence_parallel=True),
    _case("4x8192", 4, tp=2, micro_batch=4, sequence_parallel=True),
    _case("8x4096", 8, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("gpt", 16, pp=2, micro_batch=2),
    _case("8x4096", 8, pp=2, micro_batch=4),
)
_ON_4 = (
    _case("8x4096", 16, dp=4, micro_batch=4, compiles=True),
    _case("8x4096", 16, pp=4, micro_batch=1, compiles=True),
    _case("8x4096", 16, dp=4, micro_batch=4, zero=2, compiles=True),
    _case("4x8192", 16, dp=4, micro_batch=4, compiles=True),
    _case("24x1024", 16, dp=4, micro_batch=1, compiles=True),
    _case("8x4096", 16, tp=4, micro_batch=4, compiles=True),
    _case("8x4096", 16, dp=4, micro_batch=1),
    _case("8x4096", 16, dp=4, micro_batch=1, zero=3),
    _case("8x4096", 16, pp=4, micro_batch=1, schedule="zb_h1"),
    _case("24x1024", 16, pp=4, micro_batch=1),
    _case("8x4096", 16, dp=4, micro_batch=4, zero=3),
    _case("8x4096", 16, tp=4, micro_batch=4, sequence_parallel=True),
    _case("8x4096", 16, pp=4, micro_batch=1, schedule="interleaved_1f1b", virtual=2),
    _case("24x1024", 16, tp=4, micro_batch=1),
    _case("8x4096", 16, dp=2, tp=2, micro_batch=4, zero=2),
    _case("4x8192", 16, dp=4, micro_batch=4, zero=2),
    _case("8x4096", 16, pp=2, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("8x4096", 16, pp=4, micro_batch=1, schedule="zb_v"),
    _case("8x4096", 16, tp=4, micro_batch=1),
    _case("gpt", 32, dp=4, micro_batch=8),
    _case("moe", 16, dp=4, micro_batch=4),
    _case("24x1024", 16, dp=4, micro_batch=1, zero=3),
)

CASES: Mapping[int, tuple[Case, ...]] = {1: _ON_1, 2: _ON_2, 4: _ON_4}
"""Number of devices -> its cases, in the order in which they run."""

_SECOND_ON_1 = (
    _case("6x3584", 4, micro_batch=4),
    _case("6x3584", 4, micro_batch=1),
    _case("6x3584", 6, micro_batch=2),
    _case("6x3584", 3, micro_batch=3),
    _case("16x1536", 8, micro_batch=8),
    _case("16x1536", 8, micro_batch=2),
    _case("16x1536", 24, micro_batch=24),
    _case("3x6144", 2, micro_batch=1),
    _case("3x6144", 3, micro_batch=3),
    _case("32x768", 4, micro_batch=1),
    _case("32x768", 32, micro_batch=32),
    _case("32x768", 16, micro_batch=8),
    _case("4x2560-long", 2, micro_batch=1),
    _case("4x2560-long", 2, micro_batch=2),
    _case("gpt-3072", 6, micro_batch=6),
    _case("gpt-3072", 6, micro_batch=2),
    _case("gpt-3072", 4, micro_batch=1),
    _case("moe-16", 8, micro_batch=8),
    _case("moe-16", 8, micro_batch=2),
)
_SECOND_ON_2 = (
    _case("6x3584", 8, dp=2, micro_batch=4),
    _case("6x3584", 8, pp=2, micro_batch=1),
    _case("6x3584", 8, tp=2, micro_batch=4),
    _case("6x3584", 8, dp=2, micro_batch=2, zero=3),
    _case("16x1536", 16, dp=2, micro_batch=8),
    _case("16x1536", 16, pp=2, micro_batch=2),
    _case("3x6144", 4, dp=2, micro_batch=2, zero=2),
    _case("3x6144", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("gpt-3072", 8, dp=2, micro_batch=4),
    _case("gpt-3072", 8, pp=2, micro_batch=1),
    _case("32x768", 16, dp=2, micro_batch=2),
    _case("4x2560-long", 4, dp=2, micro_batch=1, zero=3),
    _case("moe-16", 16, dp=2, micro_batch=8),
    _case("6x3584", 8, dp=2, micro_batch=4, zero=2),
    _case("6x3584", 8, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("6x3584", 12, pp=2, micro_batch=2),
    _case("6x3584", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("6x3584", 8, tp=2, micro_batch=2, sequence_parallel=True),
    _case("6x3584", 4, dp=2, micro_batch=1),
    _case("16x1536", 32, dp=2, micro_batch=16, zero=2),
    _case("16x1536", 16, dp=2, micro_batch=4, zero=3),
    _case("16x1536", 16, tp=2, micro_batch=8),
    _case("16x1536", 16, pp=2, micro_batch=2, schedule="zb_h1"),
    _case("16x1536", 16, pp=2, micro_batch=4, schedule="interleaved_1f1b", virtual=2),
    _case("3x6144", 4, dp=2, micro_batch=1),
    _case("3x6144", 4, dp=2, micro_batch=2, zero=3),
    _case("3x6144", 2, tp=2, micro_batch=1),
    _case("gpt-3072", 8, dp=2, micro_batch=2, zero=3),
    _case("gpt-3072", 8, tp=2, micro_batch=4),
    _case("gpt-3072", 12, pp=2, micro_batch=3),
    _case("gpt-3072", 16, dp=2, micro_batch=8, zero=2),
    _case("32x768", 64, dp=2, micro_batch=32, zero=2),
    _case("32x768", 32, dp=2, micro_batch=16),
    _case("32x768", 32, pp=2, micro_batch=8),
    _case("32x768", 16, dp=2, micro_batch=8, zero=3),
    _case("4x2560-long", 4, dp=2, micro_batch=2),
    _case("4x2560-long", 4, pp=2, micro_batch=1),
    _case("4x2560-long", 2, tp=2, micro_batch=1, sequence_parallel=True),
    _case("4x2560-long", 4, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("moe-16", 16, dp=2, micro_batch=4),
    _case("moe-16", 8, dp=2, micro_batch=2),
    _case("gpt-3072", 8, tp=2, micro_batch=2),
)

SECOND_CASES: Mapping[int, tuple[Case, ...]] = {1: _SECOND_ON_1, 2: _SECOND_ON_2}
"""More of them, in shapes that no step had before, chosen and predicted before any ran."""

_THIRD_ON_1 = (
    _case("5x5120", 2, micro_batch=2),
    _case("5x5120", 4, micro_batch=1),
    _case("12x2048", 8, micro_batch=8),
    _case("12x2048", 8, micro_batch=2),
    _case("20x1280", 8, micro_batch=8),
    _case("20x1280", 4, micro_batch=1),
    _case("2x7168", 2, micro_batch=2),
    _case("2x7168", 3, micro_batch=1),
    _case("gpt-1792", 8, micro_batch=8),
    _case("gpt-1792", 8, micro_batch=2),
    _case("moe-4", 8, micro_batch=8),
    _case("moe-4", 8, micro_batch=4),
    _case("5x5120", 3, micro_batch=3),
    _case("12x2048", 16, micro_batch=16),
    _case("20x1280", 16, micro_batch=4),
)
_THIRD_ON_2 = (
    _case("5x5120", 4, dp=2, micro_batch=2),
    _case("5x5120", 8, pp=2, micro_batch=1),
    _case("5x5120", 4, tp=2, micro_batch=4),
    _case("5x5120", 4, dp=2, micro_batch=2, zero=2),
    _case("5x5120", 4, dp=2, micro_batch=1, zero=3),
    _case("5x5120", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("5x5120", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("12x2048", 16, dp=2, micro_batch=8),
    _case("12x2048", 16, dp=2, micro_batch=4, zero=3),
    _case("12x2048", 16, pp=2, micro_batch=2),
    _case("12x2048", 16, tp=2, micro_batch=8),
    _case("12x2048", 16, dp=2, micro_batch=8, zero=2),
    _case("12x2048", 16, pp=2, micro_batch=4, schedule="interleaved_1f1b", virtual=2),
    _case("20x1280", 16, dp=2, micro_batch=8),
    _case("20x1280", 16, dp=2, micro_batch=8, zero=3),
    _case("20x1280", 16, pp=2, micro_batch=4),
    _case("20x1280", 8, tp=2, micro_batch=8, sequence_parallel=True),
    _case("2x7168", 4, dp=2, micro_batch=1, zero=2),
    _case("2x7168", 2, tp=2, micro_batch=1),
    _case("2x7168", 4, dp=2, micro_batch=2),
    _case("2x7168", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("gpt-1792", 16, dp=2, micro_batch=8),
    _case("gpt-1792", 16, pp=2, micro_batch=2),
    _case("gpt-1792", 16, dp=2, micro_batch=4, zero=3),
    _case("gpt-1792", 8, tp=2, micro_batch=8),
    _case("moe-4", 16, dp=2, micro_batch=8),
)

_FOURTH_ON_1 = (
    _case("gpt2", 8, micro_batch=8, compiles=True),
    _case("28x640", 16, micro_batch=16, compiles=True),
    _case("28x640", 16, micro_batch=4),
    _case("18x896", 8, micro_batch=8),
    _case("7x3328", 4, micro_batch=2, compiles=True),
    _case("moe-6", 8, micro_batch=8),
)
_FOURTH_ON_2 = (
    _case("gpt2", 16, dp=2, micro_batch=8),
    _case("28x640", 32, dp=2, micro_batch=16, zero=2, compiles=True),
    _case("28x640", 32, pp=2, micro_batch=8),
    _case("18x896", 16, tp=2, micro_batch=8, sequence_parallel=True),
    _case("18x896", 16, dp=2, micro_batch=8, zero=3),
    _case("7x3328", 8, dp=2, micro_batch=4, compiles=True),
    _case("7x3328", 4, tp=2, micro_batch=4),
    _case("moe-6", 16, dp=2, micro_batch=8),
)

_FIFTH_ON_1 = (
    _case("9x2816", 4, micro_batch=4, compiles=True),
    _case("9x2816", 4, micro_batch=1),
    _case("9x2816", 6, micro_batch=2),
    _case("9x2816", 3, micro_batch=3),
    _case("14x1664", 8, micro_batch=8, compiles=True),
    _case("14x1664", 8, micro_batch=2),
    _case("14x1664", 20, micro_batch=20),
    _case("14x1664", 12, micro_batch=4),
    _case("3x5632", 2, micro_batch=2, compiles=True),
    _case("3x5632", 2, micro_batch=1),
    _case("3x5632", 3, micro_batch=3),
    _case("3x2304-long", 1, micro_batch=1),
    _case("3x2304-long", 2, micro_batch=1),
    _case("3x2304-long", 2, micro_batch=2),
    _case("22x512", 8, micro_batch=2),
    _case("22x512", 64, micro_batch=64, compiles=True),
    _case("22x512", 32, micro_batch=16),
    _case("gpt-2560", 8, micro_batch=8, compiles=True),
    _case("gpt-2560", 8, micro_batch=2),
    _case("gpt-2560", 12, micro_batch=12),
    _case("gpt-2560", 6, micro_batch=3),
    _case("moe-12", 8, micro_batch=8),
    _case("moe-12", 8, micro_batch=4),
    _case("moe-12", 4, micro_batch=2),
)
_FIFTH_ON_2 = (
    _case("9x2816", 8, dp=2, micro_batch=4),
    _case("9x2816", 8, dp=2, micro_batch=1),
    _case("9x2816", 8, dp=2, micro_batch=4, zero=2),
    _case("9x2816", 8, dp=2, micro_batch=2, zero=3),
    _case("9x2816", 8, dp=2, micro_batch=1, zero=2, reduce_every="step"),
    _case("9x2816", 8, tp=2, micro_batch=8),
    _case("9x2816", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("14x1664", 16, dp=2, micro_batch=8),
    _case("14x1664", 16, dp=2, micro_batch=2),
    _case("14x1664", 32, dp=2, micro_batch=16, zero=2),
    _case("14x1664", 16, dp=2, micro_batch=4, zero=3),
    _case("14x1664", 16, pp=2, micro_batch=2),
    _case("14x1664", 16, pp=2, micro_batch=4, schedule="zb_h1"),
    _case("14x1664", 32, pp=2, micro_batch=8),
    _case("14x1664", 16, tp=2, micro_batch=16),
    _case("3x5632", 4, dp=2, micro_batch=2),
    _case("3x5632", 4, dp=2, micro_batch=2, zero=2),
    _case("3x5632", 4, dp=2, micro_batch=1, zero=3),
    _case("3x5632", 2, tp=2, micro_batch=2),
    _case("3x5632", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("3x2304-long", 2, dp=2, micro_batch=1),
    _case("3x2304-long", 4, dp=2, micro_batch=2, zero=2),
    _case("3x2304-long", 2, tp=2, micro_batch=1, sequence_parallel=True),
    _case("22x512", 128, dp=2, micro_batch=64),
    _case("22x512", 32, dp=2, micro_batch=16, zero=2),
    _case("22x512", 64, pp=2, micro_batch=16),
    _case("22x512", 32, tp=2, micro_batch=32),
    _case("gpt-2560", 16, dp=2, micro_batch=8),
    _case("gpt-2560", 16, dp=2, micro_batch=4, zero=3),
    _case("gpt-2560", 16, dp=2, micro_batch=8, zero=2),
    _case("gpt-2560", 16, tp=2, micro_batch=8),
    _case("moe-12", 16, dp=2, micro_batch=8),
    _case("moe-12", 8, dp=2, micro_batch=2),
    _case("22x512", 32, dp=2, micro_batch=4, zero=3),
    _case("gpt-2560", 8, tp=2, micro_batch=8, sequence_parallel=True),
    _case("9x2816", 4, tp=2, micro_batch=1),
    _case("moe-12", 16, dp=2, micro_batch=4, zero=2),
    _case("3x5632", 2, dp=2, micro_batch=1),
)

_ONCE: dict[str, Any] = {"zero": 2, "reduce_every": "step"}

_SEVENTH_ON_1 = (
    _case("8x4608", 4, micro_batch=4),
    _case("16x1792", 8, micro_batch=2),
    _case("4x6656", 2, micro_batch=2),
    _case("gpt-3584", 8, micro_batch=8),
    _case("20x768", 16, micro_batch=4),
    _case("moe-10", 8, micro_batch=4),
    _case("8x4608", 4, micro_batch=4, products="float8-rowwise"),
    _case("4x2048-long", 1, micro_batch=1),
    _case("8x4608", 4, micro_batch=4, recompute="memory_bound"),
    _case("8x4608", 2, micro_batch=1),
    _case("16x1792", 16, micro_batch=16),
    _case("4x6656", 2, micro_batch=1),
    _case("gpt-3584", 8, micro_batch=2),
    _case("20x768", 48, micro_batch=48),
    _case("moe-10", 4, micro_batch=4),
    _case("4x2048-long", 2, micro_batch=1),
    _case("16x1792", 16, micro_batch=16, products="float8-rowwise"),
    _case("4x6656", 2, micro_batch=2, products="float8"),
)
_SEVENTH_ON_2 = (
    _case("8x4608", 8, dp=2, micro_batch=4),
    _case("8x4608", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("16x1792", 16, dp=2, micro_batch=4, zero=3),
    _case("4x6656", 4, tp=2, micro_batch=4),
    _case("gpt-3584", 16, dp=2, micro_batch=8, zero=2),
    _case("20x768", 32, pp=2, micro_batch=8),
    _case("8x4608", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("8x4608", 4, dp=2, micro_batch=2, zero=2, products="float8-rowwise"),
    _case("16x1792", 16, pp=2, micro_batch=2, schedule="interleaved_1f1b", virtual=4),
    _case("moe-10", 8, dp=2, micro_batch=4),
    _case("4x2048-long", 2, tp=2, micro_batch=1, sequence_parallel=True),
    _case("16x1792", 16, tp=2, micro_batch=8),
    _case("20x768", 32, dp=2, micro_batch=16),
    _case("gpt-3584", 8, tp=2, micro_batch=8),
    _case("4x6656", 4, dp=2, micro_batch=2, zero=2),
    _case("20x768", 16, tp=2, micro_batch=16),
)
_SEVENTH_ON_4 = (
    _case("8x4608", 16, dp=4, micro_batch=4),
    _case("8x4608", 16, dp=2, tp=2, micro_batch=4, zero=2),
    _case("8x4608", 16, pp=2, dp=2, micro_batch=1, **_ONCE),
    _case("8x4608", 16, pp=4, micro_batch=1),
    _case("8x4608", 8, tp=4, micro_batch=4, sequence_parallel=True),
    _case("16x1792", 32, dp=4, micro_batch=2, zero=3),
    _case("16x1792", 32, pp=4, micro_batch=2, schedule="interleaved_1f1b", virtual=2),
    _case("4x6656", 8, dp=4, micro_batch=2),
    _case("4x6656", 8, dp=2, tp=2, micro_batch=2, zero=3, sequence_parallel=True),
    _case("gpt-3584", 32, dp=4, micro_batch=8),
    _case("20x768", 64, dp=2, tp=2, micro_batch=16, zero=2),
    _case("20x768", 64, pp=4, micro_batch=4),
    _case("moe-10", 16, dp=4, micro_batch=4),
    _case("8x4608", 16, pp=4, micro_batch=1, schedule="zb_h1"),
    _case("8x4608", 8, pp=2, tp=2, micro_batch=2),
    _case("4x2048-long", 4, dp=4, micro_batch=1, zero=2),
    _case("16x1792", 32, pp=2, dp=2, micro_batch=2, **_ONCE),
    _case("gpt-3584", 16, tp=4, micro_batch=8),
    _case("8x4608", 8, tp=4, micro_batch=8),
    _case("16x1792", 16, tp=4, micro_batch=8, sequence_parallel=True),
    _case("4x6656", 4, tp=4, micro_batch=2),
    _case("8x4608", 16, dp=4, micro_batch=2, zero=3),
    _case("20x768", 64, dp=4, micro_batch=16),
    _case("16x1792", 32, dp=4, micro_batch=8),
    _case("gpt-3584", 32, dp=2, tp=2, micro_batch=8, zero=2),
    _case("8x4608", 16, pp=4, micro_batch=1, schedule="interleaved_1f1b", virtual=2),
    _case("4x6656", 8, pp=2, dp=2, micro_batch=1, **_ONCE),
    _case("moe-10", 16, dp=4, micro_batch=4, zero=2),
    _case("4x2048-long", 2, tp=4, micro_batch=1, sequence_parallel=True),
    _case("gpt-3584", 32, pp=4, micro_batch=2),
    _case("20x768", 32, dp=4, micro_batch=4, zero=3),
    _case("16x1792", 32, dp=2, tp=2, micro_batch=8, zero=2),
    _case("4x6656", 8, dp=4, micro_batch=1, zero=2),
    _case("16x1792", 32, pp=4, micro_batch=4, schedule="zb_h1"),
    _case("gpt-3584", 32, pp=2, dp=2, micro_batch=4, **_ONCE),
    _case("8x4608", 16, dp=4, micro_batch=2, zero=2, products="float8-rowwise"),
    _case("20x768", 16, tp=4, micro_batch=16),
    _case("8x4608", 16, pp=4, micro_batch=1, schedule="zb_v"),
    _case("moe-10", 16, pp=2, dp=2, micro_batch=2, **_ONCE),
    _case("8x4608", 16, dp=4, micro_batch=2, zero=2),
    _case("16x1792", 16, pp=2, tp=2, micro_batch=4),
    _case("20x768", 32, pp=2, dp=2, micro_batch=4, **_ONCE),
    _case("gpt-3584", 32, dp=4, micro_batch=4, zero=3),
    _case("4x2048-long", 4, pp=2, dp=2, micro_batch=1, **_ONCE),
    _case("8x4608", 4, tp=4, micro_batch=1),
    _case("8x4608", 8, tp=2, dp=2, micro_batch=4, zero=2, recompute="memory_bound"),
)

_EIGHTH_ON_1 = (
    _case("9x3840", 4, micro_batch=4),
    _case("5x5376", 2, micro_batch=2),
    _case("12x2688", 6, micro_batch=6),
    _case("18x1408", 12, micro_batch=12),
    _case("gpt-2304", 12, micro_batch=12),
    _case("3x3072-long", 1, micro_batch=1),
    _case("9x3840", 4, micro_batch=4, products="float8-rowwise"),
    _case("9x3840", 4, micro_batch=2, recompute="full"),
    _case("18x1408", 8, micro_batch=2),
    _case("moe-14", 8, micro_batch=8),
    _case("12x2688", 4, micro_batch=1),
    _case("5x5376", 2, micro_batch=2, products="float8"),
)
_EIGHTH_ON_2 = (
    _case("9x3840", 8, dp=2, micro_batch=4),
    _case("9x3840", 8, tp=2, micro_batch=8, sequence_parallel=True),
    _case("12x2688", 12, dp=2, micro_batch=6, zero=3),
    _case("5x5376", 4, dp=2, micro_batch=2, zero=2),
    _case("18x1408", 24, dp=2, micro_batch=12),
    _case("12x2688", 16, pp=2, micro_batch=2),
    _case("gpt-2304", 24, dp=2, micro_batch=12, zero=2),
    _case("5x5376", 4, tp=2, micro_batch=4),
    _case("9x3840", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("3x3072-long", 2, dp=2, micro_batch=1),
    _case("12x2688", 16, pp=2, micro_batch=2, schedule="interleaved_1f1b", virtual=2),
    _case("18x1408", 16, tp=2, micro_batch=16),
    _case("9x3840", 8, dp=2, micro_batch=2, **_ONCE),
    _case("moe-14", 16, dp=2, micro_batch=8),
    _case("18x1408", 16, dp=2, micro_batch=2, zero=3),
)
_EIGHTH_ON_4 = (
    _case("9x3840", 16, dp=4, micro_batch=4),
    _case("9x3840", 16, dp=2, tp=2, micro_batch=8, zero=2),
    _case("12x2688", 32, pp=2, dp=2, micro_batch=4, **_ONCE),
    _case("12x2688", 24, tp=4, micro_batch=12),
    _case("5x5376", 8, dp=4, micro_batch=2, zero=3),
    _case("12x2688", 32, pp=4, micro_batch=4),
    _case("18x1408", 48, dp=4, micro_batch=12, zero=2),
    _case("5x5376", 8, dp=2, tp=2, micro_batch=4, zero=3, sequence_parallel=True),
    _case("gpt-2304", 48, dp=4, micro_batch=12),
    _case("18x1408", 48, pp=2, dp=2, micro_batch=6, **_ONCE),
    _case("gpt-2304", 24, tp=4, micro_batch=24),
    _case("12x2688", 32, pp=4, micro_batch=4, schedule="zb_h1"),
)

_NINTH_ON_1 = (
    _case("7x4352", 4, micro_batch=4),
    _case("13x2304", 6, micro_batch=2),
    _case("21x1152", 16, micro_batch=16),
    _case("3x7680", 2, micro_batch=2),
    _case("gpt-2816", 8, micro_batch=8),
    _case("moe-9", 8, micro_batch=8),
    _case("7x4352", 4, micro_batch=1),
    _case("21x1152", 8, micro_batch=2),
    _case("3x2560-long", 1, micro_batch=1),
    _case("13x2304", 8, micro_batch=8, recompute="full"),
    _case("gpt-2816", 8, micro_batch=2),
    _case("3x7680", 3, micro_batch=1),
)
_NINTH_ON_2 = (
    _case("7x4352", 8, dp=2, micro_batch=4),
    _case("7x4352", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("13x2304", 12, dp=2, micro_batch=6, zero=3),
    _case("13x2304", 16, pp=2, micro_batch=2),
    _case("21x1152", 32, dp=2, micro_batch=16),
    _case("3x7680", 4, dp=2, micro_batch=2, zero=2),
    _case("3x7680", 4, tp=2, micro_batch=4),
    _case("gpt-2816", 16, dp=2, micro_batch=8, zero=2),
    _case("moe-9", 16, dp=2, micro_batch=8),
    _case("7x4352", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("21x1152", 16, tp=2, micro_batch=16),
    _case("gpt-2816", 16, pp=2, micro_batch=2, schedule="interleaved_1f1b", virtual=2),
    _case("3x2560-long", 2, dp=2, micro_batch=1, zero=2),
    _case("13x2304", 12, dp=2, micro_batch=3, **_ONCE),
    _case("21x1152", 16, dp=2, micro_batch=2, zero=3),
    _case("gpt-2816", 8, tp=2, micro_batch=8),
)
_NINTH_ON_4 = (
    _case("7x4352", 16, dp=4, micro_batch=4),
    _case("7x4352", 16, dp=2, tp=2, micro_batch=4, zero=2),
    _case("13x2304", 32, pp=2, dp=2, micro_batch=2, **_ONCE),
    _case("3x7680", 8, dp=4, micro_batch=2, zero=3),
    _case("13x2304", 24, tp=4, micro_batch=12, sequence_parallel=True),
    _case("7x4352", 16, pp=4, micro_batch=1, schedule="zb_h1"),
    _case("21x1152", 64, dp=4, micro_batch=16),
    _case("gpt-2816", 32, dp=4, micro_batch=8),
    _case("gpt-2816", 16, tp=4, micro_batch=8),
    _case("moe-9", 32, dp=4, micro_batch=8, zero=2),
    _case("7x4352", 8, pp=2, tp=2, micro_batch=2),
    _case("21x1152", 64, pp=4, micro_batch=4),
    _case("3x7680", 4, tp=4, micro_batch=2, sequence_parallel=True),
    _case("13x2304", 24, dp=4, micro_batch=3, zero=2),
    _case("3x2560-long", 4, dp=4, micro_batch=1),
    _case("21x1152", 32, dp=2, tp=2, micro_batch=8, zero=3, sequence_parallel=True),
)

_TENTH_ON_1 = (
    _case("moe-8", 4, micro_batch=4),
    _case("10x3328", 4, micro_batch=4),
    _case("15x1920", 12, micro_batch=12),
    _case("gpt-1792", 16, micro_batch=4),
    _case("6x4864", 2, micro_batch=1),
)
_TENTH_ON_2 = (
    _case("10x3328", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("15x1920", 16, tp=2, micro_batch=16),
    _case("moe-8", 8, dp=2, micro_batch=4),
    _case("6x4864", 4, dp=2, micro_batch=2, zero=2),
    _case("gpt-1792", 32, tp=2, micro_batch=16),
    _case("10x3328", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("6x4864", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("15x1920", 24, dp=2, micro_batch=12),
    _case("10x3328", 8, tp=2, micro_batch=8),
    _case("gpt-1792", 32, dp=2, micro_batch=8, zero=3),
    _case("15x1920", 16, pp=2, micro_batch=2),
    _case("15x1920", 16, tp=2, micro_batch=8, sequence_parallel=True),
)

_ELEVENTH_ON_1 = (
    _case("17x2176", 8, micro_batch=4),
    _case("26x384", 16, micro_batch=4),
    _case("7x3200", 4, micro_batch=4, products="float8-rowwise"),
    _case("gpt-1536", 16, micro_batch=4),
    _case("4x5888", 2, micro_batch=1),
    _case("7x3200", 4, micro_batch=2),
    _case("3x3584-long", 1, micro_batch=1),
    _case("4x5888", 2, micro_batch=2, products="float8"),
)
_ELEVENTH_ON_2 = (
    _case("17x2176", 16, dp=2, micro_batch=4, zero=3),
    _case("7x3200", 8, tp=2, micro_batch=4, sequence_parallel=True),
    _case("26x384", 32, dp=2, micro_batch=8),
    _case("17x2176", 16, pp=2, micro_batch=2),
    _case("7x3200", 8, dp=2, micro_batch=4, zero=2, products="float8-rowwise"),
    _case("26x384", 32, tp=2, micro_batch=16),
    _case("7x3200", 8, dp=2, micro_batch=4),
    _case("gpt-1536", 16, dp=2, micro_batch=4, zero=3),
    _case("17x2176", 16, tp=2, micro_batch=8),
    _case("26x384", 32, pp=2, micro_batch=4),
    _case("4x5888", 4, dp=2, micro_batch=2, zero=2),
    _case("7x3200", 8, pp=2, micro_batch=1, schedule="zb_h1"),
    _case("26x384", 32, dp=2, micro_batch=8, zero=2),
    _case("4x5888", 4, tp=2, micro_batch=2, sequence_parallel=True),
    _case("gpt-1536", 32, tp=2, micro_batch=16),
    _case("17x2176", 16, dp=2, micro_batch=2, **_ONCE),
    _case("gpt-1536", 32, pp=2, micro_batch=4, schedule="interleaved_1f1b", virtual=2),
    _case("3x3584-long", 2, dp=2, micro_batch=1),
)
_ELEVENTH_ON_4 = (
    _case("17x2176", 32, pp=2, dp=2, micro_batch=2, **_ONCE),
    _case("7x3200", 16, dp=2, tp=2, micro_batch=4, zero=2),
    _case("26x384", 64, pp=2, dp=2, micro_batch=4, **_ONCE),
    _case("gpt-1536", 32, dp=4, micro_batch=4, zero=3),
    _case("26x384", 64, dp=2, tp=2, micro_batch=16, zero=2),
    _case("4x5888", 8, pp=2, dp=2, micro_batch=1, **_ONCE),
    _case("7x3200", 16, dp=4, micro_batch=4),
    _case("gpt-1536", 32, tp=4, micro_batch=16),
)

_HOST_ON_1 = tuple(_case(f"{blocks}x128", batch, micro_batch=1) for batch in (4, 1) for blocks in (24, 6))
_HOST_ON_2 = tuple(
    _case(f"{blocks}x128", batch, **degrees, micro_batch=1)
    for degrees, batches in (
        ({"dp": 2}, (8, 2)), ({"dp": 2, "zero": 3}, (8, 2)), ({"tp": 2}, (4, 1)), ({"pp": 2}, (8,)),
        ({"dp": 2, "zero": 2}, (8, 2)), ({"tp": 2, "sequence_parallel": True}, (4,)),
        ({"pp": 2, "schedule": "zb_h1"}, (8,)), ({"dp": 2, "zero": 2, "reduce_every": "step"}, (8,)),
    )
    for batch in batches for blocks in (24, 6)
)  # fmt: skip

_MEGATRON: dict[str, Any] = {"parts": "megatron"}

_MEGATRON_ON_1 = (
    _case("8x4096", 4, micro_batch=4, **_MEGATRON),
    _case("24x1024", 4, micro_batch=1, **_MEGATRON),
    _case("8x4096", 4, micro_batch=1, **_MEGATRON),
    _case("gpt", 8, micro_batch=8, **_MEGATRON),
)
_MEGATRON_ON_2 = (
    _case("8x4096", 8, tp=2, micro_batch=4, **_MEGATRON),
    _case("24x1024", 8, tp=2, micro_batch=1, sequence_parallel=True, **_MEGATRON),
    _case("8x4096", 8, pp=2, micro_batch=1, schedule="interleaved_1f1b", virtual=2, **_MEGATRON),
)
_MEGATRON_ON_4 = (
    _case("8x4096", 16, dp=4, micro_batch=4, **_MEGATRON),
    _case("8x4096", 16, dp=4, micro_batch=4, zero=1, **_MEGATRON),
    _case("8x4096", 16, tp=4, micro_batch=4, sequence_parallel=True, **_MEGATRON),
    _case("8x4096", 16, pp=4, micro_batch=1, **_MEGATRON),
    _case("8x4096", 16, pp=4, micro_batch=1, schedule="interleaved_1f1b", virtual=2, **_MEGATRON),
    _case("8x4096", 16, pp=2, dp=2, micro_batch=1, **_MEGATRON),
    _case("8x4096", 16, pp=2, tp=2, micro_batch=2, sequence_parallel=True, **_MEGATRON),
    _case("24x1024", 16, dp=4, micro_batch=1, **_MEGATRON),
    _case("4x8192", 16, tp=2, dp=2, micro_batch=2, zero=1, sequence_parallel=True, **_MEGATRON),
)

SETS: Mapping[str, Mapping[int, tuple[Case, ...]]] = {
    "first": CASES,
    "second": SECOND_CASES,
    "third": {1: _THIRD_ON_1, 2: _THIRD_ON_2},
    "fourth": {1: _FOURTH_ON_1, 2: _FOURTH_ON_2},
    "fifth": {1: _FIFTH_ON_1, 2: _FIFTH_ON_2},
    "seventh": {1: _SEVENTH_ON_1, 2: _SEVENTH_ON_2, 4: _SEVENTH_ON_4},
    "eighth": {1: _EIGHTH_ON_1, 2: _EIGHTH_ON_2, 4: _EIGHTH_ON_4},
    "ninth": {1: _NINTH_ON_1, 2: _NINTH_ON_2, 4: _NINTH_ON_4},
    "tenth": {1: _TENTH_ON_1, 2: _TENTH_ON_2},
    "eleventh": {1: _ELEVENTH_ON_1, 2: _ELEVENTH_ON_2, 4: _ELEVENTH_ON_4},
    "host": {1: _HOST_ON_1, 2: _HOST_ON_2},
    "megatron": {1: _MEGATRON_ON_1, 2: _MEGATRON_ON_2, 4: _MEGATRON_ON_4},
}
"""Name -> the cases of a set. The third was chosen after the second had corrected prices of kernels, and predicted
before any of it ran. The fourth has small layers in half of its plans. It, the fifth and the seventh to eleventh
were predicted first too; the sixth is in `benchmarks.accuracy.step_plans`. "host" has steps of which only the host
takes time, in two depths and with several micro-batches or one, so that the time of a block in a step is a difference.
"megatron" compares with Megatron-Core."""

SMOKE_CASES: Mapping[int, tuple[Case, ...]] = {
    1: (
        _case("tiny", 4, micro_batch=2, compiles=True),
        _case("tiny-gpt", 4, micro_batch=2),
        _case("tiny-moe", 4, micro_batch=2),
    ),
    2: (
        _case("tiny", 8, dp=2, micro_batch=2, compiles=True),
        _case("tiny", 8, tp=2, micro_batch=4, compiles=True),
        _case("tiny", 8, pp=2, micro_batch=2, compiles=True),
        _case("tiny", 8, dp=2, micro_batch=2, zero=2),
        _case("tiny", 8, dp=2, micro_batch=2, zero=2, reduce_every="step"),
        _case("tiny", 8, dp=2, micro_batch=2, zero=3, compiles=True),
        _case("tiny", 8, tp=2, micro_batch=4, sequence_parallel=True, compiles=True),
        _case("tiny", 8, pp=2, micro_batch=2, schedule="interleaved_1f1b", virtual=2),
        _case("tiny", 8, pp=2, micro_batch=2, schedule="zb_h1"),
        _case("tiny", 8, pp=2, micro_batch=2, schedule="zb_v"),
        _case("tiny-gpt", 8, tp=2, micro_batch=4),
        _case("tiny-gpt", 8, dp=2, micro_batch=2),
        _case("tiny-moe", 8, dp=2, micro_batch=2),
    ),
    4: (
        _case("tiny", 8, dp=2, tp=2, micro_batch=2, zero=2),
        _case("tiny", 8, pp=2, dp=2, micro_batch=2, zero=2, reduce_every="step"),
        _case("tiny", 8, pp=4, micro_batch=1),
    ),
}
"""The same, so small that CPU ranks run them."""


def case_named(name: str) -> Case:
    """The case of a name.

    Raises:
        KeyError: there is none.
    """
    return {case.name: case for table in (*SETS.values(), SMOKE_CASES) for cases in table.values() for case in cases}[
        name
    ]
