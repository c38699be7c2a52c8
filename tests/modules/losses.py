"""Losses as users write them, for tests of capture: `LOSSES` has each with its data."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.modules.data import BATCH, WIDTH, drawn, linear, vectors


class Losses(nn.Module):
    """A loss of a function of the module's own: `loss(made, x, label)`."""

    def __init__(self, loss, out=WIDTH):
        super().__init__()
        self.loss, self.inside, self.out = loss, linear(), linear(out=out)
        self.frozen = linear(out=out).requires_grad_(False)
        self.register_buffer("weight", torch.linspace(0.5, 2.0, out))

    def forward(self, x, label):
        return self.loss(self, self.out(F.leaky_relu(self.inside(x), 0.2)), x, label)


def classes():
    return drawn(BATCH, WIDTH), torch.tensor([0, 3, 1, 3, 2, 0, 3, 1])


def odd_ones():
    """Every pair of samples, a micro-batch, has one whose label is below 3 and whose feature 1 is positive."""
    x, _ = classes()
    x[:, 1] = torch.tensor([-1.0, 1.0]).repeat(BATCH // 2) * x[:, 1].abs()
    return x, torch.tensor([0, 1, 3, 1, 2, 0, 3, 1])


def variational(m, made, x, label):
    """A VAE's: squared errors summed, plus the divergence's mean over the batch."""
    mean, spread = made.chunk(2, -1)
    divergence = torch.mean(-0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp(), dim=1), dim=0)
    return F.mse_loss(made, label, reduction="sum") / x.size(0) + 0.3 * divergence


def adversarial(m, made, x, label):
    """The discriminator's, on real samples and on those of a generator that is cut off."""
    bad = m.out(m.frozen(made).detach())
    return 0.5 * (
        F.binary_cross_entropy_with_logits(made, torch.ones_like(made))
        + F.binary_cross_entropy_with_logits(bad, torch.zeros_like(bad))
    )


def distilled(m, made, x, label):
    """A student that learns from a frozen teacher, from itself without gradients, and from labels."""
    with torch.no_grad():
        teacher, itself = m.frozen(x), m.out(x).softmax(-1)
    near = F.kl_div(F.log_softmax(made / 2, -1), F.log_softmax(teacher / 2, -1), reduction="batchmean", log_target=True)
    return 4 * near + 0.1 * F.cross_entropy(made, itself) + 0.5 * F.cross_entropy(made, label) - 0.2


def regularised(m, made, x, label):
    """A smooth loss, one of squares with a gradient to both sides, and a penalty on a weight."""
    return (
        F.smooth_l1_loss(made, label) + F.mse_loss(made, m.inside(x)) + 0.1 * m.inside.bias.pow(2).sum() - made.mean()
    )


def of_whole_batches(m, made, x, label):
    """Functions of means over the batch: RMSE, flooding, a Dice of all samples, the spread of mean shares, extremes."""
    shares, wanted = made.softmax(-1), (label > 0).to(x.dtype)
    dice = 1 - (2 * (made.sigmoid() * wanted).sum() + 1) / (made.sigmoid().sum() + wanted.sum() + 1)
    mean = shares.mean(0)
    flooded = (F.l1_loss(made, label) - 2.0).abs() + 2.0
    return (
        torch.sqrt(F.mse_loss(made, label) + 1e-6)
        + flooded
        + dice
        + (mean * mean.log()).sum()
        + F.mse_loss(m.inside(x), label).exp().clamp(max=1e3).reciprocal()
        + made.mean() * (made - label).pow(2).mean() / (1 + made.square().mean()) ** 2
        + F.relu(shares.square().mean()).rsqrt()
        + torch.maximum(made.square().mean(), m.weight[0])
        - torch.min(F.mse_loss(made, label), made.abs().mean())
    )


def penalised(m, made, x, label):
    """A discriminator whose gradient by its input has length 1 (Gulrajani et al., 2017), and a curvature."""
    between = (0.3 * x + 0.7 * label).requires_grad_(True)
    score = m.out(torch.tanh(m.inside(between)))
    (slope,) = torch.autograd.grad(score.sum(), between, create_graph=True)
    (curve,) = torch.autograd.grad(slope[:, 0].sum(), between, create_graph=True)
    (fixed,) = torch.autograd.grad(score, between, torch.ones_like(score), retain_graph=True)
    return ((slope.norm(2, dim=1) - 1) ** 2).mean() + F.mse_loss(curve, fixed) + made.mean()


