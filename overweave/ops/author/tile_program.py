"""`TileProgram`: the host side of kernels that an author fuses by hand with the tile primitives (lang/primitives.py).

overweave allocates symmetric buffers and signals, synchronises the start of each call (credits, epochs), and
gives every wait a deadline. The author launches kernels and, on other queues, moves data by copy engine.
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
    Access,
    ChannelArgument,
    Declared,
    OwnBuffer,
    Part,
    SymmetricBuffer,
    TaskTile,
    TensorArgument,
    TileAction,
    TileEffect,
    TileLaunch,
    TileMove,
    TileNotify,
    TileRetire,
    TileRows,
    TileStep,
    TileTask,
    TileVoid,
    TileWait,
)

__all__ = ["Part", "SymmetricBuffer", "TileCall", "TileProgram", "TileQueue"]

Mode = Literal["p2p", "broadcast"]
TileTensor = Part | torch.Tensor


class TileProgram:
    """Kernels that share symmetric buffers and channels with their peers. Constructed collectively, alike on all ranks.

    buffers: name -> matrix that peers can address. channels: name -> signals between tiles; each has as many shards
    as the group has ranks. device: where the kernels run, this rank's GPU by default, the CPU where there is none.
    has_kernels: whether calls launch Triton kernels; without them a CPU needs no interpreter.

        with program.call() as call:
            call.launch(kernel, grid, x, call.tensor("tokens"), call.channel("gathered"), num_warps=8)

    The block records a call, which runs when the block is left: on a GPU its work is enqueued on the caller's
    stream and the block returns; on a CPU it returns when the work is done. All ranks make the same calls in the same
    sequence. Symmetric buffers are uninitialised when a call begins, and do not keep their contents for the next.
    Raises InputError for invalid arguments, RankMismatch if ranks differ, and a call PeerError if a wait failed:
    after that call `overweave.reset()`.
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
        self.declared = Declared(
            _mapping_of("buffers", buffers, self._group), _mapping_of("channels", channels, self._group)
        )
        try:
            self._check()
            self._device = _device_of(device)
            self.declared.lay_out()
        except OverweaveError as error:
            raise refuse(self._group, error) from None
        digest = blake2b(repr(self.declared).encode(), digest_size=6).hexdigest()
        self._signature = f"tile program {' '.join((*buffers, *channels))} #{digest}".encode()
        with self._group.lock, current(self._device):
            Board.of(self._group).agree(self._signature)
            host_backend = "host handwritten" if has_kernels else "host tasks"
            backend = load("gpu handwritten" if self._device.type == "cuda" else host_backend)
            self._run = backend(self.declared, self._group, self._device)

    @contextmanager
    def call(self) -> Iterator[TileCall]:
        """Record one call, which every rank of the group makes. An exception in the block is reported to the peers."""
        call = TileCall(self)
        with self._group.lock:
            try:
                yield call
            except InputError as error:
                raise refuse(self._group, error) from None
            except OverweaveError:
                raise  # of another call, which has reported it
            except Exception as error:
                refuse(self._group, error)
                raise
            with current(self._device):
                self._run(self._signature, call.steps)

    def _check(self) -> None:
        """Raise InputError for channels and buffers of other types, sizes or shard counts."""
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
    """Records the work of one queue of a call, which runs in order: on the caller's stream, or on a side stream."""

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
        """Launch a Triton kernel. arguments: as Triton takes them, and `call.channel`, `call.tensor`, `call.part`.

        options: keyword arguments of the kernel and of the launch. tile_effects: what its tiles read and write, in
        the order of the programs, for `tile_schedule` only. Raises InputError for arguments that do not fit.
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
        self,
        name: str,
        run: Callable[[OwnBuffer], object],
        reads: tuple[Access, ...] = (),
        makes: tuple[Access, ...] = (),
    ) -> None:
        """Run torch operations in the order of the main queue: `run(own)`, where `own(name)` is this rank's part of a
        symmetric buffer. On a GPU `run` enqueues them on the caller's stream, and must not synchronise with it.

        reads, makes: what they read and write, for `tile_schedule` only.
        """
        self._add_task(TileTask(name, run, (TaskTile(reads, makes),)))

    def rank_compute_arriving(
        self,
        name: str,
        run: Callable[[OwnBuffer, Any], object],
        channel: str,
        shards: Mapping[int, tuple[tuple[Access, ...], tuple[Access, ...]]],
    ) -> None:
        """Run operations whose kernels wait, tile by tile, for the shards of a channel: `run(own, channel)`, whose
        tiles wait for the counters of the shards that they read. On a CPU it runs after all shards have arrived, and
        `channel` is None.

        shards: shard -> (reads, makes) of its tiles, for `tile_schedule` only.
        """
        tiles = (TaskTile(*uses, self._shard(channel, shard)) for shard, uses in shards.items())
        self._add_task(TileTask(name, run, tuple(tiles), channel))

    def _add_task(self, task: TileTask) -> None:
        if self._name != MAIN:
            found = "kernels beside it may hold all SMs"
            raise InputError(f"compute {task.name} in queue {self._name}", found, "Compute it in the main queue")
        self._add(task)

    def rank_rows(self, rows: TileRows) -> None:
        """Process rows that tables on the device select: by the kernel `rows.launch()`, which waits and signals itself,
        or by `rows.run` on a CPU whose program has no kernels.
        """
        self._add(rows)

    def rank_void(self, result: torch.Tensor) -> None:
        """Fill a result with NaN if a wait of the call has failed, here or on a peer: torch operations see no verdict.

        result: contiguous floats, written earlier in this queue. On a CPU such a call raises instead.
        """
        if not isinstance(result, torch.Tensor) or not result.is_contiguous() or not result.is_floating_point():
            raise InputError("void a result", f"got {_matrix_text(result)}", "Pass a contiguous tensor of floats")
        self._add(TileVoid(result))

    def rank_copy_data(self, source: TileTensor, target: TileTensor, mode: Mode = "p2p") -> None:
        """Copy a matrix between ranks by copy engine: pull if `source` is a peer's part, push if `target` is.

        source, target: parts of symmetric buffers, or own tensors `[rows, cols]` whose rows are contiguous.
        mode "broadcast": push to `target`'s rectangle on every peer. Only the main queue may copy within this rank:
        such a copy needs an SM, and kernels that run beside another queue may hold all. Raises InputError.
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
            found = _matrix_text(part)
            raise InputError("rank_retire", found, "Pass a part of an own buffer, call.part(...)")
        self._add(TileRetire(part))

    def rank_notify(self, channel: str, tile: int, rank: int | Literal["broadcast"]) -> None:
        """Signal `rank`, or every rank, that a producer's tile is ready, once the queue's earlier work is done.

        No other tile may share its counter: a queue sets the word, it cannot add to it. Raises InputError.
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
            self._add(TileNotify(channel, counter, one))

    def rank_wait(self, channel: str, rank: int) -> None:
        """Let later work of this queue wait until all producers' tiles of the shard of `rank` are done."""
        self._add(self._shard(channel, rank))

    def _shard(self, channel: str, rank: int) -> TileWait:
        """Return the wait for all counters of a rank's shard."""
        layout, shard = self._call.channel_layout(channel), self._call.check_rank(rank)
        counters = range(shard * layout.channels, (shard + 1) * layout.channels)
        return TileWait(channel, tuple((counter, layout.count_of(counter)) for counter in counters))

    def _add(self, action: TileAction) -> None:
        self._call.steps.append((self._name, action))


