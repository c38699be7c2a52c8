"""Redistribution against torch's DTensor, all ranks in one process."""

import numpy as np
import pytest

from plans.layout import Layout
from plans.redistribution import max_received_bytes, redistribute
from tests.plans.redistribution.cases import random_layout
from tests.plans.redistribution.dtensor import device_mesh, dtensor_steps, pretend_world, redistributed
from tests.plans.redistribution.mindspore import elements
from tests.pretend.redistribution import apply_steps, split

MESHES = [Layout((8,), ("a",)), Layout((4, 2), ("a", "b")), Layout((2, 2, 2), ("a", "b", "c"))]


@pytest.fixture(autouse=True)
def _eight_ranks():
    with pretend_world(8):
        yield


def test_same_values_as_dtensor() -> None:
    rng = np.random.default_rng(0)
    for at in range(30):
        mesh, shape = MESHES[at % 3], (16, 8)
        source, target = random_layout(rng, mesh, 2, 0.2), random_layout(rng, mesh, 2, 0.0)
        terms = [rng.integers(-9, 9, shape).astype(float) for _ in range(mesh.size(source.partial))]
        parts = split(source, terms)
        ours = apply_steps(redistribute(source, target, shape), parts, shape)
        theirs = redistributed(source, target, parts, shape)
        for rank in mesh.rank_list:
            np.testing.assert_array_equal(ours[rank], theirs[rank], err_msg=f"{source} -> {target} on rank {rank}")


def test_uneven_parts_are_those_of_dtensor() -> None:
    mesh = MESHES[2]
    whole = np.arange(7.0 * 5).reshape(7, 5)
    for dims in [("a", "None"), (("a", "c"), "b"), (("a", "b", "c"), "None"), ("None", ("b", "c"))]:
        parts = split(mesh("None", "None"), [whole])
        theirs = redistributed(mesh("None", "None"), mesh(*dims), parts, (7, 5))
        for rank, part in split(mesh(*dims), [whole]).items():
            np.testing.assert_array_equal(part, theirs[rank].reshape(part.shape))


def test_never_more_bytes_than_dtensor() -> None:
    rng = np.random.default_rng(1)
    torch_meshes = [device_mesh(mesh) for mesh in MESHES]
    for at in range(60):
        mesh = MESHES[at % 3]
        source, target = random_layout(rng, mesh, 2, 0.2), random_layout(rng, mesh, 2, 0.0)
        steps = redistribute(source, target, (16, 16))
        theirs = elements(dtensor_steps(source, target, (16, 16), torch_meshes[at % 3]))
        assert sum(max_received_bytes(step, (16, 16), 1) for step in steps) <= theirs, (source, target)


def test_the_order_change_of_the_seed_moves_an_eighth() -> None:
    """(mp, sp, dp) to (dp, sp, mp) on one dim: DTensor gathers 7/8 of the tensor, one transfer brings 1/8."""
    mesh = Layout((2, 2, 2), ("dp", "sp", "mp"))
    source, target = mesh(("mp", "sp", "dp")), mesh(("dp", "sp", "mp"))
    (step,) = redistribute(source, target, (64,))
    theirs = [each for each in dtensor_steps(source, target, (64,), device_mesh(mesh)) if each.kind != "slice"]
    kinds = [each.kind for each in theirs]
    assert (max_received_bytes(step, (64,), 1), elements(theirs), kinds) == (8, 56, ["all_gather"] * 3)
