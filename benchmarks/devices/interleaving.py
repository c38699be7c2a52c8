"""What two interleaved slices gain over one: this executor, predicted and measured, beside two streams by hand.

    python -m benchmarks.devices.interleaving --gpus 2 --out interleaving.json      tensor parallel over all, 8 x 4096
    python -m benchmarks.devices.interleaving --gpus 2 --smoke --out FILE           tiny sizes on CPU ranks

Every micro-batch size is run whole and in two slices: replayed and eagerly by the executor (steps of the complete
model), and in plain torch (`benchmarks.devices.two_streams`: forward and backward of the stack of blocks). Gain is 1 -
two / one. Predictions are in the file before any step runs. FILE is written after every part, so that nothing is lost
when the time is over.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from benchmarks.devices.jobs import check_gpus, on_ranks
from benchmarks.devices.two_streams import TwoStreams
from benchmarks.peers.cases import Case
from benchmarks.peers.own import measured_plan, with_execution
from benchmarks.peers.timing import measured_steps
from benchmarks.peers.weights import tokens_of
from costmodels import executing
from executor.calibrate.rank_sync import RankSync
from executor.device import Device, environment, pick_device
from executor.step.groups import connect
from plans.files import write_atomically
from plans.plan import Plan
from simulator import simulate

__all__ = ["main"]

SIZES, SMOKE_SIZES = (2, 4, 8), (4,)
SIDES = ("graph", "by hand, graph", "eager", "by hand")
"""In this order, the most telling first."""
BUDGET_S = 90.0
PART_S = 60.0


def case_of(ranks: int, micro_batch: int, *, smoke: bool) -> Case:
    """Tensor parallel over all ranks."""
    model, batch = ("tiny", 4) if smoke else ("8x4096", 8)
    return Case(model=model, batch=batch, degrees={"tp": ranks, "micro_batch": micro_batch})


def plan_of(case: Case, slices: int) -> Plan:
    """The plan with slices."""
    return msgspec.structs.replace(case.plan(), interleave=slices)


def predicted(case: Case) -> dict[str, Any]:
    """Execution -> seconds of a step with one and with two slices, and the gain."""
    found = {}
    for execution in ("graph", "eager"):
        machine = executing(case.machine(), execution)
        steps = [
            simulate(with_execution(plan_of(case, slices), execution), machine).step_interval_s for slices in (1, 2)
        ]
        found[execution] = {"step_s": steps, "gain": 1 - steps[1] / steps[0]}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a part failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="devices of one host, all in one tensor-parallel group")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "interleaving.json")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on CPU ranks")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="start no new case after this many seconds")
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)  # of the ranks
    options = parser.parse_args(arguments)
    if options.until:
        _rank(options)
        return 0
    if not options.smoke:
        check_gpus(parser, options.gpus)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"micro_batch": size, "predicted": predicted(case_of(options.gpus, size, smoke=options.smoke)), "measured": {}}
        for size in (SMOKE_SIZES if options.smoke else SIZES)
    ]
    command = " ".join(["python -m benchmarks.devices.interleaving", *sys.argv[1:]])
    _write(options.out, {"command": command, "ranks": options.gpus, "environment": {}, "rows": rows})
    job = [
        "--gpus", str(options.gpus), "--out", str(options.out), "--until", str(time.time() + options.budget_s),
        *(["--smoke"] if options.smoke else []),
    ]  # fmt: skip
    code = on_ranks("benchmarks.devices.interleaving", job, options.gpus, limit_s=options.budget_s + 4 * PART_S)
    found = json.loads(options.out.read_text())
    print(table(found["rows"]))
    return int(code != 0 or any("error" in part for row in found["rows"] for part in row["measured"].values()))


def _rank(options: argparse.Namespace) -> None:
    """Measure everything on this rank; rank 0 keeps the file."""
    device = pick_device("cpu" if options.smoke else "auto")
    device.use()
    connect(device, PART_S)
    sync = RankSync(device, PART_S)
    content = json.loads(options.out.read_text())
    content["environment"] = environment(device)
    for side in SIDES:
        if "graph" in side and not device.can_record:
            continue
        for row in content["rows"]:
            if sync.from_rank_0(time.time() > options.until):
                break
            case = case_of(options.gpus, row["micro_batch"], smoke=options.smoke)
            with sync.watch(f"{side}, micro-batch {row['micro_batch']}", timeout_s=PART_S):
                row["measured"][side] = _part(case, side, device, sync)
            if sync.rank == 0:
                _write(options.out, content)
    sync.barrier()
    sync.close()
    dist.destroy_process_group()


def _part(case: Case, side: str, device: Device, sync: RankSync) -> dict[str, Any]:
    """Seconds of a step with one and with two slices, their spread, and the gain; or why there are none."""
    taken = []
    for slices in (1, 2):
        try:
            if side.startswith("by hand"):
                taken.append(_by_hand(case, slices, device, sync, records="graph" in side))
            else:
                plan = plan_of(case, slices)
                taken.append(measured_plan(plan, side, device, sync, tokens_of(plan.graph, case.config.vocab)).json)
        except Exception as error:  # all ranks do the same, so that all of them fail
            return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        gc.collect()
        device.release_memory()
    steps = [each["step_s"] for each in taken]
    found = {"step_s": steps, "spread": [each["spread"] for each in taken], "gain": 1 - steps[1] / steps[0],
             "peak_bytes": [each["peak_bytes"] for each in taken]}  # fmt: skip
    if not side.startswith("by hand"):
        found["losses"] = [each["losses"] for each in taken]
    return found


def _by_hand(case: Case, slices: int, device: Device, sync: RankSync, *, records: bool) -> dict[str, Any]:
    with device.on(device.stream()):
        stack = TwoStreams(case.config, int(case.degrees["micro_batch"]), slices, device, sync.size)
        run: Callable[[], None] = stack.step
        recording = None
        if records:
            for _ in range(2):
                run()
            recording = device.capture(run)
            assert recording is not None
            run = recording.replay
        left_bytes = device.memory_allocated()
        try:
            return measured_steps(device, sync, run, left_bytes).json
        finally:
            device.synchronize()
            if recording is not None:
                recording.release()


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Gains of two slices by micro-batch; milliseconds of one and of two."""
    lines = [
        f"{'micro-batch':>11}  {'side':16}{'one (ms)':>10}{'two (ms)':>10}{'gain':>8}{'predicted':>11}{'spread':>8}"
    ]
    for row in rows:
        for side, part in row["measured"].items():
            if "error" in part:
                lines.append(f"{row['micro_batch']:>11}  {side:16}{part['error'][:80]}")
                continue
            told = row["predicted"].get(side)
            lines.append(
                f"{row['micro_batch']:>11}  {side:16}{part['step_s'][0] * 1e3:>10.2f}{part['step_s'][1] * 1e3:>10.2f}"
                f"{part['gain']:>8.1%}{'-' if told is None else format(told['gain'], '.1%'):>11}"
                f"{max(part['spread']):>8.1%}"
            )
    return "\n".join(lines)


def _write(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=1).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
