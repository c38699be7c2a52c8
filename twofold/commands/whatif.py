"""The command that predicts a saved plan with changes: `whatif`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plans.errors import TwofoldError
from twofold.cli import run_command
from twofold.commands.simulate import PlanFile, load_scheduled

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from plans.program import Program
    from plans.timeline import Timeline
    from simulator import Job, LinkChange, Outcome, WhatIf

__all__ = ["whatif"]

Values = tuple[float, ...]

_NEEDS = {"checkpoint_GBps": "checkpoint_every", "restart_s": "device_mtbf_hours"}
"""Knobs that say more about another one, and mean nothing without it."""


def whatif(
    plan: PlanFile,
    machine: str,
    bandwidth: Values = (),
    latency: Values = (),
    compute: Values = (),
    memory: Values = (),
    dispatch: Values = (),
    slow: tuple[str, ...] = (),
    jitter: Values = (),
    seed: int | None = None,
    link: tuple[str, ...] = (),
    device: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
    on: str | None = None,
    checkpoint_every: tuple[int, ...] = (),
    checkpoint_GBps: Values = (),
    checkpoint_async: bool = False,
    device_mtbf_hours: Values = (),
    restart_s: Values = (),
    schedule: str | None = None,
    sensitivity: bool = False,
    by: float | None = None,
    picture: str | None = None,
    report: str | None = None,
    steps: int = 3,
    json: bool = False,
) -> int:
    """Predict a plan with changes to its machine, beside the prediction without; one knob may have several values.

    Args:
        plan: plan file.
        machine: shipped machine or machine file.
        bandwidth: factors on the bandwidth of all links, e.g. --bandwidth 0.5 1 2.
        latency: factors on the latency of all links and the fixed parts of communication.
        compute: factors on the arithmetic rates of devices.
        memory: factors on the memory bandwidth of devices.
        dispatch: factors on the host time to issue an instruction.
        slow: RANKS=FACTOR: ranks that take so many times as long for what they do themselves, e.g. 3=1.2, 0-7=1.05, or
            stage1=1.3 for the ranks of a stage.
        jitter: spread of such factors, drawn anew for every rank, step and instruction (0.05 is about 5 %).
        seed: of the jitter; 1 by default.
        link: TIER[:RANKS]:CHANGES, e.g. NVLink:bandwidth=0.5, 1:0-7:latency=2, or 0:2~5:failed for one link.
        device: RANKS=MACHINE: ranks with the device of another machine, e.g. 4-7=h200-x8 or stage0=a100-80gb-x8.
        beside: PLAN.json=DEVICES: another job at the same time, e.g. other.json=4-7; it shares links and processors.
        on: devices of this plan, e.g. 0-3,8-11, where they are not the first ones.
        checkpoint_every: steps between checkpoints.
        checkpoint_GBps: of one rank, in 10^9 bytes a second; 1 by default.
        checkpoint_async: training goes on while a checkpoint is written.
        device_mtbf_hours: mean time between failures of one device.
        restart_s: from a failure to the next step.
        schedule: of the pipeline instead of the plan's: a name, or a file (.csv, .txt).
        sensitivity: turn every knob down and up, and sort them by effect.
        by: by which share they are turned; 0.2 by default.
        picture: write the sensitivity as an SVG picture there.
        report: write an HTML report there: the tables, the sensitivity, and the step with the (first) change.
        steps: to simulate; the last is reported.
        json: print one JSON object on stdout, progress on stderr.
    """
    from twofold.console import Console

    given: dict[str, Sequence[float]] = {
        "bandwidth": bandwidth, "latency": latency, "compute": compute, "memory": memory, "dispatch": dispatch,
        "jitter": jitter, "checkpoint_every": checkpoint_every, "checkpoint_GBps": checkpoint_GBps,
        "device_mtbf_hours": device_mtbf_hours, "restart_s": restart_s,
    }  # fmt: skip

    def work() -> tuple[Any, bool]:
        from costmodels import Machine
        from plans.files import check_writable
        from plans.lower import lower
        from reports import Report, sensitivity_table, tornado_picture, what_if_table, write_report
        from simulator import Job, WhatIf, outcome_of, simulate_jobs
        from simulator import simulate as predict
        from simulator.study.sensitivity import sensitivity as turned
        from simulator.study.whatif import KNOBS

        if several := [name for name, values in given.items() if len(values) > 1][1:]:
            raise TwofoldError(f"--{several[0].replace('_', '-')} has several values too; one knob at a time is varied")
        idle = (
            ("--checkpoint-async", checkpoint_async and not checkpoint_every, "--checkpoint-every"),
            ("--seed", seed is not None and not jitter, "--jitter"),
            ("--by", by is not None and not sensitivity and picture is None, "--sensitivity or --picture"),
        )
        if unused := [(name, needed) for name, is_idle, needed in idle if is_idle]:
            raise TwofoldError("{} changes nothing without {}".format(*unused[0]))
        for file in (picture, report):
            if file is not None:
                check_writable(file)
        if by is not None and not 0 < by < 1:
            raise TwofoldError(f"--by {by:g}: knobs are turned by a share above 0 and below 1")
        loaded, target = load_scheduled(plan, schedule, steps), Machine.load(machine)
        fixed = WhatIf(
            slowdown=_slowdown(slow, loaded), links=tuple(map(_link, link)),
            devices=_devices(device, Machine.load, loaded), seed=1 if seed is None else seed,
        )  # fmt: skip
        program = lower(loaded)
        places = _ranks(on, f"--on {on}") if on is not None else tuple(range(program.num_ranks))
        own = Job(program=program, ranks=places)
        others = [Job(program=other, ranks=ranks) for other, ranks in map(_job, beside)]
        together = ", ".join(f"beside {text.replace('=', ' on ')}" for text in beside)
        known: dict[str, Outcome] = {}

        def timeline_of(what_if: WhatIf, jobs: Sequence[Job]) -> Timeline:
            if not jobs and on is None:
                return predict(program, target, num_steps=steps, what_if=what_if)
            return simulate_jobs([own, *jobs], target, num_steps=steps, what_if=_placed(what_if, places))[0]

        def of(what_if: WhatIf) -> Outcome:
            key = str(what_if)
            if key not in known:
                known[key] = outcome_of(timeline_of(what_if, others), program, what_if)
            return known[key]

        base = outcome_of(timeline_of(WhatIf(), ()), program, WhatIf())
        single = {name: values[0] for name, values in given.items() if len(values) == 1}
        varied = [(name, value) for name, values in given.items() if len(values) > 1 for value in values]
        first = dict(varied[:1])
        start = _case(fixed, single | first, not checkpoint_async)
        # what all have in common: settings that mean nothing without the varied one are said with it
        alone = {name: value for name, value in single.items() if _NEEDS.get(name) not in first}
        shared = _case(fixed, alone, not checkpoint_async)
        mark = "x" if first.keys() & KNOBS.keys() else ""
        cases = [
            (f"{name.replace('_', ' ')} {mark}{value:g}", _case(fixed, single | {name: value}, not checkpoint_async))
            for name, value in varied
        ]
        changed = [(name, of(case)) for name, case in cases]
        if not varied and (others or not start.is_none):
            changed = [(", ".join([*([] if start.is_none else [str(start)]), *([together] * bool(others))]), of(start))]
        say = Console(json=json)
        said = ([] if shared.is_none else [str(shared)]) + [together] * bool(others)
        said += [f"{name.replace('_', ' ')} {value:g}" for name, value in single.items() if name not in alone]
        common = f"Every change with {', '.join(said)}." if varied and said else ""
        shown: list[Any] = [what_if_table(base, changed, common)]
        say.say(shown[0].text(width=160))
        found: dict[str, Any] = {
            "base": _numbers(base, base),
            "common": common,
            "changed": [{"what_if": name, **_numbers(each, base)} for name, each in changed],
        }
        if sensitivity or picture is not None:
            # of several factors on the machine none is the one to look around; checkpoints need one
            around = shared if first.keys() & {*KNOBS, "jitter"} else start
            effects = turned(program, target, around, by=0.2 if by is None else by, num_steps=steps, evaluate=of)
            told = "" if around.is_none else f", with {around}"
            shown += [tornado_picture(effects, title=f"What a step of {loaded.graph.name} depends on{told}")]
            shown += [sensitivity_table(effects)]
            say.say(shown[-1].text())
            if picture is not None:
                say.say(f"saved {shown[-2].save(picture)}")
            found["sensitivity"] = [
                {
                    "knob": each.knob, "by": each.by, "base_s": each.base_s, "low_s": each.low_s, "high_s": each.high_s,
                    "swing_s": each.swing_s,
                }
                for each in effects
            ]  # fmt: skip
        if report is not None:
            told = cases[0][0] if cases else changed[0][0] if changed else str(start)
            written = write_report(
                report, Report(title=f"What if: {loaded.graph.name} on {target.name}", plan=loaded, program=program,
                predicted=timeline_of(cases[0][1] if cases else start, others),
                what_if=shown, notes=[f"The pictures and the tables below them show: {told}."],
                command=f"twofold whatif {plan} --machine {machine} ...",
            ))  # fmt: skip
            say.say(f"saved {written}")
        return found, True

    return run_command(work, json)


def _case(fixed: WhatIf, values: dict[str, float], blocking: bool) -> WhatIf:
    from simulator import Checkpoints, Failures

    named = {name: value for name, value in values.items() if not name.startswith(("checkpoint", "device", "restart"))}
    checkpoints = failures = None
    if "checkpoint_every" in values:
        checkpoints = Checkpoints(
            every_steps=int(values["checkpoint_every"]), write_Bps=1e9 * values.get("checkpoint_GBps", 1.0),
            blocking=blocking,
        )  # fmt: skip
    elif "checkpoint_GBps" in values:
        raise TwofoldError("--checkpoint-GBps needs --checkpoint-every, the steps between checkpoints")
    if "device_mtbf_hours" in values:
        failures = Failures(
            device_mtbf_s=3600 * values["device_mtbf_hours"], restart_s=values.get("restart_s", 0.0)
        )  # fmt: skip
    elif "restart_s" in values:
        raise TwofoldError("--restart-s needs --device-mtbf-hours, the mean time between failures of a device")
    changed = replace(fixed, checkpoints=checkpoints, failures=failures)
    for name, value in named.items():
        changed = replace(changed, **{name: value})  # type: ignore[arg-type]
    return changed


def _link(text: str) -> LinkChange:
    from simulator import LinkChange

    return LinkChange.parse(text)


def _ranks(text: str, option: str) -> tuple[int, ...]:
    from simulator.engine.link_change import read_ranks

    try:
        return read_ranks(text)
    except ValueError:
        raise TwofoldError(f"cannot read {option}; devices look like 0-3,8-11") from None


def _job(text: str) -> tuple[Program, tuple[int, ...]]:
    """The program and the devices of another job."""
    from plans.lower import lower
    from plans.plan import load_plan

    path, _, devices = text.rpartition("=")
    if not path:
        raise TwofoldError(f"cannot read --beside {text}; it looks like --beside other.json=4-7")
    return lower(load_plan(path)), _ranks(devices, f"--beside {text}")


def _placed(what_if: WhatIf, places: Sequence[int]) -> WhatIf:
    """The same with the plan's ranks where they are on the machine."""

    def place(rank: int) -> int:
        if not 0 <= rank < len(places):
            raise TwofoldError(f"rank {rank} is changed, but the plan's ranks are 0 to {len(places) - 1}")
        return places[rank]

    return replace(
        what_if,
        slowdown={place(rank): factor for rank, factor in what_if.slowdown.items()},
        devices={place(rank): device for rank, device in what_if.devices.items()},
        links=tuple(replace(change, ranks=tuple(map(place, change.ranks))) for change in what_if.links),
    )


