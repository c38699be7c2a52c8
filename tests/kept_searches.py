"""The cases of `tests/kept.py` about searches: what they find, prove and refuse, on made-up machines."""

from __future__ import annotations

import json
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
from search.devices import BASELINES, Pins, Problem, baseline, solve
from search.devices.result_json import result_json
from search.result import SearchResult
from simulator.stacks import stack_named
from tests.kept import Case, hash_of
from tests.small_machine import small_machine

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
        found = baseline(Problem(config=CONFIG, machine=small_machine(16), num_devices=8, global_batch=16), name)
        return result_line(found, result_json(found))

    return case


def of_operators(graph: Graph, machine: Machine | None = None, **options: Any) -> Case:
    def case() -> str:
        try:
            found = search(graph, machine or small_machine(8), **options)
        except TwofoldError as error:
            return str(error)
        plans = [json.loads(plan_to_json(plan)) for plan in found.plans]
        return result_line(found, (plans, found.to_json()))

    return case


MLP = mlp_graph([64, 128, 64, 8], 32)
BLOCK = transformer(replace(CONFIG, num_layers=1), batch_size=4)
SLOW = small_machine(16, latency_s=2e-6)
ADAMW = Optimizer(kind="adamw", settings={"lr": 0.1}, parallel_level=1)
NARROW = msgspec.structs.replace(small_machine(16, latency_s=1e-6), memory_bytes=10**6)

SEARCHES: dict[str, Case] = {
    "degrees of 4": of_degrees(explain=True, pins=Pins(micro_batch=1, cp=1)),
    "degrees of 4 with latency": of_degrees(machine=SLOW, keep=3, pins=Pins(recompute="none")),
    "degrees of 8 on two nodes": of_degrees(
        num_devices=8, global_batch=16, pins=Pins(recompute="none", micro_batch=1)
    ),
    "degrees in little memory": of_degrees(memory_limit_bytes=2_400_000, pins=Pins(cp=1)),
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
    "operators of an MLP": of_operators(MLP, num_devices=4, num_micro_batches=2),
    "operators with latency": of_operators(MLP, SLOW, num_devices=4),
    "operators in two stages": of_operators(MLP, num_devices=4, num_stages=2, num_micro_batches=4),
    "operators, stages searched": of_operators(MLP, SLOW, num_devices=4, num_stages=None, num_micro_batches=None),
    "operators, any widths": of_operators(MLP, num_devices=3, num_stages=2, widths="any"),
    "operators, any level": of_operators(MLP, num_devices=4, optimizer=ADAMW, any_level=True),
    "operators, any schedule": of_operators(
        MLP, SLOW, num_devices=2, num_stages=2, num_micro_batches=4, schedule=None, interleave=None
    ),
    "operators in little memory": of_operators(
        MLP, NARROW, num_devices=4, recompute=None, memory_limit_bytes=80_000
    ),
    "operators in no memory": of_operators(MLP, num_devices=4, memory_limit_bytes=1000),
    "operators of a block": of_operators(BLOCK, num_devices=2, method="operators", top_k=2),
}  # fmt: skip
"""Name of a case -> what makes its line."""
