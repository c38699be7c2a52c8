"""A transformer in plain torch, written from the papers: the oracle for graphs of `plans.model.transformer`.

Parameters have the names of the graph's, so that weights and gradients can be compared by name.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, kind, width, eps):
        super().__init__()
        self.kind, self.eps = kind, eps
        self.weight = nn.Parameter(torch.ones(width))
        if kind == "layer":
            self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        if self.kind == "layer":
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        size, kv = config.head_size, config.kv_heads
        self.wq = nn.Linear(config.hidden, config.num_heads * size, config.qkv_bias)
        self.wk = nn.Linear(config.hidden, kv * size, config.qkv_bias)
        self.wv = nn.Linear(config.hidden, kv * size, config.qkv_bias)
        self.wo = nn.Linear(config.num_heads * size, config.hidden, config.out_bias)

    def turn(self, x):
        """Rotary embedding of [b, heads, s, d] in the form of two halves."""
        rotary = self.config.rotary_dim
        rates = self.config.rope.base ** (-torch.arange(0, rotary, 2, dtype=x.dtype) / rotary)
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        head, rest = x[..., :rotary], x[..., rotary:]
        first, second = head.chunk(2, -1)
        return torch.cat([head * angles.cos() + torch.cat([-second, first], -1) * angles.sin(), rest], -1)

    def forward(self, x):
        config, (batch, length, _) = self.config, x.shape
        q, k, v = (w(x).view(batch, length, -1, config.head_size).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        if config.position == "rope":
            q, k = self.turn(q), self.turn(k)
        served = config.num_heads // config.kv_heads
        k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)
        scores = q @ k.transpose(2, 3) / math.sqrt(config.head_size)
        if config.causal:
            scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))


class LatentAttention(nn.Module):
    """DeepSeek's, head by head; the elements that bear the position come first."""

    def __init__(self, config):
        super().__init__()
        self.config, latent = config, config.latent
        if latent.q_rank is None:
            self.wq = nn.Linear(config.hidden, config.num_heads * config.head_size, False)
        else:
            self.wq_a = nn.Linear(config.hidden, latent.q_rank, False)
            self.q_norm = Norm(config.norm, latent.q_rank, config.norm_eps)
            self.wq_b = nn.Linear(latent.q_rank, config.num_heads * config.head_size, False)
        self.wk_pos = nn.Linear(config.hidden, latent.rope_dim, False)
        self.wkv_a = nn.Linear(config.hidden, latent.kv_rank, False)
        self.kv_norm = Norm(config.norm, latent.kv_rank, config.norm_eps)
        self.wk_b = nn.Linear(latent.kv_rank, config.num_heads * latent.nope_dim, False)
        self.wv_b = nn.Linear(latent.kv_rank, config.num_heads * latent.value_dim, False)
        self.wo = nn.Linear(config.num_heads * latent.value_dim, config.hidden, False)

    def turned(self, x):
        """x[b, s, d] as complex numbers of its two halves, turned."""
        half = x.shape[-1] // 2
        rates = self.config.rope.base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rates
        made = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([made.real, made.imag], -1)

    def forward(self, x):
        config, latent = self.config, self.config.latent
        q = self.wq(x) if latent.q_rank is None else self.wq_b(self.q_norm(self.wq_a(x)))
        narrow, position = self.kv_norm(self.wkv_a(x)), self.turned(self.wk_pos(x))
        k, v, rope = self.wk_b(narrow), self.wv_b(narrow), latent.rope_dim
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        made = []
        for head in range(config.num_heads):
            mine = q[..., head * config.head_size : (head + 1) * config.head_size]
            own = k[..., head * latent.nope_dim : (head + 1) * latent.nope_dim]
            scores = self.turned(mine[..., :rope]) @ position.mT + mine[..., rope:] @ own.mT
            weights = (scores / math.sqrt(config.head_size)).masked_fill(later, -torch.inf).softmax(-1)
            made.append(weights @ v[..., head * latent.value_dim : (head + 1) * latent.value_dim])
        return self.wo(torch.cat(made, -1))


class MLP(nn.Module):
    def __init__(self, config, width=None):
        super().__init__()
        width = width or config.inner
        self.w1 = nn.Linear(config.hidden, width, config.mlp_bias)
        self.w2 = nn.Linear(width, config.hidden, config.mlp_bias)
        if config.gated:
            self.w3 = nn.Linear(config.hidden, width, config.mlp_bias)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x) if hasattr(self, "w3") else F.gelu(self.w1(x)))


