"""`overweave compile`: the fused source on paper or in a file, and mistakes as exit codes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.cli.main import app
from tests import forked
from tests.source_tree import ROOT, python_path

MATMUL = f"{ROOT}/examples/kernels/matmul.py:matmul_kernel"


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["compile", *words])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_it_prints_or_writes_the_source(tmp_path: Path):
    code, text, _ = run(MATMUL, "--schedule", "all_gather.push pieces=4")
    assert code == 0
    assert "A: all_gather.push pieces=4" in text
    out = tmp_path / "fused.py"
    code, said, _ = run(MATMUL, "--schedule", "A:all_gather.push pieces=4", "-o", str(out))
    assert code == 0
    assert out.read_text() == text
    assert "lines" in said


@pytest.mark.slow
def test_it_does_not_write_over_the_kernel(tmp_path: Path):
    path = tmp_path / "matmul.py"
    path.write_text(Path(MATMUL.partition(":")[0]).read_text())
    code, _, said = run(f"{path}:matmul_kernel", "--schedule", "all_gather.push", "-o", f"{tmp_path}/./matmul.py")
    assert code != 0 or "holds the kernel" in said
    assert "@overweave.tile_id" in path.read_text()
    assert "overweave_lang" not in path.read_text()


@pytest.mark.slow
def test_what_is_written_runs_by_itself(tmp_path: Path):
    """A fresh process imports the file and runs its kernel on ranks; a kernel that was changed there is found out."""
    out = tmp_path / "fused.py"
    assert run(MATMUL, "--schedule", "A:all_gather.push pieces=2", "-o", str(out))[0] == 0
    command = [f"{ROOT}/tests/compiler/run_written.py", str(out)]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    ran = forked.run(*command, env=environment)
    assert ran.stdout == "off by 0.0 on 3 ranks\n", ran.stderr[-2000:]
    out.write_text(out.read_text().replace("c = accumulator.to", "c = (accumulator + 1).to"))
    ran = forked.run(*command, env=environment)
    assert ran.stdout == "off by 1.0 on 3 ranks\n", ran.stderr[-2000:]


@pytest.mark.slow
def test_both_sides():
    code, text, _ = run(MATMUL, "--schedule", "A:all_gather.pull", "--schedule", "C:reduce_scatter.ring")
    assert code == 0
    assert "wait_for_tile" in text
    assert "finish_tile" in text


@pytest.mark.slow
def test_mistakes_are_unusable_input(tmp_path: Path):
    for words, found in (
        ((MATMUL, "--schedule", "all_gather.sideways"), "unknown"),
        ((MATMUL, "--schedule", "A:all_gather.push", "--schedule", "A:all_gather.pull"), "not one for each tensor"),
        ((f"{tmp_path}/absent.py:kernel", "--schedule", "all_gather.push"), "No such file"),
        ((str(tmp_path), "--schedule", "all_gather.push"), "names no kernel"),
        ((MATMUL, "--schedule", "all_gather.push", "-o", str(tmp_path)), "Name a file"),
    ):
        code, _, said = run(*words)
        assert code == 2
        assert found in said
