"""What is predicted of a device, a software or a host that was never measured.

Each of those that were measured is left out in turn and predicted from the others and its own data sheet:

- a device: kernels carried over from another one (`costmodels.fit.transfer_calibration`), against its own points and
  steps on one device, and against published tables of products and of bandwidths;
- a software: its steps, which no figure is ever fitted to, from its parts measured alone;
- a host: its times to issue from those of the other hosts (steps under each host alone: `benchmarks.accuracy`).

The table is printed, and written with every error to benchmarks/results/leave_one_out.json. Groups without data are
named as not measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks import FOLDER
from benchmarks.accuracy.calibration import DATA, files_of, points_of
from benchmarks.accuracy.choices import time_cases, time_error
from benchmarks.accuracy.network import load_published, predicted_GBps
from benchmarks.accuracy.stack_steps import predicted as predicted_step
from benchmarks.accuracy.step_plans import SETS
from benchmarks.peers.sets import SECOND_CASES
from costmodels import Machine
from costmodels.fit.device import usable_points
from costmodels.fit.points import Point, load_points
from costmodels.fit.predict import predict_points
from costmodels.fit.transfer_calibration import carried
from costmodels.machine.catalogue import Device, load_device
from costmodels.machine.machine import DISPATCH_CLASSES
from costmodels.price.compute import Rule, matrix_s
from costmodels.price.executor_kernels import fit_rules
from costmodels.price.torch_hosts import HOSTS_US, host_s
from interop.measurements.machines import machine_of
from plans.degrees import Degrees
from plans.files import write_atomically
from plans.lower import lower
from plans.model.transformer import TransformerConfig
from simulator import simulate
from simulator.forecast import Forecast, forecast
from simulator.stacks import Stack, TorchNative, stack_named

__all__ = ["Left", "TorchPlan", "as_if_unmeasured", "main", "summary", "torch_plans"]

RESULTS = FOLDER / "results" / "leave_one_out.json"

SECOND_SET = RESULTS.with_name("peers_h200_second.json")

DEVICES = {"h200": "h100-sxm", "h100-sxm": "h200"}
"""Measured device -> the other one, whose figures it gets."""

PUBLISHED = DATA / "products-a100-pcie-80gb.csv"
"""Products of an A100 PCIe that others measured; its first lines say where they are from."""

SECTIONS = {"matrix": "products", "attention": "attention", "memory": "memory-bound"}

SETS_OF_ONE_CODE = ("third",)
"""Sets of plans (benchmarks/accuracy/step_plans.py) that ran on both devices with the same kernels."""

LATER_CODE = ("fourth", "fifth", "sixth", "fused")
"""Parts of the names of files whose instructions ran with later kernels of the executor."""

HOST_BOUND = 0.1
"""Share of a step that its device waits for the host, from which it tells nothing about the device."""

SHORT_S = 2e-5
"""Kernels below this are launches rather than work; they are reported apart."""

TARGETS = {"products": 0.08, "attention": 0.08, "memory-bound": 0.08, "steps": 0.1, "software": 0.08}

NOT_MEASURED = (
    "products, attention and memory-bound kernels of an A100 SXM, and its steps under torch: no points (80 products of "
    "an A100 PCIe are)",
    "attention and memory-bound kernels of an A100 PCIe and a B200: their tables have products only",
    "links of an H100: one device was measured; steps of several from the H200's kernels alone are not told apart",
    "hosts with other processors: all hosts were lent with H100 or H200",
    "parts of Megatron-LM, DeepSpeed and MindSpore alone: neither was installed on a measured host",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """One prediction of something that was left out.

    Args:
        part: what is predicted: products, attention, memory-bound, links, steps, software, host.
        out: what was left out.
        given: what it was predicted from.
        what: the point, row or plan.
        error: predicted / measured - 1, of a time.
    """

    part: str
    out: str
    given: str
    what: str
    error: float


# -- devices -----------------------------------------------------------------------------------------------------------


def as_if_unmeasured(device: Device, source: Device) -> Device:
    """`device` by its data sheet and the figures of `source` alone; its host, which is not left out, keeps its times.

    >>> h200 = load_device("h200")
    >>> h100 = as_if_unmeasured(load_device("h100-sxm"), h200)
    >>> h100.compute.attention == h200.compute.attention, h100.compute.memory_Bps < h200.compute.memory_Bps
    (True, True)
    """
    told = {
        entry: says for entry, says in device.provenance.items()
        if says.status not in ("measured", "interpolated") and entry != "typical_products"
    }  # fmt: skip
    compute = msgspec.structs.replace(
        device.compute, clock_MHz=None, step_clock_MHz=None, step_clock_drop=None, power=None, half_rows=0.0, rules={}
    )
    bare = msgspec.structs.replace(device, compute=compute, typical_products=(), replay=None, provenance=told)
    own = msgspec.structs.replace(source, compute=msgspec.structs.replace(source.compute, rules=_rules(source.name)))
    found = carried(bare, own, date="")
    hosts = {call: rule.dispatch_s for call, rule in device.compute.rules.items()}
    rules = {
        call: msgspec.structs.replace(rule, dispatch_s=hosts.get(call, rule.dispatch_s))
        for call, rule in found.compute.rules.items()
    }
    compute = msgspec.structs.replace(found.compute, rules=rules)
    return msgspec.structs.replace(found, compute=compute, dispatch_s=device.dispatch_s)


@lru_cache
def _rules(name: str) -> dict[str, Rule]:
    """The executor's instructions as they were measured on a device when its kernels were those of `SETS_OF_ONE_CODE`:
    later ones were written again and measured on an H200 only."""
    files = [file for file in files_of(name) if not any(each in file.name for each in LATER_CODE)]
    compute = msgspec.structs.replace(load_device(name).compute, embedding_gradient=None)  # it was no torch call then
    return fit_rules(usable_points(points_of(files)[0]), compute).rules


def left_out_kernels() -> Iterator[Left]:
    """Every point of a measured device that does not take less than `SHORT_S`, predicted from the other one."""
    for name, other in DEVICES.items():
        device = as_if_unmeasured(load_device(name), load_device(other))
        points = [point for point in points_of(files_of(name))[0] if point.kind in SECTIONS]
        for entry in predict_points(points, device):
            if entry.section in SECTIONS:
                part = SECTIONS[entry.section] + (", short" if entry.point.seconds < SHORT_S else "")
                yield Left(part=part, out=name, given=other, what=_name(entry.point), error=entry.error)


def _name(point: Point) -> str:
    return " ".join(map(str, (point.call, point.form, *point.shape, point.size_bytes or "", point.dtype)))


def left_out_products() -> Iterator[Left]:
    """Published tables of products, predicted from the H200 and the data sheet."""
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    published = [(float(row["share"]), (int(row["m"]), int(row["n"]), int(row["k"]))) for row in csv.DictReader(lines)]
    tables = {
        "a100-pcie-80gb": [(share * 312e12, shape) for share, shape in published],
        **{
            name: [(product.flops_per_s, product.shape) for product in load_device(name).typical_products]
            for name in ("b200", "h20")
        },
    }  # fmt: skip
    for name, products in tables.items():
        compute = as_if_unmeasured(load_device(name), load_device("h200")).compute
        for flops_per_s, (m, n, k) in products:
            touched = 2 * (m * k + n * k + m * n)
            found_s = matrix_s(compute, (m, n, k), compute.matrix_flops_per_s["bfloat16"], touched)
            error = found_s * flops_per_s / (2 * m * n * k) - 1
            yield Left(part="products", out=name, given="h200", what=f"{m}x{n}x{k}", error=error)


def left_out_links() -> Iterator[Left]:
    """Published bandwidths that no constant was fitted to, from 1 MiB on."""
    for point in load_published():
        if not point.is_fitted:
            what = f"{point.case} {point.call} {point.size_bytes}"
            error = point.bus_GBps / predicted_GBps(point) - 1
            yield Left(part="links", out=point.device, given="other tables", what=what, error=error)


def left_out_steps() -> Iterator[Left]:
    """Steps on one device: own plans with the same kernels on both, and plain torch; those bound by the host apart."""
    plans = {name: plan for each in SETS_OF_ONE_CODE for name, plan in SETS[each]().items()}
    for name, other in DEVICES.items():
        machine = Machine.of_device(as_if_unmeasured(load_device(name), load_device(other)), 1)
        files = [file for file in files_of(name) if not any(each in file.name for each in LATER_CODE)]
        points = [point for file in files for point in load_points(file)[0]]
        for point in points:
            if point.kind != "step" or point.ranks != 1 or "part" in point.options:
                continue
            if point.stack == "twofold" and point.call in plans:
                found = simulate(lower(plans[point.call]), machine, with_memory=False)
                part = "steps, host-bound" if found.host_wait_s > HOST_BOUND * found.step_interval_s else "steps"
                error, what = found.step_interval_s / point.seconds - 1, point.call
            elif not point.stack and point.call == "decoder_step" and int(point.options.get("hidden", 0)) >= 1024:
                error, part = predicted_step(point, machine).step_s / point.seconds - 1, "steps"
                what = "torch " + " ".join(f"{key} {value}" for key, value in sorted(point.options.items()))
            else:
                continue
            yield Left(part=part, out=name, given=other, what=what, error=error)


# -- software ----------------------------------------------------------------------------------------------------------


def left_out_software(tables: Sequence[str]) -> Iterator[Left]:
    """The times of published runs and of our own steps under torch's parallel parts, by software."""
    for table, cases in time_cases(tables).items():
        for case in cases:
            machine, stack = machine_of(case.machine, case.network), stack_named(case.stack)
            error = time_error(case, forecast(case.config, case.degrees, machine, stack=stack))
            parts = "pipeline" if case.degrees.pp > 1 else "tensor" if case.degrees.tp > 1 else "data"
            parts += ", host-bound" if _is_host_bound(case.config, case.degrees, machine, stack) else ""
            what = f"{table} row {case.row}"
            yield Left(part="software", out=f"{case.stack}, {parts}", given="its parts", what=what, error=error)
    for name in DEVICES:
        for file in sorted(DATA.glob(f"{name}-*.jsonl.gz")):
            for point in load_points(file)[0]:
                if point.call == "decoder_step" and point.stack and int(point.options.get("hidden", 0)) >= 1024:
                    error = predicted_step(point, Machine.load(f"{name}-x{point.ranks}")).step_s / point.seconds - 1
                    out = f"torch {point.stack}, small"
                    yield Left(part="software", out=out, given="its parts", what=f"{file.name} {name}", error=error)
    for plan in torch_plans():
        error = plan.forecast.step_s / plan.measured_s - 1
        yield Left(part="software", out=f"torch {plan.parts}", given="its parts", what=plan.name, error=error)


