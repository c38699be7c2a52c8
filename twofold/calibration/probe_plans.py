"""Probe programs: small networks that are simulated and run during a calibration.

They are perceptrons with widths, depths and degrees that no example uses, so they test only what all programs have in
common: dispatch, collectives, and an operating system with many processes on few cores.
"""

from __future__ import annotations

from typing import Any

import msgspec

from costmodels import Machine
from plans.model.mlp import mlp_graph
from plans.model.transformer import Experts, TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.plan import Plan
from search import uniform_plan

__all__ = ["dispatch_plans", "probe_plans", "rule_plans"]

# sizes, batch, dp, tp, pp per eight ranks, micro-batches, optimizer-parallel level, last stage replicated
_PROBES = (
    ((640, 384, 384, 16), 48, 4, 1, 2, 4, 1, False),
    ((512, 640, 256, 8), 32, 2, 2, 2, 4, 1, False),
    ((768, 448, 320, 4), 64, 8, 1, 1, 2, 0, False),
    ((384, 512, 512, 8), 32, 1, 4, 2, 4, 0, False),
    ((896, 384, 640, 2), 24, 1, 4, 2, 3, 1, True),
    ((576, 256, 384, 384, 2), 40, 2, 2, 2, 5, 1, True),
)


def probe_plans(num_ranks: int, machine: Machine) -> list[Plan]:
    """The probes for `num_ranks` ranks, with smaller degrees below eight ranks.

    Some replicate their last stage, so that many ranks send to many ranks. `machine` only selects among equally valid
    layouts.
    """
    plans = []
    for sizes, batch, dp, tp, pp, count, level, replicated in _PROBES:
        while dp * tp * pp > num_ranks:
            dp, tp, pp = (dp // 2, tp, pp) if dp > 1 else (dp, tp // 2, pp) if tp > 1 else (dp, tp, pp // 2)
        if dp * tp * pp == num_ranks:
            name = f"probe-dp{dp}-tp{tp}-pp{pp}" + ("-replicated-end" if replicated else "")
            graph = mlp_graph(sizes, batch, name=name)
            plan = uniform_plan(graph, machine, dp=dp, tp=tp, pp=pp, micro_batch=batch // (count * dp), zero=level)
            if replicated:
                kept = set(plan.strategies) - set(plan.stages[-1].operators)
                strategies = {name: plan.strategies[name] for name in plan.strategies if name in kept}
                plan = msgspec.structs.replace(plan, strategies=strategies)
            plans.append(plan)
    return plans


_TINY = TransformerConfig(name="tiny", num_layers=2, hidden=64, num_heads=4, ffn=128, vocab=128, seq=16)


_TINY_GPT = TransformerConfig(
    name="tiny-gpt", num_layers=2, hidden=64, num_heads=4, ffn=128, vocab=128, seq=16, gated=False, norm="layer",
    position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
)  # fmt: skip


def dispatch_plans(num_ranks: int) -> dict[str, Plan]:
    """Host-bound plans for `num_ranks` ranks: transformers so small that only the host's issue time matters.

    Plans of the first degrees exist with and without fusion.

    >>> sorted(dispatch_plans(2))
    ['tiny-dp2', 'tiny-dp2-apart', 'tiny-dp2-zero3', 'tiny-gpt-dp2', 'tiny-gpt-dp2-apart', 'tiny-pp2', 'tiny-tp2']
    """
    machine, adamw = Machine.load("h200-x8"), Optimizer(kind="adamw", settings={"lr": 1e-4})
    ways: list[dict[str, Any]] = [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2}]
    if num_ranks == 1:
        ways = [{}]
    elif num_ranks % 4 == 0:
        ways = [{"tp": 4}, {"dp": 2, "tp": 2, "zero": 1}, {"pp": 2, "tp": 2}]
    plans: dict[str, Plan] = {}
    for degrees in ways:
        used = degrees.get("dp", 1) * degrees.get("tp", 1) * degrees.get("pp", 1)
        if num_ranks % used:
            continue
        stated = degrees | ({"dp": degrees.get("dp", 1) * (num_ranks // used)} if num_ranks > used else {})
        micro_batch = 4 // max(1, degrees.get("pp", 1))
        is_first = not plans
        for config in (_TINY, _TINY_GPT) if is_first else (_TINY,):
            graph = transformer(config, batch_size=8 * max(1, stated.get("dp", 1)))
            name = "-".join([config.name, *(f"{axis}{count}" for axis, count in stated.items())])
            plans[name] = uniform_plan(graph, machine, micro_batch=micro_batch, optimizer=adamw, **stated)
            if is_first:
                plans[f"{name}-apart"] = msgspec.structs.replace(plans[name], fused=False)
    return plans


_RULES = (  # hidden, heads, kv heads, inner size, sequence; gated with rms norms and rotary positions, or as GPT
    (2048, 16, 4, 5632, 1024, True),
    (4096, 32, 8, 14336, 2048, True),
    (1024, 16, None, 4096, 1024, False),
    (3072, 24, None, 12288, 2048, False),
)

_EXPERT_RULES = ((2048, 8, 2, 5632), (1536, 16, 4, 2816))  # hidden, experts, of a token, inner size


def rule_plans() -> dict[str, Plan]:
    """Plans of one block of typical sizes, whose instructions are measured one by one.

    One plan per model has fused instructions, which take a second or two each to compile.

    >>> sorted(rule_plans())[:2]
    ['rules-1024-dp2-zero1', 'rules-1024-recompute']
    """
    machine, adamw = Machine.load("h200-x8"), Optimizer(kind="adamw", settings={"lr": 1e-4})
    ways: dict[str, dict[str, Any]] = {
        "dp2-zero1": {"dp": 2, "micro_batch": 1, "zero": 1},
        "recompute": {"micro_batch": 2, "recompute": "selective"},
        "tp2": {"tp": 2, "micro_batch": 2, "sequence_parallel": True},
    }
    plans = {}
    for hidden, heads, kv_heads, ffn, seq, gated in _RULES:
        config = TransformerConfig(
            name="rules", num_layers=1, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, ffn=ffn, vocab=32000,
            seq=seq, dtype="bfloat16", gated=gated, norm="rms" if gated else "layer",
            position="rope" if gated else "learned", qkv_bias=not gated, out_bias=not gated, mlp_bias=not gated,
        )  # fmt: skip
        for name, degrees in ways.items():
            plans[f"rules-{hidden}-{name}"] = uniform_plan(
                transformer(config, batch_size=4), machine, optimizer=adamw, fused=name == "recompute", **degrees
            )
    for hidden, num_experts, top_k, ffn in _EXPERT_RULES:
        config = TransformerConfig(
            name="rules-experts", num_layers=1, hidden=hidden, num_heads=16, num_kv_heads=4, ffn=ffn, vocab=32000,
            seq=1024, dtype="bfloat16", experts=Experts(num_experts=num_experts, top_k=top_k, ffn=ffn),
        )  # fmt: skip
        plan = uniform_plan(transformer(config, batch_size=4), machine, optimizer=adamw, micro_batch=2)
        plans[f"rules-{num_experts}-experts"] = plan
    return plans
