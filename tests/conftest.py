"""What all tests share: reproducible examples, one thread a process, one test with several processes at a time."""

import fcntl
import gc
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests import ROOT
from tests.support import warm

# Tensors of tests are tiny: threads would only wait for each other. Libraries read the first when they are imported.
# The executor gives every rank of a host its share of the cores: a test that trains in its own process would otherwise
# take all of them, and all tests behind it up to 25 times as long.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["LOCAL_WORLD_SIZE"] = str(os.cpu_count())

# What Inductor compiles for a CPU runs once: preparing for more (workers, precompiled headers, the vectors that the
# processor has) takes longer than the rest of the test.
os.environ |= {
    "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}  # fmt: skip

# Python looks for cyclic garbage after every 700 new objects; less often it takes a tenth of the time.
gc.set_threshold(50_000, 20, 50)

# No deadline and no random start: no test may depend on how fast or how often it is run.
settings.register_profile("twofold", deadline=None, derandomize=True, database=None)
settings.load_profile("twofold")

# Hypothesis would parse every module of the project for constants to draw, which takes seconds in every worker and
# makes examples depend on code that a test does not use.
providers.is_local_module_file = lambda path: False  # type: ignore[attr-defined]


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def num_gpus() -> int:
    return importlib.import_module("torch").cuda.device_count()


IS_HERE: Mapping[str, Callable[[], bool]] = {
    "GPU": lambda: num_gpus() > 0,
    "two GPUs": lambda: num_gpus() > 1,
    "four GPUs": lambda: num_gpus() > 3,
    "triton": lambda: num_gpus() > 0 or os.environ.get("TRITON_INTERPRET") == "1",
    "compiler": lambda: num_gpus() > 0 or shutil.which("g++") is not None,
    "torch-npu": lambda: (ROOT / "build" / "npu" / "is-ready").exists(),  # by make check-npu
    "chromium": lambda: find_chromium() is not None,  # apt-get install chromium
}
"""What a machine may lack and a test can ask for with `@pytest.mark.needs`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="a random order of files, and of the tests of each")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that need what this machine has not (pytest counts them as deselected), and shuffle.

    pytest itself then brings tests together that share a value of a module's fixture.
    """
    needs = {item: {name for mark in item.iter_markers("needs") for name in mark.args} for item in items}
    missing = {name for name in set().union(*needs.values()) if not IS_HERE[name]()}
    config.hook.pytest_deselected(items=[item for item in items if needs[item] & missing])
    items[:] = [item for item in items if not needs[item] & missing]
    if (seed := config.getoption("shuffle")) is not None:
        from tests.support.scheduling import shuffled

        items[:] = shuffled(items, seed)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """No worker waits while another one runs tests marked `ranks`."""
    from tests.support.scheduling import RanksOnOneWorker

    return RanksOnOneWorker(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Modules and collected tests live until the end: the garbage collector need not look at them again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_behind() -> Generator[None, None, None]:
    """Nor at what a file's tests leave in caches: what is recorded collects garbage, again and again.

    Garbage is not collected here: the products under test unfreeze everything, and a collection takes seconds.
    """
    yield
    gc.freeze()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: waiting is neither a part of the test nor of its fixtures
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """Run one test marked `ranks` at a time, among all workers of pytest-xdist and all runs of this user.

    The groups of pytest-xdist would say it more plainly; those of 3.8.0 do nothing under pytest 9.2, which no longer
    reads the `_nodeid` that they set.
    """
    if item.get_closest_marker("ranks") is None:
        return (yield)
    with (Path(tempfile.gettempdir()) / f"twofold-ranks-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough if a child process still holds the file


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """A test that leaves torch with several threads would slow all behind it."""
    threads = getattr(sys.modules.get("torch"), "get_num_threads", lambda: 1)()
    assert threads == 1, f"{item.nodeid} leaves torch with {threads} threads"


@pytest.fixture(autouse=True)
def warm_agents(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches start from a process that has torch, unless the test is marked `new_interpreters`.

    The first test with ranks would otherwise wait for the server while its nodes wait for each other.
    """
    if request.node.get_closest_marker("new_interpreters") is None:
        if request.node.get_closest_marker("ranks") is not None:
            warm.ensure_running()
        monkeypatch.setattr("executor.launch.launch.start_agent", warm.start_agent)


@pytest.fixture(scope="session")
def chromium() -> str | None:
    """The command of a browser; tests that take it are marked `needs("chromium")`."""
    return find_chromium()


@pytest.fixture(scope="module")
def torch_npu() -> Generator[ModuleType, None, None]:
    """The stand-in for torch-npu, where `import torch_npu` finds it; gone behind the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tests" / "standins")
        yield importlib.import_module("torch_npu")
        for name in ("torch_npu", "executor.kernels.npu"):
            sys.modules.pop(name, None)
