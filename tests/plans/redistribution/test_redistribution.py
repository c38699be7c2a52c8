"""Redistribution: right values on pretend ranks, and never more bytes than needed."""

import itertools

import numpy as np
import pytest

from plans.errors import TwofoldError
from plans.layout import Layout, TensorLayout
from plans.redistribution import Step, StepKind, StepPrice, max_received_bytes, pieces, received_bytes, redistribute
from plans.redistribution.greedy import by_gathering, by_moving, by_transfer
from plans.redistribution.space import Space
from tests.plans.redistribution.cases import Case, order_case, random_case, random_layout
from tests.plans.redistribution.mindspore import elements, mindspore_steps
from tests.pretend.redistribution import apply_steps, split

CUBE = Layout((2, 2, 2), ("dp", "sp", "mp"))


def check(case: Case, steps: tuple[Step, ...]) -> None:
    """Every rank must end with exactly its slice of the sum of the terms."""
    rng = np.random.default_rng(0)
    num_terms = case.source.mesh.size(case.source.partial)
    terms = [rng.integers(-99, 99, case.shape).astype(float) for _ in range(num_terms)]
    parts = apply_steps(steps, split(case.source, terms), case.shape)
    whole = sum(terms)
    assert set(parts) >= set(case.target.mesh.rank_list)
    for group in case.target.mesh.groups(case.target.partial):
        total = sum(parts[rank] for rank in group)
        window = tuple(slice(low, high) for low, high in case.target.region(group[0], case.shape))
        np.testing.assert_array_equal(total, whole[window], err_msg=f"{case}\n" + "\n".join(map(str, steps)))


def total_bytes(steps: tuple[Step, ...], shape: tuple[int, ...]) -> int:
    return sum(max_received_bytes(step, shape) for step in steps)


def lacking_bytes(case: Case) -> int:
    """What the worst rank lacks of its part: no sequence can bring less (counted element by element)."""
    worst = 0
    for rank in case.target.mesh.rank_list:
        wanted = np.zeros(case.shape, dtype=bool)
        wanted[tuple(slice(low, high) for low, high in case.target.region(rank, case.shape))] = True
        if rank in case.source.mesh.rank_list:
            wanted[tuple(slice(low, high) for low, high in case.source.region(rank, case.shape))] = False
        worst = max(worst, int(wanted.sum()))
    return worst * 4


