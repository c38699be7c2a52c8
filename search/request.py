"""The arguments of a search, checked before searching: devices, stages, widths, micro-batches, pins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.graph import Graph
from plans.plan import Strategy, slices_refused
from plans.schedules import chunks_per_rank, schedule_names

__all__ = ["check_asked", "check_devices", "check_graph", "check_schedule", "check_stages"]


def check_asked(*, method: str, top_k: int, time_limit_s: float | None, memory_limit_bytes: int | None) -> None:
    """Refuse an unknown method and limits below their least values; see `search` for the arguments.

    Raises:
        TwofoldError: with what may be given.
    """
    if method not in ("search", "operators"):
        raise TwofoldError(f"method={method!r} is not known; known are search, operators")
    if top_k < 1:
        raise TwofoldError(f"top_k must be at least 1, not {top_k}")
    if time_limit_s is not None and not time_limit_s > 0:
        raise TwofoldError(f"time_limit_s must be above 0, not {time_limit_s}")
    if memory_limit_bytes is not None and memory_limit_bytes < 1:
        raise TwofoldError(f"memory_limit_bytes must be at least 1, not {memory_limit_bytes}")


def check_devices(machine: Machine, num_devices: int) -> None:
    """Refuse numbers of devices that a machine does not have.

    Raises:
        TwofoldError: with a larger machine where there is one of the kind.
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int) or num_devices < 1:
        raise TwofoldError(f"num_devices must be a whole number of at least 1, not {num_devices!r}")
    if num_devices > machine.num_devices:
        node = machine.links[0].ranks if machine.links else 8
        larger = f"{machine.name.rpartition('-x')[0] or 'h100-sxm'}-x{-(-num_devices // node) * node}"
        raise TwofoldError(
            f"{num_devices} devices requested, but machine {machine.name!r} has {machine.num_devices}; use a larger "
            "one, "
            f"such as {larger}"
        )
    if num_devices > 1 and not machine.links:
        raise TwofoldError(f"machine {machine.name!r} has no links; {num_devices} devices need links")


def check_stages(
    graph: Graph,
    num_devices: int,
    *,
    num_stages: int | None,
    stages: Sequence[Sequence[str]] | None,
    widths: str | Sequence[int] | None,
) -> None:
    """Refuse stages that a graph or the devices cannot have; see `search` for the arguments.

    Raises:
        TwofoldError: stages without operators or devices, unknown operators, widths that do not fit.
    """
    if num_stages is not None and not 1 <= num_stages <= num_devices:
        raise TwofoldError(f"{num_stages} pipeline stages on {num_devices} devices: each stage needs at least one")
    if stages is not None and num_stages is not None and len(stages) != num_stages:
        raise TwofoldError(f"operators are given for {len(stages)} stages, but there are {num_stages}")
    if stages is not None and (bare := [number for number, stage in enumerate(stages) if not len(stage)]):
        raise TwofoldError(f"stage {bare[0]} has no operators: give it some, or use fewer stages")
    known = {operator.name for operator in graph.operators}
    for number, stage in enumerate(stages or ()):
        if absent := [name for name in stage if name not in known]:
            raise TwofoldError(f"stage {number} lists the operator {absent[0]!r}, which is not in the graph")
    _check_widths(widths, num_stages if stages is None else len(stages), num_devices)
    if num_stages is not None and num_stages > len(graph.operators):
        count = len(graph.operators)
        raise TwofoldError(f"{num_stages} stages need {num_stages} operators, there are {count}; use fewer stages")


def check_graph(
    graph: Graph, *, num_micro_batches: int | None, interleave: int, pinned: Mapping[str, Strategy]
) -> None:
    """Refuse tensors without elements, batches that do not divide, and pins of unknown operators; see `search`.

    Raises:
        TwofoldError: with the arithmetic.
    """
    if empty := [tensor for tensor in graph.tensors.values() if 0 in tensor.shape]:
        raise TwofoldError(
            f"tensor {empty[0].name!r} has the shape {empty[0].shape}: tensors of size 0 are not supported"
        )
    if num_micro_batches is not None:
        _check_batch(graph, num_micro_batches, interleave)
    else:
        _check_interleave(interleave)
    if unknown := set(pinned) - {operator.name for operator in graph.operators}:
        raise TwofoldError(f"strategies are pinned for {sorted(unknown)}, which the graph does not have")


def _check_widths(widths: str | Sequence[int] | None, num_stages: int | None, num_devices: int) -> None:
    if widths is None or widths == "any":
        return
    if isinstance(widths, str):
        if widths != "even":
            raise TwofoldError(f"widths={widths!r}: give numbers of devices per stage, 'even' or 'any'")
        if num_stages is not None and num_devices % num_stages:
            raise TwofoldError(
                f"{num_stages} pipeline stages do not divide {num_devices} devices evenly: "
                f"{num_devices} % {num_stages} != 0; take widths='any'"
            )
        return
    if num_stages is not None and len(widths) != num_stages:
        raise TwofoldError(f"widths {list(widths)} list {len(widths)} stages, but there are {num_stages}")
    if min(widths, default=0) < 1 or sum(widths) > num_devices:
        raise TwofoldError(
            f"widths {list(widths)}: every stage needs at least one device, and the widths must add up to {num_devices}"
        )


def _check_batch(graph: Graph, num_micro_batches: int, interleave: int) -> None:
    if num_micro_batches < 1 or graph.batch_size % num_micro_batches:
        raise TwofoldError(
            f"{num_micro_batches} micro-batches do not divide the batch of {graph.batch_size}: "
            f"{graph.batch_size} % {num_micro_batches} != 0"
        )
    _check_interleave(interleave)
    if sentence := slices_refused(graph.batch_size // num_micro_batches, interleave):
        raise TwofoldError(sentence)


def _check_interleave(interleave: int) -> None:
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise TwofoldError(f"interleave must be a number of slices, an int of at least 1, not {interleave!r}")


def check_schedule(name: str | None) -> None:
    """Check the schedule that was given to a search operator by operator.

    Raises:
        TwofoldError: a schedule that puts several chunks on a rank.
    """
    chunks = None if name is None else chunks_per_rank(name)
    if chunks is not None and chunks > 1:
        others = ", ".join(other for other in schedule_names() if chunks_per_rank(other) == 1)
        raise TwofoldError(
            f"schedule {name!r} puts {chunks} chunks on every rank, which a search operator by operator cannot start "
            f"from. Leave the schedule out, and all of them are tried; or give one of {others}."
        )
