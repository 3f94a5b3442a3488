"""Rows that tables choose, sent to peers and put in place, in plain torch: what kernels/rows.py does, on CPU ranks."""

from __future__ import annotations

import torch

from overweave.kernels.arguments import SentRows
from overweave.runtime.handwritten import AnyBuffer
from overweave.runtime.sent_rows import Parts, Placed, Sending, SendSizes

LATE, TOO_MANY = 2, 4  # bits of a reason, behind those of moe/routing
VOID = -1  # all bits: NaN in any dtype, and no expert


def push(sizes: SendSizes, rank: int, sending: Sending, buffer: AnyBuffer) -> None:
    """Stores counts and rows at all peers."""
    (rows, metadata, *_), counts = sending
    for peer in range(sending.source.starts.shape[0] - 1):
        if peer == rank:
            continue
        if counts is not None:
            buffer("counts", peer)[rank] = counts
        at = _sent_to(sending.source, peer)
        landing = slice(rank * sizes.shard, rank * sizes.shard + len(at))
        buffer("landed", peer)[landing] = rows[at]
        if metadata is not None:
            buffer("metadata", peer)[landing] = metadata[at]


def _sent_to(source: SentRows, peer: int) -> torch.Tensor:
    low, high = source.starts[peer : peer + 2].tolist()
    at: torch.Tensor = torch.arange(low, high) if source.indices is None else source.indices[low:high].long()
    return at[at < source.rows.shape[0]]


def land(sizes: SendSizes, rank: int, sending: Sending, placed: Placed, buffer: AnyBuffer) -> None:
    """Puts the rows of all ranks together."""
    assert sending.counts is not None
    table = buffer("counts", rank).clone()
    table[rank] = sending.counts
    counts, ranks = table[:, :-1], table.shape[0]
    reason = LATE if bool((table[:, -1] & LATE).any()) else 0
    reason |= TOO_MANY if int(counts.sum(0).max()) > sizes.most else 0
    starts = torch.cat([counts.new_zeros(1), counts[:, rank].cumsum(0)])
    placed.received.copy_(torch.cat([starts, starts.new_full((1,), reason)]))
    own = _sent_to(sending.source, rank)
    names = (("landed", sending.source.rows, placed.out), ("metadata", sending.source.metadata, placed.metadata))
    for name, mine, out in names:
        if out is None:
            continue
        out.fill_(VOID if reason else 0)
        for source in range(ranks if not reason else 0):
            low, high = starts[source : source + 2].tolist()
            landed = slice(source * sizes.shard, source * sizes.shard + high - low)
            out[low:high] = mine[own] if source == rank else buffer(name, rank)[landed]


def add(sizes: SendSizes, rank: int, own: Parts, y: torch.Tensor, buffer: AnyBuffer) -> None:
    """Adds the parts of each token in fp32, in the order of ranks; y `[t, n]`, rounded once."""
    parts, positions, received = own
    *starts, reason = received.tolist()
    if reason:
        y.fill_(torch.nan)
        return
    total = torch.zeros(y.shape, dtype=torch.float32)
    landed = buffer("landed", rank).view(parts.dtype)
    for source in range(positions.shape[1]):
        here = (positions[:, source] >= 0).nonzero()[:, 0]
        at = positions[here, source].long()
        total[here] += (parts[starts[rank] + at] if source == rank else landed[source * sizes.shard + at]).float()
    y.copy_(total)
