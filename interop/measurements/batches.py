"""The batch of a row: in sequences or tokens, of the job, a replica or a device."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from interop.measurements.cells import MOST_SEQUENCES, REMARK
from interop.measurements.models import UNNAMED_SEQ, usual_seq
from interop.measurements.numbers import number

__all__ = ["BadCell", "count_of", "fill", "product_of", "with_batch"]


class BadCell(Exception):
    """A cell that cannot be read.

    Args:
        column: of the row.
        value: the cell.
        reason: why.
    """

    def __init__(self, column: str, value: str, reason: str) -> None:
        super().__init__(reason)
        self.column, self.value = column, value


def fill(row: dict[str, str], cells: Mapping[str, str]) -> None:
    """Set the cells of a row that are blank."""
    for column, cell in cells.items():
        if not row.get(column):
            row[column] = cell


def count_of(column: str, text: str) -> int:
    """The whole number of a cell.

    Raises:
        BadCell: it has none.
    """
    found = number(re.sub(r"[a-z ]+$|(?<=\d) *\([a-z][^()\d]*\)$", "", text.lower()))
    if found is None or found != int(found) or found < 1:
        raise BadCell(column, text, f"{column} is {text!r}, not a whole number from 1")
    return int(found)


def product_of(row: Mapping[str, str], names: Sequence[str]) -> int:
    """The product of columns; a blank one counts as 1."""
    return math.prod(count_of(name, row[name]) if row.get(name) else 1 for name in names)


_BATCH = re.compile(r"(train[ _]?)?(batch|bsz?|b)([ _]?size)?")
"""Headers that may mean the batch or the micro-batch."""


def with_batch(row: dict[str, str], headers: Mapping[str, str]) -> None:
    """Write the batch in sequences: converted if given in tokens, computed from accumulation if blank."""
    _batch_of_lengths(row)
    _micro_batch_of_tokens(row, headers.get("micro_batch", "").lower())
    header, accumulation = headers.get("global_batch", "").lower(), row.pop("accumulation", "")
    of_replica = row.pop("replica_batch", "")
    if of_replica and not row.get("global_batch") and (ways := _replicas(row)):
        row["global_batch"] = str(ways * count_of("replica_batch", of_replica))
    elif _is_of_each(row, header, accumulation):
        row["micro_batch"] = row.pop("global_batch")
    text = row.get("global_batch", "")
    if kilo := re.fullmatch(r"(\d+(?:\.\d+)?) ?k", text.strip(), re.I):
        if not re.search(r"tok|\(t\)", header) and (size := float(kilo[1]) * 1024).is_integer():
            text = row["global_batch"] = f"{size:.0f}"  # "0.5K" sequences
    if text and (re.search(r"tok|\(t\)", header + text.lower()) or (number(text) or 0) >= MOST_SEQUENCES):
        if not row.get("seq"):
            row["seq"] = str(usual_seq(row.get("model", "")) or UNNAMED_SEQ)
            row[REMARK] = f"sequence not stated: {row['seq']}"
        row["global_batch"] = str(_sequences(text, header, row["seq"]))
    if accumulation:
        _accumulate(row, accumulation)


def _is_of_each(row: Mapping[str, str], header: str, accumulation: str) -> bool:
    """Whether a batch with an ambiguous header ("batch size") is a micro-batch.

    It is if a number of micro-batches is given, or if it has fewer sequences than there are replicas.
    """
    text = row.get("global_batch", "")
    if not text or row.get("micro_batch") or (header and not _BATCH.fullmatch(header)):
        return False
    ways = 0 if accumulation else _replicas(row)
    return bool(accumulation) or (number(text) or ways) < ways


def _micro_batch_of_tokens(row: dict[str, str], header: str) -> None:
    micro = row.get("micro_batch", "")
    if micro and "tok" in header + micro.lower() and row.get("seq"):
        row["micro_batch"] = str(_sequences(micro, header, row["seq"]))


def _accumulate(row: dict[str, str], accumulation: str) -> None:
    """Complete the batch, or the micro-batch, from the number of micro-batches of a replica."""
    ways, steps = _replicas(row), count_of("accumulation", accumulation)
    if ways and steps % ways == 0 and "nanogpt" in row.get("source", "").lower():
        steps //= ways
        row[REMARK] = "nanoGPT's accumulation steps are those of all devices (its train.py divides them)"
    batch, micro = row.get("global_batch", ""), row.get("micro_batch", "")
    local = count_of("micro_batch", micro) if micro else 0
    if (
        "torchtitan" in row.get("source", "").lower()
        and product_of(row, ("pp",)) > 1
        and local % steps == 0 < ways * local
    ):
        batch, micro = str(ways * local), str(local // steps)  # its local batch is cut for the pipeline
        row |= {"global_batch": batch, "micro_batch": micro}
    if ways and micro and not batch:
        row["global_batch"] = str(steps * count_of("micro_batch", micro) * ways)
    elif ways and batch and not micro and count_of("global_batch", batch) % (ways * steps) == 0:
        row["micro_batch"] = str(count_of("global_batch", batch) // (ways * steps))
    elif not batch:
        row["accumulation"] = accumulation


def _sequences(text: str, header: str, length: str) -> int:
    """The sequences of a batch in tokens.

    Raises:
        BadCell: no number of tokens, or an unknown length of a sequence.
    """
    seq = number(length)
    if seq is None and (kilo := re.fullmatch(r"(\d+) ?k", length.lower())):
        seq = 1024.0 * int(kilo.group(1))
    tokens = number(re.sub(r"[ -]*tok\w*$", "", text.lower()))
    if tokens is None or not seq:
        raise BadCell("global_batch", text, f"global_batch is {text!r} tokens, and seq is {length!r}")
    unit = re.search(r"\b(m(?:illions?)?|k)\b", header) if "tok" in header else None
    scale = 1.0 if unit is None else 1e3 if unit.group() == "k" else 1e6
    return max(1, round(_binary(tokens * scale, _thousands(seq)) / _thousands(seq)))


_EACH = r"(?:per|/|each) ?-?(?:gpu|device|npu|card|accelerator)"
_NAMED = re.compile(r"\b(gbs|mbs)[ =:]*(\d+)", re.I)
_LENGTHS = re.compile(r"(\d+) ?(?:seqs?|sequences|samples)? ?[x\u00d7*] ?(\d[\d,]*k?) ?(?:tokens|toks?)?(.*)", re.I)
"""Sequences and their length: "8 seqs x 2048 tokens per GPU"."""


def _batch_of_lengths(row: dict[str, str]) -> None:
    """Split a batch that states the length of its sequences, or its micro-batch as "512/1" or "512 (1/GPU)"; one "per
    GPU" is a micro-batch."""
    text = row.get("global_batch", "")
    if factors := re.fullmatch(
        r"(\d+) ?[x\u00d7*] ?(\d+) ?[x\u00d7*] ?(\d+)", text.strip()
    ):  # of a device, steps, devices
        row["global_batch"] = text = str(math.prod(map(int, factors.groups())))
        fill(row, {"micro_batch": factors[1]})
    if lengths := re.fullmatch(r"[\d.]+ ?[kmb]? ?tok\w* ?\((\d+) ?[x\u00d7*] ?(\d+k?)\)", text.strip(), re.I):
        row["global_batch"] = text = lengths[1]  # "4M tokens (512 x 8192)"
        fill(row, {"seq": lengths[2]})
    if each := re.fullmatch(rf"(?:(\d+) ?\(|)(\d+) ?(?:seqs?|sequences|samples)? ?{_EACH}\)?", text, re.I):
        fill(row, {"micro_batch": each.group(2)})
        row["global_batch"] = each.group(1) or ""
    elif named := dict(_NAMED.findall(text)):
        row["global_batch"] = next((size for name, size in named.items() if name.lower() == "gbs"), "")
        fill(row, {"micro_batch": next((size for name, size in named.items() if name.lower() == "mbs"), "")})
    if both := re.fullmatch(r"(\d+) ?(?:/ ?(\d+)|\((\d+)\))", row.get("global_batch", "")):
        sizes = [int(size) for size in both.groups() if size]
        row["global_batch"] = str(max(sizes))
        fill(row, {"micro_batch": str(min(sizes))})
    if each := re.fullmatch(rf"(\d+) ?(?:seqs?|sequences|samples)? ?{_EACH}", row.get("micro_batch", ""), re.I):
        row["micro_batch"] = each.group(1)
    for column in ("global_batch", "micro_batch"):
        found = _LENGTHS.fullmatch(row.get(column, "").strip())
        if found is None or (number(found[2]) or 0) < _SHORTEST:
            continue
        fill(row, {"seq": found[2]})
        row[column] = found[1]
        if column == "global_batch" and re.search(_EACH, found[3], re.I):
            row.pop(column)
            fill(row, {"micro_batch": found[1]})


