"""`twofold demo`: plan, simulate, run on real ranks and verify an example."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from costmodels import Machine
from executor.launch.nodes import Nodes
from executor.launch.run_plan import RunResult, run
from executor.reference.verification import Verification, check_run
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from plans.plan import Plan, Strategy, save_plan
from plans.timeline import Timeline
from plans.units import Seconds, wrapped
from search import SearchResult, search
from simulator import simulate
from twofold.calibration.calibrate import CalibrationResult, calibrate
from twofold.console import Console

if TYPE_CHECKING:
    from executor.data.digits import Digits
    from reports import Table
    from twofold.commands.options import DemoOptions

__all__ = ["CASES", "Case", "DemoResult", "demo"]

NUM_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The configuration of an example; strategies that its module does not give are searched."""

    title: str
    model: str
    num_stages: int = 1
    stage_config: dict[str, int] = field(default_factory=dict)
    num_micro_batches: int = 1
    interleave: int = 1
    schedule: str = "1f1b"
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(kind="sgd", settings={"lr": 1e-2}))


CASES = {
    "multiple_mix": Case(
        title="2 pipeline stages, 4 micro-batches, 1F1B, recompute, optimizer parallel; operators split by the search",
        model="executor.networks:multiple_mix",
        num_stages=2,
        stage_config={
            "_backbone.layer1": 0,
            "_backbone.relu1": 0,
            "_backbone.layer2": 1,
            "_backbone.relu2": 1,
            "_backbone.layer3": 1,
        },
        num_micro_batches=4,
        schedule="1f1b",
        optimizer=Optimizer(kind="sgd", settings={"lr": 1e-2}, parallel_level=1),
    ),
    "advanced_operator_parallel": Case(
        title="operators split by hand over axes in any order, a sum over 8 ranks, several meshes; the rest searched",
        model="executor.networks:advanced_operator_parallel",
    ),
    "multiple_copy": Case(
        title="2 slices of every batch, one communicates while the other computes; dense layers split by hand",
        model="executor.networks:multiple_copy",
        interleave=2,
    ),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class DemoResult:
    """The results of a demo."""

    plans: SearchResult[Plan]
    machine: Machine
    predicted: Timeline
    verification: Verification
    files: dict[str, Path]
    elapsed_s: float

    def to_json(self) -> dict[str, Any]:
        """The JSON object: figures, checks and paths of files."""
        from plans.figures import figures_of

        return {
            **self.verification.to_json(),
            "bubble_fraction": self.predicted.bubble_fraction,
            "exposed_comm_s": self.predicted.exposed_comm_s,
            "predicted": figures_of(self.predicted),
            "measured": self.verification.run.figures,
            "search_s": self.plans.search_s,
            "lower_bound_s": self.plans.lower_bound_s,
            "gap": self.plans.gap,
            "elapsed_s": self.elapsed_s,
            "files": {name: str(path) for name, path in self.files.items()},
        }


def demo(options: DemoOptions, console: Console) -> DemoResult:
    """Plan, simulate, run on 8 processes, verify and report one of the cases.

    Args:
        options: options of `twofold demo`.
        console: prints the progress.

    Raises:
        TwofoldError: an unknown case, unreadable data, a busy port; `RankFailed` when a rank fails.
    """
    case, folder = options.case, Path(options.out) / options.case
    if case not in CASES:
        raise TwofoldError(f"case {case!r} is not known; known: {', '.join(CASES)}")
    from executor.data.digits import load_digits
    from executor.launch.launch import check_port

    check_port(options.port)
    digits = load_digits(options.data)
    chosen, busy = CASES[case], _busy()
    console.count_steps(8)
    console.print(f"{case}: {chosen.title}")
    if busy:
        console.note(busy)
    console.step("data")
    console.note(f"{len(digits.images):,} digits of 28x28 from {digits.source}")
    graph, stages, steps = _network(chosen, digits, options, console)
    console.step("calibrate this machine" if options.machine is None else f"machine {options.machine}")
    target, calibrated = _machine(options.machine, folder, console)
    plans = _search(chosen, graph, stages, target, console)
    plan = plans.best
    files = {"machine": folder / "machine.json", "plan": save_plan(plan, folder / "plan.json")}
    if options.machine is not None:
        files["machine"] = Path(options.machine)
    console.step("simulate")
    predicted = simulate(plan, target)
    _say_prediction(console, predicted)
    console.step(f"run {steps} steps on {NUM_RANKS} processes with torchrun, logs in {options.log_dir}/1/rank.N/stdout")
    with console.doing("running"):
        result = run(
            plan, steps=steps, data=options.data or "digits", model=chosen.model, seed=options.seed,
            out=folder / "run", log_dir=options.log_dir, print_every=max(1, min(50, steps // 3)),
            nodes=Nodes(port=options.port), timeout_s=options.timeout,
            on_line=lambda rank, line: _say_loss(console, line),
        )  # fmt: skip
    verification = _verify(chosen, result, options, predicted, console)
    console.step("report")
    notes = [chosen.title, f"Data: {digits.source}.", plans.explain().splitlines()[0]]
    notes += (
        []
        if calibrated is None
        else ["This machine was calibrated first; the quality of the fit is under Further tables."]
    )
    notes += [busy] if busy else []
    tables = [_search_table(plans)] + ([] if calibrated is None else [_calibration_table(calibrated)])
    files |= _report(options, steps, predicted, verification, target, notes, tables)
    console.note("\n".join(f"{name:<8} {path}" for name, path in files.items()))
    outcome = DemoResult(
        plans=plans, machine=target, predicted=predicted, verification=verification, files=files,
        elapsed_s=console.elapsed_s,
    )  # fmt: skip
    _say_summary(console, outcome)
    return outcome


def _network(
    case: Case, digits: Digits, options: DemoOptions, console: Console
) -> tuple[Graph, tuple[tuple[str, ...], ...], int]:
    """The case's graph, its stages and the number of steps."""
    from executor.data.digits import ArrayDataset

    console.step("network")
    with console.doing("capturing the network"):
        graph, stages = captured(case)
    per_epoch = len(ArrayDataset.of(digits).batch(graph.batch_size))
    count = sum(tensor.num_elements for tensor in graph.parameters)
    console.note(
        f"{graph.name}: {len(graph.operators)} operators, {count:,} parameters, none initialised yet; "
        f"batches of {graph.batch_size}, {per_epoch} a pass, the last incomplete one dropped"
    )
    return graph, stages, options.steps if options.epochs is None else options.epochs * per_epoch


def _search(
    case: Case,
    graph: Graph,
    stages: tuple[tuple[str, ...], ...],
    machine: Machine,
    console: Console,
) -> SearchResult[Plan]:
    from reports import plan_text

    console.step(f"search over {NUM_RANKS} devices")
    with console.doing("searching"):
        plans = search(
            graph, machine, num_devices=NUM_RANKS, num_stages=case.num_stages, stages=stages,
            num_micro_batches=case.num_micro_batches, interleave=case.interleave, schedule=case.schedule,
            pinned=_given(case, graph), optimizer=case.optimizer, full_batch=True, on_progress=console.note,
        )  # fmt: skip
    console.note(plan_text(plans.best))
    console.note(wrapped(plans.explain().splitlines()[0], 94))
    return plans


def _verify(case: Case, result: RunResult, options: DemoOptions, predicted: Timeline, console: Console) -> Verification:
    from reports import verification_table

    console.step("verify against single-process training on the same data")
    with console.doing("training in one process"):
        verification = check_run(
            result, model=case.model, data=options.data or "digits", seed=options.seed, predicted=predicted
        )
    console.note(verification_table(verification.checks()).text())
    return verification


def captured(case: Case) -> tuple[Graph, tuple[tuple[str, ...], ...]]:
    """The case's graph, and the operators of its stages."""
    from executor.capture.capture import capture
    from executor.stages import assign_stages
    from executor.weights.models import load_model

    module, examples = load_model(case.model)
    graph = capture(module, examples)
    stages = assign_stages(graph, module, case.stage_config, case.num_stages)
    return graph, stages


def _given(case: Case, graph: Graph) -> dict[str, Strategy]:
    """The strategies that the case's module gives, for a slice of a micro-batch."""
    from executor.sharding import given_strategies
    from executor.weights.models import load_model

    part = graph.with_batch(graph.batch_size // (case.num_micro_batches * case.interleave))
    return given_strategies(part, load_model(case.model)[0], NUM_RANKS // case.num_stages)


def _machine(given: str | None, folder: Path, console: Console) -> tuple[Machine, CalibrationResult | None]:
    if given is not None:
        target = Machine.load(given)
        console.note(f"{target.name}: {target.num_devices} devices, not calibrated now")
        return target, None
    out = folder / "machine.json"
    out.with_suffix(".points.jsonl").unlink(missing_ok=True)  # of an earlier demo; this one measures again
    with console.doing("calibrating"):
        calibrated = calibrate(NUM_RANKS, out=out, quick=True, on_progress=console.note)
    assert calibrated is not None  # one process measures and returns; only the ranks of a launcher return nothing
    for probe in calibrated.probes:
        console.note(
            f"{probe.name}: predicted {Seconds(probe.predicted_s)} from micro-benchmarks, "
            f"measured {Seconds(probe.measured_s)}"
        )
    interval = calibrated.machine.interval
    console.note(
        f"overall factor {calibrated.machine.host_scale:.2f}; 90 % interval of a step time "
        f"{100 * (interval.low - 1):+.0f} % to {100 * (interval.high - 1):+.0f} %"
    )
    return calibrated.machine, calibrated


def _say_prediction(console: Console, predicted: Timeline) -> None:
    from plans.figures import figures_of, figures_text

    console.note(f"predicted: {figures_text(figures_of(predicted), low_s=predicted.low_s, high_s=predicted.high_s)}")


def _say_loss(console: Console, line: str) -> None:
    if not line.startswith("task done"):
        console.note(line)


def _command(options: DemoOptions, steps: int) -> str:
    command = f"twofold demo --case {options.case} --steps {steps} --seed {options.seed}"
    for option, value in (("data", options.data), ("machine", options.machine)):
        command += "" if value is None else f" --{option} {shlex.quote(value)}"
    return command


def _report(
    options: DemoOptions,
    steps: int,
    predicted: Timeline,
    verification: Verification,
    machine: Machine,
    notes: list[str],
    tables: list[Table],
) -> dict[str, Path]:
    from interop.chrome_trace import write_trace
    from reports import Report, pipeline_picture, step_page

    folder, result = Path(options.out) / options.case, verification.run
    measured, program = result.timeline, lower(result.plan)
    step = f"{Seconds(predicted.step_interval_s)} predicted, {Seconds(result.step_s)} {measured.kind}"
    page = step_page(Report(
        title=f"twofold demo: {options.case}",
        summary={
            "loss against one process": f"{verification.loss_max_rel_diff:.1e} relative",
            "weights against one process": f"{verification.weights_max_rel_diff:.1e} relative",
            "communication as planned": "yes" if result.collectives_match else "no",
            "step time": step,
        },
        plan=result.plan, program=program, predicted=predicted, measured=measured, checks=verification.checks(),
        losses={"8 ranks": list(map(float, result.losses)), "one process": list(verification.reference_losses)},
        step_times_s=list(map(float, result.interval_s)), run_step_s=result.step_s, machine=_facts(machine),
        environment={key: str(value) for key, value in measured.meta.items()}, tables=tables,
        notes=notes, command=_command(options, steps),
    ))  # fmt: skip
    report = page.write(folder / "report.html")
    trace = write_trace(folder / "trace.json.gz", [predicted, measured], program=program)
    picture = pipeline_picture([predicted, measured]).save(folder / "pipeline.svg")
    return {"report": report, "trace": trace, "picture": picture}


def _facts(machine: Machine) -> dict[str, str]:
    """Facts of the predicted machine for the report."""
    interval = machine.interval
    facts = {
        "name": machine.name,
        "devices": f"{machine.num_devices} {machine.device}",
        "cores per node": str(machine.cores_per_node or "not shared"),
        "overall factor": f"{machine.host_scale:.2f}",
        "90 % interval": f"{100 * (interval.low - 1):+.0f} % to {100 * (interval.high - 1):+.0f} %",
    }
    for section, origin in machine.provenance.items():
        facts[section] = f"{origin.status}: {origin.source} ({origin.date})"
    return facts


def _search_table(plans: SearchResult[Plan]) -> Table:
    from reports import Table

    nearest = sorted(plans.alternatives, key=lambda entry: (entry.subject, entry.extra_s or 0.0))
    return Table(
        title="Search: strategies of every operator, and the extra cost of the best plan with each",
        columns=("operator", "strategy", "extra per step (additive cost)", "chosen"),
        rows=tuple(
            (
                alternative.subject,
                alternative.change,
                f"{alternative.extra_s * 1e3:+.3f} ms",
                "yes" if alternative.chosen else "",
            )
            for alternative in nearest
            if alternative.extra_s is not None
        ),
    )


def _calibration_table(calibrated: CalibrationResult) -> Table:
    from reports import Table

    return Table(
        title="Calibration: residuals of the fit",
        columns=("of", "error"), rows=tuple(tuple(line.partition(": ")[::2]) for line in calibrated.residuals),
    )  # fmt: skip


def _busy() -> str:
    """A warning if other processes keep the cores busy; "" otherwise."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < 0.5 * cores:
        return ""
    return (
        f"Other programs were running when the demo began (load {load:.1f} on {cores} cores): measured times may vary."
    )


def _say_summary(console: Console, outcome: DemoResult) -> None:
    verification = outcome.verification
    console.print("")
    inside = all(check.passed for check in verification.timing_checks())
    timing = "step time inside its interval" if inside else "step time OUTSIDE its interval"
    exact = "loss, weights, communication and memory are correct" if verification.passed else "A CHECK FAILED"
    console.print(f"{exact}; {timing}; {outcome.elapsed_s:.0f} s in all")
    console.note(f"loss against one process    {verification.loss_max_rel_diff:.1e} relative")
    console.note(f"weights against one process {verification.weights_max_rel_diff:.1e} relative")
    measured, predicted = verification.run.step_s, outcome.predicted.step_interval_s
    console.note(f"step time                   predicted {Seconds(predicted)}, measured {Seconds(measured)}")
    console.note(f"open {outcome.files['report']} in a browser, {outcome.files['trace']} in https://ui.perfetto.dev")
