"""The gradient of a table of embeddings, as torch's kernels sum it."""

from __future__ import annotations

import math

from costmodels.machine.sections import Section

__all__ = ["EMBEDDING_GRADIENTS", "SORTED_FROM", "EmbeddingGradient", "embedding_gradient_s"]

EMBEDDING_GRADIENTS = ("embedding.grad0", "embedding.grad1")
"""Calls: as measured alone, and of an instruction."""

SORTED_FROM = 3073
"""Tokens from which torch sorts them (aten/src/ATen/native/cuda/Embedding.cu, embedding_dense_backward_cuda)."""

_SUMMED = 10
"""Gradients that a thread sums."""


class EmbeddingGradient(Section, frozen=True, kw_only=True):
    """The gradient is filled with zeros, then the gradients of tokens are added to their rows.

    Up to 3,072 tokens, one kernel has a column of threads for each feature, which takes all tokens one after the other.
    Of more tokens, row numbers are sorted, and a thread sums up to ten gradients of one row (NROWS_PER_THREAD in
    EmbeddingBackwardKernel.cu). Cores wait for scattered rows, not memory for bytes: faster memory does not help.
    Tokens are taken to be spread evenly over the rows.

    Args:
        token_s: of each of a few tokens.
        sort_s: of the sort, and of the kernels that find where rows begin.
        item_s: of a feature of each sum.
    """

    token_s: float
    sort_s: float
    item_s: float


def embedding_gradient_s(model: EmbeddingGradient, fill_s: float, tokens: int, rows: int, features: int) -> float:
    """Seconds of the gradient of a table (rows, features).

    Args:
        model: pace of its kernels.
        fill_s: seconds in which zeros are written to all of it.
        tokens: rows of the gradient of the output.
        rows: of the table.
        features: of a row.

    >>> model = EmbeddingGradient(token_s=5e-8, sort_s=1e-4, item_s=1e-11)
    >>> few, many = (embedding_gradient_s(model, 0.0, tokens, 32_000, 4096) for tokens in (2000, 8000))
    >>> round(few, 5), round(many, 5)
    (0.0001, 0.00039)
    """
    if tokens < SORTED_FROM:
        return fill_s + model.token_s * tokens
    found = -rows * math.expm1(-tokens / rows)  # rows that any token has
    return fill_s + model.sort_s + model.item_s * max(found, tokens / _SUMMED) * features
