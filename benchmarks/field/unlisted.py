"""Models that capture was not written for: captured, searched, and trained on two ranks as in one process.

    nice -n 19 python -m benchmarks.field.unlisted [NAME ...] [--only capture] [--save]

Every model of `families` (transformers), `pictures` (torchvision, timm), `blocks`, `handwritten`, `classics`,
`objectives`, `derived` and `invented` is captured as it is and searched for 2 and 8 devices of H200 machines. The plan
for 2 devices then trains for eight steps on two ranks of this host, beside the module in one process; the largest
relative difference of a loss is printed. Seconds are processor time. A model that is refused is listed with its
sentence; a library that is not installed counts as missing. `--save` with names keeps the other rows of the file.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import torch

from benchmarks import FOLDER
from benchmarks.field.blocks import BLOCKS
from benchmarks.field.capture import outcome, plain
from benchmarks.field.capture import planned as planned_on
from benchmarks.field.classics import CLASSICS, CONTRASTIVE
from benchmarks.field.derived import DERIVED
from benchmarks.field.families import FAMILIES
from benchmarks.field.handwritten import HANDWRITTEN
from benchmarks.field.invented import INVENTED
from benchmarks.field.objectives import OBJECTIVES
from benchmarks.field.on_ranks import LIMIT, chosen, drawn, planned, prepare, trained
from benchmarks.field.pictures import PICTURES
from benchmarks.kept import write_rows
from executor.capture.capture import capture
from plans.model.graph import Graph

__all__ = ["UNLISTED"]

RESULTS = FOLDER / "results" / "unlisted.json"
TIME_LIMIT_S = 10.0

UNLISTED = BLOCKS | OBJECTIVES | HANDWRITTEN | CLASSICS | CONTRASTIVE | DERIVED | INVENTED | FAMILIES | PICTURES
"""Name -> what makes the module and its inputs."""


def captured(name: str, found: dict[str, Any]) -> tuple[Graph | None, torch.nn.Module | None, tuple[Any, ...]]:
    """The graph of a model in its full batch, the module and its inputs; what is found out goes into `found`."""
    torch.manual_seed(0)
    try:
        module, examples = UNLISTED[name]()
    except ImportError as error:
        found["missing"] = str(error)
        return None, None, ()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph, timed = outcome(lambda: capture(module, examples))
    found |= {"capture_s": timed.pop("seconds"), **timed}
    if graph is not None:
        found["operators"] = len(graph.operators)
        found["without_an_entry"] = sorted(
            {str(operator.attrs["target"]) for operator in graph.operators if operator.kind == "opaque"}
        )
        found["replicated"] = [
            plain(str(each.message))[:120] for each in caught if "cannot be split" in str(each.message)
        ]
    return graph, module, examples


def row(name: str, only: str) -> dict[str, Any]:
    """All that is found out about a model."""
    found: dict[str, Any] = {}
    graph, module, examples = captured(name, found)
    if graph is None or module is None or only == "capture":
        return found
    for count in (2, 8):
        found[f"on_{count}"] = planned_on(graph, count, TIME_LIMIT_S)
    if only == "search":
        return found
    batch = drawn(examples)
    small, timed = outcome(lambda: capture(module, batch))
    made, timed = outcome(lambda: trained(planned(small, 2), module, batch)) if small is not None else (None, timed)
    timed.pop("seconds")
    found |= timed | (made or {})
    found["equal"] = found.get("loss_difference", 1.0) < LIMIT
    return found


def text(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| model | captured | without an entry | 2: gain, s | 8: gain, s | loss |", "| --- " * 6 + "|"]
    for name, found in rows.items():
        why = next((found[key] for key in ("missing", "refused", "failed") if key in found), None)
        is_captured = "operators" in found
        cells = [name, f"{found['operators']} operators, {found['capture_s']} s" if is_captured else f"no: {why}"]
        cells.append(", ".join(each.removeprefix("aten.") for each in found.get("without_an_entry", ())))
        for count in (2, 8):
            each = found.get(f"on_{count}", {})
            cells.append(
                each.get("refused") or each.get("failed") or (f"{each['gain']}, {each['seconds']}" if each else "")
            )
        ran = f"{found['loss_difference']:.1e} ({found['nudged']:.1e} nudged)" if "loss_difference" in found else ""
        cells.append(ran or (f"no: {why}" if is_captured and why else ""))
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Try them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to try; all by default")
    parser.add_argument("--only", choices=("capture", "search", ""), default="", help="stop after this step")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.names, UNLISTED)
    prepare()
    rows = {}
    for name in names:
        begun = time.process_time()
        rows[name] = row(name, arguments.only)
        rows[name]["seconds"] = round(time.process_time() - begun, 2)
        print(json.dumps({name: rows[name]}), flush=True)
    print(text(rows))
    print(totals(rows))
    if arguments.save:
        write_rows(RESULTS, rows, UNLISTED, lambda rows: {"total": totals(rows)})


def totals(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How many of the rows came how far."""
    return {
        "tried": sum("missing" not in found for found in rows.values()),
        "captured": sum("operators" in found for found in rows.values()),
        **{f"searched on {count}": sum("gain" in found.get(f"on_{count}", {}) for found in rows.values())
           for count in (2, 8)},
        "trained": sum("loss_difference" in found for found in rows.values()),
        "equal": sum(found.get("equal", False) for found in rows.values()),
        "seconds": round(sum(found.get("seconds", 0) for found in rows.values())),
    }  # fmt: skip


if __name__ == "__main__":
    main()
