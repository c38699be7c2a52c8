"""Rows of a table of measurements as configurations that can be predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping

from costmodels.machine.catalogue import load_device
from interop.measurements.case import Beyond, Case, products_of
from interop.measurements.cells import FROM_ABOVE, FROM_TITLE, REMARK, Skip
from interop.measurements.columns import COLUMNS
from interop.measurements.devices import UnknownDevice, device_named, linked_within_node, network_of
from interop.measurements.layout_cells import LayoutCells
from interop.measurements.model_cells import ModelCells
from interop.measurements.software import COMPOSER, borrows, counts_recompute, software_of
from plans.errors import TwofoldError

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
    return _Reading(row, number, stack).case()


class _Reading(ModelCells, LayoutCells):
    """All cells of a row."""

    def __init__(self, row: Mapping[str, str], number: int, stack: str | None) -> None:
        super().__init__(row)
        self.number = number
        self.given_stack = stack
        self.expert_ranks = 1
        self.has_whole_experts = False

    def case(self) -> Case:
        row = self.row
        metric, value, _ = self.measured()
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
        labels = {name: row.get(name, "") for name in COLUMNS if row.get(name)}
        beyond = Beyond(
            most_nodes=self.most_nodes(
                config, stack, self.expert_ranks * (1 if self.has_whole_experts else degrees.tp)
            ),
            expert_ranks=self.expert_ranks,
            whole_experts=self.has_whole_experts, dispatches_float8=self.dispatches_float8(stack),
            reserved={"reserved": True, "allocated": False}.get(self.text("memory")),
            shards=self.shards(degrees, network.devices_per_node or load_device(device).per_node),
        )  # fmt: skip
        group = tuple(
            row.get(name, "")
            for name in ("source", "model", "seq", "precision", "compile", "async_tp", "gpu_type", "gpu_count",
                         "global_batch", "metric")
        )  # fmt: skip
        return Case(
            config=config, degrees=degrees, machine=f"{device}-x{gpus}", network=network, stack=stack, metric=metric,
            value=value, counts_recompute=counts_recompute(self, metric, stack, degrees.recompute),
            assumed=tuple(dict.fromkeys(self.assumed)), group=group, row=self.number, source=self.text("source"),
            labels=labels, other_stacks=stacks[1:], peak=self.peak(metric, stack),
            borrows=not self.given_stack and borrows(self), beyond=beyond,
        )  # fmt: skip

    def peak(self, metric: str, stack: str) -> str:
        """The products whose peak an MFU refers to; "" for those of the block's dtype, as torchtitan and Megatron-LM
        count. Composer counts those of the precision (composer/callbacks/speed_monitor.py, GPU_AVAILABLE_FLOPS)."""
        narrow = products_of(stack)
        counts_narrow = narrow == "tf32" or self.text("peak") or re.search(COMPOSER, self.words("source"))
        return narrow if metric == "mfu_percent" and counts_narrow else ""
