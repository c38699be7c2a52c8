"""Compare with Calculon (Isaev et al. 2023, SC '23): how fast both evaluate plans, and whose plans are better.

    git clone https://github.com/calculon-ai/calculon
    python -m benchmarks.search.calculon calculon [speed] [18B] [530B] [--time-limit SECONDS] [--simulate N] [--save]

Calculon is an analytical model of transformers on clusters with an exhaustive search. All parts (by default) take its
`systems/a100_80g.json`.

speed: processor time of one evaluation in this process, of all plans in a grid of estimates, of some plans otherwise.
Calculon is timed as its search runs it, without its logging, and without formatting the text of its log.

18B, 530B: Calculon's search over the plans that twofold can run: no offloading, no tiles of tensor-parallel products.
The ten best by Calculon that fit by twofold's memory are forecast and simulated, and all of its plans are estimated to
find those that twofold's search should have found. `--save` writes benchmarks/results/calculon.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from costmodels import Machine
from plans.degrees import Degrees, check, describe
from plans.errors import TwofoldError
from plans.lower import lower
from plans.model.transformer import sizes_of, transformer_config
from search.candidate import Candidate
from search.devices import Problem, solve
from search.devices.confirm import plan_of
from search.devices.explain import composition
from simulator import simulate
from simulator.estimate import estimate_grid
from simulator.forecast import forecast, forecast_grid

RESULTS = FOLDER / "results" / "calculon.json"

CASES = {"18B": ("megatron-18.4b", 256, 1024), "530B": ("megatron-530b", 2240, 1920)}
"""Name -> model, A100s and sequences of a step: Narayanan et al. 2021, table 1; Smith et al. 2022, section 3.2."""

_RECOMPUTE = {"full": "full", "attn_only": "selective", "none": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One execution as Calculon prices it."""

    execution: Mapping[str, Any]
    step_s: float
    memory_bytes: float
    parts_s: Mapping[str, float]


class Silent:
    """A logger that discards everything."""

    def debug(self, *_: object) -> None:
        """Discard a line."""


class Calculon:
    """Calculon of a checkout, for one model on A100s."""

    def __init__(self, checkout: Path, case: str) -> None:
        model, self.num_devices, self.batch = CASES[case]
        config = transformer_config(model)
        self.llm = importlib.import_module("calculon.llm.llm")
        cfg = json.loads((checkout / "systems" / "a100_80g.json").read_text())
        self.system = importlib.import_module("calculon.system").System(cfg)
        self.app = self.llm.Llm.Application({
            "hidden": config.hidden, "feedforward": config.ffn, "seq_size": config.seq, "attn_heads": config.num_heads,
            "attn_size": config.hidden // config.num_heads, "num_blocks": config.num_layers,
        })  # fmt: skip

    def evaluate(self, execution: Mapping[str, Any], log: Any) -> Any:
        """Evaluate one execution.

        Raises:
            Llm.Error: it does not fit the memory or the networks.
        """
        model = self.llm.Llm(self.app, log)
        model.compile(self.system, self.llm.Llm.Execution(execution))
        model.run(self.system)
        return model

    def price(self, execution: Mapping[str, Any]) -> Priced | None:
        """The price of one execution; None where Calculon refuses it."""
        try:
            model = self.evaluate(execution, Silent())
        except self.llm.Llm.Error:
            return None
        parts = {
            "compute": model.get_fw_time() + model.get_bw_time(), "recompute": model.get_recompute_time(),
            "optimizer": model.get_optim_step_time(), "bubble": model.get_bubble_time(),
            "tensor-parallel": model.get_tp_comm_exposed_time() + model.get_recomm_exposed_time(),
            "pipeline": model.get_pp_comm_exposed_time(), "data-parallel": model.get_dp_comm_exposed_time(),
        }  # fmt: skip
        return Priced(
            execution=execution, step_s=model.get_total_time(), memory_bytes=model.get_mem_tier1_cap_req(),
            parts_s=parts,
        )  # fmt: skip

    def executions(self) -> Iterator[dict[str, Any]]:
        """Calculon's space, without what twofold cannot run."""
        llm, app = self.llm.Llm, self.app
        for tp in llm.get_all_tensor_parallelisms(self.num_devices, app.hidden, app.attn_heads):
            for pp in llm.get_all_pipeline_parallelisms(self.num_devices, tp, app.num_blocks):
                dp = llm.get_data_parallelism(self.num_devices, tp, pp)
                if self.batch % dp:
                    continue
                for virtual, micro_batch, recompute, sharded, split, nets in itertools.product(
                    llm.get_valid_pipeline_interleavings(app.num_blocks, pp),
                    llm.get_valid_microbatch_sizes(app.seq_size, tp, dp, self.batch, pp), _RECOMPUTE,
                    (True, False) if dp > 1 else (False,), (True, False) if tp > 1 else (False,), _nets(tp, pp, dp),
                ):  # fmt: skip
                    yield {
                        "num_procs": self.num_devices, "tensor_par": tp, "pipeline_par": pp, "data_par": dp,
                        "tensor_par_net": nets[0], "pipeline_par_net": nets[1], "data_par_net": nets[2],
                        "batch_size": self.batch, "microbatch_size": micro_batch, "datatype": "float16",
                        "fused_activation": True, "attention_type": "multihead", "activation_recompute": recompute,
                        "pipeline_interleaving": virtual, "optimizer_sharding": sharded,
                        "tensor_par_comm_type": "rs_ag" if split else "ar", "tensor_par_overlap": "none",
                        "seq_par_ag_redo": split and recompute != "full", "data_par_overlap": dp > 1,
                        "weight_offload": False, "activations_offload": False, "optimizer_offload": False,
                        "training": True,
                    }  # fmt: skip


