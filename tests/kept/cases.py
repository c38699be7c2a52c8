"""The cases of `tests.kept`: small, and together every branch of what builds, schedules and lowers a model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Any

import msgspec
import numpy as np

from plans.degrees import Degrees, describe
from plans.degrees.plan import plan_of
from plans.errors import TwofoldError
from plans.lower import lower
from plans.lower.symbolic import model_sizes, model_template
from plans.lower.symbolic.transformer import _structure
from plans.model.graph import Graph
from plans.model.transformer import TransformerConfig, model_names, named_config, transformer
from plans.model.transformer.config import Experts, Latent, Rope, Scales
from plans.model.transformer.families import FAMILIES, NESTED
from plans.model.transformer.huggingface import reading_of
from plans.operators import OperatorSpec
from plans.optimizer import Optimizer, ParameterGroup
from plans.plan import Plan
from plans.program import Kind, Program
from plans.redistribution import max_received_bytes, redistribute
from plans.schedules import make_schedule, schedule_names
from plans.step_check import LossScale, Spike, StepCheck
from plans.streams import stream_order
from search.operators.pricing import StepSeconds
from tests.kept.lines import Case, hash_of
from tests.plans.model.test_families import COUNTED, FOLDER
from tests.plans.model.test_operators import CASES as OPERATORS
from tests.plans.model.test_operators import spec_of
from tests.plans.redistribution.cases import random_case
from tests.support.small_machine import small_machine

__all__ = ["CASES"]


def config(**values: Any) -> TransformerConfig:
    given = {"num_heads": 4, "num_kv_heads": 2, "num_layers": 2, "hidden": 16, "ffn": 24, "vocab": 48, "seq": 8}
    return TransformerConfig(**given | {"dtype": "float32"} | values)


CONFIGS = {
    "llama": config(num_layers=4),
    "half": config(num_layers=4, dtype="bfloat16", rope=Rope(fraction=0.5, interleaved=True)),
    "float16": config(dtype="float16"),
    "one key": config(num_kv_heads=1, ignore_index=-1),
    "gpt": config(
        num_layers=4, gated=False, norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,
        position="learned", dropout=0.1, attention_dropout=0.2, first_position=2,
    ),
    "bert": config(
        gated=False, norm="layer", norm_place="sum", head_transform=True, head_bias=True, token_types=2,
        position="learned", causal=False, embedding_norm=True, ignore_index=-100,
    ),
    "neox": config(parallel_residual=True, norm="layer_no_bias", gated=False, position="alibi"),
    "gptj": config(parallel_residual=True, shared_norm=True, norm="layer_no_weights"),
    "gemma": config(
        norm_place="around", norm_offset=1.0, tied=True, qk_norm="head", activation="gelu",
        scales=Scales(embedding=4.0, attention=0.3, residual=0.5, logits=0.25, logits_cap=30.0),
    ),
    "olmo": config(norm_place="after", qk_norm="row", position="none", token_types=3, segment=1),
    "mixture": config(
        num_layers=3,
        experts=Experts(
            num_experts=4, top_k=2, ffn=8, num_shared=1, num_dense_layers=1, shared_gate=True, weights="all"
        ),
    ),
    "latent": config(
        num_kv_heads=None, latent=Latent(kv_rank=6, q_rank=10, nope_dim=4, rope_dim=2, value_dim=6)
    ),
}  # fmt: skip


@cache
def graph_of(name: str, batch: int) -> Graph:
    return transformer(CONFIGS[name], batch_size=batch)


def degrees_of(*, batch: int = 8, optimizer: Mapping[str, Any] | None = None, **degrees: Any) -> Degrees:
    given = {"kind": "adamw", "settings": {"lr": 0.1}, "threshold_bytes": 100} | dict(optimizer or {})
    return Degrees(global_batch=batch, optimizer=Optimizer(**given), **degrees)


def plan(name: str, **given: Any) -> Plan:
    degrees = degrees_of(**given)
    return plan_of(degrees, graph_of(name, degrees.global_batch))


def program_line(program: Program) -> str:
    """Totals over all ranks, then the hash."""
    flops, messages, states, count = 0, Counter[str](), 0, 0
    for group in program.groups:
        ranks = len(group.ranks)
        kept = [group.values[name] for home in group.parameters for name in (home.kept, *home.states)]
        states += ranks * sum(value.size_bytes for value in kept)
        for _, line in group.walk():
            count += ranks
            flops += ranks * line.flops
            if line.kind in (Kind.COLLECTIVE, Kind.SEND):
                messages[line.call] += ranks * line.message_bytes
    sent = ", ".join(f"{call} {size}" for call, size in sorted(messages.items()))
    orders = [stream_order(group) for group in program.groups]
    bodies = {id(block.body): block.body for group in program.groups for block in group.blocks}
    blocks = [[block.label, block.micro_batch, block.body.name] for group in program.groups for block in group.blocks]
    groups = [replace(group, blocks=()) for group in program.groups]
    whole = hash_of((groups, blocks, bodies.values(), orders))
    return f"{count} instructions, {flops} FLOP, {states} B kept, {sent} B | {whole}"


CHECKED = StepCheck(spike=Spike(factor=4.0, window=5, then="skip"))
SCALED = StepCheck(loss_scale=LossScale(growth_every=7))
HALVES: Mapping[str, Any] = {"gradient_dtype": "float32", "master_dtype": "float32", "reduce_dtype": "bfloat16"}
GROUPS = (ParameterGroup(parameters=("*norm*",), weight_decay=0.0, lr_scale=0.5),)

PLANS: dict[str, dict[str, Any]] = {
    "one rank": {"name": "llama", "micro_batch": 2},
    "data parallel": {"name": "llama", "dp": 2, "micro_batch": 2},
    "tensor parallel": {"name": "llama", "tp": 2},
    "tensor parallel over keys": {"name": "llama", "tp": 4, "dp": 2},
    "sequence parallel": {"name": "llama", "tp": 2, "sequence_parallel": True, "micro_batch": 2},
    "context parallel": {"name": "llama", "cp": 4},
    "context and tensor parallel": {"name": "llama", "cp": 2, "tp": 2, "sequence_parallel": True, "dp": 2},
    "one key, tensor parallel": {"name": "one key", "tp": 2, "cp": 2},
    "level 1": {"name": "llama", "dp": 4, "tp": 2, "optimizer": {"parallel_level": 1, "bucket_bytes": 2000}},
    "level 1, one bucket each": {"name": "llama", "dp": 4, "optimizer": {"parallel_level": 1, "bucket_bytes": 0}},
    "level 2": {"name": "llama", "dp": 2, "tp": 2, "optimizer": {"parallel_level": 2, "clip_norm": 1.0}},
    "level 2, once a step": {
        "name": "half", "dp": 2, "optimizer": {"parallel_level": 2, "reduce_every": "step", **HALVES}
    },
    "level 3": {"name": "half", "dp": 2, "cp": 2, "optimizer": {"parallel_level": 3, "prefetch": 2, **HALVES}},
    "level 3 in a pipeline": {
        "name": "llama", "dp": 2, "pp": 2, "schedule": "interleaved_1f1b", "virtual": 2, "recompute": "full",
        "optimizer": {"parallel_level": 3, "bucket_bytes": 3000, "clip_norm": 0.5},
    },
    "groups": {"name": "half", "dp": 2, "optimizer": {"groups": GROUPS, "parallel_level": 1, **HALVES}},
    "master weights": {"name": "half", "tp": 2, "optimizer": {**HALVES, "kind": "momentum", "clip_norm": 2.0}},
    "momentum in half": {"name": "half", "optimizer": {"kind": "momentum", "state_dtype": "float32"}},
    "sgd": {"name": "half", "dp": 2, "optimizer": {"kind": "sgd", "reduce_dtype": "float32"}},
    "memory-bound recompute": {"name": "llama", "tp": 2, "sequence_parallel": True, "recompute": "memory_bound"},
    "selective recompute": {"name": "llama", "tp": 2, "recompute": "selective"},
    "selective recompute by operator": {"name": "llama", "cp": 2, "recompute": "selective_op"},
    "some blocks recompute": {"name": "llama", "pp": 2, "recompute": "full", "recompute_layers": 1},
    "receives when needed": {"name": "llama", "pp": 2, "dp": 2, "receives": "needed"},
    "uneven layers": {"name": "llama", "pp": 2, "layers": (3, 1), "order": ("pp", "tp", "cp", "dp"), "dp": 2},
    "two slices": {"name": "llama", "tp": 2, "interleave": 2, "micro_batch": 4, "sequence_parallel": True},
    "three slices": {"name": "mixture", "dp": 2, "ep": 2, "interleave": 2, "micro_batch": 2, "recompute": "selective"},
    "pairs": {
        "name": "llama", "dp": 2, "pp": 2, "schedule": "dualpipe_v", "virtual": 2, "overlap_pairs": True,
        "fused": False,
    },
    "pairs of experts": {
        "name": "mixture", "dp": 2, "ep": 2, "pp": 2, "schedule": "dualpipe_v", "virtual": 2, "overlap_pairs": True,
        "layers": (0, 1, 1, 1),
    },
    "not fused": {"name": "gpt", "tp": 2, "dp": 2, "fused": False},
    "gpt": {"name": "gpt", "tp": 2, "dp": 2, "recompute": "selective", "optimizer": {"parallel_level": 1}},
    "gpt in a pipeline": {"name": "gpt", "pp": 2, "schedule": "zb_v", "virtual": 2, "dp": 2},
    "bert": {"name": "bert", "tp": 2, "sequence_parallel": True, "dp": 2},
    "neox": {"name": "neox", "tp": 2, "cp": 2},
    "gptj": {"name": "gptj", "tp": 2, "sequence_parallel": True},
    "gemma": {"name": "gemma", "tp": 2, "dp": 2, "recompute": "memory_bound"},
    "olmo": {"name": "olmo", "tp": 2, "cp": 2, "sequence_parallel": True},
    "experts": {"name": "mixture", "dp": 4, "ep": 2, "tp": 2, "optimizer": {"parallel_level": 1}},
    "experts on all": {"name": "mixture", "dp": 2, "ep": 2, "cp": 1, "pp": 1, "recompute": "full"},
    "latent": {"name": "latent", "tp": 2, "sequence_parallel": True, "recompute": "memory_bound"},
    "latent over sequences": {"name": "latent", "cp": 2, "tp": 2},
}  # fmt: skip


def a_program(case: Mapping[str, Any]) -> Case:
    degrees = {key: value for key, value in case.items() if key != "name"}
    return lambda: f"{program_line(lower(plan(**case)))} | {describe(degrees_of(**degrees))}"


def a_pipeline(schedule: str) -> Case:
    chunks = {"interleaved_1f1b": 2, "interleaved_zb": 2, "looped_bfs": 2}.get(schedule)
    virtual = chunks or (2 if schedule in ("dualpipe_v", "v_half", "v_min", "zb_v") else 1)
    return lambda: program_line(lower(plan("llama", pp=2, schedule=schedule, virtual=virtual)))


def a_checked_program(check: StepCheck, name: str, **degrees: Any) -> Case:
    def case() -> str:
        return program_line(lower(msgspec.structs.replace(plan(name, **degrees), step_check=check)))

    return case


def a_model(name: str) -> Case:
    def case() -> str:
        found = named_config(name)
        counts = f"{found.num_parameters} parameters, {found.num_active_parameters} active"
        return f"{counts} | {hash_of(found)}"

    return case


def a_graph(name: str) -> Case:
    def case() -> str:
        graph = graph_of(name, 2)
        size = sum(tensor.num_elements for tensor in graph.parameters)
        return f"{len(graph.operators)} operators, {size} parameters | {hash_of((graph.tensors, graph.operators))}"

    return case


def schedules(name: str) -> Case:
    """A schedule for many numbers of ranks, micro-batches and chunks; those that it refuses in words."""

    def case() -> str:
        found: list[Any] = []
        for ranks in (1, 2, 3, 4, 6):
            for count in (1, 2, 4, 5, 8, 12, 24):
                for virtual in (None, 1, 2, 3):
                    try:
                        made = make_schedule(name, ranks, count, virtual=virtual)
                        found.append([*made.placement, made.table])
                    except TwofoldError as error:
                        found.append(str(error))
        return f"{sum(isinstance(each, list) for each in found)} of {len(found)} | {hash_of(found)}"

    return case


def a_template(name: str, **degrees: Any) -> Case:
    def case() -> str:
        _structure.cache_clear()  # templates of one structure number their sizes in the order in which they are made
        template = model_template(CONFIGS[name], **degrees)
        spread = {key: degrees.get(key, 1) for key in ("tp", "cp", "ep")}
        numbers = template.monomials.values(model_sizes(CONFIGS[name], micro_batch=2, **spread))
        cells = sum(len(part.cells) for piece in template.pieces.values() for part in piece.parts.values())
        return f"{cells} cells | {hash_of((template.pieces, numbers))}"

    return case


def an_operator(name: str) -> Case:
    def case() -> str:
        spec = spec_of(name)
        gradients = ", ".join(f"{at}: {each.flops}" for at, each in spec.gradients.items())
        return f"{spec.flops} FLOP, of gradients {gradients or 'none'} | {hash_of(shown(spec))}"

    return case


def shown(spec: OperatorSpec) -> dict[str, Any]:
    """The fields of a declaration, sets sorted."""
    found = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return {key: sorted(value) if isinstance(value, frozenset) else value for key, value in found.items()}


def a_file(name: str) -> Case:
    """A config.json as published, as transformers saves it, and without keys that have a default."""

    def case() -> str:
        published, found = json.loads((FOLDER / f"{name}.json").read_text()), list[Any]()
        family = FAMILIES.get(NESTED.get(published["model_type"], published["model_type"]))
        few = {key: value for key, value in published.items() if family is None or key not in family.defaults}
        for keys in (published, COUNTED[name]["saved"], few):
            try:
                reading = reading_of(keys, name)
                found.append([reading.config, reading.remarks()])
            except TwofoldError as error:
                found.append(str(error))
        read = [each[0].num_parameters if isinstance(each, list) else "refused" for each in found]
        return f"{', '.join(map(str, read))} | {hash_of(found)}"

    return case


RELATIONS = ("same", "regrouped", "shuffled", "elsewhere")


def redistributions(relation: str, *, priced: bool) -> Case:
    def case() -> str:
        rng, found, moved = np.random.default_rng(17), list[Any](), 0
        price = StepSeconds(small_machine(64, latency_s=1e-6), 16, "float32") if priced else None
        for _ in range(25):
            drawn = random_case(rng, relation=relation, partial=not priced, max_ranks=16)
            steps = redistribute(drawn.source, drawn.target, drawn.shape, price=price)
            moved += sum(max_received_bytes(step, drawn.shape, 4) for step in steps)
            found.append([(step.kind, step.axes, step.dim, step.to_dim, str(step)) for step in steps])
        return f"{sum(map(len, found))} steps, {moved} B | {hash_of(found)}"

    return case


CASES: dict[str, Case] = {
    **{f"operator {name}": an_operator(name) for name in OPERATORS},
    **{f"file {name}": a_file(name) for name in COUNTED},
    **{f"redistributions {relation}": redistributions(relation, priced=False) for relation in RELATIONS},
    **{f"redistributions {relation}, by price": redistributions(relation, priced=True) for relation in RELATIONS[:3]},
    **{f"model {name}": a_model(name) for name in model_names()},
    **{f"graph {name}": a_graph(name) for name in CONFIGS},
    **{f"schedule {name}": schedules(name) for name in schedule_names()},
    **{f"program {name}": a_program(case) for name, case in PLANS.items()},
    **{f"program of {name}": a_pipeline(name) for name in schedule_names()},
    "program with a guard against spikes": a_checked_program(CHECKED, "llama", dp=2, tp=2),
    "program with a scaled loss": a_checked_program(SCALED, "float16", dp=2, optimizer=HALVES),
    "template llama": a_template("llama", tp=2, dp=2, recompute="selective"),
    "template llama over keys": a_template("llama", tp=4, cp=2),
    "template one key": a_template("one key", tp=2, cp=2),
    "template half": a_template("half", tp=2, cp=2, sequence_parallel=True, recompute="memory_bound"),
    "template gpt": a_template("gpt", tp=2, dp=2, fused=False),
    "template bert": a_template("bert", tp=2, sequence_parallel=True),
    "template neox": a_template("neox", tp=2, recompute="full"),
    "template gemma": a_template("gemma", tp=2, recompute="selective_op"),
    "template olmo": a_template("olmo", tp=2, cp=2),
    "template mixture": a_template("mixture", dp=2, ep=2, tp=2),
    "template latent": a_template("latent", tp=2, sequence_parallel=True, recompute="memory_bound"),
}
"""Name of a case -> what makes its line."""
