"""The directives of an author's kernel: comments that name its tiles, one to a line, above the statement they speak of.

    # @overweave.axis M block=BLOCK_M              an axis of M elements; `axis Z=B * H block=1` names its extent
    # @overweave.axis S block=BLOCK_S streamed     an axis that a loop inside every tile walks
    # @overweave.tile_id                           above `pid = tl.program_id(0)`: one tile per program
    # @overweave.tile_id persistent                above the loop over tiles
    # @overweave.dispatch begin / dispatch end     around the statements that turn the tile's number into its blocks
    # @overweave.pid_map M=pid_m N=pid_n           which variable is the block of which axis
    # @overweave.load A=a_ptr[M, K]                above a load: tensor A, the parameter that holds it, its dimensions
    # @overweave.store C=c_ptr[M, N]               above a store
    # @overweave.stream S                          above the loop that walks a streamed axis

A dimension is an axis, `2 * M + 1` blocks along one, `blocks(M)`, or an extent of its own. This file parses comments
into data.
SOURCE: the annotations of AutoOverlap, listing 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import SequenceMatcher

from msgspec import Struct

from overweave.compiler.frontend.symbols.polynomials import (
    Polynomial,
    Quotient,
    TooLarge,
    atom_poly,
    const_poly,
    floor_div,
)
from overweave.errors import DirectiveError

# Integer expressions of directives: names, numbers, `+`, `-`, `*`, `//`, `cdiv(a, b)`, `tensor.shape[0]`, `blocks(S)`,
# parentheses.
#
# The text of a comment is parsed here and never evaluated by Python: a `Polynomial` is data, and generated code gets
# text that is written from it.

MOST_CHARACTERS, MOST_TOKENS, MOST_TERMS = 200, 60, 16
LARGEST = 2**31 - 1
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}", re.ASCII)
SHAPE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,39})\.shape\[([0-7])\]", re.ASCII)
BLOCKS = re.compile(r"blocks\(([A-Za-z_][A-Za-z0-9_]{0,39})\)", re.ASCII)
CEIL_DIV = "cdiv"
_TOKEN = re.compile(
    r"\s*(blocks\([A-Za-z_][A-Za-z0-9_]{0,39}\)|[A-Za-z_][A-Za-z0-9_]{0,39}(?:\.shape\[[0-7]\])?|[0-9]{1,10}"
    r"|//|[-+*(),])",
    re.ASCII,
)  # fmt: skip


class ExpressionError(Exception):
    """Raised for a text that is not an integer expression; the message says why."""


def affine_in(expression: Polynomial, axes: Iterable[str]) -> tuple[str | None, int, int]:
    """Return (axis, scale, shift) of `scale * axis + shift`, or of `scale * blocks(axis) + shift`; (None, 0, 0) for an
    expression without axes.

    Raises ExpressionError for any other expression over an axis.
    """
    names = {name: axis for axis in axes for name in (axis, f"blocks({axis})")}
    used = sorted(expression.names & names.keys())
    if not used:
        return None, 0, 0
    scale = shift = 0
    for atoms, factor in expression.terms:
        if atoms == (used[0],):
            scale = factor
        elif not atoms:
            shift = factor
        else:
            raise ExpressionError(f"{expression} is not affine in one axis with constant numbers")
    return names[used[0]], scale, shift


def is_of_blocks(expression: Polynomial) -> bool:
    """Whether a dimension is of `blocks(AXIS)`: it has one entry for each block of the axis."""
    return any(BLOCKS.fullmatch(name) for name in expression.names)


def can_be_positive(expression: Polynomial) -> bool:
    """Whether the expression can be above 0 if every name is at least 1."""
    return any(factor > 0 for _, factor in expression.terms)


def parse_expression(text: str) -> Polynomial:
    """Parse an integer expression. Raises ExpressionError."""
    if len(text) > MOST_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters, more than {MOST_CHARACTERS}")
    tokens = _tokens(text)
    try:
        parsed, rest = _sum(tokens)
    except TooLarge:
        raise ExpressionError("it is too large") from None
    if rest:
        raise ExpressionError(f"cannot read {rest[0]!r} there")
    return parsed


def _tokens(text: str) -> list[str]:
    """Split a text into names, numbers and signs."""
    tokens: list[str] = []
    at = 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) >= MOST_TOKENS:
            raise ExpressionError(f"cannot read {text[at:].strip()[:20]!r}")
        tokens.append(match[1])
        at = match.end()
    return tokens


def _sum(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    """Parse `[-] term {(+ | -) term}`. Return the expression and the remaining tokens."""
    negative = tokens[:1] == ["-"]
    total, rest = _term(tokens[1:] if negative else tokens)
    total = _check_size(const_poly(0) - total) if negative else total
    while rest[:1] in (["+"], ["-"]):
        sign = rest[0]
        part, rest = _term(rest[1:])
        total = _check_size(total + part if sign == "+" else total - part)
    return total, rest


def _term(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    """Parse `factor {(* | //) factor}`."""
    total, rest = _factor(tokens)
    while rest[:1] in (["*"], ["//"]):
        sign = rest[0]
        part, rest = _factor(rest[1:])
        total = _check_size(total * part) if sign == "*" else _divide(total, part)
    return total, rest


def _factor(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    """Parse a name, a number, `(sum)` or `cdiv(sum, sum)`."""
    if not tokens:
        raise ExpressionError("it ends where a name or a number should follow")
    first, rest = tokens[0], tokens[1:]
    if first == "(":
        inner, rest = _sum(rest)
        return inner, _expect(rest, ")")
    if first == CEIL_DIV and rest[:1] == ["("]:
        over, rest = _sum(rest[1:])
        by, rest = _sum(_expect(rest, ","))
        return _divide(over + by - const_poly(1), by), _expect(rest, ")")
    if first.isdecimal():
        return _check_size(const_poly(int(first))), rest
    if any(form.fullmatch(first) for form in (IDENTIFIER, SHAPE, BLOCKS)):
        return atom_poly(first), rest
    raise ExpressionError(f"cannot read {first!r} there")


def _expect(tokens: list[str], expected: str) -> list[str]:
    """Drop the expected token and return the rest. Raises ExpressionError if another stands there."""
    if tokens[:1] != [expected]:
        raise ExpressionError("a parenthesis is not closed" if expected == ")" else f"{expected!r} is missing")
    return tokens[1:]


def _divide(over: Polynomial, by: Polynomial) -> Polynomial:
    if not can_be_positive(by):
        raise ExpressionError(f"it divides by {by}")
    return _check_size(floor_div(over, by))


def _check_size(expression: Polynomial) -> Polynomial:
    """Return the expression unchanged. Raises ExpressionError if it has too many terms or too large coefficients."""
    nested = [inner for atom in expression.atoms if isinstance(atom, Quotient) for inner in (atom.over, atom.by)]
    for polynomial in (expression, *nested):
        if len(polynomial.terms) > MOST_TERMS or any(abs(factor) > LARGEST for _, factor in polynomial.terms):
            raise ExpressionError("it is too large")
    return expression


MARK = "@overweave."
RESERVED = "overweave"
LONGEST_NAME, LONGEST_DIRECTIVE = 24, 1000
MIN_SIMILARITY = 0.8  # to RESERVED, from which on a word is a misspelling of it: two letters lost, swapped or changed
_COMMENT = re.compile(r"#\s*@overweave\.([A-Za-z_]*)(?:\s+(.*))?", re.ASCII)
_UNMARKED = re.compile(r"[#\s@]*overweave\s*\.\s*(axis|tile_id|dispatch|pid_map|load|store|stream)\b", re.ASCII)
_MARKED = re.compile(r"#[\s#]*@\s*(\w+)", re.ASCII)
_COMMA = re.compile(r",(?![^()]*\))", re.ASCII)  # between dimensions: a comma outside parentheses
_ACCESS = re.compile(r"([A-Za-z_]\w*)\s*=\s*([A-Za-z_]\w*)\s*\[(.*)\]", re.ASCII)
_AXIS = re.compile(r"([A-Za-z_]\w*)\s*(?:=\s*(.*?))?(?:\s+block\s*=\s*(.*?))?(\s+streamed)?", re.ASCII)
FORM = "; docs/directives.md shows the form"


class SourceLine(Struct, frozen=True):
    """The source location of a directive: a line of the author's file, with its text."""

    file: str
    line: int
    text: str

    def error(self, found: str, cure: str) -> DirectiveError:
        """Return the error that names this line."""
        return DirectiveError((self.file, self.line, self.text[:120]), found[:300], cure)


