"""The grid of memory-bound kernels to measure: forward and gradients of the operators of transformers.

`size_bytes` is the least traffic of a kernel: each input read once and each output written once. Gradients are taken by
autograd of the single operator, so the measured kernels are those of a training step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from costmodels.fit.points import Point
from executor.calibrate.operands import DTYPES, Job, OperandPool, bytes_of
from executor.calibrate.timing import Call

__all__ = ["gradient", "kernel_jobs"]

_ELEMENTS = (2**12, 2**16, 2**20, 2**22, 2**24, 2**26, 2**28)
_ROWS = ((512, 1024), (2048, 4096), (8192, 768), (8192, 4096), (16384, 8192), (32768, 2048))  # (rows, features)
_LOGITS = ((512, 32000), (2048, 32000), (8192, 32000), (4096, 50257), (2048, 128256))
_TABLES = ((2048, 32000, 4096), (8192, 32000, 4096), (8192, 50257, 2048), (8192, 128256, 8192))
_TURNED = ((2048, 8, 128), (2048, 32, 128), (8192, 32, 128), (4096, 64, 128), (32768, 16, 128), (16384, 16, 64))
"""Shape of queries or keys: (tokens, heads, features of a head)."""
_MORE_TABLES = (
    *((tokens, 32000, 2048) for tokens in (256, 512, 1024, 2048, 3072, 3136, 4096, 16384, 32768)),
    *((tokens, 16384, 1024) for tokens in (1024, 4096, 32768)),
    *((8192, 32000, features) for features in (256, 512, 1024, 8192)),
    *((2048, 128256, features) for features in (1024, 8192)),
    *((8192, rows, 1024) for rows in (512, 4096, 262144)),
    (2048, 512, 2048),
    (2048, 32000, 8192),
    (4096, 50304, 4096),
)
"""Tables whose gradients are measured as well: torch sorts the tokens from 3,073 on, and adds equal ones."""
_UPDATES = (
    *((2**16 * blocks, 1) for blocks in (1, 8, 64, 96, 132, 192, 256, 264, 320, 384, 528, 640, 1280)),
    *((size * tensors, tensors) for size in (2**10, 2**14, 2**16, 2**18) for tensors in (36, 72, 256)),
    (2**20 * 36, 36),
    (3 * 2**22 * 24, 24),
    (2**13 * 512, 512),
)
"""Updates whose launches are measured as well, as (elements, tensors)."""
_HELD_OUT_KERNELS = 45

Make = Callable[[OperandPool], Call]


# -- element-wise ------------------------------------------------------------------------------------------------------


def _elementwise() -> dict[str, tuple[int, int, Callable[..., Any]]]:
    """Name -> (inputs, outputs in units of the input's size, call on the inputs)."""
    gelu_back = torch.ops.aten.gelu_backward
    silu_back = torch.ops.aten.silu_backward
    relu_back = torch.ops.aten.threshold_backward
    return {
        "add": (2, 1, torch.add),
        "mul": (2, 1, torch.mul),
        "relu": (1, 1, torch.relu),
        "gelu": (1, 1, F.gelu),
        "silu": (1, 1, F.silu),
        "copy": (1, 1, torch.clone),
        "add_": (2, 1, lambda a, b: a.add_(b, alpha=1e-3)),
        "zero_": (0, 1, torch.zero_),
        "relu_backward": (2, 1, lambda a, b: relu_back(a, b, 0)),
        "gelu_backward": (2, 1, gelu_back),
        "silu_backward": (2, 1, silu_back),
        "dropout": (1, 1, lambda a: F.dropout(a, 0.1, training=True)),
        "silu_mul": (2, 1, lambda a, b: F.silu(a) * b),
        "sum": (1, 0, torch.sum),
    }


def _elementwise_job(name: str, shape: Sequence[int], dtype: str, tier: int, held_out: bool = False) -> Job:
    inputs, outputs, call = _elementwise()[name]
    size = bytes_of(dtype, shape)

    def make(pool: OperandPool) -> Call:
        operands = [pool.tensor(*shape, dtype=dtype) for _ in range(max(1, inputs))]
        if name == "zero_":
            operands = [operands[0].clone()]  # the block of random numbers stays random
        if name == "dropout":
            return lambda: call(operands[0])
        return lambda: call(*operands)

    moved = size * (inputs + outputs)
    return _job(_point(name, shape, dtype, moved, held_out=held_out), make, tier=tier)


def _cast_job(name: str, source: str, target: str, elements: int, tier: int) -> Job:
    kind = DTYPES[target]

    def make(pool: OperandPool) -> Call:
        x = pool.tensor(elements, dtype=source)
        return lambda: x.to(kind)

    moved = bytes_of(source, (elements,)) + bytes_of(target, (elements,))
    return _job(_point(name, (elements,), source, moved), make, tier=tier)


# -- rows --------------------------------------------------------------------------------------------------------------


def _rms_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """Rotary positions as in models of libraries: in float, with casts around."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _row_calls() -> dict[str, Callable[..., Tensor]]:
    return {
        "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:], w, w, 1e-5),
        "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
        "rms_norm_by_hand": _rms_by_hand,
        "softmax": lambda x, w: torch.softmax(x, -1),
    }


def _row_job(name: str, shape: tuple[int, int], dtype: str, tier: int, held_out: bool = False) -> Job:
    """A forward, or with "_backward" its gradients (of the input, and of the weight where it has one)."""
    kind, backward = name.removesuffix("_backward"), name.endswith("_backward")
    call, size = _row_calls()[kind], bytes_of(dtype, shape)

    def make(pool: OperandPool) -> Call:
        x, weight = pool.tensor(*shape, dtype=dtype), pool.tensor(shape[-1], dtype=dtype)
        if not backward:
            return lambda: call(x, weight)
        tensors = [x] if kind == "softmax" else [x, weight]
        return gradient(lambda *fresh: call(fresh[0], fresh[-1]), tensors, pool.tensor(*shape, dtype=dtype))

    point = _point(name, shape, dtype, size * (3 if backward else 2), held_out=held_out)
    return _job(point, make, tier=tier)


def _rotary_calls() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]]:
    """Rotary positions as in models of libraries: the computation of a table, done once, and the call on x and the
    table.

    x is [tokens, heads, features] and the table [tokens, 1, features], which all heads share: of cosines and sines
    (Hugging Face's apply_rotary_pos_emb), or of complex numbers (torchtitan's apply_rotary_emb).
    """

    def complex_of(table: Tensor) -> Tensor:
        return torch.view_as_complex(table.float().unflatten(-1, (-1, 2)))

    def by_hand(x: Tensor, table: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * table + torch.cat([-b, a], -1) * table

    def by_complex(x: Tensor, turns: Tensor) -> Tensor:
        return torch.view_as_real(complex_of(x) * turns).flatten(-2).to(x.dtype)

    return {"rope_by_hand": (torch.clone, by_hand), "rope_by_complex": (complex_of, by_complex)}


def _rotary_job(name: str, shape: tuple[int, int, int], tier: int) -> Job:
    """Either form's kernels read and write ten times the bytes of x, tables aside: written out: two products, a
    negation of a half, a concatenation and a sum; as complex numbers 6 bytes an element for a cast, 8 for a product, 6
    for a cast.
    """
    tokens, _, features = shape
    prepared, call = _rotary_calls()[name.removesuffix("_backward")]

    def make(pool: OperandPool) -> Call:
        x, table = pool.tensor(*shape), prepared(pool.tensor(tokens, 1, features))
        if not name.endswith("_backward"):
            return lambda: call(x, table)
        return gradient(lambda fresh: call(fresh, table), [x], pool.tensor(*shape))

    return _job(_point(name, shape, "bfloat16", 10 * bytes_of("bfloat16", shape)), make, tier=tier, needs=2)


def _loss_job(name: str, shape: tuple[int, int], tier: int, held_out: bool = False) -> Job:
    """Cross entropy in float of bfloat16 logits, as training loops write it."""
    rows, classes = shape
    backward = name.endswith("_backward")

    def make(pool: OperandPool) -> Call:
        logits, labels = pool.tensor(rows, classes), pool.ids(rows, below=classes)

        def loss(x: Tensor) -> Tensor:
            return F.cross_entropy(x.float(), labels)

        if not backward:
            return lambda: loss(logits)
        return gradient(loss, [logits], torch.ones((), device=logits.device))

    size = bytes_of("bfloat16", shape)
    point = _point(name, shape, "bfloat16", size * (2 if backward else 1), held_out=held_out)
    return _job(point, make, tier=tier, needs=8)


def _embedding_job(name: str, shape: tuple[int, int, int], tier: int, held_out: bool = False) -> Job:
    tokens, rows, features = shape
    backward = name.endswith("_backward")

    def make(pool: OperandPool) -> Call:
        table, ids = pool.tensor(rows, features), pool.ids(tokens, below=rows)
        if not backward:
            return lambda: F.embedding(ids, table)
        return gradient(lambda w: F.embedding(ids, w), [table], pool.tensor(tokens, features))

    moved = 2 * bytes_of("bfloat16", (tokens, features))
    if backward:  # the gradient of the full table is written
        moved = bytes_of("bfloat16", (tokens, features), (rows, features))
    return _job(_point(name, shape, "bfloat16", moved, held_out=held_out), make, tier=tier, needs=4)


def _update_job(kind: str, elements: int, tensors: int, dtype: str, tier: int) -> Job:
    """AdamW over `tensors` equal tensors: reads weight, gradient and two states, writes three of them."""

    def make(pool: OperandPool) -> Call:
        weights = [pool.tensor(elements // tensors, dtype=dtype).clone().requires_grad_() for _ in range(tensors)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        fused = kind == "fused"
        recordable = fused and pool.device.is_async  # the same kernels, and they can be recorded
        optimizer = torch.optim.AdamW(weights, lr=1e-6, fused=fused, foreach=not fused, capturable=recordable)
        optimizer.step()
        return optimizer.step

    size = bytes_of(dtype, (elements,))
    point = _point(f"adamw_{kind}", (elements,), dtype, 7 * size, options={"tensors": tensors})
    return _job(point, make, tier=tier, once=True)


def gradient(call: Callable[..., Tensor], tensors: list[Tensor], g: Tensor) -> Call:
    """Autograd of `call` alone, whose forward has run: gradients of `tensors` for the gradient `g` of its output."""
    fresh = [tensor.detach().requires_grad_() for tensor in tensors]
    made = call(*fresh)
    return lambda: torch.autograd.grad(made, fresh, g, retain_graph=True)


def _point(name: str, shape: Sequence[int], dtype: str, moved: int, **more: Any) -> Point:
    return Point(
        kind="memory", call=name, shape=tuple(shape), size_bytes=moved, dtype=dtype, seconds=0.0, **more
    )  # fmt: skip


def _job(point: Point, make: Make, *, tier: int, once: bool = False, needs: int = 3) -> Job:
    """The job of a kernel.

    Args:
        point: what it is.
        make: its call, on operands of its own.
        tier: of the job.
        once: all calls work on the same operands.
        needs: memory that it needs, as a multiple of the bytes it moves.
    """
    moved = point.size_bytes

    def make_all(pool: OperandPool) -> list[Call]:
        return [make(pool) for _ in (range(1) if once else pool.sets(moved))]

    return Job(point=point, make=make_all, tier=tier, needs_bytes=needs * moved, work=1.0 * moved)


def kernel_jobs(calls: Sequence[str] = (), *, seed: int = 20_27) -> list[Job]:
    """Kernels bound by memory; held-out ones chosen by `seed`.

    Args:
        calls: the only ones to take, such as "adamw_fused"; empty: all.
        seed: of the held-out ones.
    """
    jobs = _held_out(random.Random(seed))
    for (name, (_, outputs, _)), elements in itertools.product(_elementwise().items(), _ELEMENTS):
        if outputs or elements >= 2**20:
            common = name in ("add", "mul", "silu", "gelu", "relu", "copy")
            jobs.append(_elementwise_job(name, (elements,), "bfloat16", tier=0 if common and elements > 2**20 else 1))
            if name in ("add", "relu", "copy") and elements >= 2**20:
                jobs.append(_elementwise_job(name, (elements,), "float32", tier=2))
    for elements in (2**16, 2**20, 2**24, 2**26, 2**28):
        jobs.append(_cast_job("cast_down", "float32", "bfloat16", elements, 1))
        jobs.append(_cast_job("cast_up", "bfloat16", "float32", elements, 1))
    for name, shape in itertools.product(_row_calls(), _ROWS):
        for part in ("", "_backward"):
            jobs.append(_row_job(name + part, shape, "bfloat16", tier=1 if "softmax" in name else 0))
            if shape == (8192, 4096) and "by_hand" not in name:
                jobs.append(_row_job(name + part, shape, "float32", tier=2))
    for name, turned in itertools.product(_rotary_calls(), _TURNED):
        jobs += [_rotary_job(name, turned, 1), _rotary_job(f"{name}_backward", turned, 1)]
    for shape in _LOGITS:
        jobs += [_loss_job("cross_entropy", shape, 0), _loss_job("cross_entropy_backward", shape, 0)]
    for table in _TABLES:
        jobs += [_embedding_job("embedding", table, 1), _embedding_job("embedding_backward", table, 1)]
    jobs += [_embedding_job("embedding_backward", table, 3) for table in _MORE_TABLES]
    jobs += _update_jobs()
    first: dict[Any, Job] = {}
    for job in jobs:
        if not calls or job.point.call in calls:
            first.setdefault(job.point.key, job)
    return list(first.values())


def _update_jobs() -> list[Job]:
    jobs = []
    for elements, tensors in itertools.product((2**20, 2**24, 2**27, 2**29), (1, 16, 128)):
        if elements // tensors >= 2**13:
            jobs.append(_update_job("fused", elements, tensors, "bfloat16", 0 if tensors == 16 else 1))
            if elements < 2**29:
                jobs.append(_update_job("fused", elements, tensors, "float32", 2))
                jobs.append(_update_job("foreach", elements, tensors, "bfloat16", 1 if tensors == 16 else 2))
    for elements, tensors in _UPDATES:
        for kind, dtype in (("fused", "bfloat16"), ("fused", "float32"), ("foreach", "bfloat16")):
            jobs.append(_update_job(kind, elements, tensors, dtype, 3))
    return jobs


def _held_out(rng: random.Random) -> list[Job]:
    jobs = []
    for number in range(_HELD_OUT_KERNELS):
        tier = number % 3
        rows, features = 64 * rng.randint(2, 300), 64 * rng.randint(8, 190)
        which = number % 5
        if which < 2:
            names = [name for name, (_, outputs, _) in _elementwise().items() if outputs]
            elements = round(2 ** rng.uniform(14, 28)) // 256 * 256
            jobs.append(_elementwise_job(rng.choice(names), (elements,), "bfloat16", tier, held_out=True))
        elif which < 4:
            name = rng.choice(list(_row_calls())) + rng.choice(("", "_backward"))
            jobs.append(_row_job(name, (rows, features), "bfloat16", tier, held_out=True))
        else:
            name = "cross_entropy" + rng.choice(("", "_backward"))
            classes = rng.choice((32000, 49152, 50304, 100_352, 151_936))
            jobs.append(_loss_job(name, (64 * rng.randint(4, 96), classes), tier, held_out=True))
    return jobs
