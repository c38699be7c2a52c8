"""Every operator on pretend ranks, split in random ways, against torch and its autograd on whole tensors, in float64.

Each rank's part of the inputs is cut out by `input_layout`, the executor's rule runs per rank, and the parts are put
together again by `output_layout` and `gradient_layout`: copies must agree, partial sums are added.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.price.instruction import compute_class, matrix_shape
from executor.kernels import RULES, OpContext, StepCounter
from executor.kernels.random import drawn_elements, kept_elements
from plans.errors import TwofoldError
from plans.layout import Layout, TensorLayout
from plans.model.graph import Graph, Operator, Tensor
from plans.operators import declare, factors, kinds

TOLERANCE = 1e-10
MESHES = (
    Layout((2,), ("a",)),
    Layout((4,), ("a",), (2, 0, 3, 1)),
    Layout((2, 2), ("a", "b")),
    Layout((2, 3), ("a", "b"), (5, 3, 1, 0, 2, 4)),
    Layout((2, 2, 2), ("a", "b", "c")),
)
LOSSES = ("l1_loss", "mse_loss", "cross_entropy", "mean_loss")


def numbers(high, *shape):
    """What to look up: ids below `high`, in the place of a shape."""
    return torch.from_numpy(np.random.default_rng(5).integers(0, high, shape))


def some(ignored, labels):
    """How many labels count."""
    return (labels != ignored).sum().double()


def mask(*shape):
    """A boolean input whose first column is always true."""
    chosen = torch.from_numpy(np.random.default_rng(6).random(shape) < 0.6)
    chosen[..., 0] = True
    return chosen


def drawn(kind, *shape):
    """The whole random tensor of the seed 11."""
    region = [(0, size) for size in shape]
    return drawn_elements(kind, region, shape, torch.float64, 11, STEP, MICRO_BATCH)


def queues(logits, top_k, capacity):
    """Who has which place: (expert, sample, place, token, choice), walked through choice by choice, token by token."""
    best = logits.detach().argsort(-1, descending=True)
    for sample, rows in enumerate(best):
        taken = [0] * logits.shape[-1]
        for choice in range(top_k):
            for token, row in enumerate(rows):
                expert = int(row[choice])
                if taken[expert] < capacity:
                    yield expert, sample, taken[expert], token, choice
                    taken[expert] += 1


def placed(top_k, capacity):
    def reference(x, logits):
        made = torch.zeros(logits.shape[-1], x.shape[0], capacity, x.shape[-1], dtype=x.dtype)
        for expert, sample, place, token, _ in queues(logits, top_k, capacity):
            made[expert, sample, place] = x[sample, token]
        return made.flatten(1, 2)

    return reference


def collected(top_k, capacity, over_all=False):
    def reference(routed, logits):
        routed = routed.unflatten(1, (-1, capacity))
        made = torch.zeros(*logits.shape[:2], routed.shape[-1], dtype=routed.dtype)
        best = logits.detach().argsort(-1, descending=True)[..., :top_k]
        share = logits.softmax(-1).gather(-1, best) if over_all else logits.gather(-1, best).softmax(-1)
        for expert, sample, place, token, choice in queues(logits, top_k, capacity):
            made[sample, token] = made[sample, token] + share[sample, token, choice] * routed[expert, sample, place]
        return made

    return reference


def grouped(q, k, v, **settings):
    """Attention by its formula, each head of k and v repeated for the heads of q that it serves."""
    repeats = q.shape[-3] // k.shape[-3]
    k, v = (each.repeat_interleave(repeats, -3) for each in (k, v))
    scores = q @ k.transpose(-1, -2) * settings.get("scale", 1 / math.sqrt(q.shape[-1]))
    if settings.get("causal"):
        rows, columns = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
        scores = scores.masked_fill(columns > rows, -torch.inf)
    chosen = settings.get("mask")
    if chosen is not None:
        scores = scores.masked_fill(~chosen, -torch.inf) if chosen.dtype == torch.bool else scores + chosen
    weights = scores.softmax(-1)
    if "p" in settings:
        shape = tuple(weights.shape)
        kept = kept_elements([(0, size) for size in shape], shape, settings["p"], settings["seed"], STEP, MICRO_BATCH)
        weights = weights * kept / (1 - settings["p"])
    return weights @ v


def attending(**settings):
    return lambda q, k, v, *rest: grouped(q, k, v, mask=rest[0] if rest else None, **settings)


def turned(x, rotary, frequencies, interleaved=False):
    """Rotary embedding as a product of complex numbers, position by position."""
    head, rest = x[..., :rotary], x[..., rotary:]
    pairs = head.unflatten(-1, (-1, 2)) if interleaved else head.unflatten(-1, (2, -1)).transpose(-1, -2)
    angles = torch.arange(x.shape[-3])[:, None, None] * torch.tensor(frequencies, dtype=torch.float64)
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(angles.new_ones(()), angles))
    head = product.flatten(-2) if interleaved else product.transpose(-1, -2).flatten(-2)
    return torch.cat([head, rest], -1)


def fixed(dims, target, arguments, result=-1):
    """The attrs of an opaque operator."""
    return {"dims": dims, "target": target, "arguments": arguments, "result": result}


def by_steps(x, weights, states):
    """An LSTM step by step: its states, and the last one of its cells."""
    inside, again, *biases = weights
    (state, cell), made = states, []
    for step in x.unbind(1):
        kept, new, value, shown = (step @ inside.t() + state @ again.t() + sum(biases)).chunk(4, 1)
        kept, new = new.sigmoid(), kept.sigmoid()
        cell = kept * cell + new * value.tanh()
        state = shown.sigmoid() * cell.tanh()
        made.append(state)
    return torch.stack(made, 1), cell


CONV = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
WIDE = {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 2)}
POOL = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}
ODD = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 1), "ceil": True}
DROP = {"p": 0.3, "seed": 11}
IGNORE = {"ignore_index": 3}
LLAMA3 = (200 / (20 * math.pi) - 1) / 7
STEP, MICRO_BATCH = 3, 2
LATER = (
    '[["aten.arange.default", [[5], {"device": {"device": true}}]], ["aten.unsqueeze.default", [[{"tensor": 0}, -1], '
    '{}]], ["aten.le.Tensor", [[{"tensor": 0}, {"tensor": 1}], {}]]]'
)

# kind, inputs (shapes, or tensors that are not trained), attrs, the same in torch on whole tensors
CASES = {
    "linear": ("linear", ((4, 6, 8), (12, 8), (12,)), {}, F.linear),
    "linear without bias": ("linear", ((12, 8), (6, 8)), {}, F.linear),
    "matmul by a matrix": ("matmul", ((4, 6, 8), (8, 12)), {}, torch.matmul),
    "matmul of batches": ("matmul", ((2, 4, 6, 8), (2, 4, 8, 12)), {}, torch.matmul),
    "matmul with broadcasting": ("matmul", ((4, 1, 6, 8), (12, 8, 2)), {}, torch.matmul),
    "matmul of one by a batch": ("matmul", ((6, 8), (4, 8, 12)), {}, torch.matmul),
    "matmul by a vector": ("matmul", ((4, 6, 8), (8,)), {}, torch.matmul),
    "matmul of a vector": ("matmul", ((8,), (8, 12)), {}, torch.matmul),
    "matmul of a vector by a batch": ("matmul", ((8,), (4, 8, 12)), {}, torch.matmul),
    "matmul of vectors": ("matmul", ((8,), (8,)), {}, torch.matmul),
    "conv2d": ("conv2d", ((4, 6, 5, 5), (8, 6, 3, 3), (8,)), CONV, F.conv2d),
    "conv2d with a stride": (
        "conv2d", ((4, 6, 7, 8), (8, 6, 3, 2)), WIDE, lambda x, w: F.conv2d(x, w, None, (2, 1), (1, 2), (1, 2)),
    ),
    "conv2d with groups": (
        "conv2d", ((4, 8, 5, 5), (12, 2, 3, 3), (12,)), CONV | {"groups": 4}, lambda *all: F.conv2d(*all, groups=4),
    ),
    "dispatch": ("dispatch", ((4, 6, 8), (4, 6, 5)), {"top_k": 2, "capacity": 3}, placed(2, 3)),
    "combine": (
        "combine", ((5, 12, 8), (4, 6, 5)), {"top_k": 2, "capacity": 3}, collected(2, 3),
    ),
    "combine, softmax over all": (
        "combine", ((5, 8, 8), (4, 6, 5)), {"top_k": 3, "capacity": 2, "weights": "all"},
        collected(3, 2, over_all=True),
    ),
    "attention": ("attention", ((4, 6, 8, 4), (4, 6, 8, 4), (4, 6, 8, 2)), {}, attending()),
    "attention, causal": ("attention", ((2, 4, 12, 4),) * 3, {"causal": True}, attending(causal=True)),
    "attention, causal, more keys": (
        "attention", ((2, 2, 4, 4), (2, 2, 6, 4), (2, 2, 6, 4)), {"causal": True}, attending(causal=True),
    ),
    "attention, causal, fewer keys": (
        "attention", ((2, 2, 12, 4), (2, 2, 4, 4), (2, 2, 4, 4)), {"causal": True}, attending(causal=True),
    ),
    "attention, grouped": (
        "attention", ((2, 8, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)), {"causal": True, "scale": 0.3},
        attending(causal=True, scale=0.3),
    ),
    "attention of one sample": ("attention", ((4, 8, 4),) * 3, {}, attending()),
    "attention with a mask": ("attention", (*((2, 4, 6, 4),) * 3, mask(2, 1, 6, 6)), {}, attending()),
    "attention with a mask, causal": (
        "attention", (*((2, 4, 6, 4),) * 3, mask(6, 6)), {"causal": True}, attending(causal=True),
    ),
    "attention with dropout": ("attention", ((4, 6, 8, 4), (4, 6, 8, 4), (4, 6, 8, 2)), DROP, attending(**DROP)),
    "attention with dropout, causal, grouped": (
        "attention", ((2, 8, 12, 4), (2, 2, 4, 4), (2, 2, 4, 4)), DROP | {"causal": True},
        attending(causal=True, **DROP),
    ),
    "attention with dropout, causal, square": (
        "attention", ((2, 4, 12, 4),) * 3, DROP | {"causal": True}, attending(causal=True, **DROP),
    ),
    "attention with dropout and a mask": (
        "attention", (*((2, 4, 6, 4),) * 3, mask(2, 1, 6, 6)), DROP | {"scale": 0.3}, attending(scale=0.3, **DROP),
    ),
    "attention with dropout of one sample": ("attention", ((4, 8, 4),) * 3, DROP, attending(**DROP)),
    "attention, heads last": (
        "attention", ((2, 12, 8, 4), (2, 12, 4, 4), (2, 12, 4, 2)), {"causal": True, "layout": "bshd"},
        lambda q, k, v: grouped(*(each.transpose(1, 2) for each in (q, k, v)), causal=True).transpose(1, 2),
    ),
    "attention, heads last, with dropout": (
        "attention", ((2, 12, 8, 4), (2, 4, 4, 4), (2, 4, 4, 2)), DROP | {"layout": "bshd"},
        lambda q, k, v: grouped(*(each.transpose(1, 2) for each in (q, k, v)), **DROP).transpose(1, 2),
    ),
    "rope": ("rope", ((4, 12, 6, 8),), {"base": 100.0}, lambda x: turned(x, 8, [100.0 ** (-i / 4) for i in range(4)])),
    "rope of neighbours": (
        "rope", ((12, 4, 6),), {"base": 100.0, "rotary": 4, "interleaved": True, "scaling": "linear", "factor": 2.0},
        lambda x: turned(x, 4, [0.5, 0.05], interleaved=True),
    ),
    # wavelengths 2 pi, 20 pi, 200 pi and 2000 pi of 200 positions: kept, (31.8 / 10 - 1) / 7 kept, divided, divided
    "rope of Llama 3": (
        "rope", ((2, 12, 4, 8),),
        {
            "base": 1e4, "scaling": "llama3", "factor": 4.0, "low_factor": 1.0, "high_factor": 8.0, "original_seq": 200,
        },
        lambda x: turned(x, 8, [1.0, 0.1 * (LLAMA3 + (1 - LLAMA3) / 4), 0.0025, 0.00025]),
    ),
    "softmax": ("softmax", ((4, 6, 8),), {"dim": 1}, lambda x: x.softmax(1)),
    "log_softmax": ("log_softmax", ((4, 6, 8),), {"dim": -1}, lambda x: x.log_softmax(-1)),
    "layer_norm": (
        "layer_norm", ((4, 6, 8), (8,), (8,)), {"eps": 1e-5}, lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-5),
    ),
    "layer_norm without weight": ("layer_norm", ((4, 8),), {"eps": 0.1}, lambda x: F.layer_norm(x, (8,), eps=0.1)),
    "layer_norm over two dims": (
        "layer_norm", ((4, 6, 2), (6, 2), (6, 2)), {"eps": 0.1, "num_dims": 2},
        lambda x, w, b: F.layer_norm(x, (6, 2), w, b, 0.1),
    ),
    "rms_norm": ("rms_norm", ((4, 6, 8), (8,)), {"eps": 1e-5}, lambda x, w: F.rms_norm(x, (8,), w, 1e-5)),
    "erf": ("erf", ((4, 6),), {}, torch.erf),
    "leaky_relu": ("leaky_relu", ((4, 6),), {"negative_slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
    "elu": ("elu", ((4, 6),), {"alpha": 0.7}, lambda x: F.elu(x, 0.7)),
    "softplus": ("softplus", ((4, 6),), {"beta": 2, "threshold": 1.5}, lambda x: F.softplus(x, 2, 1.5)),
    "mish": ("mish", ((4, 6),), {}, F.mish),
    "hardswish": ("hardswish", ((4, 6),), {}, lambda x: F.hardswish(x)),
    "hardsigmoid": ("hardsigmoid", ((4, 6),), {}, lambda x: F.hardsigmoid(x)),
    "hardtanh": ("hardtanh", ((4, 6),), {"min_val": -0.5}, lambda x: F.hardtanh(x, -0.5)),
    "relu6": ("relu6", ((4, 6),), {}, F.relu6),
    "clamp": ("clamp", ((4, 6),), {"min": -0.3, "max": 0.4}, lambda x: x.clamp(-0.3, 0.4)),
    "clamp, from below": ("clamp", ((4, 6),), {"min": 0.1}, lambda x: x.clamp(min=0.1)),
    "rms_norm, 1 + weight": (
        "rms_norm", ((4, 6, 8), (8,)), {"eps": 1e-5, "offset": 1.0}, lambda x, w: F.rms_norm(x, (8,), 1 + w, 1e-5),
    ),
    "layer_norm, 1 + weight": (
        "layer_norm", ((4, 6, 8), (8,), (8,)), {"eps": 1e-5, "offset": 1.0},
        lambda x, w, b: F.layer_norm(x, (8,), 1 + w, b, 1e-5),
    ),
    "rms_norm without weight": ("rms_norm", ((4, 6),), {"eps": 0.1}, lambda x: F.rms_norm(x, (6,), eps=0.1)),
    "embedding": ("embedding", (numbers(12, 4, 6), (12, 8)), {}, F.embedding),
    "embedding with padding": (
        "embedding", (numbers(12, 4, 6), (12, 8)), {"padding_id": 5}, lambda i, t: F.embedding(i, t, padding_idx=5),
    ),
    "batch_statistics": (
        "batch_statistics", ((12, 8, 4),), {},
        lambda x: torch.stack([x.mean((0, 2)), x.var((0, 2), correction=0)]),
    ),
    "batch_norm": (
        "batch_norm", ((12, 8, 4), (2, 8), (8,), (8,)), {"eps": 9.0},
        lambda x, y, w, b: (x - y[0][:, None]) / (y[1][:, None] + 9).sqrt() * w[:, None] + b[:, None],
    ),
    "cross_entropy": ("cross_entropy", ((12, 8), numbers(8, 12)), {}, F.cross_entropy),
    "cross_entropy of a sequence": (
        "cross_entropy", ((4, 6, 12), numbers(12, 4, 6)), {},
        lambda x, t: F.cross_entropy(x.flatten(0, 1), t.flatten()),
    ),
    "cross_entropy, some ignored": (
        "cross_entropy", ((4, 6, 12), numbers(12, 4, 6), some(3, numbers(12, 4, 6))), IGNORE,
        lambda x, t, n: F.cross_entropy(x.flatten(0, 1), t.flatten(), ignore_index=3),
    ),
    "cross_entropy, some ignored below zero": (
        "cross_entropy", ((12, 8), numbers(8, 12).masked_fill(numbers(8, 12) == 3, -1), some(3, numbers(8, 12))),
        {"ignore_index": -1}, lambda x, t, n: F.cross_entropy(x, t, ignore_index=-1),
    ),
    "count_labels": ("count_labels", (numbers(12, 4, 6),), IGNORE, lambda t: (t != 3).sum().double()),
    "l1_loss": ("l1_loss", ((4, 6), torch.ones(4, 6, dtype=torch.float64)), {}, F.l1_loss),
    "mse_loss": ("mse_loss", ((4, 6), torch.ones(4, 6, dtype=torch.float64)), {}, F.mse_loss),
    "relu": ("relu", ((4, 6),), {}, torch.relu),
    "gelu": ("gelu", ((4, 6),), {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    "silu": ("silu", ((4, 6),), {}, F.silu),
    "tanh": ("tanh", ((4, 6),), {}, torch.tanh),
    "sigmoid": ("sigmoid", ((4, 6),), {}, torch.sigmoid),
    "exp": ("exp", ((4, 6),), {}, torch.exp),
    "expm1": ("expm1", ((4, 6),), {}, torch.expm1),
    "log": ("log", (("positive", 4, 6),), {}, torch.log),
    "log1p": ("log1p", (("positive", 4, 6),), {}, torch.log1p),
    "log2": ("log2", (("positive", 4, 6),), {}, torch.log2),
    "log10": ("log10", (("positive", 4, 6),), {}, torch.log10),
    "atan": ("atan", ((4, 6),), {}, torch.atan),
    "log_sigmoid": ("log_sigmoid", ((4, 6),), {}, F.logsigmoid),
    "sqrt": ("sqrt", (("positive", 4, 6),), {}, torch.sqrt),
    "rsqrt": ("rsqrt", (("positive", 4, 6),), {}, torch.rsqrt),
    "sin": ("sin", ((4, 6),), {}, torch.sin),
    "cos": ("cos", ((4, 6),), {}, torch.cos),
    "pow": ("pow", (("positive", 4, 6),), {"exponent": 2.5}, lambda x: x**2.5),
    "pow 2": ("pow", ((4, 6),), {"exponent": 2}, lambda x: x**2),
    "abs": ("abs", ((4, 6),), {}, torch.abs),
    "neg": ("neg", ((4, 6),), {}, torch.neg),
    **{kind: (kind, ((4, 6),), {}, getattr(torch, kind)) for kind in ("floor", "ceil", "trunc", "round", "sign")},
    "cast": ("cast", ((4, 6),), {}, lambda x: x.double()),
    "add": ("add", ((4, 6, 8), (6, 1)), {}, torch.add),
    "add a number": ("add", ((4, 6),), {"number": 2.5}, lambda x: x + 2.5),
    "sub": ("sub", ((6, 8), (4, 6, 8)), {}, torch.sub),
    "sub from a number": ("sub", ((4, 6),), {"number": 2.5, "reverse": True}, lambda x: 2.5 - x),
    "sub a number": ("sub", ((4, 6),), {"number": 2.5}, lambda x: x - 2.5),
    "mul": ("mul", ((4, 1, 8), (6, 8)), {}, torch.mul),
    "mul by a number": ("mul", ((4, 6),), {"number": 2.5}, lambda x: x * 2.5),
    "div": ("div", ((4, 6, 8), ("positive", 6, 1)), {}, torch.div),
    "div by a number": ("div", ((4, 6),), {"number": 2.5}, lambda x: x / 2.5),
    "div of a number": ("div", (("positive", 4, 6),), {"number": 2.5, "reverse": True}, lambda x: 2.5 / x),
    "masked_fill": (
        "masked_fill", ((4, 6, 8), mask(6, 8)), {"value": -3.0}, lambda x, chosen: x.masked_fill(chosen, -3.0),
    ),
    **{
        f"{kind} of two": (
            kind, (mask(4, 6, 8).double(), mask(6, 1).double()), {},
            lambda a, b, kind=kind: getattr(torch, kind)(a, b).double(),
        )
        for kind in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or")
    },
    "lt of a number": ("lt", ((4, 6),), {"number": 0.2}, lambda x: (x < 0.2).double()),
    "eq of a number": ("eq", (numbers(4, 4, 6),), {"number": 2}, lambda x: (x == 2).double()),
    "logical_not": ("logical_not", (mask(4, 6),), {}, lambda x: (~x).double()),
    "where": ("where", (mask(6, 8), (4, 6, 8), (4, 1, 8)), {}, torch.where),
    "where, narrow": ("where", (mask(4, 6, 8), (6, 1), ()), {}, torch.where),
    "expand": ("expand", ((4, 1, 8),), {}, lambda x: x.expand(2, 4, 6, 8)),
    "dropout": (
        "dropout", ((4, 6, 8),), DROP,
        lambda x: x * kept_elements([(0, 4), (0, 6), (0, 8)], (4, 6, 8), 0.3, 11, STEP, MICRO_BATCH) / 0.7,
    ),
    "reshape, merge": ("reshape", ((4, 6, 8),), {}, lambda x: x.reshape(24, 8)),
    "reshape, split": ("reshape", ((24, 8),), {}, lambda x: x.reshape(4, 6, 8)),
    "reshape, heads": ("reshape", ((4, 6, 8),), {}, lambda x: x.reshape(4, 6, 4, 2)),
    "reshape, half": ("reshape", ((12, 4),), {}, lambda x: x.reshape(8, 6)),
    "reshape, equal dims at the right": ("reshape", ((8, 6, 4, 1, 2),), {}, lambda x: x.reshape(6, 8, 4, 2)),
    "reshape, new dims": ("reshape", ((4, 1, 6),), {}, lambda x: x.reshape(1, 4, 6, 1)),
    "permute": ("permute", ((2, 4, 6, 8),), {"dims": (0, 2, 3, 1)}, lambda x: x.permute(0, 2, 3, 1)),
    "narrow": ("narrow", ((4, 9, 6),), {"dim": 1, "start": 2}, lambda x: x[:, 2:6]),
    "narrow with a step": ("narrow", ((4, 9, 6),), {"dim": 1, "start": 1, "step": 3}, lambda x: x[:, 1::3]),
    "concat": (
        "concat", ((4, 3, 6), (4, 1, 6), (4, 5, 6)), {"dim": 1, "sizes": (3, 1, 5)}, lambda *all: torch.cat(all, 1),
    ),
    "reduce_sum": ("reduce_sum", ((4, 6, 8),), {"dims": (1, -1)}, lambda x: x.sum((1, 2))),
    "reduce_mean": ("reduce_mean", ((4, 6, 8),), {"dims": (0, 2)}, lambda x: x.mean((0, 2))),
    "reduce_mean, dims kept": (
        "reduce_mean", ((4, 6, 8),), {"dims": (-1,), "keepdim": True}, lambda x: x.mean(-1, keepdim=True),
    ),
    "max_pool2d": ("max_pool2d", ((4, 6, 4, 4),), POOL, lambda x: F.max_pool2d(x, 2)),
    "max_pool2d, odd": (
        "max_pool2d", ((4, 6, 6, 5),), ODD, lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True),
    ),
    "avg_pool2d": ("avg_pool2d", ((4, 6, 4, 4),), POOL, lambda x: F.avg_pool2d(x, 2)),
    "avg_pool2d, odd": (
        "avg_pool2d", ((4, 6, 6, 5),), ODD | {"count_padding": False},
        lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 0), ceil_mode=True, count_include_pad=False),
    ),
    "grouped linear": (
        "grouped_linear", ((4, 6, 8), numbers(4, 4, 6), (4, 8, 12)), {},
        lambda x, ids, w: torch.einsum("bsk,bskn->bsn", x, w[ids]),
    ),
    "grouped linear, transposed": (
        "grouped_linear", ((12, 8), numbers(4, 12), (4, 6, 8)), {"transposed": True},
        lambda x, ids, w: torch.einsum("bk,bnk->bn", x, w[ids]),
    ),
    "recurrent": (
        "recurrent", ((4, 5, 3), (8, 3), (8, 2), (8,), (8,)), {"mode": "LSTM", "bias": True, "reverse": True},
        lambda x, *weights: by_steps(x.flip(1), weights, (x.new_zeros(4, 2),) * 2)[0].flip(1),
    ),
    "recurrent, its cells": (
        "recurrent", ((4, 5, 3), (8, 3), (8, 2), (8,), (8,), (4, 2), (4, 2)),
        {"mode": "LSTM", "bias": True, "cell": True},
        lambda x, *rest: by_steps(x, rest[:4], rest[4:])[1],
    ),
    "computed": ("computed", (), {"calls": LATER}, lambda: torch.ones(5, 5).tril().bool()),
    "arange": ("arange", (), {"start": 3, "step": 2}, lambda: torch.arange(3, 27, 2).double()),
    "fill": ("fill", (), {"value": 1.5}, lambda: torch.full((4, 6), 1.5, dtype=torch.float64)),
    "fill like": ("fill", (numbers(2, 4, 6),), {"value": 1.5}, lambda x: torch.full_like(x, 1.5, dtype=torch.float64)),
    "uniform": ("uniform", (), {"seed": 11}, lambda: drawn("uniform", 4, 6)),
    "normal like": (
        "normal", (numbers(2, 4, 3).double(),), {"seed": 11, "batch": 1}, lambda x: drawn("normal", 6, 4, 5)
    ),
    "opaque": (
        "opaque", ((4, 6),), fixed("a.->a.", "aten.cumsum.default", '[[{"tensor": 0}, 1], {}]'), lambda x: x.cumsum(1),
    ),
    "opaque, of two inputs": (
        "opaque", ((4, 6), (6,)), fixed("ab,b->ab", "aten.lerp.Scalar", '[[{"tensor": 0}, {"tensor": 1}, 0.25], {}]'),
        lambda x, y: torch.lerp(x, y, 0.25),
    ),
    "mean_loss": ("mean_loss", ((4, 6),), {}, lambda x: x.mean()),
    "batch_mean": ("batch_mean", (numbers(5, 4, 6).double(),), {}, lambda x: x.mean()),
    "batch_sum": ("batch_sum", (numbers(5, 4, 6).double(),), {}, lambda x: x.sum()),
    "pick": ("pick", ((4, 6, 8), torch.arange(24).view(4, 6) % 8),{},
             lambda x, t: x.gather(-1, t.unsqueeze(-1)).squeeze(-1)),
    "detach": ("detach", (numbers(5, 4, 6).double(),), {}, lambda x: x),
    "opaque, one of several results": (
        "opaque", ((4, 6),), fixed("a.->a.", "aten.sort.default", '[[{"tensor": 0}, 1], {}]', 0),
        lambda x: x.sort(1).values,
    ),
}  # fmt: skip


def made(given, seed):
    """The whole input: float64 with a gradient where a shape is given."""
    if isinstance(given, torch.Tensor):
        return given
    positive = given[0] == "positive" if given else False
    shape = given[1:] if positive else given
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))
    return (values.abs() + 0.5 if positive else values).requires_grad_()


def cut(whole, layout, rank):
    return whole[tuple(slice(*ends) for ends in layout.region(rank, whole.shape))].contiguous()


def joined(parts, layout, shape):
    """Parts by rank as one tensor: copies must agree, partial terms are added."""
    whole = torch.zeros(shape, dtype=torch.float64)
    for group in layout.mesh.groups(layout.replicated):
        for rank in group[1:]:
            torch.testing.assert_close(parts[rank], parts[group[0]], rtol=TOLERANCE, atol=TOLERANCE)
        region = tuple(slice(*ends) for ends in layout.region(group[0], shape))
        assert parts[group[0]].shape == layout.local_shape(shape)
        whole[region] += parts[group[0]]
    return whole


def close(found, expected):
    torch.testing.assert_close(found, expected.detach().double(), rtol=TOLERANCE, atol=TOLERANCE)


class OnRanks:
    """One operator with a strategy, ready to run its calls on every rank."""

    def __init__(self, name, mesh, assignment):
        self.kind, given, attrs, reference = CASES[name]
        self.mesh, self.assignment = mesh, assignment
        self.inputs = [made(each, seed) for seed, each in enumerate(given)]
        self.output = reference(*self.inputs)
        self.spec = spec_of(name)
        self.attrs = attrs | self.spec.local_attrs(assignment)
        if self.kind in LOSSES:
            self.attrs |= {"count": self.inputs[:2][-1].numel(), "scale": 0.25}
        self.layouts = [self.spec.input_layout(index, mesh, assignment) for index in range(len(given))]
        self.out_layout = self.spec.output_layout(0, mesh, assignment)
        self.saved = {
            f"x{index}": self.cut(x, layout)
            for index, (x, layout) in enumerate(zip(self.inputs, self.layouts, strict=True))
        }
        self.saved["y0"] = self.cut(self.output, self.out_layout.without_partial())
        self.statistic = self.spec.statistic_layout(mesh, assignment)
        if self.statistic is not None:
            self.gather_statistic()
        self.forward = self.run_forward()

    def cut(self, whole, layout):
        return {rank: cut(whole.detach(), layout, rank) for rank in self.mesh.rank_list}

    def gather_statistic(self):
        shape = self.spec.statistic_shape(self.mesh, self.assignment)
        operands = [self.saved[f"x{index}"] for index in range(len(self.inputs))]
        parts = self.call("statistic", operands, self.statistic.local_shape(shape))
        whole = joined(parts, self.statistic, shape)
        self.saved["s0"] = self.cut(whole, TensorLayout(mesh=self.mesh, dims=((), *self.statistic.dims[1:])))

    def call(self, part, operands, shape):
        results = {}
        for rank in self.mesh.rank_list:
            site = OpContext(
                rank=rank, mesh=self.mesh, shape=tuple(shape), dtype="float64", counter=StepCounter(step=STEP),
                micro_batch=MICRO_BATCH,
            )  # fmt: skip
            given = [operand[rank] for operand in operands]
            kept = [each.clone() for each in given]
            with torch.inference_mode():
                results[rank] = RULES[f"{self.kind}.{part}"](site, self.attrs, *given)
            made = results[rank] if isinstance(results[rank], tuple) else (results[rank],)
            own = {each.untyped_storage().data_ptr() for each in given}
            assert all(torch.equal(each, before) for each, before in zip(given, kept, strict=True))
            assert all(each.is_contiguous() and each.untyped_storage().data_ptr() not in own for each in made)
        return results

    def run_forward(self):
        """The output's parts; what the forward keeps is saved for the gradients, in the shapes that the spec says."""
        operands = [self.saved[f"x{index}"] for index in range(len(self.inputs))]
        operands += [self.saved["s0"]] if "s0" in self.saved else []
        parts = self.call("forward", operands, self.out_layout.local_shape(self.output.shape))
        kept = self.spec.kept_layouts(self.mesh, self.assignment)
        if not kept:
            return parts
        for index, (layout, shape) in enumerate(kept):
            self.saved[f"k{index}"] = {rank: made[1 + index] for rank, made in parts.items()}
            assert all(made[1 + index].shape == layout.local_shape(shape) for made in parts.values())
        assert all(len(made) == 1 + len(kept) for made in parts.values())
        return {rank: made[0] for rank, made in parts.items()}

    def check_forward(self):
        close(joined(self.forward, self.out_layout, self.output.shape), self.output)

    def check_gradients(self, together=True):
        if not self.spec.gradients:
            return
        trained = [index for index in self.spec.gradients if self.inputs[index].requires_grad]
        wanted = {index for index, each in enumerate(self.inputs) if each.requires_grad} - self.spec.discrete
        assert set(trained) == wanted
        g = torch.from_numpy(np.random.default_rng(99).standard_normal(self.output.shape))
        if self.kind in LOSSES:
            g = torch.tensor(0.25, dtype=torch.float64)
        expected = dict(
            zip(trained, torch.autograd.grad(self.output, [self.inputs[i] for i in trained], g), strict=True)
        )
        groups = self.spec.gradient_groups(trained) if together else [(index,) for index in trained]
        assert sorted(index for group in groups for index in group) == trained
        for group in groups:
            operands = [] if self.kind in LOSSES else [self.cut(g, self.out_layout.without_partial())]
            operands += [self.saved[need] for need in self.spec.gradient_needs(group) if need in self.saved]
            layouts = [self.spec.gradient_layout(index, self.mesh, self.assignment) for index in group]
            shape = layouts[0].local_shape(self.inputs[group[0]].shape)
            parts = self.call("grad" + "".join(map(str, group)), operands, shape)
            for position, (index, layout) in enumerate(zip(group, layouts, strict=True)):
                mine = {rank: part[position] if len(group) > 1 else part for rank, part in parts.items()}
                close(joined(mine, layout, self.inputs[index].shape), expected[index])


