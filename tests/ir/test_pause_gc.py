"""The collector is as it was, whatever happens meanwhile."""

from __future__ import annotations

import gc

import pytest

from overweave.ir.pause_gc import without_collection


def fail() -> None:
    with without_collection():
        raise KeyError(f"enabled: {gc.isenabled()}")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_it_rests_meanwhile_and_is_then_as_before(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(KeyError, match="enabled: False"):
            fail()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_it_rests_as_long_as_any_thread_wants() -> None:
    gc.enable()
    first, second = without_collection(), without_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)  # of another thread, which is done sooner
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()
