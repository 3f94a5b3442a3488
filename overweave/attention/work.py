"""What one rank computes of attention that ranks share, and of its gradients, whatever moves keys and values."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from overweave.attention.pieces import Merged, Result, RowSum, add_rows, kernels_for
from overweave.attention.plain import Seen
from overweave.attention.sequence import Piece, Sequence, offsets_within

Rows = tuple[torch.Tensor, ...]  # of keys and of values, `[rows, columns]`
Landed = tuple[slice, Rows]  # some of the own rows, and a part of the gradients of their keys and values


class Call(NamedTuple):
    """A call on one rank: q `[b, h, s, d]`, k and v `[b, g, s, d]`. offsets: of documents in the whole sequence.
    where: as the ops of collectives take it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    offsets: torch.Tensor | None
    sequence: Sequence
    plan: str
    scale: float
    where: dict[str, Any]

    @property
    def rank(self) -> int:
        """Of the group."""
        rank: int = self.where["place"][0]
        return rank

    @property
    def columns(self) -> int:
        """Of keys, as rows."""
        b, g, _, d = self.k.shape
        return b * g * d

    @property
    def pieces(self) -> int:
        """How many shards this rank sees something of."""
        ranks = self.sequence.ranks
        return sum(self.sequence.piece(self.rank, source) is not None for source in range(ranks))

    def piece(self, source: int) -> tuple[Piece, Seen] | None:
        """What this rank sees of a shard."""
        piece = self.sequence.piece(self.rank, source)
        if piece is None:
            return None
        offsets = None
        if self.offsets is not None:
            of_queries = offsets_within(self.offsets, self.sequence.places(self.rank, piece.queries))
            offsets = of_queries, offsets_within(self.offsets, self.sequence.places(source, piece.keys))
        return piece, Seen(self.scale, piece.is_causal, piece.left, offsets)

    def keys_and_values(self, keys: slice, shard: Rows) -> tuple[torch.Tensor, ...]:
        """Of a piece of a shard; of none: of the own one."""
        if not shard:
            return self.k[:, :, keys], self.v[:, :, keys]
        return tuple(as_heads(each[keys], self.k) for each in shard)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`[b, h, s, d]` -> `[s, b * h * d]`, elements of a row side by side; of one sequence whose heads lie so a view."""
    b, h, s, d = x.shape
    rows = x.permute(2, 0, 1, 3).reshape(s, b * h * d)  # of one column a head it may be a view whose columns lie apart
    return rows if rows.stride(1) == 1 else rows.clone(memory_format=torch.contiguous_format)


def as_heads(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The opposite, a view, with heads as `like` has them."""
    b, h, _, d = like.shape
    return rows.view(rows.shape[0], b, h, d).permute(1, 2, 0, 3)


class AttendWork:
    """The pieces of a call, and their merge into its results."""

    def __init__(self, call: Call, results: Result) -> None:
        self._call, self._merged = call, Merged(call.pieces, results)

    def piece(self, source: int, shard: Rows) -> None:
        """Of a shard's keys and values, `[rows, columns]` each; none of the own ones."""
        if (found := self._call.piece(source)) is not None:
            piece, seen = found
            keys, values = self._call.keys_and_values(piece.keys, shard)
            queries = self._call.q[:, :, piece.queries]
            self._merged.add(piece.queries, *kernels_for(queries).attend(queries, keys, values, seen))

    def add(self, room: Rows, earlier: Rows) -> None:
        """It leaves nothing for the owners of keys."""

    def finish(self, landed: list[Landed]) -> None:
        """The last piece was merged into the results."""


class GradientWork:
    """The gradients of a call, piece by piece. of: the gradient of its result, the result, and its log-sum-exp."""

    def __init__(self, call: Call, of: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]) -> None:
        self._call, self._of, self._results = call, of, results
        self._dq = RowSum(call.pieces, results[0])
        self._parts: tuple[slice, list[torch.Tensor]] | None = None

    def piece(self, source: int, shard: Rows) -> None:
        """As of AttendWork. The parts of the gradients of the shard are kept for `add`."""
        self._parts = None
        if (found := self._call.piece(source)) is None:
            return
        (piece, seen), call = found, self._call
        dout, out, lse = (each[:, :, piece.queries] for each in self._of)
        keys, values = call.keys_and_values(piece.keys, shard)
        queries = call.q[:, :, piece.queries]
        dq, *parts = kernels_for(queries).gradients((dout, out, lse), queries, keys, values, seen)
        self._dq.add(piece.queries, dq)
        self._parts = piece.keys, parts

    def add(self, room: Rows, earlier: Rows) -> None:
        """Makes in room, `[rows, columns]` of the shard, the sum of what the last piece has of its gradients and what
        ranks before have, if any do."""
        if self._parts is None:
            return
        keys, parts = self._parts
        for rows, part, before in zip(room, parts, earlier or (None, None), strict=False):
            add_rows(as_heads(rows, part), keys, part, None if before is None else as_heads(before, part))
        self._parts = None

    def finish(self, landed: list[Landed]) -> None:
        """Adds what ranks have of the gradients of the own keys and values, in this order."""
        for index, result in enumerate(self._results[1:]):
            total = RowSum(len(landed), result)
            for keys, parts in landed:
                total.add(keys, as_heads(parts[index], self._call.k))
