"""The commands that pages give: each is read as the command line reads it, and run where that takes a moment."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from overweave.cli.main import COMMANDS, app
from overweave.ir.operators.registry import OPERATORS
from overweave.schedules.records.attention import ATTENTION
from overweave.schedules.records.experts import EXPERTS
from tests.docs.blocks import PAGES

COMMAND = re.compile(r"^(?:    |\$ )?overweave ([a-z]+ .*)$", re.MULTILINE)
CODE = re.compile(r"^```[a-z]*\n(.*?)^```|^((?:    .*\n?)+)", re.DOTALL | re.MULTILINE)
RUN = ("show", "simulate", "compare", "explain")  # if the files that they name are there
OF_OPERATORS = ("trace", "tune", "bench", "explain")
FILE = re.compile(r"\S+\.(json|txt|py)\b")


def commands() -> list[list[str]]:
    """The words of each, without those that the shell reads."""
    found: dict[str, None] = {}
    for page in PAGES:
        for code in CODE.finditer(page.read_text()):
            found.update(dict.fromkeys(COMMAND.findall(code[0])))
    lines = [line for line in found if line.split()[0] in COMMANDS]  # pages also say that overweave needs this or that
    return [shlex.split(line.split(" > ")[0].split(" | ")[0], comments=True) for line in lines]


ALL = commands()


def reads_a_file(words: list[str]) -> bool:
    return any(FILE.match(word) and not Path(word).exists() for word in words)


def test_pages_give_commands():
    assert len(ALL) > 20
    assert sum(words[0] in RUN and not reads_a_file(words) for words in ALL) > 10


def named(words: list[str]) -> str:
    return " ".join(words)[:70]


@pytest.mark.slow
@pytest.mark.parametrize("words", ALL, ids=named)
def test_each_is_one(words: list[str]):
    root = get_command(app)
    command = root.get_command(root.make_context("overweave", [], resilient_parsing=True), words[0])  # type: ignore[attr-defined]
    assert command is not None, words[0]
    context = command.make_context(words[0], words[1:])
    operator = context.params.get("operator")
    if words[0] in OF_OPERATORS and operator and ".py:" not in operator:
        programs = [name for family in (ATTENTION, EXPERTS) for name in (family.subject, *family.operators)]
        assert operator in (*OPERATORS, "block", *programs)


@pytest.mark.slow
@pytest.mark.parametrize("words", [each for each in ALL if each[0] in RUN and not reads_a_file(each)], ids=named)
def test_those_that_take_a_moment_end_well(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("bokeh") if "--html" in words else None
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
