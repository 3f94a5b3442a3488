"""How a file names `triton.language`, and which of its functions access memory.

A kernel may call `tl.load`, `T.load` after `from triton import language as T`, or `load` after `from triton.language
import load`: all three are `load` here. A name that is imported from elsewhere is not a function of `tl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Literal

import libcst as cst
from msgspec import Struct

LANGUAGE = "triton.language"
DEFAULT_ALIAS = "tl"  # stands for triton.language even in a file that does not import it
ATOMIC = "atomic_"

MemoryOpKind = Literal["load", "store", "atomic"]
_FUNCTIONS: dict[str, MemoryOpKind] = {
    "load": "load",
    "load_tensor_descriptor": "load",
    "store": "store",
    "store_tensor_descriptor": "store",
}
_METHODS: dict[str, MemoryOpKind] = {"load": "load", "gather": "load", "store": "store", "scatter": "store"}


class Language(Struct, frozen=True):
    """How a file names `triton.language`. modules: dotted names of it. tl_names: local name -> function of `tl`."""

    modules: frozenset[str]
    tl_names: Mapping[str, str]

    def tl_name(self, call: cst.Call) -> str:
        """Return the function of `tl` that is called, such as `load`; empty for any other call."""
        function = call.func
        if isinstance(function, cst.Name):
            return self.tl_names.get(function.value, "")
        if isinstance(function, cst.Attribute) and dotted(function.value) in self.modules:
            return function.attr.value
        return ""

    def method_name(self, call: cst.Call) -> str:
        """Return the method that is called on a value, such as a descriptor's; empty for any other call."""
        function = call.func
        return function.attr.value if isinstance(function, cst.Attribute) and not self.tl_name(call) else ""

    def memory_kind(self, call: cst.Call) -> MemoryOpKind | None:
        """Return how a call accesses memory; None if it does not."""
        function_name, method = self.tl_name(call), self.method_name(call)
        if function_name.startswith(ATOMIC) or method.startswith(ATOMIC):
            return "atomic"
        return _FUNCTIONS.get(function_name) or _METHODS.get(method)

    def address_of(self, call: cst.Call) -> cst.CSTNode:
        """Return the pointer of a `tl.load(pointer)`, or the descriptor of a `descriptor.load(...)`."""
        if not self.tl_name(call):
            return call.func.value if isinstance(call.func, cst.Attribute) else call
        keyword = next(
            (arg.value for arg in call.args if arg.keyword and arg.keyword.value in ("pointer", "desc")), None
        )
        return keyword or (call.args[0].value if call.args else call)

    def is_access(self, call: cst.Call, kind: str) -> bool:
        """Whether a call is `tl.KIND(pointer, ...)` or `descriptor.KIND(...)`; kind: load or store."""
        return kind in (self.tl_name(call), self.method_name(call))


def dotted(node: cst.CSTNode) -> str:
    """`a.b.c` as text; empty for anything but names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    left = dotted(node.value) if isinstance(node, cst.Attribute) else ""
    return f"{left}.{node.attr.value}" if left and isinstance(node, cst.Attribute) else ""


def is_stored_value(position: int, argument: cst.Arg) -> bool:
    """Whether an argument of `tl.store(pointer, value)` or `descriptor.store(offsets, value)` is the value."""
    return argument.keyword.value == "value" if argument.keyword else position == 1


def language_of(module: cst.Module) -> Language:
    """Read from the imports of a file how it names `triton.language`."""
    imports = _Imports()
    module.visit(imports)
    return Language(frozenset(imports.modules), imports.tl_names)


class _Imports(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.modules = {DEFAULT_ALIAS, LANGUAGE}
        self.tl_names: dict[str, str] = {}

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            self._add_module(dotted(alias.name), _alias_name(alias))

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        origin = dotted(node.module) if node.module and not node.relative else ""
        for alias in node.names if not isinstance(node.names, cst.ImportStar) else ():
            imported = f"{origin}.{dotted(alias.name)}"
            self._add_module(imported, _alias_name(alias) or dotted(alias.name))
            if origin == LANGUAGE:
                self.tl_names[_alias_name(alias) or dotted(alias.name)] = dotted(alias.name)

    def _add_module(self, imported: str, alias: str) -> None:
        """Record an imported name that is `triton.language` or a package of it. alias: its name in this file."""
        self.modules -= {alias} - {LANGUAGE}
        if alias and (imported == LANGUAGE or LANGUAGE.startswith(f"{imported}.")):
            self.modules.add(alias + LANGUAGE.removeprefix(imported))


def _alias_name(alias: cst.ImportAlias) -> str:
    return dotted(alias.asname.name) if alias.asname else ""


NameBinding = tuple[str, cst.BaseExpression | None]
METADATA = ("dtype", "type", "shape", "block_shape", "strides")  # attributes of a tensor that hold no address


_LAYOUT = ("whitespace", "leading_lines", "lines_after", "comma", "semicolon", "header", "footer", "lpar", "rpar")


@cache
def _meaningful_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields of a node type with code: without layout, without `b` of `a.b`, without `b` of `f(b=c)`."""
    if kind in (cst.Attribute, cst.Arg):
        return ("value",)
    return tuple(field.name for field in fields(kind) if not field.name.startswith(_LAYOUT))


