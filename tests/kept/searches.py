"""The cases of `tests.kept` about searches: what they find, prove and refuse, on made-up machines."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.model.mlp import mlp_graph
from plans.model.transformer import TransformerConfig, transformer
from plans.model.transformer.config import Experts
from plans.optimizer import Optimizer
from plans.plan import plan_to_json
from search import search
from search.devices import BASELINES, Pins, Problem, baseline, describe, solve
from search.devices.baselines import usual_candidates
from search.devices.branch import Branching
from search.devices.descent import descended
from search.devices.nodes import Kind, leaf_values
from search.devices.reasons import explained
from search.devices.result_json import result_json
from search.devices.space import enumerate_degrees, meshes
from search.result import SearchResult
from simulator.stacks import stack_named
from tests.kept.lines import Case, hash_of
from tests.support.small_machine import small_machine

__all__ = ["SEARCHES"]

CONFIG = TransformerConfig(
    name="small", num_layers=4, hidden=64, num_heads=4, num_kv_heads=2, ffn=128, vocab=256, seq=64, dtype="float32"
)
MIXTURE = replace(CONFIG, experts=Experts(num_experts=4, top_k=2, ffn=32))


def rounded(value: Any) -> Any:
    """Numbers to seven digits: sums may be taken in another order."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items() if key != "search_s"}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def result_line(found: SearchResult[Any], values: Any) -> str:
    """The best, its proof and the work of the search, then the hash of all that it reports."""
    (first, *_), words = found.rows, found.explain()
    said = re.sub(r"[\d.,]+ (n|µ|m)?s\b", "", words)
    proof = f"gap {found.gap:.6f}, {found.num_proven} proven, {len(found.plans)} plans"
    work = f"{found.num_evaluated} evaluated, {found.num_nodes} nodes, {found.num_combinations} combinations"
    best = f"{first['step_s'] * 1e6:.6g} us, {first['peak_bytes']} B"
    return f"{best}, {proof}, {work} | {hash_of((rounded(values), said))} | {first['plan']}"


def of_degrees(
    config: TransformerConfig = CONFIG, machine: Machine | None = None, keep: int = 1, explain: bool = False,
    **values: Any,
) -> Case:  # fmt: skip
    given = {"num_devices": 4, "global_batch": 8} | values

    def case() -> str:
        try:
            asked = Problem(config=config, machine=machine or small_machine(16), **given)
            found = solve(asked, keep=keep, explain=explain)
        except TwofoldError as error:
            return str(error)
        return result_line(found, result_json(found))

    return case


def of_baseline(name: str) -> Case:
    def case() -> str:
        found = baseline(Problem(config=CONFIG, machine=small_machine(16), num_devices=6, global_batch=12), name)
        return result_line(found, result_json(found))

    return case


def of_operators(graph: Graph, machine: Machine | None = None, **options: Any) -> Case:
    def case() -> str:
        try:
            found = search(graph, machine or small_machine(8), **{"top_k": 12} | options)
        except TwofoldError as error:
            return str(error)
        plans = [json.loads(plan_to_json(plan)) for plan in found.plans]
        return result_line(found, (plans, found.to_json()))

    return case


def of_reasons(problem: Problem) -> Case:
    """What the operators of a searched plan cost, and its critical path."""

    def case() -> str:
        said = explained(solve(problem)).to_json()
        return f"{len(said['operators'])} operators | {hash_of(rounded(said))}"

    return case


def of_bounds(problem: Problem) -> Case:
    """The bounds on the way to configurations that are drawn at random, with their estimates."""

    def case() -> str:
        draw, branching, found = random.Random(5), Branching(problem=problem), list[Any]()
        nodes = branching._nodes()
        roots = [child for mesh in meshes(problem)[0] for child in nodes.roots(mesh, math.inf)]
        for _ in range(30):
            child = draw.choice(roots)
            while child[1] is not Kind.LEAF:
                found.append(child[0])
                children = list(nodes.open(child[1], child[0], child[2], math.inf))
                if not children:
                    break
                found.append([each[0] for each in children])
                child = draw.choice(children)
            else:
                decided, ranked, _ = child[2]
                found.append([each[0] for each in ranked])
                estimate = branching.estimated(problem.degrees(leaf_values(problem, (decided, ranked, 0))))
                found.append(estimate and [estimate.step_s, estimate.peak_bytes])
        return f"{len(roots)} roots, {len(found)} bounds | {hash_of(rounded(found))}"

    return case


def of_space(problem: Problem) -> Case:
    """All configurations in their order, and what a descent and the usual rules choose of them."""

    def case() -> str:
        branching = Branching(problem=problem)
        everything = [describe(degrees) for degrees in enumerate_degrees(problem)]
        chosen = [describe(degrees) for degrees in descended(problem, branching.estimated, math.inf)]
        usual = [describe(degrees) for degrees in usual_candidates(problem)]
        first = f"{len(everything)} configurations, {len(chosen)} by descent, {len(usual)} usual"
        return f"{first} | {hash_of([everything, chosen, usual])} | {chosen[0]}"

    return case


def problem(config: TransformerConfig = CONFIG, machine: Machine | None = None, **values: Any) -> Problem:
    given = {"num_devices": 4, "global_batch": 8} | values
    return Problem(config=config, machine=machine or small_machine(16), **given)


