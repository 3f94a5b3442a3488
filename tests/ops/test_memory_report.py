"""`memory_report`: what calls hold on this rank; all of them share one piece of memory that peers write to."""

from __future__ import annotations

import torch

import overweave as ow
from tests.ranks import run_ranks


def held() -> list[tuple[int, int]]:
    """For `run_ranks`: before any call, behind a large one, behind many smaller ones, and behind a larger one."""
    found = [ow.memory_report()]
    for rows, calls in ((64, 1), (8, 4), (256, 1)):
        for index in range(calls):
            ow.all_gather_matmul(torch.ones(rows, 16), torch.ones(16, 24 + 4 * index), plan="push")
        found.append(ow.memory_report())
    return [tuple(each) for each in found]


def test_calls_share_one_bounded_piece():
    for (none, no_calls), (large, first), (shared, more), (larger, _) in run_ranks(held, 2):
        assert (none, no_calls, first, more) == (0, 0, 1, 5)
        assert large == shared >= 2 * 64 * 16 * 4 / 2
        assert larger >= 256 * 16 * 4
