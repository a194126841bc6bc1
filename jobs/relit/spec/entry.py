"""Find the function to run, without running a line of the user's code.

A training script may import torch, start devices or take a minute to load; none of that may
happen in the process that submits. So modules are found by walking the search path and the
function is looked for in the parsed source.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from relit.errors import EntryError
from relit.spec.model import JobSpec


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the code lies.

    The zip holds `tree` with names relative to `root`; with `root` on sys.path, `module` can be
    imported and has `function`.
    """

    module: str
    function: str
    file: Path
    root: Path
    tree: Path

    @property
    def text(self) -> str:
        """The form the platform uses: "module:function"."""
        return f"{self.module}:{self.function}"


def find_entry(spec: JobSpec) -> Entry:
    """Locate `spec.entry` on this machine; EntryError says what is missing and what is near."""
    where, function = spec.where, spec.function
    folder = _working_dir(spec)
    try:
        if where.endswith(".py") or "/" in where:
            entry = _from_file(spec, where, function, folder)
        else:
            entry = _from_module(spec, where, function, folder)
        _check_function(spec, entry)
    except (OSError, ValueError) as error:  # a name too long for a file, or with a zero byte
        raise EntryError(entry=where[:80], why=f"it cannot be looked for: {error!s:.200}") from None
    return entry


def _working_dir(spec: JobSpec) -> Path | None:
    if spec.env.working_dir is None:
        return None
    folder = Path(spec.env.working_dir).expanduser().resolve()
    if not folder.is_dir():
        why = f"env.working_dir {str(folder)!r} is not a folder"
        raise EntryError(entry=spec.entry, why=why)
    return folder


def _from_file(spec: JobSpec, where: str, function: str, folder: Path | None) -> Entry:
    path = Path(where).expanduser()
    file = ((folder or Path.cwd()) / path).resolve()
    if not file.is_file():
        raise EntryError(entry=spec.entry, why=f"there is no file {str(file)!r}")
    root = folder or file.parent
    if not file.is_relative_to(root):
        why = f"{str(file)!r} is not below env.working_dir {str(root)!r}"
        raise EntryError(entry=spec.entry, why=why)
    module = ".".join(file.relative_to(root).with_suffix("").parts)
    return Entry(module, function, file, root, root)


def _from_module(spec: JobSpec, where: str, function: str, folder: Path | None) -> Entry:
    first, *rest = where.split(".")
    if not all((first, *rest)):
        raise EntryError(entry=spec.entry, why=f"{where[:80]!r} is no module's name")
    places = [folder] if folder else [Path.cwd(), *(Path(p) for p in sys.path if p)]
    for place in places:
        file = _module_file(place, [first, *rest])
        if file:
            return _entry_of(where, function, file, place.resolve(), folder is not None)
    found = None if folder else importlib.util.find_spec(first)
    for location in (found.submodule_search_locations or []) if found else []:
        file = _module_file(Path(location), rest)
        if file:
            return _entry_of(where, function, file, Path(location).resolve().parent, False)
    searched = str(folder) if folder else "this folder and Python's search path"
    why = f"there is no module {where!r} in {searched}"
    raise EntryError(entry=spec.entry, why=why)


def _module_file(place: Path, parts: list[str]) -> Path | None:
    """The source of a dotted module below a folder, or None."""
    target = place.joinpath(*parts)
    for candidate in (target.with_name(target.name + ".py"), target / "__init__.py"):
        if parts and candidate.is_file():
            return candidate.resolve()
    return None


def _entry_of(module: str, function: str, file: Path, root: Path, whole: bool) -> Entry:
    """A package travels alone; a plain module travels with its folder, for its siblings."""
    first = module.partition(".")[0]
    package = root / first
    if whole or root == Path.cwd():
        tree = root
    elif package.is_dir():
        tree = package
    else:
        tree = file if "site-packages" in file.parts else root
    if not file.is_relative_to(root):  # reached through a link: keep the linked place
        root, tree = file.parents[module.count(".")], file.parents[module.count(".")]
    return Entry(module, function, file, root, tree)


def _check_function(spec: JobSpec, entry: Entry) -> None:
    try:
        parsed = ast.parse(entry.file.read_bytes(), filename=str(entry.file))
    except (SyntaxError, ValueError) as error:
        raise EntryError(entry=spec.entry, why=f"{entry.file} does not parse: {error}") from None
    names = _top_level_names(parsed)
    if entry.function in names or "*" in names:
        return
    near = difflib.get_close_matches(entry.function, sorted(names), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    why = f"{entry.file} defines no function {entry.function!r}{hint}"
    raise EntryError(entry=spec.entry, why=why)


def _top_level_names(parsed: ast.Module) -> set[str]:
    """Every name the module binds at top level, also below if and try."""
    names: set[str] = set()
    todo: list[ast.stmt] = list(parsed.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        else:
            todo += _statements_below(node)
    return names


def _statements_below(node: ast.AST) -> list[ast.stmt]:
    """Statements nested in a compound one, through its except and case clauses."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found.append(child)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            found += child.body
    return found