def spec_of(name):
    kind, given, attrs, reference = CASES[name]
    inputs = [made(each, seed) for seed, each in enumerate(given)]
    with torch.no_grad():
        shape = tuple(reference(*inputs).shape)
    return declare(kind, [tuple(each.shape) for each in inputs], [shape], attrs, name)


@st.composite
def strategies(draw, name):
    """A mesh, and axes for dims that can be split; a merged dim's minor parts come to their turn too."""
    spec, mesh = spec_of(name), draw(st.sampled_from(MESHES))
    assignment = {}
    for axis in draw(st.permutations(mesh.alias_name)):
        dims = [None] + [
            dim
            for dim in sorted(spec.splittable)
            if spec.fits(mesh, assignment | {dim: (*assignment.get(dim, ()), axis)})
        ]
        dim = draw(st.sampled_from(dims))
        if dim is not None:
            assignment[dim] = (*assignment.get(dim, ()), axis)
    return mesh, assignment


@pytest.mark.parametrize("name", CASES)
def test_whole_on_one_rank(name):
    case = OnRanks(name, Layout((1,), ("a",)), {})
    case.check_forward()
    case.check_gradients()


@pytest.mark.parametrize("name", CASES)
def test_each_dim_alone(name):
    spec = spec_of(name)
    for dim in sorted(spec.splittable):
        for mesh in MESHES[:2]:
            if spec.fits(mesh, {dim: ("a",)}):
                case = OnRanks(name, mesh, {dim: ("a",)})
                case.check_forward()
                case.check_gradients(together=False)


