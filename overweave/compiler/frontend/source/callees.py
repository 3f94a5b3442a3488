"""The functions of an author's file that a kernel calls: what each does to the pointers that it is given.

A directive stands above a load or store of the kernel itself. What a function loads or stores for it no directive can
name, so no wait would stand above it and no signal behind it; the compiler must know of it, and refuse.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator

import libcst as cst
from msgspec import Struct

from overweave.compiler.frontend.source.author import KernelSource, parameter_names
from overweave.compiler.frontend.source.language import MemoryOpKind, dotted
from overweave.compiler.frontend.source.names import Origins, assigned_names, assignments, calls_in


class Touch(Struct, frozen=True):
    """A call that reaches memory through a parameter. by: the function that does, empty for the kernel itself.

    kind None: nobody can see what is done, as the function stands elsewhere.
    """

    parameter: str
    kind: MemoryOpKind | None
    call: cst.Call
    by: str = ""


class Callees:
    """What the functions at the top level of a file do."""

    def __init__(self, source: KernelSource) -> None:
        self._language = source.language
        self._functions = {
            node.name.value: node
            for node in source.module.body
            if isinstance(node, cst.FunctionDef) and node is not source.function
        }
        self._touches: dict[str, tuple[Touch, ...]] = {}

    def touches(self, function: cst.FunctionDef, origins: Origins) -> Iterator[Touch]:
        """Every call of a function that reaches memory through one of its parameters, or may."""
        local = {*parameter_names(function), *assigned_names([function.body])}
        for call in calls_in(function.body):
            kind = self._language.kind(call)
            if kind is not None:
                nodes = [self._language.place(call)]
                if not self._language.word(call):  # who knows what stands before the dot
                    nodes += [arg.value for arg in call.args]
                yield from (Touch(name, kind, call) for name in sorted(origins.of(*nodes)))
            elif name := self.named(call):
                for inner in self._of(name):
                    given = origins.of(*_given(call, self._functions[name], inner.parameter))
                    yield from (Touch(one, inner.kind, call, name) for one in sorted(given))
            elif not self._is_known(call, local):
                given = origins.of(*(arg.value for arg in call.args))
                yield from (Touch(one, None, call, dotted(call.func)) for one in sorted(given))

    def named(self, call: cst.Call) -> str:
        """The function of the file that is called, if it is one."""
        name = dotted(call.func)
        return name if name in self._functions else ""

    def _of(self, name: str) -> tuple[Touch, ...]:
        if name not in self._touches:
            self._touches[name] = ()  # one that calls itself does nothing more by that
            function = self._functions[name]
            origins = Origins(assignments(function.body), parameter_names(function), self._language)
            self._touches[name] = tuple(self.touches(function, origins))
        return self._touches[name]

    def _is_known(self, call: cst.Call, local: set[str]) -> bool:
        """Whether a call is of the language, of Python, or a method of a value."""
        name = dotted(call.func)
        root = name.split(".")[0]
        is_ours = any(name.startswith(f"{module}.") for module in self._language.modules)  # `tl.math.exp2`
        is_method = isinstance(call.func, cst.Attribute) and (not root or root in local)
        return bool(self._language.word(call)) or is_ours or is_method or hasattr(builtins, root)


def _given(call: cst.Call, function: cst.FunctionDef, parameter: str) -> list[cst.CSTNode]:
    """What a call passes for a parameter: what is unpacked may be for any."""
    found: list[cst.CSTNode] = []
    names = parameter_names(function)
    position = names.index(parameter) if parameter in names else -1
    for at, arg in enumerate(call.args):
        if arg.star or (arg.keyword and arg.keyword.value == parameter) or (not arg.keyword and at == position):
            found.append(arg.value)
    return found
