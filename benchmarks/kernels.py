"""Microseconds of the executor's kernels on a GPU beside torch's own: `python -m benchmarks.kernels [--json]`.

Each row is one rule at the size of a block of the 8 x 4096 model (micro-batch 4, 2048 positions, 32 heads of 128, a
vocabulary of 32,000), or one run of fused instructions of that model (`Plan.fused`). "torch" is what torch has for the
same, as its modules and optimizers call it, or plain arithmetic of torch where it has nothing; of a run it is its steps
one by one. "own" is the rule. Every kernel that is written here is in the table (Triton's, and those that Inductor
makes), and every one of torch's that the executor takes in another way than torch's modules do.

Times are medians of single calls between CUDA events, with operands that rotate so that no call finds its own in the
cache. The bound is what the bytes of operands and results take at the memory bandwidth given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.kernels import OpContext, StepCounter, rule_of
from executor.kernels.context import torch_dtype
from executor.kernels.fused import FusedRun
from executor.kernels.place import by_autograd
from executor.kernels.positions import turned_plainly
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.layout import Layout
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.program import Instruction, Value, moved_values

__all__ = ["Case", "cases", "main", "measured_us"]

BATCH, LENGTH, HEADS, DIM, VOCAB = 4, 2048, 32, 128, 32_000
HIDDEN, FFN = HEADS * DIM, 11_008

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel: `make` gives torch's call and the executor's, on new operands; `moved` counts its bytes."""

    name: str
    make: Callable[[], tuple[Call, Call]]
    moved: int


def _site(shape: Sequence[int], dtype: str = "bfloat16") -> OpContext:
    return OpContext(
        rank=0, mesh=Layout((1,), ("dp",)), shape=tuple(shape), dtype=dtype, counter=StepCounter(step=2),
        device=torch.device("cuda"),
    )  # fmt: skip


def _randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def _rope(call: str, sign: int) -> Case:
    shape = (BATCH, LENGTH, HEADS, DIM)

    def make() -> tuple[Call, Call]:
        x = _randn(*shape)
        angles = torch.outer(torch.arange(LENGTH), 1e4 ** (-torch.arange(0, DIM, 2) / DIM)).unsqueeze(1)
        cos, sin = angles.cos().cuda(), angles.sin().cuda()
        return (
            lambda: turned_plainly(x, cos, sin, sign, interleaved=False),
            lambda: rule_of(call)(_site(shape), {"base": 1e4}, x),
        )

    return Case(name=call, make=make, moved=2 * 2 * BATCH * LENGTH * HIDDEN)


def _attention_forward() -> Case:
    shape, attrs = (BATCH, LENGTH, HEADS, DIM), {"causal": True, "layout": "bshd"}

    def make() -> tuple[Call, Call]:
        q, k, v = (_randn(*shape) for _ in range(3))
        heads_first = [each.transpose(1, 2) for each in (q, k, v)]
        return (
            lambda: F.scaled_dot_product_attention(*heads_first, is_causal=True),
            lambda: rule_of("attention.forward")(_site(shape), attrs, q, k, v),
        )

    return Case(name="attention.forward", make=make, moved=4 * 2 * BATCH * LENGTH * HIDDEN)


def _attention() -> Case:
    shape, attrs = (BATCH, LENGTH, HEADS, DIM), {"causal": True, "layout": "bshd"}

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()

    def make() -> tuple[Call, Call]:
        q, k, v, g = (_randn(*shape) for _ in range(4))
        y, sums = rule_of("attention.forward")(_site(shape), attrs, q, k, v)
        return (
            lambda: by_autograd(plain, (q, k, v), (0, 1, 2), g),
            lambda: rule_of("attention.grad012")(_site(shape), attrs, g, q, k, v, y, sums),
        )

    return Case(name="attention.grad012", make=make, moved=8 * 2 * BATCH * LENGTH * HIDDEN)


