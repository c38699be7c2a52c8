"""Blocks of language models as people write them, that capture was not written for, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

__all__ = ["BLOCKS"]

BATCH, LENGTH, VOCAB, WIDTH = 64, 16, 64, 32


class LanguageModel(nn.Module):
    """An embedding, blocks and a head; what differs is the block."""

    def __init__(self, block: Callable[[], nn.Module], depth: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), labels.view(-1))


class LinearAttention(nn.Module):
    """Attention by the feature map elu(x) + 1, causal by cumulative sums (Katharopoulos et al., 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 8).unbind(2)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        states = torch.einsum("blhd,blhe->blhde", k, v).cumsum(1)
        made = torch.einsum("blhd,blhde->blhe", q, states)
        scale = torch.einsum("blhd,blhd->blh", q, k.cumsum(1)).clamp(min=1e-6)
        return self.out((made / scale.unsqueeze(-1)).flatten(2))


class AlibiAttention(nn.Module):
    """Attention with a linear bias of the distance (Press et al., 2021) in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        at = torch.arange(LENGTH)
        slopes = 2.0 ** (-2.0 * torch.arange(1, 5))
        bias = slopes[:, None, None] * (at[None] - at[:, None])
        self.register_buffer("bias", bias.masked_fill(at[None] > at[:, None], float("-inf")), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (each.reshape(batch, length, 4, 8).transpose(1, 2) for each in (q, k, v))
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias[:, :length, :length])
        return self.out(made.transpose(1, 2).reshape(batch, length, WIDTH))


class SlidingGroupedAttention(nn.Module):
    """Grouped queries, a sliding window and rotary positions by complex numbers."""

    def __init__(self, window: int = 4) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(WIDTH, WIDTH)
        self.window = window
        rates = 1.0 / 10_000 ** (torch.arange(0, 8, 2) / 8)
        angles = torch.outer(torch.arange(LENGTH), rates)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def _turned(self, x: Tensor) -> Tensor:
        paired = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(paired * self.turns[None, : x.shape[1], None]).flatten(3).type_as(x)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self._turned(self.q(x).view(batch, length, 4, 8)).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, 1, 8).unbind(2)
        k, v = (each.expand(-1, -1, 4, -1).transpose(1, 2) for each in (self._turned(k), v))
        at = torch.arange(length, device=x.device)
        apart = at[:, None] - at[None]
        seen = (apart >= 0) & (apart < self.window)
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(made.transpose(1, 2).flatten(2))


class SquaredReLU(nn.Module):
    """An MLP of relu(x)^2 (So et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(F.relu(self.up(self.norm(x))).square())
        return made


class GatedUnits(nn.Module):
    """GLU, ReGLU, GEGLU and a bilinear gate (Shazeer, 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 64) for _ in range(4))
        self.down = nn.Linear(4 * 32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = [F.glu(self.up[0](x), -1)]
        for up, gate in zip(self.up[1:], (F.relu, F.gelu, lambda each: each), strict=True):
            left, right = up(x).chunk(2, -1)
            made.append(gate(left) * right)
        return self.down(torch.cat(made, -1))


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of low rank (Hu et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first, self.second = nn.Parameter(torch.randn(WIDTH, 4) * 0.1), nn.Parameter(torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.base(x) + (x @ self.first @ self.second) * 2.0
        return F.gelu(made)


class Recomputed(nn.Module):
    """An MLP under torch.utils.checkpoint, in the form of 2021."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.net, x, use_reentrant=True)
        return made


class Conformer(nn.Module):
    """A Conformer block (Gulati et al., 2020): half MLPs, attention, a gated depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.wide, self.narrow = nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.depth, self.batch_norm = nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.first(x)
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = F.glu(self.wide(self.norms[1](x).transpose(1, 2)), 1)
        x = x + self.narrow(F.silu(self.batch_norm(self.depth(y)))).transpose(1, 2)
        return self.norms[2](x + 0.5 * self.last(x))


class ScaledUnits(nn.Module):
    """Weight norm and spectral norm, by parametrizations and in the old form."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 64))
        self.old = nn.utils.weight_norm(nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.old(F.relu(self.up(x)))
        return made


class SpectralUnits(nn.Module):
    """Spectral norm in evaluation mode of its power iteration, which a forward would change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = parametrizations.spectral_norm(nn.Linear(WIDTH, 64)), nn.Linear(64, WIDTH)
        self.up.parametrizations.eval()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(torch.tanh(self.up(x)))
        return made


class Swish(torch.autograd.Function):
    """x sigmoid(x) that keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return g * gate * (1 + x * (1 - gate))


class OwnSwish(nn.Module):
    """An MLP whose activation is an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down(Swish.apply(self.up(x)))
        return made


class SpectralMixer(nn.Module):
    """A global filter (Rao et al., 2021): products in the frequencies of a real FFT."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(LENGTH // 2 + 1, WIDTH, 2) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft(x, dim=1, norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft(y, n=x.shape[1], dim=1, norm="ortho")


class SoftExperts(nn.Module):
    """Experts in a loop, each on the tokens that chose it by a mask (no sorting)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            own = (weights * (chosen == number)).sum(-1, keepdim=True)
            made = made + own * expert(x)
        return made


_WORDS = (((BATCH, LENGTH), "int64"), ((BATCH, LENGTH), "int64"))


def _blocks(block: Callable[[], nn.Module], **settings: Any) -> Callable[[], tuple[nn.Module, tuple[Any, ...]]]:
    return lambda: (LanguageModel(block, **settings), _WORDS)


BLOCKS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "linear attention": _blocks(LinearAttention),
    "ALiBi": _blocks(AlibiAttention),
    "sliding window, grouped queries, complex positions": _blocks(SlidingGroupedAttention),
    "squared ReLU, tied": _blocks(SquaredReLU, tied=True),
    "gated units": _blocks(GatedUnits),
    "LoRA": _blocks(LowRank),
    "checkpoint, reentrant": _blocks(Recomputed),
    "Conformer": _blocks(Conformer),
    "weight norm": _blocks(ScaledUnits),
    "spectral norm": _blocks(SpectralUnits),
    "own activation function": _blocks(OwnSwish),
    "global filter by FFT": _blocks(SpectralMixer),
    "experts in a loop": _blocks(SoftExperts),
}  # fmt: skip
"""Name -> what makes it."""
