"""Which rows of a sequence ranks have, and what the queries of one see of the keys of another: one rectangle, or none.

contiguous: the shards of torch.chunk. zigzag: of 2 W pieces rank r has the r-th from the front and the r-th from the
end, one behind the other; a causal mask is as much work for every rank then. Rows are stored rank by rank.
SOURCE: Llama 3 (arXiv 2407.21783) 3.3.2; torch's `context_parallel` calls it head-tail.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from overweave.ir.schedule import Range
from overweave.ir.shards import owned_rows, shard_rows

CONTIGUOUS: Final = "contiguous"
ZIGZAG: Final = "zigzag"


class Piece(NamedTuple):
    """Queries of a rank, and keys of a shard, as these are stored. Every query sees every key, but for

    is_causal: keys behind its place, where the last query and the last key have one place; and
    left: keys more than so many places before its own; None: none of these.
    """

    queries: slice
    keys: slice
    is_causal: bool = False
    left: int | None = None

    @property
    def pairs(self) -> int:
        """How many pairs of a query and a key that it sees there are."""
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        offset = keys - queries  # of a query's place among the keys
        seen = _sum_of_clamped(queries, offset + 1, keys) if self.is_causal else queries * keys
        return seen if self.left is None else seen - _sum_of_clamped(queries, offset - self.left, keys)


def _sum_of_clamped(count: int, first: int, most: int) -> int:
    """The sum of first, first + 1, ..., of so many, each at least zero and at most `most`."""
    low, high = max(first, 0), min(first + count, most)
    rising = (low + high - 1) * (high - low) // 2 if low < high else 0
    return rising + most * (first + count - max(high, first) if first + count > most else 0)


class Sequence(NamedTuple):
    """A sequence that ranks share, and its mask. window: how many keys a query sees, its own the last; None: all."""

    rows: int
    ranks: int
    is_causal: bool = False
    is_zigzag: bool = False
    window: int | None = None

    def stored(self, rank: int) -> Range:
        """The rows of a rank among those of all ranks as they are stored."""
        return shard_rows(self.rows, self.ranks, rank)

    def own(self, rank: int) -> int:
        """How many rows a rank has."""
        low, high = self.stored(rank)
        return high - low

    def places(self, rank: int, part: slice) -> list[Range]:
        """Where a part of a rank's rows stands in the sequence."""
        found, begin = [], 0
        for low, high in owned_rows(self.rows, self.ranks, rank, 1 + self.is_zigzag):
            first, last = max(part.start - begin, 0), min(part.stop - begin, high - low)
            if first < last:
                found.append((low + first, low + last))
            begin += high - low
        return found

    def piece(self, rank: int, source: int) -> Piece | None:
        """What a rank's queries see of a shard; None: nothing."""
        queries, keys = slice(0, self.own(rank)), slice(0, self.own(source))
        if not queries.stop or not keys.stop:
            return None
        if source == rank:
            return Piece(queries, keys, self.is_causal, None if self.window is None else self.window - 1)
        if not self.is_causal:
            return Piece(queries, keys)
        if self.is_zigzag:  # heads ascend by rank, tails descend
            half = keys.stop // 2
            return Piece(queries, slice(0, half)) if source < rank else Piece(slice(half, queries.stop), keys)
        if source > rank:
            return None
        return Piece(queries, keys) if self.window is None else self._seen_by_window(rank, source, self.window - 1)

    def _seen_by_window(self, rank: int, source: int, reach: int) -> Piece | None:
        """Of an earlier shard: its last keys, by the first queries."""
        (begin, end), (low, high) = self.stored(rank), self.stored(source)
        queries = min(end - begin, high + reach - begin)
        if queries < 1:
            return None
        keys = slice(max(0, begin - reach - low), high - low)
        return Piece(slice(0, queries), keys, left=reach - (begin + queries - high))


def offsets_within(offsets: torch.Tensor, places: list[Range]) -> torch.Tensor:
    """Where documents that begin at `offsets` of a sequence begin among rows that stand at some places of it, int32."""
    counts = [(offsets - low).clamp(0, high - low) for low, high in places]
    return torch.stack(counts).sum(0).int() if counts else torch.zeros_like(offsets, dtype=torch.int32)


def zigzag_order(rows: int, ranks: int, device: torch.device | None = None) -> torch.Tensor:
    """The places `[rows]` of a sequence in the order in which ranks store them: `x[zigzag_order(rows, W)].chunk(W)` are
    the shards, and `.argsort()` of it undoes that. rows: a multiple of 2 W."""
    pieces = torch.arange(rows, device=device).view(2, ranks, rows // (2 * ranks))
    return torch.stack([pieces[0], pieces[1].flip(0)], 1).flatten()
