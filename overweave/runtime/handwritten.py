"""A call of kernels that an author fused by hand, as data: what each queue does, in order, on any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from overweave.errors import InputError
from overweave.lang.mapping import TileChannel, Tiles
from overweave.memory.layout import SlotLayout, lay_out_slot

MAIN = "main"  # the queue that is the caller's stream


@dataclass(frozen=True)
class SymmetricBuffer:
    """A matrix `[rows, cols]` of every rank that its peers can address; uninitialised in each call.

    is_shard: its rows are those of one rank's shard, so that a tile's rows count from the start of the tile's shard.
    """

    rows: int
    cols: int
    dtype: torch.dtype
    is_shard: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes of a slot."""
        return self.rows * self.cols * self.dtype.itemsize


@dataclass(frozen=True)
class Part:
    """A rectangle of a symmetric buffer on one rank. `part[rows, cols]`, slices without a step, is a part of it."""

    buffer: str
    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Part:
        rows, cols = index if isinstance(index, tuple) else (index, slice(None))
        return Part(self.buffer, self.rank, _subrange(self.rows, rows), _subrange(self.cols, cols))


@dataclass(frozen=True)
class ChannelArgument:
    """Stands for a channel among a kernel's arguments.

    Tables and counts: of a dynamic mapping, on the kernel's device; None of a static one.
    """

    name: str
    producer_table: torch.Tensor | None = None
    consumer_table: torch.Tensor | None = None
    counts: torch.Tensor | None = None

    @property
    def is_dynamic(self) -> bool:
        """Return whether any part of its mapping is filled at run time."""
        return any(table is not None for table in (self.producer_table, self.consumer_table, self.counts))


@dataclass(frozen=True)
class TensorArgument:
    """Stands for a symmetric tensor among a kernel's arguments."""

    name: str


@dataclass(frozen=True)
class Reads:
    """A matrix on a tile's own rank whose rows the tile reads: the tile's rows, or all.

    tensor: the logical tensor that must lie there. channel: the tile waits for it first; None: for none.
    """

    matrix: str
    tensor: str
    channel: str | None = None
    all_rows: bool = False


@dataclass(frozen=True)
class TileEffect:
    """What tiles of a launch read, store and signal (ops/author/tile_schedule.py derives a Schedule from it).

    tiles: how the output is divided. makes: the matrix that tiles store to; tensor: its logical name. own: a rank
    computes only the tiles of its own shard; else all. tells: the channel that each tile notifies once it is stored.
    mode: the ranks at which tiles are stored and notified, as of `producer_tile_notify`.
    """

    tiles: Tiles
    makes: str
    tensor: str
    reads: tuple[Reads, ...]
    own: bool = False
    tells: str | None = None
    mode: Literal["local", "p2p", "broadcast"] = "local"


@dataclass(frozen=True)
class TileLaunch:
    """Launch of a kernel. options: of Triton, such as num_warps. effects: of its tiles, if the author gives them."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    effects: tuple[TileEffect, ...] = ()

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(getattr(self.kernel, "__name__", self.kernel))


@dataclass(frozen=True)
class TileMove:
    """Copy a rectangle between ranks, or on this one."""

    source: Part | torch.Tensor
    target: Part | torch.Tensor


@dataclass(frozen=True)
class TileNotify:
    """Set a channel's counter on `rank` to its full count, which is one."""

    channel: str
    counter: int
    rank: int


@dataclass(frozen=True)
class TileWait:
    """Wait until counters of a channel on this rank have reached their counts. counts: (counter, count)."""

    channel: str
    counts: tuple[tuple[int, int], ...]


OwnBuffer = Callable[[str], torch.Tensor]  # a symmetric buffer of this rank, by name
AnyBuffer = Callable[[str, int], torch.Tensor]  # of any rank, by name and rank


@dataclass(frozen=True)
class Access:
    """A part of a buffer that a TileTask reads or stores, as a rectangle of the logical tensor `tensor` with origin
    (row, col)."""

    part: Part
    tensor: str
    row: int = 0
    col: int = 0