MLP = mlp_graph([64, 128, 64, 8], 32)
BLOCK = transformer(replace(CONFIG, num_layers=1), batch_size=4)
SLOW = small_machine(16, latency_s=2e-6)
ADAMW = Optimizer(kind="adamw", settings={"lr": 0.1}, parallel_level=1)
NARROW = msgspec.structs.replace(small_machine(16, latency_s=1e-6), memory_bytes=10**6)

BOUNDED = {
    "of 4": problem(),
    "of 8 on two nodes": problem(num_devices=8, global_batch=16),
    "with latency": problem(machine=SLOW, pins=Pins(recompute="none")),
    "in little memory": problem(memory_limit_bytes=2_400_000),
    "of experts": problem(replace(MIXTURE, num_layers=5)),
    "of megatron": problem(stack=stack_named("megatron")),
    "of a pipeline": problem(pins=Pins(pp=4)),
}  # fmt: skip
"""Name -> problem of which bounds are kept."""

SEARCHES: dict[str, Case] = {
    "degrees of 4": of_degrees(explain=True, pins=Pins(micro_batch=1, cp=1, recompute="full")),
    "degrees of 4 with latency": of_degrees(machine=SLOW, keep=3, pins=Pins(recompute="none")),
    "degrees of 8 on two nodes": of_degrees(
        num_devices=8, global_batch=16, pins=Pins(recompute="none", micro_batch=1, zero=1)
    ),
    "degrees in little memory": of_degrees(memory_limit_bytes=2_400_000, pins=Pins(cp=1, micro_batch=1)),
    "degrees in no memory": of_degrees(memory_limit_bytes=900_000),
    "degrees of a pipeline": of_degrees(pins=Pins(pp=4, tp=1, cp=1), keep=4),
    "degrees with split backwards": of_degrees(pins=Pins(pp=2, schedule="zb_h1"), explain=True),
    "degrees of V shapes": of_degrees(pins=Pins(pp=2, schedule="zb_v", recompute="none"), machine=SLOW),
    "degrees of chunks": of_degrees(pins=Pins(pp=2, schedule="interleaved_1f1b", virtual=2), machine=SLOW),
    "degrees at level 3": of_degrees(pins=Pins(zero=3, recompute="full"), keep=2),
    "degrees of slices": of_degrees(pins=Pins(interleave=2, pp=1), machine=SLOW),
    "degrees of pairs": of_degrees(pins=Pins(overlap_pairs=True), machine=SLOW),
    "degrees of experts": of_degrees(MIXTURE, pins=Pins(recompute="none", micro_batch=1), explain=True),
    "degrees of megatron": of_degrees(stack=stack_named("megatron"), pins=Pins(micro_batch=1)),
    "degrees of torch": of_degrees(stack=stack_named("torch"), pins=Pins(cp=1, recompute="none")),
    "degrees that cannot be": of_degrees(pins=Pins(tp=3)),
    "degrees of 3": of_degrees(num_devices=3, global_batch=3),
    **{f"baseline {name}": of_baseline(name) for name in BASELINES},
    **{f"bounds {name}": of_bounds(asked) for name, asked in BOUNDED.items()},
    "space of 4": of_space(problem(pins=Pins(recompute="none"))),
    "space of 12 on slow links": of_space(
        problem(
            replace(CONFIG, num_layers=3), SLOW, num_devices=12, global_batch=12,
            pins=Pins(micro_batch=1, zero=1, recompute="none"),
        )
    ),
    "space of experts": of_space(problem(MIXTURE, pins=Pins(schedule="1f1b", zero=1), memory_limit_bytes=4_000_000)),
    "reasons of sequence parallel": of_reasons(
        problem(pins=Pins(tp=2, pp=2, sequence_parallel=True, schedule="1f1b", micro_batch=1))
    ),
    "reasons of experts": of_reasons(problem(MIXTURE, pins=Pins(pp=1, ep=2, recompute="full", micro_batch=1))),
    "reasons of slices": of_reasons(problem(machine=SLOW, pins=Pins(tp=2, pp=1, interleave=2, recompute="none"))),
    "operators of an MLP": of_operators(MLP, num_devices=4, num_micro_batches=2),
    "operators with latency": of_operators(MLP, SLOW, num_devices=4),
    "operators in two stages": of_operators(MLP, num_devices=4, num_stages=2, num_micro_batches=4),
    "operators, stages searched": of_operators(MLP, SLOW, num_devices=3, num_stages=None, num_micro_batches=None),
    "operators, any widths": of_operators(MLP, num_devices=3, num_stages=2, widths="any"),
    "operators, any level": of_operators(MLP, num_devices=4, optimizer=ADAMW, any_level=True),
    "operators, any schedule": of_operators(
        MLP, SLOW, num_devices=2, num_stages=2, num_micro_batches=4, schedule=None, interleave=None
    ),
    "operators in little memory": of_operators(
        MLP, NARROW, num_devices=4, recompute=None, memory_limit_bytes=80_000
    ),
    "operators in no memory": of_operators(MLP, num_devices=2, memory_limit_bytes=1000),
    "operators of a block": of_operators(BLOCK, num_devices=2, method="operators", top_k=4),
}  # fmt: skip
"""Name of a case -> what makes its line."""
