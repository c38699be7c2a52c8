"""Sensitivity of a step: every quantity is decreased and increased a little, and the effects are sorted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodels.machine.machine import Machine
from plans.errors import TwofoldError
from simulator.engine.link_change import LinkChange
from simulator.predict import Outcome
from simulator.study.whatif import KNOBS, WhatIf

__all__ = ["Effect", "sensitivity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The effect of one quantity, in seconds per lasting step (`Goodput.effective_step_s`).

    Args:
        knob: in words.
        base_s: with the quantity unchanged.
        low_s: with the knob at 1 - `by` times.
        high_s: with the knob at 1 + `by` times.
        by: the share that it was turned.
    """

    knob: str
    base_s: float
    low_s: float
    high_s: float
    by: float

    @property
    def swing_s(self) -> float:
        """The difference between the largest and the smallest of the three times."""
        values = (self.base_s, self.low_s, self.high_s)
        return max(values) - min(values)

    def change(self, value_s: float) -> float:
        """A value against the base, as a fraction."""
        return value_s / self.base_s - 1 if self.base_s else 0.0


def sensitivity(
    of: Callable[[WhatIf], Outcome], machine: Machine, base: WhatIf | None = None, *, by: float = 0.2
) -> tuple[Effect, ...]:
    """The effect of every knob around `base`, the largest first.

    Knobs are the factors of `KNOBS`, the bandwidth of each tier of links where there are several, and the figures of
    checkpoints and failures where `base` has them.

    Args:
        of: outcome of a what-if: `Scenarios.outcome` of a program, `Configured.outcome` of degrees.
        machine: it runs on.
        base: from where the knobs are turned.
        by: the share, between 0 and 1.

    Raises:
        TwofoldError: `by` outside 0 and 1, and what `of` refuses.
    """
    if not 0 < by < 1:
        raise TwofoldError(f"by must be above 0 and below 1 (0.2 is -20 % and +20 %), not {by}")
    start = base or WhatIf()
    base_s = of(start).goodput.effective_step_s
    effects = [
        Effect(
            knob=name, base_s=base_s, low_s=of(turn(1 - by)).goodput.effective_step_s,
            high_s=of(turn(1 + by)).goodput.effective_step_s, by=by,
        )
        for name, turn in _turns(start, machine)
    ]  # fmt: skip
    return tuple(sorted(effects, key=lambda effect: (-effect.swing_s, effect.knob)))


def _turns(base: WhatIf, machine: Machine) -> list[tuple[str, Callable[[float], WhatIf]]]:
    """For each knob, the what-if with it multiplied by a factor."""
    found: list[tuple[str, Callable[[float], WhatIf]]] = [
        (quantity, lambda factor, name=name: replace(base, **{name: getattr(base, name) * factor}))  # type: ignore[misc]
        for name, quantity in KNOBS.items()
    ]
    links: dict[str | int, str] = {number: link.name for number, link in enumerate(machine.links)}
    if machine.graph is not None:
        links = {wire.name: wire.name for wire in machine.graph.wires}
    if len(links) > 1:
        for which, name in links.items():

            def turn(factor: float, which: str | int = which) -> WhatIf:
                return replace(base, links=(*base.links, LinkChange(tier=which, bandwidth=factor)))

            found.append((f"bandwidth of {name}", turn))
    checkpoints, failures = base.checkpoints, base.failures
    if checkpoints is not None:
        found.append(
            (
                "steps between checkpoints",
                lambda factor: replace(
                    base, checkpoints=replace(checkpoints, every_steps=max(1, round(checkpoints.every_steps * factor)))
                ),
            )
        )
        found.append(
            (
                "speed of writing checkpoints",
                lambda factor: replace(
                    base, checkpoints=replace(checkpoints, write_Bps=checkpoints.write_Bps * factor)
                ),
            )
        )
    if failures is not None:
        found.append(
            (
                "time between failures",
                lambda factor: replace(base, failures=replace(failures, device_mtbf_s=failures.device_mtbf_s * factor)),
            )
        )
        found.append(
            (
                "time of a restart",
                lambda factor: replace(base, failures=replace(failures, restart_s=failures.restart_s * factor)),
            )
        )
    return found
