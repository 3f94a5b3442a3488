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
from collections.abc import Callable
from difflib import SequenceMatcher

from msgspec import Struct

from overweave.compiler.frontend.symbols.expressions import IDENTIFIER, ExpressionError, parse_expression
from overweave.compiler.frontend.symbols.polynomials import Polynomial
from overweave.errors import DirectiveError

MARK = "@overweave."
RESERVED = "overweave"
LONGEST_NAME, MOST_CHARACTERS = 24, 1000
MIN_SIMILARITY = 0.8  # to RESERVED, from which on a word is a misspelling of it: two letters lost, swapped or changed
_COMMENT = re.compile(r"#\s*@overweave\.([A-Za-z_]*)(?:\s+(.*))?", re.ASCII)
_UNMARKED = re.compile(r"[#\s@]*overweave\s*\.\s*(axis|tile_id|dispatch|pid_map|load|store|stream)\b", re.ASCII)
_MARKED = re.compile(r"#[\s#]*@\s*(\w+)", re.ASCII)
_COMMA = re.compile(r",(?![^()]*\))", re.ASCII)  # between dimensions: a comma outside parentheses
_ACCESS = re.compile(r"([A-Za-z_]\w*)\s*=\s*([A-Za-z_]\w*)\s*\[(.*)\]", re.ASCII)
_AXIS = re.compile(r"([A-Za-z_]\w*)\s*(?:=\s*(.*?))?(?:\s+block\s*=\s*(.*?))?(\s+streamed)?", re.ASCII)
FORM = "; docs/directives.md shows the form"


class SourceLine(Struct, frozen=True):
    """A line of an author's file: where a directive stands."""

    file: str
    line: int
    text: str

    def error(self, found: str, cure: str) -> DirectiveError:
        """Return the error that names this line."""
        return DirectiveError((self.file, self.line, self.text[:120]), found[:300], cure)


class AxisDirective(Struct, frozen=True):
    """`axis NAME=EXTENT block=BLOCK [streamed]`."""

    place: SourceLine
    name: str
    extent: Polynomial
    block: Polynomial
    is_streamed: bool


class TileIdDirective(Struct, frozen=True):
    """`tile_id [persistent]`."""

    place: SourceLine
    is_persistent: bool


class DispatchDirective(Struct, frozen=True):
    """`dispatch begin` or `dispatch end`."""

    place: SourceLine
    begins: bool


class PidMapDirective(Struct, frozen=True):
    """`pid_map AXIS=variable ...`."""

    place: SourceLine
    variables: tuple[tuple[str, str], ...]


class AccessDirective(Struct, frozen=True):
    """`load TENSOR=parameter[DIM, ...]` or `store ...`."""

    place: SourceLine
    is_store: bool
    tensor: str
    parameter: str
    dims: tuple[Polynomial, ...]


class StreamDirective(Struct, frozen=True):
    """`stream AXIS`."""

    place: SourceLine
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
    place = SourceLine(file, line, "".join(one if one.isprintable() else "?" for one in comment.strip()))
    if len(comment) > MOST_CHARACTERS:
        found = f"{len(comment)} characters"
        raise place.error(found, f"Say it in at most {MOST_CHARACTERS}")
    match = _COMMENT.fullmatch(comment.strip())
    if match is None or not comment.isascii():
        raise place.error("no directive has this form", f"Write `# {MARK}WORD ...`" + FORM)
    word, rest = match[1], (match[2] or "").strip()
    if word not in _PARSERS:
        raise place.error(f"no directive is called {word!r}", f"Use one of {', '.join(_PARSERS)}")
    return _PARSERS[word](place, rest)


