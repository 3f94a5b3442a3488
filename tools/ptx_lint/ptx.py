"""PTX text as data: functions, instructions, basic blocks and the edges between them.

Only what a reader of memory order needs is understood: labels, branches, predicates, opcode parts and operand text. The
braces of inline assembly open scopes, so two blocks that both say `spin:` and `p` do not meet: names declared inside a
scope get the suffix `@<scope>`. What is not understood raises instead of being guessed.

SOURCE: PTX ISA 8.7, chapters 4 (syntax), 9.7.12 (control flow), 9.7.13 (barriers, fences).
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from msgspec import Struct

from overweave.errors import MachineError

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_HEADER = re.compile(r"\.(?:entry|func)\b[^;{]*?([\w$.]+)\s*\(([^)]*)\)([^{;]*)\{", re.S)
_PARAMETER = re.compile(r"([\w$]+)(?:\[\d+\])?\s*(?:,|$)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"', re.M)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_LABEL = re.compile(r"([A-Za-z_$%][\w$%]*)\s*:(?!:)")
_NAME = re.compile(r"[%$A-Za-z_][\w$%]*")
_REGISTER = re.compile(r"%?[A-Za-z_][\w$%]*(?:@\d+)?")
_NO_REGISTER = re.compile(r"\b0[xXfFdD][0-9A-Fa-f]+|%\w+\.[xyz]")
_INSTRUCTION = re.compile(r"(?:@(!?)\s*([\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_NO_RESULT = (
    *("st", "stmatrix", "red", "cp", "prefetch", "discard", "tensormap", "wgmma"),
    *("bar", "barrier", "fence", "membar", "bra", "call", "ret", "exit", "trap", "brkpt", "nanosleep"),
)
_ENDS = frozenset(("bra", "brx", "ret", "exit"))


class Predicate(NamedTuple):
    """`@p` or `@!p` in front of an instruction."""

    register: str
    is_negated: bool


class Instruction(Struct, frozen=True, dict=True):
    """One instruction. line: in the PTX text, from 1. source: `file.py:line` it was compiled from, or empty.

    parts: the opcode cut at its dots, `("ld", "acquire", "sys", "global", "u32")`. operands: as written, with scopes.
    """

    index: int
    line: int
    source: str
    predicate: Predicate | None
    parts: tuple[str, ...]
    operands: tuple[str, ...]

    @property
    def root(self) -> str:
        return self.parts[0]

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """The registers it writes."""
        if not self.operands or self.operands[0].startswith("["):
            return ()
        if self.root in _NO_RESULT and "red" not in self.parts[1:2]:  # `bar.red` does have a result
            return ()
        return registers(self.operands[0])

    @property
    def reads(self) -> tuple[str, ...]:
        """The registers it reads, addresses included, its predicate not."""
        rest = self.operands[1:] if self.writes else self.operands
        return tuple(name for operand in rest for name in registers(operand))


class Edge(Struct, frozen=True):
    """From one block to another. branch: the conditional branch that decides, if one does; taken: its outcome here."""

    source: int
    target: int
    branch: Instruction | None = None
    taken: bool = True


class Block(Struct, frozen=True):
    """Instructions that run one after another. An empty `edges` ends the function."""

    index: int
    instructions: tuple[Instruction, ...]
    edges: tuple[Edge, ...]


class Function(Struct, frozen=True):
    """A kernel. parameters: their PTX names, in order. threads: of its block, 0 where PTX does not tell."""

    name: str
    parameters: tuple[str, ...]
    threads: int
    instructions: tuple[Instruction, ...]
    blocks: tuple[Block, ...]


class _Statement(NamedTuple):
    text: str
    line: int
    source: str
    scope: int


class _Body(Struct):
    """What the scanner collects of one function. parents and names: of each scope; labels: name -> next statement.

    tables: name of a jump table -> its labels.
    """

    statements: list[_Statement]
    labels: dict[str, int]
    tables: dict[str, list[str]]
    parents: list[int]
    names: list[set[str]]


@lru_cache(maxsize=65536)
def registers(operand: str) -> tuple[str, ...]:
    """The registers and symbols that an operand mentions; neither numbers nor special registers like `%tid.x`."""
    return tuple(name for name in _REGISTER.findall(_NO_REGISTER.sub(" ", operand)) if name != "_")


def parse(text: str) -> tuple[Function, ...]:
    """The functions of a PTX module. Raises MachineError if this is no PTX or its control flow cannot be followed."""
    files = {int(number): path.rsplit("/", 1)[-1] for number, path in _FILE.findall(text)}
    bare = _COMMENT.sub(lambda match: "\n" * match.group().count("\n"), text)
    functions = []
    position = 0
    while header := _HEADER.search(bare, position):
        body, position = _scan(bare, header.end(), files)
        functions.append(_function(header, body))
    if not functions:
        raise MachineError("read PTX", "the text holds no function", "Give the PTX of a compiled kernel")
    return tuple(functions)


def _scan(text: str, position: int, files: dict[int, str]) -> tuple[_Body, int]:
    """Reads statements and labels up to the brace that closes the function."""
    body = _Body([], {}, {}, [-1], [set()])
    scope, source, label = 0, "", ""
    newlines = _Lines(text)
    while scope >= 0:
        position = _skip_space(text, position)
        if position >= len(text):
            raise MachineError("read PTX", "the text ends inside a function", "Give the whole PTX of a kernel")
        if location := _LOC.match(text, position):
            source = f"{files.get(int(location.group(1)), '?')}:{location.group(2)}"
            position = location.end()
        elif text[position] == "{":
            body.parents.append(scope)
            body.names.append(set())
            scope, position = len(body.parents) - 1, position + 1
        elif text[position] == "}":
            scope, position = body.parents[scope], position + 1
        elif named := _LABEL.match(text, position):
            label = named.group(1)
            body.names[scope].add(label)
            body.labels[_scoped(label, scope)] = len(body.statements)
            position = named.end()
        else:
            end = text.find(";", position)
            end = len(text) if end < 0 else end
            statement = _Statement(text[position:end].strip(), newlines.at(position), source, scope)
            position = end + 1
            if statement.text.startswith(".reg"):
                body.names[scope].update(_NAME.findall(re.sub(r"<\d+>", "", statement.text.split(None, 2)[2])))
            elif statement.text.startswith(".branchtargets"):
                body.tables[label] = _NAME.findall(statement.text[len(".branchtargets") :])
            elif statement.text and not statement.text.startswith("."):
                body.statements.append(statement)
    return body, position


class _Lines:
    """Line numbers of growing positions, counted once."""

    def __init__(self, text: str) -> None:
        self._text, self._position, self._line = text, 0, 1

    def at(self, position: int) -> int:
        self._line += self._text.count("\n", self._position, position)
        self._position = position
        return self._line


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and (text[position].isspace() or text[position] == ";"):
        position += 1
    return position


def _scoped(name: str, scope: int) -> str:
    return f"{name}@{scope}" if scope else name


def _function(header: re.Match[str], body: _Body) -> Function:
    name, parameters, attributes = header.groups()
    threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", attributes)
    count = 0
    if threads:
        count = int(threads.group(1)) * int(threads.group(2) or 1) * int(threads.group(3) or 1)
    instructions = tuple(_instruction(index, statement, body) for index, statement in enumerate(body.statements))
    blocks = _blocks(instructions, body)
    return Function(name, tuple(_PARAMETER.findall(parameters)), count, instructions, blocks)


def _instruction(index: int, statement: _Statement, body: _Body) -> Instruction:
    match = _INSTRUCTION.fullmatch(statement.text)
    if match is None:
        raise MachineError(
            f"read PTX line {statement.line}", f"`{statement.text[:60]}` is no instruction", "Report it with the kernel"
        )
    negated, register, opcode, operands = match.groups()

    def resolve(name: str) -> str:
        scope = statement.scope
        while scope > 0 and name not in body.names[scope]:
            scope = body.parents[scope]
        return _scoped(name, scope)

    predicate = Predicate(resolve(register), bool(negated)) if register else None
    resolved = _NAME.sub(lambda found: resolve(found.group()), operands)
    parts = tuple(opcode.split("."))
    return Instruction(index, statement.line, statement.source, predicate, parts, _split(resolved))


def _split(operands: str) -> tuple[str, ...]:
    """Cuts at the commas outside of brackets."""
    depth, start, cut = 0, 0, []
    for position, letter in enumerate(operands):
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            cut.append(operands[start:position].strip())
            start = position + 1
    last = operands[start:].strip()
    return (*cut, last) if last else tuple(cut)


def _blocks(instructions: tuple[Instruction, ...], body: _Body) -> tuple[Block, ...]:
    """Cuts before each label and after each branch; the last, empty block is where the function ends."""
    starts = {0, len(instructions), *body.labels.values()}
    starts.update(item.index + 1 for item in instructions if item.root in _ENDS)
    ordered = sorted(starts)
    block_at = {start: index for index, start in enumerate(ordered)}
    end = len(ordered) - 1
    targets = {name: [block_at[at]] for name, at in body.labels.items()}
    targets |= {table: [block_at[body.labels[name]] for name in names] for table, names in body.tables.items()}
    blocks = []
    for index, (start, stop) in enumerate(pairwise(ordered)):
        edges = _edges(index, instructions[stop - 1], targets, end)
        blocks.append(Block(index, instructions[start:stop], edges))
    return (*blocks, Block(end, (), ()))


def _edges(block: int, last: Instruction, targets: dict[str, list[int]], end: int) -> tuple[Edge, ...]:
    if last.root not in _ENDS:
        return (Edge(block, block + 1),)
    reached = [end]
    if last.root in ("bra", "brx"):
        name = last.operands[-1]
        if name not in targets:
            raise MachineError(f"follow PTX line {last.line}", f"{name} is nowhere", "Give the whole PTX of the kernel")
        reached = targets[name]
    if last.root == "brx":
        return tuple(Edge(block, target, last) for target in dict.fromkeys(reached))
    if last.predicate is None:
        return (Edge(block, reached[0]),)
    return Edge(block, reached[0], last), Edge(block, block + 1, last, taken=False)
