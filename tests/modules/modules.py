"""Modules as users write them, in double precision, for tests of capture: `MODULES` has each with its data."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.field.ordinary import ORDINARY
from tests.modules.buffers import BUFFERS
from tests.modules.data import BATCH, LENGTH, WIDTH, WORDS, images, linear, parameter, sequences, tokens, vectors
from tests.modules.forwards import FORWARDS
from tests.modules.losses import LOSSES


class Net(nn.Module):
    """`forward(parts, x)` against the labels, by MSE or, of whole-number labels, cross entropy."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            is_buffer = isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter)
            self.register_buffer(name, part) if is_buffer else setattr(self, name, part)

    def forward(self, x, label):
        made = self.function(self, x)
        if label.is_floating_point():
            return F.mse_loss(made, label)
        return F.cross_entropy(made.reshape(-1, made.shape[-1]), label.reshape(-1))


def noisy(m, x):
    """Random numbers of every kind that a forward may draw, some of them shared by all samples."""
    y = m.fc(x) + torch.randn_like(x) * m.spread(x).exp() + torch.rand(len(x), 1, WIDTH, dtype=x.dtype)
    y = y * torch.bernoulli(torch.full_like(y, 0.7)) + torch.randn(WIDTH, dtype=x.dtype) * m.scale
    y = y + m.table[torch.randint(1, 5, (len(x), LENGTH))] + torch.empty_like(y).uniform_(-1, 1)
    y = F.gumbel_softmax(y, 0.7) + F.dropout1d(y, 0.3) + F.feature_alpha_dropout(y, 0.2, True)
    return F.alpha_dropout(m.net(y)[0], 0.2, True)


def rows_of_masks(m, x):
    """Rows that masks select: read and computed, written back, added, and found by their places."""
    h, mask = m.fc(x), x[..., 0] > 0
    out = torch.zeros_like(h)
    out[mask] = m.net(h[mask]).log_softmax(-1)
    out[~mask] = h[~mask].abs().log() * 0.1
    flat = out.flatten(0, 1)
    places = torch.nonzero(x.flatten(0, 1)[:, 1] > 0).squeeze(-1)
    flat = flat.index_add(0, places, m.out(flat[places]))
    return flat.view_as(h)


def layer(**settings):
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, **settings)


def shifted(m, x):
    """The relative shift of Transformer-XL, where the batch is dim 2, and an image turned by the data."""
    length, batch = x.shape[1], x.shape[0]
    scores = m.fc(x).permute(1, 2, 0).unsqueeze(-1)
    padded = torch.cat([torch.zeros(length, 1, batch, 1, dtype=x.dtype), scores], 1)
    moved = padded.view(scores.size(1) + 1, length, batch, 1)[1:].view_as(scores).squeeze(-1).permute(2, 0, 1)
    grid = F.affine_grid(m.turn(x).mean(1).view(-1, 2, 3), [batch, 1, length, WIDTH], align_corners=False)
    return moved + F.grid_sample(x.unsqueeze(1), grid, align_corners=False).squeeze(1)


def state_space(m, x):
    """A diagonal state space (Gu et al., 2022): complex numbers made of real ones, in the frequencies."""
    rates = -m.decay.exp() + 1j * m.turns
    kernel = (torch.exp(rates[..., None] * torch.arange(LENGTH)) / (rates[..., None] - 2)).real.sum(1)
    spectrum = torch.fft.rfft(m.fc(x).transpose(1, 2), n=2 * LENGTH) * torch.fft.rfft(kernel, n=2 * LENGTH)
    return torch.fft.irfft(spectrum, n=2 * LENGTH)[..., :LENGTH].transpose(1, 2)


def causal_mask():
    return nn.Transformer.generate_square_subsequent_mask(LENGTH)


def class_token(m, x):
    x = m.patches(x).flatten(2).transpose(1, 2)
    x = torch.cat([m.token.expand(x.size(0), -1, -1), x], 1) + m.positions
    return m.head(m.layers(x)[:, 0])


def positions_per_sample(m, ids):
    positions = torch.arange(ids.shape[1]).unsqueeze(0).expand(ids.shape[0], -1)
    return m.head(m.words(ids) + m.positions(positions) + m.positions(positions[:, :1].repeat(1, 1)))


def recurrent(m, x):
    state, states = x.new_zeros(x.size(0), WIDTH), []
    for step in range(x.size(1)):
        state = torch.tanh(m.inside(x[:, step]) + m.again(state))
        states.append(state)
    return m.out(torch.stack(states, 1))


