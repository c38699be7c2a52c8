"""What people write, unmodified, under its searched plan on gloo ranks: is the loss that of single-process training?

    nice -n 19 python -m benchmarks.field.on_ranks [NAME ...] [--double] [--save]

Every model of `benchmarks.field.models` is captured in a small batch, everything is searched for four devices of a
machine of H200, and the plan trains for eight steps on four ranks of this host. A row has the processor time of capture
and search, the operators without an entry, the plan, how much faster it is predicted to be than data parallelism, and
the largest relative difference of the loss; next to it that of one process whose initial weights differ in the last
digit: where rounding grows that fast, ranks cannot be compared. With --double the plan trains in float64, where such
a model shows whether ranks compute the same function. A model that is not captured, planned or run is listed with its
sentence. `--save` with names keeps the other rows of the file.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import tempfile
import warnings
from collections.abc import Collection, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks import FOLDER
from benchmarks.field.capture import outcome
from benchmarks.field.models import CLASSES, MODELS
from benchmarks.kept import write_rows
from costmodels import Machine, executing
from executor.capture.capture import capture
from executor.npz import write_npz
from executor.reference.reference import compare_losses, train_reference
from executor.train.run import run_rank
from executor.weights.initial import as_array
from executor.weights.module_weights import as_graph
from plans.lower import lower
from plans.model.graph import Graph
from plans.optimizer import Optimizer
from plans.plan import Plan, load_plan, save_plan
from search import search, uniform_plan
from simulator import simulate

RESULTS = FOLDER / "results" / "field_on_ranks.json"
NUM_RANKS, NUM_STEPS, BATCH = 4, 8, 16
TIME_LIMIT_S, RUN_LIMIT_S = 20.0, 300
LIMIT = 2e-6
"""Largest relative difference of a loss from single-process training."""

_ANYTHING: dict[str, Any] = {
    "num_stages": None, "num_micro_batches": None, "interleave": None, "schedule": None, "recompute": None,
    "any_level": True, "top_k": 1, "time_limit_s": TIME_LIMIT_S,
}  # fmt: skip
_OPTIMIZER = Optimizer(kind="adamw", settings={"lr": 1e-3}, threshold_bytes=1)


def planned(graph: Graph, num_ranks: int = NUM_RANKS) -> Plan:
    """The best plan of that number of devices; where fewer would be faster, that with stages of equal widths."""
    machine = executing(Machine.load(f"h200-x{num_ranks}"), "graph")
    asked = {**_ANYTHING, "optimizer": _OPTIMIZER}
    best = search(graph, machine, **asked).best
    if best.num_ranks < num_ranks:
        best = search(graph, machine, **asked, widths="even").best
    return best


def described(plan: Plan) -> dict[str, Any]:
    """The plan in words, and how many times as fast as data parallelism it is predicted to be."""
    machine = executing(Machine.load(f"h200-x{NUM_RANKS}"), "graph")
    spread = uniform_plan(plan.graph, machine, dp=NUM_RANKS, optimizer=_OPTIMIZER)
    gain = simulate(spread, machine).step_interval_s / simulate(plan, machine).step_interval_s
    words = [" + ".join("x".join(map(str, stage.mesh.device_matrix)) for stage in plan.stages)]
    words += [f"{plan.num_micro_batches} micro-batches", plan.schedule] if plan.num_micro_batches > 1 else []
    words += [f"level {plan.optimizer.parallel_level}"] if plan.optimizer.parallel_level else []
    words += [f"{plan.interleave} slices"] if plan.interleave > 1 else []
    words += [f"{len(plan.recompute)} recomputed"] if plan.recompute else []
    return {"plan": ", ".join(words), "gain": round(gain, 3)}


def work(rank: int, folder: str, num_ranks: int) -> None:
    """Train on one rank; the first saves the losses."""
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(RUN_LIMIT_S, exit=True)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(number) for name, number in numbers.items()} | {"GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    place = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=num_ranks)
    plan = load_plan(place / "plan.json")
    with np.load(place / "values.npz") as values, np.load(place / "batch.npz") as batch:
        batches, held = [dict(batch)] * NUM_STEPS, dict(values)
    result = run_rank(lower(plan), plan, batches, held, NUM_STEPS, device="cpu")
    if rank == 0:
        losses = [float(loss) for loss in result.losses]
        (place / "losses.json").write_text(json.dumps({"losses": losses, "differences": result.differences}))
    dist.barrier()
    dist.destroy_process_group()


def trained(plan: Plan, module: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Train on ranks and in one process; the largest relative difference of the loss."""
    plan = msgspec.structs.replace(plan, output_broadcast=True)
    held = dict([*module.named_parameters(), *module.named_buffers()])
    named = as_graph(plan.graph, {name: as_array(each.detach()) for name, each in held.items()})
    values = {each.name: named[each.name][...] for each in (*plan.graph.parameters, *plan.graph.constants)}
    inputs = [tensor.name for tensor in plan.graph.tensors.values() if tensor.kind == "input"]
    with tempfile.TemporaryDirectory(prefix="twofold-") as folder:
        save_plan(plan, Path(folder) / "plan.json")
        write_npz(Path(folder) / "values.npz", values)
        write_npz(Path(folder) / "batch.npz", {name: each.numpy() for name, each in zip(inputs, batch, strict=True)})
        mp.start_processes(  # type: ignore[attr-defined]
            work, (folder, plan.num_ranks), nprocs=plan.num_ranks, start_method="forkserver"
        )
        said = json.loads((Path(folder) / "losses.json").read_text())
    alone, nudged = (
        train_reference(
            module, [batch] * NUM_STEPS, optimizer=plan.optimizer, num_steps=NUM_STEPS, graph=plan.graph,
            num_micro_batches=plan.num_slices, nudge=nudge,
        ).losses
        for nudge in (None, 0)
    )  # fmt: skip
    return {
        "loss_difference": compare_losses(said["losses"], alone).max_rel_diff,
        "nudged": compare_losses(nudged, alone).max_rel_diff, "communication": said["differences"][:1],
    }  # fmt: skip


