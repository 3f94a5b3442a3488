"""Kernels and annotations that do not tell the truth: each is refused with its line, before anything is launched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.frontend.rectangles import check_addresses
from overweave.errors import DirectiveError
from overweave.ops.author.arguments import non_tensor_arguments
from tests.compiler.annotated import SCALE as TRUE
from tests.compiler.annotated import changed
from tests.compiler.untruths.believed import BELIEVED
from tests.compiler.untruths.hidden import HIDDEN
from tests.compiler.untruths.lies import ALL, ATTENTION, MATMUL, NORM, NUMBERED, PERSISTENT, SIZED, STRIDED, Lie
from tests.compiler.untruths.public_forms import FORMS, INNER
from tests.compiler.untruths.public_rows import HEAD, Form

UNTRUTHS = [*ALL, *BELIEVED, *HIDDEN]


def read(folder: Path, text: str, call: object = None) -> None:
    path = folder / "kernel.py"
    path.write_text(text)
    jitted = re.findall(r"@triton\.jit\ndef (\w+)", text)
    kernel = kernel_of(path, jitted[-1])
    if call is not None:
        check_addresses(kernel, call)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("lie", UNTRUTHS, ids=range(len(UNTRUTHS)))
def test_an_untruth_is_refused_with_its_line(tmp_path: Path, lie: Lie):
    text = changed(lie.text, *lie.changes)
    with pytest.raises(DirectiveError) as caught:
        read(tmp_path, text, lie.call)
    assert lie.found in str(caught.value)
    assert lie.blamed in text.splitlines()[caught.value.line - 1]
    assert caught.value.cure


def test_they_are_many():
    assert len({(lie.text, lie.changes, str(lie.call)) for lie in UNTRUTHS}) >= 180


SHAPES = {f"{name}_desc.block_shape[{at}]": size for name in "abc" for at, size in ((0, 16), (1, 16))}
ATTENDED = {"Q": 32, "S": 64, "H": 2, "D": 16, "q_start": 0, "BLOCK_Q": 16, "BLOCK_S": 16, "CAUSAL": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "call"),
    [
        (TRUE, SIZED),
        (MATMUL, STRIDED),
        (NORM, {"ROWS": 9, "COLS": 40, "BLOCK": 64}),
        (PERSISTENT, NUMBERED | {"BLOCK_N": 16} | SHAPES),
        (ATTENTION, ATTENDED),
        (ATTENTION, ATTENDED | {"CAUSAL": False}),
    ],
)
def test_the_truth_is_believed(tmp_path: Path, text: str, call: dict[str, int]):
    read(tmp_path, text, call)


FOREIGN = """
import triton
import triton.language as tl


@triton.jit
def number_of():
    return tl.program_id(0)


@triton.jit
def min(a, b):
    return tl.maximum(a, b)


@triton.jit
def twice(x):
    return x * 2


WIDTH = tl.constexpr(32)
"""
STORED = "tl.store(y_ptr + at, x)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "changes", "found"),
    [
        ("from foreign import number_of", ((STORED, "tl.store(y_ptr + at, x + number_of())"),), "a program id"),
        ("import foreign", ((STORED, "tl.store(y_ptr + at, x + foreign.number_of())"),), "a program id"),
        ("from foreign import *", ((STORED, "tl.store(y_ptr + at, x + number_of())"),), "a program id"),
        ("from foreign import min", (("rows = pid_m", "rows = min(pid_m, M)"),), "pid_m stands inside of"),
        ("from nowhere import number", ((STORED, "tl.store(y_ptr + at, x + number(x))"),), "no file here shows"),
        ("from foreign import twice", ((STORED, "tl.store(y_ptr + at, twice(x))"),), ""),
        ("from foreign import WIDTH", (("block=BLOCK_N", "block=WIDTH"), ("pid_n * BLOCK_N", "pid_n * WIDTH")), ""),
    ],
)
def test_functions_and_constants_of_other_files_are_read(
    tmp_path: Path, imported: str, changes: tuple[tuple[str, str], ...], found: str
):
    (tmp_path / "foreign.py").write_text(FOREIGN)
    text = changed(TRUE, ("import triton\n", f"import triton\n{imported}\n"), *changes)
    if not found:
        read(tmp_path, text, SIZED)
        return
    with pytest.raises(DirectiveError, match=found):
        read(tmp_path, text, SIZED)


# Kernels as public ones are written, with directives alone, are believed; authored_forms.py tries them.


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_true_kernel_is_believed(tmp_path: Path, form: Form):
    check_addresses(form.read(tmp_path), non_tensor_arguments(form.given()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            ("        qk = tl.dot(q, k.T)", "        k += tl.load(k_ptrs)\n        qk = tl.dot(q, k.T)"),
            "at another place",
        ),
        (("# @overweave.load K=K[N_CTX", "# @overweave.stream S\n        # @overweave.load K=K[N_CTX"), "it stands in"),
        (("# @overweave.load K=K[N_CTX", "# @overweave.load K=Q[N_CTX"), "Q"),
    ],
)
def test_what_a_function_of_the_file_loads_is_held_to_its_directives(
    tmp_path: Path, change: tuple[str, str], found: str
):
    path = tmp_path / "kernel.py"
    path.write_text(HEAD + changed(INNER.text, change))
    with pytest.raises(DirectiveError, match=found):
        kernel_of(path, INNER.name)
