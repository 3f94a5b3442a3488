"""A wait in the caller's stream, interpreted. Run by test_interpreter.py."""

from __future__ import annotations

from threading import Event, Timer

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.memory.device.protocol import wait_kernel  # noqa: E402
from overweave.memory.device.signals import (  # noqa: E402
    ABORT,
    ABORTED_BY_PEER,
    ENDED_BY_PEER,
    PEER_ADDRESSES,
    REPORT_ADDRESS,
    REPORT_IS_SET,
    SATISFIED,
    STRIDE,
    TIMEOUT_NS,
)
from overweave.memory.layout import REPORT_WORDS  # noqa: E402

LOW, HIGH, FULL, ALSO, ALSO_FULL = 2, 5, 3, 6, 8
SIGNALS = 40  # of the plan: others of the slot nobody would clear
LATE_S = 0.2


class Memory:
    """What the wait is for has come."""

    def __init__(self) -> None:
        self.signals = torch.zeros((SIGNALS + 1) * STRIDE.value, dtype=torch.int32)
        self.signals[LOW * STRIDE.value : HIGH * STRIDE.value : STRIDE.value] = FULL
        self.signals[ALSO * STRIDE.value] = ALSO_FULL
        self.words = torch.zeros(2 * STRIDE.value, dtype=torch.int32)
        self.report = torch.zeros(REPORT_WORDS, dtype=torch.int32)
        self.limits = torch.zeros(PEER_ADDRESSES.value + 1, dtype=torch.int64)
        self.limits[TIMEOUT_NS.value], self.limits[REPORT_ADDRESS.value] = 10**9, self.report.data_ptr()
        self.limits[PEER_ADDRESSES.value] = self.words.data_ptr()

    def wait(self, also: int = ALSO) -> None:
        numbers = (LOW, HIGH, FULL, also, ALSO_FULL, 0, SIGNALS, 1)
        wait_kernel[(1,)](self.signals, self.words, self.limits, *numbers)


@pytest.mark.parametrize("late", [*range(LOW, HIGH), ALSO])
def test_it_ends_with_the_last_signal(late: int):
    memory = Memory()
    memory.wait()
    memory.signals[late * STRIDE.value] -= 1

    has_come = Event()

    def come() -> None:
        has_come.set()
        memory.signals[late * STRIDE.value] += 1

    Timer(LATE_S, come).start()
    memory.wait()
    assert has_come.is_set()
    assert memory.words[ABORT.value] == memory.report[REPORT_IS_SET.value] == 0
    assert memory.signals.max() == ALSO_FULL


def test_others_are_not_waited_for():
    memory = Memory()
    memory.signals[ALSO * STRIDE.value] = 0
    memory.wait(also=-1)


def test_an_alarm_ends_it_and_with_it_the_waits_of_streams():
    memory = Memory()
    memory.signals[LOW * STRIDE.value] = 0

    has_come = Event()

    def abort() -> None:
        has_come.set()
        memory.words[ABORT.value] = ABORTED_BY_PEER.value

    Timer(LATE_S, abort).start()
    memory.wait()
    assert has_come.is_set()
    assert memory.report[REPORT_IS_SET.value] == ENDED_BY_PEER.value
    assert memory.signals[:: STRIDE.value].tolist() == [SATISFIED.value] * SIGNALS + [0]
    assert memory.signals.count_nonzero() == SIGNALS
