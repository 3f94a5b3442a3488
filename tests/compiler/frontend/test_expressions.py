"""Integer expressions of directives: what they mean, and that nothing else gets through."""

from __future__ import annotations

import pytest

from overweave.compiler.frontend.symbols.directives import ExpressionError, affine_in, parse_expression

BINDINGS = {"M": 7, "N": 5, "K": 3}


@pytest.mark.parametrize(
    "text",
    [
        "M",
        "2 * M + 1",
        "M*N - K",
        "-(M - N) * K",
        "M * M * 2 - 3",
        "0",
        "(((M)))",
        "M - M",
        "M // 2",
        "M * N // (K + 1) * 2",
    ],
)
def test_value_is_pythons_and_text_means_the_same(text: str):
    parsed = parse_expression(text)
    exact = eval(text, {}, BINDINGS)
    assert parsed.value(BINDINGS) == exact
    assert parse_expression(str(parsed)) == parsed
    assert eval(str(parsed), {}, BINDINGS) == exact


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M +",
        "M // 0",
        "M // (K - 2 * K)",
        "cdiv(M)",
        "cdiv(M, N",
        "M.shape",
        "M.shape[K]",
        "M / 2",
        "M ** 2",
        "f(M)",
        "M[0]",
        "M.x",
        "(M",
        "M)",
        "1 2",
        "0x10",
        "M; import os",
        "__import__('os')",
        "lambda: 0",
        "M\nN",
        "Ｍ",
        "M" * 41,
        "9" * 11,
        "+".join("M" * 70),
        "(" * 300,
        "*".join(["(A+B+C+D+E)"] * 4),
        "99999 * 99999",
    ],
)
def test_what_is_no_expression_is_refused(text: str):
    with pytest.raises(ExpressionError):
        parse_expression(text)


def test_quotients_that_are_rounded_up_and_extents_of_tensors():
    assert [parse_expression("cdiv(M, K) * N").value({"M": m, "K": 4, "N": 5}) for m in (8, 9)] == [10, 15]
    assert str(parse_expression("cdiv(M, K) * N")) == "N * ((K + M - 1) // K)"
    assert parse_expression("x.shape[0] * 2").value({"x.shape[0]": 7}) == 14


def test_affine():
    assert affine_in(parse_expression("2 * M + 3"), ["M", "N"]) == ("M", 2, 3)
    assert affine_in(parse_expression("K"), ["M", "N"]) == (None, 0, 0)
    for text in ("M * M", "M * N", "M + N", "M + K", "K * M", "M // 2"):
        with pytest.raises(ExpressionError, match="not affine"):
            affine_in(parse_expression(text), ["M", "N"])
