"""Schedules written by hand: which chunk of a tensor each rank pushes or pulls, or adds up, and in which order.

A `Gather` is a list of moves of chunks, any rank's unlike any other's. Ranks begin with their shards of the tensor's
rows, as `torch.chunk` deals them, and end with all of it. What a move reads must be its rank's own or have arrived
there by an earlier move: that dependence is found, not written. A `Reduction` is such a list for what every rank's
tiles write: ranks begin with a partial of all of it, and end with sums. Templates write such lists too
(schedules/moves/gather_templates.py, reduction_templates.py).
SOURCE: AutoOverlap 5.1: chunks, P2P as push or pull, collectives, dependences as (rank, index).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import ClassVar, Final, Literal, Self, get_args

from msgspec import Struct
from msgspec.structs import replace

from overweave.errors import InputError, ScheduleError
from overweave.ir.plan import LIBRARY
from overweave.ir.schedule import Range
from overweave.schedules.communication import (
    CARRYING_TILES,
    COPIES,
    COPYING_KERNELS,
    EXCHANGES,
    PUSHES,
    TILES,
    Mover,
    common,
)

After = tuple[tuple[int, int], ...]
AnyMover = Mover | Literal["auto"]
AUTO: Final = "auto"
MOST_LANES = 16
MOST_RANGES = 2  # of rows that a rank has: those of a shard, or zigzag
MOST_PROGRAMS = 64  # SMs that a kernel which moves chunks may have


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
    say so already. mover: the back end that carries it; `auto` leaves it to `compile_auto`. One that is none of its
    lane is as if it had one of its own. adds: it is added at the peer as it arrives, in fp32 and in no order, to what
    others put there; a kernel of an operator carries it. among: with mover `library`, the ranks, ascending, whose
    call carries it; none: all. Such Puts of the same ranks that follow each other in the list are one call, of one
    chunk of each rank, and ranks make their calls in the order of the list. origin: of
    an all-to-all, whose rows travel by way of third ranks: the rank's own, or those of the rank that they come from.
    """

    rank: int
    peer: int
    chunk: Chunk
    lane: int = 0
    after: After = ()
    mover: AnyMover = "copy_engine"
    adds: bool = False
    among: tuple[int, ...] = ()
    origin: int | None = None


class Get(Struct, frozen=True):
    """`rank` pulls a chunk from `peer`, by the copy engine; the rest as in Put. in_place: nothing moves, and the sum of
    an operator's kernel reads the peer's partial where it lies.
    """

    rank: int
    peer: int
    chunk: Chunk
    lane: int = 0
    after: After = ()
    mover: AnyMover = "copy_engine"
    in_place: bool = False


class Collective(Struct, frozen=True):
    """What the library carries: of a Gather, one chunk of each rank's own shard, to all, before the kernel's tiles; of
    an AllToAll, one chunk of each block, the same rows on every rank, before the tiles or behind them; of a Reduction,
    the sum of one chunk of each rank's shard, to its rank, or of any chunks, one by one, everywhere, behind the tiles
    and all that is moved.

    It is a move of every rank, and counts as one of each in `after`. Chunks are whole rows, and may be empty.
    """

    chunks: tuple[Chunk, ...]
    after: After = ()


class Sum(Struct, frozen=True):
    """`rank` adds what has arrived for a chunk to what it has of it: from there on it has that sum, and passes it on.

    Addends stand in the order of the lowest rank whose partial they hold, whatever came first. after: as in Put; it
    counts as a move of its rank there. by: who adds: a kernel, or the own tiles of an operator's kernel, which add what
    has arrived as they end. own_last: the own partial stands behind all others.
    """

    rank: int
    chunk: Chunk
    after: After = ()
    by: Literal["kernel", "tiles"] = "kernel"
    own_last: bool = False


GatherMove = Put | Get | Collective
ReductionStep = Put | Get | Sum | Collective  # of a Reduction


