"""Where things are kept: a home, another folder, or none at all."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from overweave.tuner.caches import cache_folders
from overweave.tuner.space.target import Target
from overweave.tuner.store.cache import fingerprint, knowledge, save

NAMED = ("OVERWEAVE_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "HOME")


@pytest.fixture
def _without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container runs for a user whom it does not know."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in NAMED:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_without_home")
def test_a_user_without_a_home_is_told_and_served():
    with pytest.warns(RuntimeWarning, match="OVERWEAVE_CACHE_DIR would name a folder"):
        folder = cache_folders()["overweave"]
    assert cache_folders()["overweave"] == folder  # told once
    assert folder.stat().st_mode & 0o077 == 0
    own = fingerprint(Target("cpu"), 2)
    assert folder in save((), own).parents
    assert knowledge(Target("cpu"), 2).own.fingerprint == own


@pytest.mark.usefixtures("_without_home")
def test_a_named_folder_needs_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OVERWEAVE_CACHE_DIR", str(tmp_path))
    assert cache_folders()["overweave"] == tmp_path


def test_homes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in NAMED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folders() == {
        "overweave": tmp_path / ".cache" / "overweave",
        "triton": tmp_path / ".triton" / "cache",
    }
    assert not list(tmp_path.iterdir())
