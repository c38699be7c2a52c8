"""The rates of one device, and the seconds of its kernels, with few parameters of physical meaning.

All functions return the device time of one kernel that runs alone on a busy device, without the host time to issue it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, Protocol

from costmodels.machine.sections import Section, check_known, check_share
from costmodels.price.embedding_gradient import EmbeddingGradient
from costmodels.price.power import Power, limited_clock
from costmodels.price.tensor_lists import TensorList
from costmodels.price.tiled import FORMS, ProductTerms, Tiled, alignment_bytes, one_tiled_s, one_tiled_share
from plans.errors import TwofoldError

__all__ = [
    "FORMS", "SUMS_ROWS", "Attention", "Compute", "Rule", "attention_s", "fused_name", "fused_rule", "matrix_rate",
    "matrix_s", "matrix_share", "memory_s", "num_inputs", "rate", "rule_name", "rule_s",
]  # fmt: skip

BY_INPUTS = ("sum", "cross_entropy.forward")
"""Calls whose kernels depend on the number of operands: a sum of more, a loss whose statistic was made before."""


SUMS_ROWS = ("rms_norm.grad1", "layer_norm.grad1")
"""Calls whose cores sum columns row by row: gradients of scales. torch's sums, as of biases, split rows among cores."""


class Attention(Section, frozen=True, kw_only=True):
    """The parameters of fused attention kernels.

    Its arithmetic is 4 x heads x queries x keys x head dim, 2.5 times that backward (Dao 2023, FlashAttention-2,
    section 4.1). Work is cut into tiles of `tile` queries, w of them for each core; with u the time of one tile at one
    key, a whole one takes u (keys + half_keys), and all of them max(1, (1 - quantisation) w + quantisation ceil w)
    times that.

    A causal tile has m = keys - (queries - tile) / 2 keys in the mean, and those on the diagonal are made whole; the
    longest has all. Cores take tiles one by one, so the last ends at most one longest tile after the mean (Graham
    1969): they take causal_cost u max(keys + half_keys, w (m + half_keys) + tail min(1, w) (keys + half_keys)). Fewer
    queries than keys, the last of a sequence that is split, take another kernel, which costs split_cost times that.

    Args:
        forward_efficiency: share of the matrix peak that long sequences reach.
        backward_efficiency: likewise.
        tile: queries per tile.
        quantisation: how much of a full wave of tiles one that is not full costs.
        half_keys: fixed part of a tile, in keys.
        backward_half_keys: likewise, backward.
        half_dim: the rate is halved at this head dim and saturates beyond; the efficiencies are those of 128.
        causal_cost: factor on causal tiles.
        backward_causal_cost: likewise.
        split_cost: factor on causal tiles of fewer queries than keys.
        backward_split_cost: likewise.
        tail: share of a longest tile by which causal tiles end late.
        backward_tail: likewise.
        clock_MHz: clock under load at which the efficiencies were taken; None: not known.
        start_s: fixed part of a forward, next to `kernel_s`.
        backward_start_s: likewise (its kernels before and after).
        kernel: which kernel the figures are of: software that takes an older one than cuDNN's is slower.
    """

    forward_efficiency: float
    backward_efficiency: float
    tile: int = 128
    quantisation: float = 0.0
    half_keys: float = 0.0
    backward_half_keys: float = 0.0
    half_dim: float = 0.0
    causal_cost: float = 1.0
    backward_causal_cost: float = 1.0
    split_cost: float = 1.0
    backward_split_cost: float = 1.0
    tail: float = 0.0
    backward_tail: float = 0.0
    clock_MHz: float | None = None
    start_s: float = 0.0
    backward_start_s: float = 0.0
    kernel: Literal["cudnn", "flash_2", "other"] = "cudnn"

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        for name in ("forward_efficiency", "backward_efficiency", "quantisation", "tail", "backward_tail"):
            check_share(name, getattr(self, name))


class Rule(Section, frozen=True, kw_only=True):
    """The cost of one instruction of twofold's executor: several kernels that move its operands several times.

    Args:
        kernels: least times of a kernel in it (a fit, so not a whole number).
        passes: times the bytes of its operands and results go over the peak bandwidth of the memory; None: its device
            time follows the forms of its class.
        row_s: of a call that sums over rows (`SUMS_ROWS`), seconds for each row of its first operand: a core takes them
            one after the other for its columns.
        dispatch_s: host time to issue all of it; None: that of its class.
    """

    kernels: float = 1.0
    passes: float | None = None
    row_s: float = 0.0
    dispatch_s: float | None = None


