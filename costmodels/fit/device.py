"""A device of the catalogue from measured points: kernels, links, contention, dispatch, and their uncertainty.

Points that are held out are never fitted; `held_out` reports on them. What was not measured keeps the figures of the
device it starts from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from costmodels.fit.forms import Residuals
from costmodels.fit.kernels import fit_attention, fit_memory
from costmodels.fit.links import HOST_BOUND_BYTES, fit_links, fit_overlaps
from costmodels.fit.matrix import fit_clock, fit_dtypes, fit_matrix, fit_step_clock
from costmodels.fit.points import Point
from costmodels.fit.power import SETTLED, fit_power
from costmodels.fit.predict import (
    SIXTEEN_BIT,
    Predicted,
    is_communication,
    is_one_group,
    is_priced,
    library_of,
    pair_lengths_s,
    predict_points,
    scoreboard,
)
from costmodels.fit.section import Draft, FitSection, SectionFit, fit_sections
from costmodels.fit.spreads import SPREAD_OF, SPREADS
from costmodels.machine.catalogue import Device
from costmodels.machine.machine import DISPATCH_CLASSES
from costmodels.machine.sections import COLLECTIVES, Overlap, Provenance, Replay
from costmodels.price.communication import with_unmeasured
from costmodels.price.executor_kernels import fit_rules, rule_points

__all__ = ["SECTIONS", "STEP_DUTY", "DeviceFit", "fit_device"]

LEAST_S = 5e-9
"""Points below this are not times of anything."""

LEAST_MESSAGES = 3
"""Points that a kind of communication needs."""

STEP_DUTY = 60
"""Percent of a training step that matrix products take; in our own plans on H200 it is 50 to 75."""

LEAST_REPLAYS = 2
"""Lengths of recordings that separate the cost of the launch from that of the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """A calibrated device, the forms that were chosen, and its predictions of all points, held out or not.

    The same chip takes up to a fifth longer when it is warm: `held_out_at_clock` are the predictions of held-out
    products and attention at their recorded clocks, which a forecast does not know.
    """

    device: Device
    forms: Mapping[str, str]
    predicted: tuple[Predicted, ...]
    held_out_at_clock: tuple[Predicted, ...] = ()

    def inside(self, section: str) -> float | None:
        """Share of the held-out points of a section within the 90 % interval of their price; None without one."""
        known = self.device.price_intervals.get(section) if section in SPREAD_OF else None
        held_out = [entry for entry in self.predicted if entry.section == section and entry.point.held_out]
        if known is None or not held_out:
            return None
        return sum(known.low <= 1 / (1 + entry.error) <= known.high for entry in held_out) / len(held_out)

    @property
    def residuals(self) -> tuple[Residuals, ...]:
        """Residuals of the fitted points, by section."""
        return scoreboard([entry for entry in self.predicted if not entry.point.held_out])

    @property
    def held_out(self) -> tuple[Residuals, ...]:
        """Residuals of the held-out points, by section."""
        return scoreboard([entry for entry in self.predicted if entry.point.held_out])


def fit_device(points: Iterable[Point], environment: Mapping[str, str], base: Device) -> DeviceFit:
    """The device that `points` were measured on.

    Args:
        points: of calibration runs, of any number of ranks of one node; kinds that no form is for are left alone.
        environment: of the points: date, torch, and so on.
        base: peaks and figures that are not measured.

    Raises:
        TwofoldError: too few points of a kind that was measured.
    """
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "nccl", "driver") if environment.get(name))
    source = f"measured on {environment.get('device_name') or environment.get('device', base.name)}"
    draft = Draft(
        points=tuple(usable_points(points)),
        source=f"{source}, {versions}" if versions else source,
        date=environment.get("date", ""),
        base=base,
        values={name: getattr(base, name) for name in ("collectives", "overlap", "dispatch_s", "replay")}
        | {"compute": msgspec.structs.replace(base.compute, step_clock_MHz=None, step_clock_drop=None, power=None)},
        provenance=base.provenance,
    )
    draft = fit_sections(SECTIONS, draft)
    draft = dataclasses.replace(draft, predicted=tuple(predict_points(draft.points, draft.device, draft.issued)))
    held_out = [point for point in draft.points if point.held_out]
    at_clock = predict_points(held_out, draft.device, at_clock=True)
    draft = fit_sections((*SPREADS, STEP_CLOCK, POWER), draft)
    clocked = tuple(entry for entry in at_clock if entry.section in ("matrix", "attention") and entry.point.clock_MHz)
    return DeviceFit(
        device=draft.device, forms=draft.forms, predicted=draft.predicted, held_out_at_clock=clocked
    )  # fmt: skip


