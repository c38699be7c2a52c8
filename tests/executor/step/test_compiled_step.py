"""Recorded steps, replayed by a stand-in: they are as the eager ones, whatever changes between them."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from executor.capture.capture import capture
from executor.data.batches import rows_of_rank
from executor.device import Device
from executor.kernels.context import StepCounter
from executor.launch.launch import launch
from executor.launch.rank_failures import RankFailed
from executor.reference.random import PlannedRandom
from executor.step.compiled import CompiledStep
from executor.step.interpreter import Interpreter
from executor.train import run as run_module
from executor.train.checkpoints.files import written_checkpoints
from executor.train.options import Checkpoints, RunOptions
from executor.train.result import spans_of
from executor.train.run import run_rank
from plans.errors import TrainingStopped, TwofoldError
from plans.layout import Layout
from plans.lower import lower
from plans.optimizer import Optimizer
from plans.plan import Plan, Stage
from tests import ROOT
from tests.support.on_ranks import run_on_ranks
from tests.support.recording_device import RecordingDevice
from tests.support.small_training import batches, four_ranks, one_rank, parameters, trained

SGD = Optimizer(settings={"lr": 0.1})
MOMENTUM = Optimizer(kind="momentum", settings={"lr": 0.1, "momentum": 0.8, "nesterov": 1.0, "weight_decay": 0.01})
ADAMW = Optimizer(kind="adamw", settings={"lr": 0.1})
PLANS = {
    "sgd": one_rank(optimizer=SGD),
    "momentum, two micro-batches": one_rank(optimizer=MOMENTUM, num_micro_batches=2),
    "adamw, recompute": one_rank(optimizer=ADAMW, num_micro_batches=4, recompute=("act",)),
    "adamw, master weights, clipped": one_rank(
        optimizer=Optimizer(
            kind="adamw", settings={"lr": 0.1}, gradient_dtype="float64", master_dtype="float64", clip_norm=0.1
        )
    ),
    "adamw, half-precision states": one_rank(
        optimizer=Optimizer(kind="adamw", settings={"lr": 0.1}, state_dtype="bfloat16")
    ),
    "interleaved": one_rank(optimizer=ADAMW, num_micro_batches=2, interleave=2),
}


def schedule(step):
    """A warm-up from nothing, then a decay."""
    return 0.05 * step if step < 4 else 0.2 / step


def interpreter(plan, device):
    made = Interpreter(lower(plan), 0, device)
    made.set_parameters(parameters())
    return made


def weights_of(rank):
    return [each.clone() for each in rank.kept_tensors]


@pytest.mark.parametrize("name", PLANS)
def test_replayed_steps_are_the_eager_ones_bit_for_bit(name):
    device = RecordingDevice()
    rank, eager = interpreter(PLANS[name], device), interpreter(PLANS[name], Device(kind="cpu"))
    compiled = CompiledStep(rank)
    fed = batches(7)
    losses = [compiled.step(batch, schedule(step)) for step, batch in enumerate(fed)]
    expected = [eager.step(batch, schedule(step)) for step, batch in enumerate(fed)]
    assert device.log.count("replay") == 5 and device.log.count("capture") == 1 and not compiled.fallback
    assert [loss.item() for loss in losses] == [loss.item() for loss in expected]  # also those of steps long ago
    assert len({loss.item() for loss in losses}) == 7
    assert all(map(torch.equal, weights_of(rank), weights_of(eager)))


@pytest.mark.parametrize(("kind", "make"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)])
def test_replayed_steps_are_torchs_with_a_schedule(kind, make):
    rank = CompiledStep(interpreter(one_rank(optimizer=Optimizer(kind=kind, settings={"lr": 9.0})), RecordingDevice()))
    weights = {name: torch.tensor(array, requires_grad=True) for name, array in parameters().items()}
    optimizer = make(weights.values(), lr=9.0, foreach=False)
    for step, batch in enumerate(batches(8)):
        hidden = torch.relu(F.linear(torch.tensor(batch["x"]), weights["w1"], weights["b1"]))
        loss = F.l1_loss(F.linear(hidden, weights["w2"], weights["b2"]), torch.tensor(batch["t"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.step()
        assert rank.step(batch, schedule(step)).item() == pytest.approx(loss.item(), rel=2e-6)
    assert rank.execution == "graph"


class Dropped(nn.Module):
    """Two dropouts, one of them of attention's weights."""

    def __init__(self):
        super().__init__()
        self.wide, self.last, self.drop = nn.Linear(6, 24), nn.Linear(8, 2), nn.Dropout(0.4)

    def forward(self, x, t):
        q, k, v = self.drop(self.wide(x)).view(-1, 4, 3, 2).unbind(2)
        y = F.scaled_dot_product_attention(*(each.unsqueeze(1) for each in (q, k, v)), dropout_p=0.3)
        return F.l1_loss(self.last(y.reshape(-1, 8)), t)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_dropout_draws_anew_in_every_replayed_step(num_micro_batches):
    torch.manual_seed(0)
    module = Dropped()
    graph = capture(module, (torch.zeros(8, 6), torch.zeros(8, 2)))
    stage = Stage(mesh=Layout((1,), ("dp",)), operators=tuple(operator.name for operator in graph.operators))
    plan = Plan(graph=graph, stages=(stage,), optimizer=SGD, num_micro_batches=num_micro_batches)
    rank = Interpreter(lower(plan), 0, RecordingDevice())
    rank.set_parameters({name: each.detach().numpy() for name, each in module.named_parameters()})
    compiled = CompiledStep(rank)
    optimizer, random = torch.optim.SGD(module.parameters(), lr=0.1), PlannedRandom(graph)
    names = [tensor.name for tensor in graph.tensors.values() if tensor.kind == "input"]
    (batch,) = batches(1)  # the same in every step, so that only dropout differs
    for step in range(1, 7):
        optimizer.zero_grad()
        total = 0.0
        parts = zip(*(torch.tensor(batch[name]).chunk(num_micro_batches) for name in ("x", "t")), strict=True)
        for micro_batch, (x, t) in enumerate(parts):
            with random.forward(step, micro_batch):
                loss = module(x, t) / num_micro_batches
            loss.backward()
            total += loss.item()
        optimizer.step()
        fed = dict(zip(names, (batch["x"], batch["t"]), strict=True))
        assert compiled.step(fed).item() == pytest.approx(total, rel=5e-6)
    assert compiled.execution == "graph"


