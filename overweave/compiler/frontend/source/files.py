"""A kernel's file and those that it imports from: their functions and integer constants.

Files are found as Python finds modules, and parsed; none of them is run.
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

from overweave.compiler.frontend.source.language import DEFAULT_ALIAS, LANGUAGE, Language

MAX_BYTES, MAX_ALIASES = 1 << 19, 6
TRITON = "triton"


class File:
    """The top-level names of a file. _imported: name here -> (module, name there). _constants: name -> expression."""

    def __init__(self, path: Path, tree: ast.Module, language: Language) -> None:
        self.path, self.tree, self.language = path, tree, language
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self._imported = dict(_imports(tree))
        bindings = {*_imports(tree), *((one.name, None) for one in tree.body if isinstance(one, ast.FunctionDef))}
        times = Counter(name for name, _ in bindings) + self._stores
        for name in [name for name, count in times.items() if count > 1]:  # which binding is in effect is unknown
            self.functions.pop(name, None)
            self._imported.pop(name, None)

    def function(self, name: str) -> tuple[ast.FunctionDef, File] | None:
        """Return the function that a dotted name refers to, with the file that defines it; else None."""
        is_found, file, local = self._resolve(name)
        return (file.functions[local], file) if is_found and file is not None and local in file.functions else None

    def is_of_triton(self, name: str) -> bool:
        """Whether a dotted name belongs to Triton, the standard library or builtins."""
        root = name.split(".")[0]
        binding = self._imported.get(root)
        if binding is not None:
            return binding[0] == TRITON or binding[0].startswith(f"{TRITON}.") or binding[0] in sys.stdlib_module_names
        return root not in self.functions and (
            hasattr(builtins, root) or any(f"{root}." in f"{module}." for module in self.language.modules)
        )

    def imported_sources(self) -> list[str]:
        """Return the source of every file that this one imports from, those of Python and Triton aside."""
        modules = sorted({module for module, _ in self._imported.values() if module not in sys.stdlib_module_names})
        files = (imported_file(module, self.path) for module in modules)
        return [ast.unparse(file.tree) for file in files if file is not None]

    def shadows_builtin(self, name: str) -> bool:
        """Whether the file binds a builtin's name itself."""
        return name in self.functions or name in self._imported or name in self._constants or self._from_any_star(name)

    def constant(self, name: str) -> ast.expr | None:
        """Return the expression that a name is bound to, also by an import; None if it is bound more than once."""
        is_found, file, name_there = self._resolve(name)
        return file._constants.get(name_there) if is_found and file is not None else None

    @cached_property
    def int_constants(self) -> dict[str, int]:
        """The file's integer constants: name -> value."""
        names = [*self._constants, *(name for name, binding in self._imported.items() if binding[1])]
        values = ((name, int_value(self.constant(name), self)) for name in names)
        return {name: value for name, value in values if value is not None}

    @cached_property
    def _constants(self) -> dict[str, ast.expr]:
        """Name -> expression, of names that one top-level statement binds and no other."""
        values: dict[str, ast.expr] = {}
        if any(isinstance(one, ast.Name) and one.id in ("exec", "globals") for one in ast.walk(self.tree)):
            return values
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if isinstance(target, ast.Name) and value is not None and self._stores[target.id] == 1:
                values[target.id] = value
        return values

    @cached_property
    def _stores(self) -> Counter[str]:
        """How often each name is assigned at the top level; an assignment by `global` counts twice."""
        nodes = list(ast.walk(self.tree))
        stored = [one for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        by_functions = [name for one in nodes if isinstance(one, ast.Global) for name in one.names]
        return Counter([*(one.id for one in stored if not self._is_local(one)), *by_functions, *by_functions])

    def _is_local(self, node: ast.Name) -> bool:
        return any(one.lineno <= node.lineno <= (one.end_lineno or 0) for one in self.functions.values())

    def _resolve(self, name: str) -> tuple[bool, File | None, str]:
        """Follow imports of a dotted name. Return (is_found, the file that binds it, its name there)."""
        file: File | None = self
        for _ in range(MAX_ALIASES):
            if file is None:
                return False, None, name
            root, _, rest = name.partition(".")
            if root in file._imported:
                module, attribute = file._imported[root]
                submodule = imported_file(f"{module}.{attribute}" if attribute else module, file.path) if rest else None
                if submodule is not None:
                    file, name = submodule, rest
                else:
                    file, name = imported_file(module, file.path), attribute or rest
                continue
            if not rest and (name in file.functions or name in file._constants):
                return True, file, name
            star_file = file._from_star(name)
            if star_file is None:
                return False, None, name
            file = star_file
        return False, None, name

    def _from_any_star(self, name: str) -> bool:
        return self._from_star(name) is not None

    def _from_star(self, name: str) -> File | None:
        """Return the file from which `from m import *` takes a name, or None."""
        modules = [module for local, (module, _) in self._imported.items() if local.startswith("*")]
        for module in modules:
            file = imported_file(module, self.path)
            if file is not None and (name in file.functions or name in file._constants):
                return file
        return None


def int_value(node: ast.expr | None, file: File, links: int = MAX_ALIASES) -> int | None:
    """Evaluate an integer expression of literals, constants of the file and `tl.constexpr(16)`; None for any other."""
    evaluate: Callable[[ast.expr], int | None] = lambda inner: int_value(inner, file, links - 1)  # noqa: E731
    if links < 0 or node is None:
        return None
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int else None
    if isinstance(node, ast.Name):
        return evaluate(value_node) if (value_node := file.constant(node.id)) is not None else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value if (value := evaluate(node.operand)) is not None else None
    if isinstance(node, ast.Attribute) and node.attr == "value":
        return evaluate(node.value)
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "constexpr" and len(node.args) == 1:
        return evaluate(node.args[0])
    if isinstance(node, ast.BinOp):
        left, right = evaluate(node.left), evaluate(node.right)
        operator = OPERATORS.get(type(node.op))
        if left is not None and right is not None and operator is not None:
            return operator(left, right)
    return None


def _shift_left(left: int, right: int) -> int | None:
    return left << right if 0 <= right <= 64 else None


OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int | None]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b if b else None,
    ast.Mod: lambda a, b: a % b if b else None,
    ast.LShift: _shift_left,
    ast.RShift: lambda a, b: a >> b if 0 <= b <= 64 else None,
    ast.Pow: lambda a, b: a**b if 0 <= b <= 32 and abs(a) < 1 << 16 else None,
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
}


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield (name here, (module, name there)) of each import; `from m import *` has the name `*m`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                yield name, (alias.name if alias.asname else name, "")
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                star = alias.name == "*"
                yield (f"*{module}", (module, "")) if star else (alias.asname or alias.name, (module, alias.name))


