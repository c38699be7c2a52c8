"""Transformers as nanoGPT and the models of transformers 5 write them, small: `MODULES` has each with its batch.

Fused products, kernels stored transposed, parts of heads turned, positions with an offset: what differs between
libraries is kept; branches that these sizes do not take, caches and options are left out.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 16, 32, 4, 2, 8


# -- nanoGPT (karpathy/nanoGPT, model.py) ------------------------------------------------------------------------------


class NanoNorm(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class NanoAttention(nn.Module):
    """By torch's own call, or written out with a mask that is made as `mask` says."""

    def __init__(self, bias, mask="", dropout=0.0):
        super().__init__()
        self.mask, self.dropout = mask, nn.Dropout(dropout)
        if mask == "buffer":
            self.register_buffer("bias", torch.tril(torch.ones(2 * LENGTH, 2 * LENGTH)).view(1, 1, 32, 32))
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        k = k.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        q = q.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        v = v.view(B, T, HEADS, C // HEADS).transpose(1, 2)
        y = self.attend(q, k, v) if self.mask else (
            F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        )  # fmt: skip
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

    def attend(self, q, k, v):
        """nanoGPT's slow attention, minGPT's, and those of transformers."""
        T = q.size(2)
        att = q @ k.transpose(-2, -1)
        if self.mask == "buffer":
            att = (att * (1.0 / math.sqrt(k.size(-1)))).masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        elif self.mask == "tril":
            att = (
                att.masked_fill(~torch.tril(torch.ones(T, T, device=q.device)).bool(), -torch.inf) * k.size(-1) ** -0.5
            )
        elif self.mask == "where":
            causal = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
            least = torch.full([], torch.finfo(att.dtype).min, dtype=att.dtype, device=att.device)
            att = torch.where(causal, att / torch.full([], k.size(-1) ** 0.5, device=q.device), least)
        elif self.mask == "added":
            att = att / math.sqrt(k.size(-1)) + torch.full((T, T), float("-inf"), device=q.device).triu(1)
        elif self.mask == "all":
            att = torch.matmul(q * k.size(-1) ** -0.5, k.permute(0, 1, 3, 2))
        elif self.mask == "window":
            near = torch.ones(T, T, dtype=torch.bool, device=q.device).tril().triu(-4)
            att = (att * k.size(-1) ** -0.5).masked_fill(~near, float("-inf"))
        elif self.mask == "small":
            later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
            att = (att * k.size(-1) ** -0.5).masked_fill(later, -5.0)
        elif self.mask == "read":
            weights = (att * k.size(-1) ** -0.5).softmax(-1)
            return weights @ v + weights.sum(-1, keepdim=True)
        if self.mask == "where":
            return torch.matmul(F.softmax(att, dim=-1, dtype=torch.float32).to(q.dtype), v)
        return self.dropout(F.softmax(att, dim=-1)) @ v


class NanoMLP(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.c_fc, self.gelu = nn.Linear(WIDTH, 4 * WIDTH, bias=bias), nn.GELU()
        self.c_proj = nn.Linear(4 * WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class NanoBlock(nn.Module):
    def __init__(self, bias, **attention):
        super().__init__()
        self.ln_1, self.ln_2 = NanoNorm(WIDTH, bias), NanoNorm(WIDTH, bias)
        self.attn, self.mlp = NanoAttention(bias, **attention), NanoMLP(bias)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, bias=True, tied=True, rows=LENGTH, **attention):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH), "wpe": nn.Embedding(rows, WIDTH),
                "h": nn.ModuleList(NanoBlock(bias, **attention) for _ in range(LAYERS)), "ln_f": NanoNorm(WIDTH, bias),
            }
        )  # fmt: skip
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        t = idx.size(1)
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


