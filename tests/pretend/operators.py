"""Operators, their gradients and optimizers in numpy, from their definitions. Used by `pretend`.

A rule takes attrs and the inputs in the order of the program: for "<kind>.grad<i>" the gradient of the output first,
then the operands that `OperatorSpec.gradients[i].needs` names. attrs have, beside the instruction's own, the `shape`
and `dtype` of the output, `first`: whether this rank adds the bias of a product that is cut along its sum, and
`part`: by dim of `split`, which part of it this rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import erf, expit

Array = np.ndarray
Attrs = Mapping[str, Any]


def linear(attrs: Attrs, x: Array, weight: Array, bias: Array | None = None) -> Array:
    y = x @ weight.T
    return y + bias if bias is not None and attrs["first"] else y


def linear_grad_weight(attrs: Attrs, dy: Array, x: Array) -> Array:
    return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])


def gelu_grad(attrs: Attrs, dy: Array, x: Array) -> Array:
    return dy * (0.5 * (1 + erf(x / np.sqrt(2))) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi))


def silu_grad(attrs: Attrs, dy: Array, x: Array) -> Array:
    return dy * expit(x) * (1 + x * (1 - expit(x)))


def cast(attrs: Attrs, x: Array) -> Array:
    return x.astype(np.float64 if attrs["dtype"].startswith(("float", "bfloat")) else np.int64)


def unbroadcast(attrs: Attrs, gradient: Array) -> Array:
    """Sum over what was repeated."""
    shape = attrs["shape"]
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    repeated = tuple(dim for dim, size in enumerate(shape) if size == 1 and gradient.shape[dim] != 1)
    return gradient.sum(axis=repeated, keepdims=True)


def is_label(attrs: Attrs, x: Array, label: Array) -> Array:
    """Of each logit of this rank whether it is the label's."""
    first = attrs["part"].get("c", 0) * x.shape[-1]
    return np.arange(first, first + x.shape[-1]) == label[..., None]


def cross_entropy_statistic(attrs: Attrs, x: Array, label: Array) -> Array:
    """A row: log sum exp of this rank's logits, and the label's logit where this rank has it."""
    return np.stack([np.logaddexp.reduce(x, axis=-1), (x * is_label(attrs, x, label)).sum(axis=-1)])[None]


def cross_entropy(attrs: Attrs, x: Array, label: Array, rows: Array | None = None) -> Array | tuple[Array, Array]:
    """The loss; where the classes are whole, also the logarithm of every row's sum of exponentials."""
    is_whole = rows is None
    rows = cross_entropy_statistic(attrs, x, label) if rows is None else rows
    sums = np.logaddexp.reduce(rows[:, 0], axis=0)
    loss = (sums - rows[:, 1].sum(axis=0)).sum() / attrs["count"]
    return (loss, sums) if is_whole else loss


def cross_entropy_grad(attrs: Attrs, x: Array, label: Array, known: Array) -> Array:
    """From the rows of all shards, or from the logarithms of the sums of exponentials."""
    sums = np.logaddexp.reduce(known[:, 0], axis=0) if known.ndim > label.ndim else known
    softmax = np.exp(x - sums[..., None])
    return (softmax - is_label(attrs, x, label)) * attrs["scale"] / attrs["count"]


RULES: Mapping[str, Callable[..., Array | tuple[Array, ...]]] = {
    "linear.forward": linear,
    "linear.grad0": lambda attrs, dy, weight: dy @ weight,
    "linear.grad1": linear_grad_weight,
    "linear.grad2": lambda attrs, dy: dy.reshape(-1, dy.shape[-1]).sum(axis=0),
    "relu.forward": lambda attrs, x: np.maximum(x, 0),
    "relu.grad0": lambda attrs, dy, y: dy * (y > 0),
    "gelu.forward": lambda attrs, x: x * 0.5 * (1 + erf(x / np.sqrt(2))),
    "gelu.grad0": gelu_grad,
    "silu.forward": lambda attrs, x: x * expit(x),
    "silu.grad0": silu_grad,
    "abs.forward": lambda attrs, x: np.abs(x),
    "abs.grad0": lambda attrs, dy, x: dy * np.sign(x),
    "cast.forward": cast,
    "cast.grad0": cast,
    "add.forward": lambda attrs, x, y: x + y,
    "add.grad0": unbroadcast,
    "add.grad1": unbroadcast,
    "sub.forward": lambda attrs, x, y: x - y,
    "sub.grad0": unbroadcast,
    "sub.grad1": lambda attrs, dz: unbroadcast(attrs, -dz),
    "mul.forward": lambda attrs, x, y: x * y,
    "mul.grad0": lambda attrs, dz, y: unbroadcast(attrs, dz * y),
    "mul.grad1": lambda attrs, dz, x: unbroadcast(attrs, dz * x),
    "reshape.forward": lambda attrs, x: x.reshape(attrs["shape"]),
    "reshape.grad0": lambda attrs, dy: dy.reshape(attrs["shape"]),
    "l1_loss.forward": lambda attrs, x, t: np.abs(x - t).sum() / attrs["count"],
    "l1_loss.grad0": lambda attrs, x, t: np.sign(x - t) * attrs["scale"] / attrs["count"],
    "mse_loss.forward": lambda attrs, x, t: ((x - t) ** 2).sum() / attrs["count"],
    "mse_loss.grad0": lambda attrs, x, t: 2 * (x - t) * attrs["scale"] / attrs["count"],
    "cross_entropy.statistic": cross_entropy_statistic,
    "cross_entropy.forward": cross_entropy,
    "cross_entropy.grad0": cross_entropy_grad,
}


def sgd(attrs: Attrs, step: int, weight: Array, gradient: Array) -> tuple[Array, ...]:
    return (weight - attrs["lr"] * (gradient + attrs.get("weight_decay", 0.0) * weight),)


def momentum(attrs: Attrs, step: int, weight: Array, gradient: Array, velocity: Array) -> tuple[Array, ...]:
    gradient = gradient + attrs.get("weight_decay", 0.0) * weight
    velocity = gradient if step == 1 else attrs.get("momentum", 0.9) * velocity + gradient
    return weight - attrs["lr"] * velocity, velocity


def adamw(attrs: Attrs, step: int, weight: Array, gradient: Array, mean: Array, square: Array) -> tuple[Array, ...]:
    beta1, beta2, lr = attrs.get("beta1", 0.9), attrs.get("beta2", 0.999), attrs["lr"]
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient**2
    scaled = mean / (1 - beta1**step) / (np.sqrt(square / (1 - beta2**step)) + attrs.get("eps", 1e-8))
    return weight * (1 - lr * attrs.get("weight_decay", 1e-2)) - lr * scaled, mean, square


UPDATES: Mapping[str, Callable[..., tuple[Array, ...]]] = {
    "sgd.update": sgd,
    "momentum.update": momentum,
    "adamw.update": adamw,
}
