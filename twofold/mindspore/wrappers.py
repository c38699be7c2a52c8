"""Wrappers that set how a network trains in parallel, with MindSpore's names.

They only carry settings; `Model.train` plans, lowers and runs the wrapped network. Loss and gradients are the **mean**
over micro-batches, while MindSpore sums them. With the mean, the learning rate does not depend on the number of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plans.errors import TwofoldError
from plans.schedules import schedule_names
from plans.units import parse_bytes
from twofold.mindspore.context import (
    ParallelMode,
    ParallelSettings,
    check_choice,
    get_auto_parallel_context,
    positive,
)

__all__ = ["AutoParallel", "MicroBatchInterleaved", "Pipeline", "PipelineCell", "Wrapped", "unwrap"]


class Pipeline:
    """A network (with its loss) that trains in micro-batches on pipeline stages.

    Args:
        network: a module whose forward takes a batch and returns the loss, such as `WithLossCell(net, loss_fn)`.
        micro_size: number of micro-batches.
        stage_config: stage by submodule name, e.g. {"_backbone.layer1": 0}; other operators follow their inputs.

    Raises:
        TwofoldError: a micro_size below 1; names of stages are checked when training starts.

    >>> from torch import nn
    >>> Pipeline(nn.Linear(4, 1), micro_size=4).micro_size
    4
    """

    def __init__(self, network: Any, micro_size: int, stage_config: Mapping[str, int] | None = None) -> None:
        self.network = network
        self.micro_size = positive("micro_size", micro_size)
        self.stage_config = dict(stage_config or {})
        inner = network.network if isinstance(network, MicroBatchInterleaved) else network
        if hasattr(inner, "named_modules"):
            known = [name for name, _ in inner.named_modules() if name]
            if unknown := [name for name in self.stage_config if name not in known]:
                raise TwofoldError(
                    f"stage_config names {', '.join(map(repr, unknown))}, which is not a submodule of "
                    f"{type(inner).__name__}; its submodules are {', '.join(known)}"
                )


class MicroBatchInterleaved:
    """A network (with its loss) that computes each (micro-)batch in overlapping slices.

    While one slice communicates (for example in a tensor-parallel all-reduce), the others compute, in forward and
    backward. It helps if operators are split so that they communicate; simulate to see how much. Loss and gradients are
    the mean over slices.

    Args:
        network: a module whose forward takes a batch and returns the loss, such as `WithLossCell(net, loss_fn)`.
        interleave_num: number of slices of a batch (of a micro-batch in a `Pipeline`), cut along dim 0.

    Raises:
        TwofoldError: an interleave_num below 1.

    >>> from torch import nn
    >>> MicroBatchInterleaved(nn.Linear(4, 1), interleave_num=2).interleave_num
    2
    """

    def __init__(self, network: Any, interleave_num: int = 2) -> None:
        self.network = network
        self.interleave_num = positive("interleave_num", interleave_num)


class PipelineCell(Pipeline):
    """The older form of `Pipeline`: submodules have the attribute `pipeline_stage`.

    Args:
        network: as for `Pipeline`.
        micro_size: as for `Pipeline`.

    >>> from torch import nn
    >>> PipelineCell(nn.Linear(4, 1), micro_size=4).micro_size
    4
    """

    def __init__(self, network: Any, micro_size: int) -> None:
        super().__init__(network, micro_size)


class AutoParallel:
    """A network whose operators are split by the search.

    Args:
        network: a module that returns its loss, or a `Pipeline` or `MicroBatchInterleaved` of one.
        parallel_mode: "recursive_programming": the search decides on every operator. "semi_auto": strategies given by
            `shard` are kept, and the search decides on the other operators.

    Raises:
        TwofoldError: an unknown mode.

    >>> net = AutoParallel(Pipeline(None, 4), parallel_mode="recursive_programming")
    >>> net.hsdp()
    >>> net.pipeline(stages=2, scheduler="1f1b")
    >>> net.full_batch = True
    >>> net.settings.num_stages, net.settings.optimizer_level, net.settings.full_batch
    (2, 1, True)
    """

    def __init__(self, network: Any, parallel_mode: str = "recursive_programming") -> None:
        check_choice("parallel_mode", parallel_mode, (ParallelMode.RECURSIVE_PROGRAMMING, ParallelMode.SEMI_AUTO))
        self.network = network
        self.settings = replace(get_auto_parallel_context(), parallel_mode=parallel_mode)

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """Shard the optimizer over the data-parallel group.

        Args:
            shard_size: -1, the full group.
            threshold: KiB; smaller parameters are not sharded.
            optimizer_level: "level1": optimizer state and weights between steps; "level2": gradients too; "level3":
                weights between uses too (docs/optimizer-parallel.md).

        Raises:
            TwofoldError: another shard size or level, a negative threshold.
        """
        if shard_size != -1:
            raise TwofoldError(f"hsdp(shard_size={shard_size!r}): only -1, the full data-parallel group, is supported")
        check_choice("hsdp(optimizer_level=)", optimizer_level, ("level1", "level2", "level3"))
        if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
            raise TwofoldError(f"hsdp: threshold must be a number of KiB of at least 0, not {threshold!r}")
        self._set(optimizer_level=int(optimizer_level[-1]), threshold_bytes=threshold * 1024)

    def pipeline(self, stages: int = 1, output_broadcast: bool = False, scheduler: str = "1f1b") -> None:
        """Split the network into pipeline stages.

        Args:
            stages: number of stages.
            output_broadcast: whether every stage gets the loss, or only the last.
            scheduler: name of a schedule, such as "1f1b" or "gpipe".

        Raises:
            TwofoldError: stages below 1, an unknown scheduler.
        """
        check_choice("scheduler", scheduler, tuple(schedule_names()))
        self._set(
            num_stages=positive("pipeline(stages=)", stages),
            output_broadcast=bool(output_broadcast),
            schedule=scheduler,
        )

    def dataset_strategy(self, config: str) -> None:
        """The batch that each rank reads: "full_batch" (all of it) or "data_parallel" (its part)."""
        self.full_batch = check_choice("dataset_strategy", config, ("full_batch", "data_parallel")) == "full_batch"

    def set_memory(self, max_size: str | int) -> None:
        """Limit the device memory that search and run may use."""
        self._set(memory_limit_bytes=parse_bytes(max_size, "set_memory(max_size=)"))

    @property
    def full_batch(self) -> bool:
        """Whether every rank reads the full batch (True) or its part (False)."""
        return self.settings.full_batch

    @full_batch.setter
    def full_batch(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise TwofoldError(f"full_batch must be True or False, not {value!r}")
        self._set(full_batch=value)

    def _set(self, **changes: Any) -> None:
        self.settings = replace(self.settings, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    """The module inside a stack of wrappers, and the settings of all wrappers."""

    module: Any
    settings: ParallelSettings
    num_micro_batches: int = 1
    interleave: int = 1
    stage_config: Mapping[str, int] = field(default_factory=dict)


def unwrap(network: Any) -> Wrapped:
    """Remove the wrappers.

    Raises:
        TwofoldError: the network has no parallel wrapper.
    """
    settings = None
    if isinstance(network, AutoParallel):
        settings, network = network.settings, network.network
    num_micro_batches, interleave, stage_config = 1, 1, {}
    if isinstance(network, Pipeline):
        num_micro_batches, stage_config, network = network.micro_size, network.stage_config, network.network
    if isinstance(network, MicroBatchInterleaved):
        interleave, network = network.interleave_num, network.network
    if isinstance(network, AutoParallel | Pipeline | MicroBatchInterleaved):
        raise TwofoldError(
            f"{type(network).__name__} is inside another wrapper; the order is AutoParallel(Pipeline("
            "MicroBatchInterleaved(network))), each at most once"
        )
    if settings is None:
        settings = get_auto_parallel_context()
        if not settings.parallel_mode:
            raise TwofoldError(
                "the network is not parallel: wrap it as AutoParallel(network, parallel_mode='recursive_programming'), "
                "or call set_auto_parallel_context(parallel_mode='auto_parallel', ...) first"
            )
    return Wrapped(
        module=network, settings=settings, num_micro_batches=num_micro_batches, interleave=interleave,
        stage_config=stage_config,
    )  # fmt: skip
