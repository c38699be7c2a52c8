"""Transfers dimensionless figures of a calibrated device to one that was never measured.

Both devices get equal shares of a peak, tiles, quantisation, sharpness, bytes per kernel, seconds of latency, and
shares of the link that a collective reaches. The depth at which a product reaches half of its rate corresponds to a
latency that a core has to fill with work, so it grows with the rate of one core. If a figure of the new device is cited
(typical or best matrix products, an attention rate, a measured bus bandwidth), the efficiency is chosen so that the
form gives this figure. For the best products that were found by search, the form gives the same share as on the
calibrated device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from costmodels.machine.catalogue import CitedProduct, Device
from costmodels.machine.sections import Collective, Interval, Provenance
from costmodels.price.communication import with_unmeasured
from costmodels.price.compute import Compute, Rule, matrix_s
from costmodels.price.tiled import Tiled
from costmodels.widths import CARRIED, NINETY

__all__ = ["anchored", "at_sustained_clock", "carried"]

_ONE_KERNEL = (
    "accumulate", "add.", "adamw.update", "cast", "dropout.", "embedding.", "flat_pack", "flat_unpack",
    "gelu.", "layer_norm.forward", "mul.", "relu.", "rms_norm.forward", "silu.", "slice", "softmax.forward", "zero_.",
)  # fmt: skip

PASSES: Mapping[str, float] = dict.fromkeys(_ONE_KERNEL, 1.0) | {
    "cross_entropy.forward": 7.0, "cross_entropy.grad0": 5.5, "layer_norm.grad0": 5 / 3,
    "rms_norm.grad0": 5 / 3, "rms_norm_by_hand.forward": 9.0, "rms_norm_by_hand.grad0": 38 / 3, "rope_by_": 1.0,
    "silu_mul": 5 / 3,
}  # fmt: skip
"""Prefix of a call -> how often its kernels move the bytes that its price counts (torch 2.11,
aten/src/ATen/native/cuda). Calls of one kernel, or of several that handle different tensors, move them once, and rotary
positions all that are counted. Written out, a norm makes float copies: 36 bytes an element instead of 4, backward 76 of
6. The gradient of a norm's weight reads two of three tensors again. A loss with float copies moves 14 bytes of 2 and 22
of 4 (`simulator.stacks.torch_native`)."""


def carried(device: Device, source: Device, *, date: str) -> Device:
    """`device` with its uncited efficiencies taken from `source`; cited, derived and measured figures stay.

    Args:
        device: with cited peaks; its provenance marks its own entries.
        source: a calibrated device.
        date: of the carrying.
    """
    transfer = _Transfer(device, source, date)
    values = {
        "compute": transfer.compute(),
        "collectives": transfer.collectives(),
        "overlap": transfer.whole("overlap", "rates of pairs"),
        "dispatch_s": transfer.whole("dispatch_s", "the host's"),
        "spreads": transfer.spreads(),
        "price_intervals": transfer.price_intervals(),
    }
    return msgspec.structs.replace(device, **values, provenance=transfer.provenance)


class _Transfer:
    """Figures of `source` for `device`, part by part; `provenance` has the source of each."""

    def __init__(self, device: Device, source: Device, date: str) -> None:
        self.device, self.source, self.date = device, source, date
        self.own = {entry for entry, known in device.provenance.items() if "carried over" not in known.source}
        self.provenance = {entry: known for entry, known in device.provenance.items() if entry in self.own}
        self.has_same_cores = _same_cores(device.compute, source.compute)

    def assume(self, entry: str, what: str) -> None:
        """Record that `entry` is taken from the source."""
        known = self.source.provenance.get(entry)
        there = f" (there {known.status}: {known.source})" if known is not None and known.status != "measured" else ""
        text = f"carried over from {self.source.name}: {what}{there}"
        text += "; not run on Ascend" if self.device.device == "npu" else ""
        self.provenance[entry] = Provenance(status="assumed", source=text, date=self.date)

    def whole(self, field: str, what: str) -> Any:
        """A field of the source, unless the device has its own."""
        if field in self.own:
            return getattr(self.device, field)
        self.assume(field, what)
        return getattr(self.source, field)

    def compute(self) -> Compute:
        """Rates: shares of the device's own peaks."""
        here, there = self.device.compute, self.source.compute
        faster = _core_rate(here) / _core_rate(there)
        depth = "a latency that the rate of a core turns into depth"
        cores = "what one kernel takes beyond its bytes is its cores' where they are equal"
        tiles = "tiles of the library and latencies; bytes per second of a core as its rate"
        figures: dict[str, tuple[str, Any]] = {name: (what, getattr(there, name)) for name, what in _EQUAL.items()}
        figures["dtype_efficiency"] = ("what other dtypes reach of it", _of_dtypes(here, there))
        figures["half_depth"] = (depth, there.half_depth * faster)
        figures["tiled"] = (tiles, _tiled(here, there))
        figures["kernel_cost"] = (cores, _core_bound(there.kernel_cost, here, there))
        figures["rules"] = (f"kernels and passes of the executor's own instructions; {cores}", _rules(here, there))
        figures["attention"] = ("share of the peak", there.attention)
        figures["tensor_lists"] = ("what a block takes beside its bytes", there.tensor_lists)
        figures["embedding_gradient"] = ("its cores' where they are equal", there.embedding_gradient)
        values = {}
        for name, (what, value) in figures.items():
            if f"compute.{name}" not in self.own:
                values[name] = value
                self.assume(f"compute.{name}", what)
        compute = msgspec.structs.replace(here, **values)
        if typical := self.device.typical_products:
            self.assume("compute.matrix_efficiency", "so that the form gives typical_products in the geometric mean")
            return anchored(compute, typical)
        best = self.device.best_product
        if best is None:
            return self._at_limit(compute)
        ordinary = 1.0
        if self.source.best_product is not None:
            ordinary = _form_rate(self.source) / self.source.best_product.flops_per_s
        self.assume("compute.matrix_efficiency", f"so that the form gives {ordinary:.2f} of best_product, as there")
        return self._at_limit(
            anchored(compute, [msgspec.structs.replace(best, flops_per_s=ordinary * best.flops_per_s)])
        )

    def _at_limit(self, compute: Compute) -> Compute:
        """`compute` at the clock that the device's own power leaves it under products."""
        limit_W, power = self.device.limit_W, self.source.compute.power
        if limit_W is None or power is None:
            return compute
        own = (self.source.compute.clock_MHz or power.highest_MHz) / power.highest_MHz
        here = _clock_at_limit(compute, limit_W, self.source)
        there = _clock_at_limit(self.source.compute, power.limit_W, self.source)
        clock = min(1.0, own * here / there) / own
        self.assume("compute.sustained_clock", f"energy of an operation, which {limit_W:g} W limit")
        if here >= 1:
            compute = msgspec.structs.replace(compute, clock_drop=0.0)
        return at_sustained_clock(compute, clock)

    def collectives(self) -> dict[str, Collective]:
        """Latencies, and the share of its links that each collective reaches."""
        models = dict(self.device.collectives)
        for call, model in self.source.collectives.items():
            if not {f"collectives.{call}", "collectives"} & self.own:
                is_cited = f"collectives.{call}.link_fraction" in self.own
                chunk_s = models[call].chunk_s if "collectives.chunk_s" in self.own else model.chunk_s
                models[call] = _scaled(model, models[call], self.device.per_node, keep_fraction=is_cited)
                models[call] = msgspec.structs.replace(models[call], chunk_s=chunk_s)
                self.assume(f"collectives.{call}", "latencies; the share of its links unless cited")
        return models

    def spreads(self) -> dict[str, float]:
        """Wider than in the source, by what carrying over has missed before."""
        if "spreads" in self.own:
            return self.device.spreads
        what = "joined with what carrying over missed of devices left out"
        spreads = {name: self._wider_spread(name, spread) for name, spread in self.source.spreads.items()}
        if apart := self.products_apart():
            what += f"; published products differ by {apart:.2f} in logarithms, half of which is the spread of products"
            spreads["matrix"] = round(math.hypot(spreads["matrix"], apart / 2), 4)
        self.assume("spreads", what)
        return spreads

    def products_apart(self) -> float:
        """Logarithm of the fastest published product over typical ones, in the form's own terms; 0: not both known.

        The fastest product counts at the share of it that the form has on the source, as in `compute`.
        """
        device, best = self.device, self.device.best_product
        if best is None or self.source.best_product is None or not device.typical_products:
            return 0.0
        ordinary = _form_rate(self.source) / self.source.best_product.flops_per_s
        known = msgspec.structs.replace(device, compute=anchored(self.compute(), device.typical_products))
        return abs(math.log(ordinary * best.flops_per_s / _form_rate(known)))

    def _wider_spread(self, name: str, spread: float) -> float:
        # of what the source itself was given from elsewhere on equal cores, the same was missed already
        if self.has_same_cores and _is_carried(self.source, f"spreads.{name}"):
            return spread
        return round(math.hypot(spread, CARRIED[name]), 4)

    def price_intervals(self) -> dict[str, Interval]:
        """Widths from the spreads."""
        if "price_intervals" in self.own:
            return self.device.price_intervals
        self.assume("price_intervals", "as wide as the spreads say")
        wider = {**CARRIED, "matrix": math.hypot(CARRIED["matrix"], self.products_apart() / 2)}
        if "spreads" in self.own:
            wider = self.device.spreads
        return {
            name: Interval(low=_wider(known.low, wider[name]), high=_wider(known.high, wider[name]))
            for name, known in self.source.price_intervals.items()
        }