class Grouped(nn.Module):
    def __init__(self, count, width, features):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, features, width))


class Bank(nn.Module):
    def __init__(self, experts, hidden):
        super().__init__()
        self.w1, self.w3 = (Grouped(experts.num_experts, experts.ffn, hidden) for _ in range(2))
        self.w2 = Grouped(experts.num_experts, hidden, experts.ffn)


class Mixture(nn.Module):
    """Token by token and choice by choice; `capacity` places of a sample at an expert, then it is full."""

    def __init__(self, config):
        super().__init__()
        self.settings = config.experts
        self.router = nn.Linear(config.hidden, self.settings.num_experts, bias=False)
        self.experts = Bank(self.settings, config.hidden)
        if self.settings.num_shared:
            self.shared = MLP(config, self.settings.num_shared * self.settings.ffn)
        self.dropped = 0

    def one(self, expert, x):
        bank = self.experts
        return (F.silu(x @ bank.w1.weight[expert]) * (x @ bank.w3.weight[expert])) @ bank.w2.weight[expert]

    def forward(self, x):
        settings, samples = self.settings, []
        capacity = math.ceil(settings.capacity_factor * settings.top_k * x.shape[1] / settings.num_experts)
        for sample in x:
            logits = self.router(sample)
            best = logits.sort(-1, descending=True).indices[:, : settings.top_k]
            shares = logits.softmax(-1) if settings.weights == "all" else logits.gather(1, best).softmax(-1)
            taken = [0] * settings.num_experts
            made = [torch.zeros_like(sample[0]) for _ in sample]
            for choice in range(settings.top_k):
                for token, row in enumerate(sample):
                    expert = int(best[token, choice])
                    if taken[expert] == capacity:
                        self.dropped += 1
                        continue
                    taken[expert] += 1
                    share = shares[token, expert] if settings.weights == "all" else shares[token, choice]
                    made[token] = made[token] + share * self.one(expert, row)
            samples.append(torch.stack(made))
        y = torch.stack(samples)
        return y + self.shared(x) if settings.num_shared else y


class Block(nn.Module):
    def __init__(self, config, layer=0):
        super().__init__()
        self.parallel = config.parallel_residual
        routed = config.experts is not None and layer >= config.experts.num_dense_layers
        self.attention = (Attention if config.latent is None else LatentAttention)(config)
        self.feed_forward = (Mixture if routed else MLP)(config)
        self.attention_norm, self.ffn_norm = (Norm(config.norm, config.hidden, config.norm_eps) for _ in range(2))

    def forward(self, x):
        attended = self.attention(self.attention_norm(x))
        if self.parallel:
            return x + attended + self.feed_forward(self.ffn_norm(x))
        x = x + attended
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    """The mean cross entropy over all tokens."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden)
        if config.position == "learned":
            self.pos_embeddings = nn.Embedding(config.seq, config.hidden)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = Norm(config.norm, config.hidden, config.norm_eps)
        if not config.tied:
            self.output = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens, labels):
        x = self.tok_embeddings(tokens)
        if self.config.position == "learned":
            x = x + self.pos_embeddings(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        table = self.tok_embeddings.weight if self.config.tied else self.output.weight
        return F.cross_entropy((self.norm(x) @ table.T).flatten(0, 1), labels.flatten())


def random_weights(graph, seed=0):
    """Whole parameters by name, float64: norms around one, matrices that keep activations near one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for tensor in graph.parameters:
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        scale = 1 / math.sqrt(tensor.shape[-1]) if len(tensor.shape) > 1 else 0.1
        found[tensor.name] = values * scale + (1.0 if "norm" in tensor.name and tensor.name.endswith("weight") else 0.0)
    return found


def random_tokens(graph, vocab, seed=1):
    """One batch, by the names of the graph's inputs."""
    generator = torch.Generator().manual_seed(seed)
    return {tensor.name: torch.randint(0, vocab, tensor.shape, generator=generator) for tensor in graph.inputs}


def trained(config, weights, batches, lr=0.1, dtype=torch.float64):
    """Losses and weights after each batch with plain SGD, all samples at once on one device."""
    module = Decoder(config).to(dtype)
    assert {name for name, _ in module.named_parameters()} == set(weights)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    losses = []
    for batch in batches:
        module.zero_grad()
        loss = module(batch["tokens"], batch["labels"])
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= lr * parameter.grad
    return losses, {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
