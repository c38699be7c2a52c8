"""Replayed steps on GPUs: as the eager ones bit for bit, and as training on one device. They need a GPU.

Ranks are processes with NCCL between them; as many as there are GPUs, of 1, 2 and 4. Kernels are told to be
deterministic, so that two runs of the same step can be equal bit for bit.
"""

import contextlib
import json
import os
import warnings
from dataclasses import replace
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from executor.data.batches import random_batches, rows_of_rank
from executor.device import Device, pick_device
from executor.step.compiled import CompiledStep
from executor.step.groups import connect
from executor.step.interpreter import Interpreter
from executor.train.options import RunOptions
from executor.train.run import run_rank
from executor.weights.models import RandomParameters
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer
from plans.optimizer import Optimizer
from plans.step_check import Spike, StepCheck
from tests.support.on_ranks import run_on_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.needs("GPU")]

STEPS, BATCH = 9, 8
CONFIG = TransformerConfig(
    name="small", num_layers=4, hidden=64, num_heads=4, num_kv_heads=2, ffn=128, vocab=128, seq=32, dtype="float32"
)


def adamw(level=0, **rest):
    return Optimizer(kind="adamw", settings={"lr": 1e-3}, parallel_level=level, threshold_bytes=0, **rest)


def degrees(optimizer=None, **rest):
    return Degrees(global_batch=BATCH, micro_batch=2, optimizer=optimizer or adamw(), **rest)


CASES = {
    1: {
        "one": degrees(),
        "one, recompute": degrees(recompute="full"),
        "one, recompute memory-bound": degrees(recompute="memory_bound"),
        "one, interleaved": degrees(),
        "one, sgd": degrees(Optimizer(kind="sgd", settings={"lr": 1e-2})),
        "one, master weights, clipped": degrees(adamw(gradient_dtype="float64", master_dtype="float64", clip_norm=1.0)),
        "one, steps skipped": degrees(),
    },
    2: {
        **{f"data, level {level}": degrees(adamw(level), dp=2) for level in range(4)},
        "data, level 2, steps skipped": degrees(adamw(2), dp=2),
        "data, level 3, reduced once": degrees(adamw(3, reduce_every="step"), dp=2),
        "tensor": degrees(tp=2),
        "tensor, sequence": degrees(tp=2, sequence_parallel=True),
        "tensor, sequence, recompute memory-bound": degrees(tp=2, sequence_parallel=True, recompute="memory_bound"),
        "tensor, interleaved": degrees(tp=2),
        "tensor, sequence, interleaved": degrees(tp=2, sequence_parallel=True),
        "data, level 3, interleaved": replace(degrees(adamw(3), dp=2), micro_batch=4),
        "context": degrees(cp=2),
        "pipeline, 1f1b": degrees(pp=2),
        "pipeline, gpipe": degrees(pp=2, schedule="gpipe"),
        "pipeline, interleaved": degrees(pp=2, virtual=2, schedule="interleaved_1f1b"),
        "pipeline, zero-bubble": degrees(pp=2, schedule="zb_h1"),
        "pipeline, V": degrees(pp=2, virtual=2, schedule="zbv"),
    },
    4: {
        "data of four, level 3": degrees(adamw(3), dp=4),
        "data and tensor, level 2": degrees(adamw(2), dp=2, tp=2),
        "data and tensor, sequence, interleaved": replace(
            degrees(adamw(3), dp=2, tp=2, sequence_parallel=True), micro_batch=4
        ),
        "pipeline and data, level 2, reduced once": degrees(adamw(2, reduce_every="step"), pp=2, dp=2),
        "pipeline and tensor, recompute memory-bound": degrees(pp=2, tp=2, recompute="memory_bound"),
        "pipeline of four, zero-bubble": degrees(pp=4, schedule="zb_h1"),
    },
}  # fmt: skip
NEEDS = {1: pytest.mark.needs("GPU"), 2: pytest.mark.needs("two GPUs"), 4: pytest.mark.needs("four GPUs")}
COUNTS = [pytest.param(count, marks=NEEDS[count]) for count in CASES]
NAMES = [pytest.param(count, name, marks=NEEDS[count]) for count, cases in CASES.items() for name in cases]
OTHER_OPTIMIZERS = ("sgd", "clipped", "skipped")