def two_views(m, made, x, label):
    """Two batches as one: parts taken in three ways, means over all of both, data of both."""
    both = torch.cat([made, m.inside(label)])
    one, two = m.out(both).tanh().chunk(2)
    shares = torch.cat((made, one)).softmax(-1)
    balance = (F.one_hot(shares.argmax(-1), WIDTH).double().mean(0) * shares.mean(0)).sum()
    ones = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), torch.zeros(len(x), 1, dtype=x.dtype)])
    judged = F.mse_loss(both[:, :1], ones)
    return F.mse_loss(one, both[len(x) :].detach()) + F.l1_loss(two, both[: len(x)]) + balance + judged


def expert_balance(rows, mask):
    """The shares of experts, counted over two layers by a histogram and by a sum at indices, times their chances."""
    width, count = rows.shape[-1], torch.zeros(rows.shape[-1], dtype=rows.dtype)
    chances, total = torch.zeros(width, dtype=rows.dtype), 0.0
    for layer in (rows, rows * 2):
        weights = layer.softmax(-1)
        chosen = weights.topk(2, dim=-1)[1].reshape(-1)
        count = count + torch.histc(chosen.to(rows.dtype), bins=width, min=0, max=width)
        count = count + torch.zeros_like(count).scatter_add_(0, chosen, mask.flatten().repeat_interleave(2))
        chances, total = chances + weights.sum(0), total + len(rows)
    return width * (count / total * (chances / total).unsqueeze(0)).sum()


def flattened_sums(rows, mask):
    """Sums over rows [batch x 2, width], over the number of rows, of elements and of what counts."""
    divergence = F.kl_div(rows.log_softmax(-1), rows.detach().softmax(-1) * 0.5, reduction="batchmean")
    counted = (rows.pow(2).sum(-1) * mask.flatten()).sum() / mask.sum().clamp(min=1)
    return divergence + counted + rows.sum() / rows.numel() + rows.abs().sum() * (0.3 / len(mask))


def of_columns(m, made, x, label):
    """Rows along other dims than the first, parts of rows, rows of rows, and places that follow from shapes."""
    seen, across, even = label < 3, made.t(), torch.arange(WIDTH) % 2 == 0
    rows, far = made[seen], x[seen][:, 1] > 0
    square = across[:WIDTH, seen][:4, far]  # as many columns as an exported batch has samples
    loss = F.mse_loss(square, x[seen][far].T[:4]) + across[:, seen].softmax(0).square().mean() + rows[far].exp().mean()
    loss = loss + F.cross_entropy(across[1:5, seen].T, label[seen].long()) + made[..., even].tanh().mean()
    loss = loss + made[seen, 2:5].square().mean() * made[None, ..., seen, :3].abs().mean()
    rows = rows * 2
    rows[far] = m.out(rows[far]).sin()
    changed = torch.zeros_like(across)
    changed[1:3, x[:, 0] > 0] = made[x[:, 0] > 0, :2].T
    return loss + rows.square().mean() + changed.exp().mean()


def of_rows(m, made, x, label):
    """Losses of the rows that masks select, their numbers and masked elements, in the ways that people write them."""
    seen, chance = label < 2, made.softmax(-1)
    errors = (made[x > 0.3] - x[x > 0.3]).square()
    return (
        F.cross_entropy(made[seen], label[seen], weight=m.weight, label_smoothing=0.1)
        + F.cross_entropy(m.out(made[~seen]), label[~seen], reduction="sum") / len(label[~seen])
        + F.smooth_l1_loss(torch.masked_select(made, x > 0), torch.masked_select(x, x > 0))
        + errors.mean()
        + errors.sum() / errors.numel()
        + (errors.sum() * (1 / errors.shape[0]))
        + (chance[seen].log() * chance[seen]).sum(-1).mean()
        + torch.sqrt((x[x > 0].log() + made[x > 0]).square().mean())
        + 0.1 * (made.norm(2).pow(2) + m.out.weight.norm() ** 2) / len(x)
        + torch.log10(errors.mean())
        + torch.log1p(made.square().mean()).tanh()
    )


def adversarial_samples(m, made, x, label):
    """Samples that the loss's own derivative moves; data normalised over the batch."""
    near = x.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(F.cross_entropy(m.out(m.inside(near)), label), near)
    moved = (x + 0.1 * slope.sign()).detach()
    far = x.detach().requires_grad_(True)
    each = F.cross_entropy(m.out(m.inside(far).tanh()), label, reduction="none", ignore_index=3)
    (steep,) = torch.autograd.grad(each.sum(), far, create_graph=True)
    return (
        F.cross_entropy(m.out(m.inside(moved)), label)
        + 0.1 * steep.square().sum(1).mean()
        + (made * (x - x.mean(0)) / (x.std(0) + 0.1)).mean()
    )


