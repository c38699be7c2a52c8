"""Layouts agree with MindSpore's recorded ones where those are right, and refuse what it accepts wrongly."""

import json
from typing import Any

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.layout import INTERLEAVED, Layout
from tests import DATA

RECORDED = json.loads((DATA / "mindspore_2.10.0_layouts.json").read_text())["cases"]

# what MindSpore takes or refuses otherwise, on purpose
ALSO_TAKEN = {"matrix_list": "lists are as good as tuples", "rank_list_tuple": "tuples are as good as lists"}
ALSO_REFUSED = {"bool_in_matrix": "True", "negative_in_matrix": "-2", "rank_list_dup": "more than once"}


def tuples(value: Any) -> Any:
    return tuple(map(tuples, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in RECORDED])
def test_recorded_layouts(case: dict[str, Any]) -> None:
    arguments = {key: value if key == "rank_list" else tuples(value) for key, value in case["mesh"].items()}
    if case["name"] in ALSO_TAKEN:
        assert case["refused"] and Layout(**case["mesh"]) == Layout(
            **{key: tuples(case["mesh"][key]) for key in arguments}
        )
        return
    if case["refused"] or case["name"] in ALSO_REFUSED:
        with pytest.raises(TwofoldError, match=ALSO_REFUSED.get(case["name"])):
            Layout(**arguments)
        return
    mesh = Layout(**arguments)
    for call in case["calls"]:
        dims = tuples(call["dims"])
        if call.get("refused"):
            with pytest.raises(TwofoldError):
                mesh(*dims)
            continue
        layout = mesh(*dims)
        assert layout.sharding_strategy == tuples(call["sharding_strategy"])
        assert list(layout.to_dict().items()) == [
            ("device_matrix", arguments["device_matrix"]),
            ("tensor_map", tuples(call["tensor_map"])),
            ("interleaved_parallel", call["interleaved_parallel"]),
            ("alias_name", arguments["alias_name"]),
            ("rank_list", call["rank_list"]),
        ]


def test_the_record_is_read() -> None:
    assert len(RECORDED) == 24 and sum(len(case.get("calls", ())) for case in RECORDED) >= 18
    assert {*ALSO_TAKEN, *ALSO_REFUSED} <= {case["name"] for case in RECORDED}


def test_ranks_outside_the_mesh_are_named() -> None:
    mesh = Layout((2, 2), ("dp", "mp"))
    for ask in (lambda: mesh.coordinate(7), lambda: mesh.group_of(7, ("dp",)), lambda: mesh("dp").region(7, (4,))):
        with pytest.raises(TwofoldError, match=r"rank 7 is not in Layout\(\(2, 2\)"):
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
    with pytest.raises(TwofoldError, match="last axis of its dim"):
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
    assert "dim1[12:16]" in layout.table((4, 16))
    assert str(mesh("None")).splitlines()[1] == "everything: 0-7"
    assert [line.split()[-1] for line in str(mesh).splitlines()[-2:]] == ["5", "7"]
