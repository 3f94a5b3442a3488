"""Files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import pytest

from overweave.tuner import caches
from overweave.tuner.caches import check_writable, folder_lock, replace_whole, write_whole
from tests.clock import slowness


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path):
    path, link = tmp_path / "a.json", tmp_path / "link.json"
    link.symlink_to(path)
    for data in (b"one", b"two"):
        write_whole(link, data)
        assert (path.read_bytes(), link.is_symlink()) == (data, True)
    assert sorted(tmp_path.iterdir()) == [path, link]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_file(error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def fail(descriptor: int) -> None:
        raise error("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error):
        write_whole(path, b"new")
    assert [(each, each.read_bytes()) for each in tmp_path.iterdir()] == [(path, b"old")]


def test_what_is_no_plain_file_is_written_to():
    for write in (check_writable, lambda path: write_whole(path, b"gone")):
        write(Path("/dev/null"))
    assert Path("/dev/null").is_char_device()


def test_what_cannot_be_written_is_told_before(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "absent" / "a.json", tmp_path / "file" / "a.json"):
        with pytest.raises(OSError, match=r"."):
            check_writable(path)
    check_writable(tmp_path / "file")
    check_writable(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_pipe_that_nobody_reads_gives_way(tmp_path: Path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    replace_whole(path, b"data")
    assert path.read_bytes() == b"data"


def test_nobody_waits_longer_than_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "LOCK_TIMEOUT_S", 0.05)
    with folder_lock(tmp_path):
        start_s = time.monotonic()
        with folder_lock(tmp_path):
            assert 0.05 <= time.monotonic() - start_s < 1.0 * slowness()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*anything: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with folder_lock(tmp_path):
        pass