SLICED = {
    "one, interleaved", "tensor, interleaved", "tensor, sequence, interleaved", "data, level 3, interleaved",
    "data and tensor, sequence, interleaved",
}  # fmt: skip
"""Cases whose micro-batches are cut into two slices, on two streams."""

FUSED = {"one", "one, interleaved", "data, level 2", "tensor, sequence", "pipeline, 1f1b"}
"""Cases whose runs of instructions are fused: compiling them takes seconds for every layout."""


SKIPPING = StepCheck(spike=Spike(factor=1.0001, window=2, then="skip"))
"""Skips a step whose gradients are larger than those of the last two updates: about every other one."""


def plan(count, name, execution):
    made = plan_of(CASES[count][name], transformer(CONFIG, batch_size=BATCH))
    return msgspec.structs.replace(
        made, execution=execution, interleave=2 if name in SLICED else 1, fused=name in FUSED,
        step_check=SKIPPING if "skipped" in name else None,
    )  # fmt: skip


def learning_rate(step):
    return 1e-3 * min(1.0, (step + 1) / 4)


def deterministic():
    warnings.simplefilter("default")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)


def trained(of, rank, options, folder=None):
    feed = rows_of_rank(of, rank, random_batches(of.graph, 0, STEPS))
    path = None if folder is None else folder / "weights.npz"
    return run_rank(
        lower(of), of, feed, RandomParameters(of.graph, 0), STEPS, device="cuda", weights_path=path, options=options
    )


@contextlib.contextmanager
def joined(count):
    """One process group for all cases: a second one at the same port may still find the store of the first."""
    if count == 1:
        yield
        return
    device = pick_device("cuda")
    device.use()
    connect(device)
    yield
    dist.destroy_process_group()


def both(rank, folder):
    """Every case of as many ranks, eagerly and replayed."""
    deterministic()
    count = int(os.environ["WORLD_SIZE"])
    with joined(count):
        run_cases(rank, folder, count)


def run_cases(rank, folder, count):
    options = RunOptions(record_steps=2, learning_rate=learning_rate)
    for name in CASES[count]:
        for execution in ("eager", "graph"):
            result = trained(plan(count, name, execution), rank, options)
            facts = {
                "execution": result.execution, "fallback": result.fallback, "spans_from": result.spans_from,
                "differences": result.differences, "num_spans": len(result.spans.step),
                "in_order": bool((np.diff(result.step_end_ns) > 0).all() and (result.step_s > 0).all()),
                "peak_bytes": result.device_peak_bytes, "reserved_bytes": result.device_reserved_bytes,
            }  # fmt: skip
            (folder / f"{name}.{execution}.{rank}.json").write_text(json.dumps(facts))
            if rank == 0:
                np.savez(folder / f"{name}.{execution}.npz", losses=result.losses, **(result.weights or {}))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """count -> the folder of its runs, made when it is asked for first."""
    folders = {}

    def of(count):
        if count not in folders:
            folders[count] = tmp_path_factory.mktemp(f"gpus{count}")
            run_on_ranks(both, count, folders[count], joined=False)
        return folders[count]

    return of


