"""Integer expressions of directives: names, numbers, `+`, `-`, `*` and parentheses, and nothing else.

What a comment says is parsed here, never evaluated by Python: a `Polynomial` is data, and the text that reaches
generated code is written anew from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

from msgspec import Struct

MOST_CHARACTERS, MOST_TOKENS, MOST_TERMS = 200, 60, 16
LARGEST = 2**31 - 1
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}", re.ASCII)
_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]{0,39})|([0-9]{1,10})|([-+*()]))", re.ASCII)

Monomial = tuple[str, ...]  # names, sorted; empty: the constant


class ExpressionError(Exception):
    """A text that is no integer expression. The message says why."""


class Polynomial(Struct, frozen=True):
    """A sum of products of names. terms: (names, coefficient), sorted, no coefficient zero."""

    terms: tuple[tuple[Monomial, int], ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for monomial, _ in self.terms for name in monomial)

    def value(self, bindings: Mapping[str, int]) -> int:
        """Its value. Raises KeyError for a name that is not bound."""
        return sum(factor * prod(bindings[name] for name in names) for names, factor in self.terms)

    def __str__(self) -> str:
        """Python text, written from the terms."""
        if not self.terms:
            return "0"
        text = " + ".join(_product(names, factor) for names, factor in self.terms)
        return text.replace("+ -", "- ")

    def affine_in(self, axes: Iterable[str]) -> tuple[str | None, int, int]:
        """(axis, scale, shift) of `scale * axis + shift` over one of the axes, or (None, 0, 0) if none is named.

        Raises ExpressionError for anything else over an axis.
        """
        used = sorted(self.names & set(axes))
        if not used:
            return None, 0, 0
        scale = shift = 0
        for names, factor in self.terms:
            if names == (used[0],):
                scale = factor
            elif not names:
                shift = factor
            else:
                raise ExpressionError(f"{self} is not affine in one axis with constant numbers")
        return used[0], scale, shift


def parse_expression(text: str) -> Polynomial:
    """The expression that `text` spells. Raises ExpressionError."""
    if len(text) > MOST_CHARACTERS:
        raise ExpressionError(f"{len(text)} characters, more than {MOST_CHARACTERS}")
    tokens = _tokens(text)
    made, rest = _sum(tokens)
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
        tokens.append(match[0].strip())
        at = match.end()
    return tokens


def _sum(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    negative = tokens[:1] == ["-"]
    total, rest = _term(tokens[1:] if negative else tokens)
    total = _scaled(total, -1) if negative else total
    while rest[:1] in (["+"], ["-"]):
        sign = 1 if rest[0] == "+" else -1
        part, rest = _term(rest[1:])
        total = _made([*total.terms, *_scaled(part, sign).terms])
    return total, rest


def _term(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    total, rest = _factor(tokens)
    while rest[:1] == ["*"]:
        part, rest = _factor(rest[1:])
        products = [
            (tuple(sorted((*left, *right))), one * other) for left, one in total.terms for right, other in part.terms
        ]
        total = _made(products)
    return total, rest


def _factor(tokens: list[str]) -> tuple[Polynomial, list[str]]:
    if not tokens:
        raise ExpressionError("it ends where a name or a number should follow")
    first, rest = tokens[0], tokens[1:]
    if first == "(":
        inner, rest = _sum(rest)
        if rest[:1] != [")"]:
            raise ExpressionError("a parenthesis is not closed")
        return inner, rest[1:]
    if first.isdecimal():
        return _made([((), int(first))]), rest
    if IDENTIFIER.fullmatch(first):
        return _made([((first,), 1)]), rest
    raise ExpressionError(f"cannot read {first!r} there")


def _made(parts: Iterable[tuple[Monomial, int]]) -> Polynomial:
    terms: dict[Monomial, int] = {}
    for names, factor in parts:
        terms[names] = terms.get(names, 0) + factor
    if len(terms) > MOST_TERMS or any(abs(factor) > LARGEST for factor in terms.values()):
        raise ExpressionError("it is too large")
    return Polynomial(
        tuple(sorted((item for item in terms.items() if item[1]), key=lambda item: (-len(item[0]), item[0])))
    )


def _scaled(one: Polynomial, by: int) -> Polynomial:
    return _made((names, factor * by) for names, factor in one.terms)


def _product(names: Monomial, factor: int) -> str:
    text = " * ".join(names)
    if not names:
        return str(factor)
    return text if factor == 1 else f"-{text}" if factor == -1 else f"{factor} * {text}"
