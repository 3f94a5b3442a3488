"""A kernel's file and those that it imports from: their functions, and the numbers at their top.

Files are found as Python finds them, and read; none of them is run.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from overweave.compiler.frontend.source.language import CUSTOMARY, LANGUAGE, Language

MOST_BYTES, MOST_LINKS = 1 << 19, 6
TRITON = "triton"


class File:
    """What the top level of a file binds."""

    def __init__(self, path: Path, tree: ast.Module, language: Language) -> None:
        self.path, self.tree, self.language = path, tree, language
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._imported = dict(_imports(tree))

    def function(self, name: str) -> tuple[ast.FunctionDef, File] | None:
        """The function that a dotted name is, with the file that it stands in."""
        found, file, rest = self._resolved(name)
        return (file.functions[rest], file) if found and file is not None and rest in file.functions else None

    def is_of_triton(self, name: str) -> bool:
        """Whether a dotted name is one of Triton's own, or Python's."""
        root = name.split(".")[0]
        whole = self._imported.get(root)
        if whole is not None:
            return whole[0] == TRITON or whole[0].startswith(f"{TRITON}.") or whole[0] in sys.stdlib_module_names
        return root not in self.functions and (
            hasattr(builtins, root) or any(f"{root}." in f"{module}." for module in self.language.modules)
        )

    def texts(self) -> list[str]:
        """The files that it imports from, as far as they are not Python's or Triton's own."""
        modules = sorted({module for module, _ in self._imported.values() if module not in sys.stdlib_module_names})
        files = (found_file(module, self.path) for module in modules)
        return [ast.unparse(file.tree) for file in files if file is not None]

    def rebinds(self, name: str) -> bool:
        """Whether the file binds a name of Python's itself."""
        return name in self.functions or name in self._imported or name in self._assigned or self._starred(name)

    def constant(self, name: str) -> ast.expr | None:
        """What a name of the file is bound to, once and for all, be it in the file that it is imported from."""
        found, file, rest = self._resolved(name)
        return file._assigned.get(rest) if found and file is not None else None

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The whole numbers at the top of the file."""
        names = [*self._assigned, *(name for name, whole in self._imported.items() if whole[1])]
        found = ((name, number_of(self.constant(name), self)) for name in names)
        return {name: value for name, value in found if value is not None}

    @cached_property
    def _assigned(self) -> dict[str, ast.expr]:
        """What is bound once, by a statement at the top of the file."""
        bound = Counter(one.id for one in ast.walk(self.tree) if isinstance(one, ast.Name) and self._is_bound(one))
        found: dict[str, ast.expr] = {}
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(target, ast.Name) and value is not None and bound[target.id] == 1:
                found[target.id] = value
        return found

    def _is_bound(self, node: ast.Name) -> bool:
        return isinstance(node.ctx, ast.Store) and not self._is_local(node)

    def _is_local(self, node: ast.Name) -> bool:
        return any(one.lineno <= node.lineno <= (one.end_lineno or 0) for one in self.functions.values())

    def _resolved(self, name: str) -> tuple[bool, File | None, str]:
        """(whether it is known, the file that binds it, its name there)."""
        file: File | None = self
        for _ in range(MOST_LINKS):
            if file is None:
                return False, None, name
            root, _, rest = name.partition(".")
            if root in file._imported:
                module, attribute = file._imported[root]
                link = found_file(f"{module}.{attribute}" if attribute else module, file.path) if rest else None
                if link is not None:
                    file, name = link, rest
                else:
                    file, name = found_file(module, file.path), attribute or rest
                continue
            if not rest and (name in file.functions or name in file._assigned):
                return True, file, name
            starred = file._from_star(name)
            if starred is None:
                return False, None, name
            file = starred
        return False, None, name

    def _starred(self, name: str) -> bool:
        return self._from_star(name) is not None

    def _from_star(self, name: str) -> File | None:
        modules = [module for local, (module, _) in self._imported.items() if local.startswith("*")]
        for module in modules:
            file = found_file(module, self.path)
            if file is not None and (name in file.functions or name in file._assigned):
                return file
        return None


def number_of(node: ast.expr | None, file: File, links: int = MOST_LINKS) -> int | None:
    """The whole number that an expression of a file is: literals, other such names, `tl.constexpr(16)`."""
    again: Callable[[ast.expr], int | None] = lambda inner: number_of(inner, file, links - 1)  # noqa: E731
    if links < 0 or node is None:
        return None
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return again(made) if (made := file.constant(node.id)) is not None else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value if (value := again(node.operand)) is not None else None
    if isinstance(node, ast.Attribute) and node.attr == "value":
        return again(node.value)
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "constexpr" and len(node.args) == 1:
        return again(node.args[0])
    if isinstance(node, ast.BinOp):
        left, right = again(node.left), again(node.right)
        rule = OPERATORS.get(type(node.op))
        if left is not None and right is not None and rule is not None:
            return rule(left, right)
    return None


def _shifted(left: int, right: int) -> int | None:
    return left << right if 0 <= right <= 64 else None


OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int | None]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b if b else None,
    ast.Mod: lambda a, b: a % b if b else None,
    ast.LShift: _shifted,
    ast.RShift: lambda a, b: a >> b if 0 <= b <= 64 else None,
    ast.Pow: lambda a, b: a**b if 0 <= b <= 32 and abs(a) < 1 << 16 else None,
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
}


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name here, (module, name there)); of `from m import *` a name that begins with a star."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                yield name, (alias.name if alias.asname else name, "")
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield (
                    (f"*{module}", (module, ""))
                    if alias.name == "*"
                    else (
                        alias.asname or alias.name,
                        (module, alias.name),
                    )
                )


def found_file(module: str, importer: Path) -> File | None:
    """The file of a module that another file imports, if Python would find one."""
    dots = len(module) - len(module.lstrip("."))
    if module.lstrip(".").split(".")[0] == TRITON and not dots:
        return None
    folder = importer.resolve().parent
    for _ in range(dots - 1):
        folder = folder.parent
    names = module.lstrip(".").split(".") if module.lstrip(".") else ["__init__"]
    places: list[str] | None = [str(folder)] if dots else [str(folder), *sys.path]
    spec: ModuleSpec | None = None
    for name in names:
        spec = PathFinder.find_spec(name, places) if places else None
        places = list(spec.submodule_search_locations or ()) if spec else None
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin is None or origin.suffix != ".py" or not origin.is_file() or origin.stat().st_size > MOST_BYTES:
        return None
    return _parsed(origin, origin.read_bytes())


@lru_cache(maxsize=64)
def _parsed(path: Path, data: bytes) -> File | None:
    try:
        tree = ast.parse(data.decode())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return File(path, tree, _language(tree))


def _language(tree: ast.Module) -> Language:
    modules, words = {CUSTOMARY, LANGUAGE}, {}
    for name, (module, attribute) in _imports(tree):
        whole = f"{module}.{attribute}" if attribute else module
        if f"{LANGUAGE}.".startswith(f"{whole}."):
            modules.add(name + LANGUAGE.removeprefix(whole))
        if module == LANGUAGE and attribute:
            words[name] = attribute
    return Language(frozenset(modules), words)
