"""Copies by a kernel alone, bound as on a GPU: one launch a call, each with a claim counter of its own."""

from __future__ import annotations

import pytest
import torch

from overweave.ir.plan import CopyConfig
from overweave.ir.shards import tile_parts
from overweave.ir.tile_order import COPY, NO_SIGNAL, WORKSPACE, TileRow
from overweave.tuner.measure.overlap_losses import WORD_BYTES, SmCopies
from tests.runtime.without_gpu import CALLER, Launched, launched

__all__ = ["launched"]  # a fixture
ROWS, ROW_BYTES = 64, 8192


@pytest.mark.slow
def test_each_call_claims_by_a_counter_of_its_own(launched: list[Launched], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.current_stream", lambda: CALLER)
    source = torch.zeros(ROWS * ROW_BYTES // 4, dtype=torch.int32)
    target, signals = torch.empty_like(source), torch.zeros(16, dtype=torch.int32)
    table = tuple(TileRow(COPY, lo, hi, 0, WORKSPACE, lo, 0, 0, 0, NO_SIGNAL, 0) for lo, hi in tile_parts((0, ROWS), 4))
    zone = target.data_ptr(), signals.data_ptr()
    copies = SmCopies(CopyConfig(programs=8), source, ROW_BYTES, table, [zone], calls=3)
    counters = [copies(turn).data_ptr() + turn * WORD_BYTES for turn in range(3)]
    assert len(launched) == 3
    for number, launch in enumerate(launched):
        assert source.data_ptr() in launch.addresses
        assert counters[number] in launch.addresses
        assert not {*counters[:number], *counters[number + 1 :]} & launch.addresses