_SHORTEST = 128
"""Tokens of the shortest sequence that a batch may state."""


def _thousands(seq: float) -> float:
    """A sequence of "4k" is one of 4096."""
    return seq / 1000 * 1024 if seq % 1000 == 0 and seq / 1000 in (1, 2, 4, 8, 16, 32, 64, 128) else seq


_ROUNDED = 0.005
"""Largest relative error of a number of tokens with two or three digits."""


def _binary(tokens: float, seq: float) -> float:
    """Tokens of a batch: "4M" of sequences of 4096 are 4 x 2^20 and "16.8M" are 2^24, for a batch has whole sequences,
    and often a power of two."""
    power = 2.0 ** round(math.log2(max(1.0, tokens / seq)))
    if abs(tokens / seq / power - 1) < _ROUNDED or math.log2(max(1.0, tokens / 1e3)).is_integer():
        return power * seq
    for unit, binary in ((1e6, 2.0**20), (1e3, 1024.0)):
        if tokens % seq and tokens % (unit / 2) == 0 and tokens / unit * binary % seq == 0:
            return tokens / unit * binary
    return tokens


def _replicas(row: Mapping[str, str]) -> int:
    if row.get("dp"):
        return count_of("dp", row["dp"])
    split = product_of(row, ("tp", "pp", "cp"))
    return count_of("gpu_count", row["gpu_count"]) // split if row.get("gpu_count") else 0
