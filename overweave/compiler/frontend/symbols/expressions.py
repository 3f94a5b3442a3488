"""Integer expressions of directives: names, numbers, `+`, `-`, `*`, `//`, `cdiv(a, b)`, `tensor.shape[0]`, `blocks(S)`,
parentheses.

The text of a comment is parsed here and never evaluated by Python: a `Polynomial` is data, and generated code gets
text that is written from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from overweave.compiler.frontend.symbols.polynomials import Polynomial, Quotient, TooLarge, atom_poly, floor_div, number

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
    """Raised for a text that is not an integer expression. The message says why."""


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
    """Parse `[-] term {(+ | -) term}`. Return the expression and the tokens behind it."""
    negative = tokens[:1] == ["-"]
    total, rest = _term(tokens[1:] if negative else tokens)
    total = _check_size(number(0) - total) if negative else total
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
        return _divide(over + by - number(1), by), _expect(rest, ")")
    if first.isdecimal():
        return _check_size(number(int(first))), rest
    if any(form.fullmatch(first) for form in (IDENTIFIER, SHAPE, BLOCKS)):
        return atom_poly(first), rest
    raise ExpressionError(f"cannot read {first!r} there")


def _expect(tokens: list[str], expected: str) -> list[str]:
    """Drop one token. Raises ExpressionError if it is another."""
    if tokens[:1] != [expected]:
        raise ExpressionError("a parenthesis is not closed" if expected == ")" else f"{expected!r} is missing")
    return tokens[1:]


def _divide(over: Polynomial, by: Polynomial) -> Polynomial:
    if not can_be_positive(by):
        raise ExpressionError(f"it divides by {by}")
    return _check_size(floor_div(over, by))


def _check_size(expression: Polynomial) -> Polynomial:
    """Return the expression. Raises ExpressionError for one with too many terms or too large factors."""
    nested = [inner for atom in expression.atoms if isinstance(atom, Quotient) for inner in (atom.over, atom.by)]
    for polynomial in (expression, *nested):
        if len(polynomial.terms) > MOST_TERMS or any(abs(factor) > LARGEST for _, factor in polynomial.terms):
            raise ExpressionError("it is too large")
    return expression
