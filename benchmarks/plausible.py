"""Laws that predictions for other software, devices and precisions obey: `python -m benchmarks.plausible --count 300`.

Rows of tables are drawn over all devices, software, models of 125e6 to 1e12 parameters and degrees, and every law
compares two of them that differ in one cell: recomputation costs time, faster links and newer devices save it, narrower
products save it, memory follows its closed form. No measurement is needed, so the laws hold where there is none. The
program prints how often a law was tried, the exceptions and the worst of them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interop.measurements.case import Case
from interop.measurements.cells import Skip
from interop.measurements.forecasts import run_of
from interop.measurements.rows import case_of
from plans.errors import TwofoldError
from plans.model.graph import itemsize
from simulator.forecast import Forecast

__all__ = ["Exception_", "broken_laws", "drawn_row", "main"]

Row = Mapping[str, str]

MODELS = {
    "GPT-3 125M": 0.125, "GPT-3 1.3B": 1.3, "GPT-3 6.7B": 6.7, "GPT-3 13B": 13, "Llama-3.2-1B": 1.2, "Llama-2-7B": 7,
    "Llama-3-8B": 8, "Llama-2-70B": 70, "GPT-3 175B": 175, "Llama-3.1-405B": 405, "GPT 1T": 1000, "Mixtral 8x7B": 47,
    "DeepSeek-V3": 671, "Qwen3-30B-A3B": 30,
}  # fmt: skip
"""Model -> its parameters in 1e9."""

MIXTURES = ("Mixtral 8x7B", "DeepSeek-V3", "Qwen3-30B-A3B")
DEVICES = (
    "V100-32GB", "A100-40GB", "A100-80GB", "A100 80GB PCIe", "A800", "H100 SXM", "H100 PCIe", "H100 NVL", "H800", "H20",
    "H200", "GH200", "B200", "B300", "GB200", "GB300", "MI300X", "Ascend 910B4", "Ascend 910B3", "Ascend 910B1",
    "Ascend 910C",
)  # fmt: skip
SOFTWARE = ("Megatron-LM", "NeMo", "Megatron-DeepSpeed", "torchtitan", "torch FSDP2", "DeepSpeed", "llm-foundry")
WHOLE = ("torch FSDP2", "DeepSpeed", "llm-foundry")
"""Software that splits no layer."""

FASTER = {
    "A100-40GB": "A100-80GB", "A100 80GB PCIe": "A100-80GB", "A800": "A100-80GB", "V100-32GB": "A100-80GB",
    "A100-80GB": "H100 SXM", "H100 PCIe": "H100 SXM", "H100 NVL": "H100 SXM", "H800": "H100 SXM", "H100 SXM": "H200",
    "H20": "H200", "H200": "B200", "B200": "B300", "GB200": "GB300", "Ascend 910B4": "Ascend 910B3",
    "Ascend 910B3": "Ascend 910B1",
}  # fmt: skip
"""Device -> one that has more of everything: products, bandwidth of memory and of links. A GH200 has slower links than
an H100."""

NARROW = ("H100 SXM", "H200", "B200", "B300", "GB200", "GB300", "MI300X", "GH200")
"""Devices with float8 products."""


@dataclass(frozen=True, slots=True)
class Law:
    """A law about two rows.

    Args:
        name: what it states.
        faster, slower: cells of the two rows.
        least: the least step time of the slower one, over that of the faster one.
    """

    name: str
    faster: Row
    slower: Row
    least: float = 0.995


class Exception_(NamedTuple):
    """A law that two rows break, and the step time of the slower one over that of the faster one (or a peak of memory
    over its closed form)."""

    law: str
    ratio: float
    row: Row


def drawn_row(draw: random.Random) -> Row:
    """A row of a table that a published run might have."""
    while True:
        model, device = draw.choice(list(MODELS)), draw.choice(DEVICES)
        software = draw.choice(("MindSpeed", "MindFormers") if "Ascend" in device else SOFTWARE)
        size = MODELS[model]
        devices = 8
        while devices < 0.3 * size:
            devices *= 2
        devices *= draw.choice((1, 1, 2, 4, 16))
        tp = 1 if software in WHOLE or size < 3 else draw.choice((1, 2, 4, 8))
        pp = 1 if software in WHOLE or size < 10 else draw.choice((1, 2, 4, 8))
        dp, micro = devices // (tp * pp), draw.choice((1, 2, 4))
        if dp == 0:
            continue
        row = {
            "source": software, "model": model, "gpu_type": device, "gpu_count": str(devices), "tp": str(tp),
            "pp": str(pp), "micro_batch": str(micro), "global_batch": str(dp * micro * pp * draw.choice((1, 2, 8))),
            "seq": draw.choice(("2048", "4096", "8192")), "recompute": draw.choice(("none", "selective", "full")),
            "precision": "fp16" if device.startswith("V100") else "bf16", "metric": "iteration_time_s", "value": "1",
        }  # fmt: skip
        if model in MIXTURES and software not in WHOLE:
            row["ep"] = str(min(dp, 8))
        return row


def laws_of(row: Row) -> Iterator[Law]:
    """The laws that a row is an example of."""
    # keeping less can save host time of allocations that other software spends: 2 % are left to it
    yield Law("recomputing some is not faster than nothing", {"recompute": "none"}, {"recompute": "selective"}, 0.98)
    yield Law("recomputing all is not faster than some", {"recompute": "selective"}, {"recompute": "full"})
    micro, devices, batch = (int(row[name]) for name in ("micro_batch", "gpu_count", "global_batch"))
    split = int(row["tp"]) * int(row["pp"])
    if row["pp"] == "1" and batch // (devices // split) // micro % 2 == 0:
        yield Law("twice the micro-batch is hardly slower", {"micro_batch": str(2 * micro)}, {}, 0.93)
    yield Law("faster links are not slower", {"interconnect": "400 Gb/s per GPU"}, {"interconnect": "100 Gb/s per GPU"})
    yield Law("twice the batch takes longer", {}, {"global_batch": str(2 * batch)}, 1.0)
    if faster := FASTER.get(row["gpu_type"]):
        yield Law("a better device is not slower", {"gpu_type": faster}, {}, 0.98)
    if row["gpu_type"] in NARROW and MODELS[row["model"]] > 6 and row["model"] not in MIXTURES:
        if row["source"] in ("Megatron-LM", "NeMo", "Megatron-DeepSpeed"):
            yield Law("float8 is faster", {"precision": "fp8"}, {}, 1.0)
        if row["gpu_type"][:2] in ("B2", "B3", "GB"):
            yield Law("float4 is faster than float8", {"precision": "nvfp4"}, {"precision": "mxfp8"}, 1.0)
    if row["source"] in WHOLE:
        yield Law("gathering weights twice is not faster", {"zero_level": "2"}, {"zero_level": "3"}, 0.99)
    if row["source"] == "torch FSDP2":
        yield Law("compiling is not slower", {"compile": "y"}, {"compile": "n"}, 0.98)


def closed_form_bytes(case: Case) -> float:
    """Bytes of weights, gradients, states and activations of a GPT under Megatron-LM with fused attention.

    A parameter has its weight, its gradient and 12 bytes of states, which replicas share (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 3.1). A layer has 32 s b h, or 2 s b h and once 32 where all is recomputed, for each
    micro-batch under way on the first stage (Korthikanti et al. 2022, arXiv 2205.05198, section 4, without dropout). A
    single stage has the logits in float and half precision.
    """
    config, degrees = case.config, case.degrees
    tokens, embedding = degrees.micro_batch * config.seq / degrees.tp, config.vocab * config.hidden
    stored = (config.num_parameters - embedding) / degrees.pp / degrees.tp + embedding / degrees.tp
    states = 12 / (degrees.dp if degrees.optimizer.parallel_level else 1)
    layers = config.num_layers / degrees.pp * min(degrees.pp, degrees.num_micro_batches)
    each = 2 if degrees.recompute == "full" else 32
    activations = tokens * config.hidden * (each * layers + (32 if degrees.recompute == "full" else 0))
    own = itemsize(config.dtype) + itemsize(degrees.optimizer.accumulates_in(config.dtype))
    return stored * (own + states) + activations + (6 * tokens * config.vocab if degrees.pp == 1 else 0)


def broken_laws(row: Row) -> tuple[list[str], list[Exception_]]:
    """The laws that were tried on a row, and the exceptions from them."""
    tried, found = [], []
    if (own := _forecast(row)) is not None:
        case, forecast = own
        tried.append("the prediction is inside its interval")
        if not forecast.low_s <= forecast.step_s <= forecast.high_s:
            found.append(Exception_(tried[-1], forecast.step_s / forecast.high_s, row))
        if row["model"].startswith("GPT") and case.stack == "megatron" and case.degrees.recompute != "selective":
            tried.append("memory is that of its closed form")
            ratio = forecast.peak_bytes / closed_form_bytes(case)
            if not _CLOSED[0] <= ratio <= _CLOSED[1]:
                found.append(Exception_(tried[-1], ratio, row))
    for law in laws_of(row):
        faster, slower = (_forecast({**row, **cells}) for cells in (law.faster, law.slower))
        if faster is None or slower is None:
            continue
        tried.append(law.name)
        ratio = slower[1].step_s / faster[1].step_s
        if ratio < law.least:
            found.append(Exception_(law.name, ratio, {**row, **law.faster}))
    return tried, found


_CLOSED = (0.9, 1.45)
"""Peaks over their closed form, which leaves out buffers of the loss and of what arrives; those matter for small
models with large vocabularies."""


def _forecast(row: Row) -> tuple[Case, Forecast] | None:
    """The configuration of a row and its forecast; None if its software or device cannot run it."""
    try:
        case = case_of(row, 1)
        return case, run_of(case).found
    except (Skip, TwofoldError):
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw rows, and print for every law how often it was tried and broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="rows (300)")
    parser.add_argument("--seed", type=int, default=14, help="of the draws (14)")
    options = parser.parse_args(arguments)
    draw = random.Random(options.seed)
    tried: dict[str, int] = {}
    broken: dict[str, list[Exception_]] = {}
    for _ in range(options.count):
        names, exceptions = broken_laws(drawn_row(draw))
        for name in names:
            tried[name] = tried.get(name, 0) + 1
        for each in exceptions:
            broken.setdefault(each.law, []).append(each)
    for name, count in tried.items():
        own = sorted(broken.get(name, []), key=lambda each: each.ratio)
        print(f"{name:50} {count:6} tried, {len(own)} exceptions")
        for each in own[:3]:
            print(f"    {each.ratio:.3f} {dict(each.row)}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
