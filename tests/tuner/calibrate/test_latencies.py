"""Latencies are told apart as they were put together."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings")

from overweave.hardware.machine import Latencies
from overweave.tuner.calibrate.latencies import LAUNCHES, WRITES, Raw, latencies

MADE = {
    "call": 4.0, "begin": 3.0, "kernel": 1.5, "graph": 2.5, "signal": 0.9, "flag": 2.0, "observe": 0.7,
    "stream_wait": 4.5, "join": 3.5,
}  # fmt: skip
WAITS = {
    "a launch behind it": 4.5,
    "a launch behind it, by a kernel": 2.5,
    "satisfied": 1.5,
    "satisfied, by a kernel": 0.5,
}
TAIL, SPIN = 0.6, 20.0


def raw(passes: bool = True) -> Raw:
    """What would be measured if the latencies were as made up above."""
    of = MADE
    return {
        "one_spin": of["call"] + of["kernel"] + SPIN,
        "two_spins": of["call"] + 2 * (of["kernel"] + SPIN),
        "short_spins": of["call"] + LAUNCHES * of["kernel"] + SPIN,
        "pair": TAIL + of["kernel"],
        "begin": TAIL + of["kernel"] + of["begin"],
        "write": TAIL + of["graph"] + of["flag"] + of["observe"],
        "writes": TAIL + of["graph"] + (1 + WRITES) * of["flag"] + of["observe"],
        "signalled": of["signal"] + of["stream_wait"] + of["flag"] + of["observe"],
        "launched": of["signal"] + of["stream_wait"] + of["kernel"],
        "launched_by_kernel": of["signal"] + WAITS["a launch behind it, by a kernel"] + of["kernel"],
        "passed": TAIL + of["kernel"] + WAITS["satisfied"],
        "passed_by_kernel": TAIL + of["kernel"] + WAITS["satisfied, by a kernel"],
        "join": TAIL + of["kernel"] + of["join"],
        "look": of["observe"],
        "passing": of["signal"] + of["observe"] if passes else 0.0,
    }


def test_the_differences_give_back_what_was_put_in():
    found = latencies(raw())
    assert found == pytest.approx(MADE | {f"stream_wait, {name}": us for name, us in WAITS.items()})


def test_each_number_has_its_place_in_the_machine_file():
    found = {name for name in latencies(raw()) if "," not in name}
    assert found < set(Latencies.__struct_fields__)


def test_one_gpu_alone_passes_no_signals():
    assert "signal" not in latencies(raw(passes=False))
