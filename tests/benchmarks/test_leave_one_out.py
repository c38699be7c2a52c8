"""What is left out must not be used: figures measured on a device change nothing in its prediction from another."""

import json
import math
import statistics

import msgspec
import pytest

from benchmarks.accuracy.leave_one_out import RESULTS, as_if_unmeasured, left_out_kernels, left_out_steps, summary
from costmodels.machine.catalogue import load_device
from costmodels.widths import HOST, SOFTWARE, STEP_LONGER, TORCH_HOST


@pytest.mark.parametrize(("name", "other"), [("h100-sxm", "h200"), ("h200", "h100-sxm")])
def test_a_left_out_device_is_its_data_sheet_and_the_other_device(name, other):
    device, source = load_device(name), load_device(other)
    wrong = {
        field: 0.5 * getattr(device.compute, field)
        for field in ("matrix_efficiency", "memory_efficiency", "memory_chunk_s", "kernel_s", "half_depth", "clock_MHz",
                      "step_clock_MHz", "half_rows", "sharpness")
        if getattr(device.compute, field) is not None
    }  # fmt: skip
    poisoned = msgspec.structs.replace(
        device,
        compute=msgspec.structs.replace(
            device.compute, **wrong, attention=None, tiled=None, power=None, kernel_cost={}
        ),
    )
    assert as_if_unmeasured(poisoned, source).compute == as_if_unmeasured(device, source).compute
    slower = msgspec.structs.replace(source, compute=msgspec.structs.replace(source.compute, kernel_s=1e-3))
    assert as_if_unmeasured(device, slower).compute.kernel_s == 1e-3


def test_products_attention_and_steps_of_a_left_out_device_are_within_targets():
    rows = {(row["part"], row["out"]): row for row in summary([*left_out_kernels(), *left_out_steps()])}
    for (part, _), row in rows.items():
        if part in ("products", "attention", "steps"):
            assert row["mean"] <= row["target"]
    assert rows["products", "h200"]["rows"] > 4000


def test_widths_are_those_that_leaving_out_has_found():
    found = json.loads(RESULTS.read_bytes())
    low, high = (edge / (1 + STEP_LONGER) for edge in found["software_edges"]["all"])  # around the median
    assert round(low, 3) == SOFTWARE.low
    assert high <= SOFTWARE.high  # which also holds nine of ten plans in new shapes
    for part, width in (("host, torch blocks", TORCH_HOST), ("host, own instructions", HOST)):
        hosts: dict[str, list[float]] = {}
        for own, host, _, _, error in found["errors"]:
            if own == part:
                hosts.setdefault(host, []).append(math.log1p(error))
        assert statistics.pstdev(map(statistics.fmean, hosts.values())) == pytest.approx(width, abs=0.01)


def test_costs_of_kernels_are_carried_over_by_the_passes_that_they_make():
    """Predicted for an H100 from an H200 and the data sheet, beside what was measured on the H100: calls of one kernel
    and of several, of which the norm written out is the worst (its kernels are bound by both)."""
    h200, h100 = load_device("h200"), load_device("h100-sxm")
    carried = as_if_unmeasured(h100, h200).compute.kernel_cost
    for call, off in (
        ("rope_by_hand.forward", 0.05), ("rope_by_complex.grad0", 0.05), ("rms_norm.grad0", 0.05),
        ("cross_entropy.grad0", 0.05), ("rms_norm_by_hand.grad0", 0.05), ("rms_norm_by_hand.forward", 0.1),
    ):  # fmt: skip
        assert carried[call] == pytest.approx(h100.compute.kernel_cost[call], rel=off), call
        assert h200.compute.kernel_cost[call] > 1.03 * h100.compute.kernel_cost[call], call