def usable_points(points: Iterable[Point]) -> list[Point]:
    """The points that are usable.

    Not used are times of nothing; small messages that a host issued one by one, where recorded launches of the same
    call were measured; points to fit that repeat one that is held out.
    """
    points = [point for point in points if point.seconds > LEAST_S]
    recorded = {point.call for point in points if is_communication(point) and point.options.get("recorded")}
    points = [
        point for point in points
        if not is_communication(point) or point.call not in recorded or point.options.get("recorded")
        or point.size_bytes >= HOST_BOUND_BYTES
    ]  # fmt: skip
    held_out = {_subject(point) for point in points if point.held_out}
    return [point for point in points if point.held_out or _subject(point) not in held_out]


def _subject(point: Point) -> tuple[object, ...]:
    """The measured points, held out or not, of any timing method."""
    options = tuple(sorted((name, value) for name, value in point.options.items() if name != "recorded"))
    return (point.kind, point.call, point.shape, point.form or "nt", point.batch, point.size_bytes, point.ranks,
            point.dtype, point.beside, options)  # fmt: skip


# -- kernels -----------------------------------------------------------------------------------------------------------


def _kernels(kind: str, draft: Draft) -> list[Point]:
    return [point for point in draft.fitted_points if point.kind == kind and is_priced(point, draft.compute)]


def _products(draft: Draft, *, sixteen_bit: bool = True) -> list[Point]:
    return [point for point in _kernels("matrix", draft) if (point.dtype in SIXTEEN_BIT) is sixteen_bit]


def _compute_provenance(draft: Draft, names: Sequence[str], what: str) -> dict[str, Provenance]:
    return {f"compute.{name}": draft.provenance_of(what) for name in names}


def _fit_memory(points: Sequence[Point], draft: Draft) -> SectionFit:
    fit = fit_memory(points, draft.compute)
    names = (
        "memory_efficiency", "memory_chunk_s", "kernel_s", "kernel_cost", "kernel_start", "tensor_lists",
        "embedding_gradient",
    )  # fmt: skip
    return SectionFit(
        values={"compute": fit.compute},
        provenance=_compute_provenance(draft, names, f"{len(points)} memory-bound kernels"),
        form=fit.form,
        left_out_s=fit.left_out_s,
    )


def _fit_clock(points: Sequence[Point], draft: Draft) -> SectionFit:
    what = f"clocks beside {len(points)} matrix products, after other products"
    return SectionFit(
        values={"compute": fit_clock(points, draft.compute)},
        provenance=_compute_provenance(draft, ("clock_MHz", "clock_drop"), what),
    )


def _settled(call: str, draft: Draft) -> list[Point]:
    """Windows of a sustained load whose clock has settled."""
    return [
        point for point in draft.fitted_points
        if (point.kind, point.call) == ("clock", call) and point.clock_MHz
        and int(point.options.get("window", 0)) >= SETTLED and point.options.get("duty", STEP_DUTY) == STEP_DUTY
    ]  # fmt: skip


def _mixed_products(draft: Draft) -> list[Point]:
    """Products with copies between them, if the clock of copies alone was measured too."""
    known = draft.compute.clock_MHz is not None and _settled("sustained_memory", draft)
    return _settled("sustained", draft) if known else []


def _fit_step_clock(points: Sequence[Point], draft: Draft) -> SectionFit:
    copies = _settled("sustained_memory", draft)
    what = f"clocks of products that take {STEP_DUTY} % of the time, copies the rest: {len(points)} windows, and of "
    what += f"copies alone: {len(copies)}"
    return SectionFit(
        values={"compute": fit_step_clock(points, copies, draft.compute)},
        provenance=_compute_provenance(draft, ("step_clock_MHz", "step_clock_drop"), what),
    )


