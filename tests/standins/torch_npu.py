"""A stand-in for torch-npu: the functions that `executor.kernels.npu` calls, by their documented formulas, on the CPU.

Signatures and limits are those of torch-npu 2.13 (`help(torch_npu.npu_fusion_attention)` and so on). `CALLS` counts.
Half precision is computed in float32 and rounded once.
"""

from collections import Counter
from functools import wraps
from types import SimpleNamespace

import torch

__version__ = "stand-in"
npu = SimpleNamespace(config=SimpleNamespace(allow_internal_format=True))

CALLS = Counter()
KNOWN = (torch.float16, torch.bfloat16, torch.float32)


def counted(function):
    @wraps(function)
    def one(*args, **options):
        CALLS[function.__name__] += 1
        return function(*args, **options)

    return one


# -- attention ---------------------------------------------------------------------------------------------------------


def heads_first(layout, *tensors):
    assert layout in ("BNSD", "BSND")
    for each in tensors:
        assert each.dim() == 4 and each.dtype in KNOWN and each.is_contiguous()
    return [(each if layout == "BNSD" else each.transpose(1, 2)).float() for each in tensors]


def scores_of(q, k, scale, atten_mask, sparse_mode):
    rows, keys = q.shape[2], k.shape[2]
    scores = scale * q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3)
    if atten_mask is None:
        assert sparse_mode == 0
        return scores
    assert atten_mask.dtype == torch.bool
    if sparse_mode in (2, 3):  # the whole triangle stands for any size
        assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 if sparse_mode == 2 else 1 + keys - rows)
    else:
        assert sparse_mode == 1 and atten_mask.shape == (rows, keys)
        hidden = atten_mask
    return scores.masked_fill(hidden, -torch.inf)


@counted
def npu_fusion_attention(
    query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None, scale=1.0, keep_prob=1.0,
    pre_tockens=2147483647, next_tockens=2147483647, inner_precise=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False,
):  # fmt: skip
    q, k, v = heads_first(input_layout, query, key, value)
    assert pse is padding_mask is prefix is None and keep_prob == 1 and head_num == q.shape[1]
    scores = scores_of(q, k, scale, atten_mask, sparse_mode)
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    out = (weights / total @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).to(query.dtype)
    out = out if input_layout == "BNSD" else out.transpose(1, 2).contiguous()
    return out, largest.repeat(1, 1, 1, 8), total.repeat(1, 1, 1, 8), query.new_empty(0), 0, 0, 0


@counted
def npu_fusion_attention_grad(
    query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None, atten_mask=None, softmax_max=None,
    softmax_sum=None, softmax_in=None, attention_in=None, scale_value=1.0, keep_prob=1.0, pre_tockens=2147483647,
    next_tockens=2147483647, inner_precise=0, seed=0, offset=0, numels=0, prefix=None, actual_seq_qlen=None,
    actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False,
):  # fmt: skip
    q, k, v, g, out = heads_first(input_layout, query, key, value, dy, attention_in)
    for figure in (softmax_max, softmax_sum):
        assert figure.shape == (*q.shape[:3], 8) and figure.dtype == torch.float32 and figure.is_contiguous()
    repeats = q.shape[1] // k.shape[1]
    weights = (scores_of(q, k, scale_value, atten_mask, sparse_mode) - softmax_max[..., :1]).exp() / softmax_sum[
        ..., :1
    ]
    k_wide, v_wide = (each.repeat_interleave(repeats, 1) for each in (k, v))
    to_scores = scale_value * weights * (g @ v_wide.transpose(2, 3) - (g * out).sum(-1, keepdim=True))
    made = (
        to_scores @ k_wide,
        (to_scores.transpose(2, 3) @ q).unflatten(1, (-1, repeats)).sum(2),
        (weights.transpose(2, 3) @ g).unflatten(1, (-1, repeats)).sum(2),
    )
    laid = (each if input_layout == "BNSD" else each.transpose(1, 2).contiguous() for each in made)
    return (*(each.to(query.dtype) for each in laid), None, query.new_empty(0))


# -- norms, rope -------------------------------------------------------------------------------------------------------


@counted
def npu_rms_norm(self, gamma, epsilon=1e-6):
    assert self.dtype == gamma.dtype in KNOWN and 2 <= self.dim() <= 8
    x, last = self.float(), tuple(range(-gamma.dim(), 0))
    scale = (x.square().mean(last, keepdim=True) + epsilon).rsqrt()
    return (x * scale * gamma.float()).to(self.dtype), scale


@counted
def npu_rms_norm_backward(dy, self, gamma, rstd):
    assert dy.dtype == self.dtype == gamma.dtype in KNOWN and rstd.dtype == torch.float32 and rstd.dim() == self.dim()
    g, x, last = dy.float(), self.float(), tuple(range(-gamma.dim(), 0))
    normed, h = x * rstd, g * gamma.float()
    to_x = rstd * (h - normed * (h * normed).mean(last, keepdim=True))
    return to_x.to(self.dtype), (g * normed).flatten(0, -gamma.dim() - 1).sum(0)


@counted
def npu_rotary_mul(input, r1, r2, rotary_mode="half", rotate=None):
    assert input.dim() == r1.dim() == r2.dim() == 4 and input.dtype == r1.dtype == r2.dtype in KNOWN and rotate is None
    assert r1.shape == r2.shape == (1, input.shape[1], 1, input.shape[3]) and input.shape[3] % 2 == 0
    x = input.float()
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    else:
        assert rotary_mode == "interleave"
        other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return (r1.float() * x + r2.float() * other).to(input.dtype)


# -- products of groups ------------------------------------------------------------------------------------------------


@counted
def npu_grouped_matmul(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0):
    (x,), (weight,), ends = x, weight, group_list.tolist()
    assert (
        x.dtype == weight.dtype in KNOWN
        and split_item == 3
        and group_list_type == 0
        and group_list.dtype == torch.int64
    )
    parts = [slice(first, last) for first, last in zip([0, *ends], ends, strict=False)]
    if group_type == 0:  # rows of x
        assert x.dim() == 2 and weight.dim() == 3 and ends[-1] == x.shape[0] and len(ends) == weight.shape[0]
        made = torch.cat([x[part].float() @ each.float() for part, each in zip(parts, weight, strict=True)])
    else:  # the dim that is summed over
        assert group_type == 2 and x.dim() == weight.dim() == 2 and ends[-1] == x.shape[1] == weight.shape[0]
        assert x.stride(0) == 1  # a transposed view
        made = torch.stack([x[:, part].float() @ weight[part].float() for part in parts])
    return [made.to(x.dtype)]