class Program(Protocol):
    """The part of a TileProgram that a call reads."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def declared(self) -> Declared: ...


class TileCall(TileQueue):
    """Records one call. It is its own main queue.

    Queues run concurrently, but may share a hardware queue, which runs work in the order of recording: record
    producers before what waits for them.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(self, MAIN)
        self.rank, self.world_size = program.rank, program.world_size
        self.steps: list[TileStep] = []
        self._declared = program.declared

    def queue(self, name: str) -> TileQueue:
        """Return a queue that runs concurrently with the main one, for copies. The call ends when all queues have."""
        return self if name == MAIN else TileQueue(self, name)

    def channel(
        self,
        name: str,
        producer_table: torch.Tensor | None = None,
        consumer_table: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> ChannelArgument:
        """Return a channel as a kernel's argument.

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
        """Return a symmetric buffer as a kernel's argument: the parts of this rank and of every peer."""
        self._buffer(name)
        return TensorArgument(name)

    def part(self, name: str, rank: int | None = None) -> Part:
        """Return a rank's part of a symmetric buffer, by default this rank's; `part[rows, cols]` is a rectangle of it.

        As a kernel's argument, this rank's part stands for a tensor.
        """
        buffer = self._buffer(name)
        return Part(name, self.check_rank(self.rank if rank is None else rank), (0, buffer.rows), (0, buffer.cols))

    def channel_layout(self, name: str) -> TileChannel:
        """Return the declared channel of that name. Raises InputError if there is none."""
        if not isinstance(name, str) or name not in self._declared.channels:
            raise InputError(f"channel {name!r}", "unknown", f"Name one of {', '.join(self._declared.channels)}")
        return self._declared.channels[name]

    def check_rank(self, rank: int) -> int:
        """Return `rank`. Raises InputError if the group has no such rank."""
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise InputError(f"rank {rank}"[:60], f"the group has {self.world_size} ranks", "Name one of them")
        return rank

    def check_move(self, queue: str, source: TileTensor, target: TileTensor) -> None:
        """Raise InputError if shapes or dtypes differ, or for a copy within this rank on a queue other than main."""
        asked = f"rank_copy_data({_matrix_text(source)}, {_matrix_text(target)})"
        if not all(isinstance(matrix, Part | torch.Tensor) for matrix in (source, target)):
            raise InputError(asked, "that is no place for data", "Pass call.part(...) or a tensor")
        shapes = [self._shape_of(asked, matrix) for matrix in (source, target)]
        if shapes[0] != shapes[1]:
            raise InputError(asked, "shapes or dtypes differ", "Copy between matrices of one shape and dtype")
        is_local = all(isinstance(matrix, torch.Tensor) or matrix.rank == self.rank for matrix in (source, target))
        if is_local and queue != MAIN:
            cure = "Copy it in the main queue, before the kernels"
            raise InputError(asked, "a copy on this rank needs an SM, which kernels beside it may hold", cure)

    def _shape_of(self, asked: str, matrix: TileTensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Return (shape, dtype). Raises InputError for a tensor that is not `[rows, cols]` with contiguous rows."""
        if isinstance(matrix, Part):
            return matrix.shape, self._buffer(matrix.buffer).dtype
        if matrix.dim() != 2 or matrix.stride(1) != 1:
            raise InputError(
                asked, f"a tensor {list(matrix.shape)}", "Pass [rows, cols], elements of a row side by side"
            )
        return tuple(matrix.shape), matrix.dtype

    def _buffer(self, name: str) -> SymmetricBuffer:
        if not isinstance(name, str) or name not in self._declared.buffers:
            raise InputError(
                f"symmetric buffer {name!r}", "unknown", f"Name one of {', '.join(self._declared.buffers)}"
            )
        return self._declared.buffers[name]


def _matrix_text(matrix: TileTensor) -> str:
    if isinstance(matrix, Part):
        return f"{matrix.buffer}@{matrix.rank}[{matrix.rows[0]}:{matrix.rows[1]},{matrix.cols[0]}:{matrix.cols[1]}]"
    return f"tensor {list(matrix.shape)}" if isinstance(matrix, torch.Tensor) else type(matrix).__name__


def _mapping_of(what: str, value: object, group: Group) -> dict[str, Any]:
    """Return a mapping with names as keys as a dict. Raises InputError, of which peers are told."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return dict(value)
    found = f"got {type(value).__name__}, names {str(list(value))[:40]}" if isinstance(value, Mapping) else str(value)
    raise refuse(group, InputError(f"{what} of a tile program", found[:80], "Pass a mapping from names to them"))


def _device_of(device: object) -> torch.device:
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
    """Check that the arguments fit the kernel's signature, and return the grid as a tuple. Raises InputError."""
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