class AxisDirective(Struct, frozen=True):
    """`axis NAME=EXTENT block=BLOCK [streamed]`."""

    loc: SourceLine
    name: str
    extent: Polynomial
    block: Polynomial
    is_streamed: bool


class TileIdDirective(Struct, frozen=True):
    """`tile_id [persistent]`."""

    loc: SourceLine
    is_persistent: bool


class DispatchDirective(Struct, frozen=True):
    """`dispatch begin` or `dispatch end`."""

    loc: SourceLine
    begins: bool


class PidMapDirective(Struct, frozen=True):
    """`pid_map AXIS=variable ...`."""

    loc: SourceLine
    variables: tuple[tuple[str, str], ...]


class AccessDirective(Struct, frozen=True):
    """`load TENSOR=parameter[DIM, ...]` or `store ...`."""

    loc: SourceLine
    is_store: bool
    tensor: str
    parameter: str
    dims: tuple[Polynomial, ...]


class StreamDirective(Struct, frozen=True):
    """`stream AXIS`."""

    loc: SourceLine
    axis: str


Directive = AxisDirective | TileIdDirective | DispatchDirective | PidMapDirective | AccessDirective | StreamDirective


def is_directive(comment: str) -> bool:
    """Whether a comment is a directive, also if `@overweave.` is misspelled. Prose that mentions overweave is not."""
    if MARK in comment or _UNMARKED.match(comment):
        return True
    marked = _MARKED.match(comment)
    return marked is not None and SequenceMatcher(None, marked[1].lower(), RESERVED).ratio() >= MIN_SIMILARITY


