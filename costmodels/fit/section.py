"""A fit is a table of sections: each fits one part of a machine file to some of the measured points.

    section -> its points -> a part of the machine file -> where the figures of that part come from

`fit_sections` walks over the table from the first section to the last; a section sees what those before it have fitted.
The tables are `costmodels.fit.device.SECTIONS` and `costmodels.fit.cpu.SECTIONS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from costmodels.fit.forms import Residuals
from costmodels.fit.links import BackToBack
from costmodels.fit.points import Point
from costmodels.fit.predict import Predicted
from costmodels.machine.catalogue import Device
from costmodels.machine.sections import Collective, Provenance
from costmodels.price.compute import Compute

__all__ = ["Draft", "FitSection", "SectionFit", "fit_sections"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionFit:
    """The fit of one section.

    Args:
        values: field of the machine file -> its new value.
        provenance: entry of the machine file ("compute.kernel_s") -> where it comes from.
        form: the chosen form, in words; "" where there is only one.
        left_out_s: for the section's points, in their order, the prediction of a fit to the others; () where that was
            not computed.
        issued: how the calls of a kind of communication were issued while they were measured.
        residuals: how well the form explains the points.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Provenance] = field(default_factory=dict)
    form: str = ""
    left_out_s: tuple[float, ...] = ()
    issued: BackToBack | None = None
    residuals: tuple[Residuals, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A machine file under construction.

    Args:
        points: everything that was measured and may be fitted or reported on.
        source: where it was measured; every provenance text begins with it.
        date: of the measurement.
        base: the device of the catalogue to start from; None for a machine that is measured from nothing.
        limits: facts about the machine that need no fit, such as its number of cores.
        values: field of the machine file -> value so far.
        provenance: entry of the machine file -> where it comes from.
        forms: section -> the form that was chosen.
        left_out_s: section -> `SectionFit.left_out_s`.
        issued: kind of communication -> how its calls were issued.
        residuals: of the sections, in their order.
        predicted: points with their predictions by the values so far.
    """

    points: tuple[Point, ...]
    source: str
    date: str
    base: Device | None = None
    limits: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Provenance] = field(default_factory=dict)
    forms: Mapping[str, str] = field(default_factory=dict)
    left_out_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    issued: Mapping[str, BackToBack] = field(default_factory=dict)
    residuals: tuple[Residuals, ...] = ()
    predicted: tuple[Predicted, ...] = ()

    @property
    def fitted_points(self) -> list[Point]:
        """The points that are not held out."""
        return [point for point in self.points if not point.held_out]

    @property
    def compute(self) -> Compute:
        """The rates that were fitted so far."""
        rates: Compute = self.values["compute"]
        return rates

    @property
    def collectives(self) -> dict[str, Collective]:
        """The costs of communication so far."""
        models: dict[str, Collective] = self.values.get("collectives", {})
        return models

    @property
    def dispatch_s(self) -> dict[str, float]:
        """The host times that were fitted so far."""
        seconds: dict[str, float] = self.values.get("dispatch_s", {})
        return seconds

    @property
    def device(self) -> Device:
        """The device of the catalogue with the values so far.

        Raises:
            ValueError: the draft does not start from a device.
        """
        if self.base is None:
            raise ValueError("this machine has no base device")
        return msgspec.structs.replace(self.base, **self.values, provenance=dict(self.provenance))

    def provenance_of(
        self, what: str = "", status: Literal["measured", "interpolated", "assumed", "cited"] = "measured"
    ) -> Provenance:
        """The provenance of an entry that was derived from the points of this draft in the way `what`."""
        source = f"{self.source}: {what}" if what else self.source
        return Provenance(status=status, source=source, date=self.date)

    def with_fit(self, name: str, fit: SectionFit) -> Draft:
        """The draft with the results of section `name`."""
        return dataclasses.replace(
            self,
            values={**self.values, **fit.values},
            provenance=record_provenance(self.provenance, fit.provenance),
            forms={**self.forms, name: fit.form} if fit.form else self.forms,
            left_out_s={**self.left_out_s, name: fit.left_out_s} if fit.left_out_s else self.left_out_s,
            issued=self.issued if fit.issued is None else {**self.issued, name: fit.issued},
            residuals=(*self.residuals, *fit.residuals),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSection:
    """One section of a fit.

    Args:
        name: name of the section, such as "memory" or "all_reduce".
        points: those of a draft that this section is fitted to.
        fit: from these points and the draft.
        required: the machine file needs it: `fit` is also called without points; its error names the missing ones.
    """

    name: str
    points: Callable[[Draft], Sequence[Point]]
    fit: Callable[[Sequence[Point], Draft], SectionFit]
    required: bool = False


def fit_sections(sections: Iterable[FitSection], draft: Draft) -> Draft:
    """The draft with every section fitted for which there are points.

    Args:
        sections: in the order in which they need each other.
        draft: points and the values so far.

    Raises:
        TwofoldError: too few points of a kind that was measured, or none of a kind that is required.

    >>> from costmodels.fit.points import Point
    >>> counted = FitSection(
    ...     name="views",
    ...     points=lambda draft: [point for point in draft.points if point.call == "view"],
    ...     fit=lambda points, draft: SectionFit(values={"dispatch_s": {"view": points[0].seconds}}),
    ... )
    >>> point = Point(kind="dispatch", call="view", seconds=1e-6)
    >>> fit_sections([counted], Draft(points=(point,), source="here", date="2026-11-22")).dispatch_s
    {'view': 1e-06}
    """
    for section in sections:
        points = section.points(draft)
        if points or section.required:
            draft = draft.with_fit(section.name, section.fit(points, draft))
    return draft


def record_provenance(known: Mapping[str, Provenance], new: Mapping[str, Provenance]) -> dict[str, Provenance]:
    """`known` with new entries; an entry takes the place of those for its parts.

    >>> one, other = (Provenance(status="measured", source=text, date="2026-11-22") for text in ("one", "other"))
    >>> sorted(record_provenance({"compute.kernel_s": one, "links": one}, {"compute": other}))
    ['compute', 'links']
    """
    merged = dict(known)
    for entry, provenance in new.items():
        for part in [name for name in merged if name.startswith(f"{entry}.")]:
            del merged[part]
        merged[entry] = provenance
    return merged
