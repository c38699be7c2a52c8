"""The commands: one function each, whose arguments are its flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import tyro

from twofold.cli import run_command
from twofold.commands.plan import plan
from twofold.commands.predict import predict, validate
from twofold.commands.simulate import PlanFile, simulate
from twofold.commands.whatif import whatif

__all__ = ["COMMANDS"]

Target = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN.json|SCRIPT.py")]


def demo(
    case: str = "multiple_mix",
    steps: int = 156,
    epochs: int | None = None,
    data: str | None = None,
    machine: str | None = None,
    out: str = "runs",
    log_dir: str = "log_output",
    seed: int = 1,
    port: int | None = None,
    json: bool = False,
) -> int:
    """Plan, simulate, run on 8 processes and verify an example on real digits; writes a report and a trace.

    Args:
        case: multiple_mix (hybrid parallel), advanced_operator_parallel (layouts) or multiple_copy (slices).
        steps: training steps (one pass over the shipped digits has 156).
        epochs: passes over the data set, instead of steps.
        data: folder with MNIST's IDX files; 5,000 shipped digits otherwise.
        machine: machine file to plan with, instead of calibrating this machine now.
        out: results go to OUT/CASE.
        log_dir: what the ranks print goes to LOG_DIR/1/rank.N/stdout.
        seed: of weights and data order.
        port: of the rendezvous; a free one otherwise.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console
    from twofold.demo import demo as run_demo

    def work() -> tuple[Any, bool]:
        console = Console(json=json, num_steps=8)
        result = run_demo(
            case, steps=steps, epochs=epochs, data=data, machine=machine, out=out, log_dir=log_dir, seed=seed,
            port=port, console=console,
        )  # fmt: skip
        return result.to_json(), result.verification.passed

    return run_command(work, json)