def packed(m, x):
    """Sequences of several lengths, in both directions and layers, with all that a recurrent layer returns."""
    lengths = x[:, 0, 0].mul(7).long().abs() % LENGTH + 1
    rows = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
    rows, (state, cell) = m.net(rows)
    made, again = nn.utils.rnn.pad_packed_sequence(rows, True, padding_value=0.5, total_length=LENGTH)
    return m.fc(made) * again.view(-1, 1, 1) + m.out(state.sum(0)).unsqueeze(1) + m.inside(cell.sum(0)).unsqueeze(1)


def modulated(m, x):
    """Convolutions with a kernel for each sample, whose samples are channels of one picture (StyleGAN 2)."""
    batch, style = x.shape[0], m.style(x)
    kernels = m.kernel.unsqueeze(0) * style.view(batch, 1, 2, 1, 1)
    kernels = (kernels * torch.rsqrt(kernels.square().sum((2, 3, 4), keepdim=True) + 1e-8)).view(-1, 2, 3, 3)
    picture = m.start.expand(batch, -1, -1, -1).reshape(1, 2 * batch, 4, 4)
    made = F.conv2d(picture, kernels, padding=1, groups=batch)
    turned = (m.kernel.transpose(0, 1) * style.view(batch, 2, 1, 1, 1)).reshape(2 * batch, 3, 3, 3)
    up = F.conv_transpose2d(picture, turned, stride=2, groups=batch)
    return m.fc(torch.cat([made.view(batch, -1), up.view(batch, -1)], 1))


def bags(m, ids):
    """Bags with padding, one of them with nothing else."""
    some = ids[:, :3] * ids.new_tensor([[0, 0, 1]])
    bags = F.embedding_bag(ids, m.mean.weight, mode="sum", per_sample_weights=m.scale[ids])
    return m.fc(m.mean(ids) + m.sum(ids) + m.most(some) + bags).unsqueeze(1).expand(-1, LENGTH, -1)


def masked_attention(m, ids):
    x = m.drop(m.words(ids))
    weights = torch.where(m.mask, x @ x.transpose(1, 2) / WIDTH**0.5, float("-inf")).softmax(-1)
    return m.head(x + m.drop(weights) @ x)


def dropped_attention(m, x):
    q, k = (part(x).view(x.shape[0], LENGTH, -1, 2).transpose(1, 2) for part in (m.q, m.k))
    y = F.scaled_dot_product_attention(q, k, k, attn_mask=m.bias, dropout_p=0.3, enable_gqa=True)
    return m.o(y.transpose(1, 2).reshape(x.shape))


def experts(m, x):
    return torch.einsum("be,beo->bo", m.gate(x).softmax(-1), torch.einsum("bi,eio->beo", x, m.weights))


def convolutions(m, x):
    y = F.relu(m.norm(m.first(x))) + m.skip(x)
    return m.head(F.max_pool2d(y, 2).mean((2, 3)))


def residual(m, x):
    y = F.relu(m.bn1(m.first(x)))
    y = F.relu_(m.bn2(m.second(y)) + m.skip(x))
    return m.head(m.rows(F.relu(m.rows(y.flatten(2)))).mean(2))


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round and scaled: of adversarial domain adaptation."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.scale * g, None


