"""Records of expert-parallel dispatch and combine: rows that a rank sends, receives, and returns (kernels/rows.py)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from overweave.kernels.arguments import SentRows


class SendSizes(NamedTuple):
    """Sizes, the same on all ranks. shard: most rows from a rank to another. most: a rank's capacity.

    words, metadata: int32 words of a row, and of its metadata. programs: that push.
    """

    shard: int
    most: int
    words: int
    metadata: int
    programs: int


class Sending(NamedTuple):
    """The rows that a rank sends. counts: int32 `[W + 1]`, rows for each rank, then error bits; None: not pushed."""

    source: SentRows
    counts: torch.Tensor | None


class Placed(NamedTuple):
    """Where received rows go. out `[most, words]`, int32; metadata: of these, or None.

    received: int32 `[W + 2]`: first row of each source, end of the last, and error bits: if any, all rows are void.
    """

    out: torch.Tensor
    metadata: torch.Tensor | None
    received: torch.Tensor


class Parts(NamedTuple):
    """Parts of tokens that come back to their ranks. parts `[most, n]`: computed by this rank, of the rows it received.

    positions: int32 `[t, W]`, row of a token among those that each rank sends back; -1: none. received: of `Placed`.
    """

    parts: torch.Tensor
    positions: torch.Tensor
    received: torch.Tensor
