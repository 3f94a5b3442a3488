"""A cache of CUDA graphs of calls, by the addresses of their tensors: one launch in place of many.

A loop calls an operator with the same few addresses again and again. The second call with them is captured, as a caller
could have captured it, and launched as a graph from then on. Calls are chained and posted as before, and words that
grow live on the device (docs/design/0002-device-protocol.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from overweave.ir.plan import Plan
from overweave.ir.schedule import Collective
from overweave.memory.cuda.streams import Captures

TensorAddresses = tuple[int, ...]  # addresses, and of tensors that are copied the allocations they lie in

MOST_GRAPHS = 64  # of one plan: a model of many layers calls one plan with the tensors of each
MOST_SEEN = 256
STALE_CALLS = 1024  # a graph that was not launched in so many calls may be replaced


@dataclass
class _CachedGraph:
    graph: torch.cuda.CUDAGraph
    last_call: int


def may_replay(plan: Plan) -> bool:
    """Return whether calls of a plan may become graphs: it has no NCCL collectives, and no counts, which set sizes."""
    has_collectives = any(isinstance(operation, Collective) for operation in plan.schedule.operations)
    return not has_collectives and plan.problem.has_fixed_sizes


class Replays:
    """The graphs of one plan.

    _graphs: addresses of a call's tensors -> graph. _seen: addresses of calls that have no graph yet.
    """

    def __init__(self) -> None:
        self._graphs: dict[TensorAddresses, _CachedGraph] = {}
        self._seen: dict[TensorAddresses, None] = {}
        self._calls = 0

    def launch(
        self, addresses: TensorAddresses, captures: Captures, enqueue: Callable[..., None], *arguments: object
    ) -> bool:
        """Launch the graph of a call with these addresses, or capture it at the second call. Return whether it has one.

        enqueue: puts the call on a stream, its last argument.
        """
        graph = self.find(addresses)
        if graph is None:
            graph = self.add(addresses, partial(captures.graph, partial(enqueue, *arguments)))
            if graph is None:
                return False
        graph.replay()
        return True

    def find(self, addresses: TensorAddresses) -> torch.cuda.CUDAGraph | None:
        """Return the graph of a call with these addresses; None if there is none. Counts the call."""
        self._calls += 1
        cached = self._graphs.get(addresses)
        if cached is None:
            return None
        cached.last_call = self._calls
        return cached.graph

    def add(
        self, addresses: TensorAddresses, capture: Callable[[], torch.cuda.CUDAGraph]
    ) -> torch.cuda.CUDAGraph | None:
        """Capture the graph if this is the second call with these addresses; return None at the first.

        capture: captures it (memory/cuda/streams.py), before its call begins: the driver may wait for running kernels
        until it has memory for a graph, and no peer's kernels may wait for this call on all SMs meanwhile.
        """
        if not self._is_repeated(addresses) or not self._has_room():
            return None
        return self._graphs.setdefault(addresses, _CachedGraph(capture(), self._calls)).graph

    def _is_repeated(self, addresses: TensorAddresses) -> bool:
        """Return whether a call with these addresses was seen before; remember them."""
        if addresses in self._seen:
            return True
        if len(self._seen) >= MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self._seen[addresses] = None
        return False

    def _has_room(self) -> bool:
        """Return whether a graph can be added; drop the least recently launched one if it is stale."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._graphs, key=lambda addresses: self._graphs[addresses].last_call)
        if self._calls - self._graphs[oldest].last_call < STALE_CALLS:
            return False
        del self._graphs[oldest]
        return True
