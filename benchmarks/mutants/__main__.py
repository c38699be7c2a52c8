"""Small changes of the core that tests must find: `python -m benchmarks.mutants --count 300 --seed 1 --out FILE`.

A mutant changes one operator, comparison or number of one file. All are put into one copy of this tree, each behind a
switch (`mutant_switches`). The tests run once without a mutant, which tells how long each takes and which mutants it
reaches; then each mutant is switched on in a fork, where the tests that reach it run until one fails (`mutant_loop`). A
mutant that none of them finds survives, and its line is printed. Tests that start several processes are run with
`--ranks` only. Beside drawn mutants, those of `NAMED` are tried, which survived a review once. With `--folder` a run
that was ended goes on.

mutmut 3.8 also runs mutants in forks, but it changes neither functions with decorators nor values of modules and
classes, which hold a fifth of the 20,000 mutants here.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import FOLDER
from benchmarks.kept import keep
from benchmarks.mutants.switches import SWITCH, names_that_use, switched

__all__ = ["NAMED", "Mutant", "mutants_of"]

_ROOT = FOLDER.parent
_PARTS = (
    "plans", "costmodels", "simulator", "search", "executor", "interop", "reports", "twofold", "tests", "benchmarks",
    "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md",
)  # fmt: skip
_ROOMS = (  # those that can be tested without a device or another host: not kernels, calibration and launching
    "costmodels", "plans", "search", "simulator", "executor/capture", "executor/data", "executor/reference",
    "executor/step", "executor/train", "executor/weights",
)  # fmt: skip
_OTHERS = ("tests/reports", "tests/repository", "tests/benchmarks")
"""Tests that are not run: their subject is not the core, or they take long."""
_OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
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
    ("executor/data/prefetch.py", "len(self.items) < self.depth", "len(self.items) <= self.depth"),
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
    """All mutants of a file, in the order of its text; the sizes of caches stay, which no result depends on.

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
    tree = ast.parse(source)
    cache_sizes = {each.value for each in ast.walk(tree) if isinstance(each, ast.keyword) and each.arg == "maxsize"}
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=left, op=op, right=right) if not isinstance(left, ast.JoinedStr):
                found += between(left, right, op)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                found += between(left, right, op)
            case ast.BoolOp(op=op, values=[left, right, *_]):
                found += between(left, right, op)
            case ast.Constant(value=int() | float() as value) if (
                not isinstance(value, bool) and node not in cache_sizes
            ):
                begin, end = at(node)
                text = str(value + 1) if isinstance(value, int) else repr(value * 2 + (value == 0))
                found.append(Mutant(path=path, line=node.lineno, begin=begin, end=end, text=text))
    return sorted(found, key=lambda each: (each.begin, each.end))


def _drawn(count: int, seed: int, rooms: Sequence[str]) -> list[Mutant]:
    draw, every = random.Random(seed), []
    for room in rooms:
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