def test_the_stand_in_keeps_host_values_as_recorded():
    device, total, each = RecordingDevice(), torch.zeros(3), [1.0]
    recording = device.capture(lambda: total.add_(each[0]))
    assert total.tolist() == [0.0] * 3  # recording does nothing
    each[0] = 5.0
    recording.replay()
    assert total.tolist() == [1.0] * 3


def test_a_number_that_no_earlier_step_requested_is_not_recorded():
    counter = StepCounter(is_recording=True)
    with pytest.raises(RuntimeError, match="no earlier step drew"):
        counter.number(lambda now: now.step, (), torch.float32, torch.device("cpu"))


def test_numbers_keep_their_place_when_there_are_many():
    counter, cpu = StepCounter(), torch.device("cpu")
    counter.begin()

    def ask():
        return [counter.number(thousands, (at,), torch.float64, cpu) for at in range(150)]

    def thousands(now, at):
        return at + 1000 * now.step

    assert [float(each) for each in ask()] == [1000.0 + at for at in range(150)]
    views = ask()
    counter.begin()
    assert [float(each) for each in views] == [2000.0 + at for at in range(150)]


# -- falling back ------------------------------------------------------------------------------------------------------


def that_asks_the_host(rank, which):
    """The codes of a rank, some of which read a value on the host behind what they do."""

    def asks(code):
        def run():
            code.run()
            rank.kept_tensors[0].nonzero()

        return replace(code, run=run)

    rank.codes = tuple(asks(code) if which(code) else code for code in rank.codes)
    return [code for code in rank.codes if which(code)]


@pytest.mark.parametrize("name", ["sgd", "momentum, two micro-batches", "adamw, recompute"])
@pytest.mark.parametrize("call", ["linear.forward", "linear.grad1", "update"])
def test_unrecordable_instructions_run_between_recordings(name, call, capsys):
    """Every one of these instructions is as it was: forwards, gradients that are accumulated, updates in place."""
    device = RecordingDevice()
    rank, eager = interpreter(PLANS[name], device), interpreter(PLANS[name], Device(kind="cpu"))
    asking = that_asks_the_host(rank, lambda code: call in code.instruction.call)
    assert asking
    compiled = CompiledStep(rank)
    losses = [compiled.step(batch).item() for batch in batches(6)]
    assert losses == [eager.step(batch).item() for batch in batches(6)]
    assert all(map(torch.equal, weights_of(rank), weights_of(eager)))
    (line,) = capsys.readouterr().out.splitlines()
    if len(asking) > 8:  # then the whole step is
        assert compiled.execution == "eager" and line.startswith("steps run eagerly on rank 0:")
        return
    assert compiled.execution == "graph" and device.log.count("replay") == 4 * (len(asking) + 1)
    assert line.startswith(f"rank 0 issues {len(asking)} of {len(rank.codes)} instructions itself: ")
    assert all(code.id in compiled.fallback for code in asking) and "not permitted" in compiled.fallback
    compiled.record(batches(1)[0])
    assert not compiled.times_replays  # it ran eagerly


