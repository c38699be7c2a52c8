"""`twofold links`: what a recorded run says about the links of a machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from twofold.commands.options import MachineOption, Output, check_at_least

if TYPE_CHECKING:
    from collections.abc import Sequence

    from costmodels import Machine
    from interop.link_speeds import LinkCall, Tier
    from twofold.console import Console

__all__ = ["Links"]

_SHOWN = 20

_EQUAL = 0.02
"""Factors that are no farther from 1 need no question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Say what recorded communication tells about links: every kind of call beside its predicted time on a machine.

    Args:
        traces: a trace of torch's profiler for each rank, or a folder with them; a table that nccl-tests printed; or a
            log of NCCL (NCCL_DEBUG=INFO, NCCL_DEBUG_SUBSYS=COLL), which has no times.
        top: kinds of calls to show, those that took longest first.
    """

    traces: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TRACE ...")]
    target: MachineOption
    top: int = _SHOWN
    output: Output = field(default_factory=Output)

    def run(self, say: Console) -> tuple[dict[str, Any], bool]:
        """Read, price and compare."""
        from costmodels import Machine
        from interop.link_speeds import link_calls, tiers_of_calls
        from interop.link_traces import read_links

        check_at_least("top", self.top, 1)
        machine = Machine.load(self.target.machine)
        with say.doing("reading the traces"):
            seen = read_links(self.traces)
        found = link_calls(seen.calls, machine)
        tiers = tiers_of_calls(found, machine)
        self._show(found, machine, say)
        for each in seen.assumed:
            say.say(f"assumed: {each}")
        for reason, count in seen.skipped.items():
            say.say(f"left out {count}: {reason}")
        for tier in tiers:
            _tell(tier, self.target.machine, say)
        return {
            "source": seen.source, "machine": machine.name, "tiers": [asdict(each) for each in tiers],
            "calls": [{**asdict(each), "bus_Bps": each.bus_Bps} for each in found],
            "assumed": list(seen.assumed), "left_out": dict(seen.skipped),
        }, True  # fmt: skip

    def _show(self, found: Sequence[LinkCall], machine: Machine, say: Console) -> None:
        from reports.tables import Table
        from reports.units import Bytes, Count, Quantity, Seconds

        rows = [
            (f"{each.call} of {each.num_ranks}", machine.links[each.tier].name, Bytes(each.size_bytes),
             Count(each.times), None if each.seconds is None else Seconds(each.seconds), Seconds(each.waited_s),
             f"{each.beside:.0%}", Seconds(each.predicted_s),
             None if each.seconds is None else Quantity(each.seconds / each.predicted_s),
             None if each.bandwidth_factor is None else f"{each.bandwidth_factor:.2f}")
            for each in found[: self.top]
        ]  # fmt: skip
        columns = (
            "call", "links", "message", "times", "took", "waited", "beside", "predicted", "ratio", "bandwidth",
        )  # fmt: skip
        left = len(found) - len(rows)
        notes = (
            "took: of calls that ran alone, if any did; beside: share of the time with other kernels, which slow it.",
            "ratio: took / predicted; bandwidth: the factor on the bandwidth of these links that explains it.",
        )
        table = Table(title=f"Communication on the links of {machine.name}", columns=columns, rows=rows, notes=notes)
        say.say(table.text(width=100))
        if left:
            say.say(f"And {left} more kinds of calls (--top shows more).")


def _tell(tier: Tier, machine: str, say: Console) -> None:
    """What a tier of links comes to, in words."""
    from reports.units import Seconds

    say.say(f"{tier.name}: {tier.times:,} calls took {Seconds(tier.measured_s)}, predicted {Seconds(tier.predicted_s)}")
    if not tier.is_whole:
        say.say("  Not all ranks have a trace, so these times may hold waiting for other ranks.")
    if not tier.is_alone:
        say.say("  Other kernels ran beside all calls and slowed them: the links may be faster than these times say.")
    if tier.bandwidth_factor is not None and tier.low is not None and tier.high is not None:
        factor = f"{tier.bandwidth_factor:.2f}"
        say.say(
            f"  Large messages reach {factor} of the bandwidth that the prediction takes ({tier.low:.2f} to "
            f"{tier.high:.2f})."
        )
        if abs(tier.bandwidth_factor - 1) > _EQUAL:
            asked = f"--machine {machine} --link {tier.number}:bandwidth={factor}"
            say.say(f"  What that means for a plan: twofold whatif plan.json {asked}")
    if tier.short_extra_s is not None:
        more = "more" if tier.short_extra_s >= 0 else "less"
        say.say(f"  Short messages took {Seconds(abs(tier.short_extra_s))} {more} than predicted.")
