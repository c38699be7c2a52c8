"""Rows of a table of measurements as configurations that can be predicted."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plans.errors import TwofoldError
from plans.plan import Optimizer
from plans.scale import Degrees
from plans.transformer import TransformerConfig

__all__ = ["COLUMNS", "METRICS", "Case", "Skip", "case_of", "read_table"]

COLUMNS = (
    "source", "provenance", "task", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq",
    "global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "cp", "ep", "schedule", "sequence_parallel", "recompute",
    "zero_level", "gpu_type", "gpu_count", "interconnect", "precision", "compile", "async_tp", "metric", "value",
    "layout_complete", "notes",
)  # fmt: skip

METRICS = (
    "iteration_time_s", "tokens_per_s_per_gpu", "samples_per_s_per_gpu", "tflops_per_gpu", "mfu_percent",
    "peak_memory_GiB", "peak_memory_GB",
)  # fmt: skip

_NEEDED = ("source", "model", "layers", "hidden", "heads", "seq", "metric", "value", "gpu_type", "gpu_count")

_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "fp32": "float32",
           "float32": "float32"}  # fmt: skip

_SCHEDULES = {"1f1bi": "interleaved_1f1b", "vpp": "interleaved_1f1b", "zb1p": "zb_h1", "zb2p": "zb_h2"}

_ZERO_BUBBLE = "2401.10241"
"""Qi et al. 2024; its experiments ran examples/pretrain_zero_bubble.sh of sail-sg/zero-bubble-pipeline-parallelism:
--fp16, no --use-flash-attn, no recomputation, no distributed optimizer."""

_LLAMA_VOCAB = 32_000
"""Of the usual SentencePiece models. The zero-bubble experiments use one; the parameters that their models' names state
(1.5B, 6.2B, 14.6B, 28.3B) leave 28,000 to 35,000 entries beside their layers."""

_GPT_VOCAB = 51_200
"""GPT-2's 50,257 entries, padded to a multiple of 128 x 8 (Narayanan et al. 2021, arXiv 2104.04473, section 5.1)."""


_MOST = 2**21
"""No count of a real model, batch or cluster is larger."""


class Skip(Exception):
    """A row that is not predicted, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a row measures.

    Args:
        config, degrees: the model and its layout.
        machine: the name of a catalogued machine.
        stack: the name of a software stack.
        metric, value: what was measured.
        assumed: what the row does not state, in words.
        group: rows whose predictions are compared with each other.
        row: its number in the table, from 1, the header not counted.
        source: of the row.
    """

    config: TransformerConfig
    degrees: Degrees
    machine: str
    stack: str
    metric: str
    value: float
    assumed: tuple[str, ...]
    group: tuple[str, ...]
    row: int
    source: str
    labels: Mapping[str, str] = field(default_factory=dict)