def _clock_at_limit(compute: Compute, limit_W: float, source: Device) -> float:
    """The clock, over the highest one, at which large products draw `limit_W` if each operation takes as much energy as
    on `source` (`costmodels.price.power`); above 1 where the limit is out of reach."""
    power = source.compute.power
    assert power is not None
    idle_W = power.idle_W * compute.num_cores / source.compute.num_cores
    faster = compute.matrix_flops_per_s["float16"] / source.compute.matrix_flops_per_s["float16"]
    full_W = power.matrix_W * faster * source.compute.matrix_efficiency
    return float(max(1e-3, (limit_W - idle_W) / full_W) ** (1 / power.exponent))


def anchored(compute: Compute, products: Sequence[CitedProduct]) -> Compute:
    """`compute` with the matrix efficiency at which 16-bit products take as long as cited, in the geometric mean."""

    def excess(tried: Compute) -> float:
        logs = []
        for product in products:
            m, n, k = product.shape
            peak, touched = compute.matrix_flops_per_s[product.dtype], 2 * (m * k + n * k + m * n)
            cited_s = 2 * m * n * k / product.flops_per_s
            logs.append(math.log(matrix_s(tried, product.shape, peak, touched) / cited_s))
        return math.fsum(logs)

    low, high = 0.05, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if excess(msgspec.structs.replace(compute, matrix_efficiency=middle)) > 0:
            low = middle
        else:
            high = middle
    return msgspec.structs.replace(compute, matrix_efficiency=high)