class TorchPlan(NamedTuple):
    """A plan of the second set of `benchmarks.peers` as torch ran it.

    Args:
        name: name of the plan.
        parts: of torch that ran it; says where the host is predicted to set the pace.
        measured_s: seconds of a step.
        forecast: of the step, with today's prices.
    """

    name: str
    parts: str
    measured_s: float
    forecast: Forecast


def torch_plans() -> Iterator[TorchPlan]:
    """The plans of the second set, in shapes that no earlier step had, predicted from torch's parts."""
    rows = {row["case"]: row["measured"]["torch"] for row in json.loads(SECOND_SET.read_bytes())["rows"]}
    stack = stack_named("torch")
    for case in (case for cases in SECOND_CASES.values() for case in cases if case.name in rows):
        found = forecast(case.config, case.degrees_value(), case.machine(), stack=stack)
        slow = _is_host_bound(case.config, case.degrees_value(), case.machine(), stack)
        parts = rows[case.name]["parts"] + (", host-bound" if slow else "")
        yield TorchPlan(case.name, parts, rows[case.name]["step_s"], found)


def _is_host_bound(config: TransformerConfig, degrees: Degrees, machine: Machine, stack: Stack) -> bool:
    """Whether the host may set the pace: a step is predicted to take 2 % longer on the slowest measured host than on
    the fastest. Compiled kernels are issued at the same pace on all."""
    if not isinstance(stack, TorchNative) or stack.compiled:
        return False
    times = [forecast(config, degrees, machine, stack=replace(stack, host=host)).step_s for host in HOSTS_US]
    return max(times) > 1.02 * min(times)