@pytest.mark.parametrize("name", CASES)
def test_random_strategies(name):
    @settings(max_examples=8, derandomize=True, deadline=None, database=None)
    @given(strategies(name))
    def check(drawn):
        case = OnRanks(name, *drawn)
        case.check_forward()
        case.check_gradients()

    check()


def test_every_kind_has_a_case():
    own = {
        "function",
        "buffer",
        "assign",
    }  # user functions and buffers: tests/executor/capture/test_modules.py
    assert {kind for kind, *_ in CASES.values()} == set(kinds()) - own


# -- what the declarations say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_dims_have_the_sizes_of_the_shapes(name):
    _, given, _, reference = CASES[name]
    inputs, spec = [made(each, seed) for seed, each in enumerate(given)], spec_of(name)
    for dims, tensor in zip((*spec.inputs, *spec.outputs), (*inputs, reference(*inputs)), strict=True):
        assert tuple(math.prod(spec.sizes[each] for each in factors(dim)) for dim in dims) == tensor.shape
    assert {each for dims in (*spec.inputs, *spec.outputs) for dim in dims for each in factors(dim)} <= set(spec.sizes)
    assert not any(dim.startswith("_") for dim in spec.splittable)


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("linear", 2 * 24 * 8 * 12),
        ("matmul of batches", 2 * 8 * 6 * 8 * 12),
        ("conv2d", 2 * (4 * 8 * 3 * 3) * 6 * 9),
        ("conv2d with groups", 2 * (4 * 12 * 3 * 3) * 2 * 9),
        ("attention", 2 * 4 * 6 * 8 * 8 * (4 + 2)),
        ("attention, causal", 2 * 2 * 4 * (12 * 13 // 2) * (4 + 4)),
    ],
)
def test_flops_of_products(name, flops):
    assert spec_of(name).flops == flops


