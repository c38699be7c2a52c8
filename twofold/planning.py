"""Searching the degrees of a transformer, and showing, saving and exporting what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels import Machine
from plans.errors import TwofoldError

if TYPE_CHECKING:
    from reports import Table
    from search.scale import Answer
    from twofold.console import Console

__all__ = ["METHODS", "plan_degrees", "tables"]

METHODS = ("search", "data-parallel", "grid", "greedy")
"""How `plan_degrees` finds a configuration."""

_GiB = 2**30
_DRAWN = 5
"""Configurations with a bar in the report."""


def plan_degrees(
    model: str,
    machine: Machine,
    *,
    devices: int | None,
    global_batch: int | None,
    seq: int | None,
    layers: int | None,
    method: str,
    pins: dict[str, Any],
    stack: str,
    memory: str | None,
    time_limit: float | None,
    top_k: int,
    out: str,
    report: str | None,
    export: str | None,
    simulate: int,
    explain: bool,
    say: Console,
) -> dict[str, Any]:
    """Search, print, save; returns the JSON object. See `twofold plan --help` for the arguments."""
    from plans.transformer import transformer_config
    from search.scale import Pins, Problem, baseline, describe, solve
    from search.scale.confirm import confirmed
    from simulator.scale import stack_named
    from twofold.context import parse_bytes

    if export not in (None, "megatron", "torchtitan"):
        raise TwofoldError(f"--export {export!r} is not known; known are megatron, torchtitan")
    count = machine.num_devices if devices is None else devices
    problem = Problem(
        config=transformer_config(model, seq=seq, num_layers=layers), machine=machine, num_devices=count,
        global_batch=count if global_batch is None else global_batch, pins=Pins(**pins), stack=stack_named(stack),
        memory_limit_bytes=None if memory is None else parse_bytes(memory, "--memory"),
    )  # fmt: skip
    if method == "search":
        found = solve(
            problem, time_limit_s=time_limit, explain=explain or report is not None,
            on_better=lambda each: say.note(f"{each.forecast.step_s:.4g} s  {describe(each.degrees)}"),
        )  # fmt: skip
    else:
        found = baseline(problem, method)
    certificate = found.summary()
    simulated: list[dict[str, Any]] = []
    if simulate:
        checked = confirmed(problem, found.found, simulate)
        kept = [each.found for each in checked]
        if kept[0] is not found.best:
            certificate = f"the event engine puts another one first; the forecast's: {certificate}"
        found = replace(found, found=(*kept, *(each for each in found.found if each not in kept)))
        for each in checked:
            told = each.reason if each.simulated_s is None else f"{each.simulated_s:.4g} s in the event engine"
            say.say(f"{each.found.forecast.step_s:.4g} s forecast, {told}: {describe(each.found.degrees)}")
            simulated.append({"forecast_s": each.found.forecast.step_s, "simulated_s": each.simulated_s})
    exported = _exported(found, export)
    made = tables(found, top_k)
    for table in made if explain else made[:1]:
        say.say(table.text())
        say.say("")
    say.say(certificate)
    saved = _save(found, machine, out, say)
    if report is not None:
        say.say(f"saved {_report(found, made, certificate, report, model, machine)}")
    if exported is not None:
        say.say(exported)
    return found.to_json(top_k) | {"files": saved, "export": exported, "simulated": simulated}


def _exported(found: Answer, export: str | None) -> str | None:
    from search.scale.statement import megatron_text, torchtitan_toml

    if export is None:
        return None
    config, degrees = found.problem.config, found.best.degrees
    return megatron_text(config, degrees) if export == "megatron" else torchtitan_toml(config, degrees)


def _save(found: Answer, machine: Machine, out: str, say: Console) -> list[str]:
    """The plan, which can be simulated and run, and its degrees, which can be costed again."""
    from plans.plan import save_plan
    from search.scale.confirm import plan_of
    from search.scale.statement import write_statement

    best, config = found.best, found.problem.config
    beside = Path(out).with_suffix(".degrees.json")
    saved = [
        write_statement(
            beside, config, best.degrees, stack=found.problem.stack.name, machine=machine.name,
            step_s=best.forecast.step_s,
        )
    ]  # fmt: skip
    try:
        plan = plan_of(found.problem, best)
        saved.insert(0, save_plan(plan, out))
    except TwofoldError as error:
        say.say(f"its degrees are saved, but no plan that can be run: {error}")
    say.say(f"saved {', '.join(map(str, saved))}")
    return [str(each) for each in saved]


# ------------------------------------------------------------------- tables


def tables(found: Answer, top_k: int) -> list[Table]:
    """Ranking, composition of the best, its neighbours, memory and time against each other, and what was refused."""
    made = [_ranking(found, top_k), _composition(found)]
    if found.neighbours:
        made.append(_neighbours(found))
    return [*made, _pareto(found), *_refused(found)]


def _ranking(found: Answer, top_k: int) -> Table:
    from reports import Table
    from search.scale import describe

    rows = tuple(
        (
            str(number), f"{each.forecast.step_s:.4g} s", f"{each.forecast.peak_bytes / _GiB:.2f} GiB",
            f"{each.forecast.bubble_fraction:.1%}", f"{each.forecast.exposed_comm_s:.3g} s", describe(each.degrees),
        )
        for number, each in enumerate(found.found[:top_k], 1)
    )  # fmt: skip
    columns = ("", "step", "peak", "idle", "exposed", "configuration")
    problem, best = found.problem, found.best.forecast
    rate = problem.global_batch * problem.config.seq / best.step_s / problem.num_devices
    notes = (
        f"The best: {rate:,.0f} tokens/s per device, 90 % interval {best.low_s:.4g} to {best.high_s:.4g} s.",
        *(["Below it: the fastest of the others that were forecast on the way, not proven to be the next best."]
          if len(rows) > 1 and found.method == "search" else []),
    )  # fmt: skip
    title = f"{problem.config.name} on {problem.num_devices} devices of {problem.machine.name}"
    return Table(title=title, columns=columns, rows=rows, right=frozenset(columns[:-1]), notes=notes)


def _composition(found: Answer) -> Table:
    from reports import Table
    from search.scale.explain import composition

    best = found.best.forecast
    rows = [
        (name, f"{seconds:.4g} s", f"{seconds / best.step_s:.1%}") for name, seconds in composition(found.best).items()
    ]
    rows += [(f"memory: {role}", f"{size / _GiB:.2f} GiB", f"{size / best.peak_bytes:.1%}")
             for role, size in best.memory.items() if size]  # fmt: skip
    return Table(
        title="Composition of the best: the mean rank's step, the fullest rank's memory",
        columns=("part", "amount", "share"), rows=tuple(rows), right=frozenset({"amount", "share"}),
    )  # fmt: skip


def _neighbours(found: Answer) -> Table:
    from reports import Table

    rows = tuple(
        (
            each.change,
            "" if each.extra_s is None else f"{each.extra_s:+.3g} s",
            "" if each.extra_s is None else f"{each.extra_s / found.best.forecast.step_s:+.1%}",
            each.reason,
        )
        for each in found.neighbours
    )
    return Table(
        title="One degree changed at a time, the layers spread anew", columns=("change", "longer", "share", "why"),
        rows=rows, right=frozenset({"longer", "share"}),
    )  # fmt: skip


def _pareto(found: Answer) -> Table:
    from reports import Table
    from search.scale import describe

    rows = tuple(
        (f"{each.forecast.step_s:.4g} s", f"{each.forecast.peak_bytes / _GiB:.2f} GiB", describe(each.degrees))
        for each in found.pareto[:20]
    )
    return Table(
        title="Time against memory, of all that were forecast", columns=("step", "peak", "configuration"), rows=rows,
        right=frozenset({"step", "peak"}),
    )  # fmt: skip


def _refused(found: Answer) -> list[Table]:
    from reports import Table

    if not found.refused:
        return []
    reasons: dict[str, list[Any]] = {}
    for each in found.refused:
        reasons.setdefault(each.reason, []).append(each)
    rows = []
    for reason, own in sorted(reasons.items()):
        nearest = min(own, key=lambda each: (each.excess_bytes or 0, each.what))
        excess = "" if nearest.excess_bytes is None else f"{nearest.excess_bytes / _GiB:.2f} GiB too much"
        rows.append((reason, str(len(own)), nearest.what, excess))
    return [
        Table(
            title="Parts of the space that were refused", columns=("reason", "parts", "nearest", "by"),
            rows=tuple(rows), right=frozenset({"parts"}),
        )
    ]  # fmt: skip


def _report(found: Answer, made: list[Table], certificate: str, path: str, model: str, machine: Machine) -> Path:
    from datetime import UTC, datetime

    from reports import Configuration, shares_picture, trade_picture, write_report
    from search.scale import describe
    from search.scale.explain import composition

    problem, best = found.problem, found.best.forecast
    seen = [
        Configuration(
            name=describe(each.degrees), step_s=each.forecast.step_s, peak_bytes=each.forecast.peak_bytes,
            parts=composition(each),
        )
        for each in found.found
    ]  # fmt: skip
    pictures = [
        shares_picture(seen[:_DRAWN], title="Where the forecast step of the mean rank goes"),
        trade_picture(seen, title="Time against memory", limit_bytes=problem.limit_bytes),
    ]
    rate = problem.global_batch * problem.config.seq / best.step_s / problem.num_devices
    interval = f"{best.low_s:.4g} to {best.high_s:.4g} s"
    return write_report(
        path, title=f"Search: {problem.config.name} on {problem.num_devices} devices of {machine.name}",
        results=[made[0], *pictures], tables=made[1:],
        summary={
            "forecast step (90 % interval)": f"{best.step_s:.4g} s ({interval})",
            "tokens/s per device": f"{rate:,.0f}", "peak memory": f"{best.peak_bytes / _GiB:.2f} GiB",
            "at most above the fastest of the space": f"{100 * found.gap:.1f} %",
            "idle": f"{100 * best.bubble_fraction:.1f} %",
        },
        notes=[certificate, "Every time is a forecast; nothing was run."],
        environment={"date": datetime.now(UTC).date().isoformat()},
        command=f"twofold plan {model} --machine {machine.name} --devices {problem.num_devices} "
        f"--global-batch {problem.global_batch}",
    )  # fmt: skip