class Binary(torch.autograd.Function):
    """A product with the signs of a weight, whose gradient ends where the weight is large."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.sign().t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight.sign(), (g.flatten(0, -2).t() @ x.flatten(0, -2)) * (weight.abs() <= 1)


class Grouped(torch.autograd.Function):
    """Sums of groups of numbers [batch, length, width], by views; the gradient is clipped. Its context comes after."""

    @staticmethod
    def forward(x, size):
        batch, length, width = x.shape
        return x.reshape(batch * length, width).view(batch, length, width // size, size).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.size = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.01, 0.01).unsqueeze(-1).expand(*g.shape, ctx.size).reshape(ctx.shape), None


class Turned(torch.autograd.Function):
    """Two tensors turned by angles, each a result of its own, as fused rotary positions make them."""

    @staticmethod
    def forward(ctx, q, k, angle):
        ctx.save_for_backward(angle)
        return tuple(each * angle.cos() + each.flip(-1) * angle.sin() for each in (q, k))

    @staticmethod
    def backward(ctx, *gradients):
        (angle,) = ctx.saved_tensors
        return *(g * angle.cos() + (g * angle.sin()).flip(-1) for g in gradients), None


class Estimated(torch.autograd.Function):
    """A gate whose backward reads what its forward does not, as the routers of Phi-MoE have it."""

    @staticmethod
    def forward(ctx, scores, gate, chosen):
        ctx.save_for_backward(scores, gate, chosen)
        return gate * 2

    @staticmethod
    def backward(ctx, g):
        scores, gate, chosen = ctx.saved_tensors
        g = g * gate
        return (scores.softmax(-1) * -g).scatter_add_(-1, chosen, g), None, None


def estimated(m, x):
    scores = m.fc(x).flatten(0, 1)
    gate, chosen = scores.softmax(-1).max(-1, keepdim=True)
    return m.out(x) * Estimated.apply(scores, gate, chosen).view(*x.shape[:2], 1)


def mapped(m, x):
    """Functions of one sample, of members of an ensemble, and of pairs of places."""
    members = torch.vmap(lambda w, b: (x @ w).add_(b).tanh(), out_dims=1)(m.weights, m.biases).mean(1)
    near = torch.vmap(
        lambda y: torch.vmap(lambda a: torch.vmap(lambda b: (-(a - b).square() * m.scale).sum().exp())(y))(y)
    )
    last = torch.vmap(lambda y: m.out.weight @ y[-1])(x).unsqueeze(1)
    return (
        torch.vmap(m.fc)(x) + members + near(x) @ x + last + torch.vmap(m.out, in_dims=1, out_dims=1, chunk_size=2)(x)
    )


def checked(m, x):
    """Numbers out of a mask that follows from shapes and is written in place, before and after."""
    mask = torch.ones(LENGTH, dtype=x.dtype)
    factor = mask.sum().item() / LENGTH
    mask.view(2, -1)[1] = 3
    assert mask.max().item() == 3
    made = m.fc(x) * float(mask.sum()) * factor if (mask == 3).any() else x
    return made + mask.unsqueeze(1) if not bool(mask[0] > 1) else x


def strided(m, x):
    """Overlapping windows read by strides, as Longformer does, of rows in both orders; a scale that is left out while
    the forward is compiled, and writes into what a dropout of nothing gives."""
    length, scale = x.shape[1], None if torch.compiler.is_compiling() else 0.5
    rows = (m.fc(x) * scale).transpose(0, 1).contiguous().transpose(0, 1)  # the batch is inside
    pairs = rows.view(-1, length // 2, 2, WIDTH)
    strides = (pairs.stride(0), pairs.stride(1) // 2, *pairs.stride()[2:])
    halves = pairs.as_strided(size=(len(x), length - 1, 2, WIDTH), stride=strides)
    padded = F.dropout(F.pad(m.out(x), (0, 0, 1, 1)), p=0.0, training=m.training)
    padded *= scale
    around = padded.as_strided((len(x), length, 3, WIDTH), (*padded.stride()[:2], *padded.stride()[1:]))
    capped = torch.min(torch.as_tensor(3), torch.arange(length - 1, device=x.device))
    last = torch.einsum("blkw,w->blw", around, m.weights)
    return torch.cat([halves.amax(2) * capped.unsqueeze(-1), last[:, -1:]], 1)


def repeated_rows(m, x):
    """Tokens of all samples, read once for each of their two experts and added up again."""
    rows = x.flatten(0, 1)
    shares, chosen = m.out(rows).topk(2, dim=1)
    tokens = torch.arange(chosen.numel()).div(2, rounding_mode="trunc")
    made = torch.bmm(m.w[chosen.flatten()], rows[tokens].unsqueeze(-1)).squeeze(-1) * shares.flatten()[:, None]
    return m.fc(x) + torch.zeros_like(rows).index_add(0, tokens, made).view_as(x)


def spectral(m, x):
    """The lowest frequencies times complex weights, in the zeros of all of them (Li et al., 2021)."""
    spectrum = torch.fft.rfft(m.fc(x), dim=1)
    kept = torch.zeros_like(spectrum)
    kept[:, :2] = torch.einsum("bki,kio->bko", spectrum[:, :2], torch.view_as_complex(m.mixed))
    kept[:, 2] = spectrum[:, 2]
    return torch.fft.irfft(torch.cat([kept[:, :1], kept[:, 1:]], 1), n=LENGTH, dim=1)


def chosen_in_samples(m, x):
    """Places of every sample that the data, positions or both choose, read and written."""
    sample, which = torch.arange(len(x), device=x.device), (x[:, 0, 0] > 0).long()
    y = m.fc(x).unflatten(-1, (2, 4)).clone()
    y[sample, -which, which] = y[sample, which, -1] * 2 + 1
    y[sample.unsqueeze(1), torch.tensor([0, 2])] = 0.5
    y[y > 1] = 1 / 2
    some = y[sample.unsqueeze(1), torch.stack([which, -which], 1)].mean((1, 2)) + y[sample, :, :, which].mean(1)[:, [0]]
    return y.flatten(2) + m.out(F.pad(some, (0, WIDTH - some.shape[1]))).unsqueeze(1)


def flexible(m, x):
    """Flex attention within documents with a learned bias of the distance, and causal within a window."""
    q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (m.fc(x), m.out(x), x))
    document = (x[..., 0] > 0).long().cumsum(1)
    within = create_block_mask(lambda b, h, i, j: document[b, i] == document[b, j], len(x), None, LENGTH, LENGTH)
    near = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 3), None, None, LENGTH, LENGTH)
    y = flex_attention(q, k, v, lambda score, b, h, i, j: score + m.bias[h, i - j + LENGTH], within)
    y = y + flex_attention(q, k[:, :1], v[:, :1], block_mask=near, enable_gqa=True)
    before = create_block_mask(lambda b, h, i, j: i > j, None, None, LENGTH, LENGTH)  # the first token sees none
    y = y + flex_attention(q, k, v, block_mask=before)
    y = y + flex_attention(q, k, v, lambda score, b, h, i, j: 2 * score, before)
    return y.transpose(1, 2).flatten(2)


class ImageClasses(nn.Module):
    """As the MNIST example of torch: dropout2d left out, log_softmax and nll_loss."""

    def __init__(self):
        super().__init__()
        self.conv, self.drop, self.fc = nn.Conv2d(2, 4, 3), nn.Dropout(0.25), nn.Linear(36, 10)

    def forward(self, x, label):
        x = self.drop(torch.flatten(F.max_pool2d(F.relu(self.conv(x)), 2), 1))
        return F.nll_loss(F.log_softmax(self.fc(x), dim=1), label)


class Segments(nn.Module):
    """A class for every pixel: the classes are dim 1 of the logits; some labels are ignored."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.head = nn.Conv2d(6, 10, 1)

    def forward(self, x, label):
        x = torch.cat([x, self.up(F.relu(self.down(x)))], 1)
        return F.cross_entropy(self.head(x), label[:, None, None].expand(-1, 8, 8), ignore_index=3)