UNUSED = {("embedding", "v"), ("grouped_linear", "v"), ("pick", "c")}
"""Rows that are looked up, weights of which each row of the input meets one, and classes of which one is picked."""


@pytest.mark.parametrize("name", [name for name, (kind, *_) in CASES.items() if kind != "opaque"])
def test_twice_the_size_of_a_dim_that_can_be_split_is_twice_the_work(name):
    kind, _, attrs, _ = CASES[name]
    spec = spec_of(name)
    for dim in sorted(spec.splittable):
        sizes = spec.sizes | {dim: 2 * spec.sizes[dim]}
        inputs, outputs = (
            [tuple(math.prod(sizes[each] for each in factors(one)) for one in dims) for dims in tensors]
            for tensors in (spec.inputs, spec.outputs)
        )
        if (attrs.get("causal") and dim == "s") or (kind == "conv2d" and dim == "g"):
            continue  # queries see more keys, and the shapes do not tell groups from channels
        wide = declare(kind, inputs, outputs, attrs, name)
        assert wide.flops == (1 if (kind, dim) in UNUSED else 2) * spec.flops
        for index, gradient in spec.gradients.items():
            times = (1, 2) if (kind, dim) in UNUSED or dim not in _names(spec, index) else (2,)
            assert wide.gradients[index].flops in [each * gradient.flops for each in times]


