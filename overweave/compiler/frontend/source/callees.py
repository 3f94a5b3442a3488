"""What the functions that a kernel calls do with its pointers.

A directive names a load or store of the kernel itself. A helper's access that no directive names would get no wait and
no notify; the compiler must find it, and refuse.
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
    """A call that accesses memory through a parameter. by: the helper that does so, empty for the kernel itself.

    kind: None if the source of the called function is unknown.
    """

    parameter: str
    kind: MemoryOpKind | None
    call: cst.Call
    by: str = ""


class Callees:
    """The memory accesses of the functions at the top level of a file. _touches: function -> its touches."""

    def __init__(self, source: KernelSource) -> None:
        self._language = source.language
        self._functions = {
            node.name.value: node
            for node in source.module.body
            if isinstance(node, cst.FunctionDef) and node is not source.function
        }
        self._touches: dict[str, tuple[Touch, ...]] = {}

    def touches(self, function: cst.FunctionDef, origins: Origins) -> Iterator[Touch]:
        """Yield every call in a function that accesses memory through one of its parameters, or may do so."""
        local_names = {*parameter_names(function), *assigned_names([function.body])}
        for call in calls_in(function.body):
            kind = self._language.memory_kind(call)
            if kind is not None:
                nodes = [self._language.address_of(call)]
                if not self._language.tl_name(call):  # a method of an unknown object: an argument may be the pointer
                    nodes += [arg.value for arg in call.args]
                yield from (Touch(name, kind, call) for name in sorted(origins.parameters_of(*nodes)))
            elif name := self.helper_name(call):
                for touch in self._touches_of(name):
                    passed = origins.parameters_of(*_passed_for(call, self._functions[name], touch.parameter))
                    yield from (Touch(parameter, touch.kind, call, name) for parameter in sorted(passed))
            elif not self._is_known(call, local_names):
                passed = origins.parameters_of(*(arg.value for arg in call.args))
                yield from (Touch(parameter, None, call, dotted(call.func)) for parameter in sorted(passed))

    def helper_name(self, call: cst.Call) -> str:
        """Return the function of the file that is called; empty for any other call."""
        name = dotted(call.func)
        return name if name in self._functions else ""

    def _touches_of(self, name: str) -> tuple[Touch, ...]:
        """Return the touches of a helper, once computed."""
        if name not in self._touches:
            self._touches[name] = ()  # ends the recursion of a function that calls itself
            function = self._functions[name]
            origins = Origins(assignments(function.body), parameter_names(function), self._language)
            self._touches[name] = tuple(self.touches(function, origins))
        return self._touches[name]

    def _is_known(self, call: cst.Call, local_names: set[str]) -> bool:
        """Whether a call is of `tl`, of a builtin, or a method of a local value."""
        name = dotted(call.func)
        root = name.split(".")[0]
        is_tl = any(name.startswith(f"{module}.") for module in self._language.modules)  # `tl.math.exp2`
        is_method = isinstance(call.func, cst.Attribute) and (not root or root in local_names)
        return bool(self._language.tl_name(call)) or is_tl or is_method or hasattr(builtins, root)


def _passed_for(call: cst.Call, function: cst.FunctionDef, parameter: str) -> list[cst.CSTNode]:
    """Return what a call passes for a parameter; a starred argument may be for any."""
    values: list[cst.CSTNode] = []
    names = parameter_names(function)
    position = names.index(parameter) if parameter in names else -1
    for position_of_arg, arg in enumerate(call.args):
        if (
            arg.star
            or (arg.keyword and arg.keyword.value == parameter)
            or (not arg.keyword and position_of_arg == position)
        ):
            values.append(arg.value)
    return values