def _axis(place: SourceLine, rest: str) -> AxisDirective:
    """Parse `NAME[=EXTENT] block=SIZE [streamed]`."""
    match = _AXIS.fullmatch(rest)
    if match is None:
        raise place.error("cannot read it", "Write `axis NAME block=SIZE`" + FORM)
    if match[3] is None:
        raise place.error("the tile size is missing", "Add `block=SIZE`, the elements of a tile along this axis")
    name = _name(place, match[1])
    return AxisDirective(
        place, name, _expression(place, match[2] or name), _expression(place, match[3]), match[4] is not None
    )


def _tile_id(place: SourceLine, rest: str) -> TileIdDirective:
    if rest not in ("", "persistent"):
        raise place.error(f"{rest!r} says nothing", "Write `tile_id` or `tile_id persistent`")
    return TileIdDirective(place, rest == "persistent")


def _dispatch(place: SourceLine, rest: str) -> DispatchDirective:
    if rest not in ("begin", "end"):
        raise place.error(f"{rest!r} says nothing", "Write `dispatch begin` or `dispatch end`")
    return DispatchDirective(place, rest == "begin")


def _pid_map(place: SourceLine, rest: str) -> PidMapDirective:
    """Parse `AXIS=variable ...`."""
    pairs: list[tuple[str, str]] = []
    for word in rest.split():
        axis, equals, variable = word.partition("=")
        if not (equals and IDENTIFIER.fullmatch(axis)):
            raise place.error(f"cannot read {word!r}", "Write `pid_map AXIS=variable`, without blanks around `=`")
        if not IDENTIFIER.fullmatch(variable):
            found = (
                f"the block of {axis} is {variable!r}, which is no variable: it may not be affine in the tile's number"
            )
            raise place.error(found, "Assign it to a variable of its own inside the dispatch region")
        pairs.append((axis, variable))
    if not pairs or len({axis for axis, _ in pairs}) != len(pairs):
        raise place.error("every axis should stand there once", "Write `pid_map AXIS=variable`")
    if len({variable for _, variable in pairs}) != len(pairs):
        raise place.error("two axes have one variable", "Give the block of each axis a variable of its own")
    return PidMapDirective(place, tuple(pairs))


def _access(place: SourceLine, rest: str, is_store: bool) -> AccessDirective:
    """Parse `TENSOR=parameter[DIM, ...]`."""
    match = _ACCESS.fullmatch(rest)
    if match is None:
        raise place.error("cannot read it", "Write `TENSOR=parameter[DIM, DIM]`" + FORM)
    dims = tuple(_expression(place, dim) for dim in _COMMA.split(match[3]))
    return AccessDirective(place, is_store, _name(place, match[1]), match[2], dims)


def _stream(place: SourceLine, rest: str) -> StreamDirective:
    return StreamDirective(place, _name(place, rest))


def _name(place: SourceLine, name: str) -> str:
    """Return the name of an axis or a tensor. Raises DirectiveError if it cannot be one."""
    if not IDENTIFIER.fullmatch(name) or len(name) > LONGEST_NAME or name.startswith(RESERVED):
        found = f"{name[:40]!r} is no name for an axis or a tensor"
        raise place.error(found, f"Use up to {LONGEST_NAME} letters, digits and _, not beginning with {RESERVED}")
    return name


def _expression(place: SourceLine, text: str) -> Polynomial:
    """Parse an integer expression. Raises DirectiveError."""
    try:
        return parse_expression(text)
    except ExpressionError as error:
        cure = "Use names, whole numbers, +, -, *, //, cdiv(a, b), tensor.shape[0], blocks(AXIS) and parentheses"
        raise place.error(f"{text.strip()[:40]!r} is no integer expression: {error}", cure) from None


_PARSERS: dict[str, Callable[[SourceLine, str], Directive]] = {
    "axis": _axis,
    "tile_id": _tile_id,
    "dispatch": _dispatch,
    "pid_map": _pid_map,
    "load": lambda place, rest: _access(place, rest, is_store=False),
    "store": lambda place, rest: _access(place, rest, is_store=True),
    "stream": _stream,
}