def _names(spec, index):
    """The dims of an input and of the output, over which its gradient goes."""
    return {each for dims in (spec.inputs[index], *spec.outputs) for dim in dims for each in factors(dim)}


@pytest.mark.parametrize(
    "name", [name for name, (kind, *_) in CASES.items() if compute_class(f"{kind}.forward") == "matrix"]
)
def test_prices_count_the_flops_of_the_declaration(name):
    kind, given, _, reference = CASES[name]
    inputs, spec = [made(each, seed) for seed, each in enumerate(given)], spec_of(name)
    shapes = [tuple(each.shape) for each in inputs]
    out = tuple(reference(*inputs).shape)
    counted = 2 * math.prod(matrix_shape(f"{kind}.forward", (*shapes, out)))
    assert counted == spec.flops or (CASES[name][2].get("causal") and counted > spec.flops)
    for index, gradient in spec.gradients.items():
        if kind == "attention" or not gradient.needs:  # that of a bias is a sum
            continue
        call = (out, *(shapes[int(need[1:])] for need in gradient.needs), shapes[index])
        assert 2 * math.prod(matrix_shape(f"{kind}.grad{index}", call)) == spec.gradients[index].flops


def test_a_merged_dim_is_split_at_its_minor_part_only_where_the_major_one_stands_alone():
    spec, mesh = spec_of("reshape, merge"), Layout((4, 2), ("a", "b"))
    assert spec.fits(mesh, {"d0": ("a",), "d1": ("b",)}) and not spec.fits(mesh, {"d0": ("b",), "d1": ("a",)})
    with pytest.raises(TwofoldError, match=r"merges the dims \['d0', 'd1'\].*'d0' of size 4"):
        spec.check(mesh, {"d1": ("b",)}, "flatten")
    alone = declare("reshape", [(1, 6, 8)], [(6, 8)], {}, "flatten")
    assert alone.fits(mesh, {"d1": ("b",)})


