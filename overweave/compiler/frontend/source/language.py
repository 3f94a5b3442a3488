"""What a file calls Triton's language, and which of its words reach memory.

A kernel may say `tl.load`, `T.load` after `from triton import language as T`, or `load` after `from triton.language
import load`: all of them are the same word here. Names that are imported as something else are no words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import libcst as cst
from msgspec import Struct

LANGUAGE = "triton.language"
CUSTOMARY = "tl"  # meant for the language even where a file does not say so itself
ATOMIC = "atomic_"

MemoryOpKind = Literal["load", "store", "atomic"]
_WORDS: dict[str, MemoryOpKind] = {
    "load": "load",
    "load_tensor_descriptor": "load",
    "store": "store",
    "store_tensor_descriptor": "store",
}
_METHODS: dict[str, MemoryOpKind] = {"load": "load", "gather": "load", "store": "store", "scatter": "store"}


class Language(Struct, frozen=True):
    """modules: dotted names that stand for the language. words: what is imported from it, by the name it has here."""

    modules: frozenset[str]
    words: Mapping[str, str]

    def word(self, call: cst.Call) -> str:
        """The word of the language that is called, whatever its name here. Empty for any other call."""
        function = call.func
        if isinstance(function, cst.Name):
            return self.words.get(function.value, "")
        if isinstance(function, cst.Attribute) and dotted(function.value) in self.modules:
            return function.attr.value
        return ""

    def method(self, call: cst.Call) -> str:
        """The method that is called on a value, such as a descriptor's. Empty for any other call."""
        function = call.func
        return function.attr.value if isinstance(function, cst.Attribute) and not self.word(call) else ""

    def kind(self, call: cst.Call) -> MemoryOpKind | None:
        """How a call reaches memory, if it does."""
        word, method = self.word(call), self.method(call)
        if word.startswith(ATOMIC) or method.startswith(ATOMIC):
            return "atomic"
        return _WORDS.get(word) or _METHODS.get(method)

    def place(self, call: cst.Call) -> cst.CSTNode:
        """What a call that reaches memory addresses: the pointer of `tl.load`, or the descriptor before the dot."""
        if not self.word(call):
            return call.func.value if isinstance(call.func, cst.Attribute) else call
        named = next((arg.value for arg in call.args if arg.keyword and arg.keyword.value in ("pointer", "desc")), None)
        return named or (call.args[0].value if call.args else call)

    def is_access(self, call: cst.Call, kind: str) -> bool:
        """Whether a call is `tl.load(pointer)` or `descriptor.load(...)`, or a store: what a directive can speak of."""
        return kind in (self.word(call), self.method(call))


def dotted(node: cst.CSTNode) -> str:
    """`a.b.c` as text; empty for anything but names and dots."""
    if isinstance(node, cst.Name):
        return node.value
    left = dotted(node.value) if isinstance(node, cst.Attribute) else ""
    return f"{left}.{node.attr.value}" if left and isinstance(node, cst.Attribute) else ""


def is_value(position: int, argument: cst.Arg) -> bool:
    """Whether an argument of `tl.store(pointer, value)` or `descriptor.store(offsets, value)` is what is stored."""
    return argument.keyword.value == "value" if argument.keyword else position == 1


def language_of(module: cst.Module) -> Language:
    """How the imports of a file name the language, wherever in it they stand."""
    found = _Imports()
    module.visit(found)
    return Language(frozenset(found.modules), found.words)


class _Imports(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.modules = {CUSTOMARY, LANGUAGE}
        self.words: dict[str, str] = {}

    def visit_Import(self, node: cst.Import) -> None:
        for alias in node.names:
            self._named(dotted(alias.name), _local(alias))

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        origin = dotted(node.module) if node.module and not node.relative else ""
        for alias in node.names if not isinstance(node.names, cst.ImportStar) else ():
            whole = f"{origin}.{dotted(alias.name)}"
            self._named(whole, _local(alias) or dotted(alias.name))
            if origin == LANGUAGE:
                self.words[_local(alias) or dotted(alias.name)] = dotted(alias.name)

    def _named(self, whole: str, local: str) -> None:
        """`whole` is what is imported, `local` the name it has here, if it has one of its own."""
        if local and (whole == LANGUAGE or LANGUAGE.startswith(f"{whole}.")):
            self.modules.add(local + LANGUAGE.removeprefix(whole))


def _local(alias: cst.ImportAlias) -> str:
    return dotted(alias.asname.name) if alias.asname else ""
