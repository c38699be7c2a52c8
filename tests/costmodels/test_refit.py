"""The committed points, fitted again, give every figure of the machine files that are shipped."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from benchmarks.accuracy.calibration import MEASURED, fitted
from costmodels.fit.cpu import fit_cpu_machine
from costmodels.fit.points import load_points
from costmodels.machine.catalogue import device_path
from tests import DATA

SAME = 2e-5
"""Relative difference that another linear algebra library makes in a parameter that the points barely determine (the
fixed time of a tile, 10 ns); nearly all figures agree to 1e-8."""


def differences(got: Any, shipped: Any, where: str = "") -> Iterator[str]:
    """Every entry in which two JSON values differ, with both values."""
    if isinstance(got, dict) and isinstance(shipped, dict) and got.keys() == shipped.keys():
        for name in got:
            yield from differences(got[name], shipped[name], f"{where}.{name}")
    elif isinstance(got, list) and isinstance(shipped, list) and len(got) == len(shipped):
        for number, (one, other) in enumerate(zip(got, shipped, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif isinstance(got, float) and isinstance(shipped, int | float):
        if got != pytest.approx(shipped, rel=SAME):
            yield f"{where}: {got} instead of {shipped}"
    elif got != shipped:
        yield f"{where}: {got!r} instead of {shipped!r}"


@pytest.mark.parametrize("name", MEASURED)
def test_a_shipped_device_is_its_points_fitted(name):
    fit = fitted(name)
    assert fit is not None
    assert (
        list(differences(json.loads(msgspec.json.encode(fit.device)), json.loads(device_path(name).read_text()))) == []
    )


def test_a_cpu_machine_is_its_points_fitted():
    calibration = fit_cpu_machine(*load_points(DATA / "cpu-x4.points.jsonl.gz"))
    expected = json.loads((DATA / "cpu-x4.fitted.json").read_text())
    machine = json.loads(msgspec.json.encode(calibration.machine))
    assert list(differences({name: machine[name] for name in expected["machine"]}, expected["machine"])) == []
    assert [str(entry) for entry in calibration.residuals] == expected["residuals"]


def test_a_difference_is_found():
    assert list(differences({"a": [1.0, 2.0]}, {"a": [1.0, 2.1]})) == [".a[1]: 2.0 instead of 2.1"]
    assert list(differences({"a": 1.0}, {"b": 1.0})) != []
    assert list(differences({"a": 1.0 + 1e-7}, {"a": 1})) == []