def imported_file(module: str, importer: Path) -> File | None:
    """Return the file of a module that `importer` imports; None if Python finds none, or it belongs to Triton."""
    dots = len(module) - len(module.lstrip("."))
    if module.lstrip(".").split(".")[0] == TRITON and not dots:
        return None
    folder = importer.resolve().parent
    for _ in range(dots - 1):
        folder = folder.parent
    names = module.lstrip(".").split(".") if module.lstrip(".") else ["__init__"]
    search_path: list[str] | None = [str(folder)] if dots else [str(folder), *sys.path]
    spec: ModuleSpec | None = None
    for name in names:
        spec = PathFinder.find_spec(name, search_path) if search_path else None
        search_path = list(spec.submodule_search_locations or ()) if spec else None
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin is None or origin.suffix != ".py" or not origin.is_file() or origin.stat().st_size > MAX_BYTES:
        return None
    return _parse(origin, origin.read_bytes())


@lru_cache(maxsize=64)
def _parse(path: Path, data: bytes) -> File | None:
    """Parse a file, once for each content; None if it cannot be parsed."""
    try:
        tree = ast.parse(data.decode())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return File(path, tree, _language(tree))


def _language(tree: ast.Module) -> Language:
    """Read from the imports of a file how it names `triton.language`."""
    imports = dict(_imports(tree))
    modules, tl_names = {LANGUAGE, *({DEFAULT_ALIAS} - imports.keys())}, {}
    for name, (module, attribute) in imports.items():
        imported = f"{module}.{attribute}" if attribute else module
        if f"{LANGUAGE}.".startswith(f"{imported}."):
            modules.add(name + LANGUAGE.removeprefix(imported))
        if module == LANGUAGE and attribute:
            tl_names[name] = attribute
    return Language(frozenset(modules), tl_names)
