"""What single choices are worth in the scores of other people's runs: `python -m benchmarks.accuracy.choices TABLES`.

Every choice about a software or a device that a table does not state is turned round, one at a time, and the tables are
scored again. Each table is also left out: would the others make the choice as it is, and does that help the one left
out? Choices that only one table depends on cannot be tested in this way; they rest on the source that is cited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import FOLDER
from costmodels import Machine
from interop.measurements.case import Case
from interop.measurements.cells import Skip
from interop.measurements.forecasts import measured_as
from interop.measurements.machines import machine_of
from interop.measurements.readings import needed_fillings
from interop.measurements.rows import case_of
from interop.measurements.tables import read_table
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.files import write_atomically
from plans.model.transformer import TransformerConfig
from simulator.forecast import Forecast, forecast
from simulator.stacks import Megatron, Stack, TorchNative, stack_named

__all__ = ["CHOICES", "Choice", "left_out", "main", "score", "time_cases", "time_error"]

RESULTS = FOLDER / "results" / "accuracy_choices.json"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice turned round: how the software, the machine and the model are changed."""

    name: str
    stack: Callable[[Stack], Stack] = _same
    machine: Callable[[Machine], Machine] = _same
    config: Callable[[TransformerConfig], TransformerConfig] = _same


def _torch(**changes: Any) -> Callable[[Stack], Stack]:
    return lambda stack: replace(stack, **changes) if isinstance(stack, TorchNative) else stack


def _megatron(**changes: Any) -> Callable[[Stack], Stack]:
    return lambda stack: replace(stack, **changes) if isinstance(stack, Megatron) else stack


@dataclass(frozen=True, kw_only=True)
class _Together(Megatron):
    def steps_together(self, degrees: Degrees) -> bool:
        return True


def _as(kind: type[Megatron]) -> Callable[[Stack], Stack]:
    def change(stack: Stack) -> Stack:
        if not isinstance(stack, Megatron):
            return stack
        return kind(**{name: getattr(stack, name) for name in stack.__dataclass_fields__})

    return change


def _compute(**changes: Any) -> Callable[[Machine], Machine]:
    def change(machine: Machine) -> Machine:
        return msgspec.structs.replace(machine, compute=msgspec.structs.replace(machine.compute, **changes))

    return change


def _mean_load(machine: Machine) -> Machine:
    """As if products loaded a chip for 0.7 of a step: less of the clock is lost for lack of power."""
    return _compute(clock_drop=0.7 * machine.compute.clock_drop)(machine)


def _free_transfers(machine: Machine) -> Machine:
    return msgspec.structs.replace(
        machine, overlap=tuple(entry for entry in machine.overlap if entry.collective != "transfer")
    )


def _rope(config: TransformerConfig) -> TransformerConfig:
    return replace(config, position="rope") if config.position == "none" else config


CHOICES = (
    Choice(name="as published"),
    Choice(name="equal chips are equally fast", stack=lambda stack: replace(stack, chip_spread=0.0)),
    Choice(name="equal chips vary by 0.86 %", stack=lambda stack: replace(stack, chip_spread=0.0086)),
    Choice(name="transfers do not slow down concurrent compute", machine=_free_transfers),
    Choice(name="interleaved Megatron always waits for sends", stack=_megatron(overlaps_interleaved=False)),
    Choice(name="interleaved Megatron of 2022 sends beside compute", stack=_megatron(overlaps_interleaved=True)),
    Choice(name="Megatron's hosts have their data at once", stack=_megatron(fetch_s=0.0)),
    Choice(name="attention of these Megatrons is one fused kernel", stack=_megatron(flash_attention=True)),
    Choice(name="the zero-bubble runs begin steps together", stack=_as(_Together)),
    Choice(name="no dropout", config=lambda config: replace(config, dropout=0.0, attention_dropout=0.0)),
    Choice(name="the 500 W device keeps its full clock", machine=_compute(sustained_clock=1.0)),
    Choice(name="the clock follows a step's mean load", machine=_mean_load),
    Choice(name="torch's attention is cuDNN's", stack=_torch(flash_2=False)),
    Choice(name="rotary positions are not complex", stack=_torch(complex_rotary=False)),
    Choice(name="norms are one kernel", stack=_torch(fused_norm=True)),
    Choice(name="gradients are not clipped", stack=_torch(clips=False)),
    Choice(name="models said to have no positions have rotary ones", config=_rope),
)