def links_price(step: Step, shape: tuple[int, ...], itemsize: int) -> float:
    """A price with latency, two tiers (4 ranks a node) and half the bandwidth for transfers."""
    if step.kind is StepKind.SLICE:
        return 1e-7
    groups = [step.before.mesh.rank_list] if step.kind is StepKind.TRANSFER else step.before.mesh.groups(step.axes)
    slow = any(len({rank // 4 for rank in group}) > 1 for group in groups)
    bytes_per_s = (1e8 if slow else 1e9) * (0.5 if step.kind is StepKind.TRANSFER else 1.0)
    return 2e-6 + max_received_bytes(step, shape, itemsize) / bytes_per_s


@pytest.mark.parametrize("relation", ["same", "regrouped", "shuffled", "elsewhere"])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_random_layouts_get_the_right_values(relation: str, uneven: bool, partial: bool) -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        case = random_case(rng, relation=relation, uneven=uneven, partial=partial, max_ranks=24)
        check(case, redistribute(case.source, case.target, case.shape))


def test_a_price_changes_the_steps_but_not_the_values() -> None:
    rng = np.random.default_rng(2)
    for _ in range(60):
        case = random_case(rng, max_ranks=16)
        check(case, redistribute(case.source, case.target, case.shape, price=links_price))


def test_no_more_bytes_than_the_worst_rank_lacks() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        case = random_case(rng, partial=False, max_ranks=16)
        steps = redistribute(case.source, case.target, case.shape)
        assert total_bytes(steps, case.shape) == lacking_bytes(case), case


def test_an_axis_order_change_is_one_transfer() -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        case = order_case(rng, max_ranks=16)
        (step,) = redistribute(case.source, case.target, case.shape)
        assert step.kind is StepKind.TRANSFER
        assert total_bytes((step,), case.shape) <= np.prod(case.source.local_shape(case.shape)) * 4


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (CUBE("dp", "None"), CUBE("None", "None"), ["all_gather"]),
        (CUBE("dp", "None"), CUBE("None", "dp"), ["all_to_all"]),
        (CUBE("None", "None"), CUBE("None", ("mp", "dp")), ["slice"]),
        (CUBE(("dp", "sp", "mp"), "None"), CUBE("None", "None"), ["all_gather"]),
        (CUBE(("mp", "sp", "dp"), "None"), CUBE(("dp", "sp", "mp"), "None"), ["transfer"]),
        (
            TensorLayout(mesh=CUBE, dims=(("dp", "sp"), ()), partial=("mp",)),
            CUBE(("dp", "sp"), "mp"),
            ["reduce_scatter"],
        ),
        (TensorLayout(mesh=CUBE, dims=((), ("sp",)), partial=("dp", "mp")), CUBE("None", "sp"), ["all_reduce"]),
        (
            TensorLayout(mesh=CUBE, dims=((), ("sp",)), partial=("dp", "mp")),
            CUBE(("mp", "dp"), "sp"),
            ["reduce_scatter"],
        ),
        (CUBE("dp", "sp"), CUBE("dp", "sp"), []),
    ],
)
def test_one_collective_does_what_one_collective_can(
    source: TensorLayout, target: TensorLayout, kinds: list[str]
) -> None:
    assert [str(step.kind) for step in redistribute(source, target, (16, 16))] == kinds


def test_spare_replicas_share_the_work_of_a_sum() -> None:
    """Ranks that differ along sp hold the same terms, so each sums one half and the halves are gathered."""
    source = TensorLayout(mesh=CUBE, dims=((), ()), partial=("dp", "mp"))
    steps = redistribute(source, CUBE("None", "None"), (16, 16))
    assert [str(step.kind) for step in steps] == ["slice", "all_reduce", "all_gather"]
    assert total_bytes(steps, (16, 16)) == 1024 * (2 * 3 / 4 / 2 + 1 / 2)


def test_the_same_placement_on_another_mesh_needs_no_step() -> None:
    assert redistribute(CUBE(("dp", "sp", "mp"), "None"), Layout((8,), ("tp",))("tp", "None"), (16, 4)) == ()
    assert redistribute(CUBE("sp", "None"), Layout((4, 2), ("x", "y"))("None", "None"), (16, 4)) != ()


def test_regions_that_agree_by_chance_need_no_step() -> None:
    """Eight ranks cut 8 rows alike in any grouping, but 10 rows differently by 8 at once and by 2, 2 and 2."""
    fine, coarse = CUBE(("dp", "sp", "mp"), "None"), Layout((8,), ("tp",))("tp", "None")
    assert fine.region(2, (10, 4)) != coarse.region(2, (10, 4))
    assert [str(step.kind) for step in redistribute(fine, coarse, (10, 4))] == ["transfer"]
    turned = Layout((4,), ("x",), [0, 2, 1, 3])
    assert redistribute(Layout((4,), ("y",))("None", "y"), turned("None", "x"), (1, 4)) != ()
    assert redistribute(Layout((4,), ("y",))("None", "None"), turned("None", "None"), (1, 4)) == ()


def test_parts_without_elements_get_their_shape() -> None:
    """Rank 1 has no element of a single one in either layout, but parts of shape (0, 1) and (1, 0)."""
    for mesh, shape in [(Layout((2,), ("a",)), (1, 1)), (Layout((2, 2), ("a", "b")), (1, 3))]:
        for source, target in [(mesh("a", "None"), mesh("None", "a")), (mesh("None", "a"), mesh("a", "None"))]:
            for price in (None, links_price):
                steps = redistribute(source, target, shape, price=price)
                check(Case(source=source, target=target, shape=shape, relation="same"), steps)


@pytest.mark.parametrize(
    ("matrix", "names"),
    [((4, 2), {"a": "x", "b": "y"}), ((4, 2, 1), {"a": "x", "b": "y"}), ((4, 2), {"a": "b", "b": "a"})],
)
@pytest.mark.parametrize("price", [None, links_price])
def test_names_of_axes_do_not_matter(matrix: tuple[int, ...], names: dict[str, str], price: StepPrice | None) -> None:
    """Uneven dims cut by the same axes under other names: the steps cost what they cost where the names agree."""
    mesh, rng, shape = Layout((4, 2), ("a", "b")), np.random.default_rng(11), (37, 21)
    named = Layout(matrix, (*names.values(), "one")[: len(matrix)])

    def cost(steps: tuple[Step, ...]) -> float:
        return sum(max_received_bytes(step, shape) if price is None else price(step, shape, 4) for step in steps)

    for _ in range(25):
        source, target = random_layout(rng, mesh, 2, 0.3), random_layout(rng, mesh, 2, 0.0)
        renamed = TensorLayout(mesh=named, dims=tuple(tuple(names[axis] for axis in axes) for axes in target.dims))
        steps = redistribute(source, renamed, shape, price=price)
        check(Case(source=source, target=renamed, shape=shape, relation="regrouped"), steps)
        assert cost(steps) == pytest.approx(cost(redistribute(source, target, shape, price=price)), rel=1e-12)


def test_a_finer_mesh_is_used_where_it_cuts_equally() -> None:
    """(4,) is (2, 2) where it cuts evenly: here one all-gather, not a transfer, although the other dim is uneven."""
    coarse, fine = Layout((2, 4), ("dp", "tp")), Layout((2, 2, 2), ("dp", "sp", "mp"))
    source, target = coarse("dp", "tp"), fine("dp", "sp")
    assert [str(step.kind) for step in redistribute(source, target, (37, 16))] == ["all_gather"]
    steps = redistribute(source, target, (37, 18))  # 18 columns by 4 are 5, 5, 5, 3, by 2 and 2 they are 5, 4, 5, 4
    assert [str(step.kind) for step in steps] == ["transfer"]
    for shape in [(37, 16), (37, 18)]:
        case = Case(source=source, target=target, shape=shape, relation="regrouped")
        check(case, redistribute(source, target, shape))


def test_no_transfer_that_moves_nothing_ends_a_sequence() -> None:
    """Across meshes without a common refinement: after the reduce-scatter every rank has its part already."""
    mesh = Layout((4, 2), ("a", "b"))
    source = TensorLayout(mesh=mesh, dims=(("a",), ()), partial=("b",))
    target = Layout((8,), ("tp",))("tp", "None")
    assert [str(step.kind) for step in redistribute(source, target, (55, 4))] == ["reduce_scatter"]
    case = Case(source=source, target=target, shape=(55, 4), relation="regrouped")
    check(case, redistribute(source, target, (55, 4)))  # 55 rows by 8 begin where those by 4 and 2 do


def test_copies_do_not_move() -> None:
    mesh = Layout((2, 2, 2), ("dp", "sp", "interleaved_parallel"))
    assert redistribute(mesh(("dp", "interleaved_parallel"), "None"), mesh("dp", "None"), (8, 8)) == ()
    steps = redistribute(mesh(("dp", "interleaved_parallel"), "None"), mesh("None", "dp"), (8, 8))
    check(Case(source=steps[0].before, target=steps[-1].after, shape=(8, 8), relation="same"), steps)


@pytest.mark.parametrize("price", [None, links_price])
def test_many_axes_are_never_above_the_greedy_sequences(price: StepPrice | None) -> None:
    rng = np.random.default_rng(8)
    mesh = Layout((2, 2, 2, 2, 2), ("a", "b", "c", "d", "e"))

    def cost(step: Step) -> float:
        return max_received_bytes(step, (32, 32), 4) if price is None else price(step, (32, 32), 4)

    for _ in range(6):
        source, target = random_layout(rng, mesh, 2, 0.2), random_layout(rng, mesh, 2, 0.0)
        space = Space(mesh, target, (32, 32))
        case = Case(source=source, target=target, shape=(32, 32), relation="same")
        steps = redistribute(source, target, (32, 32), price=price)
        check(case, steps)
        for sequence in (by_gathering, by_moving, by_transfer):
            greedy = tuple(space.step(move) for move in sequence(space, space.state(source), space.goal))
            check(case, greedy)
            assert sum(map(cost, steps)) <= sum(map(cost, greedy)) * (1 + 1e-12)


def test_an_unhashable_price_is_used_without_the_cache() -> None:
    class Costly(list[float]):
        def __call__(self, step: Step, shape: tuple[int, ...], itemsize: int) -> float:
            self.append(1.0)
            return 1.0 if step.kind is not StepKind.TRANSFER else 9.0

    price = Costly()
    steps = redistribute(CUBE("dp", "None"), CUBE("None", "None"), (8, 8), price=price)
    assert [str(step.kind) for step in steps] == ["all_gather"]
    assert price


def test_mindspores_greedy_inference_by_hand() -> None:
    """Order change of two axes: gather one (4 elements), then all-to-all the other on half the tensor (4 more)."""
    mesh = Layout((2, 2), ("a", "b"))
    assert elements(mindspore_steps(mesh(("a", "b")), mesh(("b", "a")), (16,))) == 8
    assert elements(mindspore_steps(mesh("a", "None"), mesh("None", "a"), (4, 4))) == 4
    assert elements(mindspore_steps(mesh("a", "b"), mesh("None", "None"), (4, 4))) == 12
    assert elements(mindspore_steps(mesh("None", "None"), mesh("a", "b"), (4, 4))) == 0


def test_steps_link_source_and_target_on_one_mesh() -> None:
    mesh = Layout((2, 1, 3), ("a", "one", "b"))
    source, target = mesh(("a", "one"), "b"), mesh("None", ("one", "b"))
    steps = redistribute(source, target, (4, 6))
    assert steps[0].before == source
    assert steps[-1].after == target
    for one, next_one in itertools.pairwise(steps):
        assert one.after == next_one.before


def test_traffic_agrees_with_the_search() -> None:
    """The search counts bytes on states of its own; `traffic` counts them on the steps."""
    rng = np.random.default_rng(5)
    seen = set()
    for _ in range(60):
        case = random_case(rng, max_ranks=16)
        for step in redistribute(case.source, case.target, case.shape, price=links_price):
            seen.add(step.kind)
            assert max(received_bytes(step, case.shape).values()) == max_received_bytes(step, case.shape)
            if step.kind is StepKind.TRANSFER:
                fetched = dict.fromkeys(step.after.mesh.rank_list, 0)
                for piece in pieces(step.before, step.after, case.shape):
                    fetched[piece.dst_rank] += 0 if piece.is_local else 4 * piece.num_elements
                assert fetched == received_bytes(step, case.shape)
    assert seen == set(StepKind)


def test_partial_is_never_made() -> None:
    with pytest.raises(TwofoldError, match="partial"):
        redistribute(CUBE("dp"), TensorLayout(mesh=CUBE, dims=(("dp",),), partial=("mp",)), (8,))


def test_wrong_number_of_dims_is_refused() -> None:
    with pytest.raises(TwofoldError, match="numbers of dims"):
        redistribute(CUBE("dp"), CUBE("dp", "None"), (8,))


class TestPieces:
    def test_equal_layouts_on_equal_meshes_pair_positions(self) -> None:
        there = Layout((2, 2, 2), ("dp", "sp", "mp"), [15, 14, 13, 12, 11, 10, 9, 8])
        for dims in [("dp", "sp"), ("None", "mp"), ("None", "None"), (("mp", "dp"), "sp")]:
            found = pieces(CUBE(*dims), there(*dims), (8, 8))
            assert [(piece.src_rank, piece.dst_rank) for piece in found] == [(at, 15 - at) for at in range(8)]

    def test_held_parts_are_not_fetched(self) -> None:
        for piece in pieces(CUBE("dp", "None"), CUBE("dp", "sp"), (8, 8)):
            assert piece.is_local

    def test_replicas_share_the_load(self) -> None:
        there = Layout((8,), ("tp",), list(range(8, 16)))
        sent = dict.fromkeys(range(8), 0)
        for piece in pieces(CUBE("dp"), there("None"), (16,)):
            sent[piece.src_rank] += piece.num_elements
        assert set(sent.values()) == {16}

    def test_every_element_comes_exactly_once(self) -> None:
        rng = np.random.default_rng(6)
        for _ in range(40):
            case = random_case(rng, partial=False, max_ranks=16)
            count = {rank: np.zeros(case.shape, dtype=int) for rank in case.target.mesh.rank_list}
            for piece in pieces(case.source, case.target, case.shape):
                window = tuple(slice(low, high) for low, high in piece.region)
                count[piece.dst_rank][window] += 1
                held = case.source.region(piece.src_rank, case.shape)
                assert all(a <= c and d <= b for (a, b), (c, d) in zip(held, piece.region, strict=True))
            for rank, counted in count.items():
                window = tuple(slice(low, high) for low, high in case.target.region(rank, case.shape))
                assert (counted[window] == 1).all()
                assert counted.sum() == counted[window].size
