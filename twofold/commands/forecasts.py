"""Forecast given degrees and print the result, for `twofold predict` and `twofold simulate --recost`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.degrees import Degrees
    from plans.model.transformer import TransformerConfig
    from simulator.stacks import Stack
    from twofold.console import Console

__all__ = ["show_forecast"]


def show_forecast(
    config: TransformerConfig,
    degrees: Degrees,
    machine: Machine,
    stack: Stack,
    console: Console,
    report: str | None = None,
) -> dict[str, Any]:
    """Forecast, print, write the report, and return the JSON object."""
    from costmodels.utilization import mfu
    from plans.figures import figures_of, figures_text
    from plans.units import Bytes, Share
    from search.devices import describe
    from search.devices.result_json import degrees_json
    from simulator.forecast import forecast

    seen = forecast(config, degrees, machine, stack=stack)
    figures, fits = figures_of(seen), seen.peak_bytes <= machine.room_bytes
    tokens = degrees.global_batch * config.seq / seen.step_s / degrees.num_ranks
    reached = mfu(
        config, machine, sequences=degrees.global_batch, num_devices=degrees.num_ranks, step_s=seen.step_s
    )  # fmt: skip
    devices = f"{degrees.num_ranks} device{'s' * (degrees.num_ranks != 1)}"
    console.print(f"{config.name} on {devices} of {machine.name}, run by {stack.name}: {describe(degrees)}")
    figures_shown = figures_text(figures, low_s=seen.low_s, high_s=seen.high_s)
    console.print(f"{figures_shown}, {tokens:,.0f} tokens/s per device, MFU {Share(reached)}")
    parts = ", ".join(f"{role} {Bytes(size)}" for role, size in seen.memory.items() if size)
    console.print(f"memory: {parts}; a device has room for {Bytes(machine.room_bytes)}")
    if not fits:
        console.print("It does not fit.")
    result = {
        **degrees_json(degrees),
        **figures,
        "step_low_s": seen.low_s,
        "step_high_s": seen.high_s,
        "memory_bytes": dict(seen.memory),
        "fits": fits,
        "tokens_per_s_per_device": tokens,
        "mfu": reached,
        "num_ranks": degrees.num_ranks,
        "model": config.name,
        "machine": machine.name,
        "stack": stack.name,
    }
    if report is not None:
        from reports.prediction import prediction_page
        from search.devices import Candidate, Problem

        problem = Problem(
            config=config, machine=machine, num_devices=degrees.num_ranks, global_batch=degrees.global_batch,
            stack=stack, optimizer=degrees.optimizer, fused=degrees.fused,
        )  # fmt: skip
        with console.doing("writing the report"):
            page = prediction_page(
                problem, Candidate(degrees=degrees, forecast=seen), data=result, command=console.command
            )
            saved = page.write(report)
        console.print(f"saved {saved}")
    return result
