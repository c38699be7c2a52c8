"""The examples in docstrings are true."""

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

PACKAGES = ("plans", "costmodels", "simulator", "search", "interop", "executor", "reports", "twofold")
NOT_EVERYWHERE = ("triton", "torch_npu")  # what some kernels need


def modules_of(package: str) -> list[ModuleType]:
    found = []
    for each in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if each.name.endswith("__main__"):
            continue
        try:
            found.append(importlib.import_module(each.name))
        except ModuleNotFoundError as error:
            if error.name not in NOT_EVERYWHERE:
                raise
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_examples_in_docstrings(package):
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for module in modules_of(package):
        for docstring in finder.find(module):
            if docstring.examples:  # running a docstring without examples looks at every source file that was ever read
                runner.run(docstring)
    assert runner.tries and not runner.failures
