"""The rates of one device, and the seconds of its kernels: few parameters, each with a physical meaning.

All functions give device time of one kernel alone on a device at work, without the host that issues it.
"""

from __future__ import annotations

import math
from functools import lru_cache

from costmodels.sections import Section, check_known, check_share
from plans.errors import TwofoldError

__all__ = ["FORMS", "Attention", "Compute", "attention_s", "matrix_s", "memory_s", "rate"]

FORMS = ("nt", "nn", "tn")
"""Storage of a product's operands: nt x[m, k] w[n, k]^T (forward), nn g[m, k] w[k, n], tn g[k, m]^T x[k, n]."""

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Parts into which a library may cut the sums of a product that has fewer tiles than the device has cores."""


class Attention(Section, frozen=True, kw_only=True):
    """The fused attention kernel.

    Its arithmetic is 4 x heads x queries x keys x head dim, 2.5 times that backward (Dao 2023, FlashAttention-2,
    section 4.1). Work is cut into tiles of `tile` queries; of a causal one the tiles on the diagonal are made whole,
    which leaves (1 + tile / keys) / 2 of it.

    Args:
        forward_efficiency: share of the matrix peak that long sequences reach.
        backward_efficiency: likewise.
        tile: queries per tile.
        half_keys: the rate is halved at this number of keys, and saturates beyond.
        backward_half_keys: likewise, backward.
        half_dim: likewise over head dims; the efficiencies are those of 128.
        start_s: fixed part of a forward, beside `kernel_s`.
        backward_start_s: likewise (its kernels before and after).
    """

    forward_efficiency: float
    backward_efficiency: float
    tile: int = 128
    half_keys: float = 0.0
    backward_half_keys: float = 0.0
    half_dim: float = 0.0
    start_s: float = 0.0
    backward_start_s: float = 0.0

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        check_share("forward_efficiency", self.forward_efficiency)
        check_share("backward_efficiency", self.backward_efficiency)


class Compute(Section, frozen=True, kw_only=True):
    """One device's rates.

    A matrix product (m, n, k) takes the time a of its arithmetic and b of its memory traffic, joined with `sharpness` p
    to t = (a^p + b^p)^(1/p): p = 1 adds them, large p is the roofline max(a, b).

    Without `tiles`, a = 2 m n k / rate (1 + half_rows / min(m, n)) (1 + half_depth / k): the rate is halved at these
    sizes and saturates beyond. With `tiles` the result is cut into tiles of one of these sizes, T in all, of which
    `num_cores` are made at a time; whichever tile and whichever cut of the sums is fastest is taken. A wave that is
    not full costs as `quantisation` q of a full one: a = ((1-q) w + q ceil w) 2 tile_area (k + half_depth) num_cores /
    rate with w = T / num_cores, and a tile of (r, c) reads its operands at a cost of half_tile (1/r + 1/c) of its
    arithmetic.

    Sustained work makes the chip lower its clock: t (1 + warm_share t / (t + warm_s)).

    Args:
        matrix_flops_per_s: dtype -> peak rate of matrix products.
        vector_flops_per_s: dtype -> peak rate of everything else.
        memory_Bps: peak memory bandwidth.
        matrix_efficiency: share of the matrix peak that large products reach before the chip is warm.
        memory_efficiency: share of the memory peak that large kernels reach.
        num_cores: streaming multiprocessors, or cube cores.
        tiles: (rows, columns) of result tiles; a product may also take them turned.
        half_tile: see above.
        quantisation: see above, at most 1.
        half_rows: see above.
        half_depth: see above.
        sharpness: see above, at least 1.
        warm_share: see above.
        warm_s: see above.
        form_cost: form of a product -> factor on its time.
        kernel_cost: call -> factor on the time of its bytes, e.g. {"layer_norm.forward": 1.2}.
        kernel_s: the least time of a kernel on the device, which every kernel takes beside its work.
        cache_bytes: what a kernel reads of the cache rather than of memory, when the kernel before left it there.
        cache_Bps: bandwidth of that; None: everything comes from memory.
        attention: the fused attention kernel; None: priced as a matrix product.
    """

    matrix_flops_per_s: dict[str, float]
    vector_flops_per_s: dict[str, float]
    memory_Bps: float
    matrix_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    num_cores: int = 1
    tiles: tuple[tuple[int, int], ...] = ()
    half_tile: float = 0.0
    quantisation: float = 1.0
    half_rows: float = 0.0
    half_depth: float = 0.0
    sharpness: float = 2.0
    warm_share: float = 0.0
    warm_s: float = 1e-3
    form_cost: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    kernel_cost: dict[str, float] = {}  # noqa: RUF012
    kernel_s: float = 0.0
    cache_bytes: int | None = None
    cache_Bps: float | None = None
    attention: Attention | None = None

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.sharpness < 1:
            raise TwofoldError(f"sharpness is {self.sharpness}; it is at least 1 (1 adds the two times)")
        for name in ("matrix_efficiency", "memory_efficiency", "quantisation"):
            check_share(name, getattr(self, name))
        if not self.matrix_flops_per_s or not self.vector_flops_per_s:
            raise TwofoldError("matrix_flops_per_s and vector_flops_per_s need a rate for at least one dtype")
        if self.num_cores < 1:
            raise TwofoldError(f"num_cores is {self.num_cores}; it is at least 1")
        if any(rows < 1 or columns < 1 for rows, columns in self.tiles):
            raise TwofoldError(f"tiles are {self.tiles}; rows and columns are at least 1")
        for form in self.form_cost:
            check_known("form of a matrix product", form, FORMS)


def rate(compute: Compute, name: str, dtype: str, owner: str = "this machine") -> float:
    """The peak rate of a dtype; integers and booleans are only moved and compared, at the lowest rate.

    Raises:
        TwofoldError: a floating dtype without a rate.
    """
    table: dict[str, float] = getattr(compute, name)
    if dtype in table:
        return table[dtype]
    if dtype.startswith(("float", "bfloat")):
        raise TwofoldError(
            f"machine {owner!r} has no {name} for {dtype!r}, only for {', '.join(table)}; "
            "use one of these dtypes or calibrate the machine for it"
        )
    return min(table.values())


def matrix_s(
    compute: Compute, shape: tuple[int, int, int], flops_per_s: float, touched: float, batch: int = 1, form: str = "nt"
) -> float:
    """Seconds of `batch` equal matrix products (m, n, k) that read and write `touched` bytes (see `Compute`)."""
    m, n, k = shape
    if m * n * k * batch == 0:
        return compute.kernel_s
    if compute.tiles:
        work = tiled_work(m, n, k, batch, compute.num_cores, compute.tiles, compute.half_tile, compute.quantisation,
                          compute.half_depth)  # fmt: skip
    else:
        work = 2 * batch * m * n * k * (1 + compute.half_rows / min(m, n)) * (1 + compute.half_depth / k)
    arithmetic_s = work / (flops_per_s * compute.matrix_efficiency)
    memory = touched / (compute.memory_Bps * compute.memory_efficiency)
    alone_s = join(arithmetic_s, memory, compute.sharpness) * compute.form_cost.get(form, 1.0)
    return compute.kernel_s + alone_s * (1 + compute.warm_share * alone_s / (alone_s + compute.warm_s))


@lru_cache(maxsize=65_536)
def tiled_work(
    m: int, n: int, k: int, batch: int, cores: int, tiles: tuple[tuple[int, int], ...], half_tile: float,
    quantisation: float, half_depth: float,
) -> float:  # fmt: skip
    """Floating-point operations that the product takes as long as, were all cores busy all the time (see `Compute`)."""
    rows, columns = max(tiles, key=lambda tile: tile[0] * tile[1])
    best, base = math.inf, 1 + half_tile * (1 / rows + 1 / columns)
    turned = {(columns, rows) for rows, columns in tiles}
    for rows, columns in {*tiles, *turned}:
        count = batch * -(-m // rows) * -(-n // columns)
        each = 2 * rows * columns * (1 + half_tile * (1 / rows + 1 / columns)) / base
        for parts in SPLITS:
            waves = count * parts / cores
            waves = (1 - quantisation) * waves + quantisation * math.ceil(waves)
            best = min(best, waves * cores * each * (k / parts + half_depth * (1 if parts == 1 else 2)))
            if count * parts >= cores or k / parts < 4 * rows:
                break
    return best


def memory_s(compute: Compute, touched: float, operations_s: float = 0.0, call: str = "", kernels: int = 1) -> float:
    """Seconds of kernels that move `touched` bytes and whose arithmetic alone takes `operations_s`.

    The cost of its bytes is `kernel_cost` of the call, or of its kind, or 1.
    """
    cost = compute.kernel_cost.get(call, compute.kernel_cost.get(call.partition(".")[0], 1.0))
    moved_s = touched * cost / (compute.memory_Bps * compute.memory_efficiency)
    if compute.cache_Bps is not None and compute.cache_bytes and kernels == 1:
        hit = min(1.0, max(0.0, 2 - touched / compute.cache_bytes))
        moved_s = moved_s * (1 - hit) + hit * touched * cost / compute.cache_Bps
    return kernels * compute.kernel_s + max(moved_s, operations_s)


def attention_s(
    compute: Compute, queries: tuple[int, int, int], keys: int, values_dim: int, flops_per_s: float, touched: float,
    *, causal: bool, backward: bool = False,
) -> float:  # fmt: skip
    """Seconds of the fused attention kernel, or of its backward alone.

    Args:
        queries: batch x heads, queries, head dim.
        keys: number of keys.
        values_dim: head dim of the values.
        flops_per_s: peak rate of matrix products.
        touched: bytes read and written.
    """
    model = compute.attention
    assert model is not None
    heads, length, dim = queries
    share = min(1.0, 0.5 * (1 + model.tile / keys)) if causal and length == keys else 1.0
    flops = 2 * heads * length * keys * (dim + values_dim) * share * (2.5 if backward else 1.0)
    half = model.backward_half_keys if backward else model.half_keys
    efficiency = model.backward_efficiency if backward else model.forward_efficiency
    waves = heads * -(-length // model.tile) / compute.num_cores
    filled = waves / ((1 - compute.quantisation) * waves + compute.quantisation * math.ceil(waves))
    narrow = (1 + 2 * model.half_dim / (dim + values_dim)) / (1 + model.half_dim / 128)
    arithmetic_s = flops * (1 + half / keys) * narrow / (flops_per_s * efficiency * filled)
    memory = touched / (compute.memory_Bps * compute.memory_efficiency)
    start_s = compute.kernel_s + (model.backward_start_s if backward else model.start_s)
    return start_s + max(arithmetic_s, memory)


def join(first_s: float, second_s: float, sharpness: float) -> float:
    """Two times that overlap in part: between their sum (sharpness 1) and the longer one (see `Compute`)."""
    longer, shorter = max(first_s, second_s), min(first_s, second_s)
    return longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness) if longer else 0.0
