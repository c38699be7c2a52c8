"""Searching the degrees of a transformer, and showing, saving and exporting what was found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels import Machine
from plans.errors import TwofoldError
from plans.files import check_writable

if TYPE_CHECKING:
    from search.devices import Candidate, SearchResult
    from twofold.console import Console

__all__ = ["METHODS", "plan_degrees"]

METHODS = ("search", "data-parallel", "grid", "greedy")
"""How `plan_degrees` finds a configuration."""

_SHOWN = 5
"""Configurations that are listed unless a number is given."""


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
    top_k: int | None,
    out: str,
    report: str | None,
    export: str | None,
    simulate: int,
    explain: bool,
    say: Console,
) -> dict[str, Any]:
    """Search, print, save; returns the JSON object. See `twofold plan --help` for the arguments."""
    from plans.model.transformer import transformer_config
    from search.devices import Pins, Problem, baseline, describe, solve
    from search.devices.confirm import confirmed
    from search.devices.result_json import result_json
    from simulator.forecast import stack_named
    from twofold.context import parse_bytes
    from twofold.plan_report import explained, tables, write_search_report

    if export not in (None, "megatron", "torchtitan"):
        raise TwofoldError(f"--export {export!r} is not known; known are megatron, torchtitan")
    for file in (out, _beside(out), report):  # before the search
        if file is not None:
            check_writable(file)
    count = machine.num_devices if devices is None else devices
    problem = Problem(
        config=transformer_config(model, seq=seq, num_layers=layers), machine=machine, num_devices=count,
        global_batch=count if global_batch is None else global_batch, pins=Pins(**pins), stack=stack_named(stack),
        memory_limit_bytes=None if memory is None else parse_bytes(memory, "--memory"),
    )  # fmt: skip
    if method == "search":
        found = solve(
            problem, time_limit_s=time_limit, keep=top_k or 1, explain=explain or report is not None,
            on_better=lambda each: say.note(f"{each.forecast.step_s:.4g} s  {describe(each.degrees)}"),
        )  # fmt: skip
    else:
        found = baseline(problem, method)
    certificate = found.summary()
    simulated: list[dict[str, Any]] = []
    if simulate:
        checked = confirmed(problem, found.plans, simulate)
        kept = [each.candidate for each in checked]
        if kept[0] is not found.best:
            certificate = f"the event engine puts another one first; the forecast's: {certificate}"
        found = replace(found, plans=(*kept, *(each for each in found.plans if each not in kept)))
        for each in checked:
            told = each.reason if each.simulated_s is None else f"{each.simulated_s:.4g} s in the event engine"
            say.say(f"{each.candidate.forecast.step_s:.4g} s forecast, {told}: {describe(each.candidate.degrees)}")
            simulated.append({"forecast_s": each.candidate.forecast.step_s, "simulated_s": each.simulated_s})
    why = explained(found) if explain or report is not None else None
    shown = top_k or _SHOWN
    made = tables(found, shown, why)
    for table in made if explain else made[:1]:
        say.say(table.text())
        say.say("")
    say.say(certificate)
    saved = _save(found, machine, out, say)
    if report is not None and why is not None:
        written = write_search_report(
            report, found, top_k=shown, why=why, certificate=certificate, model=model, machine=machine
        )
        say.say(f"saved {written}")
    exported = _exported(found, export)  # what was found is saved, whether or not the other program has words for it
    if exported is not None:
        say.say(exported)
    more = {"files": saved, "export": exported, "simulated": simulated}
    return result_json(found, shown) | more | (why.to_json() if why else {})


def _exported(found: SearchResult[Candidate], export: str | None) -> str | None:
    from interop.statement import megatron_text, torchtitan_toml

    if export is None:
        return None
    config, degrees = found.problem.config, found.best.degrees
    return megatron_text(config, degrees) if export == "megatron" else torchtitan_toml(config, degrees)


def _beside(out: str) -> Path:
    """Where a plan's degrees go."""
    return Path(f"{out.removesuffix('.json')}.degrees.json")


def _save(found: SearchResult[Candidate], machine: Machine, out: str, say: Console) -> list[str]:
    """The plan, which can be simulated and run, and its degrees, which can be costed again."""
    from interop.statement import write_statement
    from plans.plan import save_plan
    from search.devices.confirm import plan_of

    best, config = found.best, found.problem.config
    saved = [
        write_statement(
            _beside(out), config, best.degrees, stack=found.problem.stack.name, machine=machine.name,
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