class Compute(Section, frozen=True, kw_only=True):
    """The rates of one device.

    A matrix product (m, n, k) takes the time a of its arithmetic and b of its memory traffic, joined with `sharpness` p
    to t = (a^p + b^p)^(1/p): p = 1 adds them, large p is the roofline max(a, b).

    Without `tiled`, a = 2 m n k / rate (1 + half_rows / min(m, n)) (1 + half_depth / k): the rate is halved at these
    sizes and saturates beyond. With it, the cores make tiles of the result (`costmodels.price.tiled`).

    Args:
        matrix_flops_per_s: dtype -> peak rate of matrix products.
        vector_flops_per_s: dtype -> peak rate of everything else.
        memory_Bps: peak memory bandwidth.
        matrix_efficiency: share of the matrix peak that large products reach, on a chip at work.
        dtype_efficiency: share of matrix_efficiency that the products of a dtype reach; 1 by default.
        clock_MHz: clock of a chip at work that makes no products, to which `matrix_efficiency` refers; None: not known.
        clock_drop: share of it lost, for lack of power, in products that reach the peak; in others in proportion.
        step_clock_MHz: as `clock_MHz`, in a training step: a chip's power is limited in the mean over many kernels, so
            its clock is higher where products do not follow each other. None: `clock_MHz`.
        step_clock_drop: as `clock_drop`, in a training step. None: `clock_drop`.
        power: power of the chip, which determines the clock of a step; None: not known, `step_clock_MHz` is taken.
        at_MHz: the clock that prices are for, where the work of a step told it (`costmodels.price.clock`);
            None: that of the fields above. Machine files have none.
        sustained_clock: clock under load, relative to that of the chip the efficiencies were taken on.
        memory_efficiency: share of the memory peak that kernels reach that only stream (add, copy).
        memory_chunk_s: bytes that take t at full bandwidth take t + (memory_chunk_s t)^(1/2): the first come late, and
            cores end apart, as in any pipeline of chunks.
        num_cores: streaming multiprocessors, or cube cores.
        tiled: how the cores make matrix products; None: the smooth form.
        half_rows: see above.
        half_depth: see above.
        sharpness: see above, at least 1.
        form_cost: form of a product -> factor on its arithmetic.
        kernel_cost: call -> factor on the time of its bytes, e.g. {"layer_norm.forward": 1.2}; "call:dtype" for a dtype
            that takes another: arithmetic of an element takes as long in two bytes as in four.
        kernel_start: call -> factor on `kernel_s` of memory-bound kernels.
        kernel_s: the least time of a kernel on the device, which every kernel takes next to its work.
        cache_bytes: bytes that a kernel reads from the cache, because the previous kernel left them there.
        cache_Bps: bandwidth of that; None: everything comes from memory.
        attention: the fused attention kernel; None: priced as a matrix product.
        tensor_lists: update of many tensors at once -> the pace of its blocks; others are priced by their bytes.
        embedding_gradient: torch's gradient of an embedding; None: priced by its bytes.
        rules: cost of an instruction of twofold's executor, by `rule_name`; other stacks have separate kernels.
        longer_in_steps: share by which kernels of twofold's executor and of torch's parts take longer in a step than
            alone, in the median of measured steps (`costmodels.widths.STEP_LONGER`).
    """

    matrix_flops_per_s: dict[str, float]
    vector_flops_per_s: dict[str, float]
    memory_Bps: float
    matrix_efficiency: float = 1.0
    dtype_efficiency: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    clock_MHz: float | None = None
    clock_drop: float = 0.0
    step_clock_MHz: float | None = None
    step_clock_drop: float | None = None
    power: Power | None = None
    at_MHz: float | None = None
    sustained_clock: float = 1.0
    memory_efficiency: float = 1.0
    memory_chunk_s: float = 0.0
    num_cores: int = 1
    tiled: Tiled | None = None
    half_rows: float = 0.0
    half_depth: float = 0.0
    sharpness: float = 2.0
    form_cost: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    kernel_cost: dict[str, float] = {}  # noqa: RUF012
    kernel_start: dict[str, float] = {}  # noqa: RUF012
    kernel_s: float = 0.0
    cache_bytes: int | None = None
    cache_Bps: float | None = None
    attention: Attention | None = None
    tensor_lists: dict[str, TensorList] = {}  # noqa: RUF012
    embedding_gradient: EmbeddingGradient | None = None
    rules: dict[str, Rule] = {}  # noqa: RUF012
    longer_in_steps: float = 0.0

    def __post_init__(self) -> None:
        Section.__post_init__(self)
        if self.sharpness < 1:
            raise TwofoldError(f"sharpness must be at least 1 (1 adds the two times), not {self.sharpness}")
        for name in ("matrix_efficiency", "memory_efficiency", "clock_drop", "longer_in_steps"):
            check_share(name, getattr(self, name))
        if not self.matrix_flops_per_s or not self.vector_flops_per_s:
            raise TwofoldError("matrix_flops_per_s and vector_flops_per_s need a rate for at least one dtype")
        if self.num_cores < 1:
            raise TwofoldError(f"num_cores must be at least 1, not {self.num_cores}")
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
            "use one of these (of a model by name or config.json: --precision) or calibrate the machine for it"
        )
    return min(table.values())