class _Moves(Struct, frozen=True):
    """What lists of moves have in common."""

    world_size: int
    moves: tuple[ReductionStep, ...]
    what: ClassVar[str]
    kinds: ClassVar[tuple[type, ...]]

    def __post_init__(self) -> None:
        _check_moves(self.what.replace("_", "-"), self.world_size, self.moves, self.kinds)
        programs: object = self.copy_programs  # type: ignore[attr-defined]
        if type(programs) is not int or not 1 <= programs <= MOST_PROGRAMS:
            raise InputError(f"copy_programs={str(programs)[:40]}", "no such number", f"Give 1 to {MOST_PROGRAMS}")

    def __str__(self) -> str:
        digest = blake2b(repr(self).encode(), digest_size=4).hexdigest()
        return f"{self.what}_by_hand moves={len(self.moves)} #{digest}"

    def of_ranks(self, ranks: Sequence[int]) -> Self:
        """The same without what other ranks move. Raises ScheduleError if these and others reach each other, but by
        the library."""
        kept = set(ranks)
        if len(kept) == self.world_size:
            return self
        moves: list[ReductionStep] = []
        for move in self.moves:
            ends = set() if isinstance(move, Collective) else {move.rank, getattr(move, "peer", move.rank)}
            if ends & kept and ends - kept and not is_by_library(move):
                found = f"a move between ranks {' and '.join(map(str, sorted(ends)))}"
                raise ScheduleError(f"a {self.what} of {len(kept)} ranks alone", found, "Ask for all ranks")
            moves += [move] if not ends or ends & kept else []
        return replace(self, moves=tuple(moves))

    def of_rank(self, rank: int) -> Iterator[int]:
        """Positions of a rank's moves."""
        return (at for at, move in enumerate(self.moves) if isinstance(move, Collective) or move.rank == rank)

    def places(self) -> dict[tuple[int, int], int]:
        """(rank, index) -> position in `moves`."""
        known: dict[tuple[int, int], int] = {}
        counts: Counter[int] = Counter()
        for at, move in enumerate(self.moves):
            for rank in range(self.world_size) if isinstance(move, Collective) else (move.rank,):
                known[rank, counts[rank]] = at
                counts[rank] += 1
        return known


class Gather(_Moves, frozen=True):
    """Moves after which every rank of `world_size` has all of a tensor. They stand in the order of their launch, and
    tiles run in that order too: what the last move that they need brings comes last.

    A move waits for the moves that bring what it reads, and for those in its `after`; a tile for those that bring its
    rows. copy_programs: SMs of the kernel that carries moves, if one does. ranges: of how many ranges of rows a shard
    consists (`ir/shards.py`: owned_rows): two are zigzag. Raises InputError for what is no list of moves; `compile`
    raises ScheduleError for moves that leave a gap, and for a mover that cannot carry one.
    """

    moves: tuple[GatherMove, ...]
    copy_programs: int = 16
    ranges: int = 1
    what: ClassVar[str] = "gather"
    kinds: ClassVar[tuple[type, ...]] = (Put, Get, Collective)

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.ranges) is not int or not 1 <= self.ranges <= MOST_RANGES:
            raise InputError(f"ranges={str(self.ranges)[:40]}", "no such number", f"Give 1 to {MOST_RANGES}")


class Reduction(_Moves, frozen=True):
    """Moves and sums after which every rank of `world_size` has its shard of the sum of all ranks' tensors, or, with
    `everywhere`, all of that sum, the same bits on each.

    Ranks begin with what their tiles write, a partial of the whole tensor. A Put or Get passes on what its source has
    of a chunk at that place in the list: its own partial, or its last `Sum`. What arrives lies beside, until a Sum, or
    the end, adds it. What holds every rank's partial is the sum, and takes the place of whatever its receiver has.
    Tiles run in the order of the moves that send what they write. Raises InputError for what is no list of moves;
    `compile` raises ScheduleError where something is added twice, left out, or added differently on different ranks.
    """

    everywhere: bool = False
    copy_programs: int = 16
    what: ClassVar[str] = "reduction"
    kinds: ClassVar[tuple[type, ...]] = (Put, Get, Sum, Collective)


class AllToAll(_Moves, frozen=True):
    """Moves after which block s of every rank p is what was block p of rank s. Blocks are equal numbers of rows.

    A chunk names rows of its peer's block, as their sender has them; they land in the sender's block there. Where a Put
    names an origin they may be of a third rank's block: then they lie beside, until a Put of that origin passes on what
    one Put has brought. sends: of a tensor that tiles write, which run in the order of sending; else of one that they
    read, in the order of arrival.
    The library may carry a part, by a `Collective`. Raises InputError for what is no list of moves; `compile` raises
    ScheduleError where something is left out or twice.
    """

    moves: tuple[Put | Collective, ...]
    sends: bool = False
    copy_programs: int = 16
    what: ClassVar[str] = "all_to_all"
    kinds: ClassVar[tuple[type, ...]] = (Put, Collective)


Written = Gather | Reduction | AllToAll


