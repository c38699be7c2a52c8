"""Plan files of the peers' cases, changed in one way, to measure what the change does: `executor.calibrate.steps`.

python -m benchmarks.plan_files FOLDER 8x4096-b8-dp2-mb4 --change '{"fused": false}' --name apart
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.peers.sets import SETS, case_named
from plans.plan import plan_from_json, plan_to_json, save_plan

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Write the plans, named CASE.NAME.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    names = [case.name for table in SETS.values() for cases in table.values() for case in cases]
    parser.add_argument("cases", nargs="+", choices=names, metavar="case", help="as `benchmarks.peers` prints them")
    parser.add_argument(
        "--change", type=json.loads, default={}, help="keys of the plan's JSON with other values; nested ones merge"
    )
    parser.add_argument("--name", default="as-it-is", help="of the change")
    options = parser.parse_args(arguments)
    for name in options.cases:
        stated = json.loads(plan_to_json(case_named(name).plan()))
        for key, value in options.change.items():
            stated[key] = stated[key] | value if isinstance(value, dict) else value
        plan = plan_from_json(json.dumps(stated).encode())
        print(save_plan(plan, options.folder / f"{name}.{options.name}.json"), plan.num_ranks, "devices")
    return 0


if __name__ == "__main__":
    sys.exit(main())