def test_out_of_memory_while_recording_falls_back_and_gives_the_memory_back(capsys):
    device = RecordingDevice(fails=[torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")])
    compiled = CompiledStep(interpreter(PLANS["sgd"], device))
    losses = [compiled.step(batch).item() for batch in batches(5)]
    assert losses == trained(5)[0]
    assert compiled.fallback.startswith("CUDA out of memory. Tried to allocate 2 GiB")
    assert "release memory" in device.log and "replay" not in device.log
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_out_of_memory_in_a_recorded_instruction_names_it_and_is_not_left_to_the_host(capsys):
    device = RecordingDevice()
    rank = interpreter(PLANS["sgd"], device)
    full = next(code for code in rank.codes if code.instruction.call == "linear.grad1")

    def run():
        if rank.counter.is_recording:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        full.run()

    rank.codes = tuple(replace(code, run=run) if code is full else code for code in rank.codes)
    compiled = CompiledStep(rank)
    losses = [compiled.step(batch).item() for batch in batches(5)]
    assert losses == trained(5)[0]
    assert compiled.execution == "eager" and device.log.count("replay") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "out of memory" in line and f"instruction {full.id} (linear.grad1)" in line


def test_where_one_rank_cannot_record_all_run_eagerly(capsys):
    device, votes = RecordingDevice(), []
    compiled = CompiledStep(interpreter(PLANS["sgd"], device), lambda mine: bool(votes.append(mine)))
    losses = [compiled.step(batch).item() for batch in batches(5)]
    assert losses == trained(5)[0] and votes == [True, True]  # recorded; would leave what fails to the host
    assert "release" in device.log and "replay" not in device.log
    assert "another rank cannot record" in capsys.readouterr().out


def test_where_another_rank_leaves_an_instruction_to_the_host_no_rank_times_replays():
    """Otherwise only some of the ranks would make, and vote on, the recording that is timed."""
    votes = []

    def agree(mine):
        votes.append(mine)
        return len(votes) == 1  # all have recorded; one has left an instruction to its host

    compiled = CompiledStep(interpreter(PLANS["sgd"], RecordingDevice()), agree)
    losses = [compiled.step(batch).item() for batch in batches(4)]
    assert votes == [True, True] and compiled.execution == "graph" and compiled.fallback == ""
    losses.append(compiled.record(batches(5)[4])[0].item())
    assert votes == [True, True] and not compiled.times_replays
    assert losses == trained(5)[0]


# -- addresses, order --------------------------------------------------------------------------------------------------


def test_parameters_that_are_set_anew_begin_anew():
    device = RecordingDevice()
    rank = interpreter(PLANS["adamw, recompute"], device)
    compiled = CompiledStep(rank)
    first = [compiled.step(batch).item() for batch in batches(5)]
    rank.set_parameters(parameters())
    assert [compiled.step(batch).item() for batch in batches(5)] == first
    assert device.log.count("capture") == 2 and device.log.count("release") == 1


def test_a_weight_at_another_address_is_noticed_before_the_next_replay():
    device = RecordingDevice()
    rank = interpreter(PLANS["sgd"], device)
    compiled = CompiledStep(rank)
    losses = [compiled.step(batch).item() for batch in batches(4)]
    rank._env[0] = rank._env[0].clone()
    losses += [compiled.step(batch).item() for batch in batches(6)[4:]]
    assert losses == trained(6)[0]
    assert device.log.count("capture") == 2


def test_recomputed_values_return_to_their_address():
    device = RecordingDevice()
    rank = interpreter(PLANS["sgd"], device)
    at = next(number for number, code in enumerate(rank.codes) if code.instruction.call == "sgd.update")
    code = rank.codes[at]

    def elsewhere(run=code.run):
        run()
        for slot in code.writes:
            rank._env[slot] = rank._env[slot].clone()

    rank.codes = (*rank.codes[:at], replace(code, run=elsewhere), *rank.codes[at + 1 :])
    compiled = CompiledStep(rank)
    assert [compiled.step(batch).item() for batch in batches(6)] == trained(6)[0]
    assert compiled.execution == "graph"


def test_a_batch_of_another_shape_is_refused_also_between_replays():
    compiled = CompiledStep(interpreter(PLANS["sgd"], RecordingDevice()))
    for batch in batches(4):
        compiled.step(batch)
    with pytest.raises(TwofoldError, match="'x' was fed as"):
        compiled.step({name: array[:4] for name, array in batches(1)[0].items()})


def test_a_recorded_step_times_the_replay_in_the_memory_of_the_first_recording():
    device = RecordingDevice()
    rank = interpreter(PLANS["sgd"], device)
    compiled = CompiledStep(rank)
    losses = [compiled.step(batch).item() for batch in batches(3)]
    pairs = [compiled.record(batch) for batch in batches(6)[3:]]
    assert losses + [loss.item() for loss, _ in pairs] == trained(6)[0]
    assert device.log.count("capture in the same memory") == 1 and compiled.times_replays
    spans = spans_of(rank.codes, [recorded for _, recorded in pairs])
    compute = [code.id for code in rank.codes]
    names = [spans.names[each][0] for each in spans.name_index]
    assert [name for name in names if name in compute] == names and len(names) == 3 * len(compute)
    assert (spans.start_ns[1:] >= spans.end_ns[:-1]).all()


def test_a_run_replays_and_frees_the_recording_before_it_ends():
    device, seen = RecordingDevice(), []
    plan = PLANS["sgd"]
    result = run_rank(
        lower(plan), plan, batches(8), parameters(), 8, device=device,
        options=RunOptions(record_steps=2, on_step=lambda step, loss: seen.append((step, loss)),
                           learning_rate=lambda step: 0.1),
    )  # fmt: skip
    losses, weights = trained(8)
    assert result.losses.tolist() == losses
    assert seen == list(enumerate(losses))
    assert (result.execution, result.fallback, result.spans_from) == ("graph", "", "replay")
    assert (np.diff(result.step_end_ns) > 0).all() and (result.step_s > 0).all()
    for name, weight in weights.items():
        np.testing.assert_array_equal(result.weights[name], weight)
    assert device.log[0] == "own stream"
    last = len(device.log) - 1 - device.log[::-1].index("release")
    assert "replay" not in device.log[last:]


def test_no_checkpoint_is_written_of_a_replayed_step_that_diverges(tmp_path):
    """Its loss is read when the next step has begun."""
    plan, fed = PLANS["sgd"], batches(8)
    fed[5] = {name: np.full_like(array, np.nan) for name, array in fed[5].items()}
    options = RunOptions(checkpoints=Checkpoints(folder=tmp_path, every=2, keep=9))
    with pytest.raises(TrainingStopped, match="the loss of step 6 is nan"):
        run_rank(lower(plan), plan, fed, parameters(), 8, device=RecordingDevice(), options=options)
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()
    assert [path.name for path in written_checkpoints(tmp_path)] == ["step-00000002", "step-00000004"]


def test_an_eager_plan_is_not_recorded():
    device, plan = RecordingDevice(), one_rank(execution="eager")
    result = run_rank(lower(plan), plan, batches(5), parameters(), 5, device=device)
    assert result.losses.tolist() == trained(5)[0]
    assert result.execution == "eager" and "capture" not in device.log


def test_an_unknown_execution_is_refused_with_the_way_out():
    with pytest.raises(TwofoldError, match=r"execution 'fast' is not known: graph .* or eager"):
        one_rank(execution="fast")


# -- with communication ------------------------------------------------------------------------------------------------


def recorded_on_ranks(rank, folder):
    for name, plan in four_ranks().items():
        device, feed = RecordingDevice(), rows_of_rank(plan, rank, batches(6))
        result = run_rank(
            lower(plan), plan, feed, parameters(), 6, device=device, weights_path=folder / f"{name}.npz",
            options=RunOptions(record_steps=1),
        )  # fmt: skip
        assert (result.execution, result.spans_from, result.differences) == ("graph", "replay", ()), result.fallback
        assert device.log.count("replay") == 4
        np.save(folder / f"{name}.{rank}.npy", result.losses)


def assert_plain_training(folder, name, plan):
    """The losses and weights that ranks saved are those of one rank."""
    losses, weights = trained(6, plan.optimizer.kind, plan.optimizer.settings["lr"])
    np.testing.assert_allclose(np.load(folder / f"{name}.0.npy"), losses, rtol=2e-6)
    with np.load(folder / f"{name}.npz") as file:
        for parameter, weight in weights.items():
            np.testing.assert_allclose(file[parameter], weight, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks
def test_replayed_steps_with_communication_are_plain_training(tmp_path):
    run_on_ranks(recorded_on_ranks, 4, tmp_path)
    for name, plan in four_ranks().items():
        assert_plain_training(tmp_path, name, plan)


class Asking(Interpreter):
    """It cannot record the gradient of a weight. (All ranks: gloo, unlike a GPU, communicates while it is recorded.)"""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        first = next(code for code in self.codes if code.instruction.call == "linear.grad1")
        that_asks_the_host(self, lambda code: code.id == first.id)


def data_parallel_plans():
    return {name: four_ranks()[name] for name in ("data parallel", "data parallel, level 0", "own rows")}


def recorded_in_pieces_on_ranks(rank, folder):
    run_module.Interpreter = Asking
    for name, plan in data_parallel_plans().items():
        device, feed = RecordingDevice(), rows_of_rank(plan, rank, batches(6))
        result = run_rank(
            lower(plan), plan, feed, parameters(), 6, device=device, weights_path=folder / f"{name}.npz",
            options=RunOptions(record_steps=0),
        )  # fmt: skip
        assert result.execution == "graph" and "not permitted" in result.fallback
        assert device.log.count("replay") == 8
        assert result.differences == (), (name, result.differences)
        np.save(folder / f"{name}.{rank}.npy", result.losses)


@pytest.mark.ranks
def test_ranks_that_leave_an_instruction_to_the_host_train_as_one(tmp_path):
    run_on_ranks(recorded_in_pieces_on_ranks, 4, tmp_path)
    for name, plan in data_parallel_plans().items():
        assert_plain_training(tmp_path, name, plan)


# -- on two streams ----------------------------------------------------------------------------------------------------


class TwoStreams(RecordingDevice):
    """The same with several streams in name, which run one after the other."""

    @property
    def has_streams(self):
        return True

    def stream(self):
        return "side"

    def current_stream(self):
        return "main"

    def set_stream(self, stream):
        assert stream is not None


def test_slices_on_two_streams_are_replayed_as_they_run_eagerly_and_timed_by_stream():
    plan = one_rank(optimizer=ADAMW, num_micro_batches=2, interleave=2)
    rank, eager = interpreter(plan, TwoStreams()), interpreter(plan, Device(kind="cpu"))
    compiled, fed = CompiledStep(rank), batches(6)
    assert rank.stream_order.count == 2 and eager.stream_order is None
    losses = [compiled.step(batch).item() for batch in fed[:4]]
    recorded = [compiled.record(batch) for batch in fed[4:]]
    losses += [loss.item() for loss, _ in recorded]
    assert compiled.execution == "graph" and compiled.times_replays
    assert losses == [eager.step(batch).item() for batch in fed]
    assert all(map(torch.equal, weights_of(rank), weights_of(eager)))
    for _, step in recorded:
        ends = {}
        for (begin, end), stream in zip(step.device_ns, rank.stream_order.streams, strict=True):
            assert step.start_ns <= ends.get(stream, begin) <= begin <= end
            ends[stream] = end


def test_where_an_instruction_on_two_streams_cannot_be_recorded_the_whole_step_runs_eagerly(capsys):
    rank = interpreter(one_rank(optimizer=SGD, interleave=2), TwoStreams())
    at = max(number for number, stream in enumerate(rank.stream_order.streams) if stream == 1)
    code = rank.codes[at]

    def reads(run=code.run):
        run()
        rank.kept_tensors[0].nonzero()

    rank.codes = (*rank.codes[:at], replace(code, run=reads), *rank.codes[at + 1 :])
    compiled = CompiledStep(rank)
    assert [compiled.step(batch).item() for batch in batches(4)] == pytest.approx(trained(4)[0], rel=2e-6)
    assert compiled.execution == "eager" and code.id in compiled.fallback
    assert "steps run eagerly on rank 0" in capsys.readouterr().out


DIES_IN_A_REPLAY = """
import os, signal
from tests.support.recording_device import RecordingDevice, TapeRecording
from tests.support.small_training import batches, four_ranks, parameters
from executor.data.batches import rows_of_rank
from executor.train.run import run_rank
from plans.lower import lower

replay, count = TapeRecording.replay, 0

def until_the_third(recording):
    global count
    count += 1
    if count == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return replay(recording)

TapeRecording.replay = until_the_third
plan = four_ranks()["data parallel"]
feed = rows_of_rank(plan, int(os.environ["RANK"]), batches(8))
run_rank(lower(plan), plan, feed, parameters(), 8, device=RecordingDevice())
"""


@pytest.mark.ranks
def test_a_rank_that_dies_in_a_replay_ends_the_run_with_its_name(tmp_path):
    """The other ranks are inside the same replay and wait for it there."""
    script = tmp_path / "train.py"
    script.write_text(DIES_IN_A_REPLAY)
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
        launch(script, num_ranks=4, log_dir=tmp_path / "log", env={"PYTHONPATH": str(ROOT)}, timeout_s=60)
