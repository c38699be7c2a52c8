"""Greedy halving by element counts: the rule is what was seen live, and our search beats it where it is known to fail.

Short forms of the cases of benchmarks/search/weaknesses.py, on smaller questions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.search import weaknesses as cases
from benchmarks.search.halving import halving, strategies_of
from costmodels import Machine
from plans.errors import TwofoldError
from plans.model.mlp import mlp_graph
from plans.model.transformer import TransformerConfig, transformer
from search import search
from search.devices import Pins, Problem, solve
from search.devices.branch import Branching

SMALL = TransformerConfig(
    name="small", num_layers=6, hidden=1536, num_heads=12, ffn=6144, vocab=12_288, seq=1024
)  # fmt: skip

HEADS = TransformerConfig(
    name="heads", num_layers=2, hidden=4096, num_heads=32, ffn=16_384, vocab=32_000, seq=2048
)  # fmt: skip


def asked(
    devices: int = 8, batch: int = 16, config: TransformerConfig = SMALL, machine: str = "h100-sxm-x16"
) -> Problem:
    return Problem(config=config, machine=Machine.load(machine), num_devices=devices, global_batch=batch)


@pytest.mark.parametrize(
    ("sizes", "batch", "seen"),
    [
        ((4096, 4096, 4096, 4096), 16, [(4, 1, 2), (2, 4, 1), (2, 1, 4)]),
        ((65_536, 64), 64, [(8, 1, 1)]),
        ((4095, 4097, 4099, 333), 30, [(2, 1, 1)] * 3),
        ((131_072, 131_072, 131_072), 4096, [(8, 1, 1)] * 2),
    ],
)
def test_the_rule_chooses_what_the_reference_was_seen_to_choose(
    sizes: tuple[int, ...], batch: int, seen: list[tuple[int, int, int]]
) -> None:
    """Cuts of rows, contracted and columns on 8 devices, from live runs of the reference (MindSpore 2.10.0)."""
    found = halving(mlp_graph(sizes, batch, bias=False), 8)
    assert [tuple(cuts.number(dim) for dim in "ikj") for cuts in found.values()] == seen


def test_the_rule_cuts_the_rows_of_a_transformer_on_64_devices() -> None:
    """As seen live: h 4096, s 2048, batch 8, 64 devices."""
    config = TransformerConfig(name="t", num_layers=1, hidden=4096, num_heads=32, ffn=16_384, vocab=32_000, seq=2048)
    found = halving(transformer(config, batch_size=8), 64)
    assert {cuts.number("i") for cuts in found.values()} == {64}


@pytest.mark.parametrize(("count", "message"), [(6, "power of two"), (24, "power of two"), (2048, "at most 1024")])
def test_the_rule_refuses_other_numbers_of_devices(count: int, message: str) -> None:
    with pytest.raises(TwofoldError, match=message):
        halving(mlp_graph((8, 8), 8), count)


def test_the_rules_choice_is_a_plan() -> None:
    graph = mlp_graph((64, 64, 64), 16)
    found = strategies_of(graph, halving(graph, 4), 4)
    assert found.keys() == {operator.name for operator in graph.operators}
    plan = search(graph, Machine.load("h200-x4"), pinned=found).best
    assert {name: each for name, each in found.items() if each.dims} == dict(plan.strategies)


CASES: dict[str, Callable[[], cases.Outcome]] = {
    "W1 odd widths": cases.odd_widths,
    "W1 six devices": lambda: cases.any_number(replace(SMALL, num_layers=4), "h100-sxm-x8", 6, 24, 1.1),
    "W2": lambda: cases.stages_searched(asked(devices=4, batch=2, config=replace(SMALL, num_layers=4)), (1, 2), 1.0),
    "W4": lambda: cases.bubbles(
        asked(devices=2, batch=8, config=replace(SMALL, num_layers=4), machine="h100-sxm-x8"), 2, 1.01
    ),
    "W5": lambda: cases.memory_decides(131_072),
    "W6": cases.redistributions,
    "W7": cases.skewed,
    "W8": lambda: cases.attention(asked(batch=2, config=HEADS, machine="h100-sxm-x8").changed(pins=Pins(pp=1)), 1.05),
    "W9": cases.order_of_operators,
    "W11": cases.foreign_names,
    "W12 second operand": cases.second_operand,
    "W12 second output": cases.second_output,
}


@pytest.mark.parametrize("name", CASES)
def test_a_weakness_is_beaten(name: str) -> None:
    found = CASES[name]()
    assert found.passed, f"{found.condition}: {found}"


def test_a_slower_network_changes_the_choice() -> None:
    """W3: elements stay the same, seconds do not."""
    found = cases.slower_network(
        asked(devices=16).changed(pins=Pins(cp=1, recompute="none", micro_batch=1, schedule="1f1b")), 256.0, 1.5
    )
    assert found.passed, found


def test_equal_layers_are_not_looked_at_one_by_one() -> None:
    """W10: prices are asked for pieces, of which equal layers are one."""

    def priced(num_layers: int) -> int:
        problem = asked(config=replace(SMALL, num_layers=num_layers)).changed(pins=Pins(pp=1, recompute="none"))
        branching = Branching(problem=problem)
        branching.run()
        return branching.num_forecasts + branching.num_opened

    assert priced(24) <= 1.5 * priced(6)
    assert solve(asked().changed(pins=Pins(pp=1, recompute="none"))).complete
