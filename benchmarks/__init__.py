"""Longer proofs and measurements. Most modules are commands: `python -m benchmarks.accuracy`."""

from pathlib import Path

FOLDER = Path(__file__).parent