def _check_moves(what: str, world_size: object, moves: object, kinds: tuple[type, ...]) -> None:
    names = ", ".join(kind.__name__ for kind in kinds)
    if type(world_size) is not int or world_size < 1:
        raise InputError(f"a {what} by hand", f"world_size {world_size}"[:60], "Pass how many ranks the group has")
    if not isinstance(moves, tuple):
        raise InputError(f"a {what} by hand", f"its moves are a {type(moves).__name__}", f"Pass a tuple of {names}")
    for at, move in enumerate(moves):
        asked = f"move {at} of a {what} by hand"
        if not isinstance(move, kinds):
            raise InputError(asked, f"it is a {type(move).__name__}", f"Pass {names}")
        chunks: Iterable[object] = move.chunks if isinstance(move, Collective) else (move.chunk,)  # type: ignore[attr-defined]
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise InputError(asked, f"its chunk is a {type(chunk).__name__}", "Pass Chunk((low, high))")
        if getattr(move, "origin", None) is not None and what != "all-to-all":
            raise InputError(asked, "it names an origin", "Leave it out: rows of an all-to-all alone have one")
        for name in ("rank", "peer", "lane"):
            number = getattr(move, name, 0)
            if type(number) is not int:
                raise InputError(asked, f"its {name} is a {type(number).__name__}", "Pass an int")
        if not _are_pairs(move.after):  # type: ignore[attr-defined]
            raise InputError(asked, f"after={move.after}"[:60], "Pass a tuple of (rank, index)")  # type: ignore[attr-defined]
        mover = getattr(move, "mover", AUTO)
        if mover not in (*get_args(Mover), AUTO):
            raise InputError(asked, f"mover {str(mover)[:40]!r}", f"Name one of {', '.join(get_args(Mover))}")


def _are_pairs(after: object) -> bool:
    pairs: tuple[object, ...] = after if isinstance(after, tuple) else (None,)
    return all(isinstance(pair, tuple) and [type(number) for number in pair] == [int, int] for pair in pairs)


def movers_in(written: Written) -> frozenset[str]:
    """The back ends that carry its moves, `auto` too."""
    return frozenset(move.mover for move in written.moves if isinstance(move, Put | Get))


def settled(written: Written, mover: Mover) -> Written:
    """The same, its Puts carried by `mover` where that is left open; Gets are the copy engine's."""

    def one(move: GatherMove | ReductionStep) -> GatherMove | ReductionStep:
        if not isinstance(move, Put | Get) or move.mover != AUTO:
            return move
        return replace(move, mover=mover if isinstance(move, Put) else "copy_engine")

    return replace(written, moves=tuple(map(one, written.moves)))


def earlier(places: Mapping[tuple[int, int], int], at: int, named: tuple[int, int]) -> int:
    """The position of the move that the one at `at` is to come after. Raises ScheduleError if it is no earlier one."""
    place = places.get(named)
    if place is None or place >= at:
        found = "there is no such move" if place is None else "that move stands later"
        raise ScheduleError(f"move {at} after move {named[1]} of rank {named[0]}", found, "Name an earlier move")
    return place


class Box(Struct, frozen=True):
    """A rectangle with both sides known. Never empty where it is held."""

    rows: Range
    cols: Range

    @property
    def area(self) -> int:
        return max(0, self.rows[1] - self.rows[0]) * max(0, self.cols[1] - self.cols[0])

    def common(self, other: Box) -> Box:
        """The rectangle that both have, of no area if none."""
        return Box(common(self.rows, other.rows), common(self.cols, other.cols))

    def __str__(self) -> str:
        return f"[{self.rows[0]}:{self.rows[1]}][{self.cols[0]}:{self.cols[1]}]"


def _first_row(arrived: tuple[int, Box]) -> int:
    return arrived[1].rows[0]


class RankRows(Struct):
    """What one rank has of a tensor: its own rows, in the order in which it holds them, and what has arrived, with the
    move that brought it. tallest: rows of the tallest of these.
    """

    rank: int
    owned: tuple[Range, ...]
    cols: Range
    arrived: list[tuple[int, Box]] = []  # by their first rows
    tallest: int = 0

    def own_area(self, box: Box) -> int:
        return sum(box.common(Box(rows, self.cols)).area for rows in self.owned)

    def owns(self, rows: Range) -> bool:
        """Whether rows lie within one of the rank's own ranges. None lie within any of those that they border on."""
        return any(lo <= rows[0] <= rows[1] <= hi for lo, hi in self.owned)

    def place(self, rows: Range) -> Range:
        """Where rows of an own range lie in the rank's tensor, which holds its ranges one below the other."""
        first = 0
        for lo, hi in self.owned:
            if lo <= rows[0] and rows[1] <= hi:
                return rows[0] - lo + first, rows[1] - lo + first
            first += hi - lo
        raise AssertionError(f"rank {self.rank} owns no range with rows {rows}")

    def take(self, at: int, box: Box) -> None:
        """Notes an arrival. Raises ScheduleError if the rank has a part of it already."""
        if self.own_area(box) or any(box.common(other).area for _, other in self._near(box)):
            found = f"rank {self.rank} has a part of it already"
            raise ScheduleError(f"move {at}: bring {box} to rank {self.rank}", found, "Bring every element once")
        if box.area:
            insort(self.arrived, (at, box), key=_first_row)
            self.tallest = max(self.tallest, box.rows[1] - box.rows[0])

    def _near(self, box: Box) -> list[tuple[int, Box]]:
        """Of what has arrived, all that may share a row with a rectangle."""
        first = bisect_right(self.arrived, box.rows[0] - self.tallest, key=_first_row)
        return self.arrived[first : bisect_left(self.arrived, box.rows[1], key=_first_row)]

    def sources(self, at: int, box: Box) -> tuple[bool, list[int]]:
        """Whether some of a rectangle is the rank's own, and the moves that brought the rest. Raises ScheduleError."""
        own = self.own_area(box)
        parts = [(move, box.common(other).area) for move, other in self._near(box)]
        if own + sum(area for _, area in parts) < box.area:
            found = "it is neither its own nor has it all arrived there by an earlier move"
            raise ScheduleError(
                f"move {at}: read {box} on rank {self.rank}", found, "Put the move that brings it first"
            )
        return bool(own), [move for move, area in parts if area]

    def check_whole(self, whole: Box) -> None:
        """Raises ScheduleError if something is missing at the end."""
        missing = whole.area - self.own_area(whole) - sum(box.area for _, box in self.arrived)
        if missing:
            found = f"rank {self.rank} lacks {missing} of {whole.area} elements at the end"
            raise ScheduleError(f"bring {whole} to all ranks", found, "Bring every element once")


