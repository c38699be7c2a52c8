"""DeepSpeed's offloading to the memory of the host, in tables of measurements.

The states of the optimizer stay in the memory of the host, whose processors update the weights (ZeRO-Offload, Ren et
al. 2021, arXiv 2101.06840, section 4); shards of weights may stay there too (ZeRO-Infinity, Rajbhandari et al. 2021,
arXiv 2104.07857, section 5). Both are read in the papers and data sheets, not measured.
"""

from __future__ import annotations

import dataclasses
import re

from costmodels import Machine
from plans.degrees import Degrees
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig
from simulator.result import Forecast

__all__ = ["is_modelled", "parts_in", "with_host_memory"]

_HOSTS = (
    ("v100-pcie", 256e9, 16e9),  # the same processors; PCIe 3 x16
    ("v100", 256e9, 8e9),  # DGX-2: six channels of DDR4-2666 on each of two processors; PCIe 3 x16 for two devices
    ("a100-pcie", 410e9, 32e9),  # two EPYC 7002, as in a DGX A100; PCIe 4 x16
    ("a100|a800", 410e9, 16e9),  # DGX A100: eight of DDR4-3200; PCIe 4 x16 for two
    ("gh200", 2000e9, 450e9),  # four Grace of 500 GB/s; NVLink-C2C
    ("gb[23]00", 18400e9, 225e9),  # NVL72: 36 Grace of 512 GB/s; NVLink-C2C for two
    ("b[23]00", 717e9, 32e9),  # DGX B200: eight of DDR5-5600; PCIe 5 x16 for two
    ("mi2", 205e9, 36e9),  # an EPYC 7A53 (Frontier, LUMI): eight of DDR4-3200; Infinity Fabric to each die
    ("mi3", 921e9, 64e9),  # two EPYC 9004: twelve of DDR5-4800; PCIe 5 x16
    ("h100-(pcie|nvl)|h200-nvl|pro-6000|5090", 614e9, 64e9),  # two processors as in a DGX H100; PCIe 5 x16
    ("gaudi-3", 614e9, 64e9),  # the same
    ("t4|2080|titan", 282e9, 16e9),  # two Xeons of 2019: six of DDR4-2933; PCIe 3 x16
    ("rtx|a10|a30|a40|l4|l20|gaudi", 410e9, 32e9),  # as a DGX A100's; PCIe 4 x16
    ("ascend", 751e9, 32e9),  # Atlas 800T A2: four Kunpeng 920, eight of DDR4-2933; PCIe 4 x16
    ("", 614e9, 32e9),  # DGX H100: eight of DDR5-4800; PCIe 5 x16 for two
)
"""Pattern of a device -> bytes per second of the memory of its usual node's host, and of the device's way to it in one
direction, while all devices use theirs (data sheets); no more than its link, of cards on PCIe."""

_UPDATE_BYTES = 30
"""Of a parameter: float32 weight, momentum and variance are read and written, 24 bytes; the gradient is read in float32
and the weight written in 16 bits, 6 bytes (csrc/adam/cpu_adam_impl.cpp)."""

_HOST_SHARE, _WAY_SHARE = 0.5, 0.8
"""Shares of the data sheet that the host's update and transfers reach (assumed)."""

_BACKWARD = 2 / 3
"""The backward's share of a step, beside which gradients leave the device."""

_UNSURE = 2.0
"""Times by which what offloading adds may be less or more (assumed: hosts differ in memory and processors)."""

_OTHERS = r"nvme|\bssds?\b|\bdisks?\b|activation|checkpoint\w* (cpu )?offload"


def is_modelled(words: str) -> bool:
    """Whether words about offloading mean states or weights under DeepSpeed, in the memory of the host.

    >>> is_modelled("DeepSpeed, CPU offload"), is_modelled("FSDP, CPU offload"), is_modelled("ZeRO-3, NVMe offload")
    (True, False, False)
    """
    low = words.lower()
    return bool(
        re.search(r"deepspeed|\bzero[-_ ]?(?:[123]|offload|infinity|stage)", low) and not re.search(_OTHERS, low)
    )


def parts_in(words: str, level: int) -> tuple[str, ...]:
    """What is offloaded, given words about it and the sharding level: the optimizer, and weights where they are sharded
    and the words do not name the optimizer alone.

    >>> parts_in("ZeRO-Offload", 2), parts_in("ZeRO-3 offload", 3), parts_in("optimizer offload", 3)
    (('optimizer',), ('optimizer', 'weights'), ('optimizer',))
    """
    low = words.lower()
    alone = re.search(r"optim\w*|states?", low) and not re.search(r"param|weight|infinity|\ball\b|full offload", low)
    return ("optimizer",) if level < 3 or alone else ("optimizer", "weights")


def with_host_memory(
    found: Forecast, config: TransformerConfig, degrees: Degrees, machine: Machine, parts: tuple[str, ...]
) -> Forecast:  # fmt: skip
    """A forecast with the states of the optimizer, and perhaps the weights, in the memory of the host.

    Gradients leave a device beside the backward, of every micro-batch from level 2 on; then the host updates its
    devices' shards, and the new weights come back. Offloaded weights come for every gather, beside the compute.
    """
    _, memory_Bps, way_Bps = next(each for each in _HOSTS if re.search(each[0], machine.name))
    way_Bps = min((way_Bps, *(link.bandwidth_Bps for link in machine.links if "PCIe" in link.name)))
    ranks, level = degrees.num_ranks, degrees.optimizer.parallel_level
    shard = config.num_parameters / ranks
    shard_bytes = itemsize(config.dtype) * shard
    on_host = min(ranks, machine.devices_per_node)
    update_s = _UPDATE_BYTES * shard * on_host / (_HOST_SHARE * memory_Bps)
    moved_s = shard_bytes / (_WAY_SHARE * way_Bps)
    times = degrees.num_micro_batches if level >= 2 else 1
    compute_s = found.step_s
    if "weights" in parts:
        compute_s = max(compute_s, 2 * degrees.num_micro_batches * moved_s)
    late_s = max(0.0, times * moved_s - _BACKWARD * compute_s)
    step_s = compute_s + late_s + update_s + moved_s
    more_s = step_s - found.step_s
    memory = {**found.memory, "optimizer": 0}
    if level >= 2:
        memory["gradient"] = 0
    if "weights" in parts:
        memory["weight"] = max(0, memory.get("weight", 0) - int(shard_bytes))
    return dataclasses.replace(
        found, step_s=step_s, low_s=found.low_s + more_s / _UNSURE, high_s=found.high_s + _UNSURE * more_s,
        memory=memory, peak_bytes=sum(memory.values()),
    )  # fmt: skip
