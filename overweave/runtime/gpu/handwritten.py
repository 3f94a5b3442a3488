"""Kernels fused by hand on GPUs: launched by Triton on the caller's stream, copies and flags on side streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch

from overweave.compat.triton_names import COMPILE_OPTIONS
from overweave.kernels.voided import void_kernel
from overweave.lang.arguments import folded
from overweave.memory.cuda import driver
from overweave.memory.cuda.workspace import Workspace
from overweave.memory.device.protocol import QUEUE_OPERATION
from overweave.memory.group import Group
from overweave.memory.layout import SIGNAL_STRIDE_WORDS, SlotLayout
from overweave.runtime.gpu.call_frame import CallFrame
from overweave.runtime.gpu.launcher import Enqueue, bind_waits, compiled_for
from overweave.runtime.gpu.launcher import Launch as KernelLaunch
from overweave.runtime.handwritten import (
    MAIN,
    ChannelArgument,
    Declared,
    Part,
    TileAction,
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
from overweave.runtime.kernel_calls.call import notify_call, prologue_call, require_peer_access, signal_words
from overweave.runtime.kernel_calls.program import ProgramArguments

VOID_PROGRAMS = 64  # programs


class HandwrittenRun(CallFrame):
    """A program bound to a workspace. A call enqueues its work on the current stream. Created collectively."""

    def __init__(self, declared: Declared, group: Group, device: torch.device) -> None:
        super().__init__(Workspace.of(group, device))
        self._bound = _BoundProgram(declared, declared.lay_out(), self._workspace)
        self._known: set[Any] = set()  # keys of compiled and loaded kernels
        self._events: dict[TileNotify, torch.cuda.Event] = {}

    def __call__(self, signature: bytes, steps: list[TileStep]) -> None:
        """Enqueue a call; it may be captured. Raises RankMismatch, and PeerError if an earlier call failed."""
        self._workspace.board.post(signature)
        self.run_call(partial(self._enqueue, steps))

    def _enqueue(self, steps: list[TileStep], stream: torch.cuda.Stream, is_captured: bool) -> None:
        """Enqueue prologue, fork, all actions and join on a stream."""
        steps = [(queue, action.launch() if isinstance(action, TileRows) else action) for queue, action in steps]
        if not is_captured:
            self._load(steps)
        bound = self._bound
        sides = {queue: self._workspace.stream(queue) for queue, _ in steps if queue != MAIN}
        local = _local_notifies(steps, self._workspace.group.rank)

        bound.launch_prologue(stream.cuda_stream)
        self.fork(stream, sides.values())
        for queue, action in _merged((*steps, *_side_stream_waits(steps))):
            own = sides.get(queue, stream)
            if isinstance(action, TileNotify) and action in local:
                self._events.setdefault(action, torch.cuda.Event()).record(own)
            elif isinstance(action, TileWait):
                self._wait(own, queue, action, local)
            elif isinstance(action, TileNotify) and queue == MAIN:
                bound.notify(own, action)
            else:
                bound.enqueue(own, action)
        self.join(stream, sides.values())

    def _wait(self, stream: torch.cuda.Stream, queue: str, action: TileWait, local: set[TileNotify]) -> None:
        """Enqueue a wait: for an event of this rank, or for memory; in the caller's stream by a kernel, which has a
        deadline."""
        counts = []
        for counter, count in action.counts:
            signal = TileNotify(action.channel, counter, self._workspace.group.rank)
            if signal in local:
                stream.wait_event(self._events[signal])
            else:
                counts.append((counter, count))
        if counts:
            wait = self._bound.wait if queue == MAIN else self._bound.enqueue
            wait(stream, TileWait(action.channel, tuple(counts)))

    def _load(self, steps: list[TileStep]) -> None:
        """Compile and load new kernels while this GPU is idle: loading blocks while a kernel waits for peers."""
        for queue, action in steps:
            if isinstance(action, TileVoid):
                self._load_void(action.result)
            elif isinstance(action, TileNotify) and queue == MAIN:
                self._bound.load_notify(action)
            if not isinstance(action, TileLaunch):
                continue
            arguments, options = self._bound.arguments.of(action)
            key = (id(action.kernel), _specialization_key((*arguments, *options.items())))
            if key not in self._known:
                torch.cuda.synchronize(self._workspace.device)
                compiled_for(action.kernel, arguments, action.grid, options)
                self._known.add(key)

    def _load_void(self, result: torch.Tensor) -> None:
        """Compile and load the kernel that fills a failed result with NaN."""
        key = ("void", result.numel() % 16 == 0, _specialization_key(result))
        if key not in self._known:
            torch.cuda.synchronize(self._workspace.device)
            words = torch.zeros(SIGNAL_STRIDE_WORDS, dtype=torch.int32, device=result.device)  # nothing has failed
            void_kernel[(VOID_PROGRAMS,)](words, result, result.numel(), 1024)
            self._known.add(key)


class _BoundProgram:
    """The memory that kernels and copies of this rank access in a workspace."""

    def __init__(self, declared: Declared, layout: SlotLayout, workspace: Workspace) -> None:
        require_peer_access(workspace, "a kernel that addresses peers")
        heap = self._heap = workspace.lease(layout)
        self._declared, self._layout, self._rank = declared, layout, workspace.group.rank
        self._protocol = signal_words(workspace, heap, layout.signals)
        self.launch_prologue = KernelLaunch(prologue_call(workspace, self._protocol, layout.signals)).start
        self._waits: dict[TileWait, Enqueue] = {}  # wait -> the function that enqueues it
        self._notifies: dict[TileNotify, Enqueue] = {}
        self._bind_wait({0: 0})  # loads the wait kernel now, not in a call
        self._bind_notify(())  # nor this one
        self.arguments = ProgramArguments(declared, layout, heap, self._protocol, self._rank, folded)

    def enqueue(self, stream: torch.cuda.Stream, action: TileAction) -> None:
        """Enqueue an action on a stream."""
        if isinstance(action, TileLaunch):
            arguments, options = self.arguments.of(action)
            with torch.cuda.stream(stream):
                action.kernel[action.grid](*arguments, **(COMPILE_OPTIONS | options))
        elif isinstance(action, TileTask):
            with torch.cuda.stream(stream):
                channel = () if action.channel is None else (self.arguments.channel(action.channel),)
                action.run(self.arguments.own, *channel)
        elif isinstance(action, TileVoid):
            with torch.cuda.stream(stream):
                result, words = action.result, self._protocol.words
                void_kernel[(VOID_PROGRAMS,)](words, result, result.numel(), 1024)
        elif isinstance(action, TileNotify):
            driver.write_value(stream.cuda_stream, self._signal_address(action), 1)
        elif isinstance(action, TileWait):
            for counter, count in action.counts:
                address = self._heap.addresses[self._rank] + self._layout.signal_offset(action.channel, counter)
                driver.wait_value(stream.cuda_stream, address, count)
        elif isinstance(action, TileMove):
            self._move(stream, action)
        else:
            assert isinstance(action, TileRetire)  # rows are launches by now; whoever writes there again waits

    def wait(self, stream: torch.cuda.Stream, action: TileWait) -> None:
        """Enqueue a wait by a kernel, which has a deadline."""
        if action not in self._waits:
            counts = {self._layout.signal(action.channel, counter): count for counter, count in action.counts}
            self._waits[action] = self._bind_wait(counts)
        self._waits[action](stream.cuda_stream)

    def notify(self, stream: torch.cuda.Stream, action: TileNotify) -> None:
        """Enqueue a notify by a kernel, if `load_notify` has prepared one, else by a stream write.

        MEASURED: a stream write in front of kernels holds them up by 5 to 18 us while copies run, a kernel by 2
        (benchmarks/results/experts.h200x2.2026-11-29.txt).
        """
        if action in self._notifies:
            self._notifies[action](stream.cuda_stream)
        else:
            self.enqueue(stream, action)

    def load_notify(self, action: TileNotify) -> None:
        """Compile and load a notify's kernel ahead of a call; a call that is captured first writes by the stream."""
        if action not in self._notifies:
            self._notifies[action] = self._bind_notify((self._signal_address(action),))

    def _bind_notify(self, addresses: tuple[int, ...]) -> Enqueue:
        return KernelLaunch(notify_call(addresses, self._protocol.limits.device)).start

    def _signal_address(self, action: TileNotify) -> int:
        return self._heap.addresses[action.rank] + self._layout.signal_offset(action.channel, action.counter)

    def _bind_wait(self, counts: dict[int, int]) -> Enqueue:
        return bind_waits(counts, QUEUE_OPERATION.value, self._layout.signals, self._protocol)

    def _move(self, stream: torch.cuda.Stream, move: TileMove) -> None:
        """Enqueue a copy: by torch within this rank, by the driver to and from peers."""
        source, target = move.source, move.target
        rows, cols = source.shape
        if not rows * cols:
            return
        if self._is_own(source) and self._is_own(target):
            with torch.cuda.stream(stream):
                self._view(target).copy_(self._view(source), non_blocking=True)
            return
        (source_address, source_pitch), (target_address, target_pitch) = self._address(source), self._address(target)
        row_bytes = cols * self._itemsize(source)
        driver.copy(stream.cuda_stream, source_address, target_address, row_bytes, rows, (source_pitch, target_pitch))

    def _is_own(self, part: Part | torch.Tensor) -> bool:
        return isinstance(part, torch.Tensor) or part.rank == self._rank

    def _itemsize(self, part: Part | torch.Tensor) -> int:
        dtype = part.dtype if isinstance(part, torch.Tensor) else self._declared.buffers[part.buffer].dtype
        return dtype.itemsize

    def _address(self, part: Part | torch.Tensor) -> tuple[int, int]:
        if isinstance(part, torch.Tensor):
            return part.data_ptr(), part.stride(0) * part.element_size()
        buffer = self._declared.buffers[part.buffer]
        pitch = buffer.cols * buffer.dtype.itemsize
        base = self._heap.addresses[part.rank] + self._layout.buffers[part.buffer]
        return base + part.rows[0] * pitch + part.cols[0] * buffer.dtype.itemsize, pitch

    def _view(self, part: Part | torch.Tensor) -> torch.Tensor:
        if isinstance(part, torch.Tensor):
            return part
        return self.arguments.own(part.buffer)[slice(*part.rows), slice(*part.cols)]


