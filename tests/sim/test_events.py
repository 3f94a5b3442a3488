"""Clock, gates and signals."""

from __future__ import annotations

from overweave.sim.events import EventQueue, Gate, SignalCounters


def test_events_run_in_order_of_time_then_of_asking():
    clock, seen = EventQueue(), []
    for time, name in ((2, "c"), (1, "a"), (1, "b"), (0, "z")):
        clock.at(time, lambda name=name: seen.append((clock.now, name)))
    clock.at(1, lambda: clock.at(0, lambda: seen.append((clock.now, "not in the past"))))
    clock.run()
    assert seen == [(0, "z"), (1, "a"), (1, "b"), (1, "not in the past"), (2, "c")]


def test_a_gate_opens_once_when_all_have_arrived():
    opened = []
    gate = Gate(lambda: opened.append(1))
    for _ in range(3):
        gate.expect()
    for left in (1, 1, 0):
        gate.arrive()
        assert len(opened) == 1 - left


def test_a_signal_opens_at_its_count_and_not_before():
    opened = []
    signals, gate = SignalCounters(), Gate(lambda: opened.append(1))
    signals.wait((0, "pad", 3), 5, gate)
    signals.add((1, "pad", 3), 9)
    signals.add((0, "pad", 3), 4)
    assert not opened
    signals.add((0, "pad", 3), 1)
    assert opened == [1]