def run(
    target: Target,
    script_args: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    devices: int = 8,
    steps: int = 100,
    model: str = "",
    data: str | None = None,
    random_data: bool = False,
    machine: str | None = None,
    emulate: str | None = None,
    dilate: float | None = None,
    out: str | None = None,
    log_dir: str = "log_output",
    seed: int = 1,
    timeout: float | None = None,
    port: int | None = None,
    json: bool = False,
) -> int:
    """Train a plan on real devices for some steps, or start a script of yours on several ranks.

    Args:
        target: plan file (.json), or script (.py) that calls Model.train.
        script_args: passed to the script.
        devices: ranks for a script; a plan says itself how many it needs.
        steps: training steps of a plan.
        model: package.module:function or file.py:function, for initial weights; random ones otherwise.
        data: folder with MNIST's IDX files; the shipped digits otherwise.
        random_data: feed random numbers instead of digits.
        machine: for a script: machine that Model.train plans for (TWOFOLD_MACHINE).
        emulate: let every instruction take the time that this machine's model says.
        dilate: that time is stretched by this factor; by default the shortest instruction lasts 50 ms.
        out: folder for results; a temporary one otherwise.
        log_dir: what the ranks print goes to LOG_DIR/1/rank.N/stdout.
        seed: of weights and data order.
        timeout: seconds for the whole run.
        port: of the rendezvous; a free one otherwise.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    say = Console(json=json)

    def script() -> tuple[Any, bool]:
        from executor.launch.launch import Follow, Nodes, launch

        env = {"TWOFOLD_MACHINE": machine} if machine else {}
        ended = launch(
            target, num_ranks=devices, args=script_args, log_dir=log_dir, timeout_s=timeout, env=env,
            nodes=Nodes(port=port), follow=Follow(lambda rank, line: say.say(line)),
        )  # fmt: skip
        say.say(f"{devices} ranks ended well after {ended.elapsed_s:.1f} s, logs in {log_dir}/1/rank.N/stdout")
        return {"elapsed_s": ended.elapsed_s, "devices": devices}, True

    def saved_plan() -> tuple[Any, bool]:
        from plans.plan import load_plan
        from twofold.running import run as run_plan

        result = run_plan(
            load_plan(target), steps=steps, data="random" if random_data else "digits", data_folder=data, model=model,
            seed=seed, out=out, log_dir=log_dir, emulate=emulate, dilate=dilate, timeout_s=timeout, port=port,
            print_every=max(1, steps // 10), on_line=lambda rank, line: say.say(line),
        )  # fmt: skip
        kind = result.timeline.kind
        say.say(f"{kind} step {result.step_s * 1e3:.3f} ms (median), loss {result.losses[-1]:.6g}, {result.peak_text}")
        return {
            "kind": kind,
            "step_s": result.step_s,
            "losses": [float(loss) for loss in result.losses],
            "peak_bytes": max(result.peak_bytes),
            "device_peak_bytes": max(result.device_peak_bytes),
            "plan_digest": result.plan_digest,
            "collectives_match": result.collectives_match,
        }, result.collectives_match is not False

    return run_command(script if target.endswith(".py") else saved_plan, json)


def verify(
    plan: PlanFile,
    model: str,
    machine: str | None = None,
    steps: int = 100,
    data: str | None = None,
    emulate: str | None = None,
    dilate: float | None = None,
    out: str | None = None,
    log_dir: str = "log_output",
    seed: int = 1,
    port: int | None = None,
    json: bool = False,
) -> int:
    """Run a plan on the digits and compare it with single-process training, its planned communication, its prediction.

    Args:
        plan: plan file.
        model: package.module:function or file.py:function that the plan was made for.
        machine: machine file to predict with; no prediction otherwise.
        steps: training steps.
        data: folder with MNIST's IDX files; the shipped digits otherwise.
        emulate: let every instruction take the time that this machine's model says (and predict with it).
        dilate: that time is stretched by this factor; by default the shortest instruction lasts 50 ms.
        out: folder for results and the report; a temporary one otherwise.
        log_dir: what the ranks print goes to LOG_DIR/1/rank.N/stdout.
        seed: of weights and data order.
        port: of the rendezvous; a free one otherwise.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    def work() -> tuple[Any, bool]:
        from costmodels import Machine
        from executor.launch.launch import check_port
        from plans.plan import load_plan
        from reports import verification_table
        from simulator import simulate as predict
        from twofold.verification import verify as verify_plan

        check_port(port)
        say = Console(json=json)
        loaded, source = load_plan(plan), machine or emulate
        predicted = None if source is None else predict(loaded, Machine.load(source))
        found = verify_plan(
            loaded, model=model, predicted=predicted, steps=steps, data_folder=data, seed=seed, out=out,
            log_dir=log_dir, emulate=emulate, dilate=dilate, port=port, print_every=max(1, steps // 10),
            on_line=lambda rank, line: say.say(line),
        )  # fmt: skip
        say.say(verification_table(found.checks()).text())
        return found.to_json(), found.passed

    return run_command(work, json)


def calibrate(
    devices: int | None = None,
    out: str = "machine.json",
    name: str | None = None,
    device: str = "auto",
    points: str | None = None,
    base: str | None = None,
    minutes: float | None = None,
    quick: bool = False,
    report: str | None = None,
    json: bool = False,
) -> int:
    """Measure this machine (CPU ranks, or its accelerators), fit its model and write a machine file.

    It takes under 5 minutes, under one with --quick. Under torchrun it measures the devices of all its ranks. A second
    run with the same points goes on where the first one ended; delete them, or name others, to measure anew.

    Args:
        devices: to measure together; all accelerators of this host, or 8 ranks of a CPU, unless stated.
        out: machine file; replaced only when all went well.
        name: of the machine.
        device: auto, cpu, cuda or npu.
        points: file of measured points, appended to; OUT with the ending .points.jsonl unless stated.
        base: accelerators: device of the catalogue to start from, where the driver's name does not tell.
        minutes: of measuring.
        quick: only what tells most.
        report: write the calibration report to this HTML file.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    def work() -> tuple[Any, bool]:
        from plans.files import check_writable
        from twofold.calibration import calibrate as measure

        if report is not None:
            check_writable(report)  # before the machine file is replaced
        say = Console(json=json)
        found = measure(
            devices, device=device, name=name, out=out, points=points, base=base, minutes=minutes, quick=quick,
            on_progress=say.say,
        )  # fmt: skip
        if found is None:  # rank 0 speaks for all
            return {}, True
        for line in found.residuals:
            say.say(line)
        for probe in found.probes:
            say.say(
                f"{probe.name}: predicted {probe.predicted_s * 1e3:.2f} ms, measured {probe.measured_s * 1e3:.2f} ms"
            )
        if report is not None:
            from twofold.calibration import write_report

            say.say(f"saved {write_report(found, report)}")
        interval = found.machine.interval
        say.say(f"saved {Path(out)}; 90 % interval of a step time {interval.low - 1:+.0%} to {interval.high - 1:+.0%}")
        return {
            "file": out,
            "host_scale": found.machine.host_scale,
            "interval_low": interval.low,
            "interval_high": interval.high,
            "residuals": list(found.residuals),
            "probes": [asdict(probe) for probe in found.probes],
            "points": None if found.points is None else str(found.points),
        }, True

    return run_command(work, json)


COMMANDS: dict[str, Callable[..., int]] = {
    "demo": demo,
    "plan": plan,
    "simulate": simulate,
    "whatif": whatif,
    "run": run,
    "verify": verify,
    "calibrate": calibrate,
    "predict": predict,
    "validate": validate,
}
"""Name of a command -> what runs it."""
