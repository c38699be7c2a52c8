"""The grid of attention to measure: heads, grouped heads, sequences, head dims, causal or not, forward and backward."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.kernels import gradient
from executor.calibrate.operands import Job, OperandPool, bytes_of
from executor.calibrate.timing import Call
from executor.kernels.fused_attention import attend, attend_backward

__all__ = ["attention_job", "attention_jobs"]

_ATTENTION = (  # (batch, heads, kv heads, sequence, head dim)
    (1, 32, 32, 2048, 128),
    (1, 8, 8, 2048, 128),
    (4, 32, 32, 2048, 128),
    (2, 16, 16, 2048, 64),
    (8, 12, 12, 1024, 64),
    (1, 32, 8, 8192, 128),
    (1, 16, 16, 512, 64),
    (4, 16, 16, 512, 128),
    (1, 32, 32, 4096, 128),
    (2, 32, 8, 4096, 128),
    (1, 4, 1, 8192, 128),
    (16, 16, 16, 1024, 128),
    (4, 40, 40, 2048, 128),
    (1, 64, 8, 2048, 128),
    (1, 2, 2, 16384, 128),
    (8, 4, 4, 2048, 128),
)
_SPLIT = (  # (batch, heads, kv heads, rows, keys, head dim): the last rows of a causal sequence
    (1, 32, 32, 2048, 4096, 128),
    (2, 16, 16, 1024, 2048, 128),
    (1, 40, 8, 4096, 8192, 128),
    (1, 12, 4, 4096, 8192, 128),
    (1, 32, 8, 1024, 4096, 128),
    (4, 16, 16, 1024, 2048, 64),
)
_HELD_OUT = 24


def attention_jobs(*, seed: int = 20_28) -> list[Job]:
    """Scaled-dot-product attention, forward and gradients of queries, keys and values; held-out ones by `seed`."""
    rng, jobs = random.Random(seed), []
    for number in range(_HELD_OUT):
        heads = rng.choice((2, 4, 6, 8, 12, 16, 20, 24, 32, 48))
        kv_heads = rng.choice([ways for ways in (1, 2, 4, 8, heads, heads) if heads % ways == 0])
        sequence = 128 * round(2 ** rng.uniform(2, 6))
        batch = max(1, rng.randint(1, 16) * 2048 // sequence)
        shape = (batch, heads, kv_heads, sequence, rng.choice((64, 128)))
        causal = rng.random() < 0.75
        parts = ("forward", "backward")
        jobs += [attention_job(part, shape, causal, tier=number % 3, held_out=True) for part in parts]
    for number, shape in enumerate(_ATTENTION):
        for part, causal in itertools.product(("forward", "backward"), (True, False)):
            jobs.append(attention_job(part, shape, causal, tier=(0 if number < 5 else 1) + (not causal)))
    jobs += [split_job(part, shape) for shape in _SPLIT for part in ("forward", "backward")]
    first: dict[Any, Job] = {}
    for job in jobs:
        first.setdefault(job.point.key, job)
    return list(first.values())


def attention_job(
    part: str, shape: tuple[int, int, int, int, int], causal: bool, *, tier: int, held_out: bool = False
) -> Job:
    """One part of attention; `shape` is (batch, heads, kv heads, sequence, head dim)."""
    batch, heads, kv_heads, sequence, dim = shape
    point = Point(
        kind="attention", call=f"sdpa_{part}", shape=(batch, heads, kv_heads, sequence, sequence, dim),
        dtype="bfloat16", options={"causal": int(causal)}, held_out=held_out, seconds=0.0,
    )  # fmt: skip
    queries, keys = (batch, heads, sequence, dim), (batch, kv_heads, sequence, dim)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads != heads)

    def one(pool: OperandPool) -> Call:
        # as projections leave them: [batch, sequence, heads, dim] seen with the heads before the sequence
        operands = [
            pool.tensor(size[0], size[2], size[1], size[3]).transpose(1, 2) for size in (queries, keys, keys)
        ]  # fmt: skip
        if part == "forward":
            return lambda: attend(*operands)
        return gradient(attend, operands, pool.tensor(*queries))

    size = bytes_of("bfloat16", queries, queries, keys, keys)

    def make(pool: OperandPool) -> list[Call]:
        return [one(pool) for _ in pool.sets(size)]

    work = 4.0 * math.prod(queries) * sequence * (2.5 if part == "backward" else 1.0) / (2 if causal else 1)
    return Job(point=point, make=make, tier=tier, work=work, needs_bytes=4 * size)


def split_job(part: str, shape: tuple[int, int, int, int, int, int]) -> Job:
    """One part of causal attention of the last rows of a sequence, by the kernels of twofold's executor."""
    batch, heads, kv_heads, rows, keys, dim = shape
    point = Point(
        kind="attention", call=f"sdpa_{part}", shape=shape, dtype="bfloat16", options={"causal": 1}, seconds=0.0
    )
    queries, columns = (batch, rows, heads, dim), (batch, keys, kv_heads, dim)

    def one(pool: OperandPool) -> Call:
        q, k, v, g = (pool.tensor(*size).transpose(1, 2) for size in (queries, columns, columns, queries))
        if part == "forward":
            return lambda: attend(q, k, v, keys - rows, None)
        out, sums = attend(q, k, v, keys - rows, None)
        return lambda: attend_backward(g, q, k, v, out, sums, first=keys - rows, scale=None)

    size = bytes_of("bfloat16", queries, queries, columns, columns)
    work = 4.0 * math.prod(queries) * (keys - rows / 2) * (2.5 if part == "backward" else 1.0)
    return Job(
        point=point, make=lambda pool: [one(pool) for _ in pool.sets(size)], tier=0, work=work, needs_bytes=4 * size
    )