def matrix_rate(compute: Compute, dtype: str, owner: str = "this machine") -> float:
    """The peak rate of a dtype's products, lowered by `dtype_efficiency`.

    Raises:
        TwofoldError: a floating dtype without a rate.
    """
    return rate(compute, "matrix_flops_per_s", dtype, owner) * compute.dtype_efficiency.get(dtype, 1.0)


class Pace(NamedTuple):
    """The clock at which a product runs.

    Args:
        clock: of the chip, relative to that of the one the efficiencies were taken on.
        drop: share of the clock that a product at the peak loses.
    """

    clock: float
    drop: float


def matrix_s(
    compute: Compute, shape: tuple[int, int, int], flops_per_s: float, touched: float, batch: int = 1, form: str = "nt",
    item_bytes: int = 2,
) -> float:  # fmt: skip
    """Seconds of `batch` equal matrix products (m, n, k) that read and write `touched` bytes (see `Compute`)."""
    m, n, k = shape
    if m * n * k * batch == 0:
        return compute.kernel_s
    if compute.power is not None and compute.at_MHz is not None:

        def at_s(clock_MHz: float) -> float:
            pace = Pace(_clock(compute, clock_MHz), 0.0)
            return _at_pace_s(compute, pace, shape, flops_per_s, touched, batch, form, item_bytes)

        share = 2 * batch * m * n * k / flops_per_s / at_s(compute.power.highest_MHz)
        return at_s(limited_clock(compute.power, share, compute.at_MHz))
    drop = compute.clock_drop if compute.step_clock_drop is None else compute.step_clock_drop
    pace = Pace(product_clock(compute), drop)
    return _at_pace_s(compute, pace, shape, flops_per_s, touched, batch, form, item_bytes)


def _at_pace_s(
    compute: Compute, pace: Pace, shape: tuple[int, int, int], flops_per_s: float, touched: float, batch: int,
    form: str, item_bytes: int,
) -> float:  # fmt: skip
    m, n, k = shape
    memory = touched / (compute.memory_Bps * compute.memory_efficiency)
    if compute.tiled is None:
        per_s, cost = flops_per_s * compute.matrix_efficiency * pace.clock, compute.form_cost.get(form, 1.0)
        work = 2 * batch * m * n * k * (1 + compute.half_rows / min(m, n)) * (1 + compute.half_depth / k)
        return compute.kernel_s + join(work / per_s, memory, compute.sharpness) * cost
    model, aligned = compute.tiled, str(alignment_bytes(shape, form, item_bytes))
    memory_cost = model.memory_cost.get(aligned, 1.0)
    made_s = one_tiled_s(shape, _terms(compute, pace.clock, shape, flops_per_s, batch, form, item_bytes), model)
    start_s = (compute.kernel_s + model.start_s + (model.unaligned_start_s if aligned != "16" else 0.0)) / pace.clock
    loaded_s = memory * memory_cost
    full_s = start_s + join(made_s, loaded_s, compute.sharpness)
    made_s /= lower_clock(pace.drop, 2 * batch * m * n * k / (flops_per_s * full_s))
    seconds = start_s + join(made_s, loaded_s, compute.sharpness)
    by_size = model.table is not None and batch == 1 and aligned == "16"
    return seconds * model.table.factor(m, n, k) if by_size and model.table is not None else seconds


def _terms(
    compute: Compute, clock: float, shape: tuple[int, int, int], flops_per_s: float, batch: int, form: str,
    item_bytes: int,
) -> ProductTerms[float]:  # fmt: skip
    assert compute.tiled is not None
    model, aligned = compute.tiled, str(alignment_bytes(shape, form, item_bytes))
    per_s = flops_per_s * compute.matrix_efficiency * clock
    return ProductTerms(
        per_s / compute.num_cores, compute.num_cores, batch, item_bytes, compute.form_cost.get(form, 1.0),
        model.arithmetic_factor(aligned, form), model.memory_cost.get(aligned, 1.0), clock,
    )  # fmt: skip


