"""Sums by the library, piece by piece: one matmul for each piece, and beside the next one a collective of the piece.

A piece is a stretch of rows of an all-reduce, and the same stretch of every shard of a reduce-scatter, whose partials
lie one behind the other in memory; so nothing moves but by the library.
SOURCE: the decomposition that FlashOverlap (arXiv 2504.19519), 6.1, is held against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from overweave.ir.schedule import Collective, Range, Region
from overweave.ir.shards import piece_rows
from overweave.schedules.communication import EXCHANGES, PARTIAL, Chunk, Y, is_empty
from overweave.schedules.families.summed import Family, Steps, Summed


class _Piece(NamedTuple):
    """parts: the rows that are multiplied for each member of the collective, and where to. total: where sums go."""

    parts: tuple[tuple[Range, Region], ...]
    total: Region


def _decomposed(how: Summed, rank: int) -> Steps:
    """Each piece: its products, then this rank's part of its sum."""
    function = "all_reduce" if how.everywhere else "reduce_scatter"
    for at, piece in enumerate(_reduced(how, rank) if how.everywhere else _scattered(how, rank)):
        for part, (rows, out) in enumerate(piece.parts):
            if not is_empty(rows):
                yield Chunk(name=f"multiply.{rank}.{at}.{part}", rank=rank, rows=rows, region=out)
        yield Collective(
            name=f"{function}.{rank}.{at}",
            rank=rank,
            queue=EXCHANGES,
            function="all_reduce" if how.everywhere else "reduce_scatter",
            label=f"{function}.{at}",
            ranks=tuple(range(how.split.world_size)),
            sources=tuple(out for _, out in piece.parts),
            destinations=(piece.total,),
        )


def _reduced(how: Summed, rank: int) -> Iterator[_Piece]:
    """In place, in `y`."""
    for rows in piece_rows(how.rows, how.split.pieces, how.split.alignment):
        if not is_empty(rows):
            out = how.region(Y, rank, rows)
            yield _Piece(((rows, out),), out)


def _scattered(how: Summed, rank: int) -> Iterator[_Piece]:
    """The partials of all owners side by side."""
    split, top = how.split, 0
    for piece in range(split.pieces):
        parts: list[tuple[Range, Region]] = []
        for owner in range(split.world_size):
            rows = split.piece(owner, piece)
            height = max(0, rows[1] - rows[0])
            parts.append((rows, how.region(PARTIAL, rank, (top, top + height))))
            top += height
        if any(not is_empty(rows) for rows, _ in parts):
            yield _Piece(tuple(parts), how.whole(rank, split.piece(rank, piece)))


DECOMPOSED = Family(_decomposed)
