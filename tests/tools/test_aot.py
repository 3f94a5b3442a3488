"""Kernels compile for Hopper without a GPU, and only where that can be done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from campaigns.lint.lint_cases import norm_case
from overweave.errors import InputError, MachineError
from overweave.schedules.tiles.shape import row_shape
from tests.compiler.cases import begin, matmul_waits, reduce_waits, spills
from tests.compiler.kernels_protocol import begin as begin_kernel
from tests.source_tree import ROOT
from tools.aot import Source, compile_kernel, resources_of

INTERPRETED = """
from tools.aot import compile_kernel
from overweave.errors import MachineError
from tests.compiler.cases import begin
try:
    compile_kernel(begin())
except MachineError as error:
    print("refused", "TRITON_INTERPRET" in str(error))
"""


@pytest.mark.slow
def test_compiled_kernel_is_text_code_and_footprint() -> None:
    compiled = compile_kernel(matmul_waits())
    assert ".target sm_90a" in compiled.ptx
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.pointers == {0: "a_desc", 5: "b_desc", 10: "y", 11: "signals", 12: "abort", 13: "claims"}
    used = compiled.resources
    assert 32 <= used.registers <= 255
    assert (used.spill_bytes, used.stack_bytes, used.num_warps) == (0, 0, 4)
    assert used.shared_bytes >= 3 * 2 * 64 * 64 * 2  # three stages of two tiles of 64 x 64 bf16


@pytest.mark.slow
def test_spills_are_measured() -> None:
    used = compile_kernel(spills(registers=96)).resources
    assert used.registers <= 96
    assert used.spill_bytes > 0


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_a_machine_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MachineError, match="Insufficient registers"):
        compile_kernel(spills(registers=40))
    assert "Internal Triton" not in capfd.readouterr().out


@pytest.mark.slow
def test_nothing_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compile_kernel(begin())
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_interpreting_process_is_refused() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    ran = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout == "refused True\n", ran.stderr


def test_a_plain_function_is_refused() -> None:
    with pytest.raises(MachineError, match=r"no @triton\.jit"):
        compile_kernel(Source(len, {}))


@pytest.mark.parametrize(
    "change",
    [
        {"signature": {}},
        {"constexprs": {"BLOCK": 128, "W": 3, "OTHER": 1}},
        {"constexprs": {"BLOCK": 128, "W": 3, "abort": 0}},
        {"attrs": {"nobody": 16}},
    ],
)
def test_names_that_do_not_fit_the_kernel_are_refused(change: dict[str, dict[str, int]]) -> None:
    assert begin().kernel is begin_kernel
    with pytest.raises(InputError, match="begin"):
        compile_kernel(replace(begin(), **change))


def test_an_assembler_that_reports_nothing_has_not_said_that_nothing_spills() -> None:
    with pytest.raises(MachineError, match="report"):
        resources_of("", 0, 4)


@pytest.mark.slow
def test_config_is_passed_on() -> None:
    assert compile_kernel(reduce_waits("none")).config == "none"


def test_tensors_of_a_tuple_within_a_tuple_are_aligned_as_a_launch_finds_them() -> None:
    """Else another layout is compiled than runs."""
    attrs = norm_case("bfloat16", 4, row_shape(1 << 20, 4096, 132), True).source.attrs
    assert {attrs[f"epilogue_args.{name}"] for name in ("residual", "z", "inputs.0")} == {16}
