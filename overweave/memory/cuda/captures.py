"""Graphs of the calls of one workspace: captured on one stream, into one pool of memory.

Calls on a workspace follow each other, and so do their graphs. What library calls need only while they run may
therefore lie at the same place in all graphs, and so may the memory that a library keeps for every stream it has run
on. Two workspaces' calls may run at once: they share neither.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from overweave.ir.pause_gc import without_collection
from overweave.memory.lasting import lasting


class Captures:
    """Makes graphs. The first one is kept for good: a pool that no graph holds any more would be gone.

    settle: comes before each, where streams of calls in flight may wait for peers (memory/cuda/workspace.py).
    """

    def __init__(self, device: torch.device, settle: Callable[[], None] | None) -> None:
        self._device, self._settle = device, settle
        self._stream: torch.cuda.Stream | None = None
        self._first: torch.cuda.CUDAGraph | None = None

    @lasting
    def graph(self, enqueue: Callable[[torch.cuda.Stream], None]) -> torch.cuda.CUDAGraph:
        """What `enqueue` puts on a stream, as a graph. Raises whatever it raises."""
        if self._settle is not None:
            self._settle()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        graph, pool = torch.cuda.CUDAGraph(), None if self._first is None else self._first.pool()
        # A graph that the collector drops meanwhile would end the capture.
        with torch.cuda.stream(self._stream), without_collection():
            graph.capture_begin(pool, capture_error_mode="thread_local")  # a watcher's calls are no part of it
            try:
                enqueue(self._stream)
            finally:
                graph.capture_end()
        self._first = self._first or graph
        return graph
