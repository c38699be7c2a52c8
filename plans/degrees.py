"""How a model is spread, in the usual degrees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from plans.errors import TwofoldError
from plans.model.transformer.recompute import RECOMPUTE_MODES
from plans.plan import Optimizer
from plans.schedules import Schedule, make_schedule

__all__ = ["ORDER", "Degrees", "check_order", "check_recompute_layers"]

ORDER = ("tp", "cp", "dp", "pp")
"""Axes from the innermost, unless something else is said: tp, which communicates most, among the nearest."""

_ADAMW = Optimizer(kind="adamw", settings={"lr": 1e-4})


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """A parallel layout in degrees.

    Args:
        dp, tp, pp, cp: data-, tensor-, pipeline- and context-parallel degree.
        ep: how many of the data-parallel ranks share the experts out among themselves; neighbours in dp.
        micro_batch: sequences of one micro-batch on one data-parallel rank.
        global_batch: sequences of one step over all ranks.
        schedule: of the pipeline.
        virtual: chunks per pipeline rank.
        recompute: "none", "selective" (the attention core), "selective_op" (torchtitan's, by operator) or "full" (a
            block but its input).
        recompute_layers: that many blocks of every chunk, its first ones, recompute; the others keep everything. All
            blocks of the model recompute when absent.
        optimizer: its kind, sharding and dtypes.
        sequence_parallel: between the tensor-parallel products the sequence is split over tp.
        layers: per chunk of the pipeline, in the order of the model; spread evenly when absent.
        order: in which ranks count along the axes, the innermost first: the ranks of an inner axis are neighbours.

    Raises:
        TwofoldError: a degree below 1, a batch that does not divide, a schedule that cannot be, a number of blocks to
            recompute where nothing is recomputed, an order that is none of the four axes.

    >>> Degrees(dp=2, tp=4, pp=2, micro_batch=1, global_batch=16).num_micro_batches
    8
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch: int = 1
    global_batch: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    recompute: str = "none"
    recompute_layers: int | None = None
    optimizer: Optimizer = _ADAMW
    sequence_parallel: bool = False
    layers: tuple[int, ...] | None = None
    order: tuple[str, ...] = ORDER

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "global_batch", "virtual"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TwofoldError(f"{name} is {value!r}; it is a whole number of at least 1")
        if self.recompute not in RECOMPUTE_MODES:
            raise TwofoldError(f"recompute is {self.recompute!r}; it is one of {', '.join(RECOMPUTE_MODES)}")
        check_recompute_layers(self.recompute, self.recompute_layers)
        check_order(self.order)
        if self.dp % self.ep:
            raise TwofoldError(f"ep({self.ep}) must divide dp({self.dp}): experts are split over data-parallel ranks")
        per_step = self.dp * self.micro_batch
        if self.global_batch % per_step:
            raise TwofoldError(
                f"a global batch of {self.global_batch} does not divide by dp({self.dp}) * "
                f"micro_batch({self.micro_batch}) = {per_step}; the next that does is "
                f"{math.ceil(self.global_batch / per_step) * per_step}"
            )
        if self.layers is not None and (len(self.layers) != self.num_chunks or min(self.layers) < 0):
            raise TwofoldError(f"layers {self.layers} must give one count for each of the {self.num_chunks} chunks")

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def width(self) -> int:
        """Ranks of one pipeline rank's group."""
        return self.dp * self.tp * self.cp

    @cached_property
    def strides(self) -> tuple[int, int, int, int]:
        """Distance of neighbours along tp, cp, dp and pp.

        >>> Degrees(dp=2, tp=4, pp=2, global_batch=2, order=("tp", "cp", "pp", "dp")).strides
        (1, 4, 8, 4)
        """
        found, stride = {}, 1
        for axis in self.order:
            found[axis] = stride
            stride *= int(getattr(self, axis))
        return found["tp"], found["cp"], found["dp"], found["pp"]

    def stage_ranks(self, stage: int) -> list[int]:
        """The ranks of a pipeline rank: along dp, then cp, then tp, tp fastest."""
        tp, cp, dp, pp = self.strides
        return [
            stage * pp + copy * dp + part * cp + shard * tp
            for copy in range(self.dp) for part in range(self.cp) for shard in range(self.tp)
        ]  # fmt: skip

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @cached_property
    def pipeline(self) -> Schedule:
        """The schedule.

        Raises:
            TwofoldError: it cannot be made for these ranks, micro-batches and chunks.
        """
        given = None if self.virtual == 1 and self.schedule not in _ANY_CHUNKS else self.virtual
        return make_schedule(self.schedule, self.pp, self.num_micro_batches, virtual=given)

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole model."""
        return self.pipeline.num_stages

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Blocks of every chunk; the first chunks take what does not divide.

        Raises:
            TwofoldError: fewer layers than chunks, or given counts that do not add up.
        """
        if self.layers is not None:
            if sum(self.layers) != num_layers:
                raise TwofoldError(
                    f"layers {self.layers} add up to {sum(self.layers)}; the model has {num_layers} layers"
                )
            return self.layers
        count = self.num_chunks
        if num_layers < count:
            raise TwofoldError(f"{num_layers} layers cannot fill {count} chunks (pp = {self.pp} x {count // self.pp})")
        whole, rest = divmod(num_layers, count)
        return tuple(whole + (chunk < rest) for chunk in range(count))


def check_order(order: tuple[str, ...]) -> None:
    """Refuse what is no order of the axes."""
    if not isinstance(order, tuple) or sorted(map(str, order)) != sorted(ORDER):
        raise TwofoldError(
            f"order is {order!r}; it names each of {', '.join(ORDER)} once, the innermost first, such as {ORDER}"
        )


def check_recompute_layers(recompute: str | None, layers: int | None) -> None:
    """Refuse a number of blocks to recompute that says nothing."""
    if layers is None:
        return
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise TwofoldError(f"recompute_layers is {layers!r}; it is a whole number of at least 1")
    if recompute == "none":
        raise TwofoldError(
            f"recompute_layers {layers} says how many blocks of a chunk recompute, but recompute is none; give "
            "recompute full, say"
        )


_ANY_CHUNKS = ("interleaved_1f1b", "interleaved_zb", "looped_bfs")
