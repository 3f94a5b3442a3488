"""The command line as a whole: what is registered, how errors end, what is not loaded, limits, and the progress bar."""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import overweave
from overweave.cli import limits, main, user_files
from overweave.cli.progress import progress
from overweave.errors import InputError, MachineError, ScheduleUndecided
from tests.source_tree import python_path

RUN = CliRunner()


def test_help_lists_the_commands_that_are_there():
    result = RUN.invoke(main.app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("show", "verify"))


def test_it_says_which_version_it_is():
    result = RUN.invoke(main.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"overweave {overweave.__version__}\n")


def test_a_file_is_run_before_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(user_files, "_FILES", [])
    (tmp_path / "mine.py").write_text("print('here')\n")
    result = RUN.invoke(main.app, ["--load", str(tmp_path / "mine.py"), "show", "all_gather_matmul.push"])
    assert result.output.startswith("here\nschedule")
    assert user_files.load_options() == [f"--load={tmp_path / 'mine.py'}"]
    result = RUN.invoke(main.app, ["--load", str(tmp_path), "show"])
    assert (result.exit_code, "it is no Python file" in result.output) == (2, True)


def test_an_unknown_command_is_unusable():
    result = RUN.invoke(main.app, ["shwo"])
    assert result.exit_code == 2
    assert "shwo" in result.output


@pytest.mark.parametrize(("error", "code"), [(InputError, 2), (MachineError, 1)])
def test_our_errors_end_without_a_traceback(monkeypatch: pytest.MonkeyPatch, error: type[Exception], code: int):
    def show() -> None:
        raise error("asked", "found", "cure")

    monkeypatch.setattr("overweave.cli.commands.show.show", show)
    result = RUN.invoke(main.app, ["show"])
    assert result.exit_code == code
    assert "asked: found. cure." in result.output
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_reading_and_thinking_needs_no_torch():
    code = (
        "import sys\n"
        "for name in ('torch', 'triton', 'numpy'): sys.modules[name] = None\n"
        "from overweave.cli.main import app\n"
        "app(['show', 'all_gather_matmul.push', '--world', '2'], standalone_mode=False)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("schedule all_gather_matmul.push world_size=2")


@pytest.mark.slow
def test_a_terminal_that_knows_only_ascii_gets_an_answer():
    words = ["simulate", "all_gather_matmul.push", "--shape", "1024,512,256"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "overweave.cli.main", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert (result.returncode, result.stderr) == (0, "")
    assert "whole call" in result.stdout


@pytest.mark.slow  # torch is loaded
def test_what_draws_no_picture_does_not_load_what_draws_them():
    commands = ", ".join(f"overweave.cli.commands.{name}" for name in ("bench", "compile", "doctor", "explain", "tune"))
    code = f"import sys, {commands}; print({{'matplotlib'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "set()"


@pytest.mark.slow  # torch is loaded
@pytest.mark.parametrize(
    ("act", "package"),
    [
        ("import overweave; overweave.compile", "libcst"),
        ("from overweave.cli.main import app; app(['compile', 'f.py:k', '--schedule', 'all_gather.push'])", "libcst"),
        ("import overweave; overweave.all_gather_matmul", "torch"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_cure(act: str, package: str):
    code = f"import sys\nsys.modules[{package!r}] = None\n{act}\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert f"{package} is not installed" in result.stderr
    assert "pip install" in result.stderr


@pytest.mark.slow  # for some of them torch is loaded
@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_that_is_there_explains_itself(name: str):
    if name in main._Commands().list_commands(None):
        result = RUN.invoke(main.app, [name, "--help"])
        assert result.exit_code == 0, result.output
        assert "--help" in result.output


# What commands may take of the processor and of memory, and how they say that it was not enough.


def test_who_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "SECONDS", 0.05)

    def forever() -> None:
        while True:
            pass

    with pytest.raises(ScheduleUndecided, match=r"more than 0.1 s for 0.0 MiB"), limits.limited(Path("none")):
        forever()
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_what_a_library_makes_of_it_does_not_matter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "SECONDS", 0.05)

    def forever() -> None:
        try:
            while True:
                pass
        finally:
            raise KeyError

    with pytest.raises(ScheduleUndecided), limits.limited(Path("none")):
        forever()


def test_who_takes_all_memory_gets_none():
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ScheduleUndecided, match="MiB of memory"), limits.limited(Path("none")):
        bytearray(2 * limits.BYTES)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_without_a_file_nothing_is_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "SECONDS", 0.0)
    with limits.limited():
        assert sum(range(1 << 18))


# The progress bar: in a terminal it says what is under way and how long the rest takes; elsewhere nothing.

CODE = """
import time
from overweave.cli.progress import progress
with progress("bench", 4) as tell:
    for done in range(4):
        tell(f"case {done}", done)
        print("result", done)
        time.sleep(0.15)
"""


def test_nothing_is_drawn_where_no_terminal_is(capsys: pytest.CaptureFixture[str]):
    with progress("bench", 2) as tell:
        tell("case 0", 0.5)
        print("result")
    drawn = capsys.readouterr()
    assert (drawn.out, drawn.err) == ("result\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("columns", [40, 120])
def test_a_terminal_shows_what_is_under_way_and_results_go_where_they_were_sent(columns: int):
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": python_path(), "TERM": "xterm", "COLUMNS": str(columns)}
    with subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=slave, env=environment, text=True
    ) as started:
        os.close(slave)
        drawn = b""
        with contextlib.suppress(OSError):  # what a terminal raises when nobody has it any more
            while part := os.read(master, 1 << 16):
                drawn += part
        out = started.stdout.read() if started.stdout else ""
    os.close(master)
    assert started.returncode == 0
    assert out.splitlines() == [f"result {number}" for number in range(4)]
    text = drawn.decode()
    if columns >= 100:
        assert "bench case 3" in text
        assert "3 of 4" in text
        assert "left" in text


def test_of_ranks_one_draws():
    with progress("bench", 2, is_shown=False) as tell:
        tell("case 0", 1)
