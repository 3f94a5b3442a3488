"""The package as its source: which modules there are and what each one imports. Nothing is imported to find out."""

from __future__ import annotations

import ast
import gc
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "overweave"
COMPUTED = "?"  # an import whose name is put together at run time


class Import(NamedTuple):
    """One imported module. `inside` names the function that holds the import, or is empty at module level."""

    target: str
    line: int
    inside: str


@cache
def modules() -> dict[str, Path]:
    """Dotted name to file, for every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    gc.disable()  # else it goes through all trees again and again, for two thirds of the time
    try:
        return ast.parse(path.read_text(), str(path))
    finally:
        gc.enable()


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's tree."""
    return tuple(ast.walk(tree(path)))


SEARCHES = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "split", "find", "index", "count"}


def compared(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, list[ast.expr]]]:
    """Each comparison, search, match and table, with the expressions that are compared in it, or are its keys."""
    for each in nodes:
        if isinstance(each, ast.Compare):
            yield each, [each.left, *each.comparators]
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in SEARCHES:
            yield each, [each.func.value, *each.args]
        elif isinstance(each, ast.MatchValue):
            yield each, [each.value]
        elif isinstance(each, ast.Dict):
            yield each, [key for key in each.keys if key is not None]


def room(module: str) -> str:
    """`overweave.ir.plan` -> `ir`; the package itself -> ``."""
    return module.split(".")[1] if "." in module else ""


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Every import of a module, with `from package import submodule` resolved to the submodule."""
    return tuple(_imports(tree(modules()[module]), ""))


def _imports(node: ast.AST, inside: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for name in child.names:
                yield Import(name.name, child.lineno, inside)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"relative import in line {child.lineno}"
            base = child.module or ""
            for name in child.names:
                full = f"{base}.{name.name}"
                yield Import(full if full in modules() else base, child.lineno, inside)
        elif isinstance(child, ast.Call) and _called(child) in ("import_module", "__import__", "resolve_name"):
            target = child.args[0].value if child.args and isinstance(child.args[0], ast.Constant) else COMPUTED
            yield Import(str(target), child.lineno, inside or "<module>")
            yield from _imports(child, inside)
        else:
            yield from _imports(
                child, child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else inside
            )


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def python_path(*folders: Path) -> str:
    """PYTHONPATH of a process that a test starts: folders of its own, the repository, and what this process was given.

    A machine whose packages come by PYTHONPATH alone has them in that process, too.
    """
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([*map(str, folders), str(ROOT), *given])
