"""An author's kernel as source: its syntax tree, its directives, and the statement below each.

LibCST reads the file, so that comments and layout survive. Nothing of the file is run.
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
from overweave.compiler.frontend.source.language import Language, calls_in, language_of
from overweave.compiler.frontend.symbols.directives import (
    AccessDirective,
    AxisDirective,
    Directive,
    SourceLine,
    is_directive,
    parse_directive,
)
from overweave.compiler.frontend.symbols.polynomials import Polynomial, const_poly
from overweave.errors import InputError
from overweave.ir.text.files import printable
from overweave.untrusted import read_bytes

Statement = cst.BaseStatement
Kind = TypeVar("Kind", bound=Directive)
MAX_BYTES = 1 << 17
MAX_DEPTH = 100


class PlacedDirective(Struct, Generic[Kind], frozen=True):
    """A directive, the statement below it, and its path: the index in each block around it, outermost first.

    helper: the function that holds the directive, called by the kernel's statement at that path; empty for the kernel.
    """

    directive: Kind
    statement: Statement
    path: tuple[int, ...]
    helper: str = ""


class KernelSource(Struct, frozen=True):
    """A kernel's file and function. marks: its directives, in the order of the text. language: its names for `tl`.

    text: the file. module: its LibCST tree, with comments. file: its Python tree, with its imports. line: of the `def`.
    """

    path: Path
    text: str
    file: File
    module: cst.Module
    function: cst.FunctionDef
    marks: tuple[PlacedDirective[Directive], ...]
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
        return frozenset(one.name.value for one in all_params(self.function) if one.default is not None)

    @property
    def default_ints(self) -> dict[str, int]:
        """Parameter -> its default, where that is an integer."""
        defaults = ((one.name.value, one.default) for one in all_params(self.function))
        return {name: default.evaluated_value for name, default in defaults if isinstance(default, cst.Integer)}

    def default_of(self, name: str) -> ast.expr | None:
        """The default of a parameter."""
        arguments = self.file.functions[self.name].args
        pairs = zip(reversed([*arguments.posonlyargs, *arguments.args]), reversed(arguments.defaults), strict=False)
        return next((value for argument, value in pairs if argument.arg == name), None)

    @property
    def autotuned(self) -> frozenset[str]:
        """The constexprs that `@triton.autotune` sets: those of its configs, or all if the configs cannot be read."""
        for decorator in self.file.functions[self.name].decorator_list:
            function = decorator.func if isinstance(decorator, ast.Call) else decorator
            if isinstance(decorator, ast.Call) and ast.unparse(function).split(".")[-1] == "autotune":
                configs = next((one.value for one in decorator.keywords if one.arg == "configs"), None)
                configs = configs or (decorator.args[0] if decorator.args else None)
                if isinstance(configs, ast.Name):
                    configs = self.file.constant(configs.id)
                parts = [configs.elt] if isinstance(configs, ast.ListComp) else [None]
                each = configs.elts if isinstance(configs, ast.List | ast.Tuple) else parts
                dicts = [one.args[0] if isinstance(one, ast.Call) and one.args else None for one in each]
                nodes = [key for one in dicts for key in (one.keys if isinstance(one, ast.Dict) else [None])]
                keys = [key.value if isinstance(key, ast.Constant) else None for key in nodes]
                return self.constants if None in keys else frozenset(map(str, keys))
        return frozenset()

    @property
    def file_ints(self) -> dict[str, int]:
        """Integer constants of the file, name -> value, that no parameter shadows."""
        return {name: value for name, value in self.file.int_constants.items() if name not in self.parameters}

    @property
    def constants(self) -> frozenset[str]:
        """The parameters that are `tl.constexpr`."""
        return frozenset(one.name.value for one in all_params(self.function) if is_constant(one))

    def directives_of(self, kind: type[Kind]) -> list[PlacedDirective[Kind]]:
        """Return the directives of one kind."""
        return [cast("PlacedDirective[Kind]", mark) for mark in self.marks if isinstance(mark.directive, kind)]

    def loc(self) -> SourceLine:
        """Return the location of the `def`, for an error about the whole kernel."""
        return SourceLine(self.path.name, self.line, f"def {self.name}")


def all_params(function: cst.FunctionDef) -> tuple[cst.Param, ...]:
    """Return the parameters of a function in order."""
    params = function.params
    return (*params.posonly_params, *params.params, *params.kwonly_params)


def is_constant(param: cst.Param) -> bool:
    """Whether a parameter is annotated `constexpr`, under any name of `tl`."""
    annotation = param.annotation.annotation if param.annotation else None
    return (
        isinstance(annotation, cst.Attribute | cst.Name)
        and (annotation.attr.value if isinstance(annotation, cst.Attribute) else annotation.value) == "constexpr"
    )


def parameter_names(function: cst.FunctionDef) -> tuple[str, ...]:
    """Return the names of a function's parameters in order."""
    return tuple(one.name.value for one in all_params(function))


