"""Prices of recurrent layers against layers measured on an H100."""

import json

import pytest

from benchmarks.devices.recurrent_layers import shapes_of
from costmodels import Machine
from costmodels.price.instruction import price_compute
from tests import ROOT

MEASURED = ROOT / "benchmarks" / "results" / "recurrent_h100.json"
ROWS = [row for row in json.loads(MEASURED.read_text())["rows"] if row["dtype"] == "bfloat16"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['mode']}-{row['batch']}-{row['length']}-{row['width']}")
def test_a_layer_in_bfloat16_takes_what_was_measured_within_a_factor(row):
    size, machine = (row["batch"], row["length"], row["width"]), Machine.load("h100-sxm-x1")
    operands = shapes_of(row["mode"], size)
    for call, shapes, taken_us in (
        ("recurrent.forward", (*operands, size), row["forward_us"]),
        ("recurrent.grad01234", (size, *operands, *operands), row["grad_us"]),
    ):
        told_us = price_compute(machine, call, tuple(shapes), row["dtype"], 1, own=True).work_ps / 1e6
        assert 1 / 1.65 < told_us / taken_us < 1.5
