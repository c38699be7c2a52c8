"""`twofold run`: run a plan or a training script on real ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from plans.errors import TwofoldError
from twofold.commands.options import LaunchOptions, NodeOptions, Output
from twofold.commands.values import AtLeast1

if TYPE_CHECKING:
    from twofold.console import Console

__all__ = ["Run"]

PlanOrScript = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json|SCRIPT.py")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run a plan on real devices, or start a training script on several ranks.

    Args:
        target: plan file (.json), or script (.py) that calls Model.train.
        script_args: arguments of the script.
        devices: number of ranks of a script; a plan has its own.
        model: package.module:function or file.py:function with initial weights; random by default.
        machine: for scripts: the machine that Model.train plans for (TWOFOLD_MACHINE).
    """

    target: PlanOrScript
    script_args: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    devices: AtLeast1 | None = None
    model: str = ""
    machine: str | None = None
    launch: LaunchOptions = field(default_factory=LaunchOptions)
    place: NodeOptions = field(default_factory=NodeOptions)
    output: Output = field(default_factory=Output)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Run the plan or the script. A plan passes if it communicated as planned."""
        return self._script(console) if self.target.endswith(".py") else self._plan(console)

    def _script(self, console: Console) -> tuple[dict[str, Any], bool]:
        from executor.launch.launch import Follow, launch
        from executor.launch.nodes import refusing

        with refusing(self.place.stated):
            if self.launch.execution is not None or self.launch.profile or not self.launch.fused:
                raise TwofoldError(
                    "--execution, --profile and --no-fused are for plans; in a script use Model(execution='eager')"
                )
        log_dir, devices = self.launch.log_dir, 8 if self.devices is None else self.devices
        with console.doing(f"running {self.target}"):
            ended = launch(
                self.target, num_ranks=devices, args=self.script_args, log_dir=log_dir,
                timeout_s=self.launch.timeout, nodes=self.place.stated,
                env={"TWOFOLD_MACHINE": self.machine} if self.machine else {},
                follow=Follow(lambda rank, line: console.print(line)),
            )  # fmt: skip
        console.print(f"{devices} ranks finished after {ended.elapsed_s:.1f} s, logs in {log_dir}/1/rank.N/stdout")
        return {"elapsed_s": ended.elapsed_s, "devices": devices}, True

    def _plan(self, console: Console) -> tuple[dict[str, Any], bool]:
        from executor.data.sources import usual_data
        from executor.launch.nodes import refusing
        from executor.launch.run_plan import run
        from plans.figures import figures_text
        from plans.plan import load_plan
        from plans.units import Bytes

        launch = self.launch
        with refusing(self.place.stated):
            for name, value in (("devices", self.devices), ("machine", self.machine)):
                if value is not None:
                    raise TwofoldError(f"--{name} is for scripts; omit it for a plan")
            plan = load_plan(self.target)
        plan = msgspec.structs.replace(plan, fused=plan.fused and launch.fused)
        with console.doing(f"running {launch.steps} steps on {plan.num_ranks} ranks"):
            result = run(
                plan, steps=launch.steps, data=launch.data or usual_data(plan.graph), model=self.model,
                seed=launch.seed, out=launch.out,
                log_dir=launch.log_dir, emulate=launch.emulate, dilate=launch.dilate, timeout_s=launch.timeout,
                nodes=self.place.stated, execution=launch.execution, profile_steps=launch.profile,
                print_every=max(1, launch.steps // 10), on_line=lambda rank, line: console.print(line),
            )  # fmt: skip
        kind, device_bytes = result.timeline.kind, max(result.device_peak_bytes)
        figures = result.figures
        console.print(f"{kind} (median step of {launch.steps}): {figures_text(figures)}, loss {result.losses[-1]:.6g}")
        if device_bytes:
            reserved = Bytes(max(result.device_reserved_bytes))
            console.print(f"the device's allocator: {Bytes(device_bytes)} per rank at most, {reserved} reserved")
        if remark := launch.ran(result.execution, result.fallback):
            console.print(remark)
        return {
            "kind": kind,
            **figures,
            "losses": [float(loss) for loss in result.losses],
            "device_peak_bytes": device_bytes,
            "device_peak_bytes_by_rank": list(result.device_peak_bytes),
            "execution": result.execution,
            "fallback": result.fallback,
            "plan_digest": result.plan_digest,
            "collectives_match": result.collectives_match,
        }, result.collectives_match is not False
