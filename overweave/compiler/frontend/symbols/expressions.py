"""Integer expressions of directives: names, numbers, `+`, `-`, `*`, `//`, `cdiv(a, b)`, `tensor.shape[0]`, `blocks(S)`,
parentheses.

What a comment says is parsed here, never evaluated by Python: a `Polynomial` is data, and the text that reaches
generated code is written anew from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from overweave.compiler.frontend.symbols.polynomials import Polynomial, Quotient, TooLarge, number, one, quotient

MOST_CHARACTERS, MOST_TOKENS, MOST_TERMS = 200, 60, 16
LARGEST = 2**31 - 1
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}", re.ASCII)
SHAPE = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,39})\.shape\[([0-7])\]", re.ASCII)
BLOCKS = re.compile(r"blocks\(([A-Za-z_][A-Za-z0-9_]{0,39})\)", re.ASCII)
ROUNDED_UP = "cdiv"
_TOKEN = re.compile(
    r"\s*(blocks\([A-Za-z_][A-Za-z0-9_]{0,39}\)|[A-Za-z_][A-Za-z0-9_]{0,39}(?:\.shape\[[0-7]\])?|[0-9]{1,10}"
    r"|//|[-+*(),])",
    re.ASCII,
)  # fmt: skip


class ExpressionError(Exception):
    """A text that is no integer expression. The message says why."""


def affine_in(said: Polynomial, axes: Iterable[str]) -> tuple[str | None, int, int]:
    """(axis, scale, shift) of `scale * axis + shift` over one of the axes, or of its `blocks(axis)`; or (None, 0, 0) if
    none is named.

    Raises ExpressionError for anything else over an axis.
    """
    names = {name: axis for axis in axes for name in (axis, f"blocks({axis})")}
    used = sorted(said.names & names.keys())
    if not used:
        return None, 0, 0
    scale = shift = 0
    for atoms, factor in said.terms:
        if atoms == (used[0],):
            scale = factor
        elif not atoms:
            shift = factor
        else:
            raise ExpressionError(f"{said} is not affine in one axis with constant numbers")
    return names[used[0]], scale, shift


def is_of_blocks(said: Polynomial) -> bool:
    """Whether a dimension has one entry for each block of its axis."""
    return any(BLOCKS.fullmatch(name) for name in said.names)


def can_be_positive(said: Polynomial) -> bool:
    """Whether names that are numbers of at least 1 can make it more than 0."""
    return any(factor > 0 for _, factor in said.terms)


def parse_expression(text: str) -> Polynomial:
    """The expression that `text` spells. Raises ExpressionError."""
    if len(text) > MOST_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters, more than {MOST_CHARACTERS}")
    tokens = _tokens(text)
    try:
        made, rest = _sum(tokens)
    except TooLarge:
        raise ExpressionError("it is too large") from None
    if rest:
        raise ExpressionError(f"cannot read {rest[0]!r} there")
    return made


def _tokens(text: str) -> list[str]:
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
    negative = tokens[:1] == ["-"]
    total, rest = _term(tokens[1:] if negative else tokens)
    total = _small(number(0) - total) if negative else total
    while rest[:1] in (["+"], ["-"]):
        sign = rest[0]
        part, rest = _term(rest[1:])
        total = _small(total + part if sign == "+" else total - part)
    return total, rest


def _term(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    total, rest = _factor(tokens)
    while rest[:1] in (["*"], ["//"]):
        sign = rest[0]
        part, rest = _factor(rest[1:])
        total = _small(total * part) if sign == "*" else _divided(total, part)
    return total, rest


def _factor(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    if not tokens:
        raise ExpressionError("it ends where a name or a number should follow")
    first, rest = tokens[0], tokens[1:]
    if first == "(":
        inner, rest = _sum(rest)
        return inner, _after(rest, ")")
    if first == ROUNDED_UP and rest[:1] == ["("]:
        over, rest = _sum(rest[1:])
        by, rest = _sum(_after(rest, ","))
        return _divided(over + by - number(1), by), _after(rest, ")")
    if first.isdecimal():
        return _small(number(int(first))), rest
    if any(form.fullmatch(first) for form in (IDENTIFIER, SHAPE, BLOCKS)):
        return one(first), rest
    raise ExpressionError(f"cannot read {first!r} there")


def _after(tokens: list[str], wanted: str) -> list[str]:
    if tokens[:1] != [wanted]:
        raise ExpressionError("a parenthesis is not closed" if wanted == ")" else f"{wanted!r} is missing")
    return tokens[1:]


def _divided(over: Polynomial, by: Polynomial) -> Polynomial:
    if not can_be_positive(by):
        raise ExpressionError(f"it divides by {by}")
    return _small(quotient(over, by))


def _small(made: Polynomial) -> Polynomial:
    inside = [inner for atom in made.atoms if isinstance(atom, Quotient) for inner in (atom.over, atom.by)]
    for each in (made, *inside):
        if len(each.terms) > MOST_TERMS or any(abs(factor) > LARGEST for _, factor in each.terms):
            raise ExpressionError("it is too large")
    return made