class Translator(nn.Module):
    """torch's encoder and decoder layers with a mask of padding and a causal one."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), linear(out=WORDS)
        self.encoder = nn.TransformerEncoder(layer(dropout=0.1), 1)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 16, 0.2, batch_first=True)
        self.register_buffer("mask", causal_mask())
        self.register_buffer("before", torch.eye(LENGTH))

    def forward(self, ids, label):
        padding = torch.zeros_like(ids, dtype=self.mask.dtype).masked_fill(ids == WORDS - 1, -torch.inf)
        read = self.encoder(self.words(ids), mask=self.before, src_key_padding_mask=padding)
        made = self.decoder(self.words(label), read, tgt_mask=self.mask, tgt_is_causal=True)
        return F.cross_entropy(self.head(made).transpose(1, 2), label, ignore_index=2)


def complex_rotations(m, x):
    """Rotary positions as Meta's Llama writes them, from a table and made on the spot."""

    def turned(part, table):
        pairs = torch.view_as_complex(part(x).view(*x.shape[:-1], 2, 2, 2))
        return torch.view_as_real(pairs * table.view(1, LENGTH, 1, 2)).flatten(3)

    angles = torch.outer(torch.arange(LENGTH, dtype=x.dtype), torch.tensor([1.0, 0.1], dtype=x.dtype))
    q = turned(m.q, m.table[:LENGTH])
    k = turned(m.k, torch.polar(torch.ones_like(angles), angles))
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).softmax(-1)
    return m.o((scores @ m.q(x).view(*x.shape[:-1], 2, 4).transpose(1, 2)).transpose(1, 2).flatten(2))


