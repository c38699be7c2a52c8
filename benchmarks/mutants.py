"""Small changes of the core that tests must find: `python -m benchmarks.mutants --count 60 --seed 1 --out FILE`.

A mutant changes one operator, comparison or number of one file in a copy of this tree; then the tests of its room run
until one fails. A mutant that none of them finds survives, and its line is printed. `NAMED` are mutants that survived a
review once; `--named` runs them alone.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.kept import keep

__all__ = ["NAMED", "Mutant", "mutants_of"]

_ROOT = Path(__file__).parents[1]
_OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_TESTS = {  # of the parts of the core, the quick ones first
    "costmodels/price": "price clocks power network machine_file load price_forms search_bounds software",
    "executor/step": "executor_comm executor_interpreter streams in_place executor_run operators_ranks "
    "optimizer_parallel_ranks compiled_step",
    "executor/train": "data initial sources training_job replicas checkpoint executor_run",
    "plans/lower": "lowering lowering_alone in_place receives interleave optimizer_parallel operator_bodies fuse "
    "executor_run optimizer_parallel_ranks latent experts sharding",
    "plans/schedules": "schedules schedule_orders schedule_torch simulator_pipeline_oracle",
    "search/devices": "search_bounds scale scale_grid scale_levels scale_stacks scale_recompute",
    "search/operators": "search search_moves search_bounds search_linear search_placements search_exact search_shapes",
    "simulator/engine": "simulator_engine simulator_streams simulator_memory simulator_network simulator_overlap "
    "simulator_fluid simulator_folding simulator_check simulator_deadlock simulator_contention simulator_properties",
    "simulator/forecast": "forecast_maxplus forecast_columns forecast_blocks scale_grid degrees",
    "simulator/study": "goodput whatif study",
}
_COPIED = (
    "plans", "costmodels", "simulator", "search", "executor", "interop", "reports", "twofold", "tests", "benchmarks",
    "examples", "docs", "pyproject.toml",
)  # fmt: skip
NAMED = (
    ("costmodels/price/instruction.py", "0.75 * 2 * heads", "0.75 * 2 / heads"),
    ("costmodels/price/instruction.py", "else 2.5 if part", "else 3.5 if part"),
    ("costmodels/price/instruction.py", "(0.5 if causal else 1.0)", "(0.5 if causal else 2.0)"),
    ("simulator/study/goodput.py", "math.sqrt(part) / 3", "math.sqrt(part) / 4"),
    ("simulator/study/goodput.py", "part / 9", "part / 10"),
    ("plans/lower/slices.py", 'instruction.call == "load" or "seed" in attrs', 'instruction.call == "load"'),
    ("plans/lower/optimizer.py", "flops=2 * (1 + len(first.states))", "flops=2 * (1 - len(first.states))"),
    ("search/devices/bounds.py", "best = ended + update", "best = ended - update"),
    ("search/operators/pricing.py", "fixed_s = 2 * _counted_s", "fixed_s = 3 * _counted_s"),
    ("executor/train/data.py", "len(self.items) < self.depth", "len(self.items) <= self.depth"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: characters `begin` to `end` of a file are replaced by `text`."""

    path: str
    line: int
    begin: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        """The source with the change."""
        return source[: self.begin] + self.text + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of its text.

    >>> [each.applied("a = b + 2") for each in mutants_of("x.py", "a = b + 2")]
    ['a = b - 2', 'a = b + 3']
    """
    lines = [0]
    for text in source.encode().split(b"\n"):
        lines.append(lines[-1] + len(text) + 1)
    raw = source.encode()
    if len(raw) != len(source):
        return []  # positions are of bytes

    def at(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, kind: object) -> Iterator[Mutant]:
        before, after = _OPERATORS.get(type(kind), ("", ""))  # type: ignore[call-overload]
        begin = source.find(before, at(left)[1], at(right)[0]) if before else -1
        if begin >= 0:
            line = source.count("\n", 0, begin) + 1
            yield Mutant(path=path, line=line, begin=begin, end=begin + len(before), text=after)

    found: list[Mutant] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.BinOp(left=left, op=op, right=right) if not isinstance(left, ast.JoinedStr):
                found += between(left, right, op)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                found += between(left, right, op)
            case ast.BoolOp(op=op, values=[left, right, *_]):
                found += between(left, right, op)
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                begin, end = at(node)
                text = str(value + 1) if isinstance(value, int) else repr(value * 2 + (value == 0))
                found.append(Mutant(path=path, line=node.lineno, begin=begin, end=end, text=text))
    return sorted(found, key=lambda each: (each.begin, each.end))


def _drawn(count: int, seed: int) -> list[Mutant]:
    draw, every = random.Random(seed), []
    for room in _TESTS:
        for path in sorted((_ROOT / room).rglob("*.py")):
            every += mutants_of(str(path.relative_to(_ROOT)), path.read_text())
    return draw.sample(every, min(count, len(every)))


def _named() -> list[Mutant]:
    found = []
    for path, before, after in NAMED:
        source = (_ROOT / path).read_text()
        if source.count(before) != 1:
            raise SystemExit(f"{path} has {before!r} {source.count(before)} times; mend NAMED")
        begin = source.index(before)
        line = source.count("\n", 0, begin) + 1
        found.append(Mutant(path=path, line=line, begin=begin, end=begin + len(before), text=after))
    return found


class _Copy:
    """A copy of the tree, in which the tests of a room run.

    Args:
        tree: an empty folder.
    """

    def __init__(self, tree: Path) -> None:
        self._tree, self._changes, self._takes_s = tree, 0, dict[str, float]()
        for part in _COPIED:
            copy = shutil.copytree if (_ROOT / part).is_dir() else shutil.copy
            copy(_ROOT / part, tree / part)
        (tree / "tmp").mkdir()

    def outcome(self, mutant: Mutant) -> str:
        """ "killed", "survived", or "too slow", which is as good as killed.

        Raises:
            SystemExit: the tests of its room fail without it.
        """
        room = next(room for room in _TESTS if mutant.path.startswith(room))
        if room not in self._takes_s:
            begin_s = time.monotonic()
            if self._run(room, None) != 0:
                raise SystemExit(f"the tests of {room} fail without a mutant")
            self._takes_s[room] = time.monotonic() - begin_s
        source = (_ROOT / mutant.path).read_text()
        self._write(mutant.path, mutant.applied(source))
        try:
            return "killed" if self._run(room, 60 + 5 * self._takes_s[room]) else "survived"
        except subprocess.TimeoutExpired:
            return "too slow"
        finally:
            self._write(mutant.path, source)

    def _write(self, path: str, source: str) -> None:
        (self._tree / path).write_text(source)
        self._changes += 1
        os.utime(self._tree / path, (self._changes, self._changes))  # else a compiled file may be taken for its own

    def _run(self, room: str, limit_s: float | None) -> int:
        tests = [f"tests/test_{name}.py" for name in _TESTS[room].split()]
        env = os.environ | {"PYTHONPATH": str(self._tree), "TMPDIR": str(self._tree / "tmp"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            command, cwd=self._tree, env=env, stdout=quiet, stderr=quiet, start_new_session=True
        ) as run:
            try:
                return run.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                raise


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="drawn mutants; at most all that there are")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds; no mutant begins after it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count is {options.count}; it must be at least 1")
    begin_s, outcomes, survivors = time.monotonic(), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="twofold-mutants-") as name:
        copy = _Copy(Path(name))
        chosen = _named() if options.named else _drawn(options.count, options.seed)
        for mutant in chosen:
            if time.monotonic() - begin_s > options.until:
                break
            outcome = copy.outcome(mutant)
            outcomes[outcome] += 1
            source = (_ROOT / mutant.path).read_text()
            what = f"{mutant.path}:{mutant.line}: {source[mutant.begin : mutant.end]!r} becomes {mutant.text!r}"
            if outcome == "survived":
                survivors.append(asdict(mutant) | {"says": f"{what}: {source.splitlines()[mutant.line - 1].strip()}"})
            print(f"{outcome:9} {what}", flush=True)
    done = sum(outcomes.values())
    print(f"{done} mutants in {time.monotonic() - begin_s:.0f} s: {done - len(survivors)} killed")
    if options.out is not None:
        figures = {"mutants": done, "killed": done - len(survivors), "survivors": survivors}
        keep(options.out, "named" if options.named else "drawn", figures)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(_main())