_EQUAL: Mapping[str, str] = {
    "matrix_efficiency": "share of the peak",
    "clock_drop": "how far the clock falls with the load",
    "memory_efficiency": "share of the peak",
    "memory_chunk_s": "latency",
    "sharpness": "how arithmetic and traffic overlap",
    "form_cost": "storage of the operands",
    "kernel_start": "launches beyond the least",
    "kernel_s": "launch and drain",
}


def _core_bound(costs: Mapping[str, float], here: Compute, there: Compute) -> dict[str, float]:
    """Costs of bytes, relative to those of a kernel that streams, beside other memory.

    A kernel that moves the counted bytes once takes longer than these where its cores are busy for longer: its cost is
    (1 + c^2)^(1/2), joined as arithmetic and traffic of products are, with c the time of the cores over that of the
    bytes counted, which grows with the bandwidth. Several kernels that move them p times (`PASSES`) do not overlap, and
    mostly the cores bind some of them and the memory others: their cost is p + c. Costs of other calls stay, and all
    costs on cores of another kind, whose time per byte was not measured.
    """
    if not _same_cores(here, there):
        return dict(costs)
    return {call: _with_cores(call, cost, here.memory_Bps / there.memory_Bps) for call, cost in costs.items()}


def _with_cores(call: str, cost: float, times: float) -> float:
    """The cost of a call whose cores take `times` as long, in terms of the bytes that it counts."""
    passes = next((count for prefix, count in PASSES.items() if call.startswith(prefix)), None)
    if passes is None or cost <= passes:
        return cost
    power = 2 if passes == 1 else 1
    return float(round((passes**power + (cost**power - passes**power) * times**power) ** (1 / power), 4))


