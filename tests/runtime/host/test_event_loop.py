"""Launches in threads of their own: done when they are, and failed when they have."""

from __future__ import annotations

import threading

import pytest

from overweave.runtime.host.emulate import LaunchThreads


def test_what_a_launch_raises_is_raised_however_late_it_comes(monkeypatch: pytest.MonkeyPatch):
    may_fail, is_alive = threading.Event(), threading.Thread.is_alive

    def fail() -> None:
        may_fail.wait()
        raise ValueError("the kernel")

    def asked(thread: threading.Thread) -> bool:
        """The launch fails while one asks whether it has ended."""
        may_fail.set()
        thread.join()
        return is_alive(thread)

    is_done = LaunchThreads().start(fail)
    assert not is_done()
    monkeypatch.setattr(threading.Thread, "is_alive", asked)
    with pytest.raises(ValueError, match="the kernel"):
        is_done()
