"""The grid of matrix products to measure: those of linear layers, full and split, and fine scans across steps in the
rate.

A linear layer with `t` tokens, `i` input and `o` output features runs three products: its forward (m, n, k) = (t, o, i)
in the form "nt", the gradient of its input (t, i, o) in "nn", and that of its weight (o, i, t) in "tn". Tensor
parallelism divides i or o; pipelines and micro-batches divide t, which makes products skinny. A kernel covers its
result with tiles, so the time grows in steps, and some scans are fine enough to resolve them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from costmodels.fit.points import Point
from executor.calibrate.operands import Job, OperandPool, bytes_of
from executor.calibrate.timing import Call

__all__ = ["FLOAT8", "FORMS", "linear_products", "matrix_job", "matrix_jobs"]

FORMS = ("nt", "nn", "tn")

_LINEARS = (  # (features in, features out, how many ranks may split them): of models of 0.1 to 70 billion parameters
    (768, 768, 1),
    (768, 3072, 1),
    (1024, 4096, 2),
    (2048, 2048, 4),
    (2048, 8192, 4),
    (4096, 4096, 8),
    (4096, 1024, 4),
    (4096, 11008, 4),
    (4096, 14336, 8),
    (5120, 13824, 4),
    (8192, 8192, 8),
    (8192, 28672, 8),
    (12288, 12288, 8),
    (2048, 32000, 1),
    (4096, 32000, 2),
    (4096, 128256, 8),
)
_TOKENS = (512, 2048, 4096, 8192)
_WAVES = ((2048, 4096), (4096, 4096), (1024, 8192))  # (n, k) of the fine scans over m
_SKINNY = (1, 2, 4, 8, 16, 32, 64, 96, 192)
_ODD = (  # dims that no tile divides, or rows that are not aligned
    (2048, 50257, 1024),
    (2048, 30522, 1024),
    (2048, 50304, 1024),
    (2000, 3000, 1000),
    (1025, 1025, 1025),
    (4095, 4096, 4096),
    (4096, 4100, 4096),
    (4096, 4096, 4100),
    (777, 555, 333),
)
_BATCHED = (  # (products, m, n, k): attention written out, experts
    (16, 512, 512, 64),
    (32, 2048, 2048, 128),
    (32, 2048, 128, 2048),
    (128, 1024, 1024, 64),
    (128, 1024, 64, 1024),
    (8, 512, 14336, 4096),
    (8, 2048, 4096, 1408),
    (64, 128, 1408, 2048),
    (256, 64, 64, 64),
)
FLOAT8 = ("float8", "float8_precise", "float8_rowwise")
_FLOAT8_SHAPES = (  # the three products of linears of 8 and 70 billion parameters, whole and split
    (8192, 4096, 4096),
    (4096, 14336, 8192),
    (14336, 4096, 8192),
    (16384, 4096, 14336),
    (16384, 6144, 4096),
    (4096, 4096, 16384),
    (8192, 8192, 28672),
    (8192, 28672, 8192),
    (28672, 8192, 8192),
    (16384, 3584, 8192),
    (8192, 16384, 1024),
    (8192, 1024, 16384),
    (2048, 4096, 4096),
    (2048, 14336, 4096),
    (1024, 1024, 8192),
)
_POWERS = (512, 2048, 8192)
_NUM_RANDOM = 90
_NUM_HELD_OUT = 75
_LEAST, _MOST = 16, 32_768


def matrix_jobs(num_processors: int, *, float8: bool = False, seed: int = 20_26) -> list[Job]:
    """All products. The held-out ones are chosen by `seed` first, so that they do not depend on the rest of the grid.

    Args:
        num_processors: multiprocessors of the device, where the scans look for steps.
        float8: whether the device multiplies float8 numbers.
    """
    rng = random.Random(seed)
    held_out = [matrix_job(*_drawn(rng), tier=number % 3, held_out=True) for number in range(_NUM_HELD_OUT)]
    taken = {job.point.key for job in held_out}
    jobs = [*held_out]
    for job in itertools.chain(
        _core(), _linears(), _scans(num_processors), _skinny(), _odd(), _batched(), _other_dtypes(), _scattered(rng),
        _float8() if float8 else (),
    ):  # fmt: skip
        if job.point.key not in taken:
            taken.add(job.point.key)
            jobs.append(job)
    return jobs


def linear_products(tokens: int, features_in: int, features_out: int) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Form and (m, n, k) of the three products of a linear.

    >>> list(linear_products(8, 4, 2))
    [('nt', (8, 2, 4)), ('nn', (8, 4, 2)), ('tn', (2, 4, 8))]
    """
    yield "nt", (tokens, features_out, features_in)
    yield "nn", (tokens, features_in, features_out)
    yield "tn", (features_out, features_in, tokens)


def _core() -> Iterator[Job]:
    for shape in itertools.product(_POWERS, repeat=3):
        for form in FORMS:
            yield matrix_job(form, shape, tier=0 if form == "nt" else 1)


