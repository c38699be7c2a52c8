"""Rows of tables are drawn, and laws tried that their predictions obey.

    python -m benchmarks.accuracy.plausible --count 300

The rows are drawn over all devices, software, models of 125e6 to 1e12 parameters and degrees. Most laws
(`benchmarks.accuracy.laws`) compare two that differ in one cell. No measurement is needed, so the laws hold where there
is none. The program prints how often a law was tried, the exceptions and the worst of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.accuracy.laws import FLOAT16_ONLY, MIXTURES, MODELS, WHOLE, Row, laws_of
from interop.measurements.case import Case, products_of
from interop.measurements.cells import Skip
from interop.measurements.forecasts import Run, measured_as, run_of
from interop.measurements.rows import case_of
from plans.errors import TwofoldError
from plans.model.graph import itemsize

__all__ = ["Exception_", "broken_laws", "drawn_row", "main"]

DEVICES = (
    "V100-32GB", "A100-40GB", "A100-80GB", "A100 80GB PCIe", "A800", "H100 SXM", "H100 PCIe", "H100 NVL", "H800", "H20",
    "H200", "GH200", "B200", "B300", "GB200", "GB300", "MI300X", "Ascend 910B4", "Ascend 910B3", "Ascend 910B1",
    "Ascend 910C", "T4", "A10", "A10G", "A40", "L4", "L20", "L40S", "RTX 2080 Ti", "RTX 3090", "RTX 4090", "RTX 5090",
    "H200 NVL", "MI250X", "MI300A", "MI325X", "MI355X", "Gaudi 2", "Gaudi 3", "P100", "TPU v3", "TPU v4", "TPU v5e",
    "TPU v5p", "TPU v6e", "Trainium 1", "Trainium 2",
)  # fmt: skip
SOFTWARE = ("Megatron-LM", "NeMo", "Megatron-DeepSpeed", "torchtitan", "torch FSDP2", "DeepSpeed", "llm-foundry")


class Exception_(NamedTuple):
    """A law that a row breaks, and the ratio by which it does: of the figures of two rows, of an end of an interval to
    the prediction, of a peak of memory to its closed form, or a share of the peak."""

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
            "precision": "fp16" if device.startswith(FLOAT16_ONLY) else "bf16", "metric": "iteration_time_s",
            "value": "1",
        }  # fmt: skip
        if model in MIXTURES and software not in WHOLE:
            row["ep"] = str(min(dp, 8))
        return row


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
    own = _predicted(row)
    if own is None:
        return [], []
    case, run = own
    tried, found = [], []
    for law, ratio, (least, most) in _of_one(row, case, run):
        tried.append(law)
        if not least <= ratio <= most:
            found.append(Exception_(law, ratio, row))
    for each in laws_of(row, case.config):
        less, more = (_predicted({**row, **cells}) for cells in (each.less, each.more))
        if less is None or more is None:
            continue
        tried.append(each.name)
        ratio = getattr(more[1].found, each.of) / getattr(less[1].found, each.of)
        if not each.least <= ratio <= each.most:
            found.append(Exception_(each.name, ratio, {**row, **each.less}))
    return tried, found


def _of_one(row: Row, case: Case, run: Run) -> list[tuple[str, float, tuple[float, float]]]:
    """Laws about a row alone: what they state, a ratio, and its least and most."""
    found = run.found
    shares = dataclasses.replace(
        case, metric="mfu_percent", counts_recompute=False, peak=products_of(case.stack)
    )  # fmt: skip
    result = [
        ("an interval of time begins below the prediction", found.low_s / found.step_s, _LOW),
        ("an interval of time ends above the prediction", found.high_s / found.step_s, _HIGH),
        ("an interval of memory begins below the prediction", run.memory[0] / found.peak_bytes, _LOW),
        ("an interval of memory ends above the prediction", run.memory[1] / found.peak_bytes, _HIGH),
        ("devices reach a share of their peak", measured_as(shares, found, found.step_s) / 100, (0.0, 0.9)),
    ]
    if row["model"].startswith("GPT") and case.stack == "megatron" and case.degrees.recompute != "selective":
        closed = found.peak_bytes / closed_form_bytes(case)
        result.append(("memory is that of its closed form", closed, _CLOSED))
    return result


_LOW, _HIGH = (0.3, 0.99), (1.01, 3.0)
"""Ends of intervals over the prediction. Hosts differ by a factor of 3."""

_CLOSED = (0.9, 1.5)
"""Peaks over their closed form, which leaves out buffers of the loss and of what arrives; those matter for small
models with large vocabularies."""


def _predicted(row: Row) -> tuple[Case, Run] | None:
    """The configuration of a row and its prediction; None if its software or device cannot run it."""
    try:
        case = case_of(row, 1)
        return case, run_of(case)
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
        print(f"{name:58} {count:6} tried, {len(own)} exceptions")
        for each in own[:3]:
            print(f"    {each.ratio:.3f} {dict(each.row)}")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
