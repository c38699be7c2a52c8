#!/usr/bin/env bash
# Runs multiple_mix.py on 8 ranks of this machine; their output goes to log_output/1/rank.N/stdout.
# Usage: [EPOCHS=10] [DATA_PATH=folder with MNIST IDX files] bash examples/run_multiple_mix.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
command -v "$python" > /dev/null || python=python3
exec "$python" -m twofold run examples/multiple_mix.py --devices 8 "$@"