def _skip_none(_: cst.CSTNode) -> bool:
    return False


def walk(node: cst.CSTNode, skips: Callable[[cst.CSTNode], bool] = _skip_none) -> Iterator[cst.CSTNode]:
    """Yield a node and all nodes in it, outer ones first, without layout. skips: whether to leave out a node.

    A visitor of LibCST rebuilds the tree at each visit: this takes a quarter of its time.
    """
    stack = [node]
    while stack:
        current = stack.pop()
        if skips(current):
            continue
        yield current
        field_values = [getattr(current, name) for name in _meaningful_fields(type(current))]
        for value in reversed(field_values):
            values = value if isinstance(value, list | tuple) else (value,)
            stack += [one for one in reversed(values) if isinstance(one, cst.CSTNode)]


def callee_name(call: cst.Call) -> str:
    """Return the last part of the called name: `range` of `tl.range(...)` and of `range(...)`."""
    function = call.func
    if isinstance(function, cst.Attribute):
        return function.attr.value
    return function.value if isinstance(function, cst.Name) else ""


def used_names(node: cst.CSTNode, skips: Callable[[cst.CSTNode], bool] = _skip_none) -> set[str]:
    """Return the names that a node reads or writes; of `a.b` only `a`, of `f(x=y)` only `f` and `y`."""
    return {one.value for one in walk(node, skips) if isinstance(one, cst.Name)}


def assignments(node: cst.CSTNode) -> list[NameBinding]:
    """Return (name, value) of every assignment in a node."""
    pairs: list[NameBinding] = []
    for one in walk(node):
        if isinstance(one, cst.Assign):
            for target in one.targets:
                pairs += _bindings(target.target, one.value)
        elif isinstance(one, cst.AugAssign | cst.AnnAssign | cst.NamedExpr):
            pairs += _bindings(one.target, one.value)
        elif isinstance(one, cst.For):
            pairs += _bindings(one.target, one.iter)
    return pairs


def _bindings(target: cst.CSTNode, value: cst.BaseExpression | None) -> list[NameBinding]:
    """Return the names that an assignment binds; a tuple of names takes a tuple of values one by one."""
    if isinstance(target, cst.Tuple | cst.List) and isinstance(value, cst.Tuple | cst.List):
        if len(target.elements) == len(value.elements):
            pairs = zip(target.elements, value.elements, strict=True)
            return [one for element, element_value in pairs for one in _bindings(element.value, element_value.value)]
    if isinstance(target, cst.Subscript | cst.Attribute):
        return []
    return [(name, value) for name in sorted(used_names(target))]


def assigned_names(nodes: Iterable[cst.CSTNode]) -> set[str]:
    """Return every name that the nodes assign."""
    return {name for node in nodes for name, _ in assignments(node)}


def calls_in(node: cst.CSTNode) -> list[cst.Call]:
    """Return every call in a node, outer ones first."""
    return [one for one in walk(node) if isinstance(one, cst.Call)]


def accesses_in(node: cst.CSTNode, kind: str, language: Language) -> list[cst.Call]:
    """Return every `tl.KIND(pointer, ...)` and `descriptor.KIND(...)` in a node; kind: load or store."""
    return [call for call in calls_in(node) if language.is_access(call, kind)]


class Origins:
    """The parameters that each variable is computed from, on any path. Loaded data and dtypes have no origin."""

    def __init__(self, bindings: Iterable[NameBinding], parameters: Iterable[str], language: Language) -> None:
        self._language = language
        self._parameters_of_name = {name: frozenset((name,)) for name in parameters}
        names_used = [(name, self._names_in(value)) for name, value in bindings if value is not None]
        changed = True
        while changed:
            changed = False
            for name, used in names_used:
                parameters_of_name = self._parameters_of_name.get(name, frozenset()) | self._union(used)
                if parameters_of_name != self._parameters_of_name.get(name, frozenset()):
                    self._parameters_of_name[name], changed = parameters_of_name, True

    def parameters_of(self, *nodes: cst.CSTNode) -> frozenset[str]:
        """Return the parameters that nodes are computed from."""
        return frozenset().union(*(self._union(self._names_in(node)) for node in nodes))

    def _names_in(self, node: cst.CSTNode) -> set[str]:
        return used_names(node, self._is_opaque)

    def _union(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*(self._parameters_of_name.get(one, frozenset()) for one in names))

    def _is_opaque(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Call):
            return self._language.memory_kind(node) in ("load", "atomic")
        return isinstance(node, cst.Attribute) and node.attr.value in METADATA