def _nets(tp: int, pp: int, dp: int) -> list[tuple[int, int, int]]:
    """Networks of the axes, 0 within a node of 8: Calculon fills a node with complete axes."""
    choices = itertools.product(*((0, 1) if 1 < size <= 8 else (int(size > 8),) for size in (tp, pp, dp)))
    found = []
    for nets in choices:
        inside = 1
        for size, net in zip((tp, pp, dp), nets, strict=True):
            inside *= 1 if net else size
        if 8 % inside == 0 and (tp == 1 or tp > 8 or nets[0] == 0):
            found.append(nets)
    return found


def degrees_of(problem: Problem, execution: Mapping[str, Any]) -> Degrees | None:
    """The same plan in twofold's degrees; None where twofold refuses it."""
    virtual = execution["pipeline_interleaving"]
    axes = {"tensor": ("tp", "cp"), "data": ("dp",), "pipeline": ("pp",)}
    inner_first = sorted(axes, key=lambda each: execution[f"{each}_par_net"])
    try:
        degrees = problem.degrees({
            "tp": execution["tensor_par"], "pp": execution["pipeline_par"], "dp": execution["data_par"],
            "micro_batch": execution["microbatch_size"], "virtual": virtual,
            "schedule": "interleaved_1f1b" if virtual > 1 else "1f1b",
            "recompute": _RECOMPUTE[execution["activation_recompute"]],
            "zero": 1 if execution["optimizer_sharding"] else 0,
            "sequence_parallel": execution["tensor_par_comm_type"] == "rs_ag",
            "order": tuple(itertools.chain.from_iterable(axes[each] for each in inner_first)),
        })  # fmt: skip
        check(degrees, sizes_of(problem.config), num_devices=problem.num_devices)
        assert degrees.pipeline
    except TwofoldError:
        return None
    return degrees


def problem_of(case: str) -> Problem:
    """The question to twofold's search. The head is not tied: its plans are simulated, and Calculon has no head."""
    model, num_devices, batch = CASES[case]
    machine = Machine.load(f"a100-80gb-x{num_devices}")
    config = replace(transformer_config(model), tied=False)
    return Problem(config=config, machine=machine, num_devices=num_devices, global_batch=batch)


def speed(checkout: Path, *, case: str = "18B", num_sampled: int = 60) -> dict[str, Any]:
    """Milliseconds of processor time for each evaluation of plans that were not evaluated before."""
    calculon, problem = Calculon(checkout, case), problem_of(case)
    config, machine = problem.config, problem.machine
    every = {degrees: each for each in calculon.executions() if (degrees := degrees_of(problem, each)) is not None}
    sampled = random.Random(1).sample(list(every), num_sampled)

    def theirs(log: Callable[[], Any], text: Callable[..., str] | None = None) -> None:
        kept = calculon.llm.human_format
        calculon.llm.human_format = text or kept
        for degrees in sampled:
            with contextlib.suppress(calculon.llm.Llm.Error):
                calculon.evaluate(every[degrees], log())
        calculon.llm.human_format = kept

    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "Calculon as its search runs it": (num_sampled, lambda: theirs(lambda: logging.Logger("sub"))),
        "Calculon without its logging": (num_sampled, lambda: theirs(Silent)),
        "Calculon without the text of its log": (num_sampled, lambda: theirs(Silent, lambda *_, **__: "")),
        "grid of estimates": (len(every), lambda: estimate_grid(config, every, machine)),
        "grid of forecasts": (num_sampled, lambda: forecast_grid(config, sampled, machine)),
        "the same forecasts again": (num_sampled, lambda: forecast_grid(config, sampled, machine)),
    }
    each_ms = {}
    for name, (count, call) in calls.items():
        begin = time.process_time()
        call()
        each_ms[name] = 1e3 * (time.process_time() - begin) / count
    return {
        "case": case, "plans_of_the_grid": len(every), "sampled": num_sampled, "each_ms": each_ms,
        "times_as_fast_as_calculon_without_its_logging": {
            name: each_ms["Calculon without its logging"] / took_ms for name, took_ms in each_ms.items()
        },
    }  # fmt: skip


