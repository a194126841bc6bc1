"""The documents say only what is there: links, anchors, code examples and make targets."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
MAKE = re.compile(r"\bmake ([a-z][a-z-]+)")
RELIT = re.compile(r"^\s*relit ([a-z]+)", re.M)


def without_code(text: str) -> str:
    return FENCE.sub("", text)


def slugs(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.+)$", without_code(text), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def anchors(there: Path, file: str, text: str) -> set[str]:
    return slugs(there.read_text() if file else text)


def broken_links(path: Path, text: str) -> list[str]:
    found = []
    for target in LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve()
        if not there.exists() or (anchor and anchor not in anchors(there, file, text)):
            found.append(target)
    return found


def snippets(text: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language == "python"]


def shell_text(text: str) -> str:
    return "".join(body for language, body in FENCE.findall(text) if language in ("", "sh", "bash"))


def test_a_planted_dead_link_is_found() -> None:
    readme = ROOT / "README.md"
    assert broken_links(readme, "[a](docs/nowhere.md)") == ["docs/nowhere.md"]
    assert broken_links(readme, "# One\n[a](#two) [b](#one) [c](https://x.org)") == ["#two"]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_python_examples_compile(path: Path) -> None:
    for body in snippets(path.read_text()):
        compile(body, str(path), "exec")


def test_the_readme_example_uses_names_that_exist() -> None:
    import relit
    from relit_platform.worker.context import RankContext

    bodies = snippets((ROOT / "README.md").read_text())
    assert bodies
    for node in (node for body in bodies for node in ast.walk(ast.parse(body))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = {"relit": relit, "run": RankContext}.get(node.value.id)
            assert owner is None or hasattr(owner, node.attr), f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_make_targets_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    inline = re.findall(r"`([^`\n]+)`", without_code(path.read_text()))
    named = set(MAKE.findall(shell_text(path.read_text()) + "\n".join(inline)))
    assert named <= targets


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_relit_commands_exist(path: Path) -> None:
    from relit.cli.main import cli

    named = set(RELIT.findall(shell_text(path.read_text())))
    assert named <= set(cli.list_commands(click.Context(cli)))
