"""An author's kernel as the compiler knows it: its source tree, its directives, and which statement each speaks of.

The kernel is read from its file with LibCST, so that all the author wrote survives. Nothing of it is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar, cast

import libcst as cst
from libcst.metadata import CodePosition, MetadataWrapper, PositionProvider
from msgspec import Struct
from msgspec.structs import replace

from overweave.compiler.frontend.source.files import File
from overweave.compiler.frontend.source.language import Language, language_of
from overweave.compiler.frontend.source.names import calls_in
from overweave.compiler.frontend.symbols.directives import (
    AccessDirective,
    AxisDirective,
    Directive,
    SourceLine,
    is_directive,
    parse_directive,
)
from overweave.compiler.frontend.symbols.polynomials import Polynomial, number
from overweave.errors import InputError
from overweave.ir.text.files import printable
from overweave.untrusted import read_bytes

Statement = cst.BaseStatement
Kind = TypeVar("Kind", bound=Directive)
MOST_BYTES = 1 << 17
MOST_DEPTH = 100


class Marked(Struct, Generic[Kind], frozen=True):
    """A directive, the statement below it, and its path: indices from block to block, from the function's body on.

    helper: the function that it stands in, which the statement of that path calls; empty for the kernel itself.
    """

    directive: Kind
    statement: Statement
    path: tuple[int, ...]
    helper: str = ""


class KernelSource(Struct, frozen=True):
    """A kernel's file and function, all that is marked in it, in the order of the text, and what it calls `tl`.

    text: the file. module: as LibCST reads it, with comments. file: as Python does, with what it imports.
    """

    path: Path
    text: str
    file: File
    module: cst.Module
    function: cst.FunctionDef
    marks: tuple[Marked[Directive], ...]
    line: int
    language: Language

    @property
    def tree(self) -> ast.Module:
        return self.file.tree

    @property
    def name(self) -> str:
        return self.function.name.value

    @property
    def parameters(self) -> tuple[str, ...]:
        return parameter_names(self.function)

    @property
    def defaults(self) -> frozenset[str]:
        """The parameters that have a default."""
        return frozenset(one.name.value for one in listed(self.function) if one.default is not None)

    @property
    def default_numbers(self) -> dict[str, int]:
        """The defaults that are whole numbers, by parameter."""
        numbers = ((one.name.value, one.default) for one in listed(self.function))
        return {name: number.evaluated_value for name, number in numbers if isinstance(number, cst.Integer)}

    def default_of(self, name: str) -> ast.expr | None:
        """The default of a parameter."""
        arguments = self.file.functions[self.name].args
        given = zip(reversed([*arguments.posonlyargs, *arguments.args]), reversed(arguments.defaults), strict=False)
        return next((value for one, value in given if one.arg == name), None)

    @property
    def tuned(self) -> frozenset[str]:
        """The constants that `@triton.autotune` sets: those that its configs name, or all where nothing tells them."""
        for decorator in self.file.functions[self.name].decorator_list:
            named = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(decorator, ast.Call) and ast.unparse(named).split(".")[-1] == "autotune":
                configs = next((one.value for one in decorator.keywords if one.arg == "configs"), None)
                configs = configs or (decorator.args[0] if decorator.args else None)
                if isinstance(configs, ast.Name):
                    configs = self.file.constant(configs.id)
                listed = [one for one in ast.walk(configs) if isinstance(one, ast.Dict)] if configs else []
                keys = [key.value if isinstance(key, ast.Constant) else None for one in listed for key in one.keys]
                return frozenset(map(str, keys)) if keys and None not in keys else self.constants
        return frozenset()

    @property
    def file_numbers(self) -> dict[str, int]:
        """The whole numbers at the top of the file that no parameter hides."""
        return {name: value for name, value in self.file.numbers.items() if name not in self.parameters}

    @property
    def constants(self) -> frozenset[str]:
        """The parameters that are constants of the compiled kernel."""
        return frozenset(one.name.value for one in listed(self.function) if is_constant(one))

    def of_kind(self, kind: type[Kind]) -> list[Marked[Kind]]:
        return [cast("Marked[Kind]", mark) for mark in self.marks if isinstance(mark.directive, kind)]

    def place(self) -> SourceLine:
        """The function itself, for what is wrong with all of it."""
        return SourceLine(self.path.name, self.line, f"def {self.name}")


def listed(function: cst.FunctionDef) -> tuple[cst.Param, ...]:
    """The parameters of a function, in their order."""
    params = function.params
    return (*params.posonly_params, *params.params, *params.kwonly_params)


def is_constant(param: cst.Param) -> bool:
    """Whether a parameter is a `constexpr`, whatever the language is called."""
    annotation = param.annotation.annotation if param.annotation else None
    return (
        isinstance(annotation, cst.Attribute | cst.Name)
        and (annotation.attr.value if isinstance(annotation, cst.Attribute) else annotation.value) == "constexpr"
    )


def parameter_names(function: cst.FunctionDef) -> tuple[str, ...]:
    """Their names."""
    return tuple(one.name.value for one in listed(function))


def _parsed(data: bytes) -> tuple[str, ast.Module]:
    """The text of a file, and what Python reads in it.

    Raises ValueError for what is no sensible one, and whatever Python's parser raises.

    The concrete parser has no limits: nested text takes its stack, minutes or all memory. Python's own has some.
    """
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    text = data.decode()
    tree = ast.parse(text)
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"it nests more than {MOST_DEPTH} deep")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return text, tree


def read_file(path: Path, name: str) -> bytes:
    """The file of a kernel. Raises InputError."""
    try:
        return read_bytes(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(path, name, error) from None


def _unreadable(path: Path, name: str, error: BaseException) -> InputError:
    found = "it nests too deep" if isinstance(error, MemoryError) else printable(str(error).split("\n", maxsplit=1)[0])
    return InputError(f"read kernel {name[:80]} of {path.name}", found, "Give a Python file that can be parsed")


def read_source(path: Path, data: bytes, name: str, line: int | None = None) -> KernelSource:
    """The kernel `name` of a file that holds `data`, with its directives. line: where Python saw the function that is
    meant begin.

    Raises InputError for a file that cannot be parsed or has no such function, DirectiveError for a directive that
    cannot be read or stands where it speaks of nothing.
    """
    asked = f"read kernel {name[:80]} of {path.name}"
    try:
        text, tree = _parsed(data)
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    except (SyntaxError, cst.ParserSyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(path, name, error) from None
    functions = [node for node in wrapper.module.body if isinstance(node, cst.FunctionDef) and node.name.value == name]
    if len(functions) != 1:
        found = f"it has {len(functions)} functions of that name at its top level"
        raise InputError(asked, found, "Define the kernel once, at the top level of a file")
    if not isinstance(functions[0].body, cst.IndentedBlock):
        raise InputError(asked, "its body stands on one line", "Give each statement a line")
    lines = wrapper.resolve(PositionProvider)
    function, body = functions[0], functions[0].body
    first = min(lines[one].start.line for one in (function, *function.decorators))
    if line is not None and not first <= line <= lines[function].end.line:
        found = f"the one that is meant began in line {line}, and this one in line {first}"
        raise InputError(asked, found, "Define the kernel once, and import it again if its file has changed")
    reader = _Reader(path.name, lines)
    marks = (*reader.block(body, ()), *reader.called(function, wrapper.module))
    reader.refuse_strays(function)
    language = language_of(wrapper.module)
    source = KernelSource(
        path, text, File(path, tree, language), wrapper.module, function, marks, lines[function].start.line, language
    )
    return replace(source, marks=tuple(_in_numbers(mark, source.file_numbers) for mark in marks))


def _in_numbers(mark: Marked[Directive], numbers: Mapping[str, int]) -> Marked[Directive]:
    """A directive with the constants of the file in the place of their names."""

    def put(said: Polynomial) -> Polynomial:
        return said.replaced(lambda atom: number(numbers[atom]) if atom in numbers else None)  # type: ignore[index]

    said = mark.directive
    if isinstance(said, AxisDirective):
        return replace(mark, directive=replace(said, extent=put(said.extent), block=put(said.block)))
    if isinstance(said, AccessDirective):
        return replace(mark, directive=replace(said, dims=tuple(map(put, said.dims))))
    return mark


class _Reader:
    """Walks the blocks of a function."""

    def __init__(self, file: str, lines: object) -> None:
        self.file, self.lines = file, lines
        self.read: list[cst.Comment] = []

    def block(self, block: cst.IndentedBlock, path: tuple[int, ...]) -> Iterator[Marked[Directive]]:
        for index, statement in enumerate(block.body):
            here = (*path, index)
            for line in statement.leading_lines if hasattr(statement, "leading_lines") else ():
                if line.comment and is_directive(line.comment.value):
                    yield Marked(self.parsed(line.comment), statement, here)
            self.refuse(_trailing(statement), "it stands behind a statement", "Give it a line of its own, above it")
            for inner in _blocks(statement):
                yield from self.block(inner, here)
        footer = [line.comment for line in block.footer if line.comment]
        self.refuse(footer, "no statement follows it in its block", "Put it above the statement that it speaks of")

    def called(self, function: cst.FunctionDef, module: cst.Module) -> Iterator[Marked[Directive]]:
        """Directives of the functions that a kernel calls, as if they stood above the statement that calls them."""
        helpers = {
            one.name.value: one for one in module.body if isinstance(one, cst.FunctionDef) and one is not function
        }
        inside = {name: [*self._of(one)] for name, one in helpers.items()}
        assert isinstance(function.body, cst.IndentedBlock)
        for path, statement in _simple(function.body, ()):
            for name in sorted(_reached(statement, helpers)):
                yield from (Marked(one.directive, one.statement, path, name) for one in inside[name])

    def _of(self, helper: cst.FunctionDef) -> Iterator[Marked[Directive]]:
        return self.block(helper.body, ()) if isinstance(helper.body, cst.IndentedBlock) else iter(())

    def parsed(self, comment: cst.Comment) -> Directive:
        self.read.append(comment)
        return parse_directive(comment.value, self.file, self._line(comment))

    def refuse(self, comments: Sequence[cst.Comment], found: str, cure: str) -> None:
        for comment in comments:
            if is_directive(comment.value):
                raise SourceLine(self.file, self._line(comment), comment.value).error(found, cure)

    def refuse_strays(self, function: cst.FunctionDef) -> None:
        """Nothing that is meant for us goes unread: inside brackets, above the function, in one defined inside."""
        found = _Comments()
        function.visit(found)
        strays = [one for one in found.comments if not any(one is read for read in self.read)]
        self.refuse(strays, "it stands above no statement of the kernel", "Put it right above the whole statement")

    def _line(self, comment: cst.Comment) -> int:
        start: CodePosition = self.lines[comment].start  # type: ignore[index]
        return int(start.line)


class _Comments(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.comments: list[cst.Comment] = []

    def visit_Comment(self, node: cst.Comment) -> None:
        self.comments.append(node)


def _blocks(statement: Statement) -> Iterator[cst.IndentedBlock]:
    """The blocks inside a statement, in the order of the text; not those of functions defined inside."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return
    part: object = statement
    while part is not None:
        body = getattr(part, "body", None)
        if isinstance(body, cst.IndentedBlock):
            yield body
        part = getattr(part, "orelse", None)


def _simple(block: cst.IndentedBlock, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Statement]]:
    """The statements of a block that have no blocks of their own, and those in the blocks of others."""
    for index, statement in enumerate(block.body):
        inner = list(_blocks(statement))
        if not inner:
            yield (*path, index), statement
        for each in inner:
            yield from _simple(each, (*path, index))


def _reached(node: cst.CSTNode, helpers: Mapping[str, cst.FunctionDef]) -> set[str]:
    """The functions that a node calls, and those that they call."""
    found, more = set[str](), _called(node) & helpers.keys()
    while more:
        found |= more
        more = set[str]().union(*(_called(helpers[one].body) & helpers.keys() for one in more)) - found
    return found


def _called(node: cst.CSTNode) -> set[str]:
    """The names of functions that are called."""
    return {call.func.value for call in calls_in(node) if isinstance(call.func, cst.Name)}


def _trailing(statement: Statement) -> list[cst.Comment]:
    comments: list[cst.Comment | None] = []
    if isinstance(statement, cst.SimpleStatementLine):
        comments.append(statement.trailing_whitespace.comment)
    for block in _blocks(statement):
        comments.append(block.header.comment)
    return [comment for comment in comments if comment is not None]