# -- hosts -------------------------------------------------------------------------------------------------------------


def left_out_hosts() -> Iterator[Left]:
    """Host times to issue a block of torch's or an instruction of ours, predicted by the median of the other hosts."""
    kinds = ("plain", "ddp", "dtensor", "fsdp2", "fsdp2_reshard")
    own = {host: {f"{kind} {way}": seconds for kind in kinds for way, seconds in
                  zip(("forward", "backward"), host_s(host, kind), strict=True)} for host in HOSTS_US}  # fmt: skip
    yield from _from_others("host, torch blocks", own)
    sessions: dict[str, dict[str, float]] = {}
    for file in (*files_of("h200"), *files_of("h100-sxm"), *DATA.glob("repeat-*.gz")):
        for point in load_points(file)[0]:
            if point.kind == "dispatch" and point.stack == "twofold" and point.call in DISPATCH_CLASSES:
                if not point.options:
                    sessions.setdefault(file.name.partition(".")[0], {})[point.call] = point.seconds
    yield from _from_others("host, own instructions", sessions)


def _from_others(part: str, times: Mapping[str, Mapping[str, float]]) -> Iterator[Left]:
    for host, own in times.items():
        for what, seconds in own.items():
            others = [each[what] for name, each in times.items() if name != host and what in each]
            if others:
                error = statistics.median(others) / seconds - 1
                yield Left(part=part, out=host, given="the others", what=what, error=error)


