"""`TileProgram`: the host's side of kernels that an author fuses by hand with the tile primitives (lang/primitives.py).

The library has the symmetric buffers and the signals, begins each call (credits, epochs), and
bounds every wait. The author launches kernels and, beside them, moves data by copy engine.
SOURCE: TileLink, sections 3.2 (host primitives) and 5.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Literal, Protocol

import torch

from overweave.errors import InputError, OverweaveError
from overweave.lang.mapping import TileChannel
from overweave.memory.board.board import Board
from overweave.memory.group import Group
from overweave.memory.outside_modes import outside_modes_and_pools
from overweave.ops.author.arguments import LAUNCH_OPTIONS
from overweave.ops.call.devices import current, own_device
from overweave.ops.call.groups import GroupLike, group_of, refuse
from overweave.runtime.backends import load
from overweave.runtime.handwritten import (
    MAIN,
    Await,
    ChannelArgument,
    Declared,
    OwnBuffer,
    Part,
    Raise,
    SymmetricBuffer,
    TaskTile,
    TensorArgument,
    TileAction,
    TileEffect,
    TileLaunch,
    TileMove,
    TileRetire,
    TileRows,
    TileStep,
    TileTask,
    TileVoid,
    Uses,
)

__all__ = ["Part", "SymmetricBuffer", "TileCall", "TileProgram", "TileQueue"]

Mode = Literal["p2p", "broadcast"]
TileTensor = Part | torch.Tensor


class TileProgram:
    """Kernels that share symmetric buffers and channels with their peers. Built collectively, alike on all ranks.

    buffers: matrices that peers can address, by name. channels: signals between tiles, by name; each has as many shards
    as the group has ranks. device: where the kernels run, this rank's GPU by default, the CPU where there is none.
    has_kernels: whether calls launch any; without, a CPU needs no interpreter of kernels.

        with program.call() as call:
            call.launch(kernel, grid, x, call.tensor("tokens"), call.channel("gathered"), num_warps=8)

    A call is written down inside the block and runs when it is left: on a GPU its work is enqueued on the caller's
    stream and the block returns; on the CPU it returns when the work is done. All ranks make the same calls in the same
    sequence. Symmetric buffers hold nothing when a call begins, and nothing is kept for the next one.
    Raises InputError for what cannot be, RankMismatch where ranks differ, and a call PeerError for what went wrong:
    after that `overweave.reset()`.
    """

    @outside_modes_and_pools
    def __init__(
        self,
        buffers: Mapping[str, SymmetricBuffer],
        channels: Mapping[str, TileChannel],
        group: GroupLike = None,
        device: torch.device | None = None,
        has_kernels: bool = True,
    ) -> None:
        self._group = group_of(group)
        self.rank, self.world_size = self._group.rank, self._group.world_size
        self.declared = Declared(_named("buffers", buffers, self._group), _named("channels", channels, self._group))
        try:
            self._check()
            self._device = _checked_device(device)
            self.declared.lay_out()
        except OverweaveError as error:
            raise refuse(self._group, error) from None
        digest = blake2b(repr(self.declared).encode(), digest_size=6).hexdigest()
        self._signature = f"tile program {' '.join((*buffers, *channels))} #{digest}".encode()
        with self._group.lock, current(self._device):
            Board.of(self._group).agree(self._signature)
            on_host = "host handwritten" if has_kernels else "host tasks"
            runs = load("gpu handwritten" if self._device.type == "cuda" else on_host)
            self._run = runs(self.declared, self._group, self._device)

    @contextmanager
    def call(self) -> Iterator[TileCall]:
        """One call, made by every rank of the group. What is raised inside the block, the peers hear of."""
        call = TileCall(self)
        with self._group.lock:
            try:
                yield call
            except InputError as error:
                raise refuse(self._group, error) from None
            except OverweaveError:
                raise  # of another call, whose peers know
            except Exception as error:
                refuse(self._group, error)
                raise
            with current(self._device):
                self._run(self._signature, call.steps)

    def _check(self) -> None:
        for name, channel in self.declared.channels.items():
            if not isinstance(channel, TileChannel):
                raise InputError(f"channel {name}", f"got {type(channel).__name__}", "Pass ow.TileChannel")
            if channel.world_size != self.world_size:
                found = f"its tiles have {channel.world_size} shards, the group has {self.world_size} ranks"
                raise InputError(f"channel {name}", found, "Cut the matrix into one shard a rank")
        for name, buffer in self.declared.buffers.items():
            if not isinstance(buffer, SymmetricBuffer):
                raise InputError(f"symmetric buffer {name}", f"got {type(buffer).__name__}", "Pass ow.SymmetricBuffer")
            if any(type(extent) is not int or extent < 1 for extent in (buffer.rows, buffer.cols)):
                found = f"{buffer.rows} x {buffer.cols}"[:60]
                raise InputError(f"symmetric buffer {name}", found, "Give it rows and columns, ints of at least 1")
            dtype: object = buffer.dtype
            if not isinstance(dtype, torch.dtype):
                found = f"dtype {dtype}"[:60]
                raise InputError(f"symmetric buffer {name}", found, "Pass a torch.dtype")


class TileQueue:
    """What one queue of a call does, one thing after the other: the caller's stream, or one beside it."""

    def __init__(self, call: TileCall, name: str) -> None:
        self._call, self._name = call, name

    def launch(
        self,
        kernel: Any,
        grid: int | tuple[int, ...],
        *arguments: Any,
        tile_effects: tuple[TileEffect, ...] = (),
        **options: Any,
    ) -> None:
        """Runs a Triton kernel. arguments: as Triton takes them, and `call.channel`, `call.tensor`, `call.part`.

        options: keyword arguments of the kernel and of the launch. tile_effects: what its tiles read and make, in
        the order of the programs, for `tile_schedule`; they change nothing of the call.
        """
        if any(isinstance(argument, Part) and argument.rank != self._call.rank for argument in arguments):
            found = "it is given a peer's part as a tensor"
            raise InputError(
                f"launch {getattr(kernel, '__name__', kernel)}", found, "Pass call.tensor(...) and push or pull"
            )
        if not callable(getattr(kernel, "warmup", None)) or hasattr(kernel, "configs"):
            found = "it tries configurations, each of which peers would have to follow"
            if not hasattr(kernel, "configs"):
                found = f"a {type(kernel).__name__} is no kernel"
            raise InputError(f"launch {kernel}", found, "Pass a @triton.jit function and its constants")
        grid = checked_launch(kernel, grid, arguments, options)
        self._add(TileLaunch(kernel, grid, arguments, options, tile_effects))

    def rank_compute(
        self, name: str, run: Callable[[OwnBuffer], object], reads: tuple[Uses, ...] = (), makes: tuple[Uses, ...] = ()
    ) -> None:
        """Runs operations of torch in the order of the main queue: `run(own)`, where `own(name)` is this rank's part of
        a symmetric buffer. On a GPU they go to the caller's stream, and the host must not wait for them.

        reads, makes: what they need and store, for `tile_schedule`; they change nothing of the call.
        """
        self._add_task(TileTask(name, run, (TaskTile(reads, makes),)))

    def rank_compute_arriving(
        self,
        name: str,
        run: Callable[[OwnBuffer, Any], object],
        channel: str,
        shards: Mapping[int, tuple[tuple[Uses, ...], tuple[Uses, ...]]],
    ) -> None:
        """Runs operations whose kernels wait, tile by tile, for the shards of a channel: `run(own, channel)`, whose
        tiles wait for the counters of the shards that they read. On the CPU it runs once all shards are there, and its
        channel is None.

        shards: what the tiles of each shard read and make, for `tile_schedule`.
        """
        tiles = (TaskTile(*uses, self._shard(channel, shard)) for shard, uses in shards.items())
        self._add_task(TileTask(name, run, tuple(tiles), channel))

    def _add_task(self, task: TileTask) -> None:
        if self._name != MAIN:
            found = "kernels beside it may hold all SMs"
            raise InputError(f"compute {task.name} in queue {self._name}", found, "Compute it in the main queue")
        self._add(task)

    def rank_rows(self, rows: TileRows) -> None:
        """Works on rows that tables on the device choose: `rows.launch()` where there are kernels, which are told of
        channels and tensors as those of `launch`, and which wait and signal themselves; else `rows.run`.
        """
        self._add(rows)

    def rank_void(self, result: torch.Tensor) -> None:
        """Makes a result NaN if a wait of the call has failed, here or at a peer: work of torch does not know of waits.

        result: contiguous floats, written before. On the CPU such a call raises instead.
        """
        if not isinstance(result, torch.Tensor) or not result.is_contiguous() or not result.is_floating_point():
            raise InputError("void a result", f"got {_described(result)}", "Pass a contiguous tensor of floats")
        self._add(TileVoid(result))

    def rank_copy_data(self, source: TileTensor, target: TileTensor, mode: Mode = "p2p") -> None:
        """Copies a matrix between ranks by copy engine: pulls if `source` is a peer's part, pushes if `target` is.

        source, target: parts of symmetric buffers, or own tensors `[rows, cols]` with elements of a row side by side.
        mode "broadcast": to the same part on every peer; `target` says which. The main queue may copy on this rank,
        but beside kernels that is refused: such a copy needs an SM, and they may hold all.
        """
        targets = [target]
        if mode == "broadcast":
            if not isinstance(target, Part):
                raise InputError("rank_copy_data to every peer", "target is a tensor", "Pass call.part(...)")
            peers = (rank for rank in range(self._call.world_size) if rank != self._call.rank)
            targets = [Part(target.buffer, peer, target.rows, target.cols) for peer in peers]
        elif mode != "p2p":
            raise InputError(f"rank_copy_data, mode {mode!r}", "unknown", "Use p2p or broadcast")
        for one in targets:
            self._call.check_move(self._name, source, one)
            self._add(TileMove(source, one))

    def rank_retire(self, part: Part) -> None:
        """Nobody needs any more what a part of an own symmetric buffer holds, once what this queue did and waited for
        before is over: peers that are then told may write there again, in the same call. On the CPU it becomes NaN."""
        if not isinstance(part, Part) or part.rank != self._call.rank:
            found = _described(part) if isinstance(part, Part | torch.Tensor) else f"got a {type(part).__name__}"
            raise InputError("rank_retire", found, "Pass a part of an own buffer, call.part(...)")
        self._add(TileRetire(part))

    def rank_notify(self, channel: str, tile: int, rank: int | Literal["broadcast"]) -> None:
        """Tells `rank`, or every rank, that a producers' tile is there: what this queue did before is done.

        The tile must be alone on its counter: a queue sets words, it does not count.
        """
        layout = self._call.channel_layout(channel)
        asked = f"rank_notify(channel {channel}, tile {tile}, {rank})"
        if type(tile) is not int or not 0 <= tile < layout.tiles.count:
            raise InputError(asked, f"the channel has {layout.tiles.count} tiles", "Name one of them")
        counter = layout.counter_of(tile)
        if layout.count_of(counter) != 1:
            found = f"{layout.count_of(counter)} tiles share counter {counter}, and a queue can only set it"
            raise InputError(asked, found, "Give the channel as many channels a shard as it has tiles")
        ranks: Sequence[int] = range(self._call.world_size) if rank == "broadcast" else (self._call.check_rank(rank),)
        for one in ranks:
            self._add(Raise(channel, counter, one))

    def rank_wait(self, channel: str, rank: int) -> None:
        """What follows in this queue starts once all producers' tiles of the shard of `rank` are done, on this rank."""
        self._add(self._shard(channel, rank))

    def _shard(self, channel: str, rank: int) -> Await:
        layout, shard = self._call.channel_layout(channel), self._call.check_rank(rank)
        counters = range(shard * layout.channels, (shard + 1) * layout.channels)
        return Await(channel, tuple((counter, layout.count_of(counter)) for counter in counters))

    def _add(self, action: TileAction) -> None:
        self._call.steps.append((self._name, action))


