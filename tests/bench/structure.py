"""The structure of a checkout in figures: files, lines and types of each folder, what is small, and what imports what.

    just study structure                 # of this checkout
    just study structure --root DIR      # of another one, an older commit's, say

A circle is a group of modules that import each other when they are imported; a function's own imports and those for
type checking alone are left out. An arrow points up where a package imports one that stands above it.
"""

from __future__ import annotations

import ast
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import PROGRAM
from serve.bench.options import new_parser

LAYERS = ("serve", "runtime", "ops")  # each imports those behind it
SMALL_LINES, LONG_FUNCTION_LINES, LONG_FILE_LINES = 60, 60, 450


class Module(NamedTuple):
    """One file: its path in the checkout, its lines and its syntax."""

    path: Path
    lines: int
    tree: ast.Module

    @property
    def name(self) -> str:
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parser() -> ArgumentParser:
    options = new_parser("structure", "The structure of a checkout in figures.", program=PROGRAM)
    options.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="default: this checkout")
    return options


def main(argv: Sequence[str]) -> int:
    root: Path = parser().parse_args(argv).root
    modules = [module for layer in LAYERS for module in read(root, layer)]
    rows = [row("product", modules)]
    for folder in sorted({folder_of(module) for module in modules}):
        rows.append(row(folder, [module for module in modules if folder_of(module) == folder]))
    rows += [row("tests", read(root, "tests")), row("tests/kit", read(root, "tests/kit"))]
    titles = ("folder", "files", "lines", "classes", "Protocols", f"files < {SMALL_LINES} lines")
    for name, *figures in (titles, *rows):
        print(f"{name:<24}" + "".join(f"{figure:>18}" for figure in figures))
    arrows = {module.name: imported(module, {each.name for each in modules}) for module in modules}
    upward = [
        f"{name} -> {other}"
        for name, others in arrows.items()
        for other in others
        if LAYERS.index(other.partition(".")[0]) < LAYERS.index(name.partition(".")[0])
    ]
    functions = [node for module in modules for node in functions_of(module.tree)]
    figures = {
        f"functions of more than {LONG_FUNCTION_LINES} lines": sum(
            (node.end_lineno or 0) - node.lineno >= LONG_FUNCTION_LINES for node in functions
        ),
        f"files of more than {LONG_FILE_LINES} lines": sum(m.lines > LONG_FILE_LINES for m in modules),
        "circles of imports between files": sum(1 for _ in circles(arrows)),
        "circles between folders": sum(1 for _ in circles(between_folders(modules, arrows))),
        "upward arrows": len(upward),
    }
    for what, count in figures.items():
        print(f"{what:<40}{count:>6}")
    return 0


def read(root: Path, folder: str) -> list[Module]:
    """Every Python file below a folder of the checkout."""
    found = []
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(Module(path.relative_to(root), text.count("\n"), ast.parse(text)))
    return found


def folder_of(module: Module) -> str:
    return "/".join(module.path.parts[:2] if len(module.path.parts) > 2 else module.path.parts[:1])


def between_folders(modules: Sequence[Module], arrows: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Which folders import which; files that lie in a layer itself are folders of their own."""
    home = {m.name: str(m.path) if len(m.path.parts) == 2 else folder_of(m) for m in modules}
    found: dict[str, set[str]] = {folder: set() for folder in home.values()}
    for name, others in arrows.items():
        found[home[name]] |= {home[other] for other in others} - {home[name]}
    return found


def row(name: str, modules: Sequence[Module]) -> tuple[str, ...]:
    classes = [node for m in modules for node in ast.walk(m.tree) if isinstance(node, ast.ClassDef)]
    protocols = sum(any(ast.unparse(base) in ("Protocol", "typing.Protocol") for base in c.bases) for c in classes)
    small = sum(m.lines < SMALL_LINES and m.path.name != "__init__.py" for m in modules)
    lines = sum(module.lines for module in modules)
    return name, str(len(modules)), f"{lines:,}", str(len(classes)), str(protocols), str(small)


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imported(module: Module, names: set[str]) -> set[str]:
    """The modules of the checkout that this one imports when it is imported."""
    found: set[str] = set()
    for node in at_import(module.tree.body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module is not None:
            found |= {
                deeper if (deeper := f"{node.module}.{alias.name}") in names else node.module for alias in node.names
            }
    return (found & names) - {module.name}


def at_import(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from at_import([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from at_import([*node.body, *node.orelse, *node.finalbody])


def circles(arrows: Mapping[str, set[str]]) -> Iterator[set[str]]:
    """Groups of more than one module that reach each other: what is left when leaves are taken off at both ends."""
    left = set(arrows)
    while left:
        reached = Counter(other for name in left for other in arrows[name] & left)
        leaves = {name for name in left if not reached[name] or not arrows[name] & left}
        if not leaves:
            break
        left -= leaves
    while left:
        start = min(left)
        forward = reach(start, arrows, left)
        group = {name for name in forward if start in reach(name, arrows, left)} | {start}
        if len(group) > 1:
            yield group
        left -= group


def reach(start: str, arrows: Mapping[str, set[str]], within: set[str]) -> set[str]:
    """All that can be reached from a module."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for other in arrows[waiting.pop()] & within - found:
            found.add(other)
            waiting.append(other)
    return found
