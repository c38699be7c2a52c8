"""The suite in random orders: `python -m benchmarks.random_order --seeds 1 2 --jobs 2 --out FILE`.

Each seed gives an order of the files, an order of the tests of each file, and the hash seed of Python. Every test must
have the same outcome in all of them; the command ends with 1 where one differs or fails. The file keeps the outcomes of
each seed, so that seeds may also be run one by one. Arguments behind `--` go to pytest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import FOLDER
from benchmarks.kept import keep

__all__ = ["main"]

BAD = ("failure", "error", "skipped")
_ROOT = FOLDER.parent


def main(arguments: list[str] | None = None) -> int:
    """Run, keep and compare; 1 if an outcome is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="workers")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; seeds that it has are compared, too")
    parser.add_argument("pytest", nargs="*", help="files and options of pytest, behind --")
    options = parser.parse_args(arguments)
    for seed in options.seeds:
        found = _summary(_outcomes(seed, options.jobs, options.pytest))
        print(f"seed {seed}: {found['tests']} tests, {len(found['not_passed'])} not passed {found['not_passed'][:20]}")
        keep(options.out, f"seed {seed}", found)
    kept = json.loads(options.out.read_text())
    are_equal = len({each["outcomes"] for each in kept.values()}) == 1
    print(f"{len(kept)} orders: {'equal' if are_equal else 'DIFFERENT'}")
    return 0 if are_equal and not any(each["not_passed"] for each in kept.values()) else 1


def _outcomes(seed: int, jobs: int, more: Sequence[str]) -> dict[str, str]:
    """The outcome of every test, by its name."""
    with tempfile.TemporaryDirectory(prefix="twofold-order-") as folder:
        report = Path(folder) / "report.xml"
        words = [
            "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-n", str(jobs), "--dist", "loadfile",
            "--no-loadscope-reorder", "--shuffle", str(seed), f"--junitxml={report}", *more,
        ]  # fmt: skip
        start = time.monotonic()
        subprocess.run([sys.executable, *words], cwd=_ROOT, env=os.environ | {"PYTHONHASHSEED": str(seed)}, check=False)
        print(f"seed {seed}: {time.monotonic() - start:.0f} s")
        return {
            f"{case.get('classname')}.{case.get('name')}": next(
                (each.tag for each in case if each.tag in BAD), "passed"
            )
            for case in ElementTree.parse(report).iter("testcase")
        }


def _summary(outcomes: Mapping[str, str]) -> dict[str, Any]:
    """The number of tests, those that did not pass, and a hash of all outcomes."""
    lines = "\n".join(f"{name} {outcomes[name]}" for name in sorted(outcomes))
    return {
        "tests": len(outcomes), "outcomes": hashlib.blake2b(lines.encode(), digest_size=16).hexdigest(),
        "not_passed": sorted(name for name, outcome in outcomes.items() if outcome != "passed"),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