def _linears() -> Iterator[Job]:
    for features_in, features_out, most in _LINEARS:
        splits = [ways for ways in (1, 2, 4, 8) if ways <= most]
        for tokens, ways in itertools.product(_TOKENS, splits):
            for widths in {(features_in, features_out // ways), (features_in // ways, features_out)}:
                for form, shape in linear_products(tokens, *widths):
                    yield matrix_job(form, shape, tier=(1 if tokens == 2048 else 2) + (ways > 2))


def _scans(num_processors: int) -> Iterator[Job]:
    for n, k in _WAVES:
        wave = 128 * num_processors * 256 // n  # rows whose tiles of 128 x 256 are one wave
        rows = {128 * tiles for tiles in range(1, 2 * wave // 128 + 5)}
        rows |= {edge + step for edge in (wave, 2 * wave) for step in (-64, -8, 8, 64)}
        for m in sorted(rows):
            yield matrix_job("nt", (m, n, k), tier=1 if (n, k) == _WAVES[0] else 2)
    for n in range(128, 4096 + 1, 256):
        yield matrix_job("nn", (2048, n, 2048), tier=2)


def _skinny() -> Iterator[Job]:
    for rows, (n, k) in itertools.product(_SKINNY, ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 8192))):
        yield matrix_job("nt", (rows, n, k), tier=1 if (n, k) == (4096, 4096) else 2)
        yield matrix_job("nn", (n, rows, k), tier=2)
    for depth, size in itertools.product((8, 16, 32, 64, 128, 256), (1024, 4096)):
        for form in ("nt", "tn"):
            yield matrix_job(form, (size, size, depth), tier=1 if form == "tn" else 2)


def _odd() -> Iterator[Job]:
    for shape in _ODD:
        for form in FORMS:
            yield matrix_job(form, shape, tier=2)


def _batched() -> Iterator[Job]:
    for batch, *shape in _BATCHED:
        for form in FORMS:
            yield matrix_job(form, tuple(shape), batch=batch, tier=1 if form == "nt" else 2)


def _other_dtypes() -> Iterator[Job]:
    shapes = [(512, 512, 512), (2048, 2048, 2048), (8192, 4096, 4096), (2048, 4096, 11008), (4096, 11008, 2048)]
    shapes += [(128, 4096, 4096), (2048, 1024, 4096), (784, 512, 64)]
    for dtype, shape, form in itertools.product(("float16", "float32", "tf32"), shapes, ("nt", "tn")):
        yield matrix_job(form, shape, dtype=dtype, tier=1 if form == "nt" else 2)


def _float8() -> Iterator[Job]:
    for dtype, shape in itertools.product(FLOAT8, _FLOAT8_SHAPES):
        yield matrix_job("nt", shape, dtype=dtype, tier=1 if shape in _FLOAT8_SHAPES[::2] else 2)


def _scattered(rng: random.Random) -> Iterator[Job]:
    for _ in range(_NUM_RANDOM):
        yield matrix_job(*_drawn(rng), tier=2)


def _drawn(rng: random.Random) -> tuple[str, tuple[int, int, int]]:
    """A form and a shape: log-uniform sizes, most of them multiples of 64, of at most 2 T multiply-adds."""
    while True:
        sizes = []
        for _ in range(3):
            size = _LEAST * (_MOST / _LEAST) ** rng.random()
            step = 64 if size > 128 and rng.random() < 0.8 else 8
            sizes.append(max(step, round(size / step) * step))
        m, n, k = sizes
        if m * n * k <= 2e12:
            return rng.choice(FORMS), (m, n, k)


def matrix_job(
    form: str,
    shape: Sequence[int],
    *,
    batch: int = 1,
    dtype: str = "bfloat16",
    tier: int = 1,
    held_out: bool = False,
) -> Job:
    """The product of one shape and form; `shape` is (m, n, k)."""
    m, n, k = shape
    point = Point(
        kind="matrix", call="mm" if batch == 1 else "bmm", shape=(m, n, k), form=form, batch=batch, dtype=dtype,
        held_out=held_out, seconds=0.0,
    )  # fmt: skip
    make = _float8_products(point) if dtype.startswith("float8") else _products(point)
    return Job(
        point=point, make=make, tier=tier, work=2.0 * batch * m * n * k,
        needs_bytes=batch * bytes_of(dtype, (m, k), (n, k), (m, n)),
    )  # fmt: skip


def _float8_products(point: Point) -> Callable[[OperandPool], list[Call]]:
    """Products of float8 numbers, whose result is bfloat16; the library takes operands of the form "nt" only."""
    m, n, k = point.shape

    def make(pool: OperandPool) -> list[Call]:
        one = torch.ones((), device=pool.device.torch_device)
        scales = (one, one)
        if point.dtype == "float8_rowwise":
            scales = (one.expand(m, 1).contiguous(), one.expand(1, n).contiguous())

        def product() -> Call:
            a, b = pool.tensor(m, k, dtype=point.dtype), pool.tensor(n, k, dtype=point.dtype).mT
            fast = point.dtype != "float8_precise"
            return lambda: torch._scaled_mm(
                a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return [product() for _ in pool.sets(bytes_of(point.dtype, (m, k), (n, k)) + bytes_of("bfloat16", (m, n)))]

    return make


def _products(point: Point) -> Callable[[OperandPool], list[Call]]:
    m, n, k = point.shape
    batched = (point.batch,) if point.batch > 1 else ()
    multiply = torch.bmm if batched else torch.mm
    left, right = {"nt": ((m, k), (n, k)), "nn": ((m, k), (k, n)), "tn": ((k, m), (k, n))}[point.form]

    def make(pool: OperandPool) -> list[Call]:
        torch.set_float32_matmul_precision("high" if point.dtype == "tf32" else "highest")

        def one() -> Call:
            a = pool.tensor(*batched, *left, dtype=point.dtype)
            b = pool.tensor(*batched, *right, dtype=point.dtype)
            a, b = (a.mT if point.form == "tn" else a), (b.mT if point.form == "nt" else b)
            return lambda: multiply(a, b)

        return [one() for _ in pool.sets(point.batch * bytes_of(point.dtype, left, right, (m, n)))]

    return make
