"""What the caller's stream waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overweave.ir.plan import LIBRARY
from overweave.kernels.arguments import SignalWords
from overweave.memory.layout import lay_out
from overweave.runtime.gpu import launcher
from overweave.runtime.gpu.launcher import DeviceSignals, Launch, PlanWaits, merge_adjacent, pack_waits
from overweave.runtime.kernel_calls.call import KernelCall, wait_call
from tests.ir.launch.test_waits_without_deadline import planned
from tests.runtime.without_gpu import launched

__all__ = ["launched"]  # a fixture

NOBODY = (-1, 0)


def test_neighbours_that_count_alike_are_one_range():
    assert merge_adjacent({}) == []
    counts = {7: 1, 1: 1, 2: 1, 3: 2, 4: 2, 6: 1}
    assert merge_adjacent(counts) == [DeviceSignals(1, 3, 1), DeviceSignals(3, 5, 2), DeviceSignals(6, 8, 1)]


@pytest.mark.parametrize(
    ("counts", "launches"),
    [
        ({}, []),
        ({4: 1}, [(4, 5, 1, *NOBODY)]),
        ({4: 1, 5: 1, 6: 1}, [(4, 7, 1, *NOBODY)]),
        ({4: 1, 6: 3}, [(6, 7, 3, 4, 1)]),
        ({1: 2, 4: 1, 5: 1, 6: 1}, [(4, 7, 1, 1, 2)]),
        ({1: 1, 2: 1, 4: 1, 5: 1, 6: 1}, [(4, 7, 1, *NOBODY), (1, 3, 1, *NOBODY)]),
        ({0: 1, 2: 2, 4: 3, 6: 1, 7: 1}, [(6, 8, 1, 0, 1), (4, 5, 3, 2, 2)]),
    ],
    ids=str,
)
def test_a_kernel_waits_for_a_range_and_for_one_more(counts: dict[int, int], launches: list[tuple[int, ...]]):
    found = list(pack_waits(merge_adjacent(counts)))
    assert found == launches
    told = [(number, full) for low, high, full, *_ in found for number in range(low, high)]
    told += [(also, full) for *_, also, full in found if also >= 0]
    assert sorted(told) == sorted(counts.items())


def test_a_report_names_the_operation_by_its_place_in_its_queue(monkeypatch: pytest.MonkeyPatch):
    plan = planned("all_gather_matmul.per_shard", 3)
    layout, launches = lay_out(plan.schedule, "bfloat16"), caught(monkeypatch)
    bound, expected = PlanWaits(plan, 1, layout, PROTOCOL), []
    by_library = [one for one in plan.schedule.of_rank(1) if plan.realization.engine_of(one.queue) == LIBRARY]
    for number, operation in enumerate(by_library):
        bound.of(operation)(number)
        for wait in operation.all_waits:
            low, high = (layout.signal(wait.pad, end) for end in wait.signals)
            expected.append((number, (low, high, wait.count, *NOBODY, number, layout.signals, 3)))
    assert launches == expected
    assert len(expected) >= 2


PROTOCOL = SignalWords("signals", "words", "limits", 3)


def caught(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[int, ...]]]:
    """(stream, numbers) of every launch."""
    launches: list[tuple[int, tuple[int, ...]]] = []

    def launch(call: KernelCall) -> Any:
        assert call.arguments[:3] == [*PROTOCOL[:3]]
        return SimpleNamespace(start=lambda stream: launches.append((stream, tuple(call.arguments[3:]))))

    monkeypatch.setattr(launcher, "Launch", launch)
    return launches


@pytest.mark.slow
def test_it_is_compiled_once_whatever_its_numbers(launched: list[str]):
    words = [torch.zeros(64, dtype=dtype) for dtype in (torch.int32, torch.int32, torch.int64)]
    numbers = ((1, 1, 1, 1, 1, 1, 1, 1), (16, 32, 16, -1, 0, -3, 16, 16), (3, 5, 7, 9, 11, 13, 15, 5))
    calls = [wait_call(SignalWords(*words, each[7]), each[:5], each[5], each[6]) for each in numbers]
    assert len({id(Launch(call).compiled) for call in calls}) == 1