def plans(checkout: Path, *, case: str, time_limit_s: float, simulated: int, count: int = 10) -> dict[str, Any]:
    """Calculon's best plans and twofold's, each priced by both, and some by the event engine."""
    calculon, problem = Calculon(checkout, case), problem_of(case)
    priced = [price for each in calculon.executions() if (price := calculon.price(each)) is not None]
    priced.sort(key=lambda each: each.step_s)
    own: dict[Degrees, Priced] = {}
    for each in priced:
        degrees = degrees_of(problem, each.execution)
        if degrees is not None:
            own.setdefault(degrees, each)
    best = fitting(problem, own, count)
    estimated = dict(zip(own, estimate_grid(problem.config, own, problem.machine), strict=True))
    near = [degrees for degrees, seen in estimated.items() if seen.peak_bytes <= 1.05 * problem.limit_bytes]
    shared = min(
        fitting(problem, sorted(near, key=lambda each: estimated[each].step_s), count), key=lambda each: each.key
    )
    found = solve(problem, time_limit_s=time_limit_s)
    listed = list(own)

    def shown(one: Candidate, is_simulated: bool) -> dict[str, Any]:
        rank = listed.index(one.degrees) + 1 if one.degrees in own else None
        return row(problem, one, own.get(one.degrees), rank, is_simulated)

    return {
        "executions_that_fit_by_calculon": len(priced), "plans": len(own),
        "best_by_calculon": [shown(each, number < simulated) for number, each in enumerate(best)],
        "fastest_of_its_space_by_twofold": shown(shared, simulated > 0),
        "found_by_twofold": shown(found.plans[0], simulated > 0) | {"gap": found.gap},
    }  # fmt: skip


def fitting(problem: Problem, plans: Iterable[Degrees], count: int) -> list[Candidate]:
    """The first plans that fit by twofold's forecast."""
    forecasts = (Candidate(degrees=each, forecast=forecast(problem.config, each, problem.machine)) for each in plans)
    return list(itertools.islice((each for each in forecasts if _fits(problem, each)), count))


def _fits(problem: Problem, one: Candidate) -> bool:
    return one.forecast.peak_bytes <= problem.limit_bytes


def row(
    problem: Problem, found: Candidate, price: Priced | None, rank: int | None, is_simulated: bool
) -> dict[str, Any]:
    """One plan by all three, in seconds and bytes."""
    engine_s = None
    if is_simulated:
        program = lower(plan_of(problem, found))
        engine_s = simulate(program, problem.machine, with_memory=False, fold_ranks=True).step_interval_s
    return {
        "plan": describe(found.degrees), "engine_s": engine_s, "forecast_s": found.forecast.step_s,
        "peak_bytes": found.forecast.peak_bytes, "parts_s": composition(found), "rank_by_calculon": rank,
        "calculon_s": price and price.step_s, "calculon_bytes": price and price.memory_bytes,
        "calculon_parts_s": price and price.parts_s,
    }  # fmt: skip


def main() -> None:
    """Run the parts that are requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="a checkout of Calculon")
    parser.add_argument("parts", nargs="*", metavar="PART", help="speed, or plans of 18B or 530B; by default all")
    parser.add_argument("--time-limit", type=float, default=120.0, metavar="SECONDS", help="of each search of twofold")
    parser.add_argument(
        "--simulate",
        type=int,
        default=10,
        metavar="N",
        help="of the ten best plans by Calculon (default: all; 0: none)",
    )
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    given = parser.parse_args()
    sys.path.insert(0, str(given.checkout))
    parts: dict[str, Callable[[], dict[str, Any]]] = {"speed": partial(speed, given.checkout)}
    for case in CASES:
        parts[case] = partial(plans, given.checkout, case=case, time_limit_s=given.time_limit, simulated=given.simulate)
    if unknown := [part for part in given.parts if part not in parts]:
        parser.error(f"no part {unknown[0]!r}; parts are {', '.join(parts)}")
    options = f"--time-limit {given.time_limit:g} --simulate {given.simulate}"
    for name in given.parts or parts:
        command = f"python -m benchmarks.search.calculon CHECKOUT {name} {options}"
        found = {"date": time.strftime("%Y-%m-%d"), "command": command, **parts[name]()}
        print(f"{name}: {json.dumps(found, indent=1)}", flush=True)
        if given.save:
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            RESULTS.write_text(json.dumps(kept | {name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