def _mixtures(draft: Draft) -> list[Point]:
    return [point for point in draft.fitted_points if (point.kind, point.call) == ("clock", "mixture")]


def _fit_power(points: Sequence[Point], draft: Draft) -> SectionFit:
    compute = fit_power(points, draft.fitted_points, draft.compute)
    if compute.power is None:
        return SectionFit(values={})
    count = len({point.options["mixture"] for point in points}) - 1
    what = f"clocks and power of {count} mixtures of kernels; message_share: benchmarks/results/meetings_h200.json"
    return SectionFit(
        values={"compute": compute},
        provenance=_compute_provenance(draft, ("power",), what),
    )


def _fit_matrix(points: Sequence[Point], draft: Draft) -> SectionFit:
    # the least time of a kernel is that of memory-bound ones where both were measured: products hide it
    fit = fit_matrix(points, draft.compute, kernel_s=draft.compute.kernel_s if "memory" in draft.forms else None)
    names = ("matrix_efficiency", "half_depth", "half_rows", "tiled", "sharpness", "form_cost")
    return SectionFit(
        values={"compute": fit.compute},
        provenance=_compute_provenance(draft, names, f"{len(points)} matrix products, form: {fit.form}"),
        form=fit.form,
        left_out_s=fit.left_out_s,
    )


def _other_products(draft: Draft) -> list[Point]:
    """Products of other dtypes are a share of those of 16 bit, so both must be there."""
    return _products(draft, sixteen_bit=False) if "matrix" in draft.forms else []


def _fit_dtypes(points: Sequence[Point], draft: Draft) -> SectionFit:
    return SectionFit(
        values={"compute": fit_dtypes(points, draft.compute)},
        provenance=_compute_provenance(draft, ("dtype_efficiency",), f"{len(points)} products of other dtypes"),
    )


def _fit_attention(points: Sequence[Point], draft: Draft) -> SectionFit:
    fit = fit_attention(points, draft.compute)
    return SectionFit(
        values={"compute": fit.compute},
        provenance=_compute_provenance(draft, ("attention",), f"{len(points)} attention kernels"),
        form=fit.form,
        left_out_s=fit.left_out_s,
    )


def _rule_points(draft: Draft) -> tuple[Point, ...]:
    """Every point: the held-out ones are reported on, and host times go with the device times of the same call."""
    return draft.points if rule_points(draft.points) else ()


def _fit_rules(points: Sequence[Point], draft: Draft) -> SectionFit:
    fit = fit_rules(points, draft.compute)
    compute = msgspec.structs.replace(draft.compute, rules={**draft.compute.rules, **fit.rules})
    form = f"kernels and passes of {len(fit.rules)} instructions; fitted {fit.fitted}"
    form += f"; held out {fit.held_out}" if fit.held_out else ""
    what = f"{fit.fitted.num_points} instructions of the executor alone"
    return SectionFit(values={"compute": compute}, provenance=_compute_provenance(draft, ("rules",), what), form=form)


# -- communication and the host ----------------------------------------------------------------------------------------


def _messages(call: str, draft: Draft) -> list[Point]:
    kind = "transfer" if call == "transfer" else "collective"
    alike = [point for point in draft.fitted_points if (point.kind, point.call) == (kind, call) and is_one_group(point)]
    return alike if len(alike) >= LEAST_MESSAGES else []


def _fit_messages(call: str, points: Sequence[Point], draft: Draft) -> SectionFit:
    device = draft.device
    fit = fit_links(points, device.node, library_of(device))
    model = with_unmeasured(fit.collective, draft.collectives[call], device.per_node)
    what = f"{len(points)} points of 2 to {max(point.ranks for point in points)} ranks, {fit.form}"
    return SectionFit(
        values={"collectives": {**draft.collectives, call: model}},
        provenance={f"collectives.{call}": draft.provenance_of(what)},
        form=fit.form,
        issued=fit.issued,
    )


