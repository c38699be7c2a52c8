"""Example command lines, used by help pages and error messages."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EXAMPLES", "example_of"]

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "demo": ("twofold demo", "twofold demo --case multiple_copy --steps 50"),
    "plan": (
        "twofold plan llama-3-8b --machine h100-sxm-x64 --global-batch 256",
        "twofold plan llama-3-70b --machine h200-x64 --global-batch 512 --tp 8 --report search.html",
        "twofold plan my_model.py:build --machine h200-x8 --explain",
    ),
    "simulate": (
        "twofold simulate plan.json --machine h200-x8 --report step.html",
        "twofold simulate plan.degrees.json --machine h100-sxm-x64 --recost",
    ),
    "whatif": (
        "twofold whatif plan.json --machine h200-x8 --bandwidth 0.5 2",
        "twofold whatif plan.degrees.json --machine h100-sxm-x1024 --slow 1/1000=1.1 --sensitivity",
    ),
    "study": ("twofold study links.toml", "twofold study links.toml --jobs 2 --csv points.csv", "twofold study --axes"),
    "run": ("twofold run plan.json --steps 20", "twofold run train.py --devices 8"),
    "train": ("twofold train job.toml", "twofold train job.toml --resume --max-restarts 3"),
    "export": ("twofold export runs/gpt/checkpoints/step-00000100 model.safetensors",),
    "verify": ("twofold verify plan.json --model my_model.py:build --machine machine.json",),
    "calibrate": ("twofold calibrate --devices 8 --out machine.json", "twofold calibrate --quick --report fit.html"),
    "predict": (
        "twofold predict llama-3-70b --machine h100-sxm-x64 --tp 8 --pp 8 --global-batch 64",
        "twofold predict llama-3-8b --machine h200-x8 --dp 8 --zero 3 --stack torchtitan-compile",
    ),
    "validate": ("twofold validate measurements.csv --report errors.html",),
    "compare": ("twofold compare plan.json plan_2.json --machine h200-x8 --report both.html",),
    "links": (
        "twofold links nccl_logs --machine h100-sxm-x16",
        "twofold links all_reduce_perf.txt --machine h200-x8 --json",
    ),
    "serve": ("twofold serve reports", "twofold serve reports --port 0 --no-open"),
}
"""Command -> its command lines."""


def example_of(command: str, option: str) -> str:
    """The value of an option in the examples of its command, or of the positional argument; "" if there is none.

    Args:
        command: its name.
        option: such as --machine, or "" for the word.

    >>> example_of("whatif", ""), example_of("whatif", "--machine"), example_of("whatif", "--seed")
    ('plan.json', 'h200-x8', '')
    """
    for example in EXAMPLES[command]:
        words = example.split()
        if option in words[2:-1]:
            return words[words.index(option) + 1]
        if not option and not words[2].startswith("-"):
            return words[2]
    return ""