def at_sustained_clock(compute: Compute, clock: float) -> Compute:
    """`compute` of a chip whose clock under load is `clock` times that of the one its figures are of.

    Products and attention take it from `sustained_clock`; so do the cores' part of kernels that move bytes.
    """
    costs = {call: _with_cores(call, cost, 1 / clock) for call, cost in compute.kernel_cost.items()}
    rules = {
        call: rule if rule.passes is None else msgspec.structs.replace(
            rule, passes=_with_cores(call, rule.passes, 1 / clock)
        )
        for call, rule in compute.rules.items()
    }  # fmt: skip
    lists = {
        call: msgspec.structs.replace(paced, chunk_s=paced.chunk_s / clock)
        for call, paced in compute.tensor_lists.items()
    }
    return msgspec.structs.replace(
        compute, sustained_clock=clock, kernel_cost=costs, rules=rules, tensor_lists=lists
    )  # fmt: skip


def _rules(here: Compute, there: Compute) -> dict[str, Rule]:
    passes = {call: rule.passes for call, rule in there.rules.items() if rule.passes is not None}
    other = _core_bound(passes, here, there)
    return {call: msgspec.structs.replace(rule, passes=other.get(call)) for call, rule in there.rules.items()}


def _is_carried(device: Device, entry: str) -> bool:
    known = device.provenance.get(entry) or device.provenance.get(entry.partition(".")[0])
    return known is not None and "carried over" in known.source


def _wider(edge: float, spread: float) -> float:
    """An edge of a 90 % interval, as a factor, joined with an independent spread."""
    size = math.hypot(math.log(edge), NINETY * spread)
    return round(math.exp(size if edge > 1 else -size), 4)


def _same_cores(compute: Compute, source: Compute) -> bool:
    """The device with this number of cores of the same rate."""
    return compute.num_cores == source.num_cores and abs(_core_rate(compute) / _core_rate(source) - 1) < 0.02


def _tiled(compute: Compute, source: Compute) -> Tiled | None:
    """Loads and stores of a core grow with its rate; latencies do not. Factors by size are the library's choice of
    kernels for one number of cores of one rate: others have none.
    """
    if source.tiled is None:
        return None
    faster = _core_rate(compute) / _core_rate(source)
    return msgspec.structs.replace(
        source.tiled, core_Bps=source.tiled.core_Bps * faster, core_store_Bps=source.tiled.core_store_Bps * faster,
        table=source.tiled.table if _same_cores(compute, source) else None,
    )  # fmt: skip


def _of_dtypes(here: Compute, there: Compute) -> dict[str, float]:
    """Shares of the peak that other dtypes reach; TF32 no less than float32 on cards where both have one peak."""
    shares, peaks = dict(there.dtype_efficiency), here.matrix_flops_per_s
    if {"tf32", "float32"} <= shares.keys() and peaks.get("tf32", math.inf) <= peaks.get("float32", 0.0):
        shares["tf32"] = max(shares["tf32"], shares["float32"])
    return shares


def _core_rate(compute: Compute) -> float:
    return compute.matrix_flops_per_s["float16"] / compute.num_cores  # which every device of the catalogue has


def _form_rate(device: Device) -> float:
    """The time of the fastest reported product according to the form, without other kernels."""
    best = device.best_product
    assert best is not None
    m, n, k = best.shape
    peak = device.compute.matrix_flops_per_s[best.dtype]
    alone = msgspec.structs.replace(device.compute, step_clock_MHz=None, step_clock_drop=None)
    return 2 * m * n * k / matrix_s(alone, best.shape, peak, 2 * (m * k + n * k + m * n))


def _scaled(model: Collective, own: Collective, members: int, *, keep_fraction: bool) -> Collective:
    """Latencies of `model`, with the switch of `own`, and its share of the link if cited."""
    if keep_fraction:
        model = msgspec.structs.replace(model, link_fraction=own.link_fraction, gap=own.gap)
    return with_unmeasured(model, own, members)