def parse_directive(comment: str, file: str, line: int) -> Directive:
    """Parse a directive. Raises DirectiveError."""
    loc = SourceLine(file, line, "".join(one if one.isprintable() else "?" for one in comment.strip()))
    if len(comment) > LONGEST_DIRECTIVE:
        found = f"{len(comment)} characters"
        raise loc.error(found, f"Say it in at most {LONGEST_DIRECTIVE}")
    match = _COMMENT.fullmatch(comment.strip())
    if match is None or not comment.isascii():
        raise loc.error("no directive has this form", f"Write `# {MARK}WORD ...`" + FORM)
    word, rest = match[1], (match[2] or "").strip()
    if word not in _PARSERS:
        raise loc.error(f"no directive is called {word!r}", f"Use one of {', '.join(_PARSERS)}")
    return _PARSERS[word](loc, rest)


def _axis(loc: SourceLine, rest: str) -> AxisDirective:
    """Parse `NAME[=EXTENT] block=SIZE [streamed]`. Raises DirectiveError."""
    match = _AXIS.fullmatch(rest)
    if match is None:
        raise loc.error("cannot read it", "Write `axis NAME block=SIZE`" + FORM)
    if match[3] is None:
        raise loc.error("the tile size is missing", "Add `block=SIZE`, the elements of a tile along this axis")
    name = _name(loc, match[1])
    return AxisDirective(
        loc, name, _expression(loc, match[2] or name), _expression(loc, match[3]), match[4] is not None
    )


def _tile_id(loc: SourceLine, rest: str) -> TileIdDirective:
    if rest not in ("", "persistent"):
        raise loc.error(f"{rest!r} says nothing", "Write `tile_id` or `tile_id persistent`")
    return TileIdDirective(loc, rest == "persistent")


def _dispatch(loc: SourceLine, rest: str) -> DispatchDirective:
    if rest not in ("begin", "end"):
        raise loc.error(f"{rest!r} says nothing", "Write `dispatch begin` or `dispatch end`")
    return DispatchDirective(loc, rest == "begin")


def _pid_map(loc: SourceLine, rest: str) -> PidMapDirective:
    """Parse `AXIS=variable ...`. Raises DirectiveError."""
    pairs: list[tuple[str, str]] = []
    for word in rest.split():
        axis, equals, variable = word.partition("=")
        if not (equals and IDENTIFIER.fullmatch(axis)):
            raise loc.error(f"cannot read {word!r}", "Write `pid_map AXIS=variable`, without blanks around `=`")
        if not IDENTIFIER.fullmatch(variable):
            found = (
                f"the block of {axis} is {variable!r}, which is no variable: it may not be affine in the tile's number"
            )
            raise loc.error(found, "Assign it to a variable of its own inside the dispatch region")
        pairs.append((axis, variable))
    if not pairs or len({axis for axis, _ in pairs}) != len(pairs):
        raise loc.error("every axis should stand there once", "Write `pid_map AXIS=variable`")
    if len({variable for _, variable in pairs}) != len(pairs):
        raise loc.error("two axes have one variable", "Give the block of each axis a variable of its own")
    return PidMapDirective(loc, tuple(pairs))


def _access(loc: SourceLine, rest: str, is_store: bool) -> AccessDirective:
    """Parse `TENSOR=parameter[DIM, ...]`. Raises DirectiveError."""
    match = _ACCESS.fullmatch(rest)
    if match is None:
        raise loc.error("cannot read it", "Write `TENSOR=parameter[DIM, DIM]`" + FORM)
    dims = tuple(_expression(loc, dim) for dim in _COMMA.split(match[3]))
    return AccessDirective(loc, is_store, _name(loc, match[1]), match[2], dims)


def _stream(loc: SourceLine, rest: str) -> StreamDirective:
    return StreamDirective(loc, _name(loc, rest))


def _name(loc: SourceLine, name: str) -> str:
    """Return `name` if it can name an axis or a tensor. Raises DirectiveError if not."""
    if not IDENTIFIER.fullmatch(name) or len(name) > LONGEST_NAME or name.startswith(RESERVED):
        found = f"{name[:40]!r} is no name for an axis or a tensor"
        raise loc.error(found, f"Use up to {LONGEST_NAME} letters, digits and _, not beginning with {RESERVED}")
    return name


def _expression(loc: SourceLine, text: str) -> Polynomial:
    """Parse an integer expression. Raises DirectiveError."""
    try:
        return parse_expression(text)
    except ExpressionError as error:
        cure = "Use names, whole numbers, +, -, *, //, cdiv(a, b), tensor.shape[0], blocks(AXIS) and parentheses"
        raise loc.error(f"{text.strip()[:40]!r} is no integer expression: {error}", cure) from None


_PARSERS: dict[str, Callable[[SourceLine, str], Directive]] = {
    "axis": _axis,
    "tile_id": _tile_id,
    "dispatch": _dispatch,
    "pid_map": _pid_map,
    "load": lambda loc, rest: _access(loc, rest, is_store=False),
    "store": lambda loc, rest: _access(loc, rest, is_store=True),
    "stream": _stream,
}