# -- the table ---------------------------------------------------------------------------------------------------------


def summary(found: Iterable[Left]) -> list[dict[str, Any]]:
    """Per part and what was left out: predictions, mean absolute error, bias, and the spread of the logarithms.

    >>> rows = [Left(part="steps", out="h100", given="h200", what="", error=error) for error in (-0.1, 0.1)]
    >>> [(row["mean"], round(row["bias"], 3), row["target"]) for row in summary(rows)]
    [(0.1, 0.0, 0.1)]
    """
    groups: dict[tuple[str, str, str], list[float]] = {}
    for each in found:
        groups.setdefault((each.part, each.out, each.given), []).append(each.error)
    return [
        {
            "part": part, "out": out, "given": given, "rows": len(errors),
            "mean": statistics.fmean(map(abs, errors)), "bias": statistics.fmean(errors),
            "together": abs(statistics.fmean(math.log1p(error) for error in errors)),
            "spread": math.sqrt(statistics.fmean(math.log1p(error) ** 2 for error in errors)),
            "target": TARGETS.get(part),
        }
        for (part, out, given), errors in groups.items()
    ]  # fmt: skip


def software_edges(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """What steps of other software take over what is predicted: 5 % and 95 % quantiles over groups of steps.

    Groups (as of `summary`) that the host binds count as hosts, and kernels of another generation count as kernels.

    Returns:
        "all", and for every software the edges of the others.
    """
    residual = {
        row["out"]: 1 - row["bias"] for row in rows
        if row["part"] == "software" and not any(each in row["out"] for each in ("dtensor", "rowwise", "host-bound"))
    }  # fmt: skip
    name_of = {out: re.split(r"[-, ]", out)[0] for out in residual}
    found = {}
    for left in ("all", *sorted(set(name_of.values()))):
        own = [value for out, value in residual.items() if name_of[out] != left]
        low, high = np.quantile(own, (0.05, 0.95))
        found[left] = (round(float(low), 3), round(float(high), 3))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Leave out each in turn, print the table, and write it with every error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="tables of measurements, for software and hosts")
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args(arguments)
    found = [
        *left_out_kernels(), *left_out_products(), *left_out_links(), *left_out_steps(),
        *left_out_software(options.tables), *left_out_hosts(),
    ]  # fmt: skip
    rows = summary(found)
    for row in rows:
        wanted = "" if row["target"] is None else f"  wanted {row['target']:.0%}"
        print(
            f"{row['part']:22s} {row['out']:28s} from {row['given']:14s} {row['rows']:5d}  mean {row['mean']:6.1%}  "
            f"bias {row['bias']:+6.1%}{wanted}"
        )
    edges = software_edges(rows) if options.tables else {}
    for left, (low, high) in edges.items():
        print(f"other software, measured over predicted, without {left if left != 'all' else 'none'}: {low} to {high}")
    for each in NOT_MEASURED:
        print(f"not measured: {each}")
    document = {
        "date": time.strftime("%Y-%m-%d"), "machine": platform.machine(), "python": platform.python_version(),
        "command": " ".join([f"python -m {__spec__.name}", *(Path(name).name for name in options.tables)]),
        "groups": rows, "software_edges": edges, "not_measured": NOT_MEASURED,
        "errors": [
            [each.part, each.out, each.given, each.what, round(each.error, 4)] for each in found
            if each.part.partition(",")[0] not in SECTIONS.values()
        ],
    }  # fmt: skip
    write_atomically(Path(options.out), (json.dumps(document, indent=1) + "\n").encode())
    print(f"saved {options.out}")


if __name__ == "__main__":
    main()
