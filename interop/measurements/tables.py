"""Tables of measurements as people publish them: columns of many names, one metric a row or several."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from interop.measurements.cells import METRICS
from plans.errors import TwofoldError

__all__ = ["COLUMNS", "column_named", "read_table"]

COLUMNS = (
    "source", "provenance", "task", "model", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq",
    "global_batch", "micro_batch", "tp", "pp", "dp", "vpp", "cp", "ep", "schedule", "sequence_parallel", "recompute",
    "zero_level", "gpu_type", "gpu_count", "interconnect", "precision", "compile", "async_tp", "metric", "value",
    "layout_complete", "notes",
)  # fmt: skip

_NEEDED = ("model", "gpu_type", "gpu_count")

_NAMES: Mapping[str, tuple[str, ...]] = {
    "source": ("software", "framework", "stack", "library", "system", "reference"),
    "model": ("modelname", "modelsize", "network"),
    "layers": ("numlayers", "nlayers", "l", "numhiddenlayers"),
    "hidden": ("hiddensize", "dmodel", "h", "width", "modeldim", "embeddim"),
    "heads": ("attentionheads", "numheads", "nheads", "numattentionheads", "a"),
    "kv_heads": ("numkvheads", "kvheads", "numquerygroups", "numkeyvalueheads"),
    "ffn": ("ffnhiddensize", "intermediatesize", "dff", "ffnsize", "mlpsize"),
    "vocab": ("vocabsize", "vocabulary", "v"),
    "seq": ("seqlen", "sequencelength", "seqlength", "sequence", "contextlength", "context", "maxseqlen", "s"),
    "global_batch": ("gbs", "globalbatchsize", "batchsize", "totalbatchsize", "batch"),
    "micro_batch": ("mbs", "microbatchsize", "ubs", "microbs", "devicebatchsize", "localbatchsize",
                    "perdevicebatchsize"),
    "tp": ("tensorparallel", "tensormodelparallelsize", "tensorparallelism", "tpsize", "t", "tensorparallelsize"),
    "pp": ("pipelineparallel", "pipelinemodelparallelsize", "pipelineparallelism", "ppsize", "p",
           "pipelineparallelsize"),
    "dp": ("dataparallel", "dataparallelsize", "dataparallelism", "dpsize", "d"),
    "vpp": ("vp", "virtualstages", "virtualpipeline", "interleavedchunks", "vppsize", "modelchunks"),
    "cp": ("contextparallel", "contextparallelsize", "cpsize"),
    "ep": ("expertparallel", "expertparallelsize", "expertmodelparallelsize", "epsize"),
    "schedule": ("pipelineschedule", "ppschedule"),
    "sequence_parallel": ("sp", "seqparallel", "sequenceparallelism"),
    "recompute": ("activationcheckpointing", "activationcheckpoint", "activationrecomputation", "checkpointing", "ac",
                  "recomputation", "activationrecompute", "gradientcheckpointing", "actckpt"),
    "zero_level": ("zero", "zerostage", "sharding", "shardingstrategy", "optimizersharding", "fsdp", "zerolevel",
                   "distributedoptimizer"),
    "gpu_type": ("gpu", "device", "accelerator", "hardware", "gputype", "chip", "npu", "devicetype", "gpumodel"),
    "gpu_count": ("gpus", "numgpus", "ngpus", "devices", "numdevices", "worldsize", "nodesxgpus", "numnpus", "npus"),
    "interconnect": ("network", "links", "fabric", "internodeinterconnect"),
    "precision": ("dtype", "datatype", "mixedprecision"),
    "compile": ("torchcompile", "compiled"),
    "async_tp": ("asynctp", "asynctensorparallel"),
    "notes": ("comment", "comments", "remarks", "note"),
}  # fmt: skip
"""Column -> other names of it, letters and digits only."""

_METRIC_NAMES: tuple[tuple[str, str, float], ...] = (
    (r"(iteration|step)time(s|sec|seconds|insec|insecs)?|s(ec)?/?(per)?(iteration|step)|secondsper(iteration|step)",
     "iteration_time_s", 1.0),
    (r"(iteration|step)time(ms|inms|milliseconds)|msper(iteration|step)", "iteration_time_s", 1e-3),
    (r"(tokens|tok)(/|per)?s(ec|econd)?(/|per)?(gpu|device|chip|npu)|tgs|tps(/|per)?(gpu|device)|wps(/|per)?gpu",
     "tokens_per_s_per_gpu", 1.0),
    (r"(samples|sequences|seqs?)(/|per)?s(ec|econd)?(/|per)?(gpu|device|chip|npu)", "samples_per_s_per_gpu", 1.0),
    (r"(model)?tflop(/?s)?(/s|ps)?(/|per)?s?(ec)?(/|per)?(gpu|device|chip|npu)", "tflops_per_gpu", 1.0),
    (r"mfu(percent|%)?|modelflops?utili[sz]ation(%)?", "mfu_percent", 1.0),
    (r"(peak|max)?(gpu|device)?mem(ory)?(usage)?(gib)|peakmemorygib", "peak_memory_GiB", 1.0),
    (r"(peak|max)?(gpu|device)?mem(ory)?(usage)?(gb)|peakmemorygb", "peak_memory_GB", 1.0),
)  # fmt: skip
"""Header of a column of figures -> its metric, and what a figure is multiplied by."""


def column_named(header: str) -> str:
    """The column that a header means; "" where none is known.

    >>> column_named("Global Batch Size"), column_named("#GPUs"), column_named("tensor-model-parallel-size")
    ('global_batch', 'gpu_count', 'tp')
    """
    low = header.strip().lower()
    if low in COLUMNS:
        return low
    plain = re.sub(r"[^a-z0-9]+", "", low)
    for column, names in _NAMES.items():
        if plain == column.replace("_", "") or plain in names:
            return column
    return ""


def read_table(path: str | os.PathLike[str]) -> list[dict[str, str]]:
    """The rows of a CSV table, by the names of `COLUMNS`.

    A table without the columns "metric" and "value" may have a column for each metric, as "TFLOP/s/GPU" or "MFU":
    every figure of it becomes a row.

    Raises:
        TwofoldError: no such file, no rows, or columns missing.
    """
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TwofoldError(f"cannot read the table {name!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TwofoldError(f"cannot read the table {name!r}: it is no text") from None
    reader = csv.DictReader(text.splitlines())
    try:
        headers = [header for header in reader.fieldnames or () if header is not None]
        found = [{header: (cell or "").strip() for header, cell in row.items() if header in headers} for row in reader]
    except csv.Error as error:
        raise TwofoldError(f"cannot read the table {name!r}: line {reader.line_num}: {error}") from None
    columns = _columns(headers, name)
    figures = [] if "metric" in columns.values() else _figures(headers)
    missing = [each for each in _NEEDED if each not in columns.values()]
    missing += [each for each in ("metric", "value") if each not in columns.values() and not figures]
    if missing:
        raise TwofoldError(f"table {name!r} has no column {', '.join(missing)}; see `twofold validate --help`")
    rows = [{columns[header]: cell for header, cell in row.items() if header in columns} for row in found]
    if figures:
        rows = [made for row, cells in zip(rows, found, strict=True) for made in _a_row_each(row, cells, figures)]
    if not rows:
        raise TwofoldError(f"table {name!r} has no rows")
    return rows


def _columns(headers: Sequence[str], table: str) -> dict[str, str]:
    """Header -> column. A header that names a column itself wins over another name of that column."""
    exact = {header for header in headers if header.strip().lower() in COLUMNS}
    columns: dict[str, str] = {}
    for header in headers:
        column = column_named(header)
        if not column or (header not in exact and column in {each.strip().lower() for each in exact}):
            continue
        if column in columns.values():
            first = next(each for each, own in columns.items() if own == column)
            raise TwofoldError(
                f"table {table!r} has two columns for {column}: {first!r} and {header!r}; leave one of them out"
            )
        columns[header] = column
    return columns


def _figures(headers: Sequence[str]) -> list[tuple[str, str, float]]:
    """Header, metric and factor of every column of figures."""
    found = []
    for header in headers:
        plain = re.sub(r"[^a-z0-9/%]+", "", header.lower())
        for pattern, metric, factor in _METRIC_NAMES:
            if header in METRICS or re.fullmatch(pattern, plain):
                found.append((header, header if header in METRICS else metric, 1.0 if header in METRICS else factor))
                break
    return found


def _a_row_each(
    row: Mapping[str, str], cells: Mapping[str, str], figures: Sequence[tuple[str, str, float]]
) -> Iterator[dict[str, str]]:
    for header, metric, factor in figures:
        text = cells.get(header, "").replace(",", "").removesuffix("%").strip()
        if not text or text.lower() in ("-", "--", "n/a", "na", "oom", "out of memory"):
            continue
        try:
            value = repr(float(text) * factor) if factor != 1.0 else text
        except ValueError:
            value = text  # the row says that it is no number
        yield {**row, "metric": metric, "value": value}
