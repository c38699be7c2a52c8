"""One rank that walks the cases of its number of devices, under torchrun; started by `launches`.

Rank 0 keeps what was found in a file, after every part of every case, so that nothing is lost when ranks die.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.cases import Case
from benchmarks.peers.own import EXECUTIONS, measured_plan
from benchmarks.peers.peer import cannot_compile, lacks, parts_of, peer_step
from benchmarks.peers.sets import case_named
from benchmarks.peers.timing import Measured, measured_steps
from benchmarks.peers.weights import tokens_of
from executor.calibrate.rank_sync import HUNG_EXIT_CODE, RankSync
from executor.device import Device, environment, pick_device
from executor.step.groups import connect
from plans.files import write_atomically
from plans.plan import Plan

__all__ = ["Found", "main"]

INPUTS = ("tokens", "labels")
"""Of the graph, in the order in which the peer takes them."""
PART_S = 60.0
"""Seconds in one part of a case after which its ranks count as hung."""
ANSWER_S = 20.0
"""So long a rank that failed waits for the others to fail too."""


@dataclass(slots=True)
class Found:
    """The file of what was found: {"doing": [case, side] or None, "environment", "rows": case -> side -> figures}."""

    path: Path
    content: dict[str, Any]

    @classmethod
    def at(cls, path: Path) -> Found:
        """The content of the file, if it exists."""
        empty: dict[str, Any] = {"doing": None, "environment": {}, "rows": {}}
        return cls(path, json.loads(path.read_bytes()) if path.exists() else empty)

    def has(self, case: str, side: str) -> bool:
        """Whether that side was measured, or failed."""
        return side in self.content["rows"].get(case, {})

    def begin(self, case: str, side: str) -> None:
        """Note what is about to run."""
        self.content["doing"] = [case, side]
        self._write()

    def keep(self, case: str, side: str, figures: dict[str, Any]) -> None:
        """Store figures, or {"error": ...}."""
        self.content["rows"].setdefault(case, {})[side] = figures
        self.content["doing"] = None
        self._write()

    def _write(self) -> None:
        write_atomically(self.path, json.dumps(self.content, indent=1).encode() + b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walk:
    """The cases on this rank."""

    device: Device
    sync: RankSync
    found: Found
    compile: str
    only: Sequence[str]

    def sides(self, case: Case) -> list[str]:
        """What is measured of a case, in this order."""
        if case.products:
            return ["compiled"]
        sides = [side for side in EXECUTIONS if side == "eager" or self.device.can_record]
        if not lacks(case):
            sides.append(case.parts)
            if case.parts == "torch" and (self.compile == "all" or (self.compile == "chosen" and case.compiles)):
                sides.append("compiled")
        return [side for side in sides if (side in self.only if self.only else side != "apart")]

    def take(self, case: Case, until: float) -> bool:
        """Measure all sides that are missing; False once the time is over."""
        plan = case.plan()
        told = tokens_of(plan.graph, case.config.vocab)
        for side in self.sides(case):
            if self.sync.from_rank_0(self.found.has(case.name, side)):
                continue
            if self.sync.from_rank_0(time.time() > until):
                return False
            if side == "compiled" and (why := cannot_compile(case)):
                self._keep(case, side, {"error": why})
                continue
            self._measure(case, side, lambda side=side: self._measured(case, plan, side, told))
        return True

    def _measured(self, case: Case, plan: Plan, side: str, told: Mapping[str, Any]) -> Measured:
        if side in EXECUTIONS:
            return measured_plan(plan, side, self.device, self.sync, told)
        left_bytes, batch = self.device.memory_allocated(), [torch.from_numpy(told[name]) for name in INPUTS]
        step = peer_step(case, plan, self.device, self.sync.rank, compiles=side == "compiled")
        return measured_steps(self.device, self.sync, lambda: step(batch), left_bytes)

    def _measure(self, case: Case, side: str, measured: Callable[[], Measured]) -> None:
        """Keep the figures of one side, or why there are none.

        Where some ranks fail and others do not, this process ends: the job can only be started again.
        """
        if self.sync.rank == 0:
            self.found.begin(case.name, side)
        start, error = time.monotonic(), ""
        with self.sync.watch(f"{side} of {case.name}", timeout_s=PART_S):
            try:
                figures = measured().json
            except Exception as failure:
                error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"
                traceback.print_exc()
                traceback.clear_frames(failure.__traceback__)
                self._note(error)
                self._leave_unless_all_failed()
            else:
                self.sync.barrier(PART_S)
        gc.collect()
        if side == "compiled":
            torch.compiler.reset()
        self.device.release_memory()
        if error:
            figures = {"error": error}
        else:
            figures |= {"parts": "executor" if side in EXECUTIONS else parts_of(case)}
            figures["taken_s"] = round(time.monotonic() - start, 1)
        self._keep(case, side, figures)

    def _note(self, error: str) -> None:
        """For `launches`, if this rank's job ends here."""
        self.found.path.with_suffix(f".rank{self.sync.rank}.error").write_text(error)

    def _leave_unless_all_failed(self) -> None:
        # the others may be in a collective that waits for this rank, which nothing but the end of the job can stop
        leave = threading.Timer(ANSWER_S, os._exit, (HUNG_EXIT_CODE,))
        leave.start()
        self.sync.barrier()
        leave.cancel()
        self.found.path.with_suffix(f".rank{self.sync.rank}.error").unlink(missing_ok=True)

    def _keep(self, case: Case, side: str, figures: dict[str, Any]) -> None:
        if self.sync.rank:
            return
        self.found.keep(case.name, side, figures)
        computing = figures.get("computing_s")
        share = "" if computing is None else f"computing {computing / figures['step_s']:.0%}, "
        outcome = figures.get("error") or (
            f"{figures['step_s'] * 1e3:9.2f} ms, spread {figures['spread']:.1%}, {share}peak "
            f"{figures['peak_bytes'] / 2**30:.2f} GiB, first loss {figures['losses'][0]:.6f} ({figures['taken_s']} s)"
        )
        print(f"{case.name:44s} {side:9s} {outcome}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk the cases that are named, until a time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--found", type=Path, required=True, help="file of what was found")
    parser.add_argument("--until", type=float, required=True, help="seconds since 1970; begin nothing after it")
    parser.add_argument("--compile", choices=("none", "chosen", "all"), default="chosen")
    parser.add_argument("--sides", nargs="*", default=[], help="all but apart unless stated")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)
    device = pick_device(options.device)
    device.use()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        connect(device, PART_S)
    sync = RankSync(device, PART_S)
    found = Found.at(options.found)
    walk = _Walk(device=device, sync=sync, found=found, compile=options.compile, only=options.sides)
    walk.found.content["environment"] = environment(device)
    for name in options.cases:
        if not walk.take(case_named(name), options.until):
            break
    sync.barrier()
    sync.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
