"""Made-up machines and models: every section of a machine file is used, no figure is of a device, and none is fitted.

A new calibration leaves what is computed of them as it is; a change of a model does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from msgspec.structs import replace

from costmodels import Machine
from costmodels.machine.catalogue import CitedProduct, Device, Network
from costmodels.machine.links import Link, Wire
from costmodels.machine.machine import Collective
from costmodels.machine.topologies import dragonfly, leaf_spine, torus
from plans.model.transformer import Experts, Latent, TransformerConfig
from tests import DATA

MACHINE = DATA / "made_up_machine.json"


@cache
def machines() -> Mapping[str, Machine]:
    """16 devices each, by the kind of their links or hosts."""
    nodes = Machine.load(MACHINE)
    near, far = nodes.links
    card = Link(name="card", ranks=16, latency_s=2e-6, bandwidth_Bps=4e10, uplink_Bps=5e10, reached_fraction=0.9)
    pairs = (replace(near, ranks=2), replace(near, ranks=8, bandwidth_Bps=1e11, uplink_Bps=6e10), far)
    rails = replace(far, rails=True, uplink_Bps=None)
    inside = Wire(ends=("", "node"), bandwidth_Bps=4e11, name="inside")
    into_leaf = Wire(ends=("", "leaf"), bandwidth_Bps=5e10, latency_s=1e-6, name="card")
    leaves = leaf_spine(4, 4, nodes_of_leaf=2, spines=2, inside=inside, card=into_leaf, up_Bps=1e11)
    compute = replace(
        nodes.compute, tiled=None, power=None, attention=None, rules={}, half_rows=30.0, half_depth=70.0,
        memory_chunk_s=0.0, longer_in_steps=0.0,
    )  # fmt: skip
    cores = {
        call: Collective(start_s=2e-5, hop_s=1e-4, cpu_start_s=1.2e-4, cpu_message_s=1e-4, cpu_Bps=1.5e9)
        for call in nodes.collectives
    }
    return {
        "nodes": nodes,
        "a card of four": _with(nodes, links=(replace(near, ranks=4), card), devices_per_node=4),
        "three tiers": _with(nodes, links=pairs),
        "rails": _with(nodes, links=(replace(near, ranks=4), rails), devices_per_node=4),
        "leaves": _with(nodes, graph=leaves, devices_per_node=4),
        "torus": _with(nodes, graph=torus((4, 2, 2), 5e10, 1e-6), devices_per_node=4),
        "dragonfly": _with(nodes, graph=dragonfly(2, 2, 1, 5e10, 1e-6), num_devices=12, devices_per_node=2),
        "plain": _with(nodes, compute=compute, overlap=(), replay=None, memory_allowance=0.0),
        "cores": _with(
            nodes, device="cpu", compute=replace(compute, kernel_cost={}, kernel_start={}, kernel_s=0.0), overlap=(),
            collectives=cores, host_async=False, cores_per_node=2, replay=None, communicator_bytes=None,
            links=(replace(near, ranks=16, bandwidth_Bps=9e10),), devices_per_node=16,
        ),
    }  # fmt: skip


def _with(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, **changes)


def models() -> Mapping[str, TransformerConfig]:
    """Small transformers that differ in all they can."""
    small: dict[str, Any] = {"hidden": 256, "num_heads": 8, "vocab": 1000, "seq": 128}
    gpt = TransformerConfig(
        **small, num_layers=5, ffn=1024, gated=False, norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True,
        position="learned", dropout=0.1,
    )  # fmt: skip
    return {
        "llama": TransformerConfig(**small, num_layers=4, num_kv_heads=4, ffn=704),
        "gpt": gpt,
        "tied": dataclasses.replace(gpt, tied=True),
        "experts": TransformerConfig(
            **small, num_layers=4, num_kv_heads=2, ffn=704,
            experts=Experts(num_experts=8, top_k=2, ffn=320, num_shared=1, num_dense_layers=1),
        ),
        "latent": TransformerConfig(
            **small, num_layers=4, ffn=704,
            latent=Latent(q_rank=96, kv_rank=64, rope_dim=16, nope_dim=32, value_dim=32),
        ),
        "large": TransformerConfig(
            hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32_000, seq=2048, num_layers=4
        ),
    }  # fmt: skip


def device() -> Device:
    """The device of "nodes", as in a catalogue."""
    nodes = machines()["nodes"]
    names = ("variant", "memory_bytes", "runtime_bytes", "memory_allowance", "communicator_bytes", "compute",
             "collectives", "dispatch_s", "replay", "overlap", "interval", "spreads", "price_intervals")  # fmt: skip
    near, far = nodes.links
    return Device(
        **{name: getattr(nodes, name) for name in names}, name="made-up", device="cuda", node=(near,),
        network=Network(name=far.name, latency_s=far.latency_s, bandwidth_Bps=far.bandwidth_Bps),
        best_product=CitedProduct(shape=(8192, 8192, 8192), dtype="bfloat16", flops_per_s=8.2e14), provenance={},
    )  # fmt: skip