@dataclass(frozen=True)
class TaskTile:
    """What tiles of a TileTask read and store, if the author says so (ops/author/tile_schedule.py).

    reads: what they load. makes: what they store. Both are upper bounds: which rows are accessed may be known at run
    time alone. shard: the wait, on the task's channel, for the shard that they load; None: they do not wait.
    """

    reads: tuple[Access, ...] = ()
    makes: tuple[Access, ...] = ()
    shard: TileWait | None = None


@dataclass(frozen=True)
class TileTask:
    """Work of torch on this rank: `run` computes or enqueues it, given a getter of the own symmetric buffers.

    channel: its kernels' tiles wait for shards of this channel, and `run` gets it as a second argument. On the CPU the
    task begins when all shards have arrived, and `run` gets None.
    """

    name: str
    run: Callable[..., object]
    tiles: tuple[TaskTile, ...]
    channel: str | None = None


@dataclass(frozen=True)
class Sent:
    """Rows that go to a peer by so many programs, each of which then adds one to a counter there.

    moves: (source, destination) of the rows: upper bounds.
    """

    moves: tuple[tuple[Part | torch.Tensor, Part], ...]
    channel: str
    counter: int
    programs: int = 1

    @property
    def peer(self) -> int:
        """Return the rank that gets them."""
        return self.moves[0][1].rank


@dataclass(frozen=True)
class TileRows:
    """A kernel on rows that tables on the device choose; it waits and signals itself.

    run: the same in plain torch, for CPU ranks that interpret no kernels; it gets symmetric buffers of any rank, after
    the waits of `awaits` and before the signals of `sends`. awaits: (channel, rank whose shard is awaited). reads,
    makes: as of a TileTask.
    """

    name: str
    launch: Callable[[], TileLaunch]
    run: Callable[[AnyBuffer], object]
    awaits: tuple[tuple[str, int], ...] = ()
    sends: tuple[Sent, ...] = ()
    reads: tuple[Access, ...] = ()
    makes: tuple[Access, ...] = ()


@dataclass(frozen=True)
class TileVoid:
    """Fill a result, contiguous floats, with NaN if a wait has failed."""

    result: torch.Tensor


@dataclass(frozen=True)
class TileRetire:
    """Nobody needs what a part of an own symmetric buffer holds: it may be written again in the call."""

    part: Part


TileAction = TileLaunch | TileTask | TileRows | TileVoid | TileMove | TileRetire | TileNotify | TileWait
TileStep = tuple[str, TileAction]  # the queue, and what it does


@dataclass(frozen=True)
class Declared:
    """Buffers and channels of a program, the same on all ranks: name -> buffer, name -> channel."""

    buffers: Mapping[str, SymmetricBuffer]
    channels: Mapping[str, TileChannel]

    def lay_out(self) -> SlotLayout:
        """Lay out buffers and signals in a slot. Raises ScheduleError if there are too many signals."""
        pads = {name: channel.signals for name, channel in self.channels.items()}
        sizes = {name: buffer.size_bytes for name, buffer in self.buffers.items()}
        return lay_out_slot("tile program", pads, sizes)

    def number(self, channel: str) -> int:
        """Return the number of a channel in a timeout report: its position in the order of declaration."""
        return list(self.channels).index(channel)


def _subrange(outer: tuple[int, int], index: object) -> tuple[int, int]:
    """Return the part of a range that a slice selects. Raises InputError for other indices, or a step."""
    if not isinstance(index, slice) or not all(type(end) in (int, type(None)) for end in (index.start, index.stop)):
        found = f"got {str(index)[:40]}"
        raise InputError("take a part of a symmetric buffer", found, "Take slices of rows and columns: part[0:8, 0:4]")
    size = outer[1] - outer[0]
    low, high, step = index.indices(size)
    if step != 1:  # `indices` has raised TypeError for a step that is not an integer
        raise InputError("take a part of a symmetric buffer", f"step {step}", "Take rows and columns without a step")
    return outer[0] + low, outer[0] + max(low, high)