def _fit_overlap(points: Sequence[Point], draft: Draft) -> SectionFit:
    device = draft.device
    fitted, form = fit_overlaps(points, [pair_lengths_s(point, device) for point in points])
    pairs = {(entry.compute, entry.collective) for entry in fitted}
    unmeasured = [entry for entry in device.overlap if (entry.compute, entry.collective) not in pairs]
    what = f"{len(points)} pairs; those not measured as the nearest pair"
    return SectionFit(
        values={"overlap": _completed([*unmeasured, *fitted])},
        provenance={"overlap": draft.provenance_of(what)},
        form=form,
    )


def _completed(overlaps: Sequence[Overlap]) -> tuple[Overlap, ...]:
    """Pairs that were not measured take the rates of the same compute next to an all-reduce, or of a matrix product."""
    known = {(entry.compute, entry.collective): entry for entry in overlaps}
    entries = []
    for compute in ("matrix", "attention", "memory"):
        for collective in COLLECTIVES:
            like = [(compute, collective), (compute, "all_reduce"), ("matrix", collective), ("matrix", "all_reduce")]
            nearest = next((known[key] for key in like if key in known), None)
            if nearest is not None:
                entries.append(msgspec.structs.replace(nearest, compute=compute, collective=collective))
    return tuple(entries)


def _host_times(name: str, draft: Draft) -> list[Point]:
    return [
        point for point in draft.fitted_points
        if (point.kind, point.call) == ("dispatch", name) and not point.options and point.stack in ("", "twofold")
    ]  # fmt: skip


def _fit_host_time(name: str, points: Sequence[Point], draft: Draft) -> SectionFit:
    seconds = float(np.median([point.seconds for point in points]))
    return SectionFit(
        values={"dispatch_s": {**draft.dispatch_s, name: seconds}},
        provenance={f"dispatch_s.{name}": draft.provenance_of("host time to issue one")},
    )


def _replays(draft: Draft) -> list[Point]:
    replays = [point for point in draft.fitted_points if point.kind == "replay"]
    return replays if len(replays) >= LEAST_REPLAYS else []


def _fit_replay(points: Sequence[Point], draft: Draft) -> SectionFit:
    """seconds = launch_s + nodes node_s, in least squares of relative errors, both at least 0."""
    from scipy.optimize import nnls

    nodes = np.array([point.shape[0] for point in points], dtype=float)
    seconds = np.array([point.seconds for point in points])
    solved, _ = nnls(np.stack([1 / seconds, nodes / seconds], axis=1), np.ones(len(points)))
    return SectionFit(
        values={"replay": Replay(launch_s=float(solved[0]), node_s=float(solved[1]))},
        provenance={"replay": draft.provenance_of(f"recordings of {len(points)} lengths, replayed in a row")},
    )


def _of_kind(kind: str) -> Callable[[Draft], list[Point]]:
    return lambda draft: [point for point in draft.fitted_points if point.kind == kind]


SECTIONS = (
    FitSection(name="memory", points=partial(_kernels, "memory"), fit=_fit_memory),
    FitSection(name="clock", points=_products, fit=_fit_clock),
    FitSection(name="matrix", points=_products, fit=_fit_matrix),
    FitSection(name="matrix32", points=_other_products, fit=_fit_dtypes),
    FitSection(name="attention", points=partial(_kernels, "attention"), fit=_fit_attention),
    FitSection(name="rule", points=_rule_points, fit=_fit_rules),
    *(FitSection(name=call, points=partial(_messages, call), fit=partial(_fit_messages, call)) for call in COLLECTIVES),
    FitSection(name="overlap", points=_of_kind("overlap"), fit=_fit_overlap),
    *(
        FitSection(name=f"dispatch {name}", points=partial(_host_times, name), fit=partial(_fit_host_time, name))
        for name in DISPATCH_CLASSES
    ),
    FitSection(name="replay", points=_replays, fit=_fit_replay),
)
"""The sections to fit, in the order of their dependencies."""

STEP_CLOCK = FitSection(name="step clock", points=_mixed_products, fit=_fit_step_clock)
"""Fitted last: points of kernels are predicted as they were measured, without others between them."""
POWER = FitSection(name="power", points=_mixtures, fit=_fit_power)
