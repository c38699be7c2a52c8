"""How long a large table takes: `python -m benchmarks.accuracy.validate_rows [--rows 100000] [--configurations 5000]`.

The rows are of models, devices, software, degrees and batches as people publish them, drawn at random: that many
configurations, several rows of each with values and separate metrics, some with cells left open. Seconds are
processor time of one process, with the reading of the table.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from interop.measurements.columns import COLUMNS
from interop.measurements.validation import validate

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3-70b", "GPT-3 6.7B", "GPT-3 13B",
          "GPT-3 175B", "OPT-30b", "MPT-7B", "Qwen2-7b", "Mixtral-8x7B")  # fmt: skip
DEVICES = ("A100 40GB", "A100 80GB", "H100 SXM", "H200", "GH200", "B200", "Ascend 910B3", "V100 32GB")
SOFTWARE = ("Megatron-LM", "Megatron-DeepSpeed 2023", "DeepSpeed ZeRO-3", "NeMo 24.05", "PyTorch FSDP2, 2024",
            "torchtitan", "llm-foundry", "MindSpeed")  # fmt: skip
FIGURES = {"iteration_time_s": 10.0, "mfu_percent": 40.0, "tflops_per_gpu": 200.0, "tokens_per_s_per_gpu": 3000.0}
OPEN = ("recompute", "zero_level", "sequence_parallel", "precision", "micro_batch")


def main() -> None:
    """Print rows, seconds and the most memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--configurations", type=int, default=5_000, help="drawn; several rows are of each")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--save", help="a JSON file for the figures")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(drawn(rng, options.rows, options.configurations))
        begun = time.process_time()
        found = validate(path, on_progress=print)
        seconds = time.process_time() - begun
    most_MiB = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{options.rows:,} rows of {options.configurations:,} configurations, {len(found.rows):,} predicted, "
        f"{len(found.skipped):,} skipped: {seconds:.1f} s of processor time, {most_MiB:.0f} MiB"
    )
    if options.save:
        figures = {"rows": options.rows, "configurations": options.configurations, "predicted": len(found.rows),
                   "cpu_s": round(seconds, 1), "most_MiB": round(most_MiB)}  # fmt: skip
        Path(options.save).write_text(json.dumps(figures, indent=1) + "\n")


def drawn(rng: random.Random, rows: int, configurations: int) -> Iterator[dict[str, str]]:
    """`rows` rows, drawn from `configurations` configurations."""
    known = [_configuration(rng) for _ in range(configurations)]
    for _ in range(rows):
        metric = rng.choice(list(FIGURES))
        value = FIGURES[metric] * rng.uniform(0.5, 1.5)
        yield {**rng.choice(known), "metric": metric, "value": f"{value:.8g}"}


def _configuration(rng: random.Random) -> dict[str, str]:
    tp, pp = rng.choice((1, 1, 2, 4, 8)), rng.choice((1, 1, 2, 4, 8))
    dp, micro = rng.choice((1, 2, 4, 8, 16, 32)), rng.choice((1, 2, 4))
    row = {
        "source": rng.choice(SOFTWARE), "model": rng.choice(MODELS), "gpu_type": rng.choice(DEVICES),
        "seq": rng.choice(("2048", "4096", "8192")), "tp": str(tp), "pp": str(pp), "dp": str(dp),
        "gpu_count": str(tp * pp * dp), "micro_batch": str(micro),
        "global_batch": str(micro * dp * rng.choice((1, 2, 4, 8)) * (pp if pp > 1 else 1)),
        "recompute": rng.choice(("none", "selective", "full")), "zero_level": rng.choice(("0", "1", "2", "3")),
        "precision": rng.choice(("bf16", "fp16")), "sequence_parallel": rng.choice(("y", "n")),
    }  # fmt: skip
    if rng.random() < 0.3:
        row[rng.choice(OPEN)] = ""
    return row


if __name__ == "__main__":
    main()