def matrix_share(
    compute: Compute, shape: tuple[int, int, int], flops_per_s: float, batch: int = 1, form: str = "nt",
    item_bytes: int = 2,
) -> float:  # fmt: skip
    """The share of the cores that products (m, n, k) keep busy: 1 if their tiles are unknown."""
    if compute.tiled is None or min(shape) * batch == 0:
        return 1.0
    terms = _terms(compute, product_clock(compute), shape, flops_per_s, batch, form, item_bytes)
    return one_tiled_share(shape, terms, compute.tiled)


def product_clock(compute: Compute) -> float:
    """The clock at which small products run, relative to that of the chip the efficiencies were taken on.

    >>> rates = {"float32": 1.0}
    >>> product_clock(Compute(matrix_flops_per_s=rates, vector_flops_per_s=rates, memory_Bps=1.0, clock_MHz=1750.0,
    ...                       step_clock_MHz=1925.0))
    1.1
    """
    return _clock(compute, compute.step_clock_MHz)


def _clock(compute: Compute, clock_MHz: float | None) -> float:
    if compute.clock_MHz is None or clock_MHz is None:
        return compute.sustained_clock
    return compute.sustained_clock * clock_MHz / compute.clock_MHz


def lower_clock(drop: float, load: float) -> float:
    """The clock of a product, relative to that of a chip without one.

    It falls by `drop` times the share of the peak that is reached, which is the lower for it: a clock c with
    c = 1 - drop load c.

    Args:
        drop: share of the clock lost at the peak.
        load: share of the peak that the product would reach if the clock did not fall.

    >>> lower_clock(0.25, 1.0)
    0.8
    """
    return 1 / (1 + drop * min(1.0, load))


def memory_s(
    compute: Compute, touched: float, operations_s: float = 0.0, call: str = "", kernels: float = 1, dtype: str = ""
) -> float:
    """Seconds of kernels that move `touched` bytes and whose arithmetic alone takes `operations_s`.

    The cost of its bytes is `kernel_cost` of the call in its dtype ("softmax.forward:float32"), or of the call, or of
    its kind, or 1; that of its start likewise.
    """
    start, cost = _of_kernel(compute.kernel_start, call, dtype), _of_kernel(compute.kernel_cost, call, dtype)
    moved_s = touched * cost / (compute.memory_Bps * compute.memory_efficiency)
    if compute.cache_Bps is not None and compute.cache_bytes and kernels == 1:
        hit = min(1.0, max(0.0, 2 - touched / compute.cache_bytes))
        moved_s = moved_s * (1 - hit) + hit * touched * cost / compute.cache_Bps
    moved_s += math.sqrt(compute.memory_chunk_s * moved_s)
    return kernels * compute.kernel_s * start + max(moved_s, operations_s)


def _of_kernel(factors: Mapping[str, float], call: str, dtype: str) -> float:
    names = (f"{call}:{dtype}", call, call.partition(".")[0])
    return next((factors[name] for name in names if name in factors), 1.0)


def rule_name(call: str, num_inputs: int) -> str:
    """The key of a rule: calls that do something else with more operands have one for each number of them.

    >>> rule_name("sum", 3), rule_name("mul.forward", 2)
    ('sum:3', 'mul.forward')
    """
    return f"{call}:{num_inputs}" if call in BY_INPUTS else call


class _Step(Protocol):
    """A step of a run of fused instructions."""

    @property
    def call(self) -> str:
        """Its call."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Its local shapes, inputs before outputs."""


def fused_rule(steps: Iterable[_Step]) -> str:
    """The key of the rule of a run of fused instructions (`fused_name`).

    Args:
        steps: of the run.
    """
    steps = tuple(steps)
    picks = any(step.call == "cross_entropy.forward" and num_inputs(step.call, step.shapes) == 3 for step in steps)
    return fused_name([step.call for step in steps], picks=picks)


