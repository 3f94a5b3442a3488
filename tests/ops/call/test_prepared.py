"""Prepared calls are kept, but not for ever, and what a captured graph replays is never let go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from overweave.ir.problem import Problem
from overweave.ops.call import prepared
from overweave.ops.call.prepared import MOST_CALLS, Calls, Prepared
from overweave.tuner.model.choose import Choice


class Bound:
    """Stands for a plan on a GPU."""

    def __init__(self, was_captured: bool = False) -> None:
        self.was_captured = was_captured

    def __call__(self, tensors: object) -> None: ...


def call(bound: Bound | None = None, operator: str = "all_gather_matmul", source: str = "model") -> Prepared:
    problem = Problem(operator=operator, m=1, n=1, k=1, world_size=1, dtype="bfloat16")
    choice = Choice(f"{operator}.sequential", {}, "a test", source=source)
    return Prepared(operator, b"", bound or (lambda tensors: None), bound, problem=problem, choice=choice)


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often the device was waited for."""
    waited: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(None))
    return waited


def test_what_was_put_is_found():
    calls, one = Calls(), call()
    calls.put((1,), one)
    assert calls.get((1,)) is one
    assert calls.get((2,)) is None


def test_the_calls_used_longest_ago_go_first(waits: list[None]):
    calls, often = Calls(), call()
    calls.put(("often",), often)
    for number in range(3 * MOST_CALLS):
        calls.put((number,), call())
        calls[("often",)]({})
    assert len(calls) <= MOST_CALLS
    assert calls.get((0,)) is None
    assert calls.get((3 * MOST_CALLS - 1,)) is not None
    assert not waits


def test_memory_of_a_call_goes_with_it_once_the_device_is_idle(waits: list[None], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prepared, "MOST_CALLS", 8)
    calls, free, held = Calls(), Bound(), Bound(was_captured=True)
    gone, kept = weakref.ref(free), weakref.ref(held)
    calls.put(("free",), call(free))
    calls.put(("held",), call(held))
    del free, held
    for number in range(8):
        calls.put((number,), call())
    gc.collect()
    assert calls.get(("free",)) is None
    assert calls.get(("held",)) is None
    assert gone() is None
    assert kept() is not None
    assert len(waits) == 1


def test_an_operator_is_forgotten_but_for_what_callers_named():
    calls = Calls()
    calls.put((1,), call())
    calls.put((2,), call(source="asked"))
    calls.put((3,), call(operator="matmul_reduce_scatter"))
    calls.forget("all_gather_matmul")
    assert [calls.get((key,)) is not None for key in (1, 2, 3)] == [False, True, True]
