"""The power of a chip, from the clocks at which mixtures of kernels settle (`costmodels.price.power`)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from costmodels.fit.forms import solve
from costmodels.fit.points import Point
from costmodels.price.clock import START
from costmodels.price.compute import Compute
from costmodels.price.power import Power
from costmodels.widths import CHIP_SPREAD, WANDER

__all__ = ["CHECKED", "SETTLED", "fit_power", "mixtures"]

SETTLED = 6
"""Windows of a tenth of a second until a chip under load is at its power limit."""

CHECKED = "small 65, attention 10, memory 15, update 10"
"""The mixture that is most like a training step is never fitted: it tests the law."""

LEAST_MIXTURES = 8

LARGE_BYTES = 2**26
"""Messages from that size on, one after the other, keep the links busy."""

MESSAGE_SHARE = 0.35
"""`Power.message_share`, from all-reduces of 64 MiB between products of power-limited H200: the median share of their
time that depends on the clock is 0.41 (`python -m benchmarks.devices.meetings --share`), 0.08 of the time is their
start."""

PRODUCTS = ("matrix", "small")
FREE = 0.985
"""Share of the highest clock from which on a chip counts as below its limit."""

Floats = npt.NDArray[np.float64]

_TYPICAL = {  # typical value, least, most; the powers in W
    "idle": (120.0, 20.0, 400.0), "matrix": (1000.0, 100.0, 4000.0), "attention": (1200.0, 50.0, 6000.0),
    "memory": (400.0, 20.0, 2000.0), "norm": (400.0, 20.0, 2000.0), "update": (400.0, 20.0, 2000.0),
    "exponent": (2.0, 1.0, 4.0), "memory_exponent": (1.0, 0.1, 4.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """A mixture of kernels on one device, settled.

    Args:
        name: as it was measured.
        clock_MHz, power_W: of the device.
        shares: kind of kernel -> share of the time.
        seconds: kind of kernel -> seconds of a call.
        peak_share: share of the peak rate that its products reach, over all the time.
        attention_share: likewise its attention.
    """

    name: str
    clock_MHz: float
    power_W: float
    shares: dict[str, float]
    seconds: dict[str, float]
    peak_share: float
    attention_share: float


def mixtures(points: Sequence[Point], compute: Compute) -> list[Mixture]:
    """The mixtures that settled, one per device; `points` are of the kind "clock" and the call "mixture"."""
    windows: dict[tuple[str, object], list[Point]] = defaultdict(list)
    for point in points:
        if int(point.options["window"]) >= SETTLED and point.clock_MHz:
            windows[str(point.options["mixture"]), point.options.get("rank", 0)].append(point)
    mixed = []
    for (name, _), own in windows.items():
        kinds = re.findall(r"[a-z]+", name)
        middle = {key: float(np.median([point.figures[key] for point in own])) for key in own[0].figures}
        peak = compute.matrix_flops_per_s.get(own[0].dtype, 0.0)
        if not peak:
            continue
        reached = {
            kind: middle[f"{kind}_share"] * middle[f"{kind}_flops"] / middle[f"{kind}_s"] / peak for kind in kinds
        }
        mixed.append(
            Mixture(
                name=name, clock_MHz=middle.get("sensor_clock_MHz") or float(np.median([p.clock_MHz for p in own])),
                power_W=own[-1].power_W, shares={kind: middle[f"{kind}_share"] for kind in kinds},
                seconds={kind: middle[f"{kind}_s"] for kind in kinds},
                peak_share=sum(reached.get(kind, 0.0) for kind in PRODUCTS),
                attention_share=reached.get("attention", 0.0),
            )
        )  # fmt: skip
    return mixed


def _message_W(points: Sequence[Point], idle_W: float) -> float:
    """The extra power of large messages over an idle chip; 0 if none was measured with its power."""
    drawn = [point.power_W for point in points if point.power_W and _is_large_message(point)]
    return round(max(0.0, float(np.median(drawn)) - idle_W), 1) if drawn else 0.0


def fit_power(points: Sequence[Point], others: Sequence[Point], compute: Compute) -> Compute:
    """`compute` with the power of the chip; unchanged if too few mixtures settled, or none at a limit.

    Of kernels bound by memory, half are taken to be like copies and half like norms (assumed).

    Args:
        points: kind "clock", call "mixture".
        others: all points that are fitted, among them large messages.
        compute: peaks.
    """
    fitted = [mixture for mixture in mixtures(points, compute) if mixture.name != CHECKED and mixture.power_W]
    if not fitted:
        return compute
    highest_MHz = max(mixture.clock_MHz for mixture in fitted)
    held = [mixture for mixture in fitted if mixture.clock_MHz < FREE * highest_MHz]
    if len({mixture.name for mixture in fitted}) < LEAST_MIXTURES or not held:
        return compute
    limit_W = float(np.median([mixture.power_W for mixture in held]))
    product_MHz = _product_clock(fitted, highest_MHz)

    def drawn_W(q: dict[str, float], each: Mixture) -> float:
        clock = each.clock_MHz / highest_MHz
        products = min(each.clock_MHz, product_MHz) / highest_MHz
        slow = sum(q[kind] * each.shares.get(kind, 0.0) for kind in ("memory", "norm", "update"))
        return (
            q["idle"] + q["matrix"] * each.peak_share * products ** (q["exponent"] - 1)
            + q["attention"] * each.attention_share * clock ** (q["exponent"] - 1)
            + slow * clock ** q["memory_exponent"]
        )  # fmt: skip

    start, lower, upper = np.log(np.array(list(_TYPICAL.values()))).T

    def values(logs: Floats) -> dict[str, float]:
        return dict(zip(_TYPICAL, map(float, np.exp(logs)), strict=True))

    def misfit(logs: Floats) -> Floats:
        q = values(logs)
        drawn = [drawn_W(q, mixture) for mixture in fitted]
        powers_W = [limit_W if mixture in held else mixture.power_W for mixture in fitted]
        return np.concatenate([np.log(drawn) - np.log(powers_W), 0.02 * (logs - start)])

    q = values(solve(misfit, start, lower, upper))
    alone = max(
        mixture.peak_share for mixture in fitted if mixture.name.split()[0] in PRODUCTS and len(mixture.shares) == 1
    )
    fastest = max(mixture.peak_share / mixture.shares["matrix"] for mixture in fitted if "matrix" in mixture.shares)
    peak_W = q["idle"] + q["matrix"] * max(alone, fastest) * (product_MHz / highest_MHz) ** (q["exponent"] - 1)
    power = Power(
        limit_W=round(limit_W, 1), highest_MHz=highest_MHz, idle_W=round(q["idle"], 1), matrix_W=round(q["matrix"], 1),
        attention_W=round(q["attention"], 1), memory_W=round((q["memory"] + q["norm"]) / 2, 1),
        update_W=round(q["update"], 1), peak_W=round(max(peak_W, limit_W), 1), exponent=round(q["exponent"], 3),
        memory_exponent=round(q["memory_exponent"], 3),
        memory_share=round((_share(fitted, "memory") + _share(fitted, "norm")) / 2, 4),
        update_share=round(_share(fitted, "update"), 4), message_share=MESSAGE_SHARE,
        chip_spread=CHIP_SPREAD, wander=WANDER, message_W=_message_W(others, q["idle"]),
    )  # fmt: skip
    compute = msgspec.structs.replace(compute, power=power)
    if compute.step_clock_MHz is not None:  # what is not priced at its own clock keeps the one that was fitted for it
        return compute
    return msgspec.structs.replace(compute, step_clock_MHz=START * highest_MHz, step_clock_drop=0.0)


def _product_clock(found: Sequence[Mixture], highest_MHz: float) -> float:
    """The clock of products on a chip below its limit, from their time next to that at a clock that is known.

    Only large products, whose time depends on the clock, determine it.
    """
    alone = [mixture for mixture in found if set(mixture.shares) == {"matrix"}]
    free = [mixture for mixture in found if "matrix" in mixture.shares and mixture.clock_MHz >= FREE * highest_MHz]
    if not alone or not free:
        return highest_MHz
    cycles = float(np.median([mixture.clock_MHz * mixture.seconds["matrix"] for mixture in alone]))
    return min(highest_MHz, cycles / float(np.median([mixture.seconds["matrix"] for mixture in free])))


def _is_large_message(point: Point) -> bool:
    alone = point.kind in ("collective", "transfer") and not point.options.get("recorded")
    return alone and point.size_bytes >= LARGE_BYTES


def _share(found: Sequence[Mixture], kind: str) -> float:
    """The share of a kernel's time that depends on the clock: from 0 to 1."""
    own = [mixture for mixture in found if kind in mixture.shares]
    high = max((mixture for mixture in own if len(mixture.shares) == 1), key=lambda each: each.clock_MHz, default=None)
    low = min(own, key=lambda each: each.clock_MHz, default=None)
    if high is None or low is None or low.clock_MHz >= FREE * high.clock_MHz:
        return 0.0
    longer = low.seconds[kind] / high.seconds[kind] - 1
    return float(min(1.0, max(0.0, longer / (high.clock_MHz / low.clock_MHz - 1))))
