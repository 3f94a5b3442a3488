"""When a copy queue makes graphs: of new places, with no call in flight, and a few at most."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overweave.memory.lower import CopyStep, MemoryRef

copy_engine = pytest.importorskip("overweave.memory.cuda.copy_engine", reason="no CUDA bindings here")
STEPS = (CopyStep(MemoryRef("x", 0, 64), MemoryRef(None, 4096, 64), 64, 2),)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the driver."""
    asked: list[str] = []

    class Graph:
        """Appends what it is asked for."""

        def __getattr__(self, name: str) -> Any:
            return lambda *given: asked.append(name)

    description = SimpleNamespace(srcDevice=0, dstDevice=0)
    monkeypatch.setattr(copy_engine.driver, "LinearGraph", Graph)
    monkeypatch.setattr(copy_engine.driver, "copy_description", lambda *given: description)
    monkeypatch.setattr(copy_engine.driver, "allocation_id", lambda address: 1)
    return asked


def test_calls_have_ended_before_a_graph_is_made_and_need_not_for_one_that_is_pointed_elsewhere(log: list[str]) -> None:
    queue = copy_engine.CopyQueue(STEPS, lambda: log.append("settled"))
    for _ in range(2):
        queue.prepare(7, {"x": 64})
        assert log == ["settled", "add_copy", "instantiate", "upload"]
    for place in range(2, copy_engine.MOST_GRAPHS + 1):
        queue.prepare(7, {"x": 64 * place})
    assert log.count("settled") == log.count("instantiate") == copy_engine.MOST_GRAPHS
    log.clear()
    queue.prepare(7, {"x": 0})
    assert log == ["retarget_copy", "upload"]


def test_memory_that_the_driver_gave_out_anew_at_the_same_address_is_another_graph(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = copy_engine.CopyQueue(STEPS)
    queue.prepare(7, {"x": 64})
    monkeypatch.setattr(copy_engine.driver, "allocation_id", lambda address: 2)
    queue.prepare(7, {"x": 64})
    assert log.count("instantiate") == 2


def test_a_queue_launches_what_was_prepared_last(log: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_engine.torch.cuda, "is_current_stream_capturing", lambda: False)
    queue = copy_engine.CopyQueue(STEPS)
    with pytest.raises(AssertionError, match="prepared before"):
        queue.launch(7, {"x": 64})
    queue.prepare(7, {"x": 64})
    queue.launch(7, {"x": 64})
    assert log[-1] == "launch"