class SequenceFirst(nn.Module):
    """torch's defaults: the batch is dim 1 of everything between the transposes, and flattened behind the positions."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), linear(out=WORDS)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.2)
        self.states, self.attention = nn.LSTM(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 2)
        self.token = parameter(1, 1, WIDTH)

    def forward(self, ids, label):
        x, later = self.words(ids).permute(1, 0, 2), torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        x = torch.cat([self.token.expand(-1, x.size(1), -1), x])[1:] + self.token.expand(LENGTH, x.size(1), -1)
        x = self.layer(x, src_mask=later, src_key_padding_mask=ids == WORDS - 1)
        first = torch.zeros(1, x.size(1), WIDTH, dtype=x.dtype)
        x, (last, _) = self.states(x, (first, first))
        x = x + self.attention(x, x, x)[0].cumsum(0) + last
        return F.cross_entropy(self.head(x).view(-1, WORDS), label.t().flatten())


class Weights(nn.Module):
    """Attention whose weights are asked for, dropped and read; keys and values of other widths."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True, vdim=4, bias=False)

    def forward(self, x, label):
        made, weights = self.attention(x, x, x[..., :4], average_attn_weights=False)
        return F.mse_loss(made + weights.sum((1, 3)).unsqueeze(-1), label)


def rows_of(name):
    """Random rows of the inputs of an ordinary module; whole numbers are below what any of them chooses from."""
    generator = torch.Generator().manual_seed(4)
    made = []
    for shape in ORDINARY[name]()[1]:
        if isinstance(shape[0], tuple):
            made.append(torch.randint(0, 6, (BATCH, *shape[0][1:]), generator=generator))
        else:
            made.append(torch.rand((BATCH, *shape[1:]), generator=generator, dtype=torch.float64))
    return tuple(made)


