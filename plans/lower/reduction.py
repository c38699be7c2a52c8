"""Reduces gradients bucket by bucket, as soon as the last gradient of a bucket is complete.

* Levels 0 and 1, and gradients that are not sharded: once per step, issued in the last backward, waited for at its end.
* Levels 2 and 3 with `reduce_every` "micro_batch": after each backward, and the shards are accumulated. With "step":
  once, in the last backward, whose full gradients are freed after they are reduced. At most two reductions are in
  flight: when one has been issued, the previous one is waited for; the last is waited for at the end of the body.

A gradient that is equal on all ranks along some of its shard axes is not summed along those: each rank packs its own
part of it. Packing also casts to the dtype in which gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plans.lower.buckets import Bucket
from plans.lower.emit import Emitter, ValueTable
from plans.lower.gathering import collective, wait
from plans.program import Scope, Value

__all__ = ["Reduced", "Reduction"]


@dataclass(slots=True, eq=False)
class Reduced:
    """The reduced gradient of a bucket, which may still be in flight.

    Args:
        bucket: of parameters.
        value: the gradient itself, a shard of it, or the flat buffer of all.
        token: token that the end of the step waits for, or None.
        frees: values that this WAIT frees.
        is_flat: whether `value` is a row of the bucket's matrix; otherwise it is a single reduced gradient, which the
            update frees.
    """

    bucket: Bucket
    value: str
    token: str | None = None
    frees: tuple[str, ...] = ()
    is_flat: bool = True


@dataclass(slots=True)
class Reduction:
    """The reductions of one backward body.

    Args:
        buckets: parameter -> its bucket, of those that are reduced in the bodies of the chunk.
        table: the values of the group.
        found: parameter -> where the end of the step finds its gradient; filled in here.
        is_last: whether it is the last backward of the chunk.
    """

    buckets: Mapping[str, Bucket]
    table: ValueTable
    found: dict[str, Reduced]
    is_last: bool
    whole: dict[str, str] = field(default_factory=dict)
    under_way: list[Reduced] = field(default_factory=list)

    def add(self, emitter: Emitter, name: str, value: str) -> None:
        """Record that the gradient of parameter `name` is complete in `value`."""
        self.whole[name] = value
        bucket = self.buckets.get(name)
        if bucket is None or not (bucket.first.reduced_per_micro_batch or self.is_last):
            return
        if all(name in self.whole for name in bucket.names):
            self.start(emitter, bucket, self.whole)

    def start(self, emitter: Emitter, bucket: Bucket, values: Mapping[str, str]) -> None:
        """Reduce a bucket; its gradients are in `values`."""
        reduced = self._issue(emitter, bucket, [values[name] for name in bucket.names])
        before, self.under_way = self.under_way, []
        if bucket.first.optimizer.parallel_level >= 2 and bucket.first.axes:
            self.under_way.append(reduced)
        self._settle(emitter, before)
        self.found.update(dict.fromkeys(bucket.names, reduced))

    def finish(self, emitter: Emitter) -> None:
        """Wait for the last reduction of the body."""
        self._settle(emitter, self.under_way)
        self.under_way = []

    def _settle(self, emitter: Emitter, reductions: Sequence[Reduced]) -> None:
        """Wait for sharded gradients, and accumulate them if each body produces some."""
        for reduced in reductions:
            if reduced.token is not None:
                wait(emitter, reduced.value, reduced.token, reduced.frees)
                reduced.token = None
            bucket = reduced.bucket
            if bucket.first.reduced_per_micro_batch:
                like, dtype = self.table[reduced.value], bucket.first.tensor.dtype
                total = self.table.add(
                    Value(
                        name=f"g:{bucket.name}#shard", shape=like.shape, scope=Scope.STEP, role="gradient",
                        dtype=bucket.first.optimizer.accumulates_in(dtype),
                    )
                )  # fmt: skip
                emitter.compute(f"{total}.accumulate", "accumulate", "W", (reduced.value,), (total,))
                reduced.value = total

    def _issue(self, emitter: Emitter, bucket: Bucket, values: list[str]) -> Reduced:
        table, first = self.table, bucket.first
        mesh, summed, is_plain = first.mesh, first.summed, first.optimizer.parallel_level < 2
        scope = Scope.BODY if first.reduced_per_micro_batch else Scope.STEP
        rows = mesh.size(summed) if first.axes else 1
        dtype = table[values[0]].dtype
        if mesh.size(summed) > 1:
            dtype = first.optimizer.reduces_in(first.tensor.dtype)
        packed = not bucket.is_single or table[values[0]].dtype != dtype or (bool(first.same) and not is_plain)
        source, frees = values[0], _of_step(table, values)
        if packed:
            source = table.add(
                Value(
                    name=f"g:{bucket.name}#flat", shape=(rows * sum(bucket.sizes),), dtype=dtype, scope=scope,
                    role="buffer" if mesh.size(summed) > 1 and first.axes else "gradient",
                )
            )  # fmt: skip
            emitter.compute(
                f"{source}.pack", "flat_pack", "U", tuple(values), (source,), mesh=mesh, frees=frees,
                attrs={"rows": rows, "sizes": bucket.sizes, "axes": first.same},
            )  # fmt: skip
            frees = _of_step(table, [source])
        if mesh.size(summed) == 1:
            return Reduced(bucket=bucket, value=source)
        if not first.axes:
            result, call, frees = source, "all_reduce", ()
        else:
            size = sum(bucket.sizes) * (1 if packed else mesh.size(first.same))
            result, call = f"g:{bucket.name}#sum", "reduce_scatter_flat"
            table.add(Value(name=result, shape=(size,), dtype=dtype, scope=scope, role="gradient"))
        line = collective(emitter, call, source, result, (mesh, summed), scope)
        emitter.pending.pop(result)  # waited for here or at the end of the step, not by a reader
        if is_plain and not packed:
            return Reduced(bucket=bucket, value=result, token=line.token, is_flat=False)
        return Reduced(bucket=bucket, value=result, token=line.token, frees=frees, is_flat=packed or bool(first.axes))


def _of_step(table: ValueTable, names: Sequence[str]) -> tuple[str, ...]:
    """Values that liveness does not free."""
    return tuple(name for name in names if table[name].scope is Scope.STEP)
