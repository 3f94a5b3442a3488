"""Mistakes in directives and in the code they speak of: each is refused with file, line, text and a cure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overweave.compiler.emit.fuse import kernel_of
from overweave.errors import DirectiveError, InputError
from overweave.ops.author.compile_auto import compile_auto
from tests.compiler.annotated import SCALE, STREAMED, fused, refusal
from tests.source_tree import ROOT

KERNELS = ROOT / "examples" / "kernels"


def refused(tmp_path: Path, file: str, *changes: tuple[str, str]) -> DirectiveError:
    """What the compiler says of a kernel of the examples after replacements, each of which must change something."""
    text = (KERNELS / f"{file}.py").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    path = tmp_path / f"{file}.py"
    path.write_text(text)
    names = {"matmul": "matmul_kernel", "persistent": "persistent_kernel", "attention": "attention_kernel"}
    with pytest.raises(DirectiveError) as caught:
        kernel_of(path, names[file])
    assert caught.value.file == path.name
    assert caught.value.cure
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "text", "found"),
    [
        ("@overweave.tile_id", "@overweave.tiles_id", "@overweave.tiles_id", "no directive is called 'tiles_id'"),
        ("axis M block=BLOCK_M", "axis M", "axis M", "tile size is missing"),
        ("axis M block=BLOCK_M", "axis M block=BLOCK_X", "axis M block=BLOCK_X", "BLOCK_X is unknown"),
        ("axis N block=BLOCK_N", "axis M block=BLOCK_N", "axis M block=BLOCK_N", "axis M stands twice"),
        ("axis N block=BLOCK_N", "axis N=open('x') block=1", "axis N=open('x')", "no integer expression"),
        ("pid_map M=pid_m N=pid_n", "pid_map M=pid_m", "pid_map M=pid_m", "it maps M"),
        ("pid_map M=pid_m N=pid_n", "pid_map M=pid_m N=pid//2", "N=pid//2", "not be affine"),
        ("pid_map M=pid_m N=pid_n", "pid_map M=pid_m N=pid_m", "N=pid_m", "two axes have one variable"),
        ("pid_map M=pid_m N=pid_n", "pid_map M=pid_m N=row", "N=row", "row, the block of N, is not assigned"),
        ("load A=a_ptr[M, K]", "load A=a_ptr[M * M, K]", "A=a_ptr[M * M, K]", "not affine"),
        ("load A=a_ptr[M, K]", "load A=a_ptr[M * N, K]", "A=a_ptr[M * N, K]", "not affine"),
        ("load A=a_ptr[M, K]", "load A=x_ptr[M, K]", "A=x_ptr[M, K]", "no parameter x_ptr"),
        ("load A=a_ptr[M, K]", "load A=b_ptr[M, K]", "A=b_ptr[M, K]", "not computed from b_ptr"),
        ("load A=a_ptr[M, K]", "load A=a_ptr[M, L]", "A=a_ptr[M, L]", "L is unknown"),
        ("load A=a_ptr[M, K]", "load A=a_ptr", "load A=a_ptr", "cannot read it"),
        ("load B=b_ptr[K, N]", "load A=b_ptr[K, N]", "load A=b_ptr", "A is another tensor in line"),
        ("store C=c_ptr[M, N]", "store A=c_ptr[M, N]", "store A=c_ptr", "A is another tensor in line"),
        (
            "load B=b_ptr[K, N]",
            "load B=b_ptr[K, N]\n        # @overweave.load B=b_ptr[N, K]",
            "load B=b_ptr[N",
            "not an axis",
        ),
        ("dispatch end", "dispatch ends", "dispatch ends", "'ends' says nothing"),
        ("    # @overweave.dispatch end\n", "", "dispatch begin", "0 `dispatch end`"),
        ("  # fp32, whatever a and b are", "  # @overweave.load A=a_ptr[M, K]", "load A", "follows a statement"),
        ("    # @overweave.store C=c_ptr[M, N]\n", "", "def matmul_kernel", "no store is annotated"),
    ],
)
def test_a_mistake_names_its_line(tmp_path: Path, old: str, new: str, text: str, found: str):
    error = refused(tmp_path, "matmul", (old, new))
    assert found in str(error)
    assert text in error.text
    line = (tmp_path / "matmul.py").read_text().splitlines()[error.line - 1]
    assert text in line or "def" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "change", "found"),
    [
        ("matmul", ("    a_ptrs = a_ptr", "    tl.load(a_ptr)\n    a_ptrs = a_ptr"), "another load of a_ptr"),
        ("matmul", ("    offs_k = tl", "    if K == 0:\n        return\n    offs_k = tl"), "it returns early"),
        (
            "matmul",
            ("offs_k = tl.arange(0, BLOCK_K)", "offs_k = tl.arange(0, BLOCK_K) + group_id * 0"),
            "group_id is assigned",
        ),
        (
            "matmul",
            ("offs_k = tl.arange(0, BLOCK_K)", "offs_k = tl.arange(0, BLOCK_K) + tl.program_id(1)"),
            "a program id",
        ),
        ("matmul", ("    offs_k = ", "    overweave_row = 1\n    offs_k = "), "it uses the name overweave_row"),
        (
            "matmul",
            ("@triton.jit\ndef matmul", "@triton.heuristics({})\n@triton.jit\ndef matmul"),
            "'heuristics' runs around",
        ),
        (
            "matmul",
            ("@overweave.tile_id\n    pid = tl.program_id(axis=0)", "@overweave.tile_id\n    pid = 0"),
            "no `pid",
        ),
        (
            "persistent",
            (
                "        offs_am = pid_m * BLOCK_M",
                "        if pid_m > 9:\n            continue\n        offs_am = pid_m * BLOCK_M",
            ),
            "ends by `continue`",
        ),
        (
            "persistent",
            ("    # @overweave.tile_id persistent\n", "    # @overweave.tile_id persistent\n    x = 1\n"),
            "no loop over a range",
        ),
        ("attention", ("0, high, BLOCK_S", "0, high, BLOCK_Q"), "steps of BLOCK_Q"),
        ("attention", ("    # @overweave.stream S\n", ""), "no loop, or more than one"),
        ("attention", ("stream S", "stream T"), "no streamed axis is called T"),
    ],
)
def test_code_that_breaks_its_directives(tmp_path: Path, file: str, change: tuple[str, str], found: str):
    assert found in str(refused(tmp_path, file, change))


def test_files_that_hold_no_kernel(tmp_path: Path):
    path = tmp_path / "kernel.py"
    for data, found in ((b"def f(:\n", "invalid syntax"), (b"x = 1\n", "0 functions"), (b"\xff\xfe\xff", "decode")):
        path.write_bytes(data)
        with pytest.raises(InputError, match=found):
            kernel_of(path, "f")
    with pytest.raises(InputError, match="No such file"):
        kernel_of(tmp_path / "absent.py", "f")
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(InputError, match="not a regular file"):
        kernel_of(tmp_path / "pipe.py", "f")


@pytest.mark.parametrize(
    "words",
    ["-" * 50_000 + "1", "(" * 5000 + ")" * 5000, "1 if 1 else " * 5000 + "1", "1+" * 5000 + "1", "a" + ".b" * 200],
    ids=["signs", "parentheses", "choices", "sums", "attributes"],
)
def test_text_that_nests_deeper_than_any_kernel(tmp_path: Path, words: str):
    """It would take the concrete parser's stack, which ends the process, or all memory."""
    path = tmp_path / "kernel.py"
    path.write_text(f"def f():\n    x = {words}\n")
    with pytest.raises(InputError, match=r"nest|recursion"):
        kernel_of(path, "f")


