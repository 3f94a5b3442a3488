"""Kernels and permuted buffers: refused before they start. Run by test_interpreter.py in a process of its own."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from overweave.errors import ScheduleError
from overweave.ir.plan import TILE_KERNEL
from overweave.runtime.backends import load
from tests.ir.wave_groups import wave_groups


def test_kernels_are_refused_before_they_start():
    plan = wave_groups(2, (40, 30, 48), (8, 8), 5, 3)
    load("host interpreter").check(plan)  # the library's calls alone
    engines = tuple(
        replace(one, engine=TILE_KERNEL) if one.queue == "tiles" else one for one in plan.realization.engines
    )
    with pytest.raises(ScheduleError, match="the blocks of buffer staged are permuted"):
        load("host interpreter").check(replace(plan, realization=replace(plan.realization, engines=engines)))