def _slowdown(texts: Sequence[str], plan: Plan) -> dict[int, float]:
    found: dict[int, float] = {}
    for text in texts:
        ranks, factor = _assignment(text, "--slow", "3=1.2", plan)
        if again := [rank for rank in ranks if rank in found]:
            raise TwofoldError(f"--slow {text}: rank {again[0]} has a factor already; give one for each rank")
        try:
            found |= dict.fromkeys(ranks, float(factor))
        except ValueError:
            raise TwofoldError(f"--slow {text}: {factor!r} is not a number") from None
    return found


def _devices(texts: Sequence[str], load: Callable[[str], Machine], plan: Plan) -> dict[int, Machine]:
    found: dict[int, Machine] = {}
    for text in texts:
        ranks, name = _assignment(text, "--device", "4-7=h200-x8", plan)
        if again := [rank for rank in ranks if rank in found]:
            raise TwofoldError(f"--device {text}: rank {again[0]} has a device already; give one for each rank")
        found |= dict.fromkeys(ranks, load(name))
    return found


def _assignment(text: str, flag: str, example: str, plan: Plan) -> tuple[tuple[int, ...], str]:
    """The ranks, given as such or as "stage1" or "stage0-2", and what stands behind them."""
    from simulator.engine.link_change import read_ranks

    ranks, _, value = text.partition("=")
    try:
        if not ranks.startswith("stage"):
            return read_ranks(ranks), value
        numbers = read_ranks(ranks.removeprefix("stage"))
        if absent := [number for number in numbers if not 0 <= number < len(plan.stages)]:
            raise TwofoldError(f"{flag} {text}: the plan's stages are 0 to {len(plan.stages) - 1}, not {absent[0]}")
        found = [rank for number in numbers for rank in plan.stages[number].mesh.rank_list]
        return tuple(dict.fromkeys(found)), value
    except TwofoldError:
        raise
    except ValueError:
        raise TwofoldError(f"cannot read {flag} {text}; it looks like {flag} {example}") from None


def _numbers(each: Outcome, base: Outcome) -> dict[str, Any]:
    return {
        "step_s": each.step_s,
        "change": each.step_s / base.step_s - 1 if base.step_s else 0.0,
        "bubble_fraction": each.bubble_fraction,
        "exposed_comm_s": each.exposed_comm_s,
        "peak_bytes": each.peak_bytes,
        "goodput": each.goodput.fraction,
        "effective_step_s": each.goodput.effective_step_s,
        "checkpoint_s": each.goodput.checkpoint_s,
        "best_checkpoint_every": each.goodput.best_every_steps,
    }
