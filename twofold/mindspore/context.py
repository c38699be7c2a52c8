"""Settings of a script, with MindSpore's names.

`set_auto_parallel_context` is the older form of `AutoParallel`; both result in `ParallelSettings`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from enum import StrEnum

from plans.errors import TwofoldError
from plans.schedules import schedule_names
from plans.units import parse_bytes

__all__ = [
    "ParallelMode",
    "ParallelSettings",
    "check_choice",
    "get_auto_parallel_context",
    "reset_auto_parallel_context",
    "set_auto_parallel_context",
    "set_memory",
]


class ParallelMode(StrEnum):
    """Whether the search or `shard` decides how operators are split.

    >>> ParallelMode.SEMI_AUTO_PARALLEL == "semi_auto_parallel"
    True
    """

    AUTO_PARALLEL = "auto_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    SEMI_AUTO = "semi_auto"
    RECURSIVE_PROGRAMMING = "recursive_programming"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSettings:
    """The parallel settings of a script.

    Args:
        parallel_mode: "recursive_programming": the search decides; "semi_auto": strategies given by `shard` are kept.
        num_stages: pipeline stages.
        schedule: pipeline schedule.
        output_broadcast: whether every stage gets the loss.
        optimizer_level: how far the optimizer is sharded, 0 to 3 (docs/optimizer-parallel.md).
        threshold_bytes: parameters smaller than this are not sharded.
        full_batch: whether every rank reads the full batch (True) or its part (False).
        memory_limit_bytes: memory limit per device, or None.
    """

    parallel_mode: str = ""
    num_stages: int = 1
    schedule: str = "1f1b"
    output_broadcast: bool = False
    optimizer_level: int = 0
    threshold_bytes: int = 64 * 1024
    full_batch: bool = False
    memory_limit_bytes: int | None = None


@dataclass(slots=True)
class _Current:
    settings: ParallelSettings = field(default_factory=ParallelSettings)


_current = _Current()


def set_memory(max_size: str | int) -> None:
    """Limit the device memory that search and run may use, such as "25GB" (decimal) or "16GiB".

    Raises:
        TwofoldError: not a size.

    >>> set_memory("25GB")  # doctest: +SKIP
    """
    _current.settings = replace(_current.settings, memory_limit_bytes=parse_bytes(max_size, "set_memory(max_size=)"))


def set_auto_parallel_context(
    *,
    parallel_mode: str | None = None,
    search_mode: str | None = None,
    pipeline_stages: int | None = None,
    enable_parallel_optimizer: bool | None = None,
    parallel_optimizer_config: Mapping[str, int] | None = None,
    full_batch: bool | None = None,
    pipeline_config: Mapping[str, str] | None = None,
    device_num: int | None = None,
) -> None:
    """Change settings (older form). Settings whose arguments are not given keep their values.

    Args:
        parallel_mode: "auto_parallel" (`ParallelMode.AUTO_PARALLEL`), or "semi_auto_parallel": strategies given by
            `shard` are kept, the search decides the rest.
        search_mode: "recursive_programming".
        pipeline_stages: number of stages.
        enable_parallel_optimizer: sharded optimizer state and master weights.
        parallel_optimizer_config: {"parallel_optimizer_threshold": KB}.
        full_batch: whether every rank reads the full batch.
        pipeline_config: {"pipeline_scheduler": name of a schedule}.
        device_num: checked against the number of ranks when training starts.

    Raises:
        TwofoldError: an unknown mode, schedule or key.

    >>> set_auto_parallel_context(parallel_mode="auto_parallel", pipeline_stages=2)  # doctest: +SKIP
    """
    changes: dict[str, object] = {}
    if parallel_mode is not None:
        known = (ParallelMode.AUTO_PARALLEL, ParallelMode.SEMI_AUTO_PARALLEL)
        semi_auto = check_choice("parallel_mode", parallel_mode, known) == ParallelMode.SEMI_AUTO_PARALLEL
        changes["parallel_mode"] = (ParallelMode.SEMI_AUTO if semi_auto else ParallelMode.RECURSIVE_PROGRAMMING).value
    if search_mode is not None:
        check_choice("search_mode", search_mode, (ParallelMode.RECURSIVE_PROGRAMMING,))
        if changes.get("parallel_mode", _current.settings.parallel_mode) == ParallelMode.SEMI_AUTO:
            raise TwofoldError(
                f"search_mode={search_mode!r} needs parallel_mode='auto_parallel'; in 'semi_auto_parallel' the search "
                "fills in what shard does not set"
            )
        changes["parallel_mode"] = ParallelMode.RECURSIVE_PROGRAMMING.value
    if pipeline_stages is not None:
        changes["num_stages"] = positive("pipeline_stages", pipeline_stages)
    if enable_parallel_optimizer is not None:
        changes["optimizer_level"] = int(bool(enable_parallel_optimizer))
    for key, kib in (parallel_optimizer_config or {}).items():
        check_choice("parallel_optimizer_config", key, ("parallel_optimizer_threshold",))
        changes["threshold_bytes"] = int(kib) * 1024
    if full_batch is not None:
        changes["full_batch"] = bool(full_batch)
    for key, name in (pipeline_config or {}).items():
        check_choice("pipeline_config", key, ("pipeline_scheduler",))
        changes["schedule"] = check_choice("pipeline_scheduler", name, schedule_names())
    if device_num is not None and (present := os.environ.get("WORLD_SIZE")) not in (None, str(device_num)):
        raise TwofoldError(
            f"device_num={device_num}, but the job was started with {present} ranks; start it with {device_num}"
        )
    _current.settings = replace(_current.settings, **changes)  # type: ignore[arg-type]


def get_auto_parallel_context() -> ParallelSettings:
    """The current settings."""
    return _current.settings


def reset_auto_parallel_context() -> None:
    """Reset all settings, including the memory limit, to the defaults."""
    _current.settings = ParallelSettings()


def check_choice(what: str, given: object, known: tuple[str, ...]) -> str:
    """Return `given` if it is one of `known`.

    Raises:
        TwofoldError: it is not; the message lists the choices.
    """
    names = [str(name) for name in known]
    if str(given) not in names:
        close = get_close_matches(str(given), names, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise TwofoldError(f"{what} {given!r} is not known{hint}; choose from {', '.join(names)}")
    return str(given)


def positive(what: str, given: object) -> int:
    """Return `given` if it is an int of at least 1.

    Raises:
        TwofoldError: it is not.
    """
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise TwofoldError(f"{what} must be an int of at least 1, not {given!r}")
    return given
