"""The search over degrees on a suite of models and clusters: `python -m benchmarks.search [CASE | W1 ... W12 ...]`.

For every case: the best configuration, how far it is above the bounds, what the baselines find (pure data parallel, a
grid as tried by hand with Megatron-LM, greedy halving), what the search of commit e5e99b2 chose, all scored by the same
forecast, and what the search took. Each case runs in a separate process, so nothing is known from the case before.
Every step time is a forecast: nothing was run on GPU or Ascend. Results go to benchmarks/results/search.json after
every case.

Then the checks of `benchmarks.search.weaknesses`: what a greedy search by element counts gets wrong, W1 to W12. The
command fails if one of them does, or if a baseline beats the search.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import FOLDER
from benchmarks.search import weaknesses
from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig, transformer_config
from search.candidate import Candidate
from search.devices import BASELINES, NothingFits, Problem, baseline, describe, solve
from search.devices.critical import critical_path_s
from simulator.forecast import forecast

RESULTS = FOLDER / "results" / "search.json"
EARLIER = FOLDER / "data" / "plans_of_e5e99b2.json"
"""Case -> degrees that `benchmarks.search` chose at commit e5e99b2, on 2026-11-26."""

OTHERS = (*BASELINES, "e5e99b2")

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Case:
    """One question, and what it shows (W1 to W12: see `benchmarks.search.weaknesses`).

    Args:
        model: name, or sizes of a separate transformer.
        machine: catalogue name.
        devices, batch, seq, layers: of the question.
        memory_bytes: a limit below the machine's memory.
        slower: the network between nodes is slower by this factor.
        shows: what the case is for.
        target_s: what the search may take on two quiet cores.
    """

    model: str | dict[str, int]
    machine: str
    devices: int
    batch: int
    seq: int | None = None
    layers: int | None = None
    memory_bytes: int | None = None
    slower: float = 1.0
    shows: str = ""
    target_s: float | None = None

    @property
    def config(self) -> TransformerConfig:
        """The model."""
        if isinstance(self.model, dict):
            return TransformerConfig(name="own", **self.model)  # type: ignore[arg-type]
        return transformer_config(self.model, seq=self.seq, num_layers=self.layers)

    @property
    def problem(self) -> Problem:
        """The question."""
        machine = Machine.load(self.machine)
        if self.slower != 1.0:
            links = tuple(
                msgspec.structs.replace(link, bandwidth_Bps=link.bandwidth_Bps / (self.slower if tier else 1))
                for tier, link in enumerate(machine.links)
            )
            machine = msgspec.structs.replace(machine, links=links)
        return Problem(
            config=self.config, machine=machine, num_devices=self.devices, global_batch=self.batch,
            memory_limit_bytes=self.memory_bytes,
        )  # fmt: skip


_ODD = {
    "num_layers": 50,
    "hidden": 5120,
    "num_heads": 40,
    "num_kv_heads": 8,
    "ffn": 13_825,
    "vocab": 50_000,
    "seq": 4000,
}

CASES = {
    "8B on 1, 4 layers": Case(model="llama-3-8b", machine="h100-sxm-x8", devices=1, batch=8, layers=4),
    "125M on 8": Case(model="gpt3-125m", machine="h100-sxm-x8", devices=8, batch=64, shows="small models: the host"),
    "1.3B on 8": Case(model="gpt3-1.3b", machine="a100-80gb-x8", devices=8, batch=64),
    "6.7B on 32": Case(model="gpt3-6.7b", machine="a100-80gb-x32", devices=32, batch=256),
    "13B on 64, 40 GB": Case(model="gpt3-13b", machine="a100-40gb-x64", devices=64, batch=256, shows="tight memory"),
    "8B on 6": Case(model="llama-3-8b", machine="h100-sxm-x8", devices=6, batch=48, shows="W1: any number of devices"),
    "8B on 12": Case(model="llama-3-8b", machine="h100-sxm-x16", devices=12, batch=96, shows="W1"),
    "8B on 24": Case(model="llama-3-8b", machine="h100-sxm-x24", devices=24, batch=96, shows="W1"),
    "odd sizes on 1000": Case(
        model=_ODD, machine="h100-sxm-x1000", devices=1000, batch=1000, shows="W1: odd widths, 1000 devices"
    ),
    "8B on 8": Case(model="llama-3-8b", machine="h100-sxm-x8", devices=8, batch=64),
    "8B on 64": Case(model="llama-3-8b", machine="h100-sxm-x64", devices=64, batch=512, target_s=2.0),
    "8B on 64, slow network": Case(
        model="llama-3-8b", machine="h100-sxm-x64", devices=64, batch=512, slower=16, shows="W3: bandwidth decides"
    ),
    "8B on 64, 24 GB": Case(
        model="llama-3-8b", machine="h100-sxm-x64", devices=64, batch=512, memory_bytes=24 * GB,
        shows="W5: memory is a limit, not a warning",
    ),
    "8B on 64, 141 GB": Case(model="llama-3-8b", machine="h200-x64", devices=64, batch=512, shows="loose memory"),
    "8B on 64, 32k tokens": Case(
        model="llama-3-8b", machine="h100-sxm-x64", devices=64, batch=64, seq=32_768, shows="W8: heads and sequence"
    ),
    "8B on 256, 131k tokens": Case(
        model="llama-3-8b", machine="h100-sxm-x256", devices=256, batch=64, seq=131_072, shows="W8"
    ),
    "8B on 512": Case(model="llama-3-8b", machine="h100-sxm-x512", devices=512, batch=1024),
    "70B on 64": Case(
        model="llama-3-70b", machine="h100-sxm-x64", devices=64, batch=256, shows="W2: stages, schedule, boundaries"
    ),
    "70B on 128, Ascend": Case(model="llama-3-70b", machine="ascend-910b1-x128", devices=128, batch=256),
    "70B on 256, small batch": Case(
        model="llama-3-70b", machine="h100-sxm-x256", devices=256, batch=32, shows="W4: bubbles and overlap"
    ),
    "70B on 1024": Case(model="llama-3-70b", machine="h100-sxm-x1024", devices=1024, batch=1024, target_s=5.0),
    "70B on 1024, slow network": Case(
        model="llama-3-70b", machine="h100-sxm-x1024", devices=1024, batch=1024, slower=8, shows="W3, W4"
    ),
    "175B on 1024": Case(model="gpt3-175b", machine="a100-80gb-x1024", devices=1024, batch=1536, shows="W11"),
    "1T on 3072": Case(model="megatron-1t", machine="a100-80gb-x3072", devices=3072, batch=3072, shows="W11"),
    "405B on 1024": Case(model="llama-3-405b", machine="h200-x1024", devices=1024, batch=512),
    "405B on 16384": Case(
        model="llama-3-405b", machine="h100-sxm-x16384", devices=16_384, batch=2048, target_s=10.0,
        shows="W10: growth",
    ),
    "Mixtral 8x7B on 64": Case(
        model="mixtral-8x7b", machine="h100-sxm-x64", devices=64, batch=256, seq=4096, shows="experts: ep searched"
    ),
    "Mixtral 8x22B on 256": Case(
        model="mixtral-8x22b", machine="h100-sxm-x256", devices=256, batch=1024, seq=4096, shows="experts"
    ),
    "DeepSeek-MoE 16B on 64": Case(
        model="deepseek-moe-16b", machine="h100-sxm-x64", devices=64, batch=512, shows="experts: many small ones"
    ),
    "skewed: wide MLP": Case(
        model={"num_layers": 8, "hidden": 512, "num_heads": 8, "ffn": 65_536, "vocab": 32_000, "seq": 512},
        machine="h100-sxm-x64", devices=64, batch=64, shows="W7: skewed matrices, no constants",
    ),
    "skewed: huge vocabulary": Case(
        model={"num_layers": 4, "hidden": 1024, "num_heads": 16, "ffn": 4096, "vocab": 1_048_576, "seq": 1024},
        machine="h100-sxm-x16", devices=16, batch=64, shows="W7; the head decides the stages",
    ),
    "8B on 64, 256 layers": Case(
        model="llama-3-8b", machine="h200-x64", devices=64, batch=64, layers=256, shows="W10: equal layers cost nothing"
    ),
    "GPT-2 XL on 4": Case(model="gpt2-xl", machine="a100-40gb-x8", devices=4, batch=64),
    "Mistral 7B on 16": Case(model="mistral-7b", machine="a100-80gb-x16", devices=16, batch=128),
    "Llama 2 70B on 32": Case(model="llama-2-70b", machine="h200-x32", devices=32, batch=128),
    "18B on 256": Case(model="megatron-18.4b", machine="a100-80gb-x256", devices=256, batch=1024),
    "76B on 512": Case(model="megatron-76.1b", machine="a100-80gb-x512", devices=512, batch=512),
    "530B on 2240": Case(model="megatron-530b", machine="a100-80gb-x2240", devices=2240, batch=2240),
    "DeepSeek-V3 on 2048": Case(model="deepseek-v3", machine="h100-sxm-x2048", devices=2048, batch=15_360),
    "7B on 48, slow network": Case(model="llama-2-7b", machine="a100-80gb-x48", devices=48, batch=192, slower=16),
}  # fmt: skip
"""Name -> question."""


def run(name: str, time_limit_s: float) -> dict[str, Any]:
    """Search and baselines of one case."""
    problem = CASES[name].problem
    began, cpu = time.monotonic(), time.process_time()
    first: list[float] = []
    try:
        found = solve(
            problem, time_limit_s=time_limit_s, on_better=lambda each: first.append(time.process_time() - cpu)
        )  # fmt: skip
    except NothingFits as error:
        return {"nothing_fits": str(error), "search_s": time.monotonic() - began}
    took_s, took_cpu_s = time.monotonic() - began, time.process_time() - cpu
    best = found.best.forecast
    others: dict[str, Any] = {}
    for other_name in OTHERS:
        try:
            other = _earlier(problem, name) if other_name == "e5e99b2" else baseline(problem, other_name).best
        except TwofoldError as error:
            others[other_name] = {"step_s": None, "reason": str(error)}
            continue
        others[other_name] = {
            "step_s": other.forecast.step_s, "speed_up": other.forecast.step_s / best.step_s,
            "configuration": describe(other.degrees),
        }  # fmt: skip
    return {
        "configuration": describe(found.best.degrees), "step_s": best.step_s,
        "peak_GiB": best.peak_bytes / 2**30, "idle": best.bubble_fraction, "exposed_s": best.exposed_comm_s,
        "complete": found.complete, "gap": found.gap, "relaxation_s": found.relaxed_bound_s,
        "gap_to_relaxation": found.gap_to_relaxation,
        "over_relaxation_s": _over(critical_path_s(problem, found.best), found.relaxed_bound_s),
        "physics_s": found.physics_bound_s,
        "gap_to_physics": found.gap_to_physics, "forecasts": found.num_evaluated, "nodes": found.num_nodes,
        "search_s": took_s, "search_cpu_s": took_cpu_s, "best_found_cpu_s": first[-1],
        "memory_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "baselines": others,
    }  # fmt: skip


def _earlier(problem: Problem, name: str) -> Candidate:
    """The choice of the search of commit e5e99b2, with today's forecast.

    Raises:
        TwofoldError: it does not fit the memory limit by today's forecast.
    """
    values = json.loads(EARLIER.read_bytes())[name]
    degrees = problem.degrees(
        {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    )
    found = forecast(problem.config, degrees, problem.machine)
    if found.peak_bytes > problem.limit_bytes:
        raise TwofoldError(f"{describe(degrees)} needs {found.peak_bytes / 1e9:.2f} GB")
    return Candidate(degrees=degrees, forecast=found)


def _over(critical_s: dict[str, float], relaxed_s: float) -> dict[str, float]:
    """The parts of the critical path that the relaxation lacks: it has compute alone, spread over all ranks."""
    compute_s = critical_s.get("forward compute", 0.0) + critical_s.get("backward compute", 0.0)
    others = {kind: seconds for kind, seconds in critical_s.items() if not kind.endswith("ward compute")}
    return {"compute and waiting for stages": compute_s - relaxed_s, **others}


def main() -> None:
    """Run the named cases and weaknesses, or all; one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--time-limit", type=float, default=120.0)
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    weak = [name for name in arguments.cases if name in weaknesses.CASES]
    named = [name for name in arguments.cases if name not in weak]
    if unknown := [name for name in named if name not in CASES]:
        parser.error(f"no case {unknown[0]!r}")
    if arguments.child:
        print(json.dumps(run(named[0], arguments.time_limit)))
        return
    out = Path(arguments.out)
    before = json.loads(out.read_text()) if out.is_file() and arguments.cases else {}
    rows: dict[str, Any] = before.get("cases", {})
    checks: list[dict[str, Any]] = before.get("weaknesses", [])
    with ThreadPoolExecutor(arguments.jobs) as pool:
        wanted = named if arguments.cases else list(CASES)
        for name, row in zip(wanted, pool.map(lambda each: _alone(each, arguments.time_limit), wanted), strict=True):
            rows[name] = row
            print(_line(name, row), flush=True)
            out.write_text(json.dumps(_document(rows, checks), indent=1) + "\n")
    if weak or not arguments.cases:
        fresh = weaknesses.checked(weak)
        kept = [row for row in checks if row["weakness"] not in {each["weakness"] for each in fresh}]
        order = list(weaknesses.CASES)
        checks = sorted([*kept, *fresh], key=lambda row: (order.index(row["weakness"]), row["number"]))
        out.write_text(json.dumps(_document(rows, checks), indent=1) + "\n")
    worse = [name for name, row in rows.items() if any(_loses(each) for each in row.get("baselines", {}).values())]
    failed = [f"{row['weakness']} ({row['number']})" for row in checks if not row["passed"]]
    if worse or failed:
        sys.exit(f"slower than a baseline: {', '.join(worse) or 'none'}; checks failed: {', '.join(failed) or 'none'}")
    print(f"no case is slower than a baseline; {len(checks)} checks of W1 to W12 passed")


