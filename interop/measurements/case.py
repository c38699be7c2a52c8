"""A row of a table as a configuration that can be predicted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from interop.measurements.devices import Network
from plans.degrees import Degrees
from plans.model.transformer import TransformerConfig

__all__ = ["Beyond", "Case", "products_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """Facts of a run that `Degrees` and the name of its software do not state.

    Args:
        most_nodes: largest number of nodes that hold a token's experts; the token is sent once to each of them. 0: it
            is sent to each expert.
        shards: data-parallel ranks that share the weights in hybrid sharding; 0: all of them.
        expert_ranks: ranks that share the experts; under context parallelism, or with whole experts, more than
            `Degrees.ep` can be.
        whole_experts: whether tensor parallelism splits no expert.
        dispatches_float8: whether tokens are sent to experts in 8 bits (they come back in 16).
        zero_plus: parts of ZeRO++ that are on, of `zero_plus.PARTS`.
        offloaded: what is in the memory of the host, as of `offload.parts_in`.
        reserved: whether its memory is what the allocator reserved, not what was allocated; None: as its software logs.
    """

    most_nodes: int = 0
    shards: int = 0
    expert_ranks: int = 1
    whole_experts: bool = False
    dispatches_float8: bool = False
    zero_plus: tuple[str, ...] = ()
    offloaded: tuple[str, ...] = ()
    reserved: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of a table: the measured values, and the configuration that was measured.

    Args:
        config, degrees: the model and its layout.
        machine: the name of a catalogued machine.
        network: the row's text about links between nodes.
        stack: the name of a software stack.
        metric, value: what was measured.
        counts_recompute: whether a rate counts the operations of recomputation as work.
        assumed: assumptions about facts that the row does not state, in words.
        borrows: whether the software is predicted as another one.
        peak: the products, as of `Compute.matrix_flops_per_s`, whose peak a share of the peak is of.
        group: rows whose predictions are compared with each other.
        row: its number in the table, from 1, the header not counted.
        source: of the row.
        labels: cells that distinguish rows.
        other_stacks: that the row's words may mean as well.
        beyond: what else the row states.
    """

    config: TransformerConfig
    degrees: Degrees
    machine: str
    network: Network
    stack: str
    metric: str
    value: float
    counts_recompute: bool
    assumed: tuple[str, ...]
    group: tuple[str, ...]
    row: int
    source: str
    labels: Mapping[str, str] = field(default_factory=dict)
    other_stacks: tuple[str, ...] = ()
    peak: str = ""
    borrows: bool = False
    beyond: Beyond = Beyond()

    @property
    def machine_of_one(self) -> str:
        """The name of a machine with one such device."""
        return f"{self.machine.rpartition('-x')[0]}-x1"


def products_of(stack: str) -> str:
    """The products of a stack's blocks, as of `Compute.matrix_flops_per_s`; "" where they are those of the dtype.

    >>> products_of("megatron-mxfp8"), products_of("torch-compile-tf32"), products_of("megatron")
    ('float8', 'tf32', '')
    """
    found = re.search(r"float8|mxfp8|nvfp4|tf32", stack)
    return {"mxfp8": "float8", "nvfp4": "float4"}.get(found.group(), found.group()) if found else ""
