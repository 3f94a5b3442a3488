"""Directives from hostile hands: every text is either data made of plain names and numbers, or one typed error."""

from __future__ import annotations

import ast
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaigns.lint.authored_cases import AUTHORS, KERNELS
from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.frontend.symbols.directives import (
    IDENTIFIER,
    AccessDirective,
    AxisDirective,
    Directive,
    PidMapDirective,
    parse_directive,
)
from overweave.compiler.frontend.symbols.polynomials import Polynomial
from overweave.errors import DirectiveError, OverweaveError
from overweave.ops.author.compile import FusedKernel
from tests.clock import ends_within

WORDS = (
    *("axis", "tile_id", "dispatch", "pid_map", "load", "store", "stream", "begin", "end", "persistent", "streamed"),
    *("block", "=", "M", "N", "K", "BLOCK_M", "A", "a_ptr", "[", "]", "(", ")", "+", "-", "*", ",", " ", "\t", "#"),
    *("__import__('os')", '"""', "'", "\\", "lambda", "None", "0", "99999999999", "ｍ", "é", "\x1b[31m", "\0", "\x0c"),
    *("@overweave.", ";", "overweave_lang", "M=pid_m", "c_ptr[M, N]", "A=a_ptr[M, K]", "M block=BLOCK_M"),
)
COMMENTS = st.lists(st.sampled_from(WORDS), max_size=10).map(" ".join) | st.text(max_size=60)


def parsed(comment: str) -> tuple[Directive | None, str]:
    """What a comment says, or why it says nothing."""
    try:
        return parse_directive(comment, "kernel.py", 1), ""
    except DirectiveError as error:
        return None, str(error)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(COMMENTS)
def test_a_comment_is_names_and_numbers_or_one_typed_error(words: str):
    said, refusal = parsed(f"# @overweave.{words}")
    assert len(refusal) < 900
    assert refusal.isprintable()
    names: list[str] = []
    expressions: tuple[Polynomial, ...] = ()
    if isinstance(said, AxisDirective):
        names, expressions = [said.name], (said.extent, said.block)
    elif isinstance(said, AccessDirective):
        names, expressions = [said.tensor, said.parameter], said.dims
    elif isinstance(said, PidMapDirective):
        names = [name for pair in said.variables for name in pair]
    names += [name for expression in expressions for name in expression.names]
    assert all(IDENTIFIER.fullmatch(name) for name in names)


@pytest.mark.parametrize(
    "comment",
    [
        "# @overweave.axis M =" + " " * 50_000 + "]",
        "# @overweave.axis M" + " block=" * 10_000,
        "# @overweave.load A=a[" + "[" * 50_000,
    ],
)
def test_a_long_comment_is_refused_at_once(comment: str):

    def refuse() -> None:
        with pytest.raises(DirectiveError, match="at most"):
            parse_directive(comment, "kernel.py", 1)

    ends_within(1, refuse)


@st.composite
def mutants(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A kernel of the examples with its directives spoiled: words changed, lines moved, doubled or gone."""
    name = draw(st.sampled_from(sorted(AUTHORS)))
    lines = (KERNELS / f"{name}.py").read_text().splitlines()
    for _ in range(draw(st.integers(1, 3))):
        marked = [at for at, line in enumerate(lines) if "@overweave" in line]
        at, other = draw(st.sampled_from(marked)), draw(st.integers(0, len(lines) - 1))
        words = re.findall(r"\w+|\W", lines[at])
        place = draw(st.integers(0, len(words) - 1))
        change = draw(st.sampled_from(("replace", "drop", "swap", "double", "delete")))
        if change == "delete":
            del lines[at]
        elif change == "double":
            lines.insert(other, lines[at])
        elif change == "swap":
            lines[at], lines[other] = lines[other], lines[at]
        else:
            lines[at] = "".join(
                [*words[:place], *([draw(st.sampled_from(WORDS))] if change == "replace" else []), *words[place + 1 :]]
            )
    return name, lines


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(mutants(), st.integers(0, 100))
def test_spoiled_directives_are_refused_or_give_a_text_that_parses(mutant: tuple[str, list[str]], number: int):
    name, lines = mutant
    author = AUTHORS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.py")
        path.write_text("\n".join(lines))
        try:
            written = FusedKernel(
                kernel_of(path, author.name), author.exchanges[number % len(author.exchanges)]
            ).source()
        except OverweaveError:
            return
    calls = (node.func for node in ast.walk(ast.parse(written)) if isinstance(node, ast.Call))
    assert "__import__" not in {function.id for function in calls if isinstance(function, ast.Name)}
