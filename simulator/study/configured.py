"""What-if questions about a transformer for given degrees: each is a forecast, in milliseconds for any number of
devices.

The results are those of `Scenarios` for a program. Changes of the machine or of tiers of links give another machine;
slow ranks slow their pipelines (`stragglers`). Changes whose effect depends on single instructions are left to the
event engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from costmodels.machine.machine import Machine
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig
from plans.timeline import PS_PER_S
from simulator.engine.link_change import machine_with
from simulator.forecast.predict import forecast, step_forecast, step_machine
from simulator.predict import Outcome
from simulator.result import Forecast
from simulator.stacks import Stack
from simulator.study.goodput import goodput
from simulator.study.stragglers import slow_pipelines
from simulator.study.whatif import WhatIf

__all__ = ["Configured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A transformer with given degrees on a machine.

    Args:
        config: of the transformer.
        degrees: how it is spread.
        machine: it runs on.
        stack: the software that runs it.
    """

    config: TransformerConfig
    degrees: Degrees
    machine: Machine
    stack: Stack = field(default_factory=Stack)

    def engine_only(self, what_if: WhatIf) -> str:
        """The parts of a what-if that need the event engine, in words; "" if a forecast can answer it."""
        own = self.stack.runs_programs and not self.degrees.takes_turns
        for reason, is_so in (
            ("jitter", bool(what_if.jitter)),
            ("other devices for some ranks", bool(what_if.devices)),
            ("changes of single links", any(change.ranks or change.failed for change in what_if.links)),
            ("ranks that are faster than others", any(factor < 1 for factor in what_if.slowdown.values())),
            ("slow ranks of steps that take turns, or of other software", bool(what_if.slowdown) and not own),
        ):
            if is_so:
                return reason
        return ""

    def outcome(self, what_if: WhatIf) -> Outcome:
        """The outcome of changes, including checkpoints and failures.

        Raises:
            TwofoldError: changes that need the event engine; ranks and tiers that are not there; as `forecast` and
                `goodput`.
        """
        if reason := self.engine_only(what_if):
            raise TwofoldError(f"{reason}: not supported by forecasts; simulate a plan with `twofold whatif PLAN.json`")
        machine, seen = self._machine(what_if), self.forecast(what_if)
        factor, bubble = 1.0, seen.bubble_fraction
        if what_if.slowdown:
            factor = self._slow_factor(machine, seen, what_if.slowdown)
            idle_s = seen.step_s * (factor - 1 + bubble) - self._longer_s(seen, what_if.slowdown)
            bubble = max(0.0, idle_s / (seen.step_s * factor))
        step_s = seen.step_s * factor
        left = goodput(
            step_s, self.degrees.num_ranks, checkpoints=what_if.checkpoints, failures=what_if.failures,
            checkpoint_bytes=self.checkpoint_bytes if what_if.checkpoints is not None else 0,
        )  # fmt: skip
        return Outcome(
            step_s=step_s, low_s=seen.low_s * factor, high_s=seen.high_s * factor, bubble_fraction=bubble,
            exposed_comm_s=seen.exposed_comm_s, host_wait_s=seen.host_wait_s, peak_bytes=seen.peak_bytes, goodput=left,
        )  # fmt: skip

    def forecast(self, what_if: WhatIf) -> Forecast:
        """The forecast on the machine with its figures and tiers of links changed; nothing else of the what-if counts.

        Raises:
            TwofoldError: as `forecast`; tiers that are not there.
        """
        return forecast(self.config, self.degrees, self._machine(what_if), stack=self.stack)

    def _machine(self, what_if: WhatIf) -> Machine:
        return machine_with(what_if.machine(self.machine), what_if.links)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights and optimizer states of the rank that keeps most of them."""
        if self.stack.runs_programs:
            plain = replace(self.degrees, interleave=1, overlap_pairs=False)
            return step_forecast(self.config, plain, self.machine).kept_bytes
        seen = forecast(self.config, self.degrees, self.machine, stack=self.stack)
        return seen.memory.get("weight", 0) + seen.memory.get("optimizer", 0)

    def _slow_factor(self, machine: Machine, seen: Forecast, slowdown: Mapping[int, float]) -> float:
        """The factor by which slow ranks lengthen the step."""
        if absent := [rank for rank in slowdown if not 0 <= rank < self.degrees.num_ranks]:
            last = self.degrees.num_ranks - 1
            raise TwofoldError(f"slowdown of rank {absent[0]}: the configuration's ranks are 0 to {last}")
        step = step_forecast(self.config, self.degrees, step_machine(self.config, self.degrees, machine))
        longer_ps = max(step.slowed_by_ps(slow_pipeline) for slow_pipeline in slow_pipelines(self.degrees, slowdown))
        return 1 + longer_ps / PS_PER_S / seen.step_s

    def _longer_s(self, seen: Forecast, slowdown: Mapping[int, float]) -> float:
        """The extra compute time of ranks, averaged over all of them."""
        stride = self.degrees.strides[-1]
        stages = (rank // stride % self.degrees.pp for rank in slowdown)
        longer = zip(slowdown.values(), stages, strict=True)
        return sum((factor - 1) * seen.rank_s[stage]["compute"] for factor, stage in longer) / self.degrees.num_ranks