# Loads and stores that no directive names, however they are spelled and wherever they stand.

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
    assert "is computed from a program id" in said


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


# Loops whose turns come in another order: streamed axes, whose parts are walked as they arrive.

PUSH = "all_gather.push pieces=2"
LAST = "        turns += 1\n"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([("k_ptrs + start * D", "k_ptrs"), (LAST, "        k_ptrs += BLOCK * D\n")], "k_ptrs"),
        ([("k_ptrs + start * D", "k_ptrs"), (LAST, "        k_ptrs = tl.advance(k_ptrs, (0, BLOCK))\n")], "k_ptrs"),
        ([("k_ptrs + start * D", "k_ptrs + place * D"), (LAST, "        place = place + BLOCK\n")], "place"),
        ([("tl.load(here)", "tl.load(here, mask=(place < S))"), (LAST, "        place += BLOCK\n")], "place"),
        ([("tl.dot(q, k)", "tl.dot(q, k) * turns")], "turns"),
        ([("+ start * D", "+ place * D"), (LAST, "        if start > 0:\n            place += BLOCK\n")], "place"),
        ([("+ start * D", "+ place * D"), (LAST, "        step = BLOCK + place\n        place = step\n")], "place"),
    ],
)
def test_what_counts_on_the_order_of_turns_is_refused(tmp_path: Path, changes: list[tuple[str, str]], name: str):
    said = refusal(tmp_path, STREAMED, PUSH, *changes)
    assert f"{name} is carried between iterations" in said
    assert "Compute it from start in every iteration" in said


@pytest.mark.parametrize(
    "changes",
    [
        [],  # a sum, and a count that only the end reads
        [
            (
                "        total += tl.sum(tl.dot(q, k), 1)\n",
                "        s = tl.dot(q, k)\n        total = total + tl.sum(s, 1)\n",
            )
        ],
        [("        here = ", "        place = start * 2\n        place += 1\n        here = ")],
    ],
)
def test_what_does_not_is_welcome(tmp_path: Path, changes: list[tuple[str, str]]):
    assert "overweave_arrived" in fused(tmp_path, STREAMED, PUSH, *changes).source()
