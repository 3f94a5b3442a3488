"""The head of a call, interpreted: what it clears, and what it leaves alone. Run by test_interpreter.py."""

from __future__ import annotations

import pytest
import torch

from overweave.runtime.interpreted import interpreter

interpreter.repair()

from overweave.memory.device.protocol import EPOCH, STATE_WORDS, USED_ADDRESS, USED_SIGNALS, begin_kernel  # noqa: E402
from overweave.memory.device.signals import ABORT, COMPLETED, PEER_ADDRESSES, STRIDE, TIMEOUT_NS  # noqa: E402

EARLIER, SIGNALS = 4, 3  # calls before this one; signals of each
WORDS = (COMPLETED.value + 1) * STRIDE.value


@pytest.mark.parametrize("is_aborted", [False, True])
def test_signals_are_cleared_but_behind_an_abort(is_aborted: bool):
    """What the watcher has set there satisfies streams of calls that were launched long before."""
    before, own = (torch.full((SIGNALS * STRIDE.value,), 7, dtype=torch.int32) for _ in range(2))
    words, claims = torch.zeros(WORDS, dtype=torch.int32), torch.ones(4, dtype=torch.int32)
    words[ABORT.value] = int(is_aborted)
    words[COMPLETED.value * STRIDE.value] = EARLIER
    state, limits = (torch.zeros(size, dtype=torch.int64) for size in (STATE_WORDS, PEER_ADDRESSES.value + 1))
    state[EPOCH.value], state[USED_ADDRESS.value], state[USED_SIGNALS.value] = EARLIER, before.data_ptr(), SIGNALS
    limits[TIMEOUT_NS.value], limits[PEER_ADDRESSES.value] = 10**9, words.data_ptr()

    begin_kernel[(1,)](state, own, claims, words, limits, SIGNALS, 0, 1, BLOCK=8)

    assert before[:: STRIDE.value].tolist() == [7 if is_aborted else 0] * SIGNALS
    assert own.unique().tolist() == [7]
    assert claims.tolist() == [0] * 4
    assert words[COMPLETED.value * STRIDE.value] == EARLIER
    assert state.tolist() == [EARLIER + 1, own.data_ptr(), SIGNALS]