def _norm_forward(kind: str) -> Case:
    shape, attrs = (BATCH, LENGTH, HIDDEN), {"eps": 1e-5}

    def make() -> tuple[Call, Call]:
        x, weight = _randn(*shape), _randn(HIDDEN)
        torchs = F.rms_norm if kind == "rms_norm" else F.layer_norm
        return (
            lambda: torchs(x, (HIDDEN,), weight, eps=1e-5),
            lambda: rule_of(f"{kind}.forward")(_site(shape), attrs, x, weight),
        )

    return Case(name=f"{kind}.forward", make=make, moved=2 * 2 * BATCH * LENGTH * HIDDEN)


def _norm(kind: str, which: int) -> Case:
    shape, attrs = (BATCH, LENGTH, HIDDEN), {"eps": 1e-5}
    aten = torch.ops.aten

    def again(g: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The statistics recomputed, then one gradient."""
        wanted = [at == which for at in range(3)]
        if kind == "rms_norm":
            _, scale = aten._fused_rms_norm(x, (HIDDEN,), None, 1e-5)
            return aten._fused_rms_norm_backward(g, x, (HIDDEN,), scale, weight, wanted[:2])[which]
        _, mean, scale = torch.native_layer_norm(x, (HIDDEN,), None, None, 1e-5)
        return aten.native_layer_norm_backward(g, x, (HIDDEN,), mean, scale, weight, None, wanted)[which]

    def make() -> tuple[Call, Call]:
        x, g, weight = _randn(*shape), _randn(*shape), _randn(HIDDEN)
        kept = rule_of(f"{kind}.forward")(_site(shape), attrs, x, weight)[1:]
        site = _site(shape if which == 0 else (HIDDEN,))
        operands = (g, x, weight, *kept) if which == 0 else (g, x, *kept)
        return lambda: again(g, x, weight), lambda: rule_of(f"{kind}.grad{which}")(site, attrs, *operands)

    return Case(name=f"{kind}.grad{which}", make=make, moved=(3 - which) * 2 * BATCH * LENGTH * HIDDEN)


def _loss_statistic(dtype: torch.dtype) -> Case:
    """Of a part of the classes, as tensor parallelism has it."""
    shape = (BATCH, LENGTH, VOCAB)

    def make() -> tuple[Call, Call]:
        x, t = _randn(*shape, dtype=dtype), torch.randint(VOCAB, shape[:-1], device="cuda")
        return (
            lambda: (torch.logsumexp(x, -1), x.gather(-1, t.unsqueeze(-1))),
            lambda: rule_of("cross_entropy.statistic")(_site((1, 2, *shape[:-1]), "float32"), {}, x, t),
        )

    name = f"cross_entropy.statistic {str(dtype).removeprefix('torch.')}"
    return Case(name=name, make=make, moved=dtype.itemsize * BATCH * LENGTH * VOCAB)


def _loss(dtype: torch.dtype, part: str) -> Case:
    shape, count = (BATCH, LENGTH, VOCAB), BATCH * LENGTH

    def before(x: Tensor, t: Tensor) -> Tensor:
        if part == "forward":
            return F.cross_entropy(x.view(-1, VOCAB), t.view(-1), reduction="sum") / count
        one = x.new_full((), -1.0).expand(*t.shape, 1)
        return torch.softmax(x, -1).scatter_add_(-1, t.unsqueeze(-1), one).mul_(1 / count)

    def make() -> tuple[Call, Call]:
        x, t = _randn(*shape, dtype=dtype), torch.randint(VOCAB, shape[:-1], device="cuda")
        _, sums = rule_of("cross_entropy.forward")(_site((), "float32"), {"count": count}, x, t)
        operands = (x, t) if part == "forward" else (x, t, sums)
        site = _site(()) if part == "forward" else _site(shape)
        return lambda: before(x, t), lambda: rule_of(f"cross_entropy.{part}")(site, {"count": count}, *operands)

    passes = 1 if part == "forward" else 2
    name = f"cross_entropy.{part} {str(dtype).removeprefix('torch.')}"
    return Case(name=name, make=make, moved=passes * dtype.itemsize * count * VOCAB)


def _dropout() -> Case:
    """Random numbers that do not depend on how the tensor is split, against torch's generator."""
    shape, attrs = (BATCH, LENGTH, HIDDEN), {"p": 0.1, "seed": 7}

    def make() -> tuple[Call, Call]:
        x = _randn(*shape)
        return lambda: F.dropout(x, 0.1), lambda: rule_of("dropout.forward")(_site(shape), attrs, x)

    return Case(name="dropout.forward", make=make, moved=2 * 2 * BATCH * LENGTH * HIDDEN)


def _accumulating_product() -> Case:
    """The gradient of a weight from the second micro-batch on."""

    def make() -> tuple[Call, Call]:
        g, x, kept = _randn(BATCH, LENGTH, FFN), _randn(BATCH, LENGTH, HIDDEN), _randn(FFN, HIDDEN)
        rows, columns = g.view(-1, FFN).t(), x.view(-1, HIDDEN)
        return lambda: kept.add_(rows @ columns), lambda: rule_of("linear.grad1")(_site((FFN, HIDDEN)), {}, g, x, kept)

    moved = 2 * (BATCH * LENGTH * (FFN + HIDDEN) + 2 * FFN * HIDDEN)
    return Case(name="linear.grad1, added to the sum", make=make, moved=moved)


BLOCK = [(HIDDEN, HIDDEN)] * 4 + [(FFN, HIDDEN)] * 3 + [(HIDDEN,)] * 2
"""The weights of a block."""


def _squares() -> Case:
    """For clipping by the global norm."""

    def make() -> tuple[Call, Call]:
        tensors = [_randn(*shape) for shape in BLOCK]
        return (
            lambda: torch.nn.utils.get_total_norm(tensors),
            lambda: rule_of("sum_squares")(_site((), "float32"), {"axes": ()}, *tensors),
        )

    return Case(name="sum_squares of a block", make=make, moved=2 * sum(torch.Size(shape).numel() for shape in BLOCK))


def _update() -> Case:
    shapes = BLOCK

    def make() -> tuple[Call, Call]:
        groups = [[_randn(*shape).abs_() for _ in range(4)] for shape in shapes]
        weights = [torch.nn.Parameter(group[0].clone()) for group in groups]
        for weight, group in zip(weights, groups, strict=True):
            weight.grad = group[1]
        torchs = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        rule, site, settings = rule_of("adamw.update"), _site(shapes[0]), {"lr": 1e-4}
        flat = [each for group in groups for each in group]
        return torchs.step, lambda: rule(site, settings, *flat)

    elements = sum(torch.Size(shape).numel() for shape in shapes)
    return Case(name="adamw.update of a block", make=make, moved=7 * 2 * elements)


def _flat(call: str) -> Case:
    """The weights of a block packed for a reduce-scatter over 4 ranks, or unpacked after an all-gather."""
    shapes, rows = [(HIDDEN, HIDDEN)] * 4 + [(FFN, HIDDEN)] * 3, 4
    sizes = tuple(torch.Size(shape).numel() // rows for shape in shapes)

    def one_by_one(tensors: Sequence[Tensor], matrix: Tensor) -> None:
        for tensor, column in zip(tensors, matrix.split(sizes, 1), strict=True):
            if call == "flat_pack":
                column.copy_(tensor.view(rows, -1))
            else:
                tensor.view(rows, -1).copy_(column)

    def make() -> tuple[Call, Call]:
        tensors, matrix = [_randn(*shape) for shape in shapes], _randn(rows, sum(sizes))
        attrs = {"rows": rows, "sizes": sizes, "shapes": shapes}
        given = tensors if call == "flat_pack" else [matrix.view(-1)]
        return (
            lambda: one_by_one(tensors, matrix),
            lambda: rule_of(call)(_site((rows * sum(sizes),)), attrs, *given),
        )

    return Case(name=f"{call} of a block", make=make, moved=2 * 2 * rows * sum(sizes))


def _runs() -> list[Case]:
    """The runs of fused instructions of a step, one of each form."""
    config = TransformerConfig(
        name="8x4096", num_layers=1, hidden=HIDDEN, num_heads=HEADS, ffn=FFN, vocab=VOCAB, seq=LENGTH
    )
    degrees = Degrees(micro_batch=BATCH, global_batch=BATCH)
    (group,) = lower(plan_of(degrees, transformer(config, batch_size=BATCH))).groups
    found: dict[object, Case] = {}
    for _, line in group.walk():
        if line.call == "fused":
            run = FusedRun(line, group.values, _site(()), rule_of)
            found.setdefault(run.form, _run(line, run, group.values))
    return list(found.values())


def _run(line: Instruction, run: FusedRun, values: Mapping[str, Value]) -> Case:
    steps: Sequence[Instruction] = line.attrs["steps"]
    known = {**values, **line.attrs["inner"]}
    kinds = {name: torch_dtype(known[name].dtype) for name in line.inputs}

    def one_by_one(given: Sequence[Tensor]) -> None:
        env = dict(zip(line.inputs, given, strict=True))
        for step in steps:
            first = known[step.outputs[0]]
            made = rule_of(step.call)(_site(first.shape, first.dtype), step.attrs, *[env[name] for name in step.inputs])
            env |= dict(zip(step.outputs, made if len(step.outputs) > 1 else (made,), strict=True))

    def make() -> tuple[Call, Call]:
        given = [
            _randn(*known[name].shape, dtype=kind) if kind.is_floating_point
            else torch.randint(VOCAB, known[name].shape, device="cuda")
            for name, kind in kinds.items()
        ]  # fmt: skip
        return lambda: one_by_one(given), lambda: run(_site(()), line.attrs, *given)

    moved = sum(values[name].span_bytes for name in moved_values(line))
    return Case(name="+".join(step.call.replace(".forward", "") for step in steps), make=make, moved=moved)


def cases() -> list[Case]:
    """All kernels."""
    losses = [
        case for dtype in (torch.bfloat16, torch.float32)
        for case in (_loss(dtype, "forward"), _loss(dtype, "grad0"), _loss_statistic(dtype))
    ]  # fmt: skip
    norms = [
        case for kind in ("rms_norm", "layer_norm") for case in (_norm_forward(kind), _norm(kind, 0), _norm(kind, 1))
    ]
    return [
        _rope("rope.forward", 1), _rope("rope.grad0", -1), _attention_forward(), _attention(), *norms, *losses,
        _dropout(), _accumulating_product(), _squares(), _update(), _flat("flat_pack"), _flat("flat_unpack"), *_runs(),
    ]  # fmt: skip


def measured_us(calls: Sequence[Call], repeats: int) -> float:
    """The median microseconds of a call on the device; each of `calls` does the same on operands of its own."""
    for call in (*calls, *calls):
        call()
    marks = []
    for number in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # the host gets 2 ms ahead, so that its time to issue is not in the figure
        first.record()
        calls[number % len(calls)]()
        last.record()
        marks.append((first, last))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(first.elapsed_time(last) for first, last in marks)


def _row(case: Case, repeats: int, memory_Bps: float) -> dict[str, float | str]:
    sets = [case.make() for _ in range(2)]
    torchs, own = (measured_us([each[which] for each in sets], repeats) for which in (0, 1))
    bound = 1e6 * case.moved / memory_Bps
    return {"kernel": case.name, "torch_us": torchs, "own_us": own, "bytes_us": bound}


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=30, help="calls of each kernel")
    parser.add_argument("--memory-Bps", type=float, default=4.8e12, help="peak bandwidth of the memory (H200: 4.8e12)")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("No GPU found: these kernels can only be measured on one.", file=sys.stderr)
        return 1
    rows = []
    for case in cases():
        rows.append(_row(case, options.repeats, options.memory_Bps))
        torch.cuda.empty_cache()
        if not options.json:
            print(
                "{kernel:64} torch {torch_us:10.1f} own {own_us:10.1f} us   (bytes {bytes_us:8.1f})".format(**rows[-1])
            )
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "memory_Bps": options.memory_Bps}
        print(json.dumps(about | {"rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
