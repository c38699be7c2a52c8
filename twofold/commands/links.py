"""`twofold links`: compare recorded communication with the links of a machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from twofold.commands.options import MachineOption, Output
from twofold.commands.plan_file import open_plan
from twofold.commands.values import AtLeast1

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodels import Machine
    from interop.link_speeds import LinkCall, Spent, Tier
    from interop.seen_calls import SeenCall
    from simulator.engine.link_change import LinkChange
    from twofold.console import Console

__all__ = ["Links"]

_SHOWN = 20

_LEAST_S = 1e-7
"""Shorter differences are not printed."""

_EQUAL = 0.02
"""Factors this close to 1 need no change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Compare recorded communication with the predicted time of every kind of call on a machine.

    Args:
        traces: for each rank a trace of torch's profiler or a Chakra execution trace (JSON), or a folder with them; a
            table that nccl-tests printed; or logs of NCCL (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=INIT,COLL; no times).
        link: predict this communication on changed links, such as TIER:bandwidth=2 or TIER:latency=0.5 (several
            allowed); TIER is a name or a number.
        plan: plan file of the run; simulate its step on the links as measured, and with the change.
        top: number of kinds of calls to show, longest total time first.
    """

    traces: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TRACE ...")]
    target: MachineOption
    link: tuple[str, ...] = ()
    plan: str | None = None
    top: AtLeast1 = _SHOWN
    output: Output = field(default_factory=Output)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Read, price and compare."""
        from costmodels import Machine
        from interop.link_speeds import changes_seen, link_calls, spent, tiers_of_calls
        from interop.link_traces import read_links
        from simulator.engine.link_change import LinkChange, machine_with

        machine = Machine.load(self.target.machine)
        changes = [LinkChange.parse(text) for text in self.link]
        machine_with(machine, changes)  # refuses what is not there, before files are read
        with console.doing("reading the traces"):
            seen = read_links(self.traces)
        calls = link_calls(seen.calls, machine, changes)
        tiers = tiers_of_calls(calls, machine)
        self._show(calls, machine, console)
        for each in seen.assumed:
            console.print(f"assumed: {each}")
        for reason, count in seen.skipped.items():
            console.print(f"left out {count}: {reason}")
        for tier in tiers:
            _tell(tier, self.target.machine, console)
        before, after = spent(seen.calls, calls)
        if tiers:
            _tell_spent(before, after, changes, console)
        simulated = None
        if self.plan is not None:
            simulated = self._simulated(seen.calls, machine, changes_seen(tiers), changes, console)
        elif changes and tiers:
            console.print("The step gains a different amount, because other work moves too: --plan PLAN simulates it.")
        return {
            "simulated": simulated,
            "mean_rank": {"seen": asdict(before), "changed": asdict(after) if changes else None},
            "source": seen.source, "machine": machine.name, "tiers": [asdict(tier) for tier in tiers],
            "calls": [{**asdict(link_call), "bus_Bps": link_call.bus_Bps} for link_call in calls],
            "assumed": list(seen.assumed), "left_out": dict(seen.skipped),
        }, True  # fmt: skip

    def _simulated(
        self, calls: Sequence[SeenCall], machine: Machine, seen: Sequence[LinkChange], changes: Sequence[LinkChange],
        console: Console,
    ) -> dict[str, Any]:  # fmt: skip
        """Simulate the step of the plan on the links as measured, and with the requested change."""
        from costmodels import executing
        from plans.errors import TwofoldError
        from plans.figures import figures_of, figures_text
        from plans.lower import lower
        from simulator import WhatIf, simulate
        from simulator.engine.link_change import machine_with

        plan = open_plan(self.plan or "", machine, None, console)
        most = max(rank for call in calls for rank in call.ranks)
        if most >= plan.num_ranks:
            raise TwofoldError(f"rank {most} communicates in the traces, but {self.plan} has {plan.num_ranks} ranks")
        program, machine = lower(plan), executing(machine_with(machine, seen), plan.execution)
        known = f"links as measured ({', '.join(map(str, seen))})" if seen else f"links of {machine.name}"
        asked = {"seen": (WhatIf(), f"on the {known}")}
        if changes:
            asked["changed"] = WhatIf(links=tuple(changes)), f"with {', '.join(map(str, changes))}"
        steps: dict[str, Any] = {"seen": None, "changed": None}
        for name, (what_if, words) in asked.items():
            with console.doing(f"simulating {self.plan}"):
                steps[name] = figures_of(simulate(program, machine, what_if=what_if))
            console.print(f"Simulated {words}: {figures_text(steps[name])}")
        return steps

    def _show(self, found: Sequence[LinkCall], machine: Machine, console: Console) -> None:
        from plans.units import Bytes, Count, Quantity, Seconds
        from reports.tables import Table

        rows = [
            (
                f"{link_call.call} of {link_call.num_ranks}",
                machine.links[link_call.tier].name,
                Bytes(link_call.size_bytes),
                Count(link_call.times),
                None if link_call.seconds is None else Seconds(link_call.seconds),
                Seconds(link_call.waited_s),
                f"{link_call.beside:.0%}",
                Seconds(link_call.predicted_s),
                None if link_call.seconds is None else Quantity(link_call.seconds / link_call.predicted_s),
                None if link_call.bandwidth_factor is None else f"{link_call.bandwidth_factor:.2f}",
            )
            for link_call in found[: self.top]
        ]
        columns = (
            "call",
            "links",
            "message",
            "times",
            "took",
            "waited",
            "beside",
            "predicted",
            "ratio",
            "bandwidth",
        )
        left = len(found) - len(rows)
        notes = (
            "took: time of calls that ran alone, if any did; beside: share of the time with other kernels.",
            "ratio: took / predicted; bandwidth: the factor on these links that explains the difference.",
        )
        table = Table(title=f"Communication on the links of {machine.name}", columns=columns, rows=rows, notes=notes)
        console.print(table.text())
        if left:
            console.print(f"And {left} more kinds of calls (--top shows more).")


