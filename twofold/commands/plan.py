"""`twofold plan`: search for the best plan of a model on a machine."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from plans.degrees import DEGREES
from plans.errors import TwofoldError
from plans.units import wrapped
from twofold.commands.degree_options import PinOptions
from twofold.commands.models import GivenModel, given_model
from twofold.commands.options import (
    FileOutput,
    MachineOption,
    Word,
    given,
)
from twofold.commands.values import Above0, AtLeast0, AtLeast1, HtmlFile, OutFile, flag

if TYPE_CHECKING:
    from costmodels import Machine
    from plans.plan import Plan
    from search.devices import Candidate, Problem, SearchResult
    from twofold.console import Console

__all__ = ["PlanCommand"]

_BY_OPERATORS = "operators"

_METHODS = ("search", "data-parallel", "grid", "greedy")
"""Methods of choosing the degrees of a transformer."""

_TO_SIMULATE = 0.25
"""Share of a time limit reserved for simulating the best plans."""

_SHOWN = 5
"""Default number of listed plans."""

_USUAL_LIMIT_S = {True: 60.0, False: 20.0}
"""Whether a graph has few operators -> the default time limit of a search by operators: proving strategies can take
hours, and what is found after seconds is seldom improved in a minute.
"""

_FEW_OPERATORS = 100

_MOST_ROWS = 80
"""Longest table of operators that is printed without --explain."""


_FOR_TRANSFORMERS = {
    "stages": "use --pp", "micro_batches": "use --micro-batch, the samples of one micro-batch",
    "widths": "use --stage-layers", "lr": "`twofold train` takes the learning rate",
    "optimizer": "AdamW is planned, and `twofold train` takes another one",
}  # fmt: skip
"""Counterparts for transformers of the options in `OperatorOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """Models that are searched operator by operator.

    Args:
        stages: number of pipeline stages, balanced by compute; 1 by default.
        micro_batches: number of micro-batches; 1 by default.
        widths: devices per stage, such as 4,2,2; even (the default if the stages divide the devices); or any, which
            also searches stages, micro-batches and slices that are not given and may leave devices idle.
        optimizer: sgd by default; `twofold train` takes its other settings.
        lr: learning rate; 0.01 by default, 0.001 for adamw.
    """

    stages: AtLeast1 | None = None
    micro_batches: AtLeast1 | None = None
    widths: str | None = None
    optimizer: Literal["sgd", "momentum", "adamw"] | None = None
    lr: Above0 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Result.

    Args:
        top_k: number of plans to list, 5 by default. For transformers, --top-k K also proves the order of the first K;
            without it only the best one is proven.
        out: file of the best plan; the degrees of a transformer are saved next to it with the suffix .degrees.json.
        report: for transformers: write a report of the search to this HTML file.
        simulate: for transformers: number of best plans to simulate and rank again. By default the listed plans, for at
            most a few seconds, or with --time-limit for the last quarter of the time.
        explain: also print the alternatives and why they are slower.
    """

    top_k: AtLeast1 | None = None
    out: OutFile = "plan.json"
    report: HtmlFile | None = None
    simulate: AtLeast0 | None = None
    explain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Search the best plans for a model on a machine and save the best one.

    A transformer on accelerators (by name, config.json, or a module that is recognised as one) is searched over
    parallel degrees; degrees that are given are fixed. Any other model is searched operator by operator. Ctrl-C stops
    the search and returns the best plan so far with its gap.

    Args:
        model: package.module:function or file.py:function that returns (module with its loss, example inputs); the name
            of a transformer, such as llama-3-8b; or a Hugging Face config.json.
        devices: number of ranks; by default all devices of the machine.
        global_batch: samples per step; by default those of the example inputs, or one per device for a transformer.
        seq: tokens per sample; by default the transformer's.
        layers: number of blocks; by default the transformer's.
        precision: dtype of weights and activations: bfloat16, float16 or float32; by default the transformer's.
        capacity_factor: places at an expert over an even share of a sample's choices, or dropless: a place for every
            token; by default the transformer's.
        method: search, operators (searches a transformer operator by operator), or one of the baselines data-parallel,
            grid and greedy.
        host: for transformers: file of `twofold calibrate --host` with the host's times to issue kernels.
        software: for transformers: program that will run the plan, with its version. The search covers only what this
            program supports, at its costs, and saves a launch script for the best plan (see docs/other-trainers.md).
        stack: for transformers: software whose costs are used, such as torch-compile or megatron; by default that of
            --for.
        execution: graph (a step is one launch, if the device supports it; the default) or eager.
        fused: fuse runs of memory-bound instructions into single kernels; on by default.
        memory: memory limit per device, such as 25GB.
        time_limit: seconds after which the search returns the best plan so far. By default none for transformers; 60
            for other graphs, and 20 if they have over 100 operators.
    """

    model: Word
    target: MachineOption
    devices: AtLeast1 | None = None
    global_batch: AtLeast1 | None = None
    seq: AtLeast1 | None = None
    layers: AtLeast1 | None = None
    precision: str | None = None
    capacity_factor: str | None = None
    method: str = "search"
    host: str | None = None
    software: Annotated[str, tyro.conf.arg(name="for", metavar="NAME[@VERSION]")] = "twofold"
    stack: str | None = None
    execution: str | None = None
    fused: bool = True
    memory: str | None = None
    time_limit: Above0 | None = None
    degrees: PinOptions = field(default_factory=PinOptions)
    operators: OperatorOptions = field(default_factory=OperatorOptions)
    result: ResultOptions = field(default_factory=ResultOptions)
    output: FileOutput = field(default_factory=FileOutput)

    def run(self, console: Console) -> tuple[dict[str, Any], bool]:
        """Search over degrees or operator by operator; print and save the result."""
        from simulator.engine.garbage import no_collection_at_exit, without_collection

        no_collection_at_exit()
        with without_collection():  # what is imported, captured and searched is held until the end
            return self._plan(console), True

    def _plan(self, console: Console) -> dict[str, Any]:
        """The search that suits the model. Returns the JSON object."""
        from costmodels import Machine

        machine = Machine.load(self.target.machine)
        if self.method not in (*_METHODS, _BY_OPERATORS):
            raise TwofoldError(f"unknown --method {self.method!r}; use one of {', '.join((*_METHODS, _BY_OPERATORS))}")
        model = given_model(self.model, self.seq, self.layers, self.precision, self.capacity_factor)
        if model.remark is not None:
            console.print(model.remark)
        operators = given(self.operators)
        why = self._by_operators(machine, model, bool(operators))
        if why is None:
            if operators:
                name = next(iter(operators))
                raise TwofoldError(
                    f"{flag(name)} is for models that are searched operator by operator; for a transformer, "
                    f"{_FOR_TRANSFORMERS[name]}"
                )
            return _plan_degrees(self, model, machine, console)
        only = [DEGREES[name].flag for name in self.degrees.pins if name not in ("schedule", "zero")]
        only += ["for"] if self.software != "twofold" else []
        if only and operators:
            raise TwofoldError(
                f"{flag(only[0])} is for the search over parallel degrees, {flag(next(iter(operators)))} for the one "
                "over operators; give one of them"
            )
        if only:
            raise TwofoldError(
                f"{flag(only[0])} is for transformers on accelerators; {self.model!r} on {machine.name} is searched "
                f"operator by operator{why and f': {why}'}"
            )
        if why:
            console.print(f"searched operator by operator: {why}")
        return _plan_operators(self, model, machine, console)

    def _by_operators(self, machine: Machine, model: GivenModel, is_pinned: bool) -> str | None:
        """Why the model is searched operator by operator: "" if that is obvious, None if it is searched over
        degrees."""
        if self.method == _BY_OPERATORS or not machine.host_async:
            return ""
        if model.graph is None:
            return None
        return "--stages, --widths and --micro-batches are for that" if is_pinned else model.unknown


def _plan_degrees(options: PlanCommand, model: GivenModel, machine: Machine, console: Console) -> dict[str, Any]:
    """Search the degrees of a transformer; print, save and export the best. Returns the JSON object.

    Raises:
        TwofoldError: a file that cannot be written, an unknown program to export to, or an error of the search.
    """
    from interop.software import software_named
    from plans.files import check_writable, write_atomically
    from plans.model.transformer import config_remarks
    from reports.search_report import search_page, search_tables, verdict
    from search.devices.preference import preferred
    from search.devices.reasons import explained
    from search.devices.result_json import result_json

    result = options.result
    software = software_named(options.software)
    if software.check_model is not None:
        software.check_model(model.config)
    for file in (result.out, _beside(result.out, ".degrees.json")):  # before the search
        check_writable(file)
    problem, shown = _problem(options, model, machine), result.top_k or _SHOWN
    if model.graph is None:
        for remark in config_remarks(options.model, seq=options.seq, capacity_factor=options.capacity_factor):
            console.print(remark)
    deadline_s = None if options.time_limit is None else time.monotonic() + options.time_limit
    count = _num_simulated(problem, options)
    with console.doing("searching"):
        found = _search(problem, options, console)
        answer, simulated = _confirm(found, count, options, deadline_s, console)
        if options.method == "search" and result.top_k is None:
            answer = preferred(answer, shown)
    certificate, reasons = answer.summary(), None
    console.print(verdict(answer))
    console.print(f"\n{search_tables(answer, shown)[0].text()}")
    console.print(f"\n{wrapped(certificate, 100)}")
    files = _save(answer, options.execution or "graph", result.out, console)
    if result.explain or result.report is not None:
        with console.doing("comparing with the alternatives"):
            reasons = explained(answer)
    if result.explain:
        for table in search_tables(answer, shown, reasons)[1:]:
            console.print(f"\n{table.text()}")
    if result.report is not None and reasons is not None:
        page = search_page(answer, top_k=shown, reasons=reasons, certificate=certificate, command=console.command)
        console.print(f"saved {page.write(result.report)}")
    launch = software.launch(problem.config, answer.best.degrees, problem.machine.links[0].ranks)
    if launch is not None:
        script = write_atomically(_beside(result.out, f".{software.name}{software.ending}"), launch.encode())
        files.append(str(script))
        console.print(f"saved the launch script {script}; `twofold simulate {script} --recost` reads it back")
    more = {"files": files, "launch": launch, "simulated": simulated}
    return result_json(answer, shown) | more | (reasons.to_json() if reasons else {})


def _problem(options: PlanCommand, model: GivenModel, machine: Machine) -> Problem:
    from interop.software import software_named
    from plans.units import parse_bytes
    from search.devices import Pins, Problem
    from simulator.stacks import on_host, stack_named
    from twofold.commands.execution import executed

    software = software_named(options.software)
    machine, stack = on_host(machine, stack_named(software.costs_of(options.stack)), options.host)
    count = machine.num_devices if options.devices is None else options.devices
    usual = count if model.graph is None else model.graph.batch_size
    return Problem(
        config=model.config, recognised=model.recognised, machine=executed(machine, stack, options.execution),
        num_devices=count, global_batch=usual if options.global_batch is None else options.global_batch,
        pins=Pins(**options.degrees.pins), stack=stack,
        memory_limit_bytes=None if options.memory is None else parse_bytes(options.memory, "--memory"),
        fused=options.fused, rules=software.rules,
    )  # fmt: skip


def _search(problem: Problem, options: PlanCommand, console: Console) -> SearchResult[Candidate]:
    from plans.units import Seconds
    from search.devices import baseline, describe, solve

    if options.method != "search":
        return baseline(problem, options.method)
    result, limit_s = options.result, options.time_limit
    if limit_s is not None and _num_simulated(problem, options):
        limit_s *= 1 - _TO_SIMULATE
    return solve(
        problem, time_limit_s=limit_s, keep=result.top_k or 1,
        explain=result.explain or result.report is not None,
        on_better=lambda each: console.note(f"{Seconds(each.forecast.step_s)}  {describe(each.degrees)}"),
    )  # fmt: skip


def _num_simulated(problem: Problem, options: PlanCommand) -> int:
    """The number of plans to simulate: as given, or the listed plans of a search."""
    if options.result.simulate is not None:
        return options.result.simulate
    return _SHOWN if options.method == "search" and problem.stack.runs_programs else 0


def _confirm(
    found: SearchResult[Candidate], count: int, options: PlanCommand, deadline_s: float | None, console: Console
) -> tuple[SearchResult[Candidate], list[dict[str, Any]]]:
    """The result with its first `count` plans simulated and ordered by that, and their simulated steps."""
    if not count:
        return found, []
    from search.candidate import identity
    from search.devices.confirm import MOST_INSTRUCTIONS, confirmed

    asked = options.result.simulate is not None
    checked = confirmed(found, count, most_instructions=None if asked else MOST_INSTRUCTIONS, deadline_s=deadline_s)
    reasons = Counter(reason for _, reason in checked.left_out)
    for reason, left in reasons.items():
        way_out = "" if asked else f"; --simulate {count} simulates all"
        console.print(f"{left} of the {len(found.plans[:count])} fastest plans not simulated: {reason}{way_out}")
    places = {identity(candidate.degrees): place for place, candidate in enumerate(found.plans)}
    simulated = [
        {
            "forecast_s": candidate.forecast.step_s, "simulated_s": candidate.simulated_s,
            "rank_of_forecast": places[identity(candidate.degrees)],
        }
        for candidate in checked.result.plans[:count]
    ]  # fmt: skip
    return checked.result, simulated


def _beside(out: str, ending: str) -> Path:
    """The name of a file next to a plan: its degrees, or a launch script."""
    return Path(f"{out.removesuffix('.json')}{ending}")


def _save(answer: SearchResult[Candidate], execution: str, out: str, console: Console) -> list[str]:
    """Save the plan and its degrees."""
    import msgspec

    from interop.statement import write_statement
    from plans.figures import figures_of
    from plans.plan import Prediction, save_plan
    from search.devices.confirm import plan_of

    best, config, machine = answer.best, answer.problem.config, answer.problem.machine
    unmade, plan = "", None
    try:
        plan = plan_of(answer.problem, best)
    except TwofoldError as error:
        if answer.problem.stack.runs_programs:
            raise TwofoldError(f"cannot make a plan of the best degrees, so nothing is saved: {error}") from None
        unmade = str(error)
    saved = [
        write_statement(
            _beside(out, ".degrees.json"), config, best.degrees, stack=answer.problem.stack.name, machine=machine.name,
            **figures_of(best.forecast),
        )
    ]  # fmt: skip
    seen = best.forecast
    prediction = Prediction(machine=machine.name, low_s=seen.low_s, high_s=seen.high_s, **figures_of(seen))
    if plan is None:
        console.print(f"The degrees are saved, but cannot be made into a plan: {unmade}")
    else:
        saved.insert(0, save_plan(msgspec.structs.replace(plan, prediction=prediction, execution=execution), out))
    console.print(f"saved {', '.join(map(str, saved))}")
    return [str(path) for path in saved]


def _plan_operators(options: PlanCommand, model: GivenModel, machine: Machine, console: Console) -> dict[str, Any]:
    """Search the strategies of operators; print and save the best. Returns the JSON object.

    Raises:
        TwofoldError: a file that cannot be written, invalid widths, or an error of the search.
    """
    from plans.files import check_writable
    from plans.optimizer import Optimizer
    from plans.plan import save_plan
    from plans.units import parse_bytes
    from reports import plan_text
    from search import search
    from twofold.commands.plan_file import schedule_text

    result, operators, execution = options.result, options.operators, options.execution or "graph"
    check_writable(result.out)  # before the search
    batch = options.global_batch or options.devices or machine.num_devices
    graph = model.at_batch(batch)
    widths, pins = _widths(operators.widths), options.degrees.pins
    kind = operators.optimizer or "sgd"
    rate = operators.lr or (1e-3 if kind == "adamw" else 0.01)
    unless = None if widths == "any" else 1
    usual_s = _USUAL_LIMIT_S[len(graph.operators) <= _FEW_OPERATORS]
    limit_s = usual_s if options.time_limit is None else options.time_limit
    with console.doing("searching"):
        plans = search(
            graph, machine, num_devices=options.devices, method="operators", execution=execution,
            num_stages=unless if operators.stages is None else operators.stages,
            num_micro_batches=unless if operators.micro_batches is None else operators.micro_batches, widths=widths,
            time_limit_s=limit_s, on_progress=console.note,
            schedule=schedule_text(pins["schedule"]) if "schedule" in pins else None,
            recompute=() if graph.recompute else None, any_level="zero" not in pins, interleave=unless,
            global_batch=options.global_batch, top_k=result.top_k or _SHOWN, fused=options.fused,
            optimizer=Optimizer(kind=kind, settings={"lr": rate}, parallel_level=pins.get("zero", 0)),
            memory_limit_bytes=None if options.memory is None else parse_bytes(options.memory, "--memory"),
        )  # fmt: skip
    path = save_plan(plans.best, result.out)
    console.print(plans.table())
    console.print("")
    table = plan_text(plans.best)
    if result.explain or table.count("\n") <= _MOST_ROWS:
        console.print(table)
    else:
        console.print(f"{len(plans.best.graph.operators)} operators; --explain lists how they are split")
    if result.explain:
        console.print(plans.explain())
    if options.time_limit is None and not plans.complete:
        console.print(f"stopped after {usual_s:.0f} s; --time-limit sets how many seconds a search may take")
    console.print(f"\n{wrapped(plans.summary(), 100)}")
    console.print(f"saved {path}")
    predictions = [_prediction(plan) for plan in plans.plans]
    return {"best": {"file": str(path), **predictions[0]}, "plans": predictions, **plans.to_json()}


def _widths(given: str | None) -> str | tuple[int, ...] | None:
    if given is None or given in ("even", "any"):
        return given
    try:
        return tuple(int(width) for width in given.split(","))
    except ValueError:
        raise TwofoldError(f"--widths must be even, any, or devices per stage such as 4,2,2, not {given!r}") from None


def _prediction(plan: Plan) -> dict[str, Any]:
    from plans.figures import figures_of

    prediction = plan.prediction
    assert prediction is not None  # the search attaches one to each of its plans
    return figures_of(prediction) | {"step_low_s": prediction.low_s, "step_high_s": prediction.high_s}