def _side_stream_waits(steps: list[TileStep]) -> list[TileStep]:
    """Return the waits of side streams again, for the end of the caller's stream: there they have a deadline."""
    counts: dict[str, dict[int, int]] = {}
    for queue, action in steps:
        if queue != MAIN and isinstance(action, TileWait):
            counts.setdefault(action.channel, {}).update(action.counts)
    return [(MAIN, TileWait(channel, tuple(sorted(of_channel.items())))) for channel, of_channel in counts.items()]


def _local_notifies(steps: list[TileStep], rank: int) -> set[TileNotify]:
    """Return the notifies between queues of this rank, each enqueued before its wait: CUDA events replace them.

    Not of a channel that a kernel gets, since it may wait for the signal in memory.
    """
    notified, awaited = set[TileNotify](), set[TileNotify]()
    kernel_channels = set[str | None]()
    for _, action in steps:
        if isinstance(action, TileNotify) and action.rank == rank and action not in awaited:
            notified.add(action)
        elif isinstance(action, TileWait):
            awaited.update(TileNotify(action.channel, counter, rank) for counter, _ in action.counts)
        elif isinstance(action, TileTask):
            kernel_channels.add(action.channel)
        elif isinstance(action, TileLaunch):
            arguments = (*action.arguments, *action.options.values())
            kernel_channels.update(each.name for each in arguments if isinstance(each, ChannelArgument))
    return {signal for signal in notified if signal.channel not in kernel_channels}


def _merged(steps: Iterable[TileStep]) -> Iterator[TileStep]:
    """Yield the steps, with consecutive waits of a queue for one channel merged."""
    for (queue, channel), several in groupby(steps, key=_channel_awaited):
        if channel is None:
            yield from several
        else:
            counts = (count for _, action in several if isinstance(action, TileWait) for count in action.counts)
            yield queue, TileWait(channel, tuple(counts))


def _channel_awaited(step: TileStep) -> tuple[str, str | None]:
    """Return (queue, the channel that the step waits for, or None)."""
    queue, action = step
    return queue, action.channel if isinstance(action, TileWait) else None


def _specialization_key(value: Any) -> Any:
    """Return what of an argument Triton specializes a kernel for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(_specialization_key, value))
    base = getattr(value, "base", None)
    if isinstance(base, torch.Tensor):  # a descriptor
        return base.dtype, tuple(value.block_shape)
    return getattr(value, "value", value)
