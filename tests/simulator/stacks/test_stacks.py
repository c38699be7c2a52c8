"""Every stack: what it holds grows with the layers, and modes that it does not have are refused."""

from __future__ import annotations

import re
import statistics
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels import Machine
from costmodels.price.torch_hosts import HOSTS_US, QUIET, UPDATE_HOST_S
from plans.degrees import Degrees
from plans.errors import TwofoldError
from plans.model.transformer import transformer_config
from plans.optimizer import Optimizer
from search.devices import Pins, Problem
from search.devices.space import recomputes
from simulator.forecast import forecast, forecast_grid
from simulator.stacks import Stack, stack_named, stack_names
from simulator.stacks.dtensor_steps import SPLIT_PASSES
from simulator.stacks.steps import Kernel, Message

CONFIG = transformer_config("llama-3-8b", seq=8192)
MACHINE = Machine.load("b200-x16")
KINDS = [
    name for name in stack_names()
    if not stack_named(name).products or name in ("megatron-float8", "megatron-nvfp4", "torch-compile-mxfp8")
]  # fmt: skip
"""Of narrow products a few: a recipe is not a kind of software."""
OPTIMIZER = Optimizer(kind="adamw", settings={"lr": 1e-4}, gradient_dtype="float32", master_dtype="float32")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_more_layers_take_more_of_every_role(name, split):
    stack = stack_named(name)
    for mode in stack.recompute_modes:
        degrees = [
            Degrees(
                tp=tp, micro_batch=size, global_batch=size, sequence_parallel=split, recompute=mode, optimizer=OPTIMIZER
            )
            for tp in (2, 8) for size in (1, 4)
        ]  # fmt: skip
        few, many = (
            forecast_grid(replace(CONFIG, num_layers=count), degrees, MACHINE, stack=stack) for count in (16, 32)
        )
        for one, other in zip(few, many, strict=True):
            assert other.peak_bytes > one.peak_bytes
            roles = one.memory.keys()
            if stack.runs_programs:  # what a program holds at its peak may be the update's rather than the backward's
                roles &= {"weight", "optimizer"}
            else:
                assert other.memory["activation"] > one.memory["activation"] > 0, mode
            assert all(other.memory[role] >= one.memory[role] >= 0 for role in roles), mode


def test_megatron_recomputes_norms_and_activation_functions():
    """Of each block that is two outputs of norms and the input of the last product, 2 h + f elements a token."""
    config = transformer_config("llama-3-8b", seq=4096)
    degrees = Degrees(global_batch=2)
    none, less = (
        forecast(config, replace(degrees, recompute=mode), Machine.load("h200-x1"), stack=stack_named("megatron"))
        for mode in ("none", "memory_bound")
    )
    saved = none.memory["activation"] - less.memory["activation"]
    assert saved == pytest.approx(config.num_layers * 4096 * 2 * (2 * config.hidden + config.ffn), rel=0.04)
    assert 1 < less.step_s / none.step_s < 1.05
    with pytest.raises(TwofoldError, match="give recompute none, selective or full"):
        forecast(config, replace(degrees, recompute="memory_bound"), Machine.load("h200-x1"),
                 stack=stack_named("megatron-2022"))  # fmt: skip


def test_megatron_does_not_recompute_by_operator():
    stack = stack_named("megatron")
    degrees = Degrees(tp=8, global_batch=1, sequence_parallel=True, recompute="selective_op")
    refused = "megatron does not recompute 'selective_op'; give recompute none, memory_bound, selective or full"
    with pytest.raises(TwofoldError, match=refused):
        forecast_grid(CONFIG, [degrees], MACHINE, stack=stack)
    problem = Problem(config=CONFIG, machine=MACHINE, num_devices=16, global_batch=16, stack=stack, pins=Pins())
    assert recomputes(problem) == ("none", "memory_bound", "selective", "full")


def test_longer_sequences_are_not_faster_where_the_host_sets_the_pace():
    """Reductions that trail the last backward are long done when the host comes late."""
    degrees = Degrees(
        dp=4, tp=4, micro_batch=2, global_batch=16,
        optimizer=Optimizer(kind="adamw", settings={"lr": 1e-4}, parallel_level=1),
    )  # fmt: skip
    times = [
        forecast_grid(replace(CONFIG, seq=seq, num_layers=8), [degrees], MACHINE, stack=stack_named("torch"))[0].step_s
        for seq in (512, 1024, 2048, 4096)
    ]
    assert times == sorted(times)


