"""Layouts agree with MindSpore's recorded ones where those are right, and refuse what it accepts wrongly."""

from typing import Any

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.layout import INTERLEAVED, Layout
from plans.show_layout import layout_table

# (name, device_matrix, alias_name, dims, tensor_map, sharding_strategy): recorded from MindSpore 2.10.0 on CPU
RECORDED: list[tuple[str, Any, Any, Any, Any, Any]] = [
    ("basic", (2, 2, 2), ("dp", "sp", "mp"), ("dp", "mp"), (2, 0), (2, 2)),
    ("two axes", (2, 2, 2), ("dp", "sp", "mp"), (("sp", "dp"), "None"), ((1, 2), -1), (4, 1)),
    ("one axis", (8,), ("tp",), ("None", "tp"), (-1, 0), (1, 8)),
    ("no dims", (2, 2, 2), ("dp", "sp", "mp"), (), (), ()),
    ("tuple of one", (2, 2, 2), ("dp", "sp", "mp"), (("dp",), "mp"), ((2,), 0), (2, 2)),
    ("no powers of two", (3, 5), ("dp", "mp"), ("dp", "mp"), (1, 0), (3, 5)),
    ("copies", (2, 2, 2), ("dp", "sp", INTERLEAVED), (("dp", INTERLEAVED), "sp"), ((2, 0), 1), (4, 2)),
    ("copies alone", (2, 2), ("dp", INTERLEAVED), (INTERLEAVED, "dp"), (0, 1), (2, 2)),
    ("copies unused", (2, 2), ("dp", INTERLEAVED), ("dp", "None"), (1, -1), (2, 1)),
]


@pytest.mark.parametrize(("matrix", "names", "dims", "tensor_map", "strategy"), [row[1:] for row in RECORDED])
def test_recorded_layouts(matrix: Any, names: Any, dims: Any, tensor_map: Any, strategy: Any) -> None:
    layout = Layout(matrix, names)(*dims)
    assert layout.sharding_strategy == strategy
    assert list(layout.to_dict().items()) == [
        ("device_matrix", matrix),
        ("tensor_map", tensor_map),
        ("interleaved_parallel", INTERLEAVED in names),
        ("alias_name", names),
        ("rank_list", list(range(int(np.prod(matrix))))),
    ]


def test_ranks_outside_the_mesh_are_named() -> None:
    mesh = Layout((2, 2), ("dp", "mp"))
    for ask in (lambda: mesh.coordinate(7), lambda: mesh.group_of(7, ("dp",)), lambda: mesh("dp").region(7, (4,))):
        with pytest.raises(TwofoldError, match=r"rank 7 is none of Layout\(\(2, 2\)"):
            ask()


@pytest.mark.parametrize(
    ("matrix", "names", "ranks", "message"),
    [
        ((2, 2), ("dp", "sp", "mp"), None, "2 axes"),
        ((True, 2, 2), ("dp", "sp", "mp"), None, "True"),
        ((-2, 2), ("a", "b"), None, "-2"),
        ((0, 2), ("a", "b"), None, "at least 1"),
        ((), (), None, "device_matrix"),
        ((2, 2), ("dp", ""), None, "cannot name an axis"),
        ((2, 2), ("dp", "dp"), None, "more than once"),
        ((2, 2), ("dp", "None"), None, "cannot name an axis"),
        ((2, 2), (INTERLEAVED, "dp"), None, "last axis"),
        ((2, 2), ("dp", "mp"), [0, 0, 1, 1], "more than once"),
        ((2, 2), ("dp", "mp"), [0, 1, 2, -3], "-3"),
        ((2, 2), ("dp", "mp"), [[0, 1], [2, 3]], r"\[0, 1\]"),
        ((2, 2), ("dp", "mp"), [0, 1, 2], "3 ranks"),
    ],
)
def test_wrong_meshes_are_refused(matrix: Any, names: Any, ranks: Any, message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        Layout(matrix, names, ranks)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (("dp", "dp"), "'dp' has been set more than once"),
        ((("dp", "sp"), "sp"), "'sp' has been set more than once"),
        ((("dp", "xx"), "mp"), "'xx' is not found"),
        ((0, "mp"), "not 0"),
    ],
)
def test_wrong_dims_are_refused(dims: Any, message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        Layout((2, 2, 2), ("dp", "sp", "mp"))(*dims)


def test_copies_are_cut_inside_a_rank() -> None:
    mesh = Layout((2, 2, 2), ("dp", "sp", INTERLEAVED))
    layout = mesh(("dp", INTERLEAVED), "sp")
    assert mesh.rank_list == (0, 1, 2, 3)
    assert mesh.num_copies == 2
    assert layout.split_counts == (2, 2)
    assert layout.region(3, (8, 4)) == ((4, 8), (2, 4))
    with pytest.raises(TwofoldError, match="6 % 4"):
        layout.check((6, 4))
    with pytest.raises(TwofoldError, match="last in its dim"):
        mesh((INTERLEAVED, "dp"))


def test_uneven_parts_are_those_of_numpys_reference() -> None:
    """Cut by each axis in turn into ceil(size / n): the rule of torch.chunk, written down once more with slices."""
    mesh = Layout((2, 3, 2), ("a", "b", "c"))
    for size in range(14):
        for rank in range(12):
            part = np.arange(size)
            for axis in ("c", "a", "b"):
                n, at = mesh.size((axis,)), mesh.index(rank, (axis,))
                width = -(-len(part) // n)
                part = part[at * width : (at + 1) * width]
            ((low, high),) = mesh(("c", "a", "b")).region(rank, (size,))
            assert list(range(low, high)) == part.tolist()


def test_128_devices() -> None:
    mesh = Layout((8, 4, 4), ("dp", "sp", "mp"))
    assert mesh.num_ranks == 128
    assert mesh(("dp", "mp"), "sp").region(127, (64, 8)) == ((62, 64), (6, 8))


def test_print_shows_who_holds_what() -> None:
    mesh = Layout((2, 2, 2), ("dp", "sp", "mp"))
    layout = mesh("mp", ("sp", "dp"))
    table = [line.split() for line in str(layout).splitlines()]
    assert table[2][-4:] == ["0", "4", "2", "6"]
    assert table[3][-4:] == ["1", "5", "3", "7"]
    assert f"{layout}" == "(mp, (sp, dp))"
    assert "dim1[12:16]" in layout_table(layout, (4, 16))
    assert str(mesh("None")).splitlines()[1] == "everything: 0-7"
    assert [line.split()[-1] for line in str(mesh).splitlines()[-2:]] == ["5", "7"]
