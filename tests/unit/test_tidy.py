"""The rules of the house that no linter knows, held by a test in the way of TigerBeetle's tidy.

A rule is a function from a `Source` to the list of its violations, so that every rule is proven
below by a planted fault before it is trusted with the tree.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("jobs", "platform", "storage", "tests", "benchmarks")
FLOORS = ("jobs", "platform", "storage")  # imports run downward only, in this order
PACKAGE_OF = {"jobs": "relit", "platform": "relit_platform", "storage": "relit_storage"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
BANNED_NAMES = frozenset({"utils", "util", "common", "helpers", "helper", "base", "misc"})

# Where, and which top-level modules may not be imported there even inside a function.
FORBIDDEN_IMPORTS = {
    "storage/": frozenset({"ray", "torch"}),
    "platform/relit_platform/machines/": frozenset({"ray", "torch", "time"}),
    "platform/relit_platform/node/": frozenset({"torch"}),
}
# Written in pieces so that this file does not hold what it forbids.
MACHINE_PATH = re.compile("|".join("/" + name + "/" for name in ("home", "root", "work", "Users")))

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file: its path from the repository root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def floor(self) -> str:
        return self.path.split("/", 1)[0]


Rule = Callable[[Source], list[str]]


def imports_of(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, `import_module("literal")` included."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def file_length(source: Source) -> list[str]:
    count = source.text.count("\n")
    return [f"{count} lines, at most {MAX_FILE_LINES}"] if count > MAX_FILE_LINES else []


def function_length(source: Source) -> list[str]:
    found = []
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > MAX_FUNCTION_LINES:
                found.append(f"{node.lineno}: {node.name} has {count} lines")
    return found


def upward_import(source: Source) -> list[str]:
    if source.floor not in FLOORS:
        return []
    above = {PACKAGE_OF[name] for name in FLOORS[: FLOORS.index(source.floor)]}
    return [
        f"{line}: imports {name}, which is a floor above"
        for line, name in imports_of(source)
        if name.split(".")[0] in above
    ]


def forbidden_import(source: Source) -> list[str]:
    banned = {
        name
        for prefix, names in FORBIDDEN_IMPORTS.items()
        if source.path.startswith(prefix)
        for name in names
    }
    return [
        f"{line}: imports {name}, forbidden in this folder"
        for line, name in imports_of(source)
        if name.split(".")[0] in banned
    ]


def root_import(source: Source) -> list[str]:
    """`import jobs` works from the repository root and loads a second copy of every module."""
    found = []
    for line, name in imports_of(source):
        first, _, rest = name.partition(".")
        if first in ("jobs", "storage") or (first == "platform" and rest):
            found.append(f"{line}: imports {name} through the repository root")
    return found


def module_name(source: Source) -> list[str]:
    """Floors are source roots, so their own names are not modules; everything below is one."""
    names = PurePosixPath(source.path).with_suffix("").parts[1:]
    found = [f"{name!r} says nothing" for name in names if name in BANNED_NAMES]
    if source.floor in FLOORS:
        found += [f"{name!r} shadows a stdlib module" for name in names if shadows(name)]
    return found


def shadows(name: str) -> bool:
    return name in sys.stdlib_module_names and not name.startswith("__")


def stray_init(source: Source) -> list[str]:
    """platform/__init__.py shadows the stdlib: Ray workers then hang without a message."""
    path = PurePosixPath(source.path)
    if path.name != "__init__.py" or path.parts[0] not in (*FLOORS, "tests"):
        return []
    is_package = path.parts[0] in FLOORS and len(path.parts) > 2
    return [] if is_package else ["no __init__.py may be here"]


def undocumented(source: Source) -> list[str]:
    if source.floor not in FLOORS:
        return []
    found = [] if ast.get_docstring(source.tree) else ["the module has no docstring"]
    return found + list(_undocumented_in(source.tree, ""))


def _undocumented_in(parent: ast.Module | ast.ClassDef, prefix: str) -> Iterator[str]:
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name[0] == "_":
            continue
        if not ast.get_docstring(node) and not _repeats_another(node):
            yield f"{node.lineno}: {prefix}{node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented_in(node, f"{prefix}{node.name}.")


def _repeats_another(node: ast.ClassDef | Function) -> bool:
    """Overloads, setters and overrides are documented where they are first defined."""
    marks = [ast.unparse(mark).split("(")[0] for mark in node.decorator_list]
    return any(mark.split(".")[-1] in ("overload", "setter", "override") for mark in marks)


def unsafe_load(source: Source) -> list[str]:
    """Loading may run no code: ours unpickles nothing, and torch.load is for weights only.

    Tests may pickle: they check that errors survive the way between actors.
    """
    found = []
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if source.floor in FLOORS and re.fullmatch(r"(cloud)?pickle\.(loads?|Unpickler)", name):
            found.append(f"{node.lineno}: {name} runs code")
        weights = {key.arg: ast.unparse(key.value) for key in node.keywords}.get("weights_only")
        if name == "torch.load" and weights != "True":
            found.append(f"{node.lineno}: torch.load without weights_only=True runs code")
    return found


def machine_path(source: Source) -> list[str]:
    return [
        f"{number}: a path of one machine: {line.strip()[:60]}"
        for number, line in enumerate(source.text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


CODE_RULES: list[Rule] = [
    file_length,
    function_length,
    upward_import,
    forbidden_import,
    root_import,
    module_name,
    stray_init,
    undocumented,
    unsafe_load,
    machine_path,
]
LONG_FUNCTION = "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES
DOC = '"""A module."""\n'

# rule, path of the planted file, its text, what the violation must name
PLANTED: list[tuple[Rule, str, str, str]] = [
    (file_length, "jobs/relit/a.py", "\n" * (MAX_FILE_LINES + 1), "501 lines"),
    (function_length, "tests/unit/test_a.py", LONG_FUNCTION, "f has 71 lines"),
    (function_length, "tests/unit/test_a.py", "async " + LONG_FUNCTION, "f has 71 lines"),
    (upward_import, "storage/relit_storage/a.py", "import relit_platform.facts", "floor above"),
    (upward_import, "storage/relit_storage/a.py", "from relit import submit", "floor above"),
    (upward_import, "platform/relit_platform/a.py", "def f():\n  import relit", "2: imports relit"),
    (upward_import, "platform/relit_platform/a.py", "import_module('relit.x')", "relit.x"),
    (forbidden_import, "storage/relit_storage/a.py", "import torch.nn", "torch.nn"),
    (forbidden_import, "storage/relit_storage/a.py", "from ray import get", "imports ray"),
    (forbidden_import, "platform/relit_platform/machines/a.py", "import time", "imports time"),
    (forbidden_import, "platform/relit_platform/machines/a.py", "import ray", "imports ray"),
    (forbidden_import, "platform/relit_platform/node/a.py", "import torch", "imports torch"),
    (root_import, "tests/unit/test_a.py", "import jobs.relit", "jobs.relit"),
    (root_import, "jobs/relit/a.py", "from storage.relit_storage import x", "repository root"),
    (root_import, "jobs/relit/a.py", "from platform.relit_platform import x", "repository root"),
    (module_name, "jobs/relit/utils.py", "", "'utils'"),
    (module_name, "platform/relit_platform/common/a.py", "", "'common'"),
    (module_name, "tests/unit/helpers.py", "", "'helpers'"),
    (module_name, "storage/relit_storage/queue.py", "", "'queue' shadows"),
    (stray_init, "platform/__init__.py", "", "__init__"),
    (stray_init, "tests/unit/__init__.py", "", "__init__"),
    (stray_init, "tests/__init__.py", "", "__init__"),
    (undocumented, "jobs/relit/a.py", "x = 1", "module"),
    (undocumented, "jobs/relit/a.py", DOC + "def f(): pass", "2: f "),
    (undocumented, "jobs/relit/a.py", DOC + "class C:\n  x: int", "2: C "),
    (undocumented, "jobs/relit/a.py", DOC + "class C:\n  '''C.'''\n  def m(self): ...", "C.m"),
    (unsafe_load, "jobs/relit/a.py", "pickle.loads(data)", "pickle.loads"),
    (unsafe_load, "platform/relit_platform/a.py", "pickle.load(file)", "pickle.load"),
    (unsafe_load, "tests/unit/test_a.py", "torch.load(path)", "torch.load"),
    (unsafe_load, "tests/unit/test_a.py", "torch.load(p, weights_only=False)", "torch.load"),
    (machine_path, "docs/a.md", "see /" + "home/ada/x", "1: a path"),
    (machine_path, "Makefile", "x = /" + "root/.cache", "1: a path"),
]
ALLOWED: list[tuple[Rule, str, str]] = [
    (file_length, "jobs/relit/a.py", "\n" * MAX_FILE_LINES),
    (upward_import, "jobs/relit/a.py", "import relit_platform, relit_storage"),
    (forbidden_import, "platform/relit_platform/worker/a.py", "import torch, ray, time"),
    (root_import, "jobs/relit/a.py", "import platform"),
    (module_name, "platform/relit_platform/__init__.py", ""),
    (stray_init, "platform/relit_platform/__init__.py", ""),
    (undocumented, "jobs/relit/a.py", DOC + "def _f(): ..."),
    (undocumented, "tests/unit/test_a.py", "def test_f(): ..."),
    (unsafe_load, "jobs/relit/a.py", "torch.load(path, weights_only=True)"),
    (unsafe_load, "tests/unit/test_a.py", "pickle.loads(pickle.dumps(error))"),
    (machine_path, "docs/a.md", "below ~/.relit or /dev/shm or /var/tmp/relit"),
]


@cache
def read_tree() -> list[Source]:
    """Every Python file of ours. A file of another session may vanish while we look: skip it."""
    found = []
    for folder in CODE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            found.append(Source(path.relative_to(ROOT).as_posix(), path.read_text()))
    return found


def read_texts() -> list[Source]:
    names = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"]
    paths = [ROOT / name for name in [*names, ".ci/run"]] + sorted((ROOT / "docs").rglob("*.md"))
    return [Source(p.relative_to(ROOT).as_posix(), p.read_text()) for p in paths if p.exists()]


@pytest.mark.parametrize(("rule", "path", "text", "names"), PLANTED)
def test_a_planted_fault_is_found(rule: Rule, path: str, text: str, names: str) -> None:
    found = rule(Source(path, text))
    assert found, f"{rule.__name__} missed the planted fault"
    assert names in found[0]


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED)
def test_what_is_allowed_passes(rule: Rule, path: str, text: str) -> None:
    assert rule(Source(path, text)) == []


def test_every_rule_has_a_planted_fault() -> None:
    assert {rule for rule, *_ in PLANTED} == set(CODE_RULES)


@pytest.mark.parametrize("rule", CODE_RULES)
def test_the_code_is_tidy(rule: Rule) -> None:
    sources = read_tree()
    assert len(sources) > 15, "the tree was not found"
    found = [f"{source.path}:{what}" for source in sources for what in rule(source)]
    assert not found, f"{rule.__name__}:\n" + "\n".join(found)


def test_the_texts_name_no_machine() -> None:
    found = [f"{source.path}:{what}" for source in read_texts() for what in machine_path(source)]
    assert not found, "\n".join(found)


def loaded_by(*folders: str) -> set[str]:
    """Top-level modules in a fresh process that has imported every module below `folders`."""
    names = []
    for folder in folders:
        root = ROOT / folder.split("/", 1)[0]
        files = sorted((ROOT / folder).rglob("*.py"))
        names += [".".join(f.relative_to(root).with_suffix("").parts) for f in files]
    names = [name.removesuffix(".__init__") for name in names]
    code = f"import sys, importlib\nfor name in {names}: importlib.import_module(name)\n"
    code += "print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_storage_and_machines_load_neither_ray_nor_torch() -> None:
    loaded = loaded_by("storage/relit_storage", "platform/relit_platform/machines")
    assert "relit_storage" in loaded
    assert loaded.isdisjoint({"ray", "torch", "relit"})


def test_the_node_side_loads_no_torch() -> None:
    assert loaded_by("platform/relit_platform/node").isdisjoint({"torch", "relit"})
