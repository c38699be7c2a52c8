"""Rows of a table of measurements as configurations that can be predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from costmodels.machine.catalogue import load_device
from interop.measurements.case import Beyond, Case, products_of
from interop.measurements.cells import FIGURE, FROM_ABOVE, FROM_TITLE, PARTS, READ_AS, REMARK, Cells, Skip
from interop.measurements.columns import COLUMNS
from interop.measurements.devices import Network, UnknownDevice, device_named, linked_within_node, network_of
from interop.measurements.layout_cells import LayoutCells
from interop.measurements.model_cells import ModelCells
from interop.measurements.software import COMPOSER, borrows, counts_recompute, software_of
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import TransformerConfig

__all__ = ["case_of"]


def case_of(row: Mapping[str, str], number: int, stack: str | None = None) -> Case:
    """The configuration of a row.

    Args:
        row: column -> text; absent columns count as blank.
        number: number of the row.
        stack: the software that ran it; found from the row when None.

    Raises:
        Skip: the row cannot be predicted. The message has the reason.
    """
    metric, value, _ = Cells(row).measured()
    setting = _setting(tuple(item for item in row.items() if item[0] not in _OF_FIGURES), stack)
    reading = _Reading(row, stack)
    if (kind := _OTHER_OPTIMIZERS.search(reading.words("notes"))) is not None:
        if metric.startswith("peak_memory"):
            raise Skip(f"its optimizer is {kind.group()!r}, whose memory is not modelled: AdamW's is", "notes")
        reading.assumed.append(f"optimizer {kind.group()} priced as AdamW")
    counts = counts_recompute(reading, metric, setting.stack, setting.degrees.recompute)
    group = tuple(
        row.get(name, "")
        for name in ("source", "model", "seq", "precision", "compile", "async_tp", "gpu_type", "gpu_count",
                     "global_batch", "metric")
    )  # fmt: skip
    return Case(
        config=setting.config, degrees=setting.degrees, machine=setting.machine, network=setting.network,
        stack=setting.stack, metric=metric, value=value, counts_recompute=counts,
        assumed=tuple(dict.fromkeys((*setting.assumed, *reading.assumed))), group=group, row=number,
        source=reading.text("source"), labels={name: row.get(name, "") for name in COLUMNS if row.get(name)},
        other_stacks=setting.stacks[1:], peak=reading.peak(metric, setting.stack), borrows=setting.borrows,
        beyond=setting.beyond,
    )  # fmt: skip


_OTHER_OPTIMIZERS = re.compile(
    r"\b(?:adafactor|adagrad|lion|muon|sgd|sophia|shampoo|soap|galore|adam[- ]?mini|8-?bit[- ](?:adam|optim|paged)\w*"
    r"|(?:paged[_ -])?adam\w*[_ -]8-?bit)\b"
)
"""Optimizers with other states than AdamW's."""

_OF_FIGURES = ("metric", "value", FIGURE, READ_AS, PARTS)
"""Cells in which the rows of a configuration's figures differ."""


class _Setting(NamedTuple):
    """Values that the rows of all figures of a configuration share."""

    config: TransformerConfig
    degrees: Degrees
    machine: str
    network: Network
    stack: str
    stacks: tuple[str, ...]
    borrows: bool
    beyond: Beyond
    assumed: tuple[str, ...]


@lru_cache(maxsize=4096)
def _setting(cells: tuple[tuple[str, str], ...], stack: str | None) -> _Setting:
    return _Reading(dict(cells), stack).setting()


class _Reading(ModelCells, LayoutCells):
    """All cells of a row."""

    def __init__(self, row: Mapping[str, str], stack: str | None) -> None:
        super().__init__(row)
        self.given_stack = stack
        self.expert_ranks = 1
        self.has_whole_experts = False

    def setting(self) -> _Setting:
        """The configuration without the figure.

        Raises:
            Skip: see `case_of`.
        """
        if self.switch("layout_complete") is False:
            raise Skip("its parallel layout is not stated (layout_complete n)", "layout_complete")
        self.check_task()
        try:
            if not self.text("gpu_type"):
                raise Skip("gpu_type is not stated", "gpu_type")
            device, more = device_named(self.text("gpu_type"))
        except UnknownDevice as error:
            raise Skip(str(error), "gpu_type") from None
        self.assumed += more
        if columns := self.row.get(FROM_TITLE):
            cells_text = ", ".join(f"{column} {self.text(column)!r}" for column in columns.split(", "))
            self.assumed.append(f"from the table's title: {cells_text}")
        if columns := self.row.get(FROM_ABOVE):
            self.assumed.append(f"from the row above: {columns}")
        if remark := self.row.get(REMARK):
            self.assumed.append(remark)
        dtype = self.dtype(device)
        try:
            stacks = (self.given_stack,) if self.given_stack else software_of(self, device)
            stack = self.text("stack") or stacks[0]
            config = self.config(dtype, stack)
            degrees = self.degrees(config, stack)
        except TwofoldError as error:
            raise Skip(str(error)) from None
        gpus = self.count("gpu_count", degrees.num_ranks)
        interconnect, notes = self.text("interconnect"), self.text("notes")
        try:
            if gpus > 1:
                device = linked_within_node(device, self.text("gpu_type"), interconnect, notes)
            network = network_of(interconnect, notes, 4 if device == "gh200" else 8)
        except UnknownDevice as error:
            raise Skip(str(error), "interconnect") from None
        beyond = Beyond(
            most_nodes=self.most_nodes(
                config, stack, self.expert_ranks * (1 if self.has_whole_experts else degrees.tp)
            ),
            expert_ranks=self.expert_ranks,
            whole_experts=self.has_whole_experts, dispatches_float8=self.dispatches_float8(stack),
            reserved={"reserved": True, "allocated": False}.get(self.text("memory")),
            zero_plus=self.zero_plus(degrees),
            offloaded=self.offloaded(degrees),
            shards=self.shards(degrees, network.devices_per_node or load_device(device).per_node),
        )  # fmt: skip
        return _Setting(
            config=config, degrees=degrees, machine=f"{device}-x{gpus}", network=network, stack=stack,
            stacks=tuple(stacks), borrows=not self.given_stack and borrows(self), beyond=beyond,
            assumed=tuple(self.assumed),
        )  # fmt: skip

    def peak(self, metric: str, stack: str) -> str:
        """The products whose peak an MFU refers to; "" for those of the block's dtype, as torchtitan and Megatron-LM
        count. Composer counts those of the precision (composer/callbacks/speed_monitor.py, GPU_AVAILABLE_FLOPS)."""
        narrow = products_of(stack)
        counts_narrow = narrow == "tf32" or self.text("peak") or re.search(COMPOSER, self.words("source"))
        return narrow if metric == "mfu_percent" and counts_narrow else ""
