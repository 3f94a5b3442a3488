"""CUDA graphs of the calls of one workspace: captured on one stream, into one memory pool.

Calls on a workspace follow each other, and so do their graphs: all may use the same temporaries of torch's allocator,
and the same workspace that cuBLAS keeps for each stream. Two workspaces' calls may run at once: they share neither.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from overweave.ir.pause_gc import without_collection
from overweave.memory.outside_modes import outside_modes_and_pools


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
