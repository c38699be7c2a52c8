"""Models as people write them: captured, planned and simulated, or the sentence that they fail with.

    python -m benchmarks.field.capture [NAME ...] [--devices 2 8 64] [--save]

Every model of `benchmarks.field.models` and `benchmarks.field.ordinary` is captured unmodified and planned for 2, 8 and
64 devices of H200 machines. Its best plan is simulated, beside data parallelism on as many: the time from step to step,
which is what the search minimises. Seconds are processor time of one process. A model whose library is not installed is
counted as missing. `--save` with names keeps the other rows of the file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks import FOLDER
from benchmarks.field.models import MODELS
from benchmarks.field.ordinary import ORDINARY
from benchmarks.kept import write_rows
from costmodels import Machine
from executor.capture.capture import capture
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.operators import kinds
from search import search, uniform_plan
from simulator import simulate

RESULTS = FOLDER / "results" / "capture_field.json"
DEVICES = (2, 8, 64)
TIME_LIMIT_S = 20.0

FIELD = MODELS | ORDINARY

T = TypeVar("T")


def outcome(work: Callable[[], T]) -> tuple[T | None, dict[str, Any]]:
    """What `work` gives, and its processor time or the sentence that it fails with."""
    begun = time.process_time()
    try:
        made = work()
    except TwofoldError as error:
        return None, {"seconds": round(time.process_time() - begun, 2), "refused": plain(str(error))}
    except Exception as error:  # a fault of twofold or of the library: told with its place
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}"
        return None, {"seconds": round(time.process_time() - begun, 2), "failed": plain(said)[:300]}
    return made, {"seconds": round(time.process_time() - begun, 2)}


def plain(text: str) -> str:
    """In one line, with names of files in place of paths."""
    return re.sub(r"(?:/[\w.-]+)+/([\w.-]+\.py)", r"\1", " ".join(text.split()))


def captured(name: str) -> tuple[Graph | None, dict[str, Any]]:
    """The graph of a model, and remarks about its capture."""
    torch.manual_seed(0)
    try:
        module, examples = FIELD[name]()
    except ImportError as error:
        return None, {"missing": str(error)}
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        graph, said = outcome(lambda: capture(module, examples))
    if graph is not None:
        opaque = Counter(str(operator.attrs["target"]) for operator in graph.operators if operator.kind == "opaque")
        said |= {"operators": len(graph.operators), "without_an_entry": dict(opaque.most_common())}
        assert {operator.kind for operator in graph.operators} <= set(kinds())
    return graph, said


def planned(graph: Graph, count: int, time_limit_s: float = TIME_LIMIT_S) -> dict[str, Any]:
    """The best plan on that many devices, simulated, and how many times as fast it is as data parallelism on them."""
    machine = Machine.load(f"h200-x{count}")

    def work() -> dict[str, Any]:
        best = search(graph, machine, num_devices=count, time_limit_s=time_limit_s, top_k=1)
        return {"step_ms": round(simulate(best.best, machine).step_interval_s * 1e3, 3), "complete": best.complete}

    made, said = outcome(work)
    if made is not None:
        made |= outcome(lambda: {"gain": round(spread_ms(graph, machine, count) / made["step_ms"], 2)})[0] or {}
    return said | (made or {})


def spread_ms(graph: Graph, machine: Machine, count: int) -> float:
    """The simulated time from step to step with data parallelism on all devices, in ms."""
    return simulate(uniform_plan(graph, machine, dp=count), machine).step_interval_s * 1e3


def row(name: str, devices: Sequence[int]) -> dict[str, Any]:
    """All that is found of a model."""
    graph, said = captured(name)
    return {"capture": said} | ({} if graph is None else {str(count): planned(graph, count) for count in devices})


def text(rows: dict[str, dict[str, Any]], devices: Sequence[int]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| model | captured | s | operators | without an entry | " + " | ".join(map(str, devices)) + " |"]
    lines.append("| --- " * (5 + len(devices)) + "|")
    for name, found in rows.items():
        said = found["capture"]
        why = said.get("refused") or said.get("failed") or said.get("missing")
        cells = [name, "yes" if why is None else f"no: {why}", str(said.get("seconds", ""))]
        cells += [
            str(said.get("operators", "")),
            str(sum(said.get("without_an_entry", {}).values()) if not why else ""),
        ]
        for count in devices:
            each = found.get(str(count), {})
            no = each.get("refused") or each.get("failed")
            cells.append(no or (f"{each['step_ms']} ms, {each.get('gain')}, {each['seconds']} s" if each else ""))
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Try them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models to try; all by default")
    parser.add_argument("--devices", nargs="+", type=int, default=DEVICES, help="how many of an H200 machine")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    rows = {}
    for name in arguments.names or FIELD:
        rows[name] = row(name, arguments.devices)
        print(json.dumps({name: rows[name]}), file=sys.stderr, flush=True)
    print(text(rows, arguments.devices))
    print(totals(rows))
    if arguments.save:
        write_rows(RESULTS, rows, FIELD, lambda rows: {"total": totals(rows)})


def totals(rows: dict[str, dict[str, Any]]) -> dict[str, int]:
    """How many of the rows came how far."""
    return {
        "tried": len(rows),
        "captured": sum("operators" in each["capture"] for each in rows.values()),
        **{f"planned on {count}": sum("step_ms" in each.get(str(count), {}) for each in rows.values())
           for count in DEVICES},
    }  # fmt: skip


if __name__ == "__main__":
    main()
