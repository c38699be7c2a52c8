"""Capture of convolutions with a kernel for each sample.

Modulated convolutions (StyleGAN 2) and hypernetworks flatten the samples of a batch into the channels of one sample and
give each a group of its own. The number of groups is then that of the samples, which a plan cannot cut into
micro-batches. Here the windows of each sample are a matrix, and its kernel multiplies them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor, nn

from executor.capture.rules.layers import pair

__all__ = ["kernels_of_samples_as_products"]

_CONV2D, _CONV_TRANSPOSE2D = F.conv2d, F.conv_transpose2d


@contextlib.contextmanager
def kernels_of_samples_as_products() -> Iterator[None]:
    """Within this context, convolutions in which each group is a sample are computed as matrix products."""
    with mock.patch.object(F, "conv2d", _conv2d), mock.patch.object(F, "conv_transpose2d", _conv_transpose2d):
        yield


def _are_samples(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether groups are samples: their kernels are computed, and dim 0 is a sample that holds all of them."""
    return groups > 1 and x.dim() == 4 and x.shape[0] == 1 and not isinstance(weight, nn.Parameter)


def _conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    if isinstance(padding, str) or not _are_samples(input, weight, groups):
        return _CONV2D(input, weight, bias, stride, padding, dilation, groups)
    (_, channels, *size), (outputs, _, *kernel) = input.shape, weight.shape
    settings = [pair(each) for each in (dilation, padding, stride)]
    windows = F.unfold(input.reshape(groups, channels // groups, *size), tuple(kernel), *settings)
    made = weight.reshape(groups, outputs // groups, -1) @ windows
    after = [
        (length + 2 * around - apart * (width - 1) - 1) // step + 1
        for length, width, apart, around, step in zip(size, kernel, *settings, strict=True)
    ]
    made = made.reshape(1, outputs, *after)
    return made if bias is None else made + bias.view(1, -1, 1, 1)


def _conv_transpose2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    output_padding: Any = 0, groups: int = 1, dilation: Any = 1,
) -> Tensor:  # fmt: skip
    if not _are_samples(input, weight, groups):
        return _CONV_TRANSPOSE2D(input, weight, bias, stride, padding, output_padding, groups, dilation)
    (_, channels, *size), (_, outputs, *kernel) = input.shape, weight.shape
    settings = [pair(each) for each in (dilation, padding, stride)]
    rows = input.reshape(groups, channels // groups, -1)
    windows = weight.reshape(groups, channels // groups, -1).transpose(1, 2) @ rows
    after = [
        (length - 1) * step - 2 * around + apart * (width - 1) + more + 1
        for length, width, apart, around, step, more in zip(size, kernel, *settings, pair(output_padding), strict=True)
    ]
    made = F.fold(windows, (after[0], after[1]), tuple(kernel), *settings).reshape(1, groups * outputs, *after)
    return made if bias is None else made + bias.view(1, -1, 1, 1)
