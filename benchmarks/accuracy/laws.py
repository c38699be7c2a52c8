"""Laws about pairs of rows of a table, which predictions obey without any measurement.

More work takes longer and more memory, recomputation trades one for the other, faster devices, links and narrower
products save time, splitting and sharding save memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from plans.model.transformer import TransformerConfig

__all__ = ["FLOAT16_ONLY", "MIXTURES", "MODELS", "WHOLE", "Law", "Row", "laws_of"]

Row = Mapping[str, str]

MODELS = {
    "GPT-3 125M": 0.125, "GPT-3 1.3B": 1.3, "GPT-3 6.7B": 6.7, "GPT-3 13B": 13, "Llama-3.2-1B": 1.2, "Llama-2-7B": 7,
    "Llama-3-8B": 8, "Llama-2-70B": 70, "GPT-3 175B": 175, "Llama-3.1-405B": 405, "GPT 1T": 1000, "Mixtral 8x7B": 47,
    "DeepSeek-V3": 671, "Qwen3-30B-A3B": 30,
}  # fmt: skip
"""Model -> its parameters in 1e9."""

MIXTURES = ("Mixtral 8x7B", "DeepSeek-V3", "Qwen3-30B-A3B")
WHOLE = ("torch FSDP2", "DeepSpeed", "llm-foundry")
"""Software that splits no layer."""

_FASTER = {
    "A100-40GB": "A100-80GB", "A100 80GB PCIe": "A100-80GB", "A800": "A100-80GB", "V100-32GB": "A100-80GB",
    "A100-80GB": "H100 SXM", "H100 PCIe": "H100 NVL", "H100 NVL": "H100 SXM", "H800": "H100 SXM", "H100 SXM": "H200",
    "H20": "H200", "H200": "B200", "B200": "B300", "GB200": "GB300", "Ascend 910B4": "Ascend 910B3",
    "Ascend 910B3": "Ascend 910B1", "T4": "A10", "L4": "L40S", "L20": "L40S", "L40": "L40S", "A10G": "L40S",
    "RTX 2080 Ti": "RTX 3090", "RTX 3090": "RTX 4090", "RTX 4090": "RTX 5090", "H200 NVL": "H200", "MI250X": "MI300X",
    "MI300A": "MI300X", "MI300X": "MI325X", "MI325X": "MI355X", "Gaudi 2": "Gaudi 3", "TPU v3": "TPU v4",
    "TPU v4": "TPU v5p", "TPU v5e": "TPU v6e", "Trainium 1": "Trainium 2", "P100": "V100-16GB",
}  # fmt: skip
"""Device -> one that has more of everything: products, bandwidth of memory and of links. A GH200 has slower links than
an H100."""

FLOAT16_ONLY = ("V100", "P100", "T4", "RTX 2080")
"""Beginnings of devices without bfloat16."""

_SLOW_LINKS = ("T4", "A10", "A40", "L", "RTX", "MI250", "P100", "TPU", "Trainium")
"""Beginnings of devices whose links to other nodes are slow for what they compute."""

_BOARDS = ("A100-40GB", "A100-80GB", "H100 SXM", "V100-32GB")
"""Devices that are sold as cards too, which PCIe joins."""

_NARROW = ("H100 SXM", "H200", "B200", "B300", "GB200", "GB300", "MI300X", "GH200")
"""Devices with float8 products."""


@dataclass(frozen=True, slots=True)
class Law:
    """A law about two rows.

    Args:
        name: what it states.
        less, more: cells of the two rows.
        least, most: the figure of the second one, over that of the first one.
        of: the figure.
    """

    name: str
    less: Row
    more: Row
    least: float = 0.995
    most: float = math.inf
    of: Literal["step_s", "peak_bytes"] = "step_s"


def laws_of(row: Row, config: TransformerConfig) -> Iterator[Law]:
    """The laws that a row with this model is an example of."""
    yield from _of_recomputation()
    yield from _of_devices(row)
    yield from _of_precisions(row)
    yield from _of_batches(row)
    yield from _of_splitting(row, config)
    if config.experts is None:
        yield from _of_sizes(row, config)


def _of_recomputation() -> Iterator[Law]:
    none, some, everything = ({"recompute": mode} for mode in ("none", "selective", "full"))
    # where messages set the pace, another order of kernels between them may save a little: 4 % are left to it
    yield Law("recomputing some is not faster than nothing", none, some, 0.96)
    yield Law("recomputing all is not faster than some", some, everything)
    yield Law("recomputing some saves memory", some, none, of="peak_bytes")
    yield Law("recomputing all saves memory", everything, some, 0.98, of="peak_bytes")


def _of_devices(row: Row) -> Iterator[Law]:
    yield Law("faster links are not slower", {"interconnect": "400 Gb/s per GPU"}, {"interconnect": "100 Gb/s per GPU"})
    small, large = ({"notes": f"{number} GPUs per node"} for number in (4, 8))
    if row["gpu_type"] in _BOARDS:
        yield Law("a node of eight is not slower than two of four", large, small, 0.98)
        yield Law("NVLink is not slower than PCIe", {"interconnect": "NVLink"}, {"interconnect": "PCIe"}, 0.98)
    if faster := _FASTER.get(row["gpu_type"]):
        yield Law("a better device is not slower", {"gpu_type": faster}, {}, 0.98)


def _of_precisions(row: Row) -> Iterator[Law]:
    device = row["gpu_type"]
    if device.startswith(("A100", "A800", "H", "B", "G", "MI3", "L", "RTX 3", "RTX 4")) and "Gaudi" not in device:
        yield Law("TF32 is not faster than bf16", {}, {"precision": "tf32"})
        yield Law("float32 is not faster than TF32", {"precision": "tf32"}, {"precision": "fp32 (TF32 off)"})
        if row["source"] in (*WHOLE, "torchtitan"):  # Megatron-LM reduces gradients of fp16 in 16 bits, of bf16 in 32
            yield Law("fp16 is as fast as bf16", {}, {"precision": "fp16"}, 0.98, 1.1)
        # 16 bytes of a parameter with its gradient and states, or 18 with a copy in 16 bits
        yield Law("float32 saves no more memory than copies in bf16", {}, {"precision": "fp32 (TF32 off)"}, 0.88,
                  of="peak_bytes")  # fmt: skip
    if device in _NARROW and MODELS[row["model"]] > 6 and row["model"] not in MIXTURES:
        if row["source"] in ("Megatron-LM", "NeMo"):
            yield Law("float8 is faster", {"precision": "fp8"}, {}, 1.0)
        if device[:2] in ("B2", "B3", "GB"):
            yield Law("float4 is faster than float8", {"precision": "nvfp4"}, {"precision": "mxfp8"}, 1.0)


def _of_batches(row: Row) -> Iterator[Law]:
    micro, devices, batch = (int(row[name]) for name in ("micro_batch", "gpu_count", "global_batch"))
    copies = devices // (int(row["tp"]) * int(row["pp"]))
    twice, all_twice = {"global_batch": str(2 * batch)}, {"global_batch": str(2 * batch), "gpu_count": str(2 * devices)}
    yield Law("twice the batch takes longer", {}, twice, 1.0)
    yield Law("one micro-batch more takes longer", {}, {"global_batch": str(batch + copies * micro)}, 1.0)
    if row["pp"] == "1" and batch // copies // micro % 2 == 0:
        yield Law("twice the micro-batch is hardly slower", {"micro_batch": str(2 * micro)}, {}, 0.93)
    yield Law("larger micro-batches take more memory", {}, {**twice, "micro_batch": str(2 * micro)}, of="peak_bytes")
    # more copies share an update, which may take a tenth of a small step
    yield Law("twice the devices with twice the batch are hardly faster", {}, all_twice, 0.9)
    # one micro-batch has no gradients to add
    yield Law("twice the devices are at most twice as fast", {"gpu_count": str(2 * devices)}, {}, 0.5, 2.2)
    yield Law("more copies take no more memory", all_twice, {}, 0.97, of="peak_bytes")


def _of_splitting(row: Row, config: TransformerConfig) -> Iterator[Law]:
    if row["source"] in WHOLE:
        yield Law("gathering weights twice is not faster", {"zero_level": "2"}, {"zero_level": "3"}, 0.99)
        for level in (1, 2, 3):
            name = f"ZeRO-{level} takes no more memory than level {level - 1}"
            yield Law(name, {"zero_level": str(level)}, {"zero_level": str(level - 1)}, 0.99, of="peak_bytes")
    if row["source"] == "DeepSpeed":
        plain, offloaded = {"zero_level": "2"}, {"zero_level": "ZeRO-2 (optimizer offload)"}
        yield Law("offloading to the host is not faster", plain, offloaded)
        yield Law("offloading to the host saves memory", offloaded, plain, of="peak_bytes")
    if row["source"] == "torch FSDP2":
        yield Law("compiling is not slower", {"compile": "y"}, {"compile": "n"}, 0.98)
    if row["source"] in ("Megatron-LM", "NeMo"):
        yield Law("sharding the optimizer saves memory", {"zero_level": "1"}, {"zero_level": "0"}, of="peak_bytes")
        yield Law("CUDA graphs are not slower", {"notes": "CUDA graphs"}, {"notes": "no CUDA graphs"}, 0.96)
        if config.experts is not None:
            yield Law("even experts are not slower", {"imbalance": "0"}, {"imbalance": "0.5"})
            yield Law("a token to each node is not slower than one to each expert", {"routing": "flex"},
                      {"routing": "alltoall"})  # fmt: skip
    if row["source"] in WHOLE or row["model"] in MIXTURES:
        return
    ways, stages, devices = (int(row[name]) for name in ("tp", "pp", "gpu_count"))
    split = {"tp": str(2 * ways), "gpu_count": str(2 * devices)}
    yield Law("tensor parallelism saves memory", split, {}, of="peak_bytes")
    # fewer copies in a node send a smaller part of their gradients within it
    yield Law("two ranks are at most three times as fast as one", split, {}, 0.3, 3.0)
    yield Law("sequence parallelism saves memory", {"sequence_parallel": "y"}, {"sequence_parallel": "n"},
              of="peak_bytes")  # fmt: skip
    if row["source"] in ("Megatron-LM", "NeMo", "torchtitan"):
        parts = {"cp": "2", "gpu_count": str(2 * devices)}
        yield Law("context parallelism saves memory", parts, {}, 0.99, of="peak_bytes")
        # their keys may go over links of 12.5 GB/s and less
        least = 0.3 if row["gpu_type"].startswith(_SLOW_LINKS) else 0.6
        yield Law("two parts of a sequence are at most twice as fast", parts, {}, least, 2.1)
        if stages > 1 and config.num_layers % (2 * stages) == 0:
            yield Law("interleaving is hardly slower", {}, {"vpp": "2"}, 0.5, 1.08)
            yield Law("interleaving saves no memory", {}, {"vpp": "2"}, 0.97, of="peak_bytes")
    if row["source"] != "torchtitan":  # whose last stage keeps the outputs of all micro-batches
        twice = {"global_batch": str(2 * int(row["global_batch"]))}
        more_stages = {**twice, "pp": str(2 * stages), "gpu_count": str(2 * devices)}
        yield Law("more stages take no more memory", more_stages, twice, 0.97, of="peak_bytes")


def _of_sizes(row: Row, config: TransformerConfig) -> Iterator[Law]:
    heads, groups, width = config.num_heads, config.num_kv_heads, config.hidden // config.num_heads
    own = {
        "model": "Llama" if config.gated else "GPT", "layers": str(config.num_layers), "hidden": str(config.hidden),
        "heads": str(heads), "kv_heads": str(groups), "ffn": str(config.inner), "vocab": str(config.vocab),
    }  # fmt: skip
    hidden = config.hidden + 8 * width
    wider = {"hidden": str(hidden), "heads": str(heads + 8)} | ({} if config.gated else {"ffn": str(4 * hidden)})
    larger = {
        "a layer more for a stage": {"layers": str(config.num_layers + int(row["pp"]))},
        "a wider model": wider | ({"kv_heads": str(heads + 8)} if groups == heads else {}),
        "a larger vocabulary": {"vocab": str(config.vocab + 8192)},
        "a longer sequence": {"seq": str(int(row["seq"]) + 1024)},
    }
    if config.gated:  # one without a gate is read as such by its width of four times the hidden size
        larger["a wider MLP"] = {"ffn": str(config.inner + config.inner // 8)}
    if groups % (2 * int(row["tp"])) == 0 and config.gated:
        yield Law("fewer key-value heads are not slower", own | {"kv_heads": str(groups // 2)}, own, 0.995)
    for what, cells in larger.items():
        yield Law(f"{what} takes longer", own, own | cells, 0.995)  # other tiles may fit better
        # gradients leave sooner beside longer kernels
        yield Law(f"{what} takes more memory", own, own | cells, 0.999, of="peak_bytes")
    micro, batch = int(row["micro_batch"]), int(row["global_batch"])
    if micro % 2 == 0 and batch % 2 == 0:
        twice = {"seq": str(2 * int(row["seq"])), "micro_batch": str(micro // 2), "global_batch": str(batch // 2)}
        yield Law("the same tokens in longer sequences are not faster", own, own | twice, 0.95)