def in_double(plan: Plan) -> Plan:
    """The plan with float64 in place of float32."""
    tensors = {
        name: msgspec.structs.replace(tensor, dtype="float64") if tensor.dtype == "float32" else tensor
        for name, tensor in plan.graph.tensors.items()
    }
    return msgspec.structs.replace(plan, graph=msgspec.structs.replace(plan.graph, tensors=tensors), prediction=None)


def drawn(examples: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Random rows for inputs given as shapes; whole numbers are below the number of classes, as every input allows."""
    generator = torch.Generator().manual_seed(4)
    batch = []
    for example in examples:
        shape, dtype = example if isinstance(example[-1], str) else (example, "float32")
        if dtype.startswith("int"):
            batch.append(torch.randint(0, CLASSES, (BATCH, *shape[1:]), generator=generator))
        else:
            batch.append(torch.randn((BATCH, *shape[1:]), generator=generator))
    return tuple(batch)


def row(name: str, double: bool) -> dict[str, Any]:
    """All that is found of a model; it ends with the first step that fails."""
    torch.manual_seed(0)
    try:
        module, examples = MODELS[name]()
    except ImportError as error:
        return {"missing": str(error)}
    batch = drawn(examples)
    graph, said = outcome(lambda: capture(module, batch))
    found = {"capture_s": said.pop("seconds"), **said}
    if graph is None:
        return found
    opaque = sorted({str(operator.attrs["target"]) for operator in graph.operators if operator.kind == "opaque"})
    found |= {"operators": len(graph.operators), "without_an_entry": opaque}
    plan, said = outcome(lambda: planned(graph))
    found |= {"search_s": said.pop("seconds"), **said}
    if plan is None:
        return found
    run, rows = plan, batch
    if double:
        run, module = in_double(plan), module.double()
        rows = tuple(each.double() if each.is_floating_point() else each for each in batch)
    for work_of in (lambda: described(plan), lambda: trained(run, module, rows)):
        made, said = outcome(work_of)
        said.pop("seconds")
        found |= said | (made or {})
    found["equal"] = found.get("loss_difference", 1.0) < LIMIT and not found["communication"]
    return found


def text(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as a table of Markdown."""
    lines = ["| model | capture s | search s | without an entry | plan | gain | loss | nudged |", "| --- " * 8 + "|"]
    for name, found in rows.items():
        why = next((found[key] for key in ("missing", "refused", "failed") if key in found), "")
        cells = [name, *(str(found.get(key, "")) for key in ("capture_s", "search_s"))]
        cells += [", ".join(found.get("without_an_entry", ())), found.get("plan", ""), str(found.get("gain", ""))]
        cells.append(f"{found['loss_difference']:.1e}" if "loss_difference" in found else f"no: {why[:120]}")
        cells.append(f"{found['nudged']:.1e}" if "nudged" in found else "")
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def chosen(parser: argparse.ArgumentParser, names: Sequence[str], models: Collection[str]) -> Collection[str]:
    """The named models, or all of them; ends the program if one is not known."""
    if unknown := [name for name in names if name not in models]:
        parser.error(f"there is no model {unknown[0]!r}; the models are {', '.join(models)}")
    return names or models


def prepare() -> None:
    """Let ranks be forked from a process with torch, and show no warnings of models."""
    forkserver.set_forkserver_preload(["torch.distributed", "executor.train.run", "executor.capture"])
    warnings.simplefilter("ignore")


def main() -> None:
    """Try them, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models to try; all by default")
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.names, MODELS)
    prepare()
    rows = {}
    for name in names:
        rows[name] = row(name, arguments.double)
        print(json.dumps({name: rows[name]}), flush=True)
    print(text(rows))
    print(f"{num_equal(rows)} of {len(rows)} train on {NUM_RANKS} ranks as in one process")
    if arguments.save:
        write_rows(RESULTS, rows, MODELS, lambda rows: {"equal": num_equal(rows)})


def num_equal(rows: dict[str, dict[str, Any]]) -> int:
    """How many models train as in one process."""
    return sum(found.get("equal", False) for found in rows.values())


if __name__ == "__main__":
    main()
