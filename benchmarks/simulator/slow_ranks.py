"""Forecasts of slow ranks next to the event engine.

    python -m benchmarks.simulator.slow_ranks [--cases 24] [--seed 1]

Random degrees of a short Llama 3 8B on 16 H100, with one to three slow ranks anywhere. The forecast slows the pipelines
that the ranks are in (`simulator.study.stragglers`); the engine simulates every rank.
"""

from __future__ import annotations

import argparse
import random
import statistics

from costmodels import Machine, executing
from plans.degrees import Degrees, describe
from plans.model.transformer import transformer_config
from simulator.forecast.turns import program_of
from simulator.predict import outcome
from simulator.study.configured import Configured
from simulator.study.whatif import WhatIf

_SHAPES = ((2, 2, 4), (4, 2, 2), (2, 4, 2), (4, 4, 1), (2, 8, 1), (1, 4, 4), (8, 1, 2))


def _case(draw: random.Random) -> tuple[Degrees, dict[int, float]]:
    """Degrees, and slow ranks with their factors."""
    dp, tp, pp = draw.choice(_SHAPES)
    zero = draw.choice([0, 1, 2, 3]) if dp > 1 else 0
    batch = dp * draw.choice([1, 2, 4]) * pp
    schedule = draw.choice(["1f1b", "gpipe", "zb_h1"]) if pp > 1 else "1f1b"
    values = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "schedule": schedule}
    ranks = draw.sample(range(16), draw.choice([1, 1, 2, 3]))
    return Degrees.of(values, global_batch=batch), {rank: draw.choice([1.1, 1.3, 2.0]) for rank in ranks}


def main() -> None:
    """Print every case and the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    machine = executing(Machine.load("h100-sxm-x16"), "graph")
    config = transformer_config("llama-3-8b", num_layers=4, seq=2048)
    draw, errors = random.Random(options.seed), []
    for _ in range(options.cases):
        degrees, slow = _case(draw)
        what_if = WhatIf(slowdown=slow)
        found = Configured(config=config, degrees=degrees, machine=machine).outcome(what_if)
        simulated = outcome(program_of(config, degrees), machine, what_if)
        errors.append(found.step_s / simulated.step_s - 1)
        print(f"{errors[-1]:+.2%}  {what_if}; {describe(degrees)}")
    absolute = list(map(abs, errors))
    print(f"{len(errors)} cases: mean {statistics.mean(absolute):.2%}, largest {max(absolute):.2%}")


if __name__ == "__main__":
    main()
