"""What commands may take of the processor and of memory, and how they say that it was not enough."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import pytest

from overweave.cli import limits
from overweave.errors import ScheduleUndecided


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
