"""Small changes of the core that tests must find: `python -m benchmarks.mutants --count 60 --seed 1 --out FILE`.

A mutant changes one operator, comparison or number of one file in a copy of this tree; then the tests of its room run
until one fails. A mutant that none of them finds survives, and its line is printed. Rooms that need a device or another
host to be tested (kernels, calibration, launching) are not drawn from. `NAMED` are mutants that survived a review once;
`--named` runs them alone.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kept import keep
from benchmarks.mutant_trees import ROOMS, Trees

__all__ = ["NAMED", "Mutant", "mutants_of"]

_ROOT = Path(__file__).parents[1]
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
    for room in ROOMS:
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


def _main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="drawn mutants; at most all that there are")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--begin", type=int, default=0, help="drawn mutants to leave out, which an earlier run tried")
    parser.add_argument("--named", action="store_true")
    parser.add_argument("--workers", type=int, default=1, help="copies of the tree that are tried side by side")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds; no mutant begins after it")
    parser.add_argument("--stop", type=float, default=float("inf"), help="seconds; what runs then is not counted")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for name, least in (("count", 1), ("workers", 1), ("begin", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least {least}")
    begin_s = time.monotonic()
    chosen = _named() if options.named else _drawn(options.count, options.seed)[options.begin :]
    part = "named" if options.named else f"seed {options.seed}, from {options.begin}"
    found: list[dict[str, Any]] = []
    writing = threading.Lock()
    with tempfile.TemporaryDirectory(prefix="twofold-mutants-", ignore_cleanup_errors=True) as folder:
        trees = Trees(Path(folder), options.workers, begin_s + options.stop)
        trees.measure({mutant.path for mutant in chosen})
        print(f"without a mutant {len(trees.failing)} tests fail: {trees.failing}", flush=True)

        def try_one(mutant: Mutant) -> None:
            if time.monotonic() - begin_s > options.until:
                return
            source = (_ROOT / mutant.path).read_text()
            outcome, by = trees.outcome(mutant.path, mutant.applied(source))
            what = f"{mutant.path}:{mutant.line}: {source[mutant.begin : mutant.end]!r} becomes {mutant.text!r}"
            line = source.splitlines()[mutant.line - 1].strip()
            with writing:
                found.append(asdict(mutant) | {"outcome": outcome, "by": by, "says": f"{what}: {line}"})
                print(f"{time.monotonic() - begin_s:5.0f} s {outcome:10} {what} {by}", flush=True)
                if options.out is not None:
                    keep(options.out, part, _figures(found, len(chosen), trees.failing))

        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(try_one, chosen))
    figures = _figures(found, len(chosen), trees.failing)
    takes = f"{figures['tried']} of {len(chosen)} mutants in {time.monotonic() - begin_s:.0f} s"
    print(f"{takes}: {figures['killed']} killed, {len(figures['unfinished'])} unfinished")
    for package, (killed, tried) in figures["packages"].items():
        print(f"{package:10} {killed} of {tried} killed")
    for each in figures["survivors"]:
        print(f"survived: {each['says']}")
    return 1 if figures["survivors"] else 0


def _figures(found: list[dict[str, Any]], asked: int, failing: list[str]) -> dict[str, Any]:
    tried = [each for each in found if each["outcome"] != "unfinished"]
    killed = [each for each in tried if each["outcome"] != "survived"]
    packages = {}
    for name in sorted({each["path"].partition("/")[0] for each in tried}):
        counts = [sum(each["path"].startswith(name + "/") for each in group) for group in (killed, tried)]
        packages[name] = counts
    return {
        "asked": asked,
        "tried": len(tried),
        "killed": len(killed),
        "packages": packages,
        "failing_without_a_mutant": failing,
        "survivors": [each for each in tried if each["outcome"] == "survived"],
        "unfinished": [each["says"] for each in found if each["outcome"] == "unfinished"],
        "killers": {each["says"]: f"{each['outcome']} {each['by']}".strip() for each in killed},
    }


if __name__ == "__main__":
    sys.exit(_main())
