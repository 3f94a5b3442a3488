"""Mistakes in directives and in the code they speak of: each is refused with file, line, text and a cure."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from overweave.compiler.emit.fuse import kernel_of
from overweave.errors import DirectiveError, InputError
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
        ("load A=a_ptr[M, K]", "load A=b_ptr[M, K]", "A=b_ptr[M, K]", "not made from b_ptr"),
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
        ("  # fp32, whatever a and b are", "  # @overweave.load A=a_ptr[M, K]", "load A", "stands behind a statement"),
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
            "group_id is made",
        ),
        (
            "matmul",
            ("offs_k = tl.arange(0, BLOCK_K)", "offs_k = tl.arange(0, BLOCK_K) + tl.program_id(1)"),
            "a program's number",
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
