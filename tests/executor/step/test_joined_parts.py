"""Parts that ranks gather and cut: the same as by torch.cat and torch.chunk, contiguous, whatever the shapes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from executor.step.parts import cut_parts, joined_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_sorted", [True, False])
def test_parts_are_joined_and_cut_as_torch_does(dtype: torch.dtype, size: int, is_sorted: bool) -> None:
    """A gather along a dim before which all others have one element is a view of its rows; it once was no contiguous
    one for other shapes, and steps trained with it went wrong."""
    order = list(range(size)) if is_sorted else list(reversed(range(size)))
    team = SimpleNamespace(size=size, is_sorted=is_sorted, order=order, inverse=order)
    for shape, dim in itertools.product(itertools.product((1, 2, 8), repeat=3), range(3)):
        rows = torch.randn(size, *shape).to(dtype)
        joined = joined_parts(rows, team, dim)
        assert joined.is_contiguous() and torch.equal(joined, torch.cat([rows[at] for at in order], dim)), (shape, dim)
        if shape[dim] % size:
            continue
        for x in (torch.randn(shape).to(dtype), torch.randn(shape[::-1]).to(dtype).permute(2, 1, 0)):
            parts = cut_parts(x, team, dim)
            chunks = x.chunk(size, dim)
            assert parts.is_contiguous() and torch.equal(parts, torch.stack([chunks[at] for at in order])), (shape, dim)