def _parse(data: bytes) -> tuple[str, ast.Module]:
    """Return the text of a file and its Python tree. Raises ValueError, and what Python's parser raises.

    This bounds size and nesting before LibCST parses the text, since LibCST has no limits of its own.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    text = data.decode()
    tree = ast.parse(text)
    level: list[ast.AST] = [tree]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests more than {MAX_DEPTH} deep")
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    return text, tree


def read_file(path: Path, name: str) -> bytes:
    """Read the file of the kernel `name`. Raises InputError if that fails, or the file has more than MAX_BYTES."""
    try:
        return read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise _unreadable(path, name, error) from None


def _unreadable(path: Path, name: str, error: BaseException) -> InputError:
    """Return the error for a file that cannot be read or parsed."""
    found = "it nests too deep" if isinstance(error, MemoryError) else printable(str(error).split("\n", maxsplit=1)[0])
    return InputError(f"read kernel {name[:80]} of {path.name}", found, "Give a Python file that can be parsed")


def read_source(path: Path, data: bytes, name: str, line: int | None = None) -> KernelSource:
    """Parse the kernel `name` of a file that holds `data`, with its directives. line: its first line at import.

    Raises InputError for a file that cannot be parsed or has no such function, DirectiveError for a directive that
    cannot be parsed or stands above no statement.
    """
    asked = f"read kernel {name[:80]} of {path.name}"
    try:
        text, tree = _parse(data)
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
    walker = _DirectiveCollector(path.name, lines)
    marks = (*walker.block(body, ()), *walker.helper_marks(function, wrapper.module))
    walker.refuse_strays(function)
    language = language_of(wrapper.module)
    source = KernelSource(
        path, text, File(path, tree, language), wrapper.module, function, marks, lines[function].start.line, language
    )
    return replace(source, marks=tuple(_with_file_constants(mark, source.file_ints) for mark in marks))


def _with_file_constants(mark: PlacedDirective[Directive], constants: Mapping[str, int]) -> PlacedDirective[Directive]:
    """Replace the names of constants of the file in a directive by their values."""

    def fold(expression: Polynomial) -> Polynomial:
        return expression.substitute(lambda atom: const_poly(constants[atom]) if atom in constants else None)  # type: ignore[index]

    directive = mark.directive
    if isinstance(directive, AxisDirective):
        return replace(mark, directive=replace(directive, extent=fold(directive.extent), block=fold(directive.block)))
    if isinstance(directive, AccessDirective):
        return replace(mark, directive=replace(directive, dims=tuple(map(fold, directive.dims))))
    return mark


class _DirectiveCollector:
    """Collects the directives of a function. parsed_comments: those that became directives."""

    def __init__(self, file: str, lines: object) -> None:
        self.file, self.lines = file, lines
        self.parsed_comments: list[cst.Comment] = []

    def block(self, block: cst.IndentedBlock, path: tuple[int, ...]) -> Iterator[PlacedDirective[Directive]]:
        """Yield the directives of a block and of the blocks inside it. Raises DirectiveError for a misplaced one."""
        for index, statement in enumerate(block.body):
            statement_path = (*path, index)
            for line in statement.leading_lines if hasattr(statement, "leading_lines") else ():
                if line.comment and is_directive(line.comment.value):
                    yield PlacedDirective(self.parse(line.comment), statement, statement_path)
            self.refuse(
                _trailing(statement), "it follows a statement on its line", "Give it a line of its own, above it"
            )
            for inner in _blocks(statement):
                yield from self.block(inner, statement_path)
        footer = [line.comment for line in block.footer if line.comment]
        self.refuse(footer, "no statement follows it in its block", "Put it above the statement that it speaks of")

    def helper_marks(self, function: cst.FunctionDef, module: cst.Module) -> Iterator[PlacedDirective[Directive]]:
        """Yield the directives of functions that a kernel calls, with the path of the statement that calls them."""
        helpers = {
            one.name.value: one for one in module.body if isinstance(one, cst.FunctionDef) and one is not function
        }
        marks_of_helper = {name: [*self._marks_of_helper(one)] for name, one in helpers.items()}
        assert isinstance(function.body, cst.IndentedBlock)
        for path, statement in _leaf_statements(function.body, ()):
            for name in sorted(_transitive_callees(statement, helpers)):
                yield from (PlacedDirective(one.directive, one.statement, path, name) for one in marks_of_helper[name])

    def _marks_of_helper(self, helper: cst.FunctionDef) -> Iterator[PlacedDirective[Directive]]:
        return self.block(helper.body, ()) if isinstance(helper.body, cst.IndentedBlock) else iter(())

    def parse(self, comment: cst.Comment) -> Directive:
        self.parsed_comments.append(comment)
        return parse_directive(comment.value, self.file, self._line(comment))

    def refuse(self, comments: Sequence[cst.Comment], found: str, cure: str) -> None:
        """Raise DirectiveError if one of the comments is a directive."""
        for comment in comments:
            if is_directive(comment.value):
                raise SourceLine(self.file, self._line(comment), comment.value).error(found, cure)

    def refuse_strays(self, function: cst.FunctionDef) -> None:
        """Raise for a directive above no statement of the kernel: inside brackets, or in a nested function."""
        visitor = _Comments()
        function.visit(visitor)
        strays = [one for one in visitor.comments if not any(one is parsed for parsed in self.parsed_comments)]
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
    """Yield the blocks of a compound statement in the order of the text; none of a nested function or class."""
    if isinstance(statement, cst.FunctionDef | cst.ClassDef):
        return
    part: object = statement
    while part is not None:
        body = getattr(part, "body", None)
        if isinstance(body, cst.IndentedBlock):
            yield body
        part = getattr(part, "orelse", None)


def _leaf_statements(block: cst.IndentedBlock, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Statement]]:
    """Yield (path, statement) of all statements without blocks of their own, at any depth."""
    for index, statement in enumerate(block.body):
        inner = list(_blocks(statement))
        if not inner:
            yield (*path, index), statement
        for each in inner:
            yield from _leaf_statements(each, (*path, index))


def _transitive_callees(node: cst.CSTNode, helpers: Mapping[str, cst.FunctionDef]) -> set[str]:
    """Return the helpers that a node calls, directly or through other helpers."""
    callees, new = set[str](), _callee_names(node) & helpers.keys()
    while new:
        callees |= new
        new = set[str]().union(*(_callee_names(helpers[one].body) & helpers.keys() for one in new)) - callees
    return callees


def _callee_names(node: cst.CSTNode) -> set[str]:
    return {call.func.value for call in calls_in(node) if isinstance(call.func, cst.Name)}


def _trailing(statement: Statement) -> list[cst.Comment]:
    """Return the comments at the end of a statement's line, or of its block's header."""
    comments: list[cst.Comment | None] = []
    if isinstance(statement, cst.SimpleStatementLine):
        comments.append(statement.trailing_whitespace.comment)
    for block in _blocks(statement):
        comments.append(block.header.comment)
    return [comment for comment in comments if comment is not None]
