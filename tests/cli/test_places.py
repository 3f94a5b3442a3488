"""Terminals, pipes and folders as users have them: each works, or is told in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner

from overweave.cli import main as command_line
from overweave.cli.commands.explain import STYLES
from overweave.cli.main import app
from overweave.tuner.model.candidate_model import State
from tests.source_tree import python_path

SIMULATE = ("simulate", "all_gather_matmul.push", "--shape=1024,512,256", "--world=2")
COMPARE = ("compare", "all_gather_matmul.push", "all_gather_matmul.pull", "--shape=1024,512,256", "--world=2")
# As terminals are told of a colour of 16, of 256 or of all; bold and dim are none.
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|38;[25];)")
EXPLAIN = ("explain", "all_gather_matmul", "--shape=8192,14336,4096")


def started(*words: str, stdout: int, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "overweave.cli.main", *words]
    environment = {**os.environ, "PYTHONPATH": python_path(), **variables}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=environment)


def in_a_terminal(*words: str, **variables: str) -> str:
    master, slave = pty.openpty()
    with started(*words, stdout=slave, TERM="xterm-256color", **variables) as command:
        os.close(slave)
        drawn = b""
        with contextlib.suppress(OSError):  # what a terminal raises when nobody has it any more
            while part := os.read(master, 1 << 16):
                drawn += part
        assert command.wait(60) == 0
    os.close(master)
    return drawn.decode()


@pytest.mark.slow
@pytest.mark.parametrize("words", [SIMULATE, COMPARE, EXPLAIN, ("show",)], ids=lambda words: words[0])
def test_forty_columns_cost_no_digit_and_no_word(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "40")
    narrow = CliRunner().invoke(app, list(words))
    monkeypatch.setenv("COLUMNS", "200")
    wide = CliRunner().invoke(app, list(words))
    assert narrow.exit_code == wide.exit_code == 0
    assert "…" not in narrow.output
    numbers = [[word for word in result.output.split() if word[:1].isdigit()] for result in (narrow, wide)]
    assert set(numbers[1]) <= set(numbers[0]) | {""}


@pytest.mark.slow
def test_no_color_leaves_colours_out():
    coloured, plain = in_a_terminal(*SIMULATE), in_a_terminal(*SIMULATE, NO_COLOR="1")
    assert COLOUR.search(coloured)
    assert not COLOUR.search(plain)


def test_every_kind_of_row_of_explain_has_a_style():
    assert set(STYLES) == set(get_args(State))


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_other_signs():
    with started(*SIMULATE, stdout=subprocess.PIPE, LC_ALL="C", PYTHONIOENCODING="ascii") as command:
        out, err = command.communicate(timeout=60)
    assert (command.returncode, err) == (0, b"")
    assert b"compute" in out.decode("ascii").encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [SIMULATE, ("show", "all_gather_matmul.push", "--world=16")], ids=lambda words: words[0]
)
def test_a_pipe_that_closes_ends_a_command_without_a_word(words: tuple[str, ...]):
    reader, writer = os.pipe()
    os.close(reader)
    with started(*words, stdout=writer) as command:
        os.close(writer)
        _, err = command.communicate(timeout=60)
    assert err == b""
    assert command.returncode in (1, -13)


class Full(StringIO):
    """A stream on a disk that is full."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fileno(self) -> int:
        return self.standing_in

    standing_in: int


@pytest.mark.parametrize("words", [SIMULATE, ("show",)], ids=lambda words: words[0])
def test_output_to_a_full_disk_is_told_in_one_line(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    full = Full()
    with (tmp_path / "stands for stdout").open("w") as file:
        full.standing_in = file.fileno()
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["overweave", *words])
        with pytest.raises(SystemExit) as ended:
            command_line.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told == (
        "overweave: write the output: No space left on device. Free room there, or send the output elsewhere.\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--trace", "--html"])
def test_a_file_on_a_full_disk_is_told_and_leaves_nothing_behind(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("overweave.tuner.caches.os.fsync", full)
    result = CliRunner().invoke(app, [*SIMULATE, option, str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "No space left on device. Name a file that can be written." in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        (*SIMULATE, "--trace=/proc/file"),
        (*SIMULATE, "--html=/proc/file"),
        (*COMPARE, "--html=/proc/file"),
        ("show", "all_gather_matmul.push", "--json=/proc/file"),
        ("show", "all_gather_matmul.push", "--html=/proc/file"),
        ("bench", "all_gather_matmul", "--json=/proc/file", "--device=cpu"),
        ("tune", "all_gather_matmul", "--json=/proc/file", "--device=cpu"),
        ("demo", "--device=cpu", "--html=/proc/file"),
        ("trace", "all_gather_matmul", "--shape=64,64,64", "--device=cpu", "--html=/proc/file"),
    ],
    ids=lambda words: f"{words[0]} {words[-1]}",
)
def test_a_folder_that_cannot_be_written_is_told_in_one_line(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 2, result.output
    assert "Name a file that can be written" in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_shells_complete_commands():
    variables = {"_OVERWEAVE_COMPLETE": "complete_bash", "COMP_WORDS": "overweave s", "COMP_CWORD": "1"}
    with started(stdout=subprocess.PIPE, **variables) as command:
        out, _ = command.communicate(timeout=60)
    assert out.split() == [b"show", b"simulate"]