def test_split_classes_leave_no_partial_loss():
    spec, mesh = spec_of("cross_entropy"), Layout((2, 2), ("a", "b"))
    assert spec.output_layout(0, mesh, {"c": ("a",), "b0": ("b",)}).partial == ("b",)
    assert spec.statistic_layout(mesh, {"b0": ("b",)}) is None


def test_labels_and_ids_that_no_rank_has_are_refused():
    mesh = Layout((2,), ("a",))
    site = OpContext(rank=0, mesh=mesh, shape=(1, 2, 3), dtype="float64")
    for labels in (torch.tensor([0, 8, 1]), torch.tensor([0, -100, 1])):
        with pytest.raises(RuntimeError, match="label of a cross_entropy is out of range"):
            RULES["cross_entropy.statistic"](site, {"split": {"c": ("a",)}}, torch.zeros(3, 4).double(), labels)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attrs", "message"),
    [
        (
            "matmul",
            [(4, 6), (8, 2)],
            (4, 2),
            {},
            r"operator 'op': the shapes \(4, 6\) and \(8, 2\) of a matmul do not match",
        ),
        ("attention", [(2, 3, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4)], (2, 3, 4, 4), {}, "matching shapes"),
        ("reshape", [(4, 6)], (5, 5), {}, "cannot be reshaped"),
        ("permute", [(4, 6)], (6, 4), {"dims": (1, 1)}, "is not a permutation of the 2 dims"),
        ("narrow", [(4, 6)], (4, 3), {"dim": 1, "start": 4}, "elements 4 to 6 of dim 1"),
        ("concat", [(4, 6), (4, 6)], (4, 11), {"dim": 1, "sizes": (6, 5)}, "does not make"),
        ("layer_norm", [(4, 6), (5,)], (4, 6), {"eps": 0.1}, "cannot take weights"),
        ("add", [(4, 6), (3,)], (4, 6), {}, "cannot be broadcast"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(kind, inputs, output, attrs, message):
    with pytest.raises(TwofoldError, match=message):
        declare(kind, inputs, [output], attrs, "op")


# -- dropout -----------------------------------------------------------------------------------------------------------


def test_dropout_drops_its_share_and_others_for_every_seed_and_step():
    shape = (64, 1000)
    masks = [kept_elements([(0, 64), (0, 1000)], shape, 0.3, seed, step) for seed in (1, 2) for step in (1, 2)]
    for number, kept in enumerate(masks):
        assert kept.double().mean().item() == pytest.approx(0.7, abs=4 * math.sqrt(0.21 / 64_000))
        for other in masks[:number]:  # independent: equal with probability 0.49 + 0.09
            assert (kept == other).double().mean().item() == pytest.approx(0.58, abs=4 * math.sqrt(0.25 / 64_000))
    rows = masks[0].double() - 0.7
    assert abs((rows[:, 1:] * rows[:, :-1]).mean().item()) < 4 * 0.21 / math.sqrt(64_000)


@pytest.mark.parametrize(("kind", "moments"), [("uniform", (1 / 2, 1 / 3, 1 / 4, 1 / 5)), ("normal", (0, 1, 0, 3))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_random_tensors_have_the_moments_of_their_distribution(kind, moments, dtype):
    made = [drawn_elements(kind, [(0, 500), (0, 400)], (500, 400), dtype, seed, 1).double() for seed in (1, 2)]
    for power, moment in enumerate(moments, start=1):
        powers = made[0] ** power
        assert powers.mean().item() == pytest.approx(moment, abs=4 * powers.std().item() / math.sqrt(powers.numel()))
    centred = [each - moments[0] for each in made]
    for one, other in ((centred[0], centred[1]), (centred[0][:, 1:], centred[0][:, :-1])):  # seeds, neighbours
        assert abs((one * other).mean().item()) < 4 * one.var().item() / math.sqrt(one.numel())


def test_dropout_is_splitmix64():
    """The first numbers of the published generator for the state 1234567 (Vigna's splitmix64.c)."""
    from executor.kernels.random import _GOLDEN, _mix, _signed

    state = torch.tensor([_signed(1234567 + step * _GOLDEN) for step in (1, 2, 3)])
    found = [number % 2**64 for number in _mix(state).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


# -- micro-batches -----------------------------------------------------------------------------------------------------


def chain(batch, *steps):
    """A graph of unary operators (kind, output shape, attrs) on x, with an mse_loss at the end."""
    tensors = {
        name: Tensor(name=name, shape=shape, kind="input") for name, shape in (("x", steps[0]), ("t", steps[-1][1]))
    }
    operators, last = [], "x"
    for number, (kind, shape, attrs) in enumerate(steps[1:]):
        name = f"v{number}"
        tensors[name] = Tensor(name=name, shape=shape)
        operators.append(Operator(name=name, kind=kind, inputs=(last,), outputs=(name,), attrs=attrs))
        last = name
    tensors["loss"] = Tensor(name="loss", shape=())
    operators.append(Operator(name="loss", kind="mse_loss", inputs=(last, "t"), outputs=("loss",)))
    return Graph(name="chain", batch_size=batch, tensors=tensors, operators=tuple(operators), loss="loss")


@pytest.mark.parametrize("batch", [1, 2, 4, 12])
@pytest.mark.parametrize("other", [1, 2, 6, 24])
def test_reshapes_follow_the_batch(batch, other):
    def steps(size):
        return (
            (size, 6, 8),
            ("reshape", (size * 6, 8), {}),
            ("reshape", (size, 6, 8), {}),
            ("reshape", (size, 6, 4, 2), {}),
            ("permute", (size, 4, 6, 2), {"dims": (0, 2, 1, 3)}),
            ("reshape", (size * 4, 12), {}),
            ("reshape", (size, 48), {}),
            ("reshape", (size, 1, 48), {}),
            ("reshape", (size, 48), {}),
        )

    assert chain(batch, *steps(batch)).with_batch(other) == chain(other, *steps(other))


def test_a_batch_that_a_reshape_has_cut_up_cannot_be_resized_to_what_does_not_fit():
    graph = chain(4, (4, 6), ("reshape", (2, 12), {}), ("reshape", (4, 6), {}))
    with pytest.raises(TwofoldError, match=r"operator 'v0' \(reshape\) reads 'x' \(4, 6\); for a batch of 1"):
        graph.with_batch(1)
