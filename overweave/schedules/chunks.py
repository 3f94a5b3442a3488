"""Schedules written by hand: which chunk of a gathered tensor each rank pushes or pulls, and in which order.

A `Gather` is a list of moves of chunks, any rank's unlike any other's. Ranks begin with their shards of the tensor's
rows, as `torch.chunk` deals them, and end with all of it. What a move reads must be its rank's own or have arrived
there by an earlier move: that dependence is found, not written. Templates write such lists too
(schedules/gather_templates.py).
SOURCE: AutoOverlap 5.1: chunks, P2P as push or pull, collectives, dependences as (rank, index).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

from msgspec import Struct

from overweave.errors import InputError, ScheduleError
from overweave.ir.schedule import Range

After = tuple[tuple[int, int], ...]


class Chunk(Struct, frozen=True):
    """A rectangle of the whole tensor, as a matrix: rows `[lo, hi)` and columns `[lo, hi)`; cols None: whole rows.

    Raises InputError for what is no pair of ints.
    """

    rows: Range
    cols: Range | None = None

    def __post_init__(self) -> None:
        for name, pair in (("rows", self.rows), ("cols", (0, 0) if self.cols is None else self.cols)):
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(end, int) for end in pair):
                raise InputError(f"chunk with {name} {str(pair)[:40]}", "not two ints", "Pass a tuple (low, high)")

    def __str__(self) -> str:
        return f"[{self.rows[0]}:{self.rows[1]}]" + (f"[{self.cols[0]}:{self.cols[1]}]" if self.cols else "")


class Put(Struct, frozen=True):
    """`rank` pushes a chunk to `peer`. lane: moves of one rank in one lane are carried one after the other, lanes
    beside each other. after: (rank, index), the index-th move of a rank that must be complete before, if data does not
    say so already.
    """

    rank: int
    peer: int
    chunk: Chunk
    lane: int = 0
    after: After = ()


class Get(Struct, frozen=True):
    """`rank` pulls a chunk from `peer`; the rest as in Put."""

    rank: int
    peer: int
    chunk: Chunk
    lane: int = 0
    after: After = ()


class Collective(Struct, frozen=True):
    """The library's all-gather of one chunk of each rank's own shard, on every rank, before the kernel's tiles.

    It is a move of every rank, and counts as one of each in `after`. Chunks are whole rows, and may be empty.
    """

    chunks: tuple[Chunk, ...]
    after: After = ()


Move = Put | Get | Collective


class Gather(Struct, frozen=True):
    """Moves after which every rank of `world_size` has all of a tensor. They stand in the order of their launch, and
    tiles run in that order too: what the last move that they need brings comes last.

    A move waits for the moves that bring what it reads, and for those in its `after`; a tile for those that bring its
    rows. Raises InputError for what is no list of moves; `compile` raises ScheduleError for moves that leave a gap.
    """

    world_size: int
    moves: tuple[Move, ...]

    def __post_init__(self) -> None:
        moves: Iterable[object] = self.moves
        for at, move in enumerate(moves):
            if not isinstance(move, Put | Get | Collective):
                found = f"it is a {type(move).__name__}"
                raise InputError(f"move {at} of a gather by hand", found, "Pass Put, Get or Collective")
            chunks: Iterable[object] = move.chunks if isinstance(move, Collective) else (move.chunk,)
            for chunk in chunks:
                if not isinstance(chunk, Chunk):
                    found = f"its chunk is a {type(chunk).__name__}"
                    raise InputError(f"move {at} of a gather by hand", found, "Pass Chunk((low, high))")

    def __str__(self) -> str:
        digest = blake2b(repr(self).encode(), digest_size=4).hexdigest()
        return f"gather_by_hand moves={len(self.moves)} #{digest}"

    def of_rank(self, rank: int) -> Iterator[int]:
        """Positions of a rank's moves."""
        return (at for at, move in enumerate(self.moves) if isinstance(move, Collective) or move.rank == rank)

    def places(self) -> dict[tuple[int, int], int]:
        """(rank, index) -> position in `moves`."""
        return {(rank, index): at for rank in range(self.world_size) for index, at in enumerate(self.of_rank(rank))}


class Box(Struct, frozen=True):
    """A rectangle with both sides known. Never empty where it is held."""

    rows: Range
    cols: Range

    @property
    def area(self) -> int:
        return max(0, self.rows[1] - self.rows[0]) * max(0, self.cols[1] - self.cols[0])

    def common(self, other: Box) -> Box:
        """The rectangle that both have, of no area if none."""
        return Box(_common(self.rows, other.rows), _common(self.cols, other.cols))

    def __str__(self) -> str:
        return f"[{self.rows[0]}:{self.rows[1]}][{self.cols[0]}:{self.cols[1]}]"


class Held(Struct):
    """What one rank has of a tensor: its own shard, and what has arrived, with the move that brought it."""

    rank: int
    own: Box
    arrived: list[tuple[int, Box]]

    def take(self, at: int, box: Box) -> None:
        """Notes an arrival. Raises ScheduleError if the rank has a part of it already."""
        if box.common(self.own).area or any(box.common(other).area for _, other in self.arrived):
            found = f"rank {self.rank} has a part of it already"
            raise ScheduleError(f"move {at}: bring {box} to rank {self.rank}", found, "Bring every element once")
        if box.area:
            self.arrived.append((at, box))

    def sources(self, at: int, box: Box) -> tuple[bool, list[int]]:
        """Whether some of a rectangle is the rank's own, and the moves that brought the rest. Raises ScheduleError."""
        own = box.common(self.own).area
        parts = [(move, box.common(other).area) for move, other in self.arrived]
        if own + sum(area for _, area in parts) < box.area:
            found = "it is neither its own nor has it all arrived there by an earlier move"
            raise ScheduleError(
                f"move {at}: read {box} on rank {self.rank}", found, "Put the move that brings it first"
            )
        return bool(own), [move for move, area in parts if area]

    def check_whole(self, whole: Box) -> None:
        """Raises ScheduleError if something is missing at the end."""
        missing = whole.area - self.own.area - sum(box.area for _, box in self.arrived)
        if missing:
            found = f"rank {self.rank} lacks {missing} of {whole.area} elements at the end"
            raise ScheduleError(f"gather {whole}", found, "Every rank must get all of the tensor")


def _common(one: Range, other: Range) -> Range:
    return max(one[0], other[0]), min(one[1], other[1])