def read_table(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a CSV table.

    Raises:
        TwofoldError: no such file, no rows, or columns missing.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TwofoldError(f"cannot read the table {os.fspath(path)!r}: {error}") from None
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in _NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        raise TwofoldError(
            f"table {os.fspath(path)!r} has no column {', '.join(missing)}; see `twofold validate --help`"
        )
    rows = [{name: (cell or "").strip() for name, cell in row.items() if name is not None} for row in reader]
    if not rows:
        raise TwofoldError(f"table {os.fspath(path)!r} has no rows")
    return rows


def case_of(row: Mapping[str, str], number: int, stack: str | None = None) -> Case:
    """The configuration of a row.

    Args:
        row: column -> text; absent columns count as blank.
        number: of the row.
        stack: the software that ran it; found from the row when None.

    Raises:
        Skip: the row cannot be predicted; says why.
    """
    return _Reading(row, number, stack).case()


class _Reading:
    """One row, read column by column."""

    def __init__(self, row: Mapping[str, str], number: int, stack: str | None) -> None:
        self.row = row
        self.number = number
        self.given_stack = stack
        self.assumed: list[str] = []

    def case(self) -> Case:
        row = self.row
        metric = self.text("metric")
        if metric not in METRICS:
            raise Skip(f"metric {metric!r} is none of {', '.join(METRICS)}")
        try:
            value = float(self.text("value"))
        except ValueError:
            raise Skip(f"value {self.text('value')!r} is no number") from None
        if not value > 0 or value == float("inf"):
            raise Skip(f"value {value} is not a positive number")
        if self.text("layout_complete").lower() in ("n", "no", "false"):
            raise Skip("its parallel layout is not stated (layout_complete n)")
        if self.count("ep", 1) > 1:
            raise Skip("expert parallelism is not modelled")
        dtype = self.dtype()
        try:
            config = self.config(dtype)
            stack = self.given_stack or self.stack(config)
            degrees = self.degrees(config, stack)
        except TwofoldError as error:
            raise Skip(str(error)) from None
        gpus = self.count("gpu_count")
        if degrees.num_ranks != gpus:
            raise Skip(f"its degrees make {degrees.num_ranks} ranks, it states {gpus} devices")
        labels = {name: row.get(name, "") for name in COLUMNS if row.get(name)}
        group = tuple(
            row.get(name, "")
            for name in ("source", "model", "seq", "precision", "compile", "async_tp", "gpu_type", "gpu_count",
                         "global_batch", "metric")
        )  # fmt: skip
        return Case(
            config=config, degrees=degrees, machine=f"{self.device()}-x{gpus}", stack=stack, metric=metric, value=value,
            assumed=tuple(dict.fromkeys(self.assumed)), group=group, row=self.number, source=self.text("source"),
            labels=labels,
        )  # fmt: skip

    # ------------------------------------------------------------------- cells

    def text(self, name: str) -> str:
        return (self.row.get(name) or "").strip()

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        text = self.text(name)
        if not text:
            if default is None:
                raise Skip(f"{name} is not stated")
            return default
        try:
            number = float(text)
        except ValueError:
            raise Skip(f"{name} is {text!r}, no whole number") from None
        if not math.isfinite(number) or number != int(number) or not least <= number <= _MOST:
            raise Skip(f"{name} is {text!r}, no whole number from {least} to {_MOST:,}")
        return int(number)

    def dtype(self) -> str:
        text = self.text("precision").lower()
        if not text and _ZERO_BUBBLE in self.text("source").lower():
            self.assumed.append("precision not stated: fp16, the default of the repository's script")
            return "float16"
        if not text:
            self.assumed.append("precision not stated: bf16")
            return "bfloat16"
        if text not in _DTYPES:
            raise Skip(f"precision {text!r} is not modelled; modelled are bf16, fp16 and fp32")
        return _DTYPES[text]

    def device(self) -> str:
        """The catalogue's name of the device."""
        text = self.text("gpu_type").lower()
        name = re.sub(r"[^a-z0-9]+", " ", text)
        memory = match.group(1) if (match := re.search(r"(\d+)\s*gb", name)) else ""
        words = name.split()
        for device, memories in (("a100", ("40", "80")), ("v100", ("16", "32"))):
            if device in words:
                if memory not in memories:
                    self.assumed.append(f"memory of the {device.upper()} not stated: {memories[1]} GB")
                    memory = memories[1]
                return f"{device}-{memory}gb"
        if "h100" in words:
            return "h100-sxm-96gb" if memory == "96" else "h100-sxm"
        for device in ("h200", "gh200", "b200"):
            if device in words:
                return device
        if match := re.search(r"910\s?(b[1-4]|c)", name):
            return f"ascend-910{match.group(1)}"
        raise Skip(f"device {self.text('gpu_type')!r} is not in the catalogue")

    # ------------------------------------------------------------------- model and layout

    def config(self, dtype: str) -> TransformerConfig:
        hidden, heads = self.count("hidden"), self.count("heads")
        kv_heads, ffn = self.count("kv_heads", heads), self.count("ffn", 4 * hidden)
        is_llama = "llama" in self.text("model").lower() or ffn != 4 * hidden or kv_heads != heads
        small = is_llama or _ZERO_BUBBLE in self.text("source")
        vocab = self.count("vocab", 0) if self.text("vocab") else (_LLAMA_VOCAB if small else _GPT_VOCAB)
        if not self.text("vocab"):
            self.assumed.append(f"vocabulary not stated: {vocab}")
        common = {
            "name": self.text("model"), "num_layers": self.count("layers"), "hidden": hidden, "num_heads": heads,
            "num_kv_heads": kv_heads, "ffn": ffn, "vocab": vocab, "seq": self.count("seq"), "dtype": dtype,
        }  # fmt: skip
        if is_llama:
            rope = "none" if "like" in self.text("model").lower() else "rope"
            return TransformerConfig(**common, gated=True, norm="rms", position=rope)  # type: ignore[arg-type]
        return TransformerConfig(
            **common, gated=False, norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True,  # type: ignore[arg-type]
            position="learned", dropout=0.1, attention_dropout=0.1,
        )  # fmt: skip

    def stack(self, config: TransformerConfig) -> str:
        """torch's parts where the source or its switches speak of them, else Megatron-LM."""
        words = " ".join(self.text(name) for name in ("source", "notes")).lower()
        compiled = self.text("compile").lower()
        if _ZERO_BUBBLE in words:
            return "zero-bubble"
        if self.text("async_tp").lower() in ("y", "yes", "true"):
            if "torchtitan" not in self.text("source").lower():
                raise Skip("asynchronous tensor parallelism is modelled for torchtitan only")
            return "torchtitan-async"
        if "torchtitan" in self.text("source").lower():
            return "torchtitan-compile" if compiled in ("y", "yes", "true") else "torchtitan"
        if "torch" in words or compiled or self.text("zero_level") in ("2", "3") or "fsdp" in words:
            return "torch-compile" if compiled in ("y", "yes", "true") else "torch"
        if match := re.search(r"\barxiv[: ]?(2[12])\d\d\.", words):  # before fused attention kernels were in use
            return "megatron-2022" if match.group(1) <= "22" else "megatron"
        return "megatron"

    def degrees(self, config: TransformerConfig, stack: str) -> Degrees:
        tp, pp, dp, cp = (self.count(name, 1) for name in ("tp", "pp", "dp", "cp"))
        batch = self.count("global_batch")
        micro = self.count("micro_batch", 0) if self.text("micro_batch") else 0
        if not micro:
            raise Skip("micro_batch is not stated")
        schedule, virtual = self.schedule(pp, config.num_layers)
        level = self.count("zero_level", 0, least=0)
        recompute = self.text("recompute").lower() or "none"
        if not self.text("recompute"):
            self.assumed.append("recomputation not stated: none")
        if recompute == "selective" and stack.startswith("torch"):
            recompute = "selective_op"
            self.assumed.append("selective recomputation: torchtitan's, by operator")
        if pp > 1 and "torchtitan" in self.text("source").lower():
            raise Skip("the micro-batch of the pipeline is not stated")
        first = Degrees(
            dp=dp, tp=tp, pp=pp, cp=cp, micro_batch=micro, global_batch=batch, schedule=schedule, virtual=virtual,
            recompute=recompute, sequence_parallel=self.text("sequence_parallel").lower() in ("y", "yes", "true"),
            optimizer=self.optimizer(config.dtype, level, stack),
        )  # fmt: skip
        chunks, layers = first.num_chunks, config.num_layers
        if layers % chunks and (layers + 2) % chunks == 0:
            each = (layers + 2) // chunks
            counts = [each] * chunks
            counts[0] -= 1
            counts[-1] -= 1
            self.assumed.append("first and last chunk hold one layer fewer")
            return Degrees(
                **{name: getattr(first, name) for name in first.__dataclass_fields__} | {"layers": tuple(counts)}
            )
        return first

    def schedule(self, pp: int, layers: int) -> tuple[str, int]:
        text = self.text("schedule").lower()
        virtual = 1
        if (vpp := self.text("vpp").lower()).startswith("max"):
            virtual = -(-layers // pp)
        elif vpp:
            virtual = self.count("vpp")
        if pp == 1:
            return "1f1b", 1
        plain = re.sub(r"[^a-z0-9]+", "", text) or "1f1b"
        if not text:
            self.assumed.append("schedule not stated: 1F1B")
        name = _SCHEDULES.get(plain, plain)
        if virtual > 1 and name == "1f1b":
            name = "interleaved_1f1b"
        return name, virtual

    def optimizer(self, dtype: str, level: int, stack: str) -> Optimizer:
        """Adam; in mixed precision with float32 master weights, except where everything is said to be in one dtype."""
        settings = {"lr": 1e-4}
        per_step = "step"
        megatron = stack in ("megatron", "megatron-2022", "zero-bubble")  # fp16 gradients stay in their buffers
        if "torchtitan" in stack:  # without accumulation FSDP2 keeps shards of gradients only
            per_step = "micro_batch"
        mixed = not stack.startswith("torch") or "torchtitan" in self.text("source").lower()
        if mixed and dtype != "float32":
            self.assumed.append("mixed precision: float32 master weights, states and reductions")
            return Optimizer(
                kind="adamw", settings=settings, parallel_level=level, reduce_every=per_step,
                gradient_dtype="float16" if megatron and dtype == "float16" else "float32", master_dtype="float32",
            )  # fmt: skip
        return Optimizer(kind="adamw", settings=settings, parallel_level=level, reduce_every=per_step)