def test_more_chips_in_step_are_slower_and_a_host_widens_the_interval():
    config = replace(CONFIG, num_layers=4)
    stack = stack_named("torch")
    small, large = (
        forecast_grid(config, [Degrees(dp=dp, global_batch=2 * dp)], Machine.load("h200-x64"), stack=stack)[0]
        for dp in (2, 64)
    )
    equal = forecast_grid(
        config, [Degrees(dp=64, global_batch=128)], Machine.load("h200-x64"), stack=replace(stack, chip_spread=0.0)
    )[0]
    assert small.step_s < large.step_s and equal.step_s < large.step_s < 1.05 * equal.step_s
    tiny = forecast_grid(
        replace(config, hidden=512, num_heads=8, num_kv_heads=8, ffn=1024, seq=256), [Degrees(global_batch=1)],
        Machine.load("h200-x1"), stack=stack,
    )[0]  # fmt: skip
    assert tiny.high_s / tiny.low_s > large.high_s / large.low_s


@pytest.mark.parametrize(("tp", "split"), [(1, False), (2, True)])
@pytest.mark.parametrize("name", ["torch", "torch-compile", "torchtitan"])
def test_torch_trains_in_half_precision_on_devices_without_bfloat16(name, tp, split):
    """Loss and copies along the sequence are made in what the model computes in; a V100 has no other half."""
    machine, config = Machine.load("v100-32gb-x8"), replace(CONFIG, num_layers=2, seq=2048)
    degrees = Degrees(dp=8 // tp, tp=tp, micro_batch=1, global_batch=8, sequence_parallel=split, optimizer=OPTIMIZER)
    found = forecast_grid(replace(config, dtype="float16"), [degrees], machine, stack=stack_named(name))[0]
    assert found.step_s > 0
    with pytest.raises(TwofoldError, match="bfloat16"):
        forecast_grid(replace(config, dtype="bfloat16"), [degrees], machine, stack=stack_named(name))


def test_a_host_that_nobody_named_is_quiet_and_its_interval_knows_the_slow_ones():
    config, degrees = replace(CONFIG, num_layers=4, seq=64), Degrees(global_batch=16, optimizer=OPTIMIZER)

    def found(stack):
        return forecast_grid(config, [degrees], Machine.load("h200-x1"), stack=stack)[0]

    for name in ("torch", "megatron"):
        unknown = found(stack_named(name))
        singly = [found(replace(stack_named(name), host=host)).step_s for host in HOSTS_US]
        assert min(singly) < unknown.step_s < max(singly)
        quiet = [singly[list(HOSTS_US).index(host)] for host in QUIET]
        assert min(quiet) < unknown.step_s < max(quiet) < statistics.median(singly)
        assert unknown.low_s < min(singly) and statistics.median(singly) < unknown.high_s
        assert sum(unknown.low_s < step_s < unknown.high_s for step_s in singly) >= 0.8 * len(singly)


def test_hosts_issue_more_for_sequence_parallel_blocks_and_split_backwards():
    stack, degrees = stack_named("torch"), Degrees(tp=2, pp=2, dp=2, global_batch=8, optimizer=OPTIMIZER)
    whole = {part: stack.block_host_s(degrees, part, reduces=True) for part in "FBIW"}
    split = {part: stack.block_host_s(replace(degrees, sequence_parallel=True), part, reduces=True) for part in "FBIW"}
    assert whole["I"] + whole["W"] > 2 * whole["B"] and whole["I"] < 1.5 * whole["B"] < whole["W"]
    assert all(split[part] > whole[part] for part in "FBIW")


@pytest.mark.parametrize(("name", "level"), [("megatron", 0), ("megatron", 1), ("torch", 2)])
def test_without_a_pipeline_all_idle_time_is_exposed_communication(name, level):
    """The wait for reductions behind the last backward counts; some idle time is the first host time of a step."""
    degrees = Degrees(dp=64, global_batch=64, optimizer=msgspec.structs.replace(OPTIMIZER, parallel_level=level))
    stack = replace(stack_named(name), chip_spread=0.0, step_s=0.0)
    found = forecast_grid(replace(CONFIG, num_layers=8), [degrees], Machine.load("a100-80gb-x64"), stack=stack)[0]
    idle_s = found.step_s - found.rank_s[0]["compute"]
    assert found.exposed_comm_s == pytest.approx(idle_s, rel=0.06) and idle_s > 0.01 * found.step_s
    assert found.rank_s[0]["reduce_scatter" if level else "all_reduce"] > 0


def test_what_moves_less_is_no_slower_on_many_devices():
    """Latencies of messages do not rule: FSDP2 moves whole blocks, Megatron-LM has larger buckets on more devices."""

    def seconds(name, num_devices, level):
        degrees = Degrees(
            dp=num_devices, global_batch=4 * num_devices,
            optimizer=msgspec.structs.replace(OPTIMIZER, parallel_level=level),
        )  # fmt: skip
        machine, stack = Machine.load(f"h200-x{num_devices}"), replace(stack_named(name), chip_spread=0.0)
        return forecast_grid(replace(CONFIG, num_layers=8), [degrees], machine, stack=stack)[0].step_s

    assert seconds("torch", 1024, 2) < seconds("torch", 1024, 3)
    assert seconds("megatron", 1024, 1) < 1.05 * seconds("megatron", 64, 1)


@pytest.mark.parametrize(("name", "whole"), [("torch", True), ("torchtitan", True), ("twofold", False)])
def test_stages_of_torch_pipelines_hold_whole_weights_at_level_3(name, whole):
    optimizer = msgspec.structs.replace(OPTIMIZER, parallel_level=3)
    degrees = Degrees(dp=8, pp=2, global_batch=64, optimizer=optimizer)
    stack, stage_bytes = stack_named(name), CONFIG.num_parameters // 2 * 2  # two bytes each, half of them
    alone = forecast(CONFIG, degrees, MACHINE, stack=stack)
    assert forecast_grid(CONFIG, [degrees], MACHINE, stack=stack)[0].memory == alone.memory
    if whole:
        assert alone.memory["weight"] == pytest.approx(stage_bytes, rel=1e-3)
        assert alone.memory["gradient"] == pytest.approx(2 * stage_bytes, rel=1e-3)
    else:
        assert alone.memory["weight"] < 0.5 * stage_bytes


def test_a_further_micro_batch_gathers_nothing_in_torch_pipelines():
    """With gathers and reductions once a step, one more micro-batch costs what it costs a single replica.

    The first and the last one of a step meet messages, which changes a little of what one more adds.
    """
    config, machine = replace(CONFIG, seq=512, num_layers=8), Machine.load("a100-80gb-x128")
    optimizer = msgspec.structs.replace(OPTIMIZER, parallel_level=3)

    def more_s(dp, pp):
        step_s = [
            forecast(
                config, Degrees(dp=dp, pp=pp, global_batch=dp * count, optimizer=optimizer), machine,
                stack=replace(stack_named("torchtitan-compile"), chip_spread=0.0),
            ).step_s
            for count in (8, 16)
        ]  # fmt: skip
        return step_s[1] - step_s[0]

    assert more_s(64, 2) == pytest.approx(more_s(1, 2), rel=0.02)
    assert more_s(64, 1) > 1.5 * more_s(1, 1)


def test_messages_are_as_the_stack_cuts_them():
    level = msgspec.structs.replace(OPTIMIZER, parallel_level=1)
    for members, parameters in ((8, 40_000_000), (64, 64_000_000)):
        assert stack_named("megatron").message_bytes(level, members, 4, 100) == 4 * parameters
    assert stack_named("torch").message_bytes(level, 8, 4, 100) == 0  # a whole block
    assert stack_named("torch").message_bytes(OPTIMIZER, 8, 4, 2**30) == 2**30  # no tensor is cut
    assert stack_named("torch").message_bytes(OPTIMIZER, 8, 4, 100) == OPTIMIZER.bucket_bytes == 25 * 2**20


@pytest.mark.parametrize("name", KINDS)
def test_flags_of_a_stack_match_its_methods(name: str) -> None:
    """A flag is the only thing that others ask, so it must not lag behind the method that it speaks of."""
    stack = stack_named(name)
    assert stack.rearranges == (type(stack).arranged is not Stack.arranged)
    assert stack.adds_memory == (type(stack).memory is not Stack.memory)
    assert stack.runs_programs == (type(stack) is Stack)
    assert set(stack.recomputes_some) <= set(stack.recompute_modes) - {"none"}


def test_nothing_asks_for_the_name_or_class_of_a_stack() -> None:
    names, classes = r"(stack|self)\.name\s*(==|!=|in\b|\.startswith)", r"isinstance\([^)]*(Megatron|TorchNative)"
    asked = re.compile(rf"{names}|{classes}|type\([\w.]*stack\)")
    found = [
        f"{path}:{number}: {line.strip()}"
        for room in ("search", "simulator", "twofold", "interop")
        for path in sorted(Path(room).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asked.search(line)
    ]
    assert not found, found


def test_an_older_attention_kernel_is_slower_only_where_the_figures_are_of_a_newer_one():
    stack = stack_named("torch-2024")
    step_s = {
        (name, flash_2): forecast(
            transformer_config("llama-2-7b", num_layers=2), Degrees(micro_batch=1, global_batch=1),
            Machine.load(name), stack=replace(stack, flash_2=flash_2),
        ).step_s
        for name in ("a100-80gb-x1", "h100-sxm-x1") for flash_2 in (False, True)
    }  # fmt: skip
    assert step_s["a100-80gb-x1", True] == step_s["a100-80gb-x1", False]
    assert step_s["h100-sxm-x1", True] > 1.02 * step_s["h100-sxm-x1", False]


def test_pieces_are_copied_before_a_product_and_summed_behind_one():
    stack = replace(stack_named("torchtitan-async"), loss_parallel=True)

    def product(call):
        return Kernel(call=call, shapes=((2, 64, 128), (256, 128), (2, 64, 256)), dtype="bfloat16", touched_bytes=1)

    def message(call, token):
        return Message(call=call, axes=("tp",), size_bytes=8192, item_bytes=2, token=token)

    waits = [Message(call="wait", token=token) for token in (1, 2)]
    body = [
        message("all_gather", 1), waits[0], product("linear.forward"),
        product("linear.grad0"), message("reduce_scatter", 2), waits[1],
    ]  # fmt: skip
    found = [(each.call, each.touched_bytes if isinstance(each, Kernel) else 0) for each in stack.arranged(body, 4)]
    assert found == [
        ("add.forward", 2 * 2048), ("all_gather", 0), ("linear.forward", 1), ("wait", 0),
        ("reduce_scatter", 0), ("linear.grad0", 1), ("wait", 0), ("add.forward", 5 * 2048),
    ]  # fmt: skip


class _Passes(TorchDispatchMode):
    """Counts tensors of all logits that operators read and write."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.reads, self.writes = shape, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is not torch.ops.aten.index_put_.default:  # writes one element a row
            self.reads += sum(
                isinstance(each, torch.Tensor) and each.shape == self.shape
                for each in args if func not in (torch.ops.aten.zeros_like.default, torch.ops.aten._to_copy.default)
            )  # fmt: skip
            self.writes += made.shape == self.shape
        return made


def test_the_loss_on_split_logits_makes_the_passes_of_torch(monkeypatch):
    from torch.distributed.tensor.parallel import loss

    monkeypatch.setattr(loss.funcol, "all_reduce", lambda x, **_: x)
    monkeypatch.setattr(loss._MaskPartial, "_partition_value", _all_mine)
    x, labels = torch.randn(6, 32), torch.randint(32, (6,))
    with _Passes(x.shape) as forward:
        kept = loss._log_softmax(x, 1, False, None, 0)
    with _Passes(x.shape) as backward:
        gradient = loss._nll_loss_and_log_softmax_backward(
            torch.ones(()), kept, labels, None, 1, -100, torch.tensor(6.0), x.shape, 1, None, 0
        )
    wide = x.clone().requires_grad_()
    F.cross_entropy(wide, labels).backward()
    assert torch.allclose(gradient, wide.grad, atol=1e-6)
    one_device = {"cross_entropy.forward": (1, 1), "cross_entropy.grad0": (2, 2)}
    for counted, call in ((forward, "cross_entropy.forward"), (backward, "cross_entropy.grad0")):
        more = tuple(each - one for each, one in zip((counted.reads, counted.writes), one_device[call], strict=True))
        assert more == SPLIT_PASSES[call]


def _all_mine(self, target, mesh, mesh_dim):
    self.mask_buffer.materialize_mask(torch.zeros_like(target, dtype=torch.bool))
    return target


def test_the_host_of_torchs_optimizer_takes_the_times_of_whole_and_of_sharded_parameters():
    machine, optimizer = Machine.load("h200-x8"), Optimizer(kind="adamw", settings={"lr": 1e-4})
    stack = stack_named("torch")
    whole, sharded = (
        stack.update_lines([4096] * 10, "float32", optimizer, shards, machine)[-1].dispatch_ps for shards in (1, 2)
    )
    times = UPDATE_HOST_S[stack.update]
    assert times[0] != times[1] and sharded / whole == pytest.approx(times[1] / times[0])


def test_a_compiled_block_keeps_neither_the_gate_nor_outputs_that_its_backward_does_not_read():
    """One tensor [tokens, ffn] a layer less than eager modules of a Llama, none less of a GPT, which has no gate; with
    selection by operator one tensor [tokens, hidden] a layer less."""
    machine = Machine.load("h200-x1")
    eager = replace(stack_named("torch"), holds_logits=False)
    for name, recompute, per_token in (
        ("llama-3-8b", "none", 14_336), ("gpt3-6.7b", "none", 0), ("llama-3-8b", "selective_op", 4096),
    ):  # fmt: skip
        config = transformer_config(name)
        degrees = Degrees(micro_batch=2, global_batch=2, recompute=recompute)
        memory = [
            forecast(config, degrees, machine, stack=stack).memory["activation"]
            for stack in (eager, replace(eager, compiled=True))
        ]
        assert memory[0] - memory[1] == config.num_layers * 2 * config.seq * per_token * 2


def test_the_memory_of_a_loss_that_the_caller_computes():
    """bfloat16: 2 bytes less for logits that nobody holds, and for each of 3 copies in half precision; or 4 more."""
    config = transformer_config("llama-3-8b", num_layers=1, seq=8)
    elements = 3 * 8 // 2 * config.vocab
    degrees = Degrees(micro_batch=3, cp=2, global_batch=3)
    assert stack_named("torch").unknown_bytes(config, degrees) == (8 * elements, 4 * elements)
    assert replace(stack_named("torch"), float_loss=False).unknown_bytes(config, degrees) == (0, 0)
    assert stack_named("torch-composer").unknown_bytes(config, degrees) == (0, 0)  # its kernel makes none of them
    piped = Degrees(micro_batch=3, tp=2, pp=2, global_batch=12)  # of 4 micro-batches, outputs of 3 beside one alive
    assert stack_named("torchtitan").unknown_bytes(config, piped) == (3 * 2 * 3 * 8 * config.vocab // 2, 0)


@pytest.mark.parametrize(("dtype", "each"), [("bfloat16", 2), ("float32", 4)])
def test_a_fused_loss_holds_the_logits_and_their_gradient(dtype, each):
    """A vocabulary twice as large adds both to the peak of a model of one block, beside its own parameters."""

    def activations(vocab):
        config = replace(transformer_config("llama-3-8b", num_layers=1, seq=512), vocab=vocab, dtype=dtype)
        return forecast(config, Degrees(micro_batch=8, global_batch=8), Machine.load("h100-sxm-x1"),
                        stack=stack_named("torch-composer")).memory["activation"]  # fmt: skip

    assert activations(200_000) - activations(100_000) == 2 * 8 * 512 * 100_000 * each


@pytest.mark.parametrize("is_one", [False, True])
def test_whole_logits_take_one_kernel_of_the_loss_and_all_others_keep_their_time(is_one):
    def kernel(call):
        return Kernel(call=call, shapes=((2, 64, 256),) * 2, dtype="bfloat16", touched_bytes=1, times=3.0)

    stack = replace(stack_named("torchtitan"), one_kernel_loss=is_one)
    found = stack.arranged([kernel("silu.forward"), kernel("cross_entropy.forward"), kernel("silu.grad0")], 4)
    times = {each.call: each.times for each in found if isinstance(each, Kernel) and each.call != "add.forward"}
    assert times == {"silu.forward": 3.0, "cross_entropy.forward": 1.0 if is_one else 3.0, "silu.grad0": 3.0}
