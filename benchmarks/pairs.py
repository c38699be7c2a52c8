"""What running the pairs of DualPipe-V at once brings, by the engine: `python -m benchmarks.pairs`.

A transformer of 8 layers (hidden 4096, 4096 tokens, 16 micro-batches) on H100 nodes, with the two actions of a pair one
after the other and at once; also with nothing to dispatch, which shows what is left where the host is not a limit.
"""

from __future__ import annotations

import msgspec

from costmodels import Machine
from plans.model.transformer import TransformerConfig, transformer
from search import uniform_plan
from simulator import simulate

CONFIG = TransformerConfig(
    num_layers=8, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab=32000, seq=4096
)  # fmt: skip
NUM_MICRO_BATCHES = 16
CASES = ((1, 8, False), (1, 8, True), (2, 4, True), (2, 8, False), (2, 8, True), (4, 4, True), (2, 1, False))


def step_ms(machine: Machine, pp: int, tp: int, sequence_parallel: bool) -> tuple[float, float]:
    """Of one step: one after the other, and at once."""
    plan = uniform_plan(
        transformer(CONFIG, batch_size=NUM_MICRO_BATCHES), machine, pp=pp, tp=tp, virtual=2, micro_batch=1,
        schedule="dualpipe_v", sequence_parallel=sequence_parallel,
    )  # fmt: skip
    at_once = msgspec.structs.replace(plan, overlap_pairs=True)
    return simulate(plan, machine).step_s * 1e3, simulate(at_once, machine).step_s * 1e3


def main() -> None:
    """Print the table."""
    print("pp tp sequence-parallel dispatch   one by one     at once   ratio")
    for pp, tp, sequence_parallel in CASES:
        machine = Machine.load(f"h100-sxm-x{max(8, pp * tp)}")
        free = msgspec.structs.replace(machine, dispatch_s=dict.fromkeys(machine.dispatch_s, 0.0))
        for word, each in (("as is", machine), ("none", free)):
            before, after = step_ms(each, pp, tp, sequence_parallel)
            times = f"{before:9.3f} ms {after:8.3f} ms {before / after:7.3f}"
            print(f"{pp:2} {tp:2} {sequence_parallel!s:17} {word:8} {times}", flush=True)


if __name__ == "__main__":
    main()