# Which back ends can carry which exchange of a kernel's tensor, and why the others cannot.
#
# What a schedule knows is judged here, before anything is planned; what a kernel's text adds, by the compiler;
# alignment, residency and races, by the proof of the plan.


MOVERS: tuple[Mover, ...] = ("copy_engine", *COPYING_KERNELS, *CARRYING_TILES)  # that reach a peer's memory

ENGINE: Final = "copy_engine"
PULLS = "a peer's shard is there only once the peer has said so, and what kernels carry waits for nothing"
REGISTERS = "a tile is stored from registers, and its rows are no longer than it is wide: too short for bulk copies"
FORWARDS = "what ranks pass on would wait for tiles of peers, which wait for what is passed on"
_OPEN = "it is left open, and only compile_auto chooses"
_COLUMNS = "kernels move whole rows"
_TRAVELS = "it has to arrive first, and what kernels carry waits for nothing but tiles of its own rank"
_AFTER = "it comes after another move, and what kernels carry waits for nothing but tiles of its own rank"


def check_ends(asked: str, move: Put | Get, world_size: int) -> None:
    """Raises ScheduleError for a move that is not between two ranks, or in no lane."""
    ranks, lanes = range(world_size), max(MOST_LANES, world_size)
    if move.rank not in ranks or move.peer not in ranks or move.rank == move.peer:
        raise ScheduleError(asked, f"it moves between ranks {move.rank} and {move.peer}", "Name two ranks of the group")
    if not 0 <= move.lane < lanes:
        raise ScheduleError(asked, f"lane {move.lane}", f"Use lanes 0 to {lanes - 1}")
    if isinstance(move, Put) and move.among:
        are_ranks = list(move.among) == sorted({*move.among}.intersection(ranks))
        if not is_by_library(move) or not are_ranks or not {move.rank, move.peer} <= {*move.among}:
            found = f"among={move.among}"[:60]
            raise ScheduleError(asked, found, "Name ranks in ascending order, both its own among them, of a library's")


def is_by_library(move: object) -> bool:
    """Whether the library carries a move between two ranks."""
    return isinstance(move, Put) and move.mover == LIBRARY


def several_lanes(written: Written) -> bool:
    moves = (move for move in written.moves if isinstance(move, Put | Get) and move.mover == ENGINE)
    return len({move.lane for move in moves}) > 1


def queue_of(move: Put | Get, has_lanes: bool) -> str:
    """Where a move of a list stands. has_lanes: whether those of the copy engine are in several lanes."""
    if move.mover in COPYING_KERNELS:
        return PUSHES
    if move.mover in CARRYING_TILES:
        return TILES
    if is_by_library(move):
        return EXCHANGES
    return f"{COPIES}.{move.lane}" if has_lanes else COPIES


def move_obstacle(move: Put | Get, box: Box, whole: Box, is_own: bool, is_written: bool) -> str:
    """Why its back end cannot carry a move of a list; empty if it can.

    is_own: nothing of it has come from a peer. is_written: tiles write what moves.
    """
    if move.mover == AUTO:
        return _OPEN
    if move.mover == ENGINE or (is_by_library(move) and not getattr(move, "adds", False)):
        return ""
    if isinstance(move, Get):
        return PULLS
    if box.cols != whole.cols:
        return _COLUMNS
    if not is_own:
        return _TRAVELS
    if move.after:
        return _AFTER
    return REGISTERS if is_written and move.mover == "bulk_tiles" else ""
