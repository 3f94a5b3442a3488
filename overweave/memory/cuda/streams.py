"""The caller's streams as cached objects: `torch.cuda.current_stream` creates a new one at each call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from overweave.compat.torch_names import cuda_getCurrentRawStream
from overweave.ir.pause_gc import without_collection
from overweave.memory.outside_modes import outside_modes_and_pools

# Calls on a workspace follow each other, and so do their graphs: all may use the same temporaries of torch's allocator,
# and the same workspace that cuBLAS keeps for each stream. Two workspaces' calls may run at once: they share neither.


class Captures:
    """Captures graphs into one pool, which lives as long as its first graph.

    drain: waits for the calls in flight before a capture (memory/cuda/workspace.py); None if they wait for no peers.
    """

    def __init__(self, device: torch.device, drain: Callable[[], None] | None) -> None:
        self._device, self._drain = device, drain
        self._stream: torch.cuda.Stream | None = None
        self._first_graph: torch.cuda.CUDAGraph | None = None

    @outside_modes_and_pools
    def graph(self, enqueue: Callable[[torch.cuda.Stream], None]) -> torch.cuda.CUDAGraph:
        """Capture what `enqueue` puts on a stream. Raises whatever it raises."""
        if self._drain is not None:
            self._drain()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        graph, pool = torch.cuda.CUDAGraph(), None if self._first_graph is None else self._first_graph.pool()
        # A graph that Python's garbage collector frees during the capture would invalidate it.
        with torch.cuda.stream(self._stream), without_collection():
            graph.capture_begin(pool, capture_error_mode="thread_local")  # excludes the watcher thread
            try:
                enqueue(self._stream)
            finally:
                graph.capture_end()
        self._first_graph = self._first_graph or graph
        return graph


class Streams(dict[int, torch.cuda.Stream]):
    """Stream handle -> stream object, of one GPU. handle: returns the handle of torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.handle = partial(cuda_getCurrentRawStream, device.index)

    def current(self) -> torch.cuda.Stream:
        """Return torch's current stream: always the same object for the same stream."""
        return self[self.handle()]

    def __missing__(self, handle: int) -> torch.cuda.Stream:
        # ExternalStream(0) is not the default stream but a new one from the pool.
        default = torch.cuda.default_stream(self._device)
        is_default = handle == default.cuda_stream
        return self.setdefault(handle, default if is_default else torch.cuda.ExternalStream(handle, self._device))


# Calls of one GPU, of whatever group, run one after the other.
#
# A call's kernels may hold every SM while they wait for peers. Of two concurrent calls, each could hold the SMs of one
# rank and wait for a kernel of the other call's peer, which gets no SM: a deadlock. One call at a time, in an order
# that all ranks share, ends. So a call of another group, or on another stream, begins on the device after the call
# before it (docs/design/0002-device-protocol.md).


class Chain:
    """The order of calls on one GPU; `Chain.of` keeps one per device.

    lock: held by a thread from `Workspace.enter` to `leave`, while it enqueues a call. last_stream, last_call: stream
    of the last call, and the event recorded behind it. streams: the callers' streams.
    """

    _of: ClassVar[dict[torch.device, Chain]] = {}

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.streams = Streams(device)
        self.last_stream: torch.cuda.Stream | None = None
        self.last_call: torch.cuda.Event | None = None

    @classmethod
    def of(cls, device: torch.device) -> Chain:
        """Return the chain of a GPU of this process."""
        return cls._of.setdefault(device, cls(device))