def score(cases: Mapping[str, list[Case]], choice: Choice) -> dict[str, dict[str, float]]:
    """Per table mean absolute error and bias of its time rows with one choice turned round."""
    found = {}
    for table, own in cases.items():
        errors = []
        for case in own:
            config = choice.config(case.config)
            stack, machine = (
                choice.stack(stack_named(case.stack)),
                choice.machine(machine_of(case.machine, case.network)),
            )
            step = forecast(config, case.degrees, machine, stack=stack)
            errors.append(time_error(case, step))
        found[table] = {"mean": statistics.fmean(abs(error) for error in errors), "bias": statistics.fmean(errors)}
    return found


def left_out(published: Mapping[str, Mapping[str, float]], turned: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The value of the published choice on tables that did not take part in it.

    Args:
        published, turned: table -> scores as published and with the choice turned round.

    Returns:
        `supported`: of the tables that the choice changes, those whose others are better off as published; `gain`: by
        how much less the mean error of these tables is as published; None where the choice changes one table only.

    >>> published, turned = {"a": {"mean": 0.02}, "b": {"mean": 0.03}}, {"a": {"mean": 0.04}, "b": {"mean": 0.02}}
    >>> left_out(published, turned)["supported"]
    ['b']
    """
    gains = {name: turned[name]["mean"] - own["mean"] for name, own in published.items()}
    changed = [name for name, gain in gains.items() if abs(gain) > _SAME]
    if len(changed) < 2:
        return {"changed": changed, "supported": [], "gain": None}
    supported = [name for name in changed if sum(gains[other] for other in changed if other != name) > 0]
    return {
        "changed": changed, "supported": supported,
        "gain": statistics.fmean(gains[name] for name in supported) if supported else None,
    }  # fmt: skip


_SAME = 5e-4
"""A change of a mean error that does not show."""


def time_error(case: Case, step: Forecast) -> float:
    """Predicted over measured time, less 1; of a rate the same."""
    ratio = measured_as(case, step, step.step_s) / case.value
    return (ratio if case.metric == "iteration_time_s" else 1 / ratio) - 1


def time_cases(tables: list[str]) -> dict[str, list[Case]]:
    """The rows of every table that can be predicted, measure time and leave nothing open that sets it."""
    result: dict[str, list[Case]] = {}
    for table in tables:
        for number, row in enumerate(read_table(table), start=1):
            if needed_fillings(row) != [{}]:
                continue
            try:
                case = case_of(row, number)
                forecast(
                    case.config, case.degrees, machine_of(case.machine, case.network), stack=stack_named(case.stack)
                )
            except (Skip, TwofoldError):
                continue
            if not case.metric.startswith("peak_memory"):
                result.setdefault(Path(table).name, []).append(case)
    return result


def main() -> None:
    """Score every table with every choice turned round, print what changes, and write all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--out", default=str(RESULTS))
    arguments = parser.parse_args()
    cases = time_cases(arguments.tables)
    scores = {choice.name: score(cases, choice) for choice in CHOICES}
    published = scores[CHOICES[0].name]
    for name, own in scores.items():
        cells = [
            f"{table.split('_')[0]} {value['mean']:.1%} ({value['bias']:+.1%})" for table, value in own.items()
            if name == CHOICES[0].name or abs(value["mean"] - published[table]["mean"]) > _SAME
            or abs(value["bias"] - published[table]["bias"]) > _SAME
        ]  # fmt: skip
        tested = left_out(published, own)
        verdict = "" if tested["gain"] is None else (
            f"  [left out: {len(tested['supported'])} of {len(tested['changed'])} supported, {tested['gain']:+.1%}]"
        )  # fmt: skip
        print(f"{name:52s} {'; '.join(cells) or 'nothing changes'}{verdict}")
    document = {
        "date": time.strftime("%Y-%m-%d"), "rows": {table: len(own) for table, own in cases.items()},
        "command": "python -m benchmarks.accuracy.choices " + " ".join(Path(name).name for name in arguments.tables),
        "choices": scores, "left_out": {name: left_out(published, own) for name, own in scores.items()},
    }  # fmt: skip
    write_atomically(Path(arguments.out), (json.dumps(document, indent=1) + "\n").encode())
    print(f"saved {arguments.out}")


if __name__ == "__main__":
    main()