def fused_name(calls: Iterable[str], *, picks: bool = False) -> str:
    """The key of the rule of fused instructions: the operations of its steps besides reading and writing elements.

    A loss runs kernels of its own. The gradients of weights and biases are sums over rows, which take a second kernel.
    A norm's sums along a row are in the one kernel; a layer norm makes two of them.

    Args:
        calls: of its steps.
        picks: whether a loss reads one logit a row, because the statistic of the rows is an operand.

    >>> fused_name(["silu.forward", "mul.forward"]), fused_name(["sum", "rms_norm.grad0", "rms_norm.grad1"])
    ('fused:elements', 'fused:columns')
    >>> fused_name(["gelu.grad0", "linear.grad2"]), fused_name(["add.forward", "layer_norm.forward"])
    ('fused:bias', 'fused:layer_rows')
    """
    calls = set(calls)
    if any(call.startswith("cross_entropy.") for call in calls):
        return "fused:pick" if picks else "fused:loss"
    layer = "layer_" if any(call.startswith("layer_norm.") for call in calls) else ""
    if calls & {"rms_norm.grad1", "layer_norm.grad1", "layer_norm.grad2"}:
        return f"fused:{layer}columns"
    if "linear.grad2" in calls:
        return "fused:bias"
    return f"fused:{layer}rows" if any("norm." in call for call in calls) else "fused:elements"


def num_inputs(call: str, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Number of operands of a call, by its local shapes, as far as `rule_name` asks.

    A loss that keeps the logarithms of its sums, which come after the loss itself, was made from logits and labels;
    one that keeps nothing was made from a statistic as well.

    >>> num_inputs("sum", ((4,), (4,), (4,))), num_inputs("cross_entropy.forward", ((4, 8), (4,), (), (4,)))
    (2, 2)
    """
    if call == "cross_entropy.forward":
        return 3 if shapes and shapes[-1] == () else 2
    return len(shapes) - 1


def rule_s(compute: Compute, rule: Rule, touched: float, times: int = 1, rows: int = 0) -> float:
    """Seconds of an instruction of twofold's executor whose operands and results have `touched` bytes.

    One that does the same for several operands, one behind the other, does it `times` times; `rows` are those that it
    sums over, if it does.

    >>> compute = Compute(matrix_flops_per_s={"float32": 1.0}, vector_flops_per_s={"float32": 1.0}, memory_Bps=100.0)
    >>> rule_s(compute, Rule(kernels=3.0, passes=2.5), 10.0)
    0.25
    """
    assert rule.passes is not None
    return rule.kernels * times * compute.kernel_s + rule.passes * touched / compute.memory_Bps + rule.row_s * rows


def attention_s(
    compute: Compute, queries: tuple[int, int, int], keys: int, values_dim: int, flops_per_s: float, touched: float,
    *, causal: bool, backward: bool = False,
) -> float:  # fmt: skip
    """Seconds of the fused attention kernel, or of its backward alone.

    Args:
        queries: batch x heads, queries, head dim. Causal queries are the last of the sequence: of one that is split
            among ranks the part that sees most keys, for which the others wait.
        keys: number of keys.
        values_dim: head dim of the values.
        flops_per_s: peak rate of matrix products.
        touched: bytes read and written.
    """
    model = compute.attention
    assert model is not None
    heads, length, dim = queries
    if backward:
        efficiency, half, cost, tail = (
            model.backward_efficiency, model.backward_half_keys, model.backward_causal_cost, model.backward_tail
        )  # fmt: skip
    else:
        efficiency, half, cost, tail = model.forward_efficiency, model.half_keys, model.causal_cost, model.tail
    waves, longest = heads * -(-length // model.tile) / compute.num_cores, keys + half
    if causal:
        whole = waves * (min(keys, keys - 0.5 * (length - model.tile)) + half)
        cost *= 1.0 if length >= keys else model.backward_split_cost if backward else model.split_cost
        columns = cost * max(longest, whole + tail * min(1.0, waves) * longest)
    else:
        columns = longest * max(1.0, (1 - model.quantisation) * waves + model.quantisation * math.ceil(waves))
    narrow = (1 + 2 * model.half_dim / (dim + values_dim)) / (1 + model.half_dim / 128)
    flops = 2 * min(model.tile, length) * (dim + values_dim) * (2.5 if backward else 1.0) * columns * narrow
    clock = compute.at_MHz / model.clock_MHz if compute.at_MHz and model.clock_MHz else 1.0
    arithmetic_s = flops * compute.num_cores / (flops_per_s * efficiency * compute.sustained_clock * clock)
    memory = touched / (compute.memory_Bps * compute.memory_efficiency)
    start_s = compute.kernel_s + (model.backward_start_s if backward else model.start_s)
    return start_s + max(arithmetic_s, memory)


def join(first_s: float, second_s: float, sharpness: float) -> float:
    """Two times that overlap in part: between their sum (sharpness 1) and the longer one (see `Compute`)."""
    longer, shorter = max(first_s, second_s), min(first_s, second_s)
    return longer * (1 + (shorter / longer) ** sharpness) ** (1 / sharpness) if longer else 0.0
