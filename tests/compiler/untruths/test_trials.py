"""What reading a kernel cannot tell is tried on a smaller problem: every address is held to its directive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from overweave.cli.main import app
from overweave.compiler.emit.fuse import kernel_of
from overweave.errors import DirectiveError, InputError
from overweave.ops.author import trial
from overweave.ops.author.trial import CHECKED, arguments_of, check_footprint
from tests.clock import slowness
from tests.compiler.annotated import changed
from tests.source_tree import ROOT

pytestmark = pytest.mark.slow

ROWS = """
import triton
import triton.language as tl


@triton.jit
def rows_kernel(x_ptr, y_ptr, z_ptr, M, N, eps, BLOCK: tl.constexpr):
    # @overweave.axis M block=1
    # @overweave.tile_id
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    # @overweave.load X=x_ptr[M, N]
    x = tl.load(x_ptr + row * N + cols, mask=cols < N) + eps.to(tl.float32)
    # @overweave.store Y=y_ptr[M, N]
    tl.store(y_ptr + row * N + cols, x, mask=cols < N)
"""
NUMBERS = {"M": 10, "N": 40, "eps": 0.5, "BLOCK": 64}
ATTENTION = ROOT / "examples" / "kernels" / "attention.py"

X = "    # @overweave.load X=x_ptr[M, N]\n    x = tl.load(x_ptr + row * N + cols"
EXCHANGED_DTYPES = (X, "    far = tl.load(z_ptr + row)\n" + X + " + far")
LAST = ("mixed / total[:, None]", "mixed / total[:, None] + start")
BESIDE = (
    "    # @overweave.store",
    "    near = z_ptr + row + cols\n    x += tl.load(near)\n    tl.store(near, cols)\n    # @overweave.store",
)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIAL_LIMIT_S", 60.0 * slowness())


def tried(folder: Path, text: str, given: dict[str, Any], *changes: tuple[str, str]) -> str:
    path = folder / "kernel.py"
    path.write_text(changed(text, *changes))
    name = next(one for one in ("rows_kernel", "attention_kernel") if f"def {one}(" in text)
    return check_footprint(kernel_of(path, name), given)


def rows() -> dict[str, Any]:
    tensors = {"x_ptr": torch.empty(10, 40), "y_ptr": torch.empty(10, 40), "z_ptr": torch.zeros(10, dtype=torch.int32)}
    return NUMBERS | tensors


def attended() -> dict[str, Any]:
    numbers = {"Q": 64, "S": 128, "H": 2, "D": 16, "q_start": 0, "scale": 0.25, "BLOCK_Q": 16, "BLOCK_S": 16}
    tensors = {name: torch.empty(size, 2, 16) for name, size in (("q", 64), ("k", 128), ("v", 128), ("out", 64))}
    return {**numbers, **tensors, "CAUSAL": False}


def test_what_is_true_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert tried(tmp_path, ROWS, rows()) == CHECKED
    monkeypatch.setattr(trial, "_run_in_subprocess", None)
    assert tried(tmp_path, ROWS, rows()) == CHECKED
    with pytest.raises(TypeError):
        check_footprint(kernel_of(tmp_path / "kernel.py", "rows_kernel"), rows(), ignore_cache=True)


@pytest.mark.parametrize(
    ("text", "given", "change", "blamed", "found"),
    [
        (ROWS, rows(), ("cols, mask=cols < N) + eps", "cols) + eps"), "load X=", "it reaches 0 to 63"),
        (ROWS, rows(), EXCHANGED_DTYPES, "load X=", "loads element"),
        pytest.param(
            *(ROWS, rows(), BESIDE, "def rows_kernel", "with its tiles in another order"), marks=pytest.mark.nightly
        ),
        (ATTENTION.read_text(), attended(), LAST, "stream S", "in another order out"),
    ],
)
def test_what_is_untrue_is_found_out(
    tmp_path: Path, text: str, given: dict[str, Any], change: tuple[str, str], blamed: str, found: str
):
    with pytest.raises(DirectiveError) as caught:
        tried(tmp_path, text, given, change)
    assert found in str(caught.value)
    assert blamed in (tmp_path / "kernel.py").read_text().splitlines()[caught.value.line - 1]


def test_what_cannot_run_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    broken = ("+ eps.to(tl.float32)", "+ tl.no_such_word(eps)")
    assert tried(tmp_path, ROWS, rows(), broken).startswith("not checked: ")
    monkeypatch.setattr(trial, "TRIAL_LIMIT_S", 0.01)
    path = tmp_path / "kernel.py"
    path.write_text(ROWS.replace("M, N, eps", "M, N, eps "))
    assert "longer than" in check_footprint(kernel_of(path, "rows_kernel"), rows())


def test_a_word_is_a_string_of_a_constexpr_alone(tmp_path: Path):
    path = tmp_path / "kernel.py"
    path.write_text(ROWS.replace("BLOCK: tl.constexpr", 'BLOCK: tl.constexpr, ACT: tl.constexpr = "silu"'))
    kernel = kernel_of(path, "rows_kernel")
    assert arguments_of(kernel, "M=10,N=40,BLOCK=64,eps=0.5,ACT=gelu")["ACT"] == "gelu"
    with pytest.raises(InputError, match="eps=gelu"):
        arguments_of(kernel, "M=10,N=40,BLOCK=64,eps=gelu")


def test_the_command_tries_too(tmp_path: Path):
    path = tmp_path / "kernel.py"
    path.write_text(ROWS)
    command = ["compile", "--check", f"{path}:rows_kernel", "--shape", "M=10,N=40,BLOCK=64,eps=0.5"]
    assert CliRunner().invoke(app, command).output == "rows_kernel: directives checked\n"
    path.write_text(ROWS.replace("cols, mask=cols < N) + eps", "cols) + eps"))
    assert CliRunner().invoke(app, command).exit_code != 0
