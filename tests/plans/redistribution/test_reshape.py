"""Layouts through reshape and transpose: each rank reshapes its part and has the right part of the result."""

import math

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.layout import Layout
from plans.redistribution import redistribute
from plans.redistribution.reshape import reshape_layout, transpose_layout
from tests.plans.redistribution.cases import random_layout
from tests.pretend.redistribution import apply_steps, split

MESH = Layout((2, 2, 3), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((12, 6, 4), (72, 4)),
        ((72, 4), (12, 6, 4)),
        ((12, 6, 4), (12, 24)),
        ((12, 24), (12, 6, 4)),
        ((2, 36, 12), (72, 2, 6)),
        ((12, 1, 12), (144,)),
        ((144,), (1, 12, 1, 12)),
        ((24, 12), (24, 12)),
        ((6, 4), (4, 6)),
        ((1, 12), (12,)),
        ((12, 12), (144, 1)),
    ],
)
def test_local_reshape_gives_the_new_layout(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    whole = np.arange(float(math.prod(old))).reshape(old)
    for _ in range(25):
        layout = random_layout(rng, MESH, len(old), 0.0)
        found = reshape_layout(layout, old, new)
        parts = apply_steps(redistribute(layout, found.before, old), split(layout, [whole]), old)
        wanted = split(found.after, [whole.reshape(new)])
        for rank, part in parts.items():
            np.testing.assert_array_equal(part.reshape(found.after.part_shape(rank, new)), wanted[rank])


@pytest.mark.parametrize(
    ("dims", "old", "new", "after", "gathered"),
    [
        (("a", "b", "c"), (4, 6, 12), (24, 12), (("a",), ("c",)), (1,)),
        ((("a", "b"), "None"), (4, 6), (2, 2, 6), (("a",), ("b",), ()), ()),
        (("a", "b"), (2, 6), (12,), (("a", "b"),), ()),
        (("c", "None"), (12, 6), (2, 6, 6), ((), (), ()), (0,)),
        (("None", "a"), (3, 4), (3, 2, 2), ((), ("a",), ()), ()),
    ],
)
def test_splits_that_stay_contiguous_are_kept(dims, old, new, after, gathered) -> None:
    found = reshape_layout(MESH(*dims), old, new)
    assert found.after.dims == after
    assert found.gathered == gathered


def test_transpose_moves_the_axes_with_the_dims() -> None:
    layout = MESH("a", ("b", "c"), "None")
    whole = np.arange(4.0 * 6 * 5).reshape(4, 6, 5)
    after = transpose_layout(layout, (2, 0, 1))
    wanted = split(after, [whole.transpose(2, 0, 1)])
    for rank, part in split(layout, [whole]).items():
        np.testing.assert_array_equal(part.transpose(2, 0, 1), wanted[rank])
    with pytest.raises(TwofoldError, match="not a permutation"):
        transpose_layout(layout, (0, 0, 1))


def test_another_number_of_elements_is_refused() -> None:
    with pytest.raises(TwofoldError, match="24 elements are not 20"):
        reshape_layout(MESH("a", "None"), (4, 6), (4, 5))