# -- transformers: what its models share -------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """A backbone of transformers, its head, and the loss of its logits; or that of models that shift their labels.

    `shifts` is "padded" as in transformers 5, or "cut" as in transformers 4 and most code written by hand.
    """

    def __init__(self, model, bias=False, tied=False, shifts="", logits_scaling=1.0):
        super().__init__()
        self.shifts, self.logits_scaling = shifts, logits_scaling
        self.model, self.lm_head = model, nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.lm_head.weight = model.words.weight

    def forward(self, input_ids, labels):
        logits = self.lm_head(self.model(input_ids)) / self.logits_scaling
        if self.shifts == "padded":
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
            return F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1), ignore_index=-100, reduction="mean")
        if self.shifts == "cut":
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def sdpa(q, k, v, causal=True, **settings):
    """transformers.integrations.sdpa_attention: heads before the length, and back."""
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=causal, **settings)
    return y.transpose(1, 2).contiguous()


class RotaryEmbedding(nn.Module):
    def __init__(self, size, base=10000.0):
        super().__init__()
        rates = 1.0 / (base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
        self.register_buffer("inv_freq", rates, persistent=False)
        self.attention_scaling = 1.0

    @torch.no_grad()
    def forward(self, x, position_ids):
        expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1).to(x.device)
        positions = position_ids[:, None, :].float()
        with torch.autocast(device_type="cpu", enabled=False):
            freqs = (expanded.float() @ positions.float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            cos, sin = emb.cos() * self.attention_scaling, emb.sin() * self.attention_scaling
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


def rotate_half(x):
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    """Of a head the first elements are turned, as many as the tables have, and the others pass."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = cos.shape[-1]
    q_rot, q_pass = q[..., :turned], q[..., turned:]
    k_rot, k_pass = k[..., :turned], k[..., turned:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat([q_embed, q_pass], dim=-1), torch.cat([k_embed, k_pass], dim=-1)


def repeat_kv(x, n_rep):
    batch, heads, length, size = x.shape
    if n_rep == 1:
        return x
    return x[:, :, None, :, :].expand(batch, heads, n_rep, length, size).reshape(batch, heads * n_rep, length, size)


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


def counted(ids):
    return (torch.arange(ids.shape[1], device=ids.device) + 0).unsqueeze(0)  # after as many tokens as are in a cache


# -- GPT-2 -------------------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer with its weight transposed."""

    def __init__(self, out, inside):
        super().__init__()
        self.nf = out
        self.weight, self.bias = nn.Parameter(torch.empty(inside, out)), nn.Parameter(torch.zeros(out))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class NewGELUActivation(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPT2Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, hidden_states):
        query_states, key_states, value_states = self.c_attn(hidden_states).split(WIDTH, dim=2)
        shape_kv = (*key_states.shape[:-1], -1, WIDTH // HEADS)
        key_states = key_states.view(shape_kv).transpose(1, 2)
        value_states = value_states.view(shape_kv).transpose(1, 2)
        query_states = query_states.view((*query_states.shape[:-1], -1, WIDTH // HEADS)).transpose(1, 2)
        y = sdpa(query_states, key_states, value_states, scale=(WIDTH // HEADS) ** -0.5)
        y = y.reshape(*y.shape[:-2], -1).contiguous()
        return self.resid_dropout(self.c_proj(y))


class GPT2Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), GPT2Attention(dropout), nn.LayerNorm(WIDTH)
        self.mlp = nn.ModuleDict({"c_fc": Conv1D(4 * WIDTH, WIDTH), "c_proj": Conv1D(WIDTH, 4 * WIDTH)})
        self.act, self.dropout = NewGELUActivation(), nn.Dropout(dropout)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.attn(self.ln_1(hidden_states)) + residual
        residual = hidden_states
        made = self.dropout(self.mlp.c_proj(self.act(self.mlp.c_fc(self.ln_2(hidden_states)))))
        return residual + made


class GPT2Model(nn.Module):
    def __init__(self, dropout=0.0, rows=LENGTH):
        super().__init__()
        self.words, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(rows, WIDTH)
        self.drop, self.h = nn.Dropout(dropout), nn.ModuleList(GPT2Block(dropout) for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, input_ids):
        x = self.words(input_ids) + self.wpe(counted(input_ids))
        x = self.drop(x)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


# -- GPT-NeoX ----------------------------------------------------------------------------------------------------------


class NeoXAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_size = WIDTH // HEADS
        self.query_key_value, self.dense = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states, cos, sin):
        input_shape = hidden_states.shape[:-1]
        qkv = self.query_key_value(hidden_states).view((*input_shape, -1, 3 * self.head_size)).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        y = sdpa(q, k, v, scale=self.head_size**-0.5)
        return self.dense(y.reshape(*input_shape, -1).contiguous())


class NeoXLayer(nn.Module):
    def __init__(self, parallel):
        super().__init__()
        self.parallel = parallel
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.post_attention_dropout, self.post_mlp_dropout = nn.Dropout(0.0), nn.Dropout(0.0)
        self.attention = NeoXAttention()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def mlp(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))

    def forward(self, hidden_states, cos, sin):
        attn_output = self.post_attention_dropout(self.attention(self.input_layernorm(hidden_states), cos, sin))
        if self.parallel:
            mlp_output = self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(hidden_states)))
            return mlp_output + attn_output + hidden_states
        attn_output = attn_output + hidden_states
        mlp_output = self.post_mlp_dropout(self.mlp(self.post_attention_layernorm(attn_output)))
        return mlp_output + attn_output


class NeoXModel(nn.Module):
    def __init__(self, share=0.25, parallel=True):
        super().__init__()
        self.words, self.emb_dropout = nn.Embedding(VOCAB, WIDTH), nn.Dropout(0.0)
        self.layers = nn.ModuleList(NeoXLayer(parallel) for _ in range(LAYERS))
        self.final_layer_norm = nn.LayerNorm(WIDTH)
        self.rotary_emb = RotaryEmbedding(int(WIDTH // HEADS * share))

    def forward(self, input_ids):
        x = self.emb_dropout(self.words(input_ids))
        cos, sin = self.rotary_emb(x, counted(input_ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.final_layer_norm(x)


# -- Phi-3 -------------------------------------------------------------------------------------------------------------


class Phi3Attention(nn.Module):
    def __init__(self, kv_heads, like_granite=False):
        super().__init__()
        if like_granite:
            self.q_norm, self.k_norm = RMSNorm(WIDTH // HEADS), RMSNorm(WIDTH // HEADS)
        self.head_dim, self.kv_heads = WIDTH // HEADS, kv_heads
        self.qkv_proj = nn.Linear(WIDTH, WIDTH + 2 * kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden_states, cos, sin):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        qkv = self.qkv_proj(hidden_states)
        query_pos, kv = HEADS * self.head_dim, self.kv_heads * self.head_dim
        q = qkv[..., :query_pos].view(hidden_shape).transpose(1, 2)
        k = qkv[..., query_pos : query_pos + kv].view(hidden_shape).transpose(1, 2)
        v = qkv[..., query_pos + kv :].view(hidden_shape).transpose(1, 2)
        if hasattr(self, "q_norm"):  # of heads that stand before the length, as in EXAONE 4 and Apertus
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        k, v = (repeat_kv(each, HEADS // self.kv_heads) for each in (k, v))
        y = sdpa(q, k, v, scale=self.head_dim**-0.5)
        return self.o_proj(y.reshape(*input_shape, -1).contiguous())


class Phi3Layer(nn.Module):
    def __init__(self, kv_heads, like_granite=False):
        super().__init__()
        self.residual_multiplier = 0.22 if like_granite else 1.0
        self.self_attn = Phi3Attention(kv_heads, like_granite)
        self.gate_up_proj = nn.Linear(WIDTH, 2 * 48, bias=False)
        self.down_proj, self.activation_fn = nn.Linear(48, WIDTH, bias=False), nn.SiLU()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(WIDTH), RMSNorm(WIDTH)
        self.resid_attn_dropout, self.resid_mlp_dropout = nn.Dropout(0.0), nn.Dropout(0.0)

    def mlp(self, x):
        gate, up_states = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up_states * self.activation_fn(gate))

    def forward(self, hidden_states, cos, sin):
        residual = hidden_states
        made = self.self_attn(self.input_layernorm(hidden_states), cos, sin)
        hidden_states = residual + self.resid_attn_dropout(made) * self.residual_multiplier
        residual = hidden_states
        made = self.mlp(self.post_attention_layernorm(hidden_states))
        return residual + self.resid_mlp_dropout(made) * self.residual_multiplier


class Phi3Model(nn.Module):
    def __init__(self, kv_heads=2, share=1.0, like_granite=False, num_layers=LAYERS):
        super().__init__()
        self.words, self.embedding_multiplier = nn.Embedding(VOCAB, WIDTH), 12.0 if like_granite else 1.0
        self.layers = nn.ModuleList(Phi3Layer(kv_heads, like_granite) for _ in range(num_layers))
        self.norm, self.rotary_emb = RMSNorm(WIDTH), RotaryEmbedding(int(WIDTH // HEADS * share))

    def forward(self, input_ids):
        x = self.words(input_ids) * self.embedding_multiplier
        cos, sin = self.rotary_emb(x, counted(input_ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


# -- OPT ---------------------------------------------------------------------------------------------------------------


class OPTAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling = (WIDTH // HEADS) ** -0.5
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states):
        batch, length, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states) * self.scaling
        query_states = query_states.view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(batch, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
        y = sdpa(query_states, key_states, value_states, scale=1.0)
        return self.out_proj(y.reshape(batch, length, -1).contiguous())


class OPTLayer(nn.Module):
    def __init__(self, norm_first, dropout):
        super().__init__()
        self.dropout = dropout
        self.norm_first, self.self_attn = norm_first, OPTAttention()
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.fc1, self.fc2, self.activation_fn = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.ReLU()

    def forward(self, hidden_states):
        residual = hidden_states
        if self.norm_first:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = F.dropout(self.self_attn(hidden_states), p=self.dropout, training=self.training)
        hidden_states = residual + hidden_states
        if not self.norm_first:
            hidden_states = self.self_attn_layer_norm(hidden_states)
        shape = hidden_states.shape
        hidden_states = hidden_states.reshape(-1, hidden_states.size(-1))
        residual = hidden_states
        if self.norm_first:
            hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = self.fc2(self.activation_fn(self.fc1(hidden_states)))
        hidden_states = F.dropout(hidden_states, p=self.dropout, training=self.training)
        hidden_states = (residual + hidden_states).view(shape)
        return hidden_states if self.norm_first else self.final_layer_norm(hidden_states)


class OPTModel(nn.Module):
    def __init__(self, norm_first=True, rows=LENGTH, dropout=0.0):
        super().__init__()
        self.words, self.embed_positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(rows + 2, WIDTH)
        self.layers = nn.ModuleList(OPTLayer(norm_first, dropout) for _ in range(LAYERS))
        self.final_layer_norm = nn.LayerNorm(WIDTH) if norm_first else None

    def forward(self, input_ids):
        x = self.words(input_ids)
        mask = torch.ones(x.shape[0], x.shape[1], device=x.device)
        positions = (torch.cumsum(mask, dim=1) * mask - 1).long()
        x = x + self.embed_positions(positions + 2)
        for layer in self.layers:
            x = layer(x)
        return x if self.final_layer_norm is None else self.final_layer_norm(x)


# -- BERT --------------------------------------------------------------------------------------------------------------


class BertLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.attention_dense, self.attention_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.intermediate, self.output = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.output_norm, self.dropout = nn.LayerNorm(WIDTH, eps=1e-12), nn.Dropout(0.0)

    def forward(self, x):
        shape = (*x.shape[:-1], -1, WIDTH // HEADS)
        q, k, v = (part(x).view(*shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = sdpa(q, k, v, causal=False, scale=(WIDTH // HEADS) ** -0.5)
        y = self.dropout(self.attention_dense(y.reshape(*x.shape[:-1], -1).contiguous()))
        x = self.attention_norm(y + x)
        y = self.dropout(self.output(F.gelu(self.intermediate(x))))
        return self.output_norm(y + x)


class BertForMaskedLM(nn.Module):
    def __init__(self, rows=LENGTH, types=True):
        super().__init__()
        self.word_embeddings, self.position_embeddings = nn.Embedding(VOCAB, WIDTH), nn.Embedding(rows, WIDTH)
        self.token_type_embeddings, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.register_buffer("position_ids", torch.arange(rows).expand((1, -1)), persistent=False)
        self.register_buffer("token_type_ids", torch.zeros(1, rows, dtype=torch.long), persistent=False)
        self.layer, self.dropout = nn.ModuleList(BertLayer() for _ in range(LAYERS)), nn.Dropout(0.0)
        self.dense, self.transform_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.decoder = nn.Linear(WIDTH, VOCAB, bias=True)
        self.decoder.weight = self.word_embeddings.weight

    def forward(self, input_ids, labels):
        batch, length = input_ids.shape
        position_ids = self.position_ids[:, :length]
        types = torch.gather(self.token_type_ids.expand(position_ids.shape[0], -1), dim=1, index=position_ids)
        types = types.expand(batch, length)
        x = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        x = x + self.position_embeddings(position_ids)
        x = self.dropout(self.norm(x))
        for layer in self.layer:
            x = layer(x)
        x = self.transform_norm(F.gelu(self.dense(x)))
        return F.cross_entropy(self.decoder(x).view(-1, VOCAB), labels.view(-1))


# -- Cohere and GLM ----------------------------------------------------------------------------------------------------


class NeighbourRotary(nn.Module):
    """Angles of pairs (2i, 2i + 1): each cosine and sine stands twice, side by side."""

    def __init__(self, size, twice):
        super().__init__()
        rates = 1.0 / (10000.0 ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size))
        self.register_buffer("inv_freq", rates, persistent=False)
        self.twice = twice

    @torch.no_grad()
    def forward(self, x, position_ids):
        expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        freqs = (expanded @ position_ids[:, None, :].float()).transpose(1, 2)
        emb = torch.repeat_interleave(freqs, 2, dim=-1) if self.twice == "angles" else torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_neighbours(x):
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def turned_neighbours(x, cos, sin, twice):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if twice == "cosines":  # as GLM: of two equal halves the first, each of it twice
        cos, sin = (each[..., : each.shape[-1] // 2].repeat_interleave(2, dim=-1) for each in (cos, sin))
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat([rotated * cos + rotate_neighbours(rotated) * sin, passed], dim=-1)


class CohereNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(WIDTH)), 1e-5

    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True)
        x = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(torch.float32) * x).to(dtype)


class CohereLayer(nn.Module):
    def __init__(self, twice):
        super().__init__()
        self.twice, narrow = twice, WIDTH // 2
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, narrow, bias=False), nn.Linear(WIDTH, narrow, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down, self.norm = nn.Linear(48, WIDTH, bias=False), CohereNorm()

    def forward(self, x, cos, sin):
        y = self.norm(x)
        shape = (*x.shape[:-1], -1, WIDTH // HEADS)
        q, k, v = (part(y).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (turned_neighbours(each, cos, sin, self.twice) for each in (q, k))
        k, v = (repeat_kv(each, 2) for each in (k, v))
        made = self.o(sdpa(q, k, v, scale=(WIDTH // HEADS) ** -0.5).reshape(*x.shape[:-1], -1))
        return x + made + self.down(F.silu(self.gate(y)) * self.up(y))


class CohereModel(nn.Module):
    """Cohere; with `twice="cosines"` positions as GLM has them."""

    def __init__(self, twice="angles", share=1.0):
        super().__init__()
        self.words, self.norm = nn.Embedding(VOCAB, WIDTH), CohereNorm()
        self.layers = nn.ModuleList(CohereLayer(twice) for _ in range(LAYERS))
        self.rotary_emb = NeighbourRotary(int(WIDTH // HEADS * share), twice)

    def forward(self, input_ids):
        x = self.words(input_ids)
        cos, sin = self.rotary_emb(x, counted(input_ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


# -- Llama with tables stored doubled ----------------------------------------------------------------------------------


class DoubledLlama(nn.Module):
    """cos and sin [length, size], both halves of a row the same, as many hand-written models keep them."""

    def __init__(self, same=True, rows=LENGTH, checkpointed=0, norm=RMSNorm, scale=None):
        super().__init__()
        self.register_buffer("scale", None if scale is None else torch.tensor(scale), persistent=False)
        self.words, size, self.checkpointed = nn.Embedding(VOCAB, WIDTH), WIDTH // HEADS, checkpointed
        self.layers = nn.ModuleList(DoubledLayer(norm) for _ in range(LAYERS))
        self.norm = norm(WIDTH)
        freqs = torch.outer(torch.arange(rows), 1e4 ** (-torch.arange(0, size, 2) / size))
        emb = torch.cat((freqs, freqs if same else 2 * freqs), dim=-1)
        self.register_buffer("cos", emb.cos())
        self.register_buffer("sin", emb.sin())

    def forward(self, input_ids):
        x = self.words(input_ids)
        if self.scale is not None:
            x = x * self.scale.to(x.dtype)
        for number, layer in enumerate(self.layers):
            arguments = (x, self.cos[: x.shape[1]], self.sin[: x.shape[1]])
            x = checkpoint(layer, *arguments, use_reentrant=False) if number < self.checkpointed else layer(*arguments)
        return self.norm(x)


class ComplexLlama(DoubledLlama):
    """As Meta's code: pairs of neighbours as complex numbers, turned by those of a table."""

    def __init__(self):
        super().__init__()
        size = WIDTH // HEADS
        angles = torch.outer(torch.arange(2.0 * LENGTH), 1e4 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, input_ids):
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, self.freqs_cis[: x.shape[1]], None)
        return self.norm(x)


class GemmaNorm(nn.Module):
    """As Gemma of transformers: the weight begins at 0, and 1 is added to it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class DoubledLayer(nn.Module):
    def __init__(self, norm=RMSNorm):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 48, bias=False)
        self.down, self.first, self.second = nn.Linear(48, WIDTH, bias=False), norm(WIDTH), norm(WIDTH)

    def forward(self, x, cos, sin):
        y, shape = self.first(x), (*x.shape[:-1], HEADS, -1)
        q, k, v = (part(y).view(shape) for part in (self.q, self.k, self.v))
        if cos.is_complex():
            q, k = (self.turned(each, cos.view(1, x.shape[1], 1, -1)) for each in (q, k))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        if not cos.is_complex():
            q, k = (each * cos + rotate_half(each) * sin for each in (q, k))
        x = x + self.o(sdpa(q, k, v).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def turned(self, x, table):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table).flatten(3).type_as(x)


MODULES = {
    "nanoGPT": NanoGPT,
    "nanoGPT, untied, no biases": lambda: NanoGPT(bias=False, tied=False),
    "nanoGPT, mask in a buffer, dropout": lambda: NanoGPT(mask="buffer", dropout=0.1),
    "nanoGPT, mask by tril": lambda: NanoGPT(mask="tril"),
    "nanoGPT, mask by where": lambda: NanoGPT(mask="where"),
    "nanoGPT, added mask": lambda: NanoGPT(mask="added"),
    "nanoGPT, no mask": lambda: NanoGPT(mask="all"),
    "GPT-2": lambda: LanguageModel(GPT2Model(), tied=True),
    "GPT-2, dropout, more rows": lambda: LanguageModel(GPT2Model(dropout=0.1, rows=2 * LENGTH), tied=True),
    "GPT-NeoX": lambda: LanguageModel(NeoXModel()),
    "GPT-NeoX, one after the other": lambda: LanguageModel(NeoXModel(share=1.0, parallel=False)),
    "Phi-4-mini": lambda: LanguageModel(Phi3Model(kv_heads=4, share=0.75), tied=True),
    "Granite": lambda: LanguageModel(Phi3Model(like_granite=True), logits_scaling=8.0),
    "Phi-3, padded labels": lambda: LanguageModel(Phi3Model(num_layers=4), shifts="padded"),
    "GPT-NeoX, cut labels": lambda: LanguageModel(NeoXModel(), shifts="cut"),
    "OPT, more rows": lambda: LanguageModel(OPTModel(rows=2 * LENGTH), tied=True),
    "OPT, dropout": lambda: LanguageModel(OPTModel(dropout=0.1), tied=True),
    "OPT, norms after the sums": lambda: LanguageModel(OPTModel(norm_first=False), tied=True),
    "BERT": BertForMaskedLM,
    "BERT, more rows": lambda: BertForMaskedLM(rows=2 * LENGTH),
    "Cohere": lambda: LanguageModel(CohereModel(), tied=True, logits_scaling=16.0),
    "Cohere, positions of GLM": lambda: LanguageModel(CohereModel("cosines", 0.5), tied=True, logits_scaling=16.0),
    "doubled tables": lambda: LanguageModel(DoubledLlama()),
    "Llama of Meta": lambda: LanguageModel(ComplexLlama()),
    "Gemma": lambda: LanguageModel(DoubledLlama(norm=GemmaNorm, scale=6.0), tied=True),
    "doubled tables, more rows": lambda: LanguageModel(DoubledLlama(rows=2 * LENGTH)),
}
"""Name -> what makes the module, on tokens and labels [BATCH, LENGTH]."""


OF_TRANSFORMERS = {
    "llama": {}, "mistral": {"sliding_window": 4096}, "qwen3": {"head_dim": 8}, "olmo2": {}, "phi": {}, "phi3": {},
    "gpt_neox": {}, "stablelm": {},  "starcoder2": {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "gemma": {"head_dim": 8}, "cohere": {"logit_scale": 0.0625},
    "glm": {"head_dim": 8}, "exaone4": {"layer_types": ["full_attention"] * 2},
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.25
    },
    "gpt2": {"n_positions": LENGTH + 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neo": {"num_layers": 2, "num_heads": HEADS, "attention_types": [[["global"], 2]], "resid_dropout": 0.0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": WIDTH, "dropout": 0.0},
}  # fmt: skip
"""Models of transformers that are recognised with their own loss, and what their configurations need beside sizes."""


class OwnLoss(nn.Module):
    """A model of transformers with the loss that it makes of its labels."""

    def __init__(self, model_type):
        super().__init__()
        import transformers

        config = transformers.AutoConfig.for_model(
            model_type, **{
                "vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS,
                "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": LENGTH + 4,
                "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **OF_TRANSFORMERS[model_type],
            }
        )  # fmt: skip
        self.net = transformers.AutoModelForCausalLM.from_config(config)

    def forward(self, ids, labels):
        return self.net(input_ids=ids, labels=labels).loss


def made(name):
    torch.manual_seed(3)
    library, _, model_type = name.partition("transformers: ")
    return MODULES[library]() if library else OwnLoss(model_type)


def batch(name=""):
    """Tokens and labels, of which one in eight is ignored where the model shifts them."""
    generator = torch.Generator().manual_seed(4)
    tokens, labels = (torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(2))
    if "labels" in name:
        labels[torch.rand(labels.shape, generator=generator) < 1 / 8] = -100
    return tokens, labels
