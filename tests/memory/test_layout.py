"""Slots: signals at the same words under every plan, buffers behind them, nothing on top of anything else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.dtype import ITEMSIZE_BYTES, Dtype
from overweave.ir.operators.registry import operator_of
from overweave.ir.plan import SIGNAL_CAPACITY
from overweave.ir.problem import Problem
from overweave.ir.schedule import Schedule, SignalPad
from overweave.memory.layout import ALIGNMENT_BYTES, SIGNAL_STRIDE_BYTES, lay_out
from overweave.schedules.catalog.catalog import build, names
from tests.ir.two_ranks import sums

SIGNALS_BYTES = SIGNAL_CAPACITY * SIGNAL_STRIDE_BYTES


def schedule_of(name: str, m: int = 37) -> Schedule:
    operator = name.split(".")[0]
    rows = operator_of(operator).whole_rows(m, 3)
    problem = Problem(operator=operator, m=rows, n=24, k=16, world_size=3, dtype="bfloat16")
    return build(name, problem, {}).schedule


@pytest.mark.parametrize("dtype", ITEMSIZE_BYTES)
def test_buffers_are_aligned_apart_and_behind_all_signals(dtype: Dtype):
    """Behind the room for all signals, not behind those of this plan: data of one plan is no signal of the next."""
    for schedule in map(schedule_of, names()):
        layout = lay_out(schedule, dtype)
        kept = {buffer.name: buffer for buffer in schedule.buffers if buffer.home in ("symmetric", "local")}
        assert layout.buffers.keys() == kept.keys()
        end = SIGNALS_BYTES
        for buffer, offset in sorted(layout.buffers.items(), key=lambda item: item[1]):
            assert offset >= end, (schedule.name, buffer)
            assert offset % ALIGNMENT_BYTES == 0, (schedule.name, buffer)
            end = offset + kept[buffer].rows * kept[buffer].cols * ITEMSIZE_BYTES[dtype]
        assert end <= layout.size_bytes


def test_every_signal_has_a_line_of_its_own():
    for schedule in map(schedule_of, names()):
        layout = lay_out(schedule, "bfloat16")
        offsets = [layout.signal_offset(pad.name, index) for pad in schedule.pads for index in range(pad.size)]
        assert offsets == [number * SIGNAL_STRIDE_BYTES for number in range(layout.signals)], schedule.name


def test_pads_are_numbered_in_the_schedules_order():
    layout = lay_out(sums(), "float32")
    assert layout.pads == {"arrived": 0, "computed": 2}
    assert layout.signals == 3
    assert layout.signal("computed", 0) == 2


def test_a_plan_without_rows_still_has_a_slot():
    assert lay_out(schedule_of("all_gather_matmul.push", m=0), "bfloat16").size_bytes >= SIGNALS_BYTES


def test_more_signals_than_a_slot_holds():
    assert lay_out(replace(sums(), pads=(SignalPad("arrived", SIGNAL_CAPACITY),)), "float32")
    with pytest.raises(ScheduleError) as caught:
        lay_out(replace(sums(), pads=(SignalPad("arrived", SIGNAL_CAPACITY), SignalPad("computed", 1))), "float32")
    assert f"{SIGNAL_CAPACITY + 1} signals" in str(caught.value)