def by_other_names(m, made, x, label):
    """Functions of torch by their other names, also of means."""
    y = torch.multiply(made, torch.subtract(x, 0.5)).clip(-2, 2)
    y = torch.concatenate([y.absolute(), torch.negative(y)], 1).unsqueeze(1).swapaxes(1, 2).divide_(2)
    mean = torch.true_divide(y.square().sum(), len(x))
    return torch.multiply(mean, 0.5).divide(torch.greater(x, 0).to(x.dtype).mean()).subtract(y.mean())


LOSSES = {
    "other names": (lambda: Losses(by_other_names), vectors),
    "rows of masks, losses": (lambda: Losses(of_rows), classes),
    "columns of masks, losses": (lambda: Losses(of_columns), odd_ones),
    "adversarial samples": (lambda: Losses(adversarial_samples), classes),
    "derivatives in the forward": (lambda: Losses(penalised), vectors),
    "several batches at once": (lambda: Losses(two_views), vectors),
    "functions of means": (lambda: Losses(of_whole_batches), vectors),
    "variational autoencoder": (lambda: Losses(variational), vectors),
    "discriminator": (lambda: Losses(adversarial), vectors),
    "distillation": (lambda: Losses(distilled), classes),
    "sum of losses": (lambda: Losses(regularised), vectors),
    "gaussian": (
        lambda: Losses(
            lambda m, made, x, label: F.gaussian_nll_loss(made, label, m.out(x).square(), full=True, eps=0.1)
        ), vectors
    ),
    "label smoothing": (
        lambda: Losses(lambda m, made, x, label: F.cross_entropy(made, label, label_smoothing=0.1)), classes
    ),
    "class weights, smoothed, ignored": (
        lambda: Losses(
            lambda m, made, x, label: F.cross_entropy(
                made, label, weight=m.weight, ignore_index=3, label_smoothing=0.1
            )
        ), classes
    ),
    "class weights": (
        lambda: Losses(lambda m, made, x, label: 2 * F.cross_entropy(made, label, weight=m.weight)), classes
    ),
    "weighted nll_loss": (
        lambda: Losses(lambda m, made, x, label: F.nll_loss(made.softmax(-1).log(), label, weight=m.weight)), classes
    ),
    "mean over what counts": (
        lambda: Losses(
            lambda m, made, x, label: (
                (F.cross_entropy(made, label, reduction="none") * (label > 0)).sum() / (label > 0).sum()
                + (made.pow(2).mean(-1) * (x[:, 0] > 0)).sum() / ((x[:, 0] > 0).sum() + 1e-8).clamp(min=1)
                + made.abs().mean() * x.abs().mean() / (1 + x.mean())
                + flattened_sums(made.unflatten(-1, (2, -1)).flatten(0, 1), x[:, :2] > 0)
                + expert_balance(made.unflatten(-1, (2, -1)).flatten(0, 1), (x[:, :2] > 0).to(x.dtype))
            )
        ), classes
    ),
    "CTC": (
        lambda: Losses(
            lambda m, made, x, label: F.ctc_loss(
                made.view(len(x), 2, -1).log_softmax(-1).transpose(0, 1), label.view(-1, 1).clamp(min=1, max=1),
                torch.full((len(x),), 2), (label > 1).long()
            )
        ), classes
    ),
    "several means at once": (
        lambda: Losses(
            lambda m, made, x, label: (
                (torch.stack([F.cross_entropy(made, label), made.pow(2).mean()]) * m.out.bias[:2].exp()).sum()
                + 4 * (F.one_hot(made.argmax(-1), made.shape[-1]).to(x.dtype).mean(0) * made.softmax(-1).mean(0)).sum()
                + (made.mean(0, keepdim=True) * made.detach().abs().mean(0))[0, 1]
            )
        ), classes
    ),
    "margins": (
        lambda: Losses(
            lambda m, made, x, label: F.triplet_margin_loss(made, x, m.out(x))
            + 0.5 * F.cosine_embedding_loss(made, x, label.sign() * 2 - 1) + F.multi_margin_loss(made, label)
        ), classes
    ),
    "a policy": (
        lambda: Losses(
            lambda m, made, x, label: -(torch.distributions.Categorical(logits=made).log_prob(label) * x[:, 0]).mean()
            - 0.1 * torch.distributions.Normal(made, m.weight).entropy().mean()
        ), classes
    ),
    "losses of every element": (
        lambda: Losses(
            lambda m, made, x, label: (F.cross_entropy(made, label, reduction="none") * x.pow(2).sum(-1)).mean()
        ), classes
    ),
}  # fmt: skip
