"""Questions that once had wrong answers: `python -m benchmarks.simulator.checks [--only NAME ...]`.

Each check prints what came out and what is expected, one line for each answer; the command ends with 1 where an answer
is not as expected. Two more are tests: an independent longest path of 420 random pipelines
(test_pipeline_oracle.py in tests/simulator/engine), and fair shares on random networks (test_fluid.py there).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

import msgspec
import simpy

from costmodels import Machine, axes_group, price_collective, price_transfer
from costmodels.machine.links import Link
from plans.degrees import Degrees
from plans.degrees.plan import plan_of
from plans.lower import lower
from plans.model.transformer import TransformerConfig, transformer, transformer_config
from plans.optimizer import Optimizer
from search.devices import Pins, Problem, solve
from search.devices.confirm import plan_of as saved_plan
from simulator import simulate
from simulator.engine.fluid import Fabric
from simulator.forecast import forecast

__all__ = ["CHECKS", "Answer"]

GB, MIB, GIB = 10**9, 2**20, 2**30
CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Answer(NamedTuple):
    """What came out, and whether it is as expected."""

    said: str
    is_right: bool


def _seconds(machine: Machine, call: str, ranks: int, size_bytes: int, stride: int = 1) -> float:
    """A collective of the machine's first ranks, next to its siblings."""
    group = axes_group(machine, [(ranks, stride)], machine.num_devices)
    return price_collective(machine, call, group, size_bytes, 2).together_ps / 1e12


def _with_links(machine: Machine, name: str, *links: Link) -> Machine:
    return msgspec.structs.replace(machine, name=name, links=links)


def _one_card(uplink_Bps: float | None) -> Machine:
    """Two nodes of 8 H100, all traffic between them over an uplink for each."""
    machine = Machine.load("h100-sxm-x16")
    node, card = machine.links
    return _with_links(machine, f"uplink-{uplink_Bps}", node, msgspec.structs.replace(card, uplink_Bps=uplink_Bps))


