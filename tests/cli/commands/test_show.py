"""`overweave show`: the list, the text, the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from overweave.cli import programs
from overweave.cli.main import app
from overweave.ir.plan import Plan
from overweave.ir.text.files import from_json, read_file
from overweave.ir.text.parse import from_text
from overweave.schedules.catalog.catalog import names
from overweave.schedules.weave.transports import transports


def show(*words: str):
    return CliRunner().invoke(app, ["show", *words])


def test_without_a_name_every_schedule_has_one_line():
    result = show()
    assert result.exit_code == 0
    of_operators, _, of_kernels = result.output.partition("\n\n")
    assert [line.split()[0] for line in of_operators.splitlines()] == [*names(), *programs.names()]
    assert [line.split()[0] for line in of_kernels.splitlines()[1:]] == list(transports())


def test_a_schedule_is_printed_in_the_form_that_can_be_read():
    result = show("matmul_reduce_scatter.scatter", "--world", "3", "-o", "pieces=1", "-o", "m=96")
    schedule = from_text(result.output)
    assert (schedule.world_size, schedule.buffer("partial").rows) == (3, 96)


def test_what_is_printed_is_documented_by_a_golden_file(golden):
    golden("show/all_gather_matmul.push.txt", show("all_gather_matmul.push", "--world", "2").output)
    for name in ("matmul_all_reduce.waves", "matmul_reduce_scatter.waves"):
        golden(f"show/{name}.txt", show(name, "--world", "4", "-o", "sms=12", "-o", "library_sms=4").output)
    cyclic = ("--world", "2", "-o", "sms=12", "-o", "library_sms=4", "-o", "rows=cyclic", "-o", "block_m=64")
    shape = ("-o", "m=640", "-o", "n=300")
    golden("show/matmul_reduce_scatter.waves.cyclic.txt", show("matmul_reduce_scatter.waves", *cyclic, *shape).output)


def test_a_plan_is_written(tmp_path: Path):
    path = tmp_path / "plan.json"
    asked = ["all_gather_matmul.pull", "-w", "2", "-o", "returns_gathered=true", "--json"]
    assert show(*asked, str(path)).exit_code == 0
    plan = read_file(path)
    assert isinstance(plan, Plan)
    assert plan.problem.returns_gathered
    assert plan == from_json(show(*asked, "-").output.encode())


@pytest.mark.slow
def test_a_file_is_shown_as_it_is(tmp_path: Path):
    """A schedule that somebody broke, too: `verify` judges, `show` shows."""
    text, plan, page = tmp_path / "mine.txt", tmp_path / "mine.json", tmp_path / "mine.html"
    printed = show("all_gather_matmul.push", "--world", "2").output
    text.write_text(printed.replace(" wait arrived[0:1]>=1", "", 1))
    assert show(str(text)).output == text.read_text()
    assert show(str(text), "--json", str(plan), "--html", str(page)).exit_code == 0
    assert from_json(plan.read_bytes()) == from_text(text.read_text())
    assert "steps, each operation one step" in page.read_text()
    assert "A file says all of that itself" in show(str(text), "--world", "2").output


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["all_gather_matmul.pusch"], "nearest first: all_gather_matmul.push"),
        (["all_gather_matmul.push", "-o", "pieces"], "key=value"),
        (["all_gather_matmul.push", "-o", "pieces=2", "-o", "pieces=2"], "key=value"),
        (["all_gather_matmul.push", "-o", "shape=2"], "Valid options"),
        (["all_gather_matmul.push", "-o", "m=many"], "Problem options: m, n, k"),
        (["all_gather_matmul.push", "-o", "dtype=int8"], "Problem options: m, n, k"),
        (["all_gather_matmul.push", "--world", "0"], "world_size"),
        (["all_gather_matmul.push", "--world", "5000"], "world_size"),
        (["all_gather_matmul.push", "--json", "no/such/folder/file"], "can be written"),
        (["-o", "m=1"], "lists them"),
    ],
)
def test_what_cannot_be_shown_is_unusable_and_says_why(words: list[str], found: str):
    result = show(*words)
    assert result.exit_code == 2
    assert found in result.output