def _tell_spent(before: Spent, after: Spent, changes: Sequence[LinkChange], console: Console) -> None:
    """The communication time averaged over ranks, as text."""
    from plans.units import Seconds

    totals = [("Average over ranks", before), *([(f"With {', '.join(map(str, changes))}", after)] if changes else [])]
    for name, total in totals:
        alone = f"{Seconds(total.exposed_s)} without other kernels"
        console.print(f"{name}: {Seconds(total.communication_s)} in communication, {alone}")


def _tell(tier: Tier, machine: str, console: Console) -> None:
    """The result for a tier of links, in words."""
    from plans.units import Seconds

    console.print(
        f"{tier.name}: {tier.times:,} calls took {Seconds(tier.measured_s)}, predicted {Seconds(tier.predicted_s)}"
    )
    if not tier.is_whole:
        console.print("  Not all ranks have a trace, so these times may include waiting for other ranks.")
    if not tier.is_alone:
        console.print("  Other kernels ran during all calls and slowed them down: the links may be faster than shown.")
    if tier.bandwidth_factor is not None and tier.low is not None and tier.high is not None:
        factor = f"{tier.bandwidth_factor:.2f}"
        console.print(
            f"  Large messages reach {factor} of the predicted bandwidth ({tier.low:.2f} to {tier.high:.2f})."
        )
        if abs(tier.bandwidth_factor - 1) > _EQUAL:
            asked = f"--machine {machine} --link {tier.number}:bandwidth={factor}"
            console.print(f"  To apply this to a plan: twofold whatif plan.json {asked}")
    if tier.short_extra_s is not None and abs(tier.short_extra_s) >= _LEAST_S:
        more = "more" if tier.short_extra_s >= 0 else "less"
        console.print(f"  Short messages took {Seconds(abs(tier.short_extra_s))} {more} than predicted.")
