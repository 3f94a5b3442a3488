"""Loads and stores that no directive names, however they are spelled and wherever they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from overweave.errors import DirectiveError
from overweave.ops.author.compile_auto import compile_auto
from tests.compiler.annotated import SCALE, fused, refusal

GATHER, SUM = "all_gather.push", "all_reduce.one_shot"
ABOVE = "    # @overweave.load X"
BODY = "    return x\n"


def extra(line: str) -> tuple[str, str]:
    """One more statement, in front of the annotated load."""
    return ABOVE, f"    {line}\n{ABOVE}"


@pytest.mark.parametrize(
    ("line", "imported"),
    [
        ("first = tl.load(x_ptr)", ""),
        ("first = tl.load(mask=None, pointer=x_ptr)", ""),
        ("first = T.load(x_ptr)", "from triton import language as T"),
        ("first = triton.language.load(x_ptr)", ""),
        ("first = load(x_ptr)", "from triton.language import load"),
        ("first = fetch(x_ptr)", "from triton.language import load as fetch"),
        ("first = t.language.load(x_ptr)", "import triton as t"),
        ("first = tl.load_tensor_descriptor(tl.make_tensor_descriptor(x_ptr, [M], [1], [8]), [0])", ""),
        ("first = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [1, 8]).gather(rows, 0)", ""),
    ],
)
def test_a_load_that_no_directive_names_is_refused(tmp_path: Path, line: str, imported: str):
    """It might run before the wait."""
    said = refusal(tmp_path, SCALE, GATHER, extra(line), ("import triton\n", f"import triton\n{imported}\n"))
    assert "another load of x_ptr has no directive" in said
    assert "kernel.py:" in said


@pytest.mark.parametrize("line", ["tl.atomic_add(x_ptr + at, 1.0)", "(y_ptr + at).atomic_add(1.0)"])
def test_atomics_of_what_is_annotated_are_refused(tmp_path: Path, line: str):
    assert "changes" in refusal(tmp_path, SCALE, GATHER, extra(line))


@pytest.mark.parametrize(
    ("inside", "call", "word"),
    [
        ("    return tl.load(x)\n", "helper(x_ptr)", "a load of its own"),
        ("    y = x + 8\n    return tl.load(y)\n", "helper(x=x_ptr + at)", "a load of its own"),
        ("    tl.store(x, 0.0)\n", "helper(y_ptr + at)", "a store of its own"),
        ("    tl.atomic_add(x, 0.0)\n", "helper(y_ptr + at)", "a atomic of its own"),
    ],
)
def test_a_function_that_loads_or_stores_what_is_annotated_is_refused(
    tmp_path: Path, inside: str, call: str, word: str
):
    said = refusal(tmp_path, SCALE, GATHER, (BODY, inside), extra(f"first = {call}"))
    assert word.replace("a atomic", "an atomic") in said
    assert "Let helper make the pointers" in said


def test_what_a_function_calls_is_seen_too(tmp_path: Path):
    inner = "    return x\n\n\n@triton.jit\ndef outer(p, n):\n    return helper(p + n)\n"
    said = refusal(
        tmp_path,
        SCALE,
        GATHER,
        (BODY, inner),
        ("    return x\n", "    return tl.load(x)\n"),
        extra("f = outer(x_ptr, 1)"),
    )
    assert "`outer(x_ptr, 1)` reaches x_ptr" in said


def test_a_function_of_another_file_gets_no_annotated_pointer(tmp_path: Path):
    imported = ("import triton\n", "import triton\nfrom elsewhere import fetch\n")
    said = refusal(tmp_path, SCALE, GATHER, imported, extra("first = fetch(x_ptr)"))
    assert "stands elsewhere" in said
    fused(tmp_path, SCALE, GATHER, imported, extra("first = fetch(at, tl.load(z_ptr), x_ptr.dtype)"))


def test_functions_that_make_pointers_or_load_something_else_are_welcome(tmp_path: Path):
    kernel = fused(tmp_path, SCALE, GATHER, ("tl.load(x_ptr + at)", "tl.load(helper(x_ptr) + helper(at))"))
    assert "def helper" in kernel.source()
    loads = (BODY, "    return tl.load(x)\n")
    fused(tmp_path, SCALE, GATHER, loads, extra("first = helper(z_ptr)"))
    fused(tmp_path, SCALE, GATHER, loads, extra("p, q = x_ptr, z_ptr\n    first = helper(q)"))


@pytest.mark.parametrize("inside", ["    return tl.program_id(0)\n", "    return x * tl.num_programs(0)\n"])
def test_a_function_that_asks_for_the_programs_number_is_refused(tmp_path: Path, inside: str):
    said = refusal(
        tmp_path, SCALE, GATHER, (BODY, inside), ("tl.store(y_ptr + at, x)", "tl.store(y_ptr + at, x + helper(1))")
    )
    assert "is made from a program's number" in said


def test_an_alias_of_the_language_is_the_language(tmp_path: Path):
    text = SCALE.replace("import triton.language as tl", "from triton import language as T").replace("tl.", "T.")
    text = text.replace("T.load(", "triton.language.load(")
    assert "x_ptr = overweave_lang.select_source(" in fused(tmp_path, text, GATHER).source()
    assert "T.store(y_ptr + at, overweave_lang.voided(x, " in fused(tmp_path, text, GATHER).source()
    away = fused(tmp_path, text, "spread.push mover=tiles").source()
    assert "T.store((y_ptr + at) + overweave_away, x)" in away


def test_a_store_may_name_its_arguments(tmp_path: Path):
    named = ("tl.store(y_ptr + at, x)", "tl.store(value=x, pointer=y_ptr + at)")
    text = fused(tmp_path, SCALE, {"X": GATHER, "Y": "spread.push mover=tiles"}, named).source()
    assert "tl.store(value=overweave_lang.voided(x, overweave_verdict), pointer=(y_ptr + at) + overweave_away)" in text


def test_what_goes_to_peers_is_not_read_and_what_comes_from_them_not_written(tmp_path: Path):
    """Either lies in a buffer of ours while the kernel runs."""
    before = extra("old = tl.load(y_ptr + at)")
    assert "y_ptr is loaded from" in refusal(tmp_path, SCALE, SUM, before)
    fused(tmp_path, SCALE, GATHER, before)
    behind = ("    tl.store(y_ptr + at, x)\n", "    tl.store(y_ptr + at, x)\n    tl.store(x_ptr + at, x)\n")
    assert "x_ptr is stored to" in refusal(tmp_path, SCALE, GATHER, behind)
    fused(tmp_path, SCALE, SUM, behind)


def test_a_choice_is_refused_at_once_where_no_way_could_be(tmp_path: Path):
    fused(tmp_path, SCALE, GATHER, extra("old = tl.load(y_ptr + at)"))
    with pytest.raises(DirectiveError, match="y_ptr is loaded from"):
        compile_auto(f"{tmp_path}/kernel.py:scale", {"Y": "all_reduce.auto"})