class Program(Protocol):
    """What a call must know of its program."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def declared(self) -> Declared: ...


class TileCall(TileQueue):
    """One call as it is written down; it is its own main queue.

    Queues run beside each other, in the order in which they were written where they share hardware: write what makes
    before what waits for it.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(self, MAIN)
        self.rank, self.world_size = program.rank, program.world_size
        self.steps: list[TileStep] = []
        self._declared = program.declared

    def queue(self, name: str) -> TileQueue:
        """A queue beside the main one, for copies that run while kernels do. The call ends when all queues have."""
        return self if name == MAIN else TileQueue(self, name)

    def channel(
        self,
        name: str,
        producer_table: torch.Tensor | None = None,
        consumer_table: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> ChannelArgument:
        """A channel as a kernel's argument.

        producer_table, consumer_table: a dynamic mapping, int32 `[rows of tiles, 5]` with the columns low, high, rank,
        channel, channel_end; kernels and torch operations on the same stream may fill it. counts: with a
        producer_table, how many tiles add to each counter, int32 `[counters]`.
        """
        layout = self.channel_layout(name)
        for table in (producer_table, consumer_table, counts):
            if table is None:
                continue
            is_tensor = isinstance(table, torch.Tensor)
            if not is_tensor or table.dtype != torch.int32 or not table.is_contiguous():
                found = f"a table of {table.dtype} {list(table.shape)}" if is_tensor else f"a {type(table).__name__}"
                raise InputError(f"channel {name}", found, "Pass contiguous int32 tables")
        if consumer_table is None and not layout.is_static:
            found = "consumers cut another matrix than producers"
            raise InputError(f"channel {name}", found, "Pass a consumer_table")
        if (producer_table is None) != (counts is None):
            raise InputError(f"channel {name}", "one of producer_table and counts", "Pass both or none")
        return ChannelArgument(name, producer_table, consumer_table, counts)

    def tensor(self, name: str) -> TensorArgument:
        """A symmetric buffer as a kernel's argument: its own part and every peer's."""
        self._buffer(name)
        return TensorArgument(name)

    def part(self, name: str, rank: int | None = None) -> Part:
        """A rank's part of a symmetric buffer, this rank's by default; `part[rows, cols]` is a part of it.

        As a kernel's argument, the own part stands for a tensor.
        """
        buffer = self._buffer(name)
        return Part(name, self.check_rank(self.rank if rank is None else rank), (0, buffer.rows), (0, buffer.cols))

    def channel_layout(self, name: str) -> TileChannel:
        """What was declared under a name. Raises InputError."""
        if not isinstance(name, str) or name not in self._declared.channels:
            raise InputError(f"channel {name!r}", "unknown", f"Name one of {', '.join(self._declared.channels)}")
        return self._declared.channels[name]

    def check_rank(self, rank: int) -> int:
        """The rank, if there is one. Raises InputError."""
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise InputError(f"rank {rank}"[:60], f"the group has {self.world_size} ranks", "Name one of them")
        return rank

    def check_move(self, queue: str, source: TileTensor, target: TileTensor) -> None:
        """Both sides have one shape and dtype, and a copy beside kernels is a peer copy. Raises InputError."""
        asked = f"rank_copy_data({_described(source)}, {_described(target)})"
        if not all(isinstance(place, Part | torch.Tensor) for place in (source, target)):
            raise InputError(asked, "that is no place for data", "Pass call.part(...) or a tensor")
        ends = [self._shape_of(asked, place) for place in (source, target)]
        if ends[0] != ends[1]:
            raise InputError(asked, "shapes or dtypes differ", "Copy between matrices of one shape and dtype")
        is_local = all(isinstance(place, torch.Tensor) or place.rank == self.rank for place in (source, target))
        if is_local and queue != MAIN:
            cure = "Copy it in the main queue, before the kernels"
            raise InputError(asked, "a copy on this rank needs an SM, which kernels beside it may hold", cure)

    def _shape_of(self, asked: str, place: TileTensor) -> tuple[tuple[int, ...], torch.dtype]:
        if isinstance(place, Part):
            return place.shape, self._buffer(place.buffer).dtype
        if place.dim() != 2 or place.stride(1) != 1:
            raise InputError(
                asked, f"a tensor {list(place.shape)}", "Pass [rows, cols], elements of a row side by side"
            )
        return tuple(place.shape), place.dtype

    def _buffer(self, name: str) -> SymmetricBuffer:
        if not isinstance(name, str) or name not in self._declared.buffers:
            raise InputError(
                f"symmetric buffer {name!r}", "unknown", f"Name one of {', '.join(self._declared.buffers)}"
            )
        return self._declared.buffers[name]


def _described(place: TileTensor) -> str:
    if isinstance(place, Part):
        return f"{place.buffer}@{place.rank}[{place.rows[0]}:{place.rows[1]},{place.cols[0]}:{place.cols[1]}]"
    return f"tensor {list(place.shape)}" if isinstance(place, torch.Tensor) else type(place).__name__


def _named(what: str, given: object, group: Group) -> dict[str, Any]:
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return dict(given)
    found = f"got {type(given).__name__}, names {str(list(given))[:40]}" if isinstance(given, Mapping) else str(given)
    raise refuse(group, InputError(f"{what} of a tile program", found[:80], "Pass a mapping from names to them"))


def _checked_device(device: object) -> torch.device:
    if isinstance(device, torch.device):
        return device
    if device is not None:
        raise InputError("device of a tile program", f"got {type(device).__name__}", "Pass torch.device(...), or None")
    return own_device()


@lru_cache
def _signature(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function)


def checked_launch(
    kernel: Any, grid: object, arguments: tuple[Any, ...], options: Mapping[str, object]
) -> tuple[int, ...]:
    """The grid of a launch whose arguments fit the kernel. Raises InputError."""
    asked = f"launch {getattr(kernel, '__name__', kernel)}"
    shape = (grid,) if isinstance(grid, int) else grid
    is_grid = isinstance(shape, tuple | list) and 1 <= len(shape) <= 3
    if not is_grid or not all(type(programs) is int and programs >= 0 for programs in shape):  # type: ignore[attr-defined]
        raise InputError(asked, f"grid {str(grid)[:40]}", "Pass the number of programs, or up to three of them")
    named = {name: value for name, value in options.items() if name not in LAUNCH_OPTIONS}
    try:
        _signature(kernel.fn).bind(*arguments, **named)
    except TypeError as error:
        cure = f"Pass the kernel's arguments; of a launch: {', '.join(LAUNCH_OPTIONS)}"
        raise InputError(asked, str(error)[:200], cure) from None
    return tuple(shape)  # type: ignore[arg-type]