MODULES = {
    "transformer layer": (lambda: Net(lambda m, x: m.layer(x), layer=layer(dropout=0.2)), sequences),
    "transformer layer, norm first": (
        lambda: Net(lambda m, x: m.layer(x), layer=layer(dropout=0.0, norm_first=True, activation="gelu")), sequences
    ),
    "encoder and decoder": (Translator, tokens),
    "attention weights": (Weights, sequences),
    "sequence first": (SequenceFirst, tokens),
    "vision transformer": (
        lambda: Net(
            class_token, patches=nn.Conv2d(2, WIDTH, 4, stride=4), token=parameter(1, 1, WIDTH),
            positions=parameter(1, 5, WIDTH), layers=layer(dropout=0.1), head=linear(out=10),
        ), images
    ),
    "positions per sample": (
        lambda: Net(
            positions_per_sample, words=nn.Embedding(WORDS, WIDTH, padding_idx=0),
            positions=nn.Embedding(LENGTH, WIDTH), head=linear(out=WORDS),
        ), tokens
    ),
    "recurrent": (lambda: Net(recurrent, inside=linear(), again=linear(), out=linear()), sequences),
    "packed sequences": (
        lambda: Net(
            packed, net=nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True, proj_size=3), fc=linear(6),
            out=linear(3), inside=linear(),
        ), sequences
    ),
    "kernels of samples": (
        lambda: Net(modulated, style=linear(out=2), kernel=parameter(3, 2, 3, 3), start=parameter(1, 2, 4, 4),
                    fc=linear(3 * 16 + 3 * 81)), vectors
    ),
    "where with a mask, dropout": (
        lambda: Net(
            masked_attention, words=nn.Embedding(WORDS, WIDTH), drop=nn.Dropout(0.3), head=linear(out=WORDS),
            mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
        ), tokens
    ),
    "attention dropout, grouped heads": (
        lambda: Net(dropped_attention, q=linear(), k=linear(out=4), o=linear(), bias=torch.randn(LENGTH, LENGTH)),
        sequences,
    ),
    "experts": (lambda: Net(experts, gate=linear(out=4), weights=parameter(4, WIDTH, WIDTH)), vectors),
    "convolutions": (
        lambda: Net(
            convolutions, first=nn.Conv2d(2, 8, 3, padding="same"), norm=nn.BatchNorm2d(8).eval(),
            skip=nn.Conv2d(2, 8, 1), head=linear(out=10),
        ), images
    ),
    "convolutions of sequences": (
        lambda: Net(
            lambda m, x: m.last(F.gelu(m.first(x.transpose(1, 2)))).transpose(1, 2) + m.same(x),
            first=nn.Conv1d(WIDTH, 16, 3, stride=2, padding=2, dilation=2, groups=2),
            last=nn.Conv1d(16, WIDTH, 1, bias=False), same=nn.Conv1d(LENGTH, 3, 3, padding="same"),
        ), lambda: (sequences()[0], sequences()[1][:, :3])
    ),
    "batch norm": (
        lambda: Net(
            residual, first=nn.Conv2d(2, 8, 3, padding=1, bias=False), bn1=nn.BatchNorm2d(8, momentum=0.3),
            second=nn.Conv2d(8, 8, 3, padding=1), bn2=nn.BatchNorm2d(8, affine=False, track_running_stats=False),
            skip=nn.Conv2d(2, 8, 1), rows=nn.BatchNorm1d(8), head=linear(out=10),
        ), images
    ),
    "log_softmax and nll_loss": (ImageClasses, images),
    "a class for every pixel": (Segments, images),
    "parts of a weight": (lambda: Net(lambda m, x: x @ m.w[:WIDTH].T + m.w[WIDTH], w=parameter(9, WIDTH)), vectors),
    "an index": (
        lambda: Net(lambda m, x: m.fc(x)[:, m.order] + m.table[m.row], fc=linear(), table=parameter(5, WIDTH),
                    order=torch.arange(WIDTH).flip(0), row=torch.tensor([3])), vectors
    ),
    "lists as an index, biases of heads": (
        lambda: Net(
            lambda m, x: m.fc(x)[:, [5, 0, 3]] @ m.table[[-2]].expand(3, -1) + m.fc(x)[..., [1, 3, 5, 7]].sum(1, True)
            + torch.bmm((torch.arange(3.0, dtype=x.dtype)[:, None, None] + torch.ones(3, 2, 2, dtype=x.dtype)).repeat(
                len(x), 1, 1), m.out(x).view(-1, 1, 2, 4).expand(-1, 3, -1, -1).flatten(0, 1)
            ).view(len(x), 3, -1).sum(1), fc=linear(), out=linear(), table=parameter(5, WIDTH),
        ), vectors
    ),
    "repeats, uneven windows, scaled sums": (
        lambda: Net(
            lambda m, x: torch.add(m.fc(x).repeat(4, 1).view(4, -1, WIDTH).mul(m.table).sum(0), x, alpha=0.5)
            + m.table[0].repeat(len(x), 2)[:, :WIDTH] * m.fc(x).long()
            + F.adaptive_avg_pool1d(m.fc(x).unsqueeze(1), 3).flatten(1).repeat(1, 3)[:, :WIDTH],
            fc=linear(), table=parameter(4, 1, WIDTH),
        ), vectors
    ),
    "numbers in the forward": (
        lambda: Net(
            lambda m, x: m.fc(x) * torch.tensor(0.5, dtype=x.dtype)
            + torch.tensor([0.1 * number for number in range(WIDTH)], dtype=x.dtype, device=x.device)
            + x.masked_fill(x > torch.tensor(1, device=x.device), 0), fc=linear(),
        ), vectors
    ),
    "choice by the data": (
        lambda: Net(lambda m, x: torch.where(x > 0, m.one(x), 0.1 * m.two(x)).clamp(-1, 1), one=linear(), two=linear()),
        vectors,
    ),
    "weight norm": (
        lambda: Net(lambda m, x: m.fc(x) / m.fc(x).norm(dim=-1, keepdim=True),
                    fc=nn.utils.parametrizations.weight_norm(linear())), vectors
    ),
    "complex rotations": (
        lambda: Net(
            complex_rotations, q=linear(), k=linear(), o=linear(),
            table=torch.polar(torch.ones(9, 2), torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.3]))),
        ), sequences
    ),
    "Fourier transforms": (
        lambda: Net(
            lambda m, x: torch.fft.irfft(torch.fft.rfft(m.fc(x), dim=1) * torch.view_as_complex(m.w), n=LENGTH, dim=1)
            + torch.fft.fftn(m.out(x), dim=(1, 2)).abs(), fc=linear(), out=linear(), w=parameter(4, WIDTH, 2),
        ), sequences
    ),
    "relative shift, spatial transformer": (lambda: Net(shifted, fc=linear(), turn=linear(out=6)), sequences),
    "state space": (
        lambda: Net(state_space, fc=linear(), decay=parameter(WIDTH, 2), turns=parameter(WIDTH, 2)), sequences
    ),
    "random numbers": (
        lambda: Net(
            noisy, fc=linear(), spread=linear(), scale=parameter(WIDTH), table=parameter(5, WIDTH),
            net=nn.GRU(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True),
        ), sequences
    ),
    "own gradients": (
        lambda: Net(
            lambda m, x: Grouped.apply(Binary.apply(m.fc(x), m.w), 2) + Reversed.apply(m.out(x), 0.5)
            + torch.stack(Turned.apply(m.fc(x), m.out(x), m.angle)).prod(0), fc=linear(), w=parameter(2 * WIDTH, WIDTH),
            out=linear(), angle=torch.rand(WIDTH),
        ), sequences
    ),
    "flex attention": (
        lambda: Net(flexible, fc=linear(), out=linear(), bias=parameter(2, 2 * LENGTH)), sequences
    ),
    "chosen in every sample": (lambda: Net(chosen_in_samples, fc=linear(), out=linear()), sequences),
    "weights of eight bits": (
        lambda: Net(
            lambda m, x: m.fc(F.linear(x, m.few.to(x.dtype) * m.scale)), fc=linear(), scale=torch.rand(WIDTH, 1),
            few=torch.randint(-127, 127, (WIDTH, WIDTH), dtype=torch.int8),
        ), vectors
    ),
} | LOSSES | BUFFERS  # fmt: skip
"""name -> (makes the module, makes a batch)."""

