"""Rows that tables on the device choose, and that ranks send to each other: what those who move them are given."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.kernels.arguments import SentRows


class SendSizes(NamedTuple):
    """What rows are sent by, alike on all ranks. shard: the most that a rank sends to another. most: that a rank
    receives. words, beside: int32 words of a row, and of what travels beside it. programs: that push."""

    shard: int
    most: int
    words: int
    beside: int
    programs: int


class Sending(NamedTuple):
    """The rows that a rank sends. source: kernels/arguments.SentRows. counts: int32 `[W + 1]`, how many to each rank,
    and why they may be wrong; None: nobody asks."""

    source: SentRows
    counts: torch.Tensor | None


class Placed(NamedTuple):
    """Where received rows go. out `[most, words]`, beside `[most, words beside]` or None, int32. received: int32
    `[W + 2]`: where the rows of each source begin, where the last end, and the reason for which all are void."""

    out: torch.Tensor
    beside: torch.Tensor | None
    received: torch.Tensor


class Parts(NamedTuple):
    """What comes back of tokens. parts `[most, n]`: of this rank, of the rows that it received. places: int32 `[t, W]`,
    which row of those that a rank sends back is a token's; -1: none. received: of `Placed`."""

    parts: torch.Tensor
    places: torch.Tensor
    received: torch.Tensor
