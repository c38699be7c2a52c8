"""Updates of lists of tensors and gradients of embeddings: launches and sums of torch, and their fit."""

import msgspec
import pytest

from costmodels import Machine
from costmodels.fit.points import Point
from costmodels.fit.torch_kernels import fit_torch_kernels, torch_kernel_s
from costmodels.fit.transfer_calibration import at_sustained_clock
from costmodels.price.compute import Compute
from costmodels.price.embedding_gradient import EmbeddingGradient
from costmodels.price.instruction import price_compute
from costmodels.price.tensor_lists import BLOCKS, CHUNK, TensorList, tensor_list_s

PACE = TensorList(start_s=3e-6, chunk_s=2.5e-5, resident=2, sharpness=1.3)
TABLE = EmbeddingGradient(token_s=5e-8, sort_s=1.2e-4, item_s=1.4e-11)
RATES = Compute(
    matrix_flops_per_s={"bfloat16": 1e15}, vector_flops_per_s={"bfloat16": 1e14}, memory_Bps=4e12,
    memory_efficiency=0.9, kernel_s=1e-6, num_cores=132, kernel_cost={"zero_.forward": 1.2},
)  # fmt: skip


def update_s(elements: int, tensors: int = 1, call: str = "adamw.fused") -> float:
    return tensor_list_s(PACE, call, 132, 3.6e12, 14 * elements, elements, tensors)


def test_a_launch_has_at_most_36_tensors_and_320_blocks():
    small = 2**10
    assert update_s(72 * small, 72) == pytest.approx(2 * update_s(36 * small, 36))
    assert update_s(37 * small, 37) == pytest.approx(update_s(36 * small, 36) + update_s(small))
    full = update_s(BLOCKS * CHUNK)
    assert update_s(2 * BLOCKS * CHUNK) == pytest.approx(2 * full)
    assert update_s((BLOCKS + 1) * CHUNK) == pytest.approx(full + update_s(CHUNK))


def test_a_second_wave_of_blocks_takes_as_long_as_one_of_its_blocks_at_least():
    one, more = update_s(264 * CHUNK), update_s(265 * CHUNK)
    assert more - one > PACE.chunk_s
    assert update_s(64 * CHUNK) < 1.6 * update_s(CHUNK)  # whose blocks run at once


def test_the_foreach_form_is_eight_kernels_that_move_20_tensors_of_7():
    assert update_s(2**10, call="adamw.foreach") > 7.9 * update_s(2**10)
    large = 640 * CHUNK
    moved_s = 14 * large / 3.6e12
    assert update_s(large, call="adamw.foreach") > 20 / 7 * moved_s


def points(rates: Compute) -> list[Point]:
    made = [
        Point(kind="memory", call=f"adamw_{form}", shape=(elements,), size_bytes=14 * elements, dtype="bfloat16",
              options={"tensors": tensors}, seconds=1.0)
        for form in ("fused", "foreach")
        for elements, tensors in ((2**16, 1), (2**20, 16), (2**24, 1), (2**24, 128), (2**26, 16), (2**29, 1))
    ]  # fmt: skip
    made += [
        Point(kind="memory", call="embedding_backward", shape=shape, size_bytes=2 * shape[1] * shape[2],
              dtype="bfloat16", seconds=1.0)
        for shape in ((1024, 32000, 1024), (2048, 32000, 4096), (8192, 50304, 2048), (16384, 32000, 4096))
    ]  # fmt: skip
    return [msgspec.structs.replace(point, seconds=torch_kernel_s(point, rates)) for point in made]


def test_a_fit_finds_the_figures_again_and_leaves_out_kernels_with_few_points():
    foreach = msgspec.structs.replace(PACE, resident=3, chunk_s=8e-6)
    known = msgspec.structs.replace(
        RATES, tensor_lists={"adamw.fused": PACE, "adamw.foreach": foreach}, embedding_gradient=TABLE
    )
    measured = points(known)
    found = fit_torch_kernels(measured, RATES)
    for point in measured:
        assert torch_kernel_s(point, found) == pytest.approx(point.seconds, rel=0.02)
    assert found.tensor_lists["adamw.fused"].resident == 2
    assert fit_torch_kernels(measured[:2], RATES) == RATES


def test_many_tokens_are_summed_by_the_rows_that_they_have():
    machine = Machine.load("h200-x1")
    rows, features = 32_000, 4096

    def seconds(tokens: int, rows: int = rows) -> float:
        shapes = ((tokens, features), (tokens,), (rows, features))
        touched = 2 * features * (tokens + rows)
        return price_compute(machine, "embedding.grad0", shapes, "bfloat16", touched).alone_s

    assert seconds(2048) < seconds(4096) < seconds(16384)
    # twice the tokens have less than twice the rows, and a table of few rows has few sums
    assert seconds(16384) - seconds(8192) < 0.9 * (seconds(8192) - seconds(4096)) * 2
    assert seconds(8192, 1024) < 0.5 * seconds(8192)


def test_blocks_of_a_slower_chip_take_longer_alone():
    paced = msgspec.structs.replace(RATES, tensor_lists={"adamw.fused": PACE})
    assert at_sustained_clock(paced, 0.5).tensor_lists["adamw.fused"].chunk_s == 2 * PACE.chunk_s
