"""Kernels and annotations that do not tell the truth: each is refused with its line, before anything is launched."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from overweave.compiler.emit.fuse import kernel_of
from overweave.compiler.frontend.rectangles import check_places
from overweave.errors import DirectiveError
from tests.compiler.annotated import SCALE as TRUE
from tests.compiler.annotated import changed
from tests.compiler.untruths.lies import ALL, ATTENTION, MATMUL, NORM, NUMBERED, PERSISTENT, SIZED, STRIDED, Lie


def read(folder: Path, text: str, call: object = None) -> None:
    path = folder / "kernel.py"
    path.write_text(text)
    jitted = re.findall(r"@triton\.jit\ndef (\w+)", text)
    kernel = kernel_of(path, jitted[-1])
    if call is not None:
        check_places(kernel, call)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("lie", ALL, ids=range(len(ALL)))
def test_an_untruth_is_refused_with_its_line(tmp_path: Path, lie: Lie):
    text = changed(lie.text, *lie.changes)
    with pytest.raises(DirectiveError) as caught:
        read(tmp_path, text, lie.call)
    assert lie.found in str(caught.value)
    assert lie.blamed in text.splitlines()[caught.value.line - 1]
    assert caught.value.cure


def test_they_are_many():
    assert len({(lie.text, lie.changes, str(lie.call)) for lie in ALL}) >= 40


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
