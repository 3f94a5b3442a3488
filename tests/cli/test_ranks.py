"""Ranks started through torchrun: how their end is told."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from overweave.cli.ranks import torchrun
from overweave.hardware.multicast import WITHOUT
from tests.source_tree import python_path

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("told", [{}, {"NCCL_NVLS_ENABLE": "2"}, {"NVSHMEM_DISABLE_NVLS": "1"}])
def test_where_one_library_goes_without_multicast_all_do(monkeypatch: pytest.MonkeyPatch, told: dict[str, str]):
    started = []

    def begin(command: list[str], env: dict[str, str], **options: object):
        started.append({name: env[name] for name in WITHOUT if name in env})
        return contextlib.nullcontext(SimpleNamespace(wait=lambda: 0))

    monkeypatch.setattr(subprocess, "Popen", begin)
    for name in WITHOUT:
        monkeypatch.delenv(name)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    torchrun(["any"], 1)
    assert started == [dict(WITHOUT) if "NVSHMEM_DISABLE_NVLS" in told else told]


def test_a_rank_that_refuses_is_told_once_and_by_its_exit_code(capfd: pytest.CaptureFixture[str]):
    assert torchrun(["overweave.cli.main", "show", "nowhere"], 1, {"PYTHONPATH": python_path()}) == 2
    told = capfd.readouterr().err
    assert told.count("overweave: schedule nowhere") == 1
    assert "Traceback" not in told


def test_a_rank_that_was_killed_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "dying.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    assert torchrun(["dying"], 1, {"PYTHONPATH": python_path(tmp_path)}) == 128 + signal.SIGKILL
    told = capfd.readouterr().err
    assert "overweave: rank 0 was ended by SIGKILL" in told
    assert "Traceback" not in told


def test_what_ends_us_ends_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "waiting.py").write_text("import pathlib, time\npathlib.Path('there').touch()\ntime.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                while not Path("there").exists() and self.poll() is None:
                    pass
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        torchrun(["waiting"], 1, {"PYTHONPATH": python_path(tmp_path)})
    assert started[0].returncode == 128 + signal.SIGTERM  # its own end, behind that of its rank


def test_a_cursor_that_an_ended_rank_has_hidden_is_shown(tmp_path: Path):
    (tmp_path / "hiding.py").write_text("import os\nos.write(2, b'\\x1b[?25l')\nos.kill(os.getpid(), 9)\n")
    master, slave = pty.openpty()
    command = [sys.executable, "-c", "from overweave.cli.ranks import torchrun; torchrun(['hiding'], 1)"]
    environment = {**os.environ, "PYTHONPATH": python_path(tmp_path), "TERM": "xterm"}
    with subprocess.Popen(command, stderr=slave, env=environment) as started:
        os.close(slave)
        told = b""
        with contextlib.suppress(OSError):  # what a terminal raises when nobody has it any more
            while part := os.read(master, 1 << 16):
                told += part
    os.close(master)
    assert started.returncode == 0
    assert -1 < told.rfind(b"\x1b[?25l") < told.rfind(b"\x1b[?25h")
