"""The peak memory of a program, computed before it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from plans.errors import TwofoldError
from plans.program import GroupProgram, Scope
from plans.timeline import MemoryPeak

__all__ = ["memory_peak"]


def memory_peak(group: GroupProgram, rank: int, limit_bytes: int | None = None) -> MemoryPeak:
    """The largest number of live bytes in a step, and the values that are live at that moment.

    A value counts from the start of the instruction that makes it to the end of the one that frees it; kept values
    always count; a value that shares another's memory costs nothing. Bytes of communication buffers are not in it.

    Raises:
        TwofoldError: more than `limit_bytes`; it names the first instruction that goes over.
    """
    kept = {value.name: value for value in group.values.values() if value.scope is Scope.KEPT}
    by_role: dict[str, int] = defaultdict(int)
    for value in kept.values():
        by_role[value.role] += value.size_bytes
    live: set[tuple[str, int | None]] = {(name, None) for name in kept}
    total = sum(by_role.values())
    peak, at_peak, where = total, dict(by_role), "the start"
    over = ""
    for block in group.blocks:
        for instruction in block.body.instructions:
            micro = instruction.attrs.get("micro_batch", block.micro_batch) if instruction.waits else block.micro_batch
            for name in instruction.outputs:
                value = group.values[name]
                key = (name, micro if value.scope is Scope.MICRO else None)
                if key not in live:
                    live.add(key)
                    by_role[value.role] += value.size_bytes
                    total += value.size_bytes
            if total > peak:
                peak, at_peak, where = total, dict(by_role), f"{block.label}/{instruction.name}"
                if limit_bytes is not None and peak > limit_bytes and not over:
                    over = where
            for name in instruction.frees:
                value = group.values[name]
                key = (name, micro if value.scope is Scope.MICRO else None)
                if key in live and value.scope is not Scope.KEPT:
                    live.remove(key)
                    by_role[value.role] -= value.size_bytes
                    total -= value.size_bytes
    if limit_bytes is not None and peak > limit_bytes:
        raise TwofoldError(
            f"rank {rank} goes over the memory limit of {limit_bytes} bytes at {over or 'the start'!r}; "
            f"the step needs {peak} bytes, at {where!r}: {_listed(at_peak)}"
        )
    return MemoryPeak(rank=rank, peak_bytes=peak, by_role={role: size for role, size in at_peak.items() if size})


def _listed(by_role: Mapping[str, int]) -> str:
    return ", ".join(f"{role} {size}" for role, size in sorted(by_role.items()) if size)