def uplink() -> Iterator[Answer]:
    """No price is below bytes over bandwidth; forecast, engine and folded engine agree on shared uplinks."""
    size = 256 * MIB
    for uplink_Bps in (None, 400 * GB, 100 * GB, 50 * GB, 10 * GB):
        machine = _one_card(uplink_Bps)
        for call, crossing in (("all_to_all", 8 * 8 / 16 * size), ("all_reduce", size)):
            found, least = _seconds(machine, call, 16, size), crossing / (uplink_Bps or float("inf"))
            yield Answer(f"{call} of 16 ranks, uplink {uplink_Bps}: {found * 1e3:.2f} ms, at least {least * 1e3:.2f}",
                         found >= least)  # fmt: skip
    two = Machine.load("h100-sxm-x1024")
    node, card = two.links
    leaf, spine = (msgspec.structs.replace(card, name=name, ranks=n) for name, n in (("leaf", 256), ("spine", 1024)))
    three = _with_links(two, "three", node, leaf, spine)
    for call in CALLS:
        one, other = (_seconds(machine, call, 1024, GIB) * 1e3 for machine in (two, three))
        yield Answer(f"{call} on one fabric as two tiers {one:.3f} ms, as three {other:.3f}", one == other)
    sizes = {"num_layers": 4, "hidden": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn": 14_336, "vocab": 32_000}
    config = TransformerConfig(seq=2048, dtype="bfloat16", **sizes)
    degrees = Degrees(dp=2, tp=8, micro_batch=1, global_batch=4, optimizer=_adamw(0, None))
    for uplink_Bps in (None, 50 * GB):
        machine = _one_card(uplink_Bps)
        yield _same_step(f"data parallel over an uplink of {uplink_Bps}", config, degrees, machine)


def _same_step(said: str, config: TransformerConfig, degrees: Degrees, machine: Machine) -> Answer:
    """Milliseconds of a step by forecast, engine and folded engine; the two engines are equal."""
    # a program has the eager host times of the machine, as the forecast; a plan would be replayed
    program = lower(plan_of(degrees, transformer(config, batch_size=degrees.global_batch)))
    folded, engine = (simulate(program, machine, with_memory=False, fold_ranks=fold) for fold in (True, False))
    times = [forecast(config, degrees, machine).step_s, engine.step_interval_s, folded.step_interval_s]
    is_right = abs(times[0] / times[1] - 1) <= 1e-8 and times[1] == times[2]
    return Answer(f"{said}: forecast, engine, folded {', '.join(f'{1e3 * time:.9f}' for time in times)} ms", is_right)


def _adamw(level: int, dtype: str | None = "float32") -> Optimizer:
    return Optimizer(
        kind="adamw", settings={"lr": 1e-4}, parallel_level=level, gradient_dtype=dtype, master_dtype=dtype
    )  # fmt: skip


def topo() -> Iterator[Answer]:
    """A spine of a quarter of the cards behind leaves of 256, rails, broadcast and reduce, more bytes, more ranks."""
    flat = Machine.load("h100-sxm-x1024")
    node, card = flat.links
    leaf = msgspec.structs.replace(card, name="leaf", ranks=256)
    spine = msgspec.structs.replace(card, name="spine", ranks=1024, uplink_Bps=256 * card.bandwidth_Bps / 4)
    narrow = _with_links(flat, "narrow", node, leaf, spine)
    # what leaves a leaf goes by a quarter of its cards, what leaves a node by all of its own
    by_bytes = 4 * (768 / 1024) / (1016 / 1024)
    for size in (256 * MIB, 4 * GIB):
        one, other = (_seconds(machine, "all_to_all", 1024, size) for machine in (flat, narrow))
        added = _seconds(flat, "all_to_all", 1024, 2 * size) - one  # what the bytes take, without latencies
        slower = (_seconds(narrow, "all_to_all", 1024, 2 * size) - other) / added
        least = 768 / 1024 * size / (card.bandwidth_Bps / 4)
        said = f"all_to_all of {size // MIB} MiB behind a spine of a quarter: {other * 1e3:.1f} ms, at least"
        said += f" {least * 1e3:.1f}; {other / one:.2f} times, {slower:.3f} for each byte, {by_bytes:.3f} expected"
        yield Answer(said, other >= least and abs(slower / by_bytes - 1) < 0.02)
        one, other = (_seconds(machine, "all_reduce", 1024, size) for machine in (flat, narrow))
        said = f"all_reduce of {size // MIB} MiB: {other / one:.3f} times, 1 expected: 8 of 256 cards leave a leaf"
        yield Answer(said, one == other)
    rails = msgspec.structs.replace(flat, links=(node, msgspec.structs.replace(card, rails=True)), name="rails")
    same, cross = (price_transfer(rails, 0, target, 64 * MIB).work_ps / 1e6 for target in (8, 9))
    yield Answer(f"transfer on a rail {same:.0f} us, across {cross:.0f} us", cross > same)
    for call in ("broadcast", "reduce"):
        found, least = _seconds(flat, call, 8, MIB), MIB / node.bandwidth_Bps
        yield Answer(f"{call} of 1 MiB over 8: {found * 1e6:.1f} us, at least {least * 1e6:.1f}", found >= least)
    times = [[_seconds(flat, call, ranks, 2**power, stride) for power in range(8, 33)]
             for call in CALLS for stride in (1, 8) for ranks in (2, 4, 8, 16, 32, 64, 128)]  # fmt: skip
    falls = sum(after < before for own in times for before, after in pairwise(own))
    yield Answer(f"{sum(map(len, times))} times, {falls} fall with bytes", falls == 0)
    large = Machine.load("h100-sxm-x16384")
    rings = 2047 * large.links[1].latency_s
    found = _seconds(large, "all_gather", 2048, MIB, 8)
    yield Answer(f"all_gather of 1 MiB over 2,048 nodes {found * 1e6:.0f} us; a ring waits {rings * 1e6:.0f}",
                 found < rings)  # fmt: skip


def fluid_fairness() -> Iterator[Answer]:
    """Links are shared max-min fairly and work-conserving, beside overlap too."""
    one, two = (("1", Fraction(1)),), (("2", Fraction(1)),)
    law = lambda *_: (Fraction(7, 10), Fraction(1, 2))  # noqa: E731
    four = [((4 + 2 * n, 5 + 2 * n), 1000, two) for n in range(4)]
    yield _ends("two flows on one link", [((0, 1), 1000, one), ((2, 3), 1000, one)], {0: 2000, 1: 2000})
    yield _ends("A on link 1, B on 1 and 2, four on 2", [((0, 1), 1000, one), ((2, 3), 1000, (*one, *two)), *four],
                {0: 1250, 1: 5000})  # fmt: skip
    yield _ends("a flow of 400 at half its rate beside compute", [((0,), 1000, None), ((0, 1), 400, ())],
                {0: 1240, 1: 800}, law)  # fmt: skip
    yield _ends("one at half its rate beside compute, one free, on one link",
                [((0,), 10**6, None), ((0, 1), 1000, one), ((2, 3), 1000, one)], {1: 2000, 2: 2000}, law)  # fmt: skip


Load = tuple[tuple[int, ...], int, Sequence[tuple[str, Fraction]] | None]
"""Devices, work, claims on links; None: compute."""

Law = Callable[..., tuple[Fraction, Fraction]]
"""Of overlap: rates of compute and communication next to each other."""


def _ends(said: str, loads: Sequence[Load], expected: dict[int, int], law: Law | None = None) -> Answer:
    env, ends = simpy.Environment(), dict[int, int]()
    fabric = Fabric(env, law)
    for number, (devices, work_ps, claims) in enumerate(loads):
        done = lambda number=number: ends.__setitem__(number, int(env.now))  # noqa: E731
        if claims is None:
            fabric.compute(devices[0], "kernel", work_ps, done)
        else:
            fabric.communicate(devices, "all_reduce", work_ps, done, claims)
    env.run()
    found = {number: ends[number] for number in expected}
    return Answer(f"{said}: ends {list(found.values())}, expected {list(expected.values())}", found == expected)


def proven_is_not_saved() -> Iterator[Answer]:
    """The saved plan has the layers of the configuration that was proven."""
    config = transformer_config("llama-3-8b", num_layers=6)
    pins = Pins(pp=4, schedule="1f1b", micro_batch=1, recompute="none", layers=(2, 2, 1, 1))
    problem = Problem(
        config=config, machine=Machine.load("h200-x8"), num_devices=4, global_batch=8, pins=pins
    )  # fmt: skip
    best = solve(problem).best
    stages = saved_plan(problem, best).stages
    saved = [len({name.split(".")[1] for name in stage.operators if name.startswith("layers.")}) for stage in stages]
    proven = list(best.degrees.layers_of(6))
    yield Answer(f"pinned [2, 2, 1, 1], proven {proven}, saved {saved}", saved == proven == [2, 2, 1, 1])


def same_plan_two_doors() -> Iterator[Answer]:
    """GPT-2 XL at every optimizer level: the forecast of the degrees, and the engine with the plan."""
    config, machine = transformer_config("gpt2-xl"), Machine.load("h200-x8")
    for level in range(4):
        degrees = Degrees(dp=8, global_batch=8, micro_batch=1, optimizer=_adamw(level))
        yield _two_doors(f"gpt2-xl level {level}", config, degrees, machine)


def zero3_memory() -> Iterator[Answer]:
    """The peak where weights are gathered for each use."""
    for model, layers in (("llama-3-8b", 2), ("llama-3-8b", 8), ("llama-2-7b", 4), ("gpt2-xl", 8)):
        config, machine = transformer_config(model, num_layers=layers), Machine.load("h200-x8")
        for level in (2, 3):
            degrees = Degrees(dp=8, global_batch=16, micro_batch=1, optimizer=_adamw(level))
            yield _two_doors(f"{model}, {layers} layers, level {level}", config, degrees, machine)


def _two_doors(said: str, config: TransformerConfig, degrees: Degrees, machine: Machine) -> Answer:
    """Within 1 % of the step, the peak to the byte."""
    plan = plan_of(degrees, transformer(config, batch_size=degrees.global_batch))
    timeline, found = simulate(lower(plan), machine, fold_ranks=True), forecast(config, degrees, machine)
    error, memory = found.step_s / timeline.step_interval_s - 1, found.peak_bytes / timeline.peak_bytes - 1
    return Answer(f"{said}: forecast {found.step_s * 1e3:.3f} ms ({error:+.3%}), peak {found.peak_bytes / GIB:.3f} GiB "
                  f"({memory:+.3%})", abs(error) <= 0.01 and memory == 0)  # fmt: skip


CHECKS: dict[str, Callable[[], Iterator[Answer]]] = {
    each.__name__: each
    for each in (uplink, topo, fluid_fairness, proven_is_not_saved, same_plan_two_doors, zero3_memory)
}


def main() -> None:
    """Ask, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=CHECKS, metavar="NAME", help=", ".join(CHECKS))
    wrong = 0
    for name in parser.parse_args().only:
        print(name)
        for answer in CHECKS[name]():
            wrong += not answer.is_right
            print(f"  {'right' if answer.is_right else 'WRONG'}  {answer.said}", flush=True)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
