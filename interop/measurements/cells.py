"""The cells of one row of a table, in their common spellings."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from interop.measurements.headers import METRICS
from interop.measurements.numbers import number
from interop.measurements.offload import is_modelled
from interop.measurements.precisions import BLACKWELL, HOPPER, Precision, has_products, precision_named
from interop.measurements.spellings import compile_named, is_offloaded, switch_named

__all__ = [
    "BAD_COLUMN", "BAD_REASON", "BAD_VALUE", "FIGURE", "FROM_ABOVE", "FROM_TITLE", "MOST_SEQUENCES", "OFFLOAD_COLUMNS",
    "OUT_OF_MEMORY", "OWN_RUNS", "PARTS", "READ_AS", "REMARK", "ROW", "ZERO_BUBBLE", "Cells", "Skip",
]  # fmt: skip

_OFTEN_FLOAT8 = r"nemo\b|megatron-?bridge|transformer ?engine"
"""Software whose published runs are as often in float8 as in bf16 on devices that have it."""

_BLANK = ("", "-", "--", "\u2013", "\u2014", "n/a", "na", "nan", "unknown", "not stated", "?")

ZERO_BUBBLE = "2401.10241"
"""Qi et al. 2024; its experiments ran examples/pretrain_zero_bubble.sh of sail-sg/zero-bubble-pipeline-parallelism:
--fp16, no --use-flash-attn, no recomputation, no distributed optimizer."""

OFFLOAD_COLUMNS = ("task", "notes", "model", "zero_level", "recompute", "source")
"""Columns whose words may say that something is offloaded."""

_SEQUENCES = "seqs?|sequences|samples"
OWN_RUNS = "measured/readme"
"""Words of notes of our own runs, which refer to a description of their model."""

_COUNTED = {
    "layers": "layers?|blocks", "heads": "heads", "seq": "tokens?|tok", "global_batch": _SEQUENCES,
    "micro_batch": rf"{_SEQUENCES}|(?:per|/) ?(?:gpu|device|npu|card|rank|chip)",
    "gpu_count": r"(?:gpus?|devices?|npus?|chips?|cards?|dies|gcds|[ah]\d00s?|[卡张])",
    "tp": "way", "pp": "way|stages", "dp": "way", "cp": "way", "ep": "way", "vpp": "chunks",
}  # fmt: skip
"""Column -> words that may are behind its number."""

_REMARK = re.compile(r"(?<=\d) *\([a-z][^()\d]*\)$")
"""Words behind a number: "8 (fsdp)"."""

MOST_SEQUENCES = 2**18
"""No batch of a real run has more sequences."""

_MOST = 2**21
"""No other count of a real model or cluster is larger."""


_LEAST_VALUE, _MOST_VALUE = 1e-6, 1e9
"""No step, rate or peak of a real run is beyond them, in the units of the metrics."""


BAD_COLUMN, BAD_VALUE, BAD_REASON = "bad column", "bad value", "bad reason"
"""Keys of a row with a cell that could not be read: the column, its content, and the reason."""

OUT_OF_MEMORY = "ran out of memory"
"""Key of a row of a run that needed more memory than its device has; its content is the cell that states it."""

ROW, FIGURE = "row of the table", "figures of the row"
"""Keys of a row: its number in the table, and its own figure among all of that table row."""

FROM_TITLE, FROM_ABOVE = "columns from a title", "columns from the row above"
"""Keys of a row: the columns whose cells come from a title, and those that repeat the row above."""

REMARK = "remark of the reader"
"""Key of a row: an assumption that was made while its cells were split."""

READ_AS, PARTS = "read as", "devices of the rate"
"""Keys of a row: how an ambiguous figure was read, and the number of devices that a rate was divided by ("" if its
header states that the rate is of all devices)."""


class Skip(Exception):
    """A row that cannot be predicted.

    Args:
        reason: why.
        column: whose cell is at fault, where one is.
    """

    def __init__(self, reason: str, column: str = "") -> None:
        super().__init__(reason)
        self.column = column


class Cells:
    """One row, read cell by cell.

    Args:
        row: column -> text; absent columns count as blank.
    """

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.assumed: list[str] = []

    def text(self, name: str) -> str:
        found = (self.row.get(name) or "").strip()
        return "" if found.lower() in _BLANK else found

    def plain(self, name: str) -> str:
        """A cell's letters and digits only."""
        return re.sub(r"[^a-z0-9]+", "", self.text(name).lower())

    def words(self, *names: str) -> str:
        return " ".join(self.text(name) for name in names).lower()

    def switch(self, name: str) -> bool | None:
        text = self.text(name)
        found = switch_named(re.sub(r" *\([^()]*\)$", "", text))
        if found is None and name == "compile":
            found = compile_named(text)
        if text and found is None:
            raise Skip(f"{name} is {text!r}, not y or n", name)
        return found

    def measured(self) -> tuple[str, float, tuple[str, ...]]:
        """The metric, the value in its unit, and the assumptions that were made.

        Raises:
            Skip: a cell of the row could not be read, the metric is unknown, or it has no value.
        """
        if BAD_REASON in self.row:
            raise Skip(self.row[BAD_REASON], self.row[BAD_COLUMN])
        metric = {name.lower(): name for name in METRICS}.get(self.text("metric").lower(), "")
        if not metric:
            raise Skip(f"metric must be one of {', '.join(METRICS)}, not {self.text('metric')!r}", "metric")
        text = (self.row.get("value") or "").strip()
        value = number(text)
        if value is None or value <= 0:
            raise Skip(f"value {text!r} is not a positive number", "value")
        if not _LEAST_VALUE <= value <= _MOST_VALUE:
            raise Skip(f"value {text!r} is not plausible for {metric}", "value")
        assumed = (self.row[READ_AS],) if READ_AS in self.row else ()
        if metric == "mfu_percent":
            if 0.02 <= value < 1:
                return metric, 100 * value, (*assumed, f"mfu {value:g} is a share: {100 * value:g} %")
            if not 1 <= value <= 100:
                raise Skip(f"value {text!r} is not a percentage of the peak", "value")
        return metric, value, assumed

    def count(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        text = self.text(name)
        if not text:
            if default is None:
                raise Skip(f"{name} is not stated", name)
            return default
        plain = _REMARK.sub("", text.lower()) or text.lower()
        plain = re.sub(rf"(?<=\d)[ -]?(?:{_COUNTED.get(name, '$.')})$", "", plain)
        binary = re.fullmatch(r"(\d+) ?([km])", plain) if name == "seq" else None
        found = int(binary.group(1)) * (1024.0 if binary.group(2) == "k" else 2.0**20) if binary else number(plain)
        if found is None:
            raise Skip(f"{name} is {text!r}, not a whole number", name)
        most = MOST_SEQUENCES if name == "global_batch" else _MOST
        if not math.isfinite(found) or found != int(found) or not least <= found <= most:
            raise Skip(f"{name} is {text!r}, not a whole number from {least} to {most:,}", name)
        return int(found)

    def check_task(self) -> None:
        words = self.words("task", "notes", "model", "source")
        task = self.words("task", "notes")
        if match := re.search(r"\b(rlhf|rlaif|ppo|grpo|dpo|reinforce\w*|reward model\w*|distillation)\b", task):
            raise Skip(f"its task has {match.group()!r}, which runs more than one model's training step")
        words = re.sub(r"\b(?:no|not|without|w/o|non)[- ](?:q?lora|peft|freez\w*|frozen)\b", "", words)
        if match := re.search(r"\b(q?lora|peft|freez\w*|frozen|inference|decode|prefill|generation|serving)\b", words):
            raise Skip(f"its task has {match.group()!r}; only pre-training of all weights is modelled")
        for column in OFFLOAD_COLUMNS:
            if (said := is_offloaded(self.text(column))) and not is_modelled(self.words(*OFFLOAD_COLUMNS)):
                raise Skip(f"its {column} mentions {said!r}, which is modelled for DeepSpeed's states and weights "
                           "in the memory of the host only", column)  # fmt: skip

    def precision(self) -> Precision:
        """The precision column; empty if it is blank.

        Raises:
            Skip: an unknown precision.
        """
        text = self.text("precision")
        found = precision_named(text) if text else Precision()
        noted = self._narrow_in_notes()
        if noted and (found is None or not found.products):
            text, found = noted, precision_named(noted)
            self.assumed.append(f"precision of the notes: {noted}")
        if found is None:
            raise Skip(
                f"precision {text.lower()!r} is not modelled; modelled are bf16, fp16, fp32, TF32, FP8, MXFP8, NVFP4",
                "precision",
            )
        return found

    def _narrow_in_notes(self) -> str:
        """The precision of 8 or 4 bits that the notes name, with its scaling; "" where there is none."""
        words = self.words("notes")
        match = re.search(r"\b(mxfp\w*|nvfp\w*|fp8|float8|fp4|int8)\b(?:[ -]*(?:row|block|tensor)\w*)?", words)
        excluded = r"\b(no|not|without|w/o|instead of|vs\.?|than|disabled)[ a-z]{0,12}$"
        return "" if match is None or re.search(excluded, words[: match.start()]) else match.group()

    def products(self, device: str) -> tuple[str, ...]:
        """The precisions of a block's products that a row may mean, the most plausible first; none: the block's own.

        Raises:
            Skip: the device does not support it.
        """
        found = self.precision().products
        if len(found) > 1 and device.startswith(BLACKWELL):  # Transformer Engine's default there
            found = ("mxfp8", "float8-current")
        if any(not has_products(device, name) for name in found):
            raise Skip(f"precision {self.text('precision').lower()!r}: {device} has no such products", "precision")
        if found and found[0] != "tf32":
            self.assumed.append(f"{found[0]}: the products of the blocks' linears, everything else in bf16")
        return found

    def may_be_float8(self, device: str) -> bool:
        """Whether a row that states no precision may well have run in float8."""
        has_it = device.startswith((*HOPPER, *BLACKWELL)) and not self.text("precision")
        return has_it and bool(re.search(_OFTEN_FLOAT8, self.words("source", "notes")))

    def dtype(self, device: str) -> str:
        """The dtype of activations.

        Raises:
            Skip: one that is not modelled, or that the device does not have.
        """
        found = self.precision()
        if self.products(device):
            return found.dtype
        if found.dtype == "bfloat16" and not has_products(device, "bfloat16"):
            raise Skip(f"precision bf16: {device} has no bf16 products", "precision")
        if found.dtype:
            return found.dtype
        if ZERO_BUBBLE in self.words("source"):
            self.assumed.append("precision not stated: fp16, the default of the repository's script")
            return "float16"
        half = "bfloat16" if has_products(device, "bfloat16") else "float16"
        short = "bf16" if half == "bfloat16" else "fp16"
        stated = f"precision {self.text('precision')!r}" if self.text("precision") else "precision not stated"
        self.assumed.append(f"{stated}: {short}")
        return half
