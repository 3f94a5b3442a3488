"""What is kept is made outside of the caller's modes and of pools: torch redirects memory by thread, emulated here."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from overweave.memory import outside_modes as room
from overweave.memory.outside_modes import outside_modes_and_pools, run_in_own_thread


class Pools:
    """torch's allocator: memory that a thread asks for goes to the pool that it has begun, if any."""

    def __init__(self) -> None:
        self.begun: dict[int, str] = {}
        self.made: list[str] = []
        self.synchronized, self.exempt = 0, set[int]()

    def allocate(self) -> None:
        self.made.append(self.begun.get(threading.get_ident(), "ordinary memory"))

    def exempt_thread_from_capture(self) -> None:
        self.exempt.add(threading.get_ident())

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    """A GPU that there is not."""
    made = Pools()
    for name, answer in {"is_initialized": True, "current_device": 3, "current_stream": made}.items():
        monkeypatch.setattr(torch.cuda, name, lambda answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.made.append(f"GPU {device}"))
    monkeypatch.setattr(room, "exempt_thread_from_capture", made.exempt_thread_from_capture)
    return made


def test_what_is_kept_is_in_no_pool_that_the_thread_has_begun(pools: Pools):
    pools.begun[threading.get_ident()] = "the graphs' pool"
    pools.allocate()
    outside_modes_and_pools(pools.allocate)()
    assert pools.made == ["the graphs' pool", "GPU 3", "ordinary memory"]
    assert pools.synchronized == 1
    assert threading.get_ident() not in pools.exempt
    assert pools.exempt


@pytest.mark.parametrize("has_gpu", [False, True])
def test_it_is_made_outside_of_modes(has_gpu: bool, pools: Pools):
    @outside_modes_and_pools
    def made(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.float32)

    with patch.object(torch.cuda, "is_initialized", lambda: has_gpu), torch.inference_mode():
        kept = made(2)
    kept.add_(1)
    assert not kept.is_inference()


def test_what_it_raises_is_raised(pools: Pools):
    error = ValueError("told")

    @outside_modes_and_pools
    def failing() -> None:
        raise error

    with pytest.raises(ValueError, match="told") as caught:
        failing()
    assert caught.value is error


def test_an_interrupt_ends_both_threads(pools: Pools):
    begun, seen = threading.Event(), []

    def waiting() -> None:
        begun.set()
        try:
            for _ in range(10_000):
                threading.Event().wait(0.001)
        except KeyboardInterrupt:
            seen.append("there")
            raise

    class Interrupted(threading.Thread):
        def join(self, timeout: float | None = None) -> None:
            if not seen and begun.wait(5) and not hasattr(self, "was_interrupted"):
                self.was_interrupted = True
                raise KeyboardInterrupt
            super().join(timeout)

    with (
        patch.object(room, "threading", SimpleNamespace(Thread=Interrupted)),
        pytest.raises(KeyboardInterrupt),
    ):
        run_in_own_thread(waiting, 3)
    assert seen == ["there"]
