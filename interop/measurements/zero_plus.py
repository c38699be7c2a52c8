"""ZeRO++ in tables of measurements: DeepSpeed's level 3 with smaller messages (Wang et al. 2023, arXiv 2306.10209)."""

from __future__ import annotations

import dataclasses
import re

from plans.degrees import Degrees
from plans.model.graph import itemsize
from plans.model.transformer import TransformerConfig
from simulator.result import Forecast
from simulator.stacks import Stack

__all__ = ["PARTS", "parts_in", "with_copies", "with_parts"]

PARTS = ("qwz", "hpz", "qgz")
"""Weights gathered in 8 bits; a copy of the weights in every node, from which the backward gathers; gradients reduced
in 4 bits (zero_quantized_weights, zero_hpz_partition_size, zero_quantized_gradients in DeepSpeed's configuration)."""


def parts_in(words: str) -> tuple[str, ...]:
    """The parts of ZeRO++ that words name; all of them if they name it without its parts.

    >>> parts_in("3 (hpZ)"), parts_in("ZeRO++"), parts_in("ZeRO-3")
    (('hpz',), ('qwz', 'hpz', 'qgz'), ())
    """
    low = words.lower()
    own = tuple(part for part in PARTS if re.search(rf"\b{part}\b|{_SETTINGS[part]}", low))
    return own or (PARTS if re.search(r"zero ?(?:\+\+|pp\b|plus ?plus)", low) else ())


_SETTINGS = {"qwz": "quantized_weights", "hpz": "hpz_partition", "qgz": "quantized_gradients"}


def with_parts(stack: Stack, parts: tuple[str, ...]) -> Stack:
    """The stack with the messages of the parts: a byte for a weight, half a byte for a gradient.

    The time to quantise is not modelled.
    """
    return dataclasses.replace(
        stack, gathered_item_bytes=1.0 if "qwz" in parts else 0.0, gathers_in_node="hpz" in parts,
        reduced_item_bytes=0.5 if "qgz" in parts else 0.0,
    )  # fmt: skip


def with_copies(found: Forecast, config: TransformerConfig, degrees: Degrees, per_node: int) -> Forecast:
    """A forecast with the second copy of the weights, which the ranks of a node share."""
    copy_bytes = itemsize(config.dtype) * config.num_parameters // min(degrees.dp, per_node)
    memory = {**found.memory, "weight": found.memory.get("weight", 0) + copy_bytes}
    return dataclasses.replace(found, memory=memory, peak_bytes=found.peak_bytes + copy_bytes)