def _alone(name: str, time_limit_s: float) -> dict[str, Any]:
    """The row of a case, from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.search", name, "--child", "--time-limit", str(time_limit_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * time_limit_s)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
    case = CASES[name]
    return {
        "machine": case.machine, "devices": case.devices, "batch": case.batch, "seq": case.config.seq,
        "shows": case.shows, "target_s": case.target_s, "date": time.strftime("%Y-%m-%d"), **json.loads(done.stdout),
    }  # fmt: skip


def _loses(baseline: dict[str, Any]) -> bool:
    return bool(baseline["step_s"]) and baseline["speed_up"] < 1.0 - 1e-9


def _document(rows: dict[str, Any], checks: list[dict[str, Any]]) -> dict[str, Any]:
    done = [row for row in rows.values() if "step_s" in row]
    ups = {
        name: [row["baselines"][name]["speed_up"] for row in done if row["baselines"][name]["step_s"]]
        for name in OTHERS
    }  # fmt: skip
    return {
        "date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "numpy": np.__version__,
        "computer": f"{platform.machine()}, {os.cpu_count()} cores, shared with other work while this ran",
        "command": "python -m benchmarks.search", "measured": "forecasts only; nothing was run on GPU or Ascend",
        "summary": {
            "cases": len(rows), "complete": sum(row["complete"] for row in done),
            "speed_up_mean": {name: float(np.exp(np.mean(np.log(each)))) for name, each in ups.items() if each},
            "speed_up_least": {name: min(each) for name, each in ups.items() if each},
            "speed_up_most": {name: max(each) for name, each in ups.items() if each},
            "does_not_fit": {name: len(done) - len(each) for name, each in ups.items()},
            "most_memory_GiB": max((row["memory_GiB"] for row in done), default=None),
            "largest_gaps_to_relaxation": {
                name: {"gap": row["gap_to_relaxation"], "over_relaxation_s": row.get("over_relaxation_s")}
                for name, row in sorted(
                    ((name, row) for name, row in rows.items() if "step_s" in row),
                    key=lambda each: -each[1]["gap_to_relaxation"],
                )[:3]
            },
            "weaknesses": len({row["weakness"] for row in checks}),
            "checks": len(checks), "checks_passed": sum(row["passed"] for row in checks),
        },
        "weaknesses": checks,
        "cases": rows,
    }  # fmt: skip


def _line(name: str, row: dict[str, Any]) -> str:
    if "step_s" not in row:
        return f"{name}: {row['nothing_fits']}"
    ups = " ".join(
        f"{other} {each['speed_up']:.2f}" if each["step_s"] else f"{other} does not fit"
        for other, each in row["baselines"].items()
    )
    return (
        f"{name}: {row['step_s']:.4g} s, gap {row['gap']:.1%}, relaxation {row['gap_to_relaxation']:+.0%}, speed-up "
        f"{ups}, {row['search_cpu_s']:.1f} s of processor, {row['memory_GiB']:.2f} GiB; {row['configuration']}"
    )


if __name__ == "__main__":
    main()