def arrays(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize(("count", "name"), NAMES)
def test_replayed_steps_are_the_eager_ones_bit_for_bit(runs, count, name):
    folder = runs(count)
    eager, graph = (arrays(folder / f"{name}.{execution}.npz") for execution in ("eager", "graph"))
    for key, array in eager.items():
        np.testing.assert_array_equal(graph[key], array, err_msg=key)
    for rank in range(count):
        facts = json.loads((folder / f"{name}.graph.{rank}.json").read_text())
        assert (facts["execution"], facts["fallback"], facts["spans_from"]) == ("graph", "", "replay")
        assert facts["differences"] == [] and facts["in_order"] and facts["num_spans"] > 0
        before = json.loads((folder / f"{name}.eager.{rank}.json").read_text())
        # nothing is kept twice but what cuBLAS works in: 32 MiB a stream on Hopper, of eager steps and of the recording
        num_streams = 2 if name in SLICED else 1
        assert facts["peak_bytes"] <= 1.05 * before["peak_bytes"] + num_streams * 33 * 2**20


@pytest.mark.parametrize(
    ("count", "name"), [each for each in NAMES if not any(word in each.values[1] for word in OTHER_OPTIMIZERS)]
)
def test_replayed_steps_are_training_on_one_device(runs, count, name):
    one, graph = arrays(runs(1) / "one.eager.npz"), arrays(runs(count) / f"{name}.graph.npz")
    np.testing.assert_allclose(graph["losses"], one["losses"], rtol=2e-5)
    assert graph.keys() == one.keys()
    for key, array in one.items():
        np.testing.assert_allclose(graph[key], array, rtol=1e-3, atol=2e-5, err_msg=key)


def on_one_stream(rank, folder):
    """Interleaved slices, with all their instructions on one stream."""
    deterministic()
    count = int(os.environ["WORLD_SIZE"])
    with joined(count):
        for name in sorted(SLICED & CASES[count].keys()):
            of = plan(count, name, "eager")
            with mock.patch.object(Device, "has_streams", False):
                result = trained(of, rank, RunOptions(learning_rate=learning_rate))
            if rank == 0:
                np.savez(folder / f"{name}.npz", losses=result.losses, **(result.weights or {}))


@pytest.mark.parametrize("count", COUNTS)
def test_two_streams_give_what_one_stream_gives_bit_for_bit(runs, count, tmp_path):
    folder = runs(count)
    run_on_ranks(on_one_stream, count, tmp_path, joined=False)
    for name in SLICED & CASES[count].keys():
        one, two = arrays(tmp_path / f"{name}.npz"), arrays(folder / f"{name}.eager.npz")
        assert one.keys() == two.keys()
        for key, array in one.items():
            np.testing.assert_array_equal(two[key], array, err_msg=f"{name}: {key}")


def alone(rank, folder):
    """What one GPU is enough for."""
    deterministic()
    device = pick_device("cuda")
    device.use()
    device.use_own_stream()
    of = plan(1, "one", "graph")
    feed = list(random_batches(of.graph, 0, 6))

    def interpreter():
        made = Interpreter(lower(of), 0, device)
        made.set_parameters(RandomParameters(of.graph, 0))
        return made

    eager = interpreter()
    expected = [float(eager.step(batch)) for batch in feed]
    # an instruction that reads a value on the host is issued between two recordings, and named
    reads = interpreter()
    at = len(reads.codes) // 2
    code = reads.codes[at]

    def read():
        code.run()
        reads.kept_tensors[0].sum().item()

    reads.codes = (*reads.codes[:at], replace(code, run=read), *reads.codes[at + 1 :])
    compiled = CompiledStep(reads)
    losses = [float(compiled.step(batch)) for batch in feed]
    assert losses == expected, (losses, expected)
    assert compiled.execution == "graph" and code.id in compiled.fallback, compiled.fallback
    compiled.close()
    # parameters that are set anew: recorded again
    again = interpreter()
    compiled = CompiledStep(again)
    first = [float(compiled.step(batch)) for batch in feed]
    again.set_parameters(RandomParameters(of.graph, 0))
    assert [float(compiled.step(batch)) for batch in feed] == first == expected
    assert compiled.execution == "graph"
    # the memory of a recording is given back
    held = device.memory_allocated()
    compiled.close()
    assert device.memory_allocated() <= held
    # losses of steps that ran long ago are still theirs, and no step waits for the host
    kept = interpreter()
    compiled = CompiledStep(kept)
    tensors = [compiled.step(batch) for batch in feed]
    assert [float(each) for each in tensors] == expected
    compiled.close()
    trained(of, rank, RunOptions(record_steps=1, profile_steps=2, profile_path=folder / "profile.json"))


@pytest.mark.filterwarnings("default")
def test_falling_back_setting_anew_and_profiling_on_one_gpu(tmp_path):
    run_on_ranks(alone, 1, tmp_path, joined=False)
    trace = json.loads((tmp_path / "profile.json").read_text())
    assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
