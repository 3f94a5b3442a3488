"""Puts that the library carries: which of them are one call, and the part in it of each rank that takes part.

A call is an all-to-all of some ranks of the group, in which each sends one chunk to one other at most. It runs on a
stream beside the tiles; what it brings, and what it sends, is awaited as of any other move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from overweave.ir.schedule import Collective, Region
from overweave.schedules.communication import EXCHANGES
from overweave.schedules.moves.moves import Put, Written, is_by_library


class LibraryCall(NamedTuple):
    """One call. ranks: that take part, ascending. puts: (rank, peer) -> position in the list of the move."""

    ranks: tuple[int, ...]
    puts: dict[tuple[int, int], int]


MoveEnds = Callable[[int], tuple[Region, Region]]  # position of a move -> what it reads, and what it writes


def library_calls(written: Written) -> dict[int, LibraryCall]:
    """Return the calls by the position of their first move."""
    calls: dict[int, LibraryCall] = {}
    last: LibraryCall | None = None
    for at, move in enumerate(written.moves):
        if not isinstance(move, Put) or not is_by_library(move):
            last = None
            continue
        ranks, ends = move.among or tuple(range(written.world_size)), (move.rank, move.peer)
        if last is None or last.ranks != ranks or any(move.rank == sender for sender, _ in last.puts):
            last = calls[at] = LibraryCall(ranks, {})
        last.puts[ends] = at
    return calls


def launched_by(written: Written, calls: dict[int, LibraryCall], rank: int) -> Iterator[int]:
    """Yield the positions of what a rank launches: its moves, and the first one of each call that it takes part in."""
    own = {*written.of_rank(rank)}
    for at, move in enumerate(written.moves):
        if rank in calls[at].ranks if at in calls else at in own and not is_by_library(move):
            yield at


def part_of(call: LibraryCall, rank: int, number: int, ends: MoveEnds, nothing: Region) -> Collective:
    """Return a rank's part. number: of the call. nothing: a region of the rank without elements."""
    sent = [call.puts.get((rank, peer)) for peer in call.ranks]
    got = [call.puts.get((peer, rank)) for peer in call.ranks]
    return Collective(
        name=f"exchange.{rank}.{number}",
        rank=rank,
        queue=EXCHANGES,
        function="all_to_all",
        label=f"exchange.{number}",
        ranks=call.ranks,
        sources=tuple(nothing if at is None else ends(at)[0] for at in sent),
        destinations=tuple(nothing if at is None else ends(at)[1] for at in got),
    )
