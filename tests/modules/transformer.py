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
        self.weight = None if kind.endswith("no_weights") else nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if kind == "layer" else None

    def forward(self, x):
        if self.kind.startswith("layer"):
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        x = x if self.weight is None else x * self.weight
        return x if self.bias is None else x + self.bias


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        size, kv = config.head_size, config.kv_heads
        self.wq = nn.Linear(config.hidden, config.num_heads * size, config.qkv_bias)
        self.wk = nn.Linear(config.hidden, kv * size, config.qkv_bias)
        self.wv = nn.Linear(config.hidden, kv * size, config.qkv_bias)
        self.wo = nn.Linear(config.num_heads * size, config.hidden, config.out_bias)
        for name, count in (("q", config.num_heads), ("k", kv)):
            if config.qk_norm == "row":
                setattr(self, f"{name}_row_norm", Norm(config.norm, count * size, config.norm_eps))
            if config.qk_norm.startswith("head"):
                kind = config.norm if config.qk_norm == "head" else f"{config.norm}_no_weights"
                setattr(self, f"{name}_head_norm", Norm(kind, size, config.norm_eps))

    def normed(self, name, x):
        """Queries or keys [b, s, heads x size]."""
        if self.config.qk_norm == "row":
            return getattr(self, f"{name}_row_norm")(x)
        if self.config.qk_norm == "none":
            return x
        heads = x.unflatten(-1, (-1, self.config.head_size))
        return getattr(self, f"{name}_head_norm")(heads).flatten(-2)

    def turn(self, x):
        """Rotary embedding of [b, heads, s, d] in the form of two halves."""
        rotary = self.config.rotary_dim
        rates = self.config.rope.base ** (-torch.arange(0, rotary, 2, dtype=x.dtype) / rotary)
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * rates
        angles = torch.cat([angles, angles], -1)
        head, rest = x[..., :rotary], x[..., rotary:]
        first, second = head.chunk(2, -1)
        return torch.cat([head * angles.cos() + torch.cat([-second, first], -1) * angles.sin(), rest], -1)

    def forward(self, x, alibi=None):
        config, (batch, length, _) = self.config, x.shape
        made = self.normed("q", self.wq(x)), self.normed("k", self.wk(x)), self.wv(x)
        q, k, v = (each.view(batch, length, -1, config.head_size).transpose(1, 2) for each in made)
        if config.position == "rope":
            q, k = self.turn(q), self.turn(k)
        served = config.num_heads // config.kv_heads
        k, v = k.repeat_interleave(served, 1), v.repeat_interleave(served, 1)
        scale = config.scales.attention
        scores = q @ k.transpose(2, 3) * (1 / math.sqrt(config.head_size) if scale is None else scale)
        if alibi is not None:
            scores = scores + alibi
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

        self.act = getattr(F, config.activation)

    def forward(self, x):
        inner = self.act(self.w1(x))
        return self.w2(inner * self.w3(x) if hasattr(self, "w3") else inner)


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
        if self.settings.shared_gate:
            self.shared_gate = nn.Linear(config.hidden, 1, bias=False)
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
        if settings.shared_gate:
            return y + self.shared(x) * torch.sigmoid(self.shared_gate(x))
        return y + self.shared(x) if settings.num_shared else y


class Block(nn.Module):
    def __init__(self, config, layer=0):
        super().__init__()
        self.config = config
        routed = config.experts is not None and layer >= config.experts.num_dense_layers
        self.attention = (Attention if config.latent is None else LatentAttention)(config)
        self.feed_forward = (Mixture if routed else MLP)(config)
        names = ["attention_norm"] if config.shared_norm else ["attention_norm", "ffn_norm"]
        if config.norm_place == "around":
            names += ["attention_out_norm", "ffn_out_norm"]
        for name in names:
            setattr(self, name, Norm(config.norm, config.hidden, config.norm_eps))

    def forward(self, x, alibi):
        scale = self.config.scales.residual
        attend = (lambda y: self.attention(y, alibi)) if alibi is not None else self.attention
        if self.config.parallel_residual:
            other = self.attention_norm if self.config.shared_norm else self.ffn_norm
            return x + scale * attend(self.attention_norm(x)) + scale * self.feed_forward(other(x))
        for part, name in ((attend, "attention"), (self.feed_forward, "ffn")):
            norm = getattr(self, f"{name}_norm")
            if self.config.norm_place == "before":
                x = x + scale * part(norm(x))
            elif self.config.norm_place == "after":
                x = x + scale * norm(part(x))
            elif self.config.norm_place == "around":
                x = x + scale * getattr(self, f"{name}_out_norm")(part(norm(x)))
            else:
                x = norm(x + scale * part(x))
        return x


class Head(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden, config.hidden)
        self.norm = Norm(config.norm, config.hidden, config.norm_eps)
        self.act = getattr(F, config.activation)

    def forward(self, x):
        return self.norm(self.act(self.dense(x)))


class Decoder(nn.Module):
    """The mean cross entropy over all tokens."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab, config.hidden)
        if config.position == "learned":
            self.pos_embeddings = nn.Embedding(config.seq + config.first_position, config.hidden)
        if config.token_types:
            self.type_embeddings = nn.Embedding(config.token_types, config.hidden)
        if config.embedding_norm:
            self.embeddings = nn.ModuleDict({"norm": Norm(config.norm, config.hidden, config.norm_eps)})
        if config.head_transform:
            self.head = Head(config)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        if config.norm_place != "sum":
            self.norm = Norm(config.norm, config.hidden, config.norm_eps)
        self.output = nn.Linear(config.hidden, config.vocab, bias=config.head_bias)
        if config.tied:
            self.output.weight = None

    def forward(self, tokens, labels, token_types=None, alibi=None):
        config = self.config
        x = self.tok_embeddings(tokens) * config.scales.embedding
        if config.token_types:
            x = x + self.type_embeddings(token_types)
        if config.position == "learned":
            x = x + self.pos_embeddings(torch.arange(tokens.shape[1]) + config.first_position)
        if config.embedding_norm:
            x = self.embeddings["norm"](x)
        for layer in self.layers:
            x = layer(x, alibi)
        if config.norm_place != "sum":
            x = self.norm(x)
        if config.head_transform:
            x = self.head(x)
        logits = x @ (self.tok_embeddings.weight if config.tied else self.output.weight).T
        if config.head_bias:
            logits = logits + self.output.bias
        logits = logits * config.scales.logits
        if (cap := config.scales.logits_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def random_weights(graph, seed=0):
    """Whole parameters by name, float64: norms around one, matrices that keep activations near one."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for tensor in (*graph.parameters, *graph.constants):
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        scale = 1 / math.sqrt(tensor.shape[-1]) if len(tensor.shape) > 1 else 0.1
        found[tensor.name] = values * scale + (1.0 if "norm" in tensor.name and tensor.name.endswith("weight") else 0.0)
    return found


def random_tokens(graph, vocab, seed=1):
    """One batch, by the names of the graph's inputs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        tensor.name: torch.randint(0, 2 if tensor.name == "token_types" else vocab, tensor.shape, generator=generator)
        for tensor in graph.inputs
    }


def trained(config, weights, batches, lr=0.1, dtype=torch.float64):
    """Losses and weights after each batch with plain SGD, all samples at once on one device."""
    module = Decoder(config).to(dtype)
    alibi = weights.get("alibi")
    assert {name for name, _ in module.named_parameters()} == weights.keys() - {"alibi"}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(weights[name])
    losses = []
    for batch in batches:
        module.zero_grad()
        loss = module(**batch, alibi=alibi)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= lr * parameter.grad
    return losses, {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
