"""What is left out must not be used: figures measured on a device change nothing in its prediction from another."""

import msgspec
import pytest

from benchmarks.leave_one_out import as_if_unmeasured, left_out_kernels, left_out_steps, summary
from costmodels.machine.catalogue import load_device


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


def test_products_attention_and_steps_of_a_left_out_device_are_within_what_was_asked_for():
    rows = {(row["part"], row["out"]): row for row in summary([*left_out_kernels(), *left_out_steps()])}
    for (part, _), row in rows.items():
        if part in ("products", "attention", "steps"):
            assert row["mean"] <= row["target"]
    assert rows["products", "h200"]["rows"] > 4000