def _plant(tree: Path, mutants: Sequence[Mutant]) -> list[int]:
    """Copy this tree, with all mutants behind switches; those that act while a module is imported."""
    tree.mkdir(parents=True)
    for part in _PARTS:
        if (_ROOT / part).is_dir():
            shutil.copytree(_ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(_ROOT / part, tree / part)
    (tree / "mutant_switch.py").write_text(SWITCH)
    sources = {
        str(path.relative_to(_ROOT)): path.read_text() for room in _ROOMS for path in (_ROOT / room).rglob("*.py")
    }
    imported: dict[int, frozenset[str]] = {}
    changes: dict[str, dict[int, str]] = {}
    for number, mutant in enumerate(mutants):
        changes.setdefault(mutant.path, {})[number] = mutant.applied(sources[mutant.path])
    for path, changed in changes.items():
        for number, names in switched(sources[path], changed).imported.items():
            imported[number] = names_that_use(sources[path], names)
    for path, source in sources.items():
        reached = {number: names for number, names in imported.items() if any(name in source for name in names)}
        if path in changes or reached:
            (tree / path).write_text(switched(source, changes.get(path, {}), reached).text)
    return sorted(imported)


def _run(
    folder: Path, mutants: Sequence[Mutant], *, ranks: bool, jobs: int, budget_s: float
) -> Iterator[dict[str, Any]]:
    """Run the tests; the lines of `mutant_loop`, as they are written."""
    tree, results, scratch = folder / "tree", folder / "results.jsonl", folder / "scratch"
    if not (folder / "request.json").exists():
        shutil.rmtree(tree, ignore_errors=True)
        imported = _plant(tree, mutants)
        scratch.mkdir(exist_ok=True)
        numbered = [{"number": number, "path": mutant.path} for number, mutant in enumerate(mutants)]
        tests = ["tests", *(f"--ignore={folder}" for folder in _OTHERS)]
        tests += [] if ranks else ["-m", "not ranks and not new_interpreters"]
        request = {"mutants": numbered, "imported": imported, "folder": str(scratch), "tests": tests}
        request |= {"jobs": jobs, "budget_s": budget_s}
        (folder / "request.json").write_text(json.dumps(request))
    threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}
    env = os.environ | threads | {"PYTHONPATH": str(tree), "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "benchmarks.mutants.loop", "../request.json", "../results.jsonl"]
    read = 0
    with (folder / "log").open("ab") as log, subprocess.Popen(
        command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    ) as process:  # fmt: skip
        while True:
            is_over = process.poll() is not None
            lines = results.read_text().splitlines(keepends=True)[read:] if results.exists() else []
            complete = [line for line in lines if line.endswith("\n")]
            read += len(complete)
            yield from map(json.loads, complete)
            if is_over:
                break
            time.sleep(0.2)
    if process.returncode != 0:
        raise SystemExit(f"the tests could not be run: see {folder / 'log'}")


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="drawn mutants; at most all that there are")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rooms", nargs="+", default=_ROOMS, help="packages, or rooms of them, to draw in")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests that are run for a mutant")
    parser.add_argument("--ranks", action="store_true", help="also run tests that start several processes")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the tests and the mutants")
    parser.add_argument("--folder", type=Path, help="working folder; what was tried there already is not tried again")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.count < 1:
        parser.error(f"--count is {options.count}; it must be at least 1")
    named = _named()
    mutants = [*named, *_drawn(options.count, options.seed, options.rooms)]
    found: list[dict[str, Any]] = []
    failing: list[str] = []
    begin_s = kept_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="twofold-mutants-", ignore_cleanup_errors=True) as made:
        folder = Path(made) if options.folder is None else options.folder
        for line in _run(folder, mutants, ranks=options.ranks, jobs=options.jobs, budget_s=options.budget):
            if "mutant" not in line:
                failing += [line["test"]] if line.get("status") == "failed" else []
                continue
            mutant = mutants[line["mutant"]]
            source = (_ROOT / mutant.path).read_text()
            what = f"{mutant.path}:{mutant.line}: {source[mutant.begin : mutant.end]!r} becomes {mutant.text!r}"
            code = source.splitlines()[mutant.line - 1].strip()
            found.append(asdict(mutant) | line | {"says": f"{what}: {code}"})
            print(f"{time.monotonic() - begin_s:5.0f} s {line['outcome']:10} {what} {line['by']}", flush=True)
            if options.out is not None and time.monotonic() > kept_s + 5:
                keep(options.out, "mutants", _figures(found, len(named), failing))
                kept_s = time.monotonic()
    figures = _figures(found, len(named), failing)
    if options.out is not None:
        keep(options.out, "mutants", figures)
    print(f"{figures['named_killed']} of {len(named)} named mutants killed")
    print(f"{figures['killed']} of {figures['tried']} drawn mutants killed ({figures['share']:.1%})")
    for package, (killed, tried) in figures["packages"].items():
        print(f"{package:10} {killed} of {tried} killed")
    for each in figures["survivors"]:
        print(f"survived {each['tests']} tests, {each['left']} not run: {each['says']}")
    return 1 if figures["survivors"] else 0


def _figures(found: Sequence[Mapping[str, Any]], num_named: int, failing: list[str]) -> dict[str, Any]:
    """Counts of drawn mutants; the named ones are counted apart."""
    tried = [each for each in found if each["mutant"] >= num_named]
    killed = [each for each in tried if each["outcome"] != "survived"]
    packages = {}
    for name in sorted({each["path"].partition("/")[0] for each in tried}):
        packages[name] = [sum(each["path"].startswith(name + "/") for each in group) for group in (killed, tried)]
    return {
        "named_killed": sum(each["mutant"] < num_named and each["outcome"] != "survived" for each in found),
        "tried": len(tried),
        "killed": len(killed),
        "share": len(killed) / max(1, len(tried)),
        "packages": packages,
        "failing_without_a_mutant": failing,
        "survivors": [each for each in found if each["outcome"] == "survived"],
        "killers": {each["says"]: f"{each['outcome']} {each['by']}".strip() for each in killed},
    }


if __name__ == "__main__":
    sys.exit(_main())
