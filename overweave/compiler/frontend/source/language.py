"""How a file names `triton.language`, and which of its functions access memory.

A kernel may call `tl.load`, `T.load` after `from triton import language as T`, or `load` after `from triton.language
import load`: all three are `load` here. A name that is imported from elsewhere is not a function of `tl`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