MODULES |= {
    name: (ORDINARY[name], partial(rows_of, name))
    for name in ("LSTM tagger", "experts by bmm", "straight-through function")
}

ONE_RANK = {
    "writes into its input": (lambda: Net(lambda m, x: m.fc(x.mul_(2).sub_(1)), fc=linear()), vectors),
    "rows of masks": (
        lambda: Net(rows_of_masks, fc=linear(), net=nn.Sequential(linear(), nn.GELU(), linear()), out=linear()),
        sequences,
    ),
    "gradients of an estimate": (lambda: Net(estimated, fc=linear(), out=linear()), sequences),
    "repeated rows": (
        lambda: Net(repeated_rows, fc=linear(), out=linear(out=4), w=parameter(4, WIDTH, WIDTH)), sequences
    ),
    "windows by strides": (
        lambda: Net(strided, fc=linear(), out=linear(), weights=parameter(WIDTH)), sequences
    ),
    "Fourier neural operator": (lambda: Net(spectral, fc=linear(), mixed=parameter(2, WIDTH, WIDTH, 2)), sequences),
    "numbers out of shapes": (lambda: Net(checked, fc=linear()), sequences),
    "vmap": (
        lambda: Net(
            mapped, fc=linear(), out=linear(), weights=parameter(3, WIDTH, WIDTH), biases=parameter(3, WIDTH),
            scale=parameter(WIDTH),
        ), sequences
    ),
    "bags with padding": (
        lambda: Net(
            bags, mean=nn.EmbeddingBag(WORDS, WIDTH, padding_idx=1),
            sum=nn.EmbeddingBag(WORDS, WIDTH, mode="sum", padding_idx=2),
            most=nn.EmbeddingBag(WORDS, WIDTH, mode="max", padding_idx=0), fc=linear(out=WORDS), scale=parameter(WORDS),
        ), tokens
    ),
} | {
    name: (ORDINARY[name], partial(rows_of, name))
    for name in (
        "U-Net, own", "wide and deep", "DLRM", "seq2seq", "graph convolution", "diffusion", "GAN, generator",
        "sort, topk, cumsum",
    )
} | FORWARDS  # fmt: skip
"""More of them, for one rank alone: what is special of them is how they are captured."""


ON_RANKS = (
    "several means at once", "sequence first", "random numbers", "a class for every pixel",
    "choice by the data", "own gradients", "experts by bmm", "convolutions", "batch norm",
    "lists as an index, biases of heads", "class weights, smoothed, ignored", "transformer layer, norm first",
    "recurrent", "complex rotations", "mean over what counts", "derivatives in the forward",
    "running statistics, own", "counter", "codebook of moving averages", "chosen in every sample",
    "kernels of samples", "functions of means", "rows of masks, losses", "adversarial samples",
    "columns of masks, losses",
)  # fmt: skip
"""Modules that have, between them, every kind of operator that is in `MODULES`."""


def made(name):
    """The module with its initial values, and a batch."""
    make, data = (MODULES | ONE_RANK)[name]
    torch.manual_seed(0)
    module = make()
    return (module[0] if isinstance(module, tuple) else module).double(), data()
